"""ledger.jsonl: which samples every call was fed, as the instances themselves saw it. Lines are added, never changed.

A life of the fleet begins with a line that says from which update on it trains; calls of earlier lives from there on
are superseded by it. A call's line has one digest per instance, over the indices of the samples that it gathered.
`verify_data.py` compares them with the order that the config stands for.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Tuple, Union

from raypod.events import CallDone
from raypod.host.files import AppendedLines
from raypod.plan.plan import Plan

NAME = "ledger.jsonl"


@dataclasses.dataclass(frozen=True)
class LifeBegun:
    """A generation trains from `update` (0-based) on, with so many instances."""

    generation: int
    update: int
    instances: int


@dataclasses.dataclass(frozen=True)
class CallFed:
    """One call: `count` samples from `position` of the order of `epoch` on (all 0-based)."""

    generation: int
    update: int
    epoch: int
    position: int
    count: int
    digests: Dict[int, str]  # by instance; one whose report was lost with it has none


Line = Union[LifeBegun, CallFed]


class Ledger:
    """The ledger of a run folder, open for one life of the fleet after the other."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        path = Path(plan.run_dir) / NAME
        ends_whole = _ends_whole(path)
        self._lines = AppendedLines(path)
        if not ends_whole:  # a line was cut off; what follows it begins a line of its own
            self._lines.add("")
        self._generation = 0

    def begin(self, generation: int, update: int) -> None:
        """From here on lines belong to `generation`, which trains from `update` on."""
        self._generation = generation
        self._write(LifeBegun(generation, update, self._plan.geometry.num_instances))

    def write(self, call: CallDone) -> None:
        """Add a call."""
        geometry, per_epoch = self._plan.geometry, self._plan.updates_per_epoch
        epoch, in_epoch = divmod(call.first_update, per_epoch)
        position = in_epoch * geometry.global_batch_size
        count, digests = geometry.samples_per_call, dict(call.digests)
        self._write(CallFed(self._generation, call.first_update, epoch, position, count, digests))

    def sync(self) -> None:
        """All lines on the disk."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file. OSError if lines could not be written."""
        self._lines.close()

    def _write(self, line: Line) -> None:
        self._lines.add(json.dumps(dataclasses.asdict(line)))


def _ends_whole(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def read(path: Path) -> Tuple[List[Line], List[int]]:
    """The lines of a ledger, and the numbers (from 1 on) of those that cannot be read: cut off, or damaged."""
    lines: List[Line] = []
    unreadable: List[int] = []
    for number, text in enumerate(path.read_bytes().split(b"\n"), start=1):
        if text.strip():
            try:
                lines.append(_parsed(json.loads(text.decode())))
            except (ValueError, TypeError, AttributeError, KeyError):
                unreadable.append(number)
    return lines, unreadable


def last_generation(run_dir: str) -> int:
    """The last life that the ledger of a run folder knows; 0 without one."""
    path = Path(run_dir) / NAME
    lines = read(path)[0] if path.is_file() else []
    return max((line.generation for line in lines), default=0)


def _parsed(content: Dict[str, Any]) -> Line:
    if "instances" in content:
        return LifeBegun(**content)
    digests = {int(instance): str(value) for instance, value in content.pop("digests").items()}
    return CallFed(digests=digests, **content)
