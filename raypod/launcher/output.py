"""Where the output of instances goes: byte for byte into a log file each, and onto the console."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Dict, Optional

from raypod.errors import ConfigError, RunError
from raypod.launcher.console import Console

_STDERR = 2
_TAIL_BYTES = 4096
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Failed|Interrupt|Warning)(: .*)?")


class Output:
    """The log files of a run folder, and the console; `only` names the one instance that the console shows."""

    def __init__(self, folder: str, instances: int, console: Console, only: Optional[int] = None) -> None:
        self._folder, self._console, self._only = folder, console, only
        self._logs: Dict[int, int] = {}
        self._tails: Dict[int, bytes] = {}  # of stderr
        try:
            Path(folder, "logs").mkdir(parents=True, exist_ok=True)
            for instance in range(instances):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                self._logs[instance] = os.open(self.log_file(instance), flags, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot write to the run folder {folder}: {error.strerror}; choose a --run-dir"
            ) from None

    def log_file(self, instance: int) -> str:
        """Path of an instance's log."""
        return f"{self._folder}/logs/instance-{instance}.log"

    def add(self, instance: int, stream: int, data: bytes) -> None:
        """Take bytes of a program. RunError if its log cannot be written."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._logs[instance], view) :]
        except OSError as error:
            raise RunError(f"cannot write {self.log_file(instance)}: {error.strerror}") from None
        if stream == _STDERR:
            self._tails[instance] = (self._tails.get(instance, b"") + data)[-_TAIL_BYTES:]
        if self._only in (None, instance):
            self._console.add(instance, stream, data)

    def last_exception(self, instance: int) -> Optional[str]:
        """The exception in the last line of an instance's stderr, if that is what it looks like."""
        lines = self._tails.get(instance, b"").decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last if _EXCEPTION.fullmatch(last) else None

    def flush(self) -> None:
        """Show what is whole."""
        self._console.flush()

    def close(self) -> None:
        """Show the rest, and close the log files. Harmless when called again."""
        try:
            self._console.close()
        finally:
            for descriptor in self._logs.values():
                os.close(descriptor)
            self._logs = {}
