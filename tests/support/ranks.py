"""Run functions of a test module in several processes that form one emulated pod.

A server imports torch and the SDK, which takes seconds, once for all tests of a process (the fixture `ranks`). It forks
the ranks of each call before torch starts a thread. With `horovod="real"` the functions use the installed Horovod.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import closing, contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

ROOT = Path(__file__).resolve().parents[2]
SDK = ROOT / "raypod" / "emulated_sdk"
VARIABLES = {"PYTHONPATH": os.pathsep.join([str(SDK), str(ROOT)]), "OMP_NUM_THREADS": "1"}


def has_real_horovod() -> bool:
    """Return whether an installed Horovod exists."""
    folders = [entry for entry in sys.path if Path(entry or ".").resolve() != SDK]
    return PathFinder.find_spec("horovod", folders) is not None


def both() -> List[Any]:
    """Return fixture parameters for the emulated Horovod, and for the installed one, skipped if there is none."""
    import pytest

    skip = pytest.mark.skipif(not has_real_horovod(), reason="no Horovod is installed (scripts/install_horovod.sh)")
    return ["emulated", pytest.param("real", marks=skip)]


def error_of(call: Callable[[], Any]) -> str:
    """Return the class and message of the error that a call raises, or "no error"."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def set_rank(rank: int, hosts: List[Tuple[str, int]]) -> None:
    """Set the environment of one of the ranks on `hosts` (name, number of ranks)."""
    host, local = [(host, local) for host in hosts for local in range(host[1])][rank]
    across = [other for other in hosts if other[1] > local]
    place = {"RANK": rank, "SIZE": sum(slots for _, slots in hosts), "LOCAL_RANK": local, "LOCAL_SIZE": host[1]}
    place.update(CROSS_RANK=across.index(host), CROSS_SIZE=len(across))
    os.environ.update({f"HOROVOD_{name}": str(number) for name, number in place.items()})
    os.environ.update(HOROVOD_HOSTNAME=host[0], HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")


class RankServer:
    """A process that has imported torch and the SDK, and forks the ranks of each request."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **VARIABLES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )

    def run(self, request: Dict[str, Any], timeout_s: float) -> int:
        """Return the wait status of the process group that ran the request; it is killed at the timeout."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        requests.write(json.dumps(request).encode() + b"\n")
        group = int(replies.readline())
        if not select.select([replies], [], [], timeout_s)[0]:
            os.killpg(group, signal.SIGKILL)
        return int(replies.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


_server: Optional[RankServer] = None


@contextmanager
def rank_server() -> Iterator[RankServer]:
    """Use the server that an outer block has started, or start one for this block."""
    global _server
    if _server is not None:
        yield _server
        return
    with closing(RankServer()) as _server:
        try:
            yield _server
        finally:
            _server = None


def run_ranks(
    module_file: str, functions: List[str], size: int, timeout_s: float = 60.0, horovod: str = "emulated"
) -> Dict[str, List[Any]]:
    """Call each function(rank, size), one after the other, in `size` processes.

    Returns the values by function and rank; None where a process ended before. Raises AssertionError with all output
    if a process fails or exceeds `timeout_s`.
    """
    import _pod.wires

    from raypod.runtime.worker.collectives import horovod_proxy

    store = _pod.wires.StoreServer()
    # The emulated Horovod ignores the variables of the installed one.
    folders, opened = tempfile.TemporaryDirectory(), closing(horovod_proxy(store.environment))
    with closing(store), folders as folder, opened as proxy, rank_server() as server:
        environment = {**os.environ, **VARIABLES, **store.environment, **proxy.environment}
        environment.update(HOROVOD_GLOO_IFACE="lo", EMULATED_POD_HOROVOD=horovod, EMULATED_POD_TIMEOUT_S="30")
        request = {"environment": environment, "folder": folder, "call": [module_file, folder, size, functions]}
        assert server.run(request, timeout_s) == 0, Path(folder, "log").read_text()
        values = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]
    return {name: [value.get(name) for value in values] for name in functions}


def _serve() -> None:
    for name in ("pytest", "poptorch", "_pod.gradient_sum"):
        importlib.import_module(name)
    import torch

    # For the first optimizer torch imports its compiler, which takes seconds in every rank.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a forked process lacks the threads of its parent"
    for line in sys.stdin:
        request = json.loads(line)
        group = os.fork()
        if group == 0:
            os.setsid()
            log = os.open(Path(request["folder"], "log"), os.O_WRONLY | os.O_CREAT)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            os.environ.clear()
            os.environ.update(request["environment"])
            _leave_after("all ranks", lambda: _fork_ranks(*request["call"]))  # noqa: B023  # called at once
        _reply(group)
        _, status = os.waitpid(group, 0)
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(group, signal.SIGKILL)
        _reply(status)


def _reply(number: int) -> None:
    os.write(sys.stdout.fileno(), b"%d\n" % number)


def _fork_ranks(module_file: str, folder: str, size: int, functions: List[str]) -> None:
    sys.path.insert(0, str(Path(module_file).parent))
    module = importlib.import_module(Path(module_file).stem)
    for rank in range(size):
        if os.fork() == 0:
            _leave_after(f"rank {rank}", lambda: _run(module, Path(folder, str(rank)), rank, size, functions))  # noqa: B023
    for _ in range(size):
        _, status = os.wait()
        if status:
            time.sleep(1.0)  # let the other ranks report their errors
            os.killpg(0, signal.SIGKILL)


def _run(module: Any, value_file: Path, rank: int, size: int, functions: List[str]) -> None:
    values = {}
    for name in functions:
        values[name] = getattr(module, name)(rank, size)
        value_file.write_bytes(pickle.dumps(values))


def _leave_after(what: str, call: Callable[[], None]) -> None:
    """End this forked process after the call; it must not return into the code of its parent."""
    code = 1
    try:
        call()
        code = 0
    except BaseException:  # noqa: BLE001
        sys.stderr.write(f"{what}:\n{traceback.format_exc()}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
