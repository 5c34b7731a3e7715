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
_END_S = 5.0


class Template:
    """Starts the template in the current environment, which must be that of the raylet."""

    def __init__(self, **options: Any) -> None:
        """`options` are those of `subprocess.Popen`."""
        null = subprocess.DEVNULL
        self._listener = socket.socket(socket.AF_UNIX)
        number = self._listener.fileno()
        options.update(pass_fds=[number], stdin=subprocess.PIPE, stdout=null, stderr=null, cwd="/")
        self._process = subprocess.Popen([sys.executable, str(worker_template.__file__), str(number)], **options)
        self.pid = self._process.pid

    @contextlib.contextmanager
    def used_by(self, services: Any) -> Iterator[None]:
        """Within this context, the raylet that `ray._private.services` starts uses this template."""
        before: Callable[..., Any] = services.ConsolePopen

        def start(command: List[str], *arguments: Any, env: Optional[Dict[str, str]] = None, **options: Any) -> Any:
            logs = next((each[len(_LOGS) :] for each in command if each.startswith(_LOGS)), None)
            path = self._listen(logs) if logs and command[0].endswith(_RAYLET) else None
            if logs is None or path is None:
                return before(command, *arguments, env=env, **options)
            variables = {"RAYPOD_TEMPLATE": path, "RAYPOD_TEMPLATE_PYTHON": sys.executable}
            environment = {**(os.environ if env is None else env), **variables}
            raylet = before([_asking(each) for each in command], *arguments, env=environment, **options)
            self._end_with(raylet.pid, logs)
            return raylet

        with replaced(services, ConsolePopen=start):
            yield

    def _listen(self, folder: str) -> Optional[str]:
        """Return the path of the socket, at which requests can now come, and wait; None if its path is too long.

        It is in the folder of the logs, below the one that `private.py` checks: the processes of all users and of all
        containers in the network of this host could connect to an abstract one, and take its name once it is free.
        """
        path = f"{folder}/template-{secrets.token_hex(3)}"  # no longer than the paths of sockets of Ray
        try:
            self._listener.bind(path)
        except OSError:
            return None
        self._listener.listen(128)
        self._listener.close()
        return path

    def close(self) -> None:
        """End the template; without this it ends with the raylet."""
        assert self._process.stdin is not None
        self._listener.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk that does not answer
            self._process.wait(_END_S)
        self._process.stdin.close()

    def _end_with(self, raylet: int, logs: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self._process.stdin.write(f"{raylet}\n{logs}\n".encode())
            self._process.stdin.flush()


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within this context, a module or a class of Ray has these attributes in place of its own."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _asking(argument: str) -> str:
    """Return an argument of the raylet in which the interpreter of the workers is replaced."""
    interpreter = _WORKERS + subprocess.list2cmdline([sys.executable])
    if not argument.startswith(interpreter):
        return argument
    return _WORKERS + subprocess.list2cmdline([str(_PYTHON)]) + argument[len(interpreter) :]
