"""Runs functions of a test module in several processes that form one emulated pod.

One fresh process imports torch and the module, which takes seconds, and forks the ranks before torch starts a thread.
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
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List

SDK = Path(__file__).resolve().parents[2] / "raypod" / "emulated_sdk"


def run_ranks(module_file: str, functions: List[str], size: int, bound_s: float = 60.0) -> Dict[str, List[Any]]:
    """Calls each function(rank, size), one after the other, in `size` processes.

    Returns the values by function and rank; None where a process ended itself before. AssertionError with all output
    if a process fails, or is not done within the bound.
    """
    import _emulated_pod

    store, address = _emulated_pod.open_rendezvous()
    environment = {**os.environ, "PYTHONPATH": str(SDK), "OMP_NUM_THREADS": "1"}
    environment.update({_emulated_pod.RENDEZVOUS: address, _emulated_pod.TIMEOUT_S: "30"})
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, __file__, module_file, folder, str(size), *functions]
        with Path(folder, "log").open("w") as log:
            parent = subprocess.Popen(call, env=environment, stdout=log, stderr=log, start_new_session=True)
        with suppress(subprocess.TimeoutExpired):
            parent.wait(bound_s)
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(parent.pid, signal.SIGKILL)
        assert parent.wait() == 0, Path(folder, "log").read_text()
        values = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]
    del store  # kept open up to here
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
            time.sleep(1.0)  # the others' errors tell more
            os.killpg(0, signal.SIGKILL)


def _run(module: Any, value_file: Path, rank: int, size: int, functions: Any) -> None:
    code, values = 1, {}
    try:
        for name in functions:
            values[name] = getattr(module, name)(rank, size)
            value_file.write_bytes(pickle.dumps(values))
        code = 0
    except BaseException:  # noqa: BLE001  # whatever it was, this forked copy must not go on in the parent's code
        sys.stderr.write(f"rank {rank}:\n{traceback.format_exc()}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main(*sys.argv[1:])
