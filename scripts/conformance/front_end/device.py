"""The device of a process: who holds it, what is moved, how long it takes, how it fails, and its peers.

Everything is below FRONT_END_FOLDER: a lock per device, a log per process, and the sums that instances exchange.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch

_LIBC = ctypes.PyDLL(None)  # its functions keep the interpreter lock, other than those of CDLL
_POLL_US = 300
RECOVERY_ACTIONS = ("IPU_RESET", "LINK_RESET", "PARTITION_RESET", "FULL_RESET")


class Error(Exception):
    """As `poptorch.Error`."""

    type = message = location = ""


class RecoverableError(Error):
    """As `poptorch.RecoverableError`."""

    recovery_action = ""


class UnrecoverableError(Error):
    """As `poptorch.UnrecoverableError`."""


for _class in (Error, RecoverableError, UnrecoverableError):
    _class.__module__ = "poptorch.poptorch_core"


def error(message: str, kind: str = "poptorch_cpp_error", action: str = "", of: Any = Error) -> Error:
    """An exception with the texts and attributes that the core gives it."""
    required = f"\nRecovery action required: {action}" if action else ""
    raised: Error = of(f"In unknown:0: '{kind}': {message}{required}")
    raised.type, raised.message, raised.location = kind, message, ""
    if isinstance(raised, RecoverableError):
        raised.recovery_action = action
    return raised


def _setting(name: str, default: str) -> str:
    return os.environ.get(f"FRONT_END_{name}") or default


def hold(setting: str) -> None:
    """Keeps the interpreter lock for the seconds of a setting: CALL_S, LOAD_S or TRANSFER_S."""
    seconds = float(_setting(setting, "0"))
    if seconds:
        _LIBC.usleep(int(seconds * 1e6))


def compile_pause() -> None:
    """Waits for the seconds of COMPILE_S without the interpreter lock."""
    time.sleep(float(_setting("COMPILE_S", "0")))


def log(event: str, moved: int = 0) -> None:
    """Notes an event of this process, and the bytes that it moves."""
    with (_folder() / f"log-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "bytes": moved, "time": time.time()}) + "\n")


def keep_options(options: Dict[str, Any], operators: Dict[str, int], training: bool) -> None:
    """Writes the options of a program to a file of this process, as text where JSON has no such value.

    Poplar's engine options also come from the environment, which takes precedence. `operators`: how many of each, by
    its name.
    """
    engine = {**options.get("engineOptions", {}), **json.loads(os.environ.get("POPLAR_ENGINE_OPTIONS") or "{}")}
    kept = {**options, "engineOptions": engine, "operators": operators}
    path = _folder() / f"options-{'training' if training else 'inference'}-{os.getpid()}.json"
    path.write_text(json.dumps(kept, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))


def _folder() -> Path:
    return Path(os.environ["FRONT_END_FOLDER"])


def broken_partition() -> Path:
    """The file that exists while no device of the partition works. Its removal is the reset of the partition."""
    return _folder() / "broken-partition"


class Device:
    """The device of an executable. A process that dies gives it back; a broken one stays broken until then."""

    _is_broken = False  # of the process

    def __init__(self, wanted: Optional[int]) -> None:
        self._ids = [wanted] if wanted is not None else list(range(16))
        self._lock: Any = None

    @property
    def is_attached(self) -> bool:
        """Whether this process holds the device for this executable."""
        return self._lock is not None

    def attach(self) -> None:
        """Takes the device. Error if another process, or another executable of this one, has it."""
        Device.check()
        if self.is_attached:
            raise error("Already attached to a device")
        for number in self._ids:
            lock = (_folder() / f"device-{number}.lock").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            self._lock = lock
            log("attach")
            return
        raise error(f"Failed to acquire device Id {self._ids[0]}")

    def detach(self) -> None:
        """Gives the device back."""
        Device.check()
        if not self.is_attached:
            raise error("The device has already been detached")
        self._lock.close()
        self._lock = None
        log("detach")

    @classmethod
    def check(cls) -> None:
        """Error if the device of this process, or the partition, is broken."""
        if broken_partition().exists():
            reason = "the partition is in an error state"
            raise error(reason, "poplar_recoverable_runtime_error", "PARTITION_RESET", RecoverableError)
        if cls._is_broken:
            raise error(
                "application runtime error: the device is in an error state", "poplar_application_runtime_error"
            )

    @classmethod
    def fail(cls, reason: str) -> None:
        """Ends a call as FAULT says, as a peer is lost."""
        fault = _setting("FAULT", "raise")
        log(f"fault {fault}")
        if fault == "hang":
            hold("HOST_SYNC_S")
            raise error(f"Host sync timed out: {reason}", "poplar_application_runtime_error")
        if fault == "partition":
            broken_partition().touch()
            cls.check()
        cls._is_broken = fault in ("unusable", "unrecoverable")
        if fault == "unrecoverable":
            raise error(reason, "poplar_unrecoverable_runtime_error", of=UnrecoverableError)
        action = _setting("RECOVERY_ACTION", "IPU_RESET")
        raise error(reason, "poplar_recoverable_runtime_error", action, RecoverableError)


class Peers:
    """The instances that train together: sums of tensors over all of them, through files."""

    def __init__(self, rank: int, size: int, kind: str) -> None:
        self._rank, self._size, self._kind = rank, size, kind
        self._generation, self._loads, self._step = "", 0, 0
        self._place = Path()

    def load(self) -> None:
        """Meets all instances, as the loading of the engine does."""
        if self._size == 1:
            return
        generation = os.environ.get("EMULATED_POD_RENDEZVOUS", "launch").replace(":", "-").replace("/", "-")
        self._loads = self._loads + 1 if generation == self._generation else 0
        self._generation, self._step = generation, 0
        self._place = _folder() / f"{generation}-{self._kind}-{self._loads}"
        self._place.mkdir(exist_ok=True)
        (self._place / f"{self._rank}.pid").write_text(f"{os.getpid()}")
        self.sum([torch.zeros(1)])

    def sum(self, tensors: List[torch.Tensor]) -> List[torch.Tensor]:
        """The sums over all instances, added in the order of their ranks."""
        if self._size == 1:
            return tensors
        self._step += 1
        path = self._place / f"{self._rank}.part"
        torch.save(tensors, path)
        path.rename(self._place / f"{self._rank}-{self._step}")
        parts = [tensors if rank == self._rank else self._part_of(rank) for rank in range(self._size)]
        if self._step > 1:  # all have read the sum before, as they have written this one
            (self._place / f"{self._rank}-{self._step - 1}").unlink()
        return [torch.stack(same).sum(0) for same in zip(*parts)]

    def _part_of(self, rank: int) -> Any:
        path = self._place / f"{rank}-{self._step}"
        while not path.exists():
            pid = self._place / f"{rank}.pid"
            text = pid.read_text() if pid.exists() else ""
            if text and not _is_alive(text) and not path.exists():
                Device.fail(f"instance {rank} is lost")
            _LIBC.usleep(_POLL_US)
        return torch.load(path)


def _is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def bytes_of(tensors: Any) -> int:
    """The bytes of tensors."""
    values: Dict[int, torch.Tensor] = {id(each): each for each in tensors}
    return sum(each.numel() * each.element_size() for each in values.values())
