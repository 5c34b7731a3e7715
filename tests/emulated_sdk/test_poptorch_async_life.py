"""The life of the process that loads asynchronously, and how it ends (contract 1.9, 11 "dataloader")."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import resource_tracker
from pathlib import Path

import poptorch
import psutil
import pytest
from bounded import wait_until
from poptorch._data import fetcher_process
from poptorch_data import FORK, Hung, Numbers, epoch
from poptorch_models import options

SDK = Path(poptorch.__file__).parent.parent
DESCRIPTORS = Path("/proc/self/fd")
# Counts on to 1000 batches; says when it has begun.
PROGRAM = """
import sys
import poptorch
from poptorch_data import FORK, Numbers, numbers
opts = poptorch.Options()
data = poptorch.DataLoader(opts, Numbers(1000), num_workers=1, mode=poptorch.DataLoaderMode.Async, async_options=FORK)
"""


@pytest.fixture(autouse=True, scope="module")
def _resource_tracker():
    """Python keeps it for all who come later: it is not what a test leaves behind."""
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def _leaves_no_file(tmp_path, monkeypatch):
    """Descriptors, temporary files and segments of shared memory are given back."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(list(DESCRIPTORS.iterdir()))
    yield
    gc.collect()  # an error holds what it came through
    assert not list(tmp_path.iterdir())
    assert not list(Path("/dev/shm").glob(f"*{os.getpid()}*"))
    assert wait_until(lambda: len(list(DESCRIPTORS.iterdir())) <= before, within_s=2)


def accessor(dataset, **kwargs):
    return poptorch.AsynchronousDataAccessor(dataset, **{**FORK, **kwargs})


def pid_of(accessor):
    return accessor._fetcher._process.pid


def has_ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def start():
    """Start a program in a process group of its own."""
    started = []

    def run(program):
        paths = os.pathsep.join([str(SDK), str(Path(__file__).parent)])
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM + program],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout.readline() == "begun\n", process.communicate()[1]
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=20)


def test_termination_is_prompt_and_can_be_repeated():
    data = accessor(poptorch.DataLoader(options(), Numbers(50), num_workers=1))
    next(iter(data))
    pid, began = pid_of(data), time.monotonic()
    data.terminate()
    data.terminate()
    assert has_ended(pid)
    assert time.monotonic() - began < 5


def test_what_was_given_outlives_termination():
    data = accessor(Numbers(5))
    first = next(iter(data))
    data.terminate()
    assert first.tolist() == [0, 0]


def test_deletion_ends_the_process():
    data = poptorch.DataLoader(options(), Numbers(5), mode=poptorch.DataLoaderMode.Async, async_options=FORK)
    pid = pid_of(data._accessor)
    del data
    assert wait_until(lambda: has_ended(pid))


def test_an_iteration_broken_off_by_an_error_of_the_program_ends(run_python):
    run_python(
        f"import sys; sys.path[:0] = [{str(SDK)!r}, {str(Path(__file__).parent)!r}]\n"
        + PROGRAM
        + "import psutil\nnext(iter(data))\nassert len(psutil.Process().children(recursive=True)) == 2"
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_hung_data_set_is_interrupted(monkeypatch, workers):
    monkeypatch.setattr(fetcher_process, "_GRACE_S", 0.3)
    data = accessor(poptorch.DataLoader(options(), Hung(5), num_workers=workers))
    assert int(next(iter(data))[0, 0]) == 0
    family = [pid_of(data), *(child.pid for child in psutil.Process(pid_of(data)).children())]
    data.terminate()
    assert wait_until(lambda: all(map(has_ended, family)), within_s=8)


def test_a_killed_process_is_told():
    data = accessor(poptorch.DataLoader(options(), Numbers(50)), buffer_size=2)
    next(iter(data))
    os.kill(pid_of(data), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(AssertionError, match="ended with exit code -9"):
        epoch(data)
    assert time.monotonic() - began < 5
    data.terminate()


def test_a_data_set_that_cannot_be_sent_is_told():
    with pytest.raises(poptorch.Error, match="picklable"):
        accessor((number for number in range(3)), sharing_strategy=poptorch.SharingStrategy.SharedMemory)
    with pytest.raises(poptorch.Error, match="picklable"):
        accessor([lambda: 3], sharing_strategy=poptorch.SharingStrategy.FileSystem)


def test_ctrl_c_ends_what_the_program_ends(start):
    process = start(
        "for batch in data:\n    print('begun', flush=True); sys.stdin.read(0); import time; time.sleep(0.2)"
    )
    family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(family) == 2
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert errors.count("KeyboardInterrupt") == 1
    assert wait_until(lambda: all(map(has_ended, family)))


def test_a_program_may_go_on_after_ctrl_c(start):
    process = start(
        """
import time
samples = iter(data)
print("begun", flush=True)
try:
    time.sleep(20)
except KeyboardInterrupt:
    print(sum(sum(numbers(sample)) for sample in samples), sum(sum(numbers(sample)) for sample in data))
"""
    )
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert output.split() == [str(1000 * 999 // 2)] * 2, errors


def test_a_killed_program_leaves_no_process(start):
    process = start("samples = iter(data)\nprint('begun', flush=True)\nimport time; time.sleep(20)")
    family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    assert wait_until(lambda: all(map(has_ended, family)))


def test_a_program_without_a_guard_is_told_why(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unguarded")
    (folder / "unguarded.py").write_text(PROGRAM.replace("FORK)", "{'sharing_strategy': 0})"))
    paths = os.pathsep.join([str(SDK), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, str(folder / "unguarded.py")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert 'needs `if __name__ == "__main__":`' in done.stderr
