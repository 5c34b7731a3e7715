"""`ledger.jsonl`: an append-only log of the samples that every call was fed, as the instances report them.

Each generation of the fleet writes a line with the update from which it trains; it supersedes the calls of earlier
generations from there on. Each call has one digest per instance, over the indices of the samples that it gathered.
`verify_data.py` compares them with the order that follows from the config.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

from raypod.events import CallDone, Event, Repaired, Resized, RunStarted
from raypod.plan.layout import LEDGER
from raypod.plan.plan import Geometry, Plan
from raypod.runs.callback import LinesSink
from raypod.runs.growing_file import last_lines
from raypod.system.files import AppendOnlyFile, parse_json


@dataclasses.dataclass(frozen=True)
class GenerationStarted:
    """A generation trains from `update` (0-based) on, with these sizes; None: those of the run's plan."""

    generation: int
    update: int
    instances: int
    replicas: Optional[int] = None
    gradient_accumulation: Optional[int] = None
    left_out: Tuple[int, ...] = ()  # training samples, in whose places the next ones are

    def geometry(self, planned: Geometry) -> Geometry:
        """Return the sizes of this generation of a run that was planned with other ones."""
        return dataclasses.replace(
            planned,
            num_instances=self.instances,
            total_replicas=self.replicas or planned.total_replicas,
            gradient_accumulation=self.gradient_accumulation or planned.gradient_accumulation,
        )


@dataclasses.dataclass(frozen=True)
class CallRecord:
    """One call: `count` samples of the order of `epoch`, starting at `position`. All are 0-based."""

    generation: int
    update: int
    epoch: int
    position: int
    count: int
    digests: Dict[int, str]  # by instance; missing for an instance that was lost before it reported


Line = Union[GenerationStarted, CallRecord]


class Ledger(LinesSink):
    """The ledger of a run folder, open for appending."""

    def __init__(self, plan: Plan, warn: Callable[[str], None] = lambda text: None) -> None:
        """Open the ledger; `warn` gets one line when the disk begins to fail. OSError if it cannot be opened."""
        self._plan = plan
        self._file = AppendOnlyFile(Path(plan.run_dir) / LEDGER, warn)
        self._file.end_line()
        self._generation = 0
        geometry = plan.geometry
        self._sizes = (geometry.num_instances, geometry.total_replicas, geometry.gradient_accumulation)

    def on_event(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.begin(event.generation, event.first_update)
        elif isinstance(event, Resized):
            self._sizes = (len(event.hosts), event.replicas, event.gradient_accumulation)
        elif isinstance(event, Repaired):
            self.begin(event.generation, event.update)
        elif isinstance(event, CallDone):
            self.write(event)

    def begin(self, generation: int, update: int) -> None:
        """Start `generation`, which trains from `update` on; the following calls belong to it."""
        self._generation = generation
        left_out = self._plan.config.data.left_out("train")
        self._write(GenerationStarted(generation, update, *self._sizes, left_out))

    def write(self, call: CallDone) -> None:
        """Append a call."""
        geometry = self._plan.geometry
        epoch, in_epoch = divmod(call.first_update, self._plan.updates_per_epoch)
        position = in_epoch * geometry.global_batch_size
        count, digests = geometry.samples_per_call, dict(call.digests)
        self._write(CallRecord(self._generation, call.first_update, epoch, position, count, digests))

    def _write(self, line: Line) -> None:
        self._file.write_line(json.dumps(vars(line)))  # `asdict` would copy every digest


def read(path: Path) -> Tuple[List[Line], List[int]]:
    """Return the lines of a ledger, and the numbers (1-based) of the truncated or damaged ones."""
    lines: List[Line] = []
    unreadable: List[int] = []
    for number, text in enumerate(path.read_bytes().split(b"\n"), start=1):
        if text.strip():
            line = _parsed(text)
            if line is None:
                unreadable.append(number)
            else:
                lines.append(line)
    return lines, unreadable


def last_generation(run_dir: str) -> int:
    """Return the newest generation in the ledger of a run folder; 0 without a ledger."""
    found = (_parsed(line.text) for line in last_lines(Path(run_dir) / LEDGER))  # generations only grow
    return next((line.generation for line in found if line is not None), 0)


def last_call(run_dir: Path) -> Optional[CallRecord]:
    """Return the last call in the ledger of a run folder; None without one."""
    found = (_parsed(line.text) for line in last_lines(run_dir / LEDGER))
    return next((line for line in found if isinstance(line, CallRecord)), None)


def _parsed(text: bytes) -> Optional[Line]:
    """Return a line of a ledger; None if it is truncated or damaged."""
    try:
        return _parse(parse_json(text.decode()))
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def _parse(content: Dict[str, Any]) -> Line:
    if "instances" in content:
        return GenerationStarted(**{**content, "left_out": tuple(content.get("left_out", ()))})
    digests = {int(instance): str(value) for instance, value in content.pop("digests").items()}
    return CallRecord(digests=digests, **content)
