"""A fake `vipu` tool in this process: it keeps partitions in memory and records its commands.

The output format is inferred: the documentation of V-IPU does not state it.
"""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any, Dict, List, Tuple

import pytest

from raypod.system import vipu


class FakeVipu:
    """Stands for the tool and `subprocess` in raypod.system.vipu.

    `failures` are the outputs of the next creations; `raised` is raised once a command with that verb is executed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.partitions: Dict[str, Tuple[int, int, bool]] = {}  # size, GCDs, whether it is reconfigurable
        self.commands: List[str] = []
        self.timeouts: List[float] = []
        self.failures: List[str] = []
        self.raised: Dict[str, BaseException] = {}
        self.processes: List[Process] = []
        names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")}
        monkeypatch.setattr(vipu, "subprocess", SimpleNamespace(Popen=self._start, **names))
        monkeypatch.setattr(vipu, "shutil", SimpleNamespace(which=lambda name: f"/bin/{name}"))

    @property
    def changes(self) -> List[str]:
        """The commands that change something."""
        return [each for each in self.commands if each.split()[0] not in ("list", "get", "--api-host")]

    @property
    def verbs(self) -> List[str]:
        """The first words of `changes`."""
        return [each.split()[0] for each in self.changes]

    def _start(self, command: List[str], start_new_session: bool, **options: Any) -> Process:
        assert command[0] == "vipu"
        assert start_new_session
        self.commands.append(" ".join(command[1:]))
        words = command[5:] if command[1] == "--api-host" else command[1:]
        self.processes.append(Process(self, words[0], *self._execute(words)))
        return self.processes[-1]

    def _execute(self, words: List[str]) -> Tuple[int, str]:
        verb, kind, *names = words
        rule = "-" * 40
        if verb == "create":
            if self.failures:
                return 1, self.failures.pop(0)
            values = dict(zip(names[1::2], names[2::2]))
            new = int(values["--size"]), int(values.get("--num-gcds", 1)), "--reconfigurable" in names
            self.partitions[names[0]] = new
        elif verb == "list":
            rows = [f" {name:<9} | {size:>4} | ACTIVE" for name, (size, _, _) in sorted(self.partitions.items())]
            return 0, "\n".join([rule, " Partition | Size | State", rule, *rows])
        elif names[0] not in self.partitions:
            return 1, f"{kind} {names[0]} not found"
        elif verb == "remove":
            del self.partitions[names[0]]
        elif verb == "get":
            size, gcds, reconfigurable = self.partitions[names[0]]
            rows = [f" Size           | {size}", f" GCDs           | {gcds}"]
            rows.append(f" Reconfigurable | {'yes' if reconfigurable else 'no'}")
            return 0, "\n".join([rule, f" Partition      | {names[0]}", rule, *rows])
        return 0, ""


class Process:
    """A command that has been executed."""

    def __init__(self, tool: FakeVipu, verb: str, returncode: int, output: str) -> None:
        self._tool, self._verb, self.returncode, self._output = tool, verb, returncode, output
        self.is_killed = self.is_awaited = False

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        """`Popen` closes its pipes."""

    def communicate(self, timeout: float) -> Tuple[bytes, None]:
        self._tool.timeouts.append(timeout)
        if self._verb in self._tool.raised:
            raise self._tool.raised.pop(self._verb)
        return self._output.encode(), None

    def kill(self) -> None:
        self.is_killed = True

    def wait(self) -> None:
        self.is_awaited = self.is_killed
