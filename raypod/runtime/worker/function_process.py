"""The process of one instance of `raypod.run`: sets up its environment, joins the others, and calls a function.

`runtime/workers/ray_functions.py` wraps it in a Ray actor. Nothing here imports torch or the SDK before the
environment is set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import select
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Dict, List, Optional, Sequence, Tuple

import cloudpickle  # type: ignore[import-untyped]

from raypod.errors import summarize_exception
from raypod.plan.environment import STARTUP_DIR, device_environment, join_path, placement_environment
from raypod.plan.placement import Placement
from raypod.runtime.worker import collectives
from raypod.runtime.worker.collectives import ProcessGroup
from raypod.runtime.worker.environment import take_cores
from raypod.system import sdk, torchvision_import

STDOUT, STDERR = 1, 2
_PIPE_BYTES = 1 << 16
_COLLECT_S = 1.0


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all instances of a call have in common."""

    placement: Placement
    device: str
    collectives: str
    working_dir: str
    import_path: Tuple[str, ...]  # of the caller
    environment: Dict[str, str]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a function has returned or raised in an instance.

    Attributes:
        value: the pickled result, or the pickled exception; empty if the exception cannot be pickled.
        cause: the exception in one line; empty if there is none.
        trace: its traceback.
        is_of_peer: whether the exception means that another instance failed.
    """

    value: bytes
    cause: str = ""
    trace: str = ""
    is_of_peer: bool = False


class FunctionProcess:
    """Sets up this process, and calls functions in a single thread that Python starts, as `InstanceProcess` does."""

    def __init__(self, setup: Setup, index: int) -> None:
        self._setup, self._spec = setup, setup.placement.instances[index]
        with contextlib.suppress(FileNotFoundError):  # the host need not have the caller's folder
            os.chdir(setup.working_dir)
        self._output: List[Tuple[int, bytes]] = []
        self._output_lock = threading.Lock()
        self._pipes = [self._redirect(number) for number in (STDOUT, STDERR)]
        take_cores(setup.placement, self._spec)  # before torch counts cores and starts threads
        os.environ.update(placement_environment(setup.placement, self._spec))
        os.environ.update(device_environment(setup.placement, self._spec))
        os.environ["PYTHONPATH"] = join_path(STARTUP_DIR, os.environ.get("PYTHONPATH", ""))
        os.environ.update(setup.environment)
        sys.path += [entry for entry in setup.import_path if entry not in sys.path]
        self._group = ProcessGroup(setup.placement.cluster.data_network)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="instance")

    def prepare(self) -> None:
        """Select and import the SDK.

        Raises:
            SdkError: it cannot be imported.
            ClusterError: the partition does not fit the instances, or other hosts cannot connect to this one.
        """
        self._thread.submit(self._prepare).result()

    def data_address(self) -> Optional[str]:
        """See `ProcessGroup.data_address`."""
        return self._group.data_address()

    def open_rendezvous(self, address: str) -> Dict[str, str]:
        """See `ProcessGroup.open_rendezvous`."""
        return self._group.open_rendezvous(address, 0)

    def join(self, environment: Dict[str, str]) -> None:
        """Join the other instances: initialize popdist and Horovod."""
        self._group.configure(environment)
        self._thread.submit(collectives.initialize).result()

    def call(self, pickled: bytes) -> Outcome:
        """Call a function; `pickled` holds (function, positional arguments, keyword arguments)."""
        return self._thread.submit(self._call, pickled).result()

    def output(self) -> List[Tuple[int, bytes]]:
        """Return what was written to stdout and stderr since the previous call, in order."""
        with self._output_lock:
            taken, self._output = self._output, []
        return taken

    def close(self) -> None:
        """Leave the process group."""
        self._thread.submit(collectives.finalize).result()
        self._group.close()

    def _prepare(self) -> None:
        torchvision_import.install()
        selected = sdk.select(self._setup.device)
        placement = self._setup.placement
        collectives.check_instance(self._setup.collectives, selected.has_ipus, placement, self._spec.host)
        importlib.import_module("torch").set_num_threads(self._spec.threads_per_replica)

    def _call(self, pickled: bytes) -> Outcome:
        try:
            function, arguments, named = cloudpickle.loads(pickled)
            outcome = Outcome(_pickled_result(function(*arguments, **named)))
        except BaseException as error:  # noqa: BLE001 - a user's function can raise any exception, SystemExit included
            trace = "".join(traceback.format_exception(type(error), error, _own(error)))
            cause, is_of_peer = summarize_exception(error), collectives.caused_by_peer(error)
            outcome = Outcome(_pickled_error(error), cause, trace, is_of_peer)
        self._collect_output()
        return outcome

    def _collect_output(self) -> None:
        """Wait until `output` returns everything that was written before; bounded, as child processes may go on."""
        sys.stdout.flush()
        sys.stderr.flush()
        deadline = time.monotonic() + _COLLECT_S
        while time.monotonic() < deadline:
            with self._output_lock:
                if not select.select(self._pipes, [], [], 0)[0]:
                    return
            time.sleep(_COLLECT_S / 100)

    def _redirect(self, number: int) -> int:
        """Collect what this process and its children write to stdout or stderr; return the descriptor to read from."""
        reader, writer = os.pipe()
        stream = sys.stdout if number == STDOUT else sys.stderr
        stream.flush()
        os.dup2(writer, number)
        os.close(writer)
        redirected = os.fdopen(number, "w", buffering=1, closefd=False)
        if number == STDOUT:
            sys.stdout = redirected
        else:
            sys.stderr = redirected
        threading.Thread(target=self._read, args=(reader, number), name="output", daemon=True).start()
        return reader

    def _read(self, reader: int, number: int) -> None:
        while True:
            select.select([reader], [], [])
            with self._output_lock:
                data = os.read(reader, _PIPE_BYTES)
                if not data:
                    return
                self._output.append((number, data))


def _own(error: BaseException) -> Optional[TracebackType]:
    """Return the traceback of an error without the frame of this module; all of it if there is no other one."""
    trace = error.__traceback__
    return trace.tb_next if trace is not None and trace.tb_next is not None else trace


def _pickled_result(value: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # pickling calls methods of the value's class
        kind = type(value).__name__
        raise TypeError(f"the result, of type {kind}, cannot be pickled: {summarize_exception(error)}") from error


def _pickled_error(error: BaseException) -> bytes:
    """Return an exception, pickled; empty if it, or its copy, cannot be made."""
    try:
        pickled = bytes(cloudpickle.dumps(error.with_traceback(None)))
        return pickled if isinstance(cloudpickle.loads(pickled), BaseException) else b""
    except Exception:  # noqa: BLE001 - an exception's own class can raise any other one
        return b""


def pack(function: Any, arguments: Sequence[Any], named: Dict[str, Any]) -> bytes:
    """Return a function and its arguments for `FunctionProcess.call`. Any exception if they cannot be pickled."""
    return bytes(cloudpickle.dumps((function, tuple(arguments), named)))


def unpack(value: bytes) -> Any:
    """Return the value of an outcome."""
    return cloudpickle.loads(value)
