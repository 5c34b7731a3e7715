"""A run from the files of its folder: it has ended, runs on another host, or its coordinator does not answer."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from raypod.events import UpdateDone
from raypod.observe.monitor.from_status import event_lines
from raypod.observe.monitor.model import Instance, Run
from raypod.plan.layout import EVENTS, LAUNCH, METRICS, PLAN, SUMMARY
from raypod.runs import run_state
from raypod.runs.growing_file import GrowingFile
from raypod.runs.lines import events_in, flat
from raypod.runs.recent_events import RecentEvents
from raypod.runs.run_end import RunEndWatch
from raypod.runs.run_state import RunState
from raypod.system.files import parse_json

_KEPT_UPDATES, _KEPT_EVENTS = 512, 200
_TAIL_BYTES = 512 << 10  # of metrics.jsonl
_CALL_KEYS = ("data_wait_share", "p50_s", "p95_s", "slowest_s", "busy_ratio")


class RunFiles:
    """Reads a run folder again and again; every `read` reads only what is new of the files that grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._end = RunEndWatch(folder)
        self._metrics = GrowingFile(folder / METRICS, _tail_of(folder / METRICS))
        self._events = GrowingFile(folder / EVENTS)
        self._updates: List[UpdateDone] = []
        self._recent = RecentEvents(_KEPT_EVENTS)
        self._placed: Dict[int, Mapping[str, Any]] = {}  # instance -> its newest start
        self._last: Dict[str, Mapping[str, Any]] = {}  # the newest event of each kind
        self._evaluations: List[Mapping[str, Any]] = []  # of the weights that the run still has

    def read(self) -> Run:
        """Return the run as the files describe it. Files that are missing or damaged are skipped."""
        self._read_new()
        plan, state = _json(self.folder / PLAN), run_state.read(self.folder)
        launch = _json(self.folder / LAUNCH)
        update = self._updates[-1] if self._updates else None
        evaluation, saved = (self._evaluations or [{}])[-1], self._last.get("checkpoint_saved", {})
        state_fields = self._state(state, launch, update.update if update else 0)
        # A folder with an exit code or a dead coordinator has no current throughput, only its mean.
        rates = flat(update) if update else {}
        if state_fields["state"] not in ("starting", "running"):
            rates = _json(self.folder / SUMMARY)
        return Run(
            run_dir=str(self.folder),
            kind="launch" if state is None and launch else "training",
            program=_command(launch) or str(plan.get("task") or ""),
            phase=str(self._last.get("phase_begun", {}).get("phase", "")),
            device_line=self._last.get("run_started", {}).get("device_line"),
            started_unix_s=self._last.get("process_started", {}).get("unix_s"),
            total_updates=_integer(plan.get("total_updates")),
            epoch=update.epoch if update else None,
            epochs=_integer(plan.get("total_updates")) / (_integer(plan.get("updates_per_epoch")) or 1),
            samples_are=str(plan.get("samples_are") or "samples"),
            samples_per_s=_finite(rates.get("samples_per_s")),
            part_rates={name: rate for name, rate in rates.items() if _is_rate(name) and _finite(rate) is not None},
            data_wait_share=rates.get("data_wait_share"),
            metrics=update.metrics if update else {},
            restarts=_integer(self._last.get("repaired", {}).get("restarts")),
            repaired_unix_s=_finite(self._last.get("repaired", {}).get("unix_s")),
            checkpoint_update=saved.get("update"),
            checkpoint_unix_s=saved.get("unix_s"),
            evaluation=evaluation.get("metrics") or {},
            evaluation_update=evaluation.get("update"),
            instances=self._instances(plan),
            series=self._series(),
            events=event_lines(self._recent.records()),
            **state_fields,
        )

    def _state(self, state: Optional[RunState], launch: Mapping[str, Any], update: int) -> Dict[str, Any]:
        """Return the fields that tell whether the run goes on, and how it ended."""
        ended = self._end.poll()
        if state is None:
            code = launch.get("exit_code")
            name = str(launch.get("state") or ("done" if code == 0 else "failed" if code is not None else "running"))
            known: Dict[str, Any] = {key: launch[key] for key in ("host", "pid", "exit_code") if key in launch}
            return {**known, "update": update, "state": name if launch else "unknown"}
        known = {"host": state.host, "pid": state.pid, "exit_code": state.exit_code, "message": state.message}
        name = state.state
        if not state.has_ended and ended is not None:
            name, known["message"] = "died", "its coordinator's process ended without a record; the run can be resumed"
        return {**known, "update": max(update, state.update), "state": name}

    def _read_new(self) -> None:
        with contextlib.suppress(OSError):
            records, restarted = self._metrics.read_records()
            if restarted:
                self._updates = []
            for each in events_in(UpdateDone, records):
                while self._updates and self._updates[-1].update >= each.update:
                    self._updates.pop()  # a repaired or resumed run repeats updates
                self._updates.append(each)
            self._updates = self._updates[-_KEPT_UPDATES:]
        with contextlib.suppress(OSError):
            records, restarted = self._events.read_records()
            if restarted:
                self._recent, self._placed, self._last = RecentEvents(_KEPT_EVENTS), {}, {}
                self._evaluations = []
            for record in records:
                self._recent.append(record)
                self._last[str(record.get("event"))] = record
                if record.get("event") == "evaluation_done":
                    self._evaluations = [*self._evaluations[-_KEPT_EVENTS:], record]
                if record.get("event") in ("run_started", "repaired"):
                    self._placed = _by_instance(record.get("instances"))
                    update = _integer(record.get("update", record.get("first_update")))
                    self._evaluations = [each for each in self._evaluations if _integer(each.get("update")) <= update]

    def _specs(self, plan: Mapping[str, Any]) -> List[Mapping[str, Any]]:
        """Return the instances of the plan; after a change of the number of replicas, those that replaced them."""
        resized = self._last.get("resized", {})
        hosts, replicas = resized.get("hosts"), _integer(resized.get("replicas"))
        if not isinstance(hosts, list) or not hosts:
            return _objects(plan.get("instances"))
        local = replicas // len(hosts)
        return [
            {"index": index, "host": host, "replica_offset": index * local, "local_replicas": local}
            for index, host in enumerate(hosts)
        ]

    def _instances(self, plan: Mapping[str, Any]) -> Tuple[Instance, ...]:
        times = _by_instance(self._last.get("call_times", {}).get("instances"))
        geometry = plan.get("geometry")
        ipus = _integer(geometry.get("local_ipus")) if isinstance(geometry, dict) else 0
        found = []
        for spec in self._specs(plan):
            index = _integer(spec.get("index"))
            placed, calls = self._placed.get(index, {}), times.get(index, {})
            statistics: Dict[str, Any] = {key: calls.get(key) for key in _CALL_KEYS}
            found.append(
                Instance(
                    instance=index,
                    host=str(placed.get("host") or spec.get("host") or ""),
                    pid=placed.get("pid"),
                    first_replica=_integer(spec.get("replica_offset")),
                    num_replicas=_integer(spec.get("local_replicas")),
                    first_ipu=index * ipus,
                    num_ipus=ipus,
                    log_file=str(self.folder / "logs" / f"instance-{index}.log"),
                    **statistics,
                )
            )
        return tuple(found)

    def _series(self) -> Dict[str, Tuple[Optional[float], ...]]:
        names = self._updates[-1].metrics if self._updates else {}
        found = {name: tuple(_finite(each.metrics.get(name)) for each in self._updates) for name in names}
        return {"samples_per_s": tuple(_finite(each.samples_per_s) for each in self._updates), **found}


def _tail_of(path: Path) -> int:
    try:
        return max(0, path.stat().st_size - _TAIL_BYTES)
    except OSError:
        return 0


def _json(path: Path) -> Dict[str, Any]:
    try:
        content = parse_json(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _command(launch: Mapping[str, Any]) -> str:
    command = launch.get("command") or launch.get("program") or ""
    return command if isinstance(command, str) else " ".join(map(str, command))


def _objects(content: Any) -> List[Mapping[str, Any]]:
    """Return the objects of a list; [] for anything else."""
    return [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []


def _by_instance(content: Any) -> Dict[int, Mapping[str, Any]]:
    return {_integer(each.get("instance")): each for each in _objects(content)}


def _is_rate(name: str) -> bool:
    """Return whether a key of metrics.jsonl or summary.json is a throughput in parts of samples."""
    return name.endswith("_per_s") and name != "samples_per_s"


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _finite(value: Any) -> Optional[float]:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
