"""The end of the data fetcher process: termination, signals, errors, and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
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
import torch

from tests.support import ROOT
from tests.support.bounded import wait_until
from tests.support.poptorch_data import FORK, Hung, Numbers, epoch
from tests.support.poptorch_models import options
from tests.support.refused import rejects

pytestmark = pytest.mark.usefixtures("processes")

SDK = Path(poptorch.__file__).parent.parent
DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture(autouse=True, scope="module")
def _resource_tracker():
    """Start the resource tracker here: Python keeps it running, which is not a leak of a test."""
    resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def _leaves_no_file(tmp_path, monkeypatch):
    """Check that no descriptors, temporary files and shared memory segments are left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(list(DESCRIPTORS.iterdir()))
    yield
    gc.collect()  # the traceback of an error holds objects
    assert not list(tmp_path.iterdir())
    assert not list(Path("/dev/shm").glob(f"*{os.getpid()}*"))
    assert wait_until(lambda: len(list(DESCRIPTORS.iterdir())) <= before, within_s=2)


def accessor(dataset, **kwargs):
    return poptorch.AsynchronousDataAccessor(dataset, **{**FORK, **kwargs})


def pid_of(accessor):
    return accessor._fetcher._process.pid


def has_ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def loader(samples=1000):
    arguments = {"num_workers": 1, "mode": poptorch.DataLoaderMode.Async, "async_options": FORK}
    return poptorch.DataLoader(options(), Numbers(samples), **arguments)


@pytest.fixture
def start():
    """Run a function in its own process group; return its pid and the connection it sends to."""
    context = multiprocessing.get_context("fork")
    started = []

    def run(program):
        ours, theirs = context.Pipe()
        process = context.Process(target=in_own_group, args=(program, theirs))
        started.append((process, ours))
        process.start()
        theirs.close()
        assert ours.poll(30)
        assert ours.recv() == "started"
        return process.pid, ours

    yield run
    for process, ours in started:
        process.kill()
        process.join(20)
        process.close()
        ours.close()


def in_own_group(program, connection):
    os.setsid()
    torch.set_num_threads(1)
    program(connection)


def test_terminate_ends_the_process_by_request_and_can_be_repeated_and_so_does_deletion():
    data = accessor(poptorch.DataLoader(options(), Numbers(50), num_workers=1))
    first = next(iter(data))
    process = data._fetcher._process
    data.terminate()
    data.terminate()
    assert process.exitcode == 0  # by request, not by a signal
    assert first.tolist() == [[0, 0]], "the last element stays readable"
    data = loader(5)
    pid = pid_of(data._accessor)
    del data
    assert wait_until(lambda: has_ended(pid))


@pytest.mark.parametrize("workers", [0, 1])
def test_terminate_interrupts_a_hung_data_set(monkeypatch, workers):
    monkeypatch.setattr("poptorch.data.accessor._GRACE_S", 0.3)
    data = accessor(poptorch.DataLoader(options(), Hung(5), num_workers=workers))
    assert int(next(iter(data))[0, 0]) == 0
    family = [pid_of(data), *(child.pid for child in psutil.Process(pid_of(data)).children())]
    data.terminate()
    assert wait_until(lambda: all(map(has_ended, family)), within_s=8)


def test_killed_fetcher_and_a_data_set_that_cannot_be_pickled_raise_error():
    data = accessor(poptorch.DataLoader(options(), Numbers(50)), buffer_size=2)
    next(iter(data))
    os.kill(pid_of(data), signal.SIGKILL)
    rejects(AssertionError, "ended with exit code -9", epoch, data)
    data.terminate()
    strategies = poptorch.SharingStrategy
    for data, strategy in (
        ((each for each in range(3)), strategies.SharedMemory),
        ([lambda: 3], strategies.FileSystem),
    ):
        rejects(poptorch.Error, "picklable", accessor, data, sharing_strategy=strategy)


def is_interrupted(connection):
    try:
        for number, _ in enumerate(loader()):
            if number == 0:
                connection.send("started")
            time.sleep(0.2)
    except KeyboardInterrupt:
        connection.send("interrupted")


def continues(connection):
    data = loader()
    samples = iter(data)
    try:
        connection.send("started")
        for _ in range(200):  # a signal just before a long sleep would be handled only at its end
            time.sleep(0.1)
    except KeyboardInterrupt:
        connection.send([len(epoch(samples)), len(epoch(data))])


def waits(connection):
    samples = iter(loader())
    connection.send("started")
    time.sleep(20)
    next(samples)


def test_loading_continues_if_the_program_handles_ctrl_c(start):
    pid, connection = start(continues)
    os.killpg(pid, signal.SIGINT)
    assert connection.poll(20)
    assert connection.recv() == [1000, 1000]


@pytest.mark.parametrize(("program", "end"), [(is_interrupted, signal.SIGINT), (waits, signal.SIGKILL)])
def test_a_program_that_ctrl_c_or_a_signal_ends_leaves_no_process(start, program, end):
    pid, connection = start(program)
    family = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    assert len(family) == 2
    if end == signal.SIGINT:
        os.killpg(pid, end)
        assert connection.poll(20)
        assert connection.recv() == "interrupted"
    else:
        os.kill(pid, end)
    assert wait_until(lambda: all(map(has_ended, family)))


def test_program_exit_ends_its_fetcher_and_missing_main_guard_raises_error(tmp_path_factory):
    program = tmp_path_factory.mktemp("program") / "unguarded.py"
    program.write_text(
        "import poptorch\nfrom tests.support.poptorch_data import FORK, Numbers\n"
        "left = poptorch.AsynchronousDataAccessor(Numbers(1000), **FORK)\n"
        "next(iter(left))\n"
        "poptorch.AsynchronousDataAccessor(Numbers(3), sharing_strategy=poptorch.SharingStrategy.SharedMemory)\n"
    )
    paths = os.pathsep.join([str(SDK), str(ROOT)])
    command, environment = [sys.executable, str(program)], {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1
    assert 'needs `if __name__ == "__main__":`' in done.stderr
