"""One run, followed in a thread: from its status endpoint, or from its files if that does not answer."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import psutil

from raypod.events import UpdateDone
from raypod.observe.monitor.log_lines import LastLines, tail_begin
from raypod.observe.monitor.model import EventLine, Instance, Run, Usage, built
from raypod.observe.monitor.style import clean
from raypod.observe.status.endpoint import Entry
from raypod.observe.status.run_status import user_name
from raypod.observe.status.token_server import ADDRESS
from raypod.plan.layout import EVENTS, LAUNCH, METRICS, PLAN, SUMMARY
from raypod.runs import run_state
from raypod.runs.event_log import RecentEvents
from raypod.runs.event_text import RECENT, text_of, time_of
from raypod.runs.growing_file import GrowingFile
from raypod.runs.metrics import events_in, flat
from raypod.runs.run_state import RunEndWatch, RunState
from raypod.system.files import parse_json, read_object

TIMEOUT_S = 2.0  # of a request
_MAX_BYTES = 64 << 20  # of an answer


class LiveRun:
    """The newest known state of the run of a registered process."""

    def __init__(self, entry: Entry, interval_s: float) -> None:
        self.entry, self._interval_s = entry, interval_s
        self.run: Optional[Run] = None
        self.first_try = threading.Event()
        self._answered_s: Optional[float] = None
        self._asked_s = time.monotonic()
        self._problem = ""
        self._last_lines, self._stopped = LastLines(), threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"status of {entry.run_dir}", daemon=True)
        self._thread.start()

    def current(self) -> Optional[Run]:
        """Return the run, with `problem` set if its process does not answer now; None before the first answer."""
        run, answered_s = self.run, self._answered_s
        if run is None or not self._problem:
            return run
        silent_s = time.monotonic() - (self._asked_s if answered_s is None else answered_s)
        instances = tuple(_older(each, silent_s) for each in run.instances)
        return dataclasses.replace(run, problem=f"{self._problem} (for {silent_s:.0f} s)", instances=instances)

    def stop(self) -> None:
        """End the thread after its current request."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join(TIMEOUT_S + 3)

    def _loop(self) -> None:
        while not self._stopped.is_set():
            began_s = time.monotonic()
            try:
                snapshot = ask(self.entry, TIMEOUT_S)
                run = run_of(snapshot, user=user_name(self.entry.uid), run_dir=self.entry.run_dir)
                self.run = with_log_lines(run, self._last_lines)
                self._answered_s, self._problem = time.monotonic(), ""
            except (OSError, http.client.HTTPException) as error:
                self._not_answered(_reason(self.entry, error))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self._not_answered(f"its status is that of another version ({type(error).__name__}: {error})")
            self.first_try.set()
            self._stopped.wait(max(0.05, self._interval_s - (time.monotonic() - began_s)))

    def _not_answered(self, why: str) -> None:
        """Keep the last state, or read the files if there never was an answer."""
        if self.run is None:
            found = RunFiles(Path(self.entry.run_dir)).read()
            user = user_name(self.entry.uid)
            found = dataclasses.replace(found, state="running", pid=self.entry.pid, user=user)
            self.run = with_log_lines(found, self._last_lines)
        self._problem = why


def with_log_lines(run: Run, last_lines: LastLines) -> Run:
    """Return a run whose instances have the last lines of their logs, as far as these are on this host.

    A log that did not change since the start or the last repair of the run ends with lines of before, such as the
    exception that the repair answered: it has no line.
    """
    since_s = max(run.started_unix_s or 0.0, run.repaired_unix_s or 0.0)
    instances = tuple(
        dataclasses.replace(each, log_line=last_lines.of(each.log_file, since_s) or each.log_line)
        for each in run.instances
    )
    return dataclasses.replace(run, instances=instances)


def _older(instance: Instance, seconds: float) -> Instance:
    """Return an instance as it was `seconds` ago, with the ages of now."""
    age_s = instance.heartbeat_age_s
    return dataclasses.replace(instance, heartbeat_age_s=None if age_s is None else age_s + seconds)


def ask(entry: Entry, timeout_s: float) -> Mapping[str, Any]:
    """Return the JSON of a status endpoint.

    Raises:
        OSError, http.client.HTTPException: no answer in time, or an error as the answer.
        ValueError: it is no JSON object.
    """
    with contextlib.closing(http.client.HTTPConnection(ADDRESS, entry.port, timeout=timeout_s)) as connection:
        connection.request("GET", "/status", headers={"Authorization": f"Bearer {entry.token}"})
        response = connection.getresponse()
        body = response.read(_MAX_BYTES)
        if response.status != 200:
            raise http.client.HTTPException(f"status {response.status}")
    content: Dict[str, Any] = parse_json(body)
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    return content


def _reason(entry: Entry, error: Exception) -> str:
    """Return why a process does not answer."""
    with contextlib.suppress(psutil.Error):
        if psutil.Process(entry.pid).status() == psutil.STATUS_STOPPED:
            return f"process {entry.pid} is stopped by a signal (SIGSTOP or a debugger)"
    if isinstance(error, (TimeoutError, OSError)) and "timed out" in str(error):
        return f"process {entry.pid} does not answer"
    detail = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return f"process {entry.pid} does not answer: {detail}"


Snapshot = Mapping[str, Any]
_COPIED = (  # keys that have the same name and meaning in `Run`
    *("host", "pid", "user", "phase", "started_unix_s", "device_line", "update", "total_updates", "epoch", "epochs"),
    *("eta_s", "last_update_unix_s", "samples_are", "samples_per_s", "data_wait_share", "restarts", "generation"),
    "repaired_unix_s",
)
_COPIED_INSTANCE = (
    *("instance", "host", "pid", "state", "activity", "activity_s", "waits_for_others", "samples_per_s"),
    *("heartbeat_age_s", "log_file"),
)
_COPIED_CALL = ("data_wait_share", "p50_s", "p95_s", "slowest_s", "busy_ratio")


def run_of(snapshot: Snapshot, **more: Any) -> Run:
    """Return the run of a snapshot; `more` are fields of `Run`, which win.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: the snapshot is something else.
    """
    is_launch = snapshot.get("kind") == "launch"
    checkpoints, evaluation = snapshot.get("checkpoints") or {}, snapshot.get("last_evaluation") or {}
    last = checkpoints.get("last") or {}
    fields: Dict[str, Any] = {key: snapshot[key] for key in _COPIED if snapshot.get(key) is not None}
    fields.update(
        run_dir=str(snapshot["run_dir"] or ""),
        kind="launch" if is_launch else "training",
        program=clean(_command(snapshot)) if is_launch else str(snapshot.get("task") or ""),
        state="starting" if snapshot.get("phase") == "starting" and not is_launch else "running",
        part_rates=_numbers(snapshot.get("part_rates") or {}),
        metrics=_numbers(snapshot.get("metrics") or {}),
        checkpoint_update=last.get("update"),
        checkpoint_unix_s=last.get("unix_s"),
        checkpoints_failed=checkpoints.get("failed") or 0,
        evaluation=_numbers(evaluation.get("metrics") or {}),
        evaluation_update=evaluation.get("update"),
        instances=tuple(_instance(each) for each in snapshot.get("instances") or ()),
        hosts={str(name): built(Usage, usage or {}) for name, usage in (snapshot.get("hosts") or {}).items()},
        series=_series(snapshot.get("recent_updates") or {}),
        events=event_lines(snapshot.get("events") or ()),
    )
    return Run(**{**fields, **more})


def _instance(content: Mapping[str, Any]) -> Instance:
    """Return an instance of a training, or a program of a launch."""
    calls, replicas, ipus = (
        content.get("call_s") or {},
        content.get("replicas") or (0, 0),
        content.get("ipus") or (0, 0),
    )
    fields = {key: content[key] for key in _COPIED_INSTANCE if content.get(key) is not None}
    fields.update({key: calls.get(key) for key in _COPIED_CALL})
    fields.update(zip(("first_replica", "num_replicas", "first_ipu", "num_ipus"), (*replicas, *ipus)))
    if content.get("exit_code") is not None:
        fields["state"] = f"exit code {content['exit_code']}"
    line = content.get("log_line") or content.get("last_line")  # of a training, of a launch
    return Instance(**fields, log_line=clean(str(line)) if line else None)


def _numbers(values: Mapping[str, Any]) -> Dict[str, Optional[float]]:
    return {str(name): None if value is None else float(value) for name, value in values.items()}


def _series(columns: Mapping[str, Sequence[Any]]) -> Dict[str, Tuple[Optional[float], ...]]:
    return {
        str(name): tuple(None if value is None or not math.isfinite(value) else float(value) for value in values)
        for name, values in columns.items()
        if name != "update"
    }


def event_lines(records: Sequence[Mapping[str, Any]]) -> Tuple[EventLine, ...]:
    """Return the events that the monitor shows, of records as `events.jsonl` has them."""
    shown = [each for each in records if each.get("event") in RECENT]
    return tuple(EventLine(time_of(each), str(each["event"]), clean(text_of(each))) for each in shown)


_KEPT_UPDATES, _KEPT_EVENTS = 512, 200
_TAIL_BYTES = 512 << 10  # of metrics.jsonl


class RunFiles:
    """Reads a run folder again and again; every `read` reads only what is new of the files that grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._end = RunEndWatch(folder)
        self._metrics = GrowingFile(folder / METRICS, tail_begin(folder / METRICS, _TAIL_BYTES))
        self._events = GrowingFile(folder / EVENTS)
        self._updates: List[UpdateDone] = []
        self._recent = RecentEvents(_KEPT_EVENTS)
        self._placed: Dict[int, Mapping[str, Any]] = {}  # instance -> its newest start
        self._last: Dict[str, Mapping[str, Any]] = {}  # the newest event of each kind
        self._evaluations: List[Mapping[str, Any]] = []  # of the weights that the run still has

    def read(self) -> Run:
        """Return the run as the files describe it. Files that are missing or damaged are skipped."""
        self._read_new()
        plan, state = read_object(self.folder / PLAN), run_state.read(self.folder)
        launch = read_object(self.folder / LAUNCH)
        update = self._updates[-1] if self._updates else None
        evaluation, saved = (self._evaluations or [{}])[-1], self._last.get("checkpoint_saved", {})
        state_fields = self._state(state, launch, update.update if update else 0)
        # A folder with an exit code or a dead coordinator has no current throughput, only its mean.
        rates = flat(update) if update else {}
        if state_fields["state"] not in ("starting", "running"):
            rates = read_object(self.folder / SUMMARY)
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
            statistics: Dict[str, Any] = {key: calls.get(key) for key in _COPIED_CALL}
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


def _command(launch: Mapping[str, Any]) -> str:
    """Return the command of a launch, from its file or its snapshot."""
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
