"""`launch.json` in the run folder of a launch: the launching process, its command, its status endpoint and its end."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from raypod.errors import RaypodError
from raypod.plan.layout import LAUNCH
from raypod.runs.run_state import DONE, RUNNING, end_of
from raypod.system.abort import on_abort
from raypod.system.files import HeldFolder, parse_json, replace_file, strict_json
from raypod.system.process import process_start_ticks


class LaunchFile:
    """Writes the file at the start and at the end of a launch. A full disk does not end the launch.

    Attributes:
        exit_code: of a launch that ends without an exception.
    """

    def __init__(self, folder: Path, command: Sequence[str], hosts: Sequence[str]) -> None:
        """`hosts` holds the host of each instance, in instance order."""
        self._path, self.exit_code = folder / LAUNCH, 0
        self._folder = HeldFolder(folder)
        self._content: Dict[str, Any] = {
            "pid": os.getpid(),
            "started_ticks": process_start_ticks(os.getpid()) or 0,  # in clock ticks since boot: pids are reused
            "host": socket.gethostname(),
            "started_unix_s": time.time(),
            "command": list(command),
            "hosts": list(hosts),
        }
        self._stack = contextlib.ExitStack()
        self._write(state=RUNNING)

    def serve_status(self, port: int, token_file: str) -> None:
        """Publish the status endpoint of this process."""
        self._write(status_port=port, status_token_file=token_file)

    def __enter__(self) -> LaunchFile:
        self._stack.enter_context(on_abort(self._record_end))
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], _: object) -> None:
        self._stack.close()
        self._record_end(error)
        self._folder.close()

    def _record_end(self, error: Optional[BaseException]) -> None:
        state, exit_code, message = (DONE, self.exit_code, "") if error is None else end_of(error)
        if not isinstance(error, RaypodError):
            exit_code = getattr(error, "exit_code", exit_code)  # of a signal
        self._content.pop("status_port", None)
        self._content.pop("status_token_file", None)
        self._write(state=state, exit_code=exit_code, message=message)

    def _write(self, **changed: Any) -> None:
        self._content.update(changed)
        with contextlib.suppress(OSError):
            replace_file(self._path, (strict_json({**self._content, "written_at_s": time.time()}) + "\n").encode())


def read(folder: Path) -> Optional[Dict[str, Any]]:
    """Return the content of the file of a folder; None without one."""
    try:
        content: Dict[str, Any] = parse_json((folder / LAUNCH).read_text())
    except (OSError, ValueError):
        return None
    return content
