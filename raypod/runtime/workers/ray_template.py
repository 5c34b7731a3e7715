"""Lets a raylet fork its workers from a template, a process that has imported torch, instead of starting each anew.

Ray has no setting for this. The command of the raylet contains the one with which it starts workers; its interpreter is
replaced by `worker_python`, which asks the template and, without an answer, executes the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

from raypod.runtime.workers import worker_template

_PYTHON = Path(__file__).parent / "worker_python"
_RAYLET = "/raylet/raylet"  # ends the path of its program
_LOGS = "--log_dir="
_WORKERS = "--python_worker_command="


class Template:
    """Starts the template in the current environment, which must be that of the raylet."""

    def __init__(self, **options: Any) -> None:
        """`options` are those of `subprocess.Popen`."""
        self._name, null = f"raypod-{secrets.token_hex(16)}", subprocess.DEVNULL
        with socket.socket(socket.AF_UNIX) as listener:  # requests can come, and wait, before the template is there
            listener.bind(f"\0{self._name}")
            listener.listen(128)
            command = [sys.executable, str(worker_template.__file__), str(listener.fileno())]
            options.update(pass_fds=[listener.fileno()], stdin=subprocess.PIPE, stdout=null, stderr=null, cwd="/")
            self._process = subprocess.Popen(command, **options)
        self.pid = self._process.pid

    @contextlib.contextmanager
    def used_by(self, services: Any) -> Iterator[None]:
        """Within this context, the raylet that `ray._private.services` starts uses this template."""
        before: Callable[..., Any] = services.ConsolePopen

        def start(command: List[str], *arguments: Any, env: Optional[Dict[str, str]] = None, **options: Any) -> Any:
            logs = next((each[len(_LOGS) :] for each in command if each.startswith(_LOGS)), None)
            if logs is None or not command[0].endswith(_RAYLET):
                return before(command, *arguments, env=env, **options)
            variables = {"RAYPOD_TEMPLATE": self._name, "RAYPOD_TEMPLATE_PYTHON": sys.executable}
            environment = {**(os.environ if env is None else env), **variables}
            raylet = before([_asking(each) for each in command], *arguments, env=environment, **options)
            self._end_with(raylet.pid, logs)
            return raylet

        services.ConsolePopen = start
        try:
            yield
        finally:
            services.ConsolePopen = before

    def close(self) -> None:
        """End the template; without this it ends with the raylet."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()

    def _end_with(self, raylet: int, logs: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._process.stdin.write(f"{raylet}\n{logs}\n".encode())
            self._process.stdin.flush()


def _asking(argument: str) -> str:
    """Return an argument of the raylet in which the interpreter of the workers is replaced."""
    interpreter = _WORKERS + subprocess.list2cmdline([sys.executable])
    if not argument.startswith(interpreter):
        return argument
    return _WORKERS + subprocess.list2cmdline([str(_PYTHON)]) + argument[len(interpreter) :]
