"""Run folders with several commands at a time, after commands that end with a mistake, and their leases."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence

import pytest

from raypod import train
from raypod.__main__ import main
from raypod.api import training
from raypod.errors import ClusterError, FolderLost, LeaseHeld, LeaseLost
from raypod.plan.resolve import from_values
from raypod.runs import claim, lease, run_folder, run_state
from raypod.runs.lease import Lease
from raypod.system import files
from tests.support.bounded import COMMAND_S, wait_until

Capture = pytest.CaptureFixture[str]
QUICK = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--lr-schedule", "constant"]


def start(folder: Path, *flags: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    line = [*prefix, sys.executable, "-m", "raypod.train", *QUICK, *flags]
    variables, pipe = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, subprocess.PIPE
    return subprocess.Popen(line, cwd=str(folder), env=variables, stdout=pipe, stderr=pipe, text=True)


def tree(folder: Path) -> Dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def test_runs_that_start_at_the_same_time_get_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-120000")
    config = from_values({})

    def enter(_: int) -> claim.Claim:
        return claim.claim(config, run_folder.choose(config), take_over=False, log=print)

    with ThreadPoolExecutor(20) as pool:
        claims = list(pool.map(enter, range(20)))
    assert (len({each.folder for each in claims}), len(list((tmp_path / "runs").iterdir()))) == (20, 20)
    for each in claims:
        with each:
            pass


MISTAKES = [
    ["--device", "ipu"],
    ["--model", "no_such_module:make"],
    ["--resume", "nowhere"],
    ["--dataset", "imagefolder", "--data-dir", "nowhere"],
    ["--popart", "noSuchOption=true", "--num-instances", "1"],  # the SDK finds it in the first call
    ["--norm", "group", "--model", "without_norms:make"],
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, empty, and an importable model without batch normalization."""
    modules = tmp_path / "modules"
    modules.mkdir()
    text = "import poptorch\nimport torch\n\n\ndef make(channels, classes):\n    return torch.nn.Flatten()\n"
    (modules / "without_norms.py").write_text(text)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    sys.modules.pop("without_norms", None)


@pytest.mark.parametrize("flags", MISTAKES, ids=lambda flags: flags[-1])
@pytest.mark.parametrize("more", [[], ["--run-dir", "a/b"]], ids=["default", "named"])
def test_a_mistake_leaves_nothing(flags: List[str], more: List[str], here: Path, capsys: Capture) -> None:
    assert (train.main([*QUICK, *flags, *more]), len(capsys.readouterr().err.splitlines())) == (2, 1)
    assert not tree(here)


def test_mistakes_found_later_leave_nothing(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    (here.parent / "storage").mkdir()  # of a first call
    flags = ["--popart", "noSuchOption=true", "--num-instances", "1", "--storage-path", f"file://{here.parent}/storage"]
    assert train.main([*QUICK, *flags]) == 2
    assert not tree(here.parent / "storage")
    cluster, head = here.parent / "cluster.yaml", "{type: local, head_ip: 127.0.0.5}"
    cluster.write_text(f"provider: {head}\nhead_start_ray_commands: [ray start --head --port=9]\n")
    assert train.main(["--device", "emulated", "--cluster", str(cluster)]) == 2
    assert "no Ray cluster is running" in capsys.readouterr().err
    assert not tree(here)
    monkeypatch.setenv("EMULATED_POD_COMPILE", "yes")  # an unknown value
    test_a_mistake_leaves_nothing([], [], here, capsys)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("flags", [MISTAKES[1], MISTAKES[-1]], ids=lambda flags: flags[-1])
def test_a_detached_mistake_leaves_nothing(flags: List[str], here: Path, capsys: Capture) -> None:
    test_a_mistake_leaves_nothing(flags, ["--detach"], here, capsys)


def test_a_mistake_leaves_an_existing_run_as_it_was(here: Path) -> None:
    (here.parent / "modules" / "changing.py").write_text(
        "import pathlib, torch\n\n\ndef make(folder):\n"
        "    value = float(pathlib.Path(folder, 'value').read_text())\n"
        "    class Data(list):\n        fingerprint = str(value)\n"
        "    return Data((torch.full((1, 8, 8), value), i % 2) for i in range(64)), [], 2\n"
    )
    value = here.parent / "value"
    value.write_text("1")
    flags = [*QUICK, "--dataset", "changing:make", "--data-dir", str(here.parent), "--run-dir", "run"]
    assert train.main([*flags, "--updates", "2"]) == 0
    before = tree(here)
    value.write_text("2")  # found by the instances, after the files of the run were written
    assert (train.main([*flags, "--updates", "3", "--resume", "run"]), tree(here)) == (2, before)
    assert train.main([*flags, "--updates", "3", "--resume", "run", "--device", "ipu"]) == 2
    assert tree(here) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("at", ["mkdir", "plan.json", "config.yaml"])
def test_an_interruption_is_clean(error: BaseException, at: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, flags = files.replace_file, [*QUICK, "--run-dir", "run", "--updates", "1"]

    def interrupted(path: Path, data: bytes) -> None:
        if at == "mkdir":
            raise error
        with monkeypatch.context() as patched:
            if path.name == at:
                patched.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(error))
            real(path, data)

    is_exit = isinstance(error, SystemExit)
    with monkeypatch.context() as patched, pytest.raises(SystemExit) if is_exit else contextlib.nullcontext():
        patched.setattr(run_folder, "replace_file", interrupted)
        assert train.main(flags) == 130
    assert not tree(here)
    assert train.main([*flags, "--learning-rate", "0.01"]) == 0


def test_a_folder_with_other_files_is_not_used_but_what_a_killed_run_left_is(here: Path, capsys: Capture) -> None:
    (here / "own" / "logs").mkdir(parents=True)
    (here / "own" / "logs" / "own.log").touch()
    (here / "mine").mkdir()
    (here / "mine" / "thesis.tex").write_text("precious")
    before = tree(here)
    for name, words in (
        ("own", "own is not empty and no run folder (it contains logs)"),
        ("mine", "mine is not empty and no run folder (it contains thesis.tex)"),
        ("mine/thesis.tex", "thesis.tex is not a folder"),
    ):
        assert train.main([*QUICK, "--run-dir", name, "--updates", "1"]) == 2
        assert words in capsys.readouterr().err
    assert tree(here) == before
    (here / "run" / "logs").mkdir(parents=True)
    for name in ("logs/coordinator.log", "logs/coordinator.times", "plan.json.partial"):  # killed before its first file
        (here / "run" / name).touch()
    (here / "empty").mkdir()
    for name in ("run", "empty"):
        assert train.main([*QUICK, "--run-dir", name, "--updates", "1"]) == 0


def test_a_mistake_of_a_resume_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def no_pod(*arguments: object) -> None:
        assert Path("new/evaluations.jsonl").is_file()
        raise ClusterError("no Ray cluster is running")

    assert train.main([*QUICK, "--run-dir", "run", "--updates", "2"]) == 0
    flags = ["--resume", "run", "--run-dir", "new", "--updates", "3"]
    with monkeypatch.context() as patched:
        patched.setattr(training, "fleet_for", no_pod)
        assert train.main(flags) == 2
    assert not Path("new").exists()
    assert train.main(flags) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--resume", "nowhere"], "no such run folder"),
        (["--resume", "run", "--updates", "2"], "already at update 2"),
        (["--resume", "run", "--updates", "4", "--batch-size", "16"], "global_batch_size"),
        (["--run-dir", "run"], "holds a run already"),
        (["--model", "no_such_module:make"], "No module named 'no_such_module'"),
        (["--model", "without_norms:other"], "has no 'other'"),
        (["--model", "without_norms:torch"], "is not callable"),
        (["--model", "numpy:random.seed"], "has no"),
        (["--model", "numpy:get_include"], "is called with (channels, classes)"),
    ],
)
def test_a_dry_run_finds_the_mistakes(flags: List[str], words: str, here: Path, capsys: Capture) -> None:
    if "run" in flags:
        assert train.main([*QUICK, "--run-dir", "run", "--updates", "2"]) == 0
    before = tree(here)
    lines = []
    for more in (["--dry-run"], []):
        capsys.readouterr()
        own = [] if "--resume" in flags else ["--updates", "1"]
        assert train.main([*QUICK, *own, *flags, *more]) == 2
        lines.append(capsys.readouterr().err)
        assert words in lines[-1]
    assert (lines[0], tree(here)) == (lines[1], before)


def test_a_run_of_an_older_version_elsewhere_needs_take_over(here: Path, capsys: Capture) -> None:
    assert train.main([*QUICK, "--run-dir", "run", "--updates", "2"]) == 0
    resume, before = ["--resume", "run", "--updates", "4"], tree(here)
    capsys.readouterr()
    assert train.main([*resume, "--dry-run"]) == 0
    assert "4 updates" in capsys.readouterr().out
    assert tree(here) == before
    path = here / "run" / "state.json"
    state = {**json.loads(path.read_text()), "host": "far", "state": "running", "exit_code": None}
    path.write_text(json.dumps(state))
    assert train.main(resume) == 2
    assert "on host far, as state.json says" in capsys.readouterr().err
    assert train.main([*resume, "--take-over"]) == 0


@pytest.fixture
def far_run(here: Path, processes: None) -> Iterator[subprocess.Popen[str]]:
    """A run in the folder `run` whose process has another host name, and trains."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "--uts", "hostname", "x"], check=False).returncode:
        pytest.skip("a process with another host name is not permitted here")
    flags = ["--run-dir", "run", "--epochs", "400", "--checkpoint-every", "4 updates"]
    command = start(here, *flags, prefix=["unshare", "--uts", "sh", "-c", 'hostname far && exec "$@"', "sh"])
    try:
        assert wait_until(lambda: (here / "run" / "checkpoints" / "LATEST").is_file(), COMMAND_S)
        yield command
    finally:
        command.kill()
        command.communicate(timeout=60)


def test_a_run_on_another_host_is_taken_over(far_run: subprocess.Popen[str], here: Path, capsys: Capture) -> None:
    assert train.main(["--resume", "run", "--updates", "400"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"is in use by pid {far_run.pid} on host far (since " in line
    assert main(["status", "run"]) == 0
    assert f"pid {far_run.pid} on far" in capsys.readouterr().out
    assert main(["stop", "run"]) == 2
    new = start(here, "--resume", "run", "--take-over", "--detach")
    assert new.communicate(timeout=120)[1].startswith("raypod: taking over ")
    assert new.returncode == 0
    state = run_state.read(here / "run")
    assert state is not None
    assert main(["stop", "run"]) == 0
    _, err = far_run.communicate(timeout=60)
    assert far_run.returncode == 1
    assert f"on host {socket.gethostname()}" in err.splitlines()[-1]
    assert "has taken over" in err.splitlines()[-1]
    assert state.host == socket.gethostname()
    lines = [json.loads(each)["update"] for each in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (lines, main(["verify-data", "run"])) == (list(range(1, len(lines) + 1)), 0)
    assert not list((here / "run").glob("*lease*"))


def test_the_lease_file_names_the_owner_of_a_run(here: Path) -> None:
    with claim.claim(from_values({}), "run", take_over=False, log=print) as held:
        with pytest.raises(LeaseHeld, match="--take-over"):
            claim.claim(from_values({"run": {"run_dir": "run"}}), "run", take_over=False, log=print)
        (content,) = [json.loads(path.read_text()) for path in held.folder.glob("lease-*.json")]
    assert (content["host"], content["pid"]) == (socket.gethostname(), os.getpid())
    assert content["expires_after_s"] == 30


Acquire = Callable[..., Lease]
OnHost = Callable[[str], None]


@pytest.fixture(autouse=True)
def frequent_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.2)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> OnHost:
    """`on_host("far")`: from now on this process appears to be on another host."""
    return lambda name: monkeypatch.setattr(socket, "gethostname", lambda: name)


@pytest.fixture
def acquire(tmp_path: Path) -> Iterator[Acquire]:
    """`acquire(take_over=...)`: as `lease.acquire`, for one folder; the leases are released after the test."""
    held: List[Lease] = []

    def acquire_and_release(take_over: bool = False, log: Callable[[str], None] = print) -> Lease:
        held.append(lease.acquire(tmp_path, "the way out", take_over, log))
        return held[-1]

    yield acquire_and_release
    for each in held:
        each.release()


def entries(folder: Path) -> List[str]:
    return [path.name for path in folder.iterdir()]


def age(folder: Path, seconds: float) -> None:
    found = lease.current(folder)
    os.utime(str(found.path), (found.renewed_s - seconds,) * 2)


def test_one_of_many_processes_acquires_a_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(20) as pool:
        attempts = [pool.submit(lease.acquire, tmp_path) for _ in range(20)]
    held = [each.result() for each in attempts if each.exception() is None]
    errors = {str(each.exception()) for each in attempts if each.exception() is not None}
    assert len(held) == len(errors) == 1
    assert f"is in use by pid {os.getpid()} on host {socket.gethostname()}" in errors.pop()
    assert len(entries(tmp_path)) == 1
    held[0].release()
    assert not entries(tmp_path)


def test_the_lease_of_a_dead_process_here_ends_at_once(processes: None, tmp_path: Path, acquire: Acquire) -> None:
    program = "import os, sys; from pathlib import Path; from raypod.runs import lease\n"
    program += "lease.acquire(Path(sys.argv[1])); os._exit(9)"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert len(entries(tmp_path)) == 1
    held = acquire(log=pytest.fail)  # without a wait
    assert not held.is_first
    held.remove_ended()
    assert len(entries(tmp_path)) == 1


def test_what_killed_processes_have_left_of_their_leases_is_removed(tmp_path: Path, acquire: Acquire) -> None:
    me = lease.this_process()
    dead = dataclasses.replace(me, owner="dead", started_ticks=me.started_ticks - 1)
    remote = dataclasses.replace(me, owner="remote", host="far")
    contents = {"dead": dead.content(), "live": me.content(), "remote": remote.content(), "empty": b"", "old": b""}
    for name, content in contents.items():
        (tmp_path / f".lease-{name}.partial").write_bytes(content)
    long_ago_s = time.time() - 3600
    os.utime(str(tmp_path / ".lease-old.partial"), (long_ago_s, long_ago_s))
    held = acquire()
    held.remove_ended()
    left = {".lease-live.partial", ".lease-remote.partial", ".lease-empty.partial"}
    assert set(entries(tmp_path)) == {*left, "lease-1.json"}


def test_a_live_lease_stays(tmp_path: Path, acquire: Acquire, on_host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host("far")
    held, real = acquire(), os.utime
    on_host("near")
    with pytest.raises(LeaseHeld) as error:
        acquire()
    text = str(error.value)
    assert f"pid {os.getpid()} on host far (since " in text
    assert "expires after 30 s" in text
    assert text.endswith("the way out")
    monkeypatch.setattr(os, "utime", lambda path: real(path, (time.time() - 3600,) * 2))  # its clock is late
    assert wait_until(lambda: lease.find(tmp_path)[0].renewed_s < time.time() - 3000)
    with pytest.raises(LeaseHeld):
        acquire()
    held.check()


def test_the_lease_of_a_dead_host_expires_unless_it_is_read(tmp_path: Path, acquire: Acquire, on_host: OnHost) -> None:
    on_host("far")
    acquire().leave()  # no heartbeat any more
    on_host("near")
    age(tmp_path, 29)
    with pytest.raises(LeaseHeld):
        acquire()
    age(tmp_path, 2)
    waits: List[str] = []
    before = entries(tmp_path)
    acquire(log=waits.append).release()
    assert "s for a heartbeat of pid " in waits[0]
    assert entries(tmp_path) == before
    acquire()
    with pytest.raises(LeaseHeld, match="on host near"):
        acquire()


@pytest.mark.parametrize("host", ["far", ""])
def test_a_holder_that_is_taken_over_ends(tmp_path: Path, acquire: Acquire, on_host: OnHost, host: str) -> None:
    here = socket.gethostname()
    on_host(host or here)
    held = acquire()
    on_host(here)
    with ThreadPoolExecutor(1) as pool:
        new = pool.submit(acquire, take_over=True)
        assert wait_until(lambda: len(lease.find(tmp_path)) == 2)
        with pytest.raises(LeaseLost, match=f"pid {os.getpid()} on host {here}"):
            wait_until(lambda: held.check() is not None)
        assert not new.done()  # it waits until the old holder has ended
        held.release()
        new.result(timeout=30).check()
    assert len(entries(tmp_path)) == 1


def test_a_lost_lease_interrupts_a_wait_of_the_main_thread(acquire: Acquire) -> None:
    held = acquire()
    began = threading.Event()

    def wait() -> None:
        with held.interrupting():
            began.set()
            threading.Event().wait(30)

    with ThreadPoolExecutor(1) as pool:
        new = pool.submit(lambda: began.wait(30) and acquire(take_over=True))
        with pytest.raises(LeaseLost):
            wait()
        held.release()
        new.result(timeout=30)


def test_a_stopped_process_notices_the_loss(acquire: Acquire, on_host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_S", 600)  # the thread renews the lease only when `check` wakes it
    on_host("far")
    held = acquire()
    on_host("near")
    age(held.folder, 31)
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.1)
    acquire()
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 60)
    with pytest.raises(LeaseLost):
        held.check()


def test_a_disk_that_fails_is_reported_once_and_ends_no_run(acquire: Acquire, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings, attempts = [], []  # type: ignore[var-annotated]
    held, real = acquire(log=warnings.append), os.utime

    def fail(*arguments: Any) -> None:
        attempts.append(1)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "utime", fail)
    monkeypatch.setattr(lease, "LATE_S", 0.1)
    assert wait_until(lambda: len(attempts) > 5)
    held.check()
    (warning,) = warnings
    assert "Input/output error" in warning
    monkeypatch.setattr(os, "utime", real)
    held.check()


def test_a_full_disk_prevents_no_heartbeat(processes: None, small_disk: Callable[..., Path], tmp_path: Path) -> None:
    folder = small_disk(tmp_path / "disk", 64)
    warnings: List[str] = []
    held = lease.acquire(folder, log=warnings.append)
    try:
        with pytest.raises(OSError, match="No space"):
            (folder / "full").write_bytes(bytes(1 << 20))
        first = lease.find(folder)[0].renewed_s
        assert wait_until(lambda: lease.find(folder)[0].renewed_s > first)
        assert not warnings
    finally:
        held.release()


@pytest.mark.parametrize("is_below", [True, False])
def test_nothing_is_written_where_the_folder_was(tmp_path: Path, is_below: bool) -> None:
    """As after `umount -l`: the path leads to the folder below the mount point, or to none."""
    folder = tmp_path / "run"
    folder.mkdir()
    held = lease.acquire(folder)
    try:
        held.check_folder()
        folder.rename(tmp_path / "unmounted")
        if is_below:
            folder.mkdir()
        with pytest.raises(FolderLost, match="its disk was unmounted"):
            held.check_folder()
        with pytest.raises(FolderLost):
            wait_until(lambda: held.check() is not None)
    finally:
        held.release()
    assert is_below is folder.exists()
    assert not is_below or not entries(folder)


def test_a_lease_that_was_removed_by_hand_is_written_again(tmp_path: Path, acquire: Acquire) -> None:
    held = acquire()
    (path,) = tmp_path.iterdir()
    path.unlink()
    held.check_folder()
    assert wait_until(path.exists)
    held.check()
