"""Shared fixtures, and the check that no test leaves environment variables, child processes or threads behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Iterator, List, Set

import psutil
import pytest

# Set before anything imports ray: the sessions of the tests need no token, and must not write one to the home folder.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray lowers the priority of workers, so that they hardly run while other test processes use all cores; raypod's own
# sessions have this value. Ray Tune does not restore the handler of SIGINT after its runs.
os.environ.update(RAY_worker_niceness="0", TUNE_DISABLE_SIGINT_HANDLER="1")
# A separate folder per test process: otherwise a run in one process joins the Ray session of another. The name is short
# because socket paths are limited to 107 bytes.
# Programs have their temporary files there, too: those of multiprocessing remain if the programs are killed.
os.environ["RAY_TMPDIR"] = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="r")
os.environ["XDG_STATE_HOME"] = os.path.join(os.environ["RAY_TMPDIR"], "state")  # noqa: PTH118
os.environ["RAYPOD_RUNTIME_DIR"] = os.path.join(os.environ["RAY_TMPDIR"], "endpoints")  # noqa: PTH118

from raypod.plan.cluster import LOCAL
from raypod.plan.config import Config
from raypod.plan.plan import Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.training.tasks.registry import facts_of
from tests.support import kinds
from tests.support.bounded import wait_until
from tests.support.browser import Browser, find_chromium
from tests.support.scheduling import ClustersFirst

TESTS = Path(__file__).resolve().parent
# Set by pytest, by importing poptorch, by torch's compiler, which torch's own optimizers import, by Ray Tune.
SET_BY_AN_IMPORT = {
    *("PYTEST_CURRENT_TEST", "RDMAV_FORK_SAFE", "TORCHINDUCTOR_CACHE_DIR"),
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "CRC32C_SW_MODE"),
}


# What the running test started, if it must start no process: the events of the interpreter's audit hook.
_started: List[str] = []
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}


def _record_start(event: str, arguments: Any) -> None:
    if event in _STARTS:
        _started.append(f"{event} {arguments[:2]}")


sys.addaudithook(_record_start)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kinds", "kinds of tests (tests/support/kinds.py)")
    group.addoption("--all", action="store_true", help="run the tests of all kinds")
    group.addoption("--left-out", action="store_true", help="run only the tests that do not run by default")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return ClustersFirst(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the tests in the background ignores SIGINT in them, and so in the commands that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind, meaning in kinds.KINDS.items():
        config.addinivalue_line("markers", f"{kind}: {meaning}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: List[Any]) -> None:
    kinds.add_markers(items, TESTS)
    kinds.select(config, items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(kinds.LEFT_OUT, {}))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["choice"] = kinds.choice(node.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Take the counts of a process of xdist, equal in all. Print the exit code of one that a test has ended."""
    if error is not None:
        process = node.gateway._io.popen
        with contextlib.suppress(subprocess.TimeoutExpired):  # it runs on without its connection
            process.wait(10)
        code = process.returncode  # negative: the number of a signal
        node.config.get_terminal_writer().line(f"\n[{node.gateway.id}] ended with exit code {code}: {error}")
    node.config.stash[kinds.LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    line = kinds.summary(config.stash.get(kinds.LEFT_OUT, Counter()))
    if line:
        terminalreporter.write_line(line)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)


def _children() -> Set[int]:
    """Return all descendants of this process, without the idle workers that a cluster of the tests keeps for later."""
    return {process.pid for process in psutil.Process().children(recursive=True) if not _is_idle_worker(process)}


def _is_idle_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.name() == "ray::IDLE")
    return False


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that a test leaves nothing behind, and starts processes only if its kind may."""
    may_start = any(request.node.get_closest_marker(kind) for kind in kinds.KINDS if kind != "slow")
    environment, threads = dict(os.environ), set(threading.enumerate())
    children = _children() if may_start else set()
    _started.clear()
    yield
    changed = {name for name in set(environment) | set(os.environ) if environment.get(name) != os.environ.get(name)}
    changed -= SET_BY_AN_IMPORT
    assert not changed, f"environment variables changed: {changed}"
    if may_start:
        assert wait_until(lambda: not (_children() - children)), f"processes left: {_children() - children}"
    else:
        assert not _started, f"this test starts processes without the fixture `processes`: {_started}"
    # transformers loads weights in threads, and does not wait for their end.
    left = [thread for thread in set(threading.enumerate()) - threads if not thread.daemon]
    assert wait_until(lambda: not any(thread.is_alive() for thread in left)), f"threads left: {left}"


@pytest.fixture
def processes() -> None:
    """For tests that start processes, of which none may be left at their end."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A headless Chromium; skips if none is installed."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with Browser(path) as found:
        yield found


@pytest.fixture
def make(tmp_path: object) -> Callable[..., Plan]:
    """`make(training={...}, pod={...})`: a plan for this host with a run folder under `tmp_path`."""

    def build(**sections: dict[str, object]) -> Plan:
        config: Config = from_values(sections)
        Path(f"{tmp_path}/run").mkdir(parents=True, exist_ok=True)  # as `run_folder.create` does
        return make_plan(config, LOCAL, facts_of(config), f"{tmp_path}/run")

    return build


@pytest.fixture
def run_python() -> Callable[[str], str]:
    """Run a program in a new interpreter, which must exit with 0, and return its output."""

    def run(program: str) -> str:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def small_disk() -> Iterator[Callable[..., Path]]:
    """`small_disk(folder, kib=1536)`: mount a file system of that size. Skips if mounting is not permitted."""
    mounted: list[Path] = []

    def mount(folder: Path, kib: int) -> Path:
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        is_there = shutil.which("mount") is not None
        if not is_there or subprocess.run(command, capture_output=True, check=False, timeout=10).returncode:
            pytest.skip("mounting a file system is not permitted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)
