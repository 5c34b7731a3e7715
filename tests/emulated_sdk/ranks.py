"""Run functions of a test module in several processes that form one emulated pod.

One new process imports torch and the module, which takes seconds, and forks the ranks before torch starts a thread.
With `horovod="real"` the functions use the installed Horovod instead of the emulated one.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import closing, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

SDK = Path(__file__).resolve().parents[2] / "raypod" / "emulated_sdk"


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


def run_ranks(
    module_file: str, functions: List[str], size: int, timeout_s: float = 60.0, horovod: str = "emulated"
) -> Dict[str, List[Any]]:
    """Call each function(rank, size), one after the other, in `size` processes.

    Returns the values by function and rank; None where a process ended before. Raises AssertionError with all output
    if a process fails or exceeds `timeout_s`.
    """
    import _pod.wires

    from raypod.instance.collectives import horovod_proxy

    store = _pod.wires.StoreServer()
    environment = {**os.environ, "PYTHONPATH": str(SDK), "OMP_NUM_THREADS": "1"}
    environment.update({**store.environment, _pod.wires.TIMEOUT_S: "30"})
    environment["EMULATED_POD_HOROVOD"] = horovod
    # The emulated Horovod ignores the variables of the installed one.
    folders, opened = tempfile.TemporaryDirectory(), closing(horovod_proxy(store.environment))
    with closing(store), folders as folder, opened as proxy:
        environment.update(proxy.environment, HOROVOD_GLOO_IFACE="lo")
        call = [sys.executable, __file__, module_file, folder, str(size), *functions]
        with Path(folder, "log").open("w") as log:
            parent = subprocess.Popen(call, env=environment, stdout=log, stderr=log, start_new_session=True)
        with suppress(subprocess.TimeoutExpired):
            parent.wait(timeout_s)
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(parent.pid, signal.SIGKILL)
        assert parent.wait() == 0, Path(folder, "log").read_text()
        values = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]
    return {name: [value.get(name) for value in values] for name in functions}


def _main(module_file: str, folder: str, size: str, *functions: str) -> None:
    sys.path.insert(0, str(Path(module_file).parent))
    module = importlib.import_module(Path(module_file).stem)
    ranks = []
    for rank in range(int(size)):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            _run(module, Path(folder, str(rank)), rank, int(size), functions)
    for _ in ranks:
        _, status = os.wait()
        if status:
            time.sleep(1.0)  # let the other ranks report their errors
            os.killpg(0, signal.SIGKILL)


def _run(module: Any, value_file: Path, rank: int, size: int, functions: Any) -> None:
    code, values = 1, {}
    try:
        for name in functions:
            values[name] = getattr(module, name)(rank, size)
            value_file.write_bytes(pickle.dumps(values))
        code = 0
    except BaseException:  # noqa: BLE001  # the forked child must not return into the parent's code
        sys.stderr.write(f"rank {rank}:\n{traceback.format_exc()}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main(*sys.argv[1:])
