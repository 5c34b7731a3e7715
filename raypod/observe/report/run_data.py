"""Read a run folder into plain data, which a page draws and a server sends; only what was appended is read again.

`RunReader(folder).refresh()` reads, `data()` returns a dict that JSON can hold (see `strict_json`, which writes NaN as
null). Its size is bounded, whatever the length of the run. Keys:

    id           absolute path of the folder; identifies the run
    name         name of the folder
    state        "starting", "running", "done", "interrupted", "preempted", "failed", "died" (the process has ended
                 without a trace) or "unknown"; `exit_code`, `message` (why it ended), `update`, `total_updates`,
                 `epoch`, `restarts`
    task, device, device_line, parameters, raypod
    metrics      names of the metrics of the updates, the loss first
    rates        names of further rates, as tokens_per_s
    traces       names of what is known of the optimizer: learning_rate, and norms of `--log`
    curves       {columns: ["update", "samples", "time_s", *metrics, *traces, "samples_per_s", "data_wait_share",
                 *rates], rows: [[number or null, ...], ...], updates: lines of metrics.jsonl, decimated: whether rows
                 were left out}. Samples count from the start of the training; `time_s` is the time in seconds over all
                 starts
    evaluations  {columns: ["update", "samples", "time_s", *metrics], rows}
    results      [{name, split: "training" or "test", last, best, update of the best}]; null for what is unknown
    calls        null, or the windows of the call times: {instances: [index, ...], end_s, first_update, calls: [per
                 window], p50_s, p95_s, slowest_s, busy_s: [per instance][per window], straggler_ratio, totals:
                 [{instance, p50_s, p95_s, mean_s, busy_s, slowest_s, data_wait_share, peer_wait_share, busy_ratio,
                 calls}, ...]}
    timeline     {origin_unix_s, end_s, generations: [{cause: "started", "resumed" or "repaired", generation, begin_s,
                 ready_s, update}], spans: [[index of the generation, phase, begin, end, update], ...], marks: [[kind,
                 index of the generation, seconds, update, text], ...], counts: {kind: number}, gaps: [[seconds,
                 length], ...], phase_s: {phase: seconds}}; kinds are the events' names
    starts       [{generation, cause, total_s, steps: [[name, seconds], ...], instances: [[index, steps], ...]}]
    instances    [{instance, host, pid, replicas: [first, number], lost: number of times}], as of the newest generation
    versions     {package: {version: [instances]}}
    plan         null, or what `plan_data` returns
    config       {"section.key": value}, without the settings that have no effect
    test         null, or the content of `test.json`: what the newest evaluation says of the predictions
    summary      null, or the content of `summary.json` of the newest start, without its evaluations

The plan of a run as the report draws it: hosts, instances, replicas, IPUs and pipeline stages.

The best and the last value of each metric of a run, and the settings that differ between runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import yaml

from raypod.errors import ConfigError
from raypod.events import EvaluationDone, UpdateDone
from raypod.observe.report.curves import MAX_ROWS, Curves, evaluation_data
from raypod.observe.report.timeline import CallWindows, Starts, Timeline
from raypod.plan import layout
from raypod.plan.compatibility import with_effect
from raypod.plan.layout import CONFIG, EVALUATIONS, METRICS, PLAN, SUMMARY, TEST
from raypod.plan.sections import MAX_REPORT_SAMPLES
from raypod.plan.unique_keys import UniqueKeyLoader
from raypod.plan.values import ipus_of
from raypod.runs import run_state
from raypod.runs.growing_file import GrowingFile
from raypod.runs.lease import Log
from raypod.runs.metrics import events_in
from raypod.runs.run_state import RunEndWatch
from raypod.runs.upload import remote_run
from raypod.system.command_line import counted
from raypod.system.files import parse_json
from raypod.training.models.schedule import StageCost, compare_strategies

_DIED = "died"  # no end on record, and the coordinator is gone
_PART_BYTES = 4 << 20  # of the metrics that are parsed at a time: as objects they take ten times as much memory
_MAX_TEXT = 4000  # characters of a message or a setting


class RunReader:
    """Reads one run folder, and again what was appended to its files."""

    def __init__(self, folder: Path) -> None:
        """ConfigError if the folder holds no run."""
        if not layout.is_run_folder(folder):
            marks = ", ".join(layout.names("mark"))
            runs = sum(map(layout.is_run_folder, folder.iterdir())) if folder.is_dir() else 0
            known = "does not exist" if not folder.exists() else f"is no run folder: it has none of {marks}"
            several = f"; it contains {counted(runs, 'run')}: name them, as in {folder}/*" if runs else ""
            raise ConfigError(f"{folder} {known}{several}")
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100 - keeps symlinks
        self._metrics = GrowingFile(folder / METRICS, max_bytes=_PART_BYTES)
        self._evaluations = GrowingFile(folder / EVALUATIONS)
        self._events = GrowingFile(folder / layout.EVENTS)
        self._curves, self._evaluated = Curves(), []  # type: Tuple[Curves, List[EvaluationDone]]
        self._restart_events()
        self._contents: Dict[str, Tuple[Tuple[int, int], Any]] = {}  # by name of the file, with its identity
        self._state: Dict[str, Any] = {}
        self._end = None if remote_run.is_copy(folder) else RunEndWatch(folder)  # a copy has no lease

    def refresh(self) -> bool:
        """Read what is new; return whether there is anything. ConfigError if a file cannot be read."""
        try:
            changed = [
                self._read(self._metrics, self._add_updates),
                self._read(self._evaluations, self._add_evaluations),
                self._read(self._events, self._add_events),
                *(self._load(name, parse_json) for name in (PLAN, SUMMARY, TEST)),
                self._load(CONFIG, partial(yaml.load, Loader=UniqueKeyLoader)),
            ]
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
        state = _state_of(self.folder, has_died=self._end is not None and self._end.has_died)
        changed.append(state != self._state)
        self._state = state
        return any(changed)

    def observe(self, log: Log) -> None:
        """Wait until it is known whether a coordinator on another host lives; `log` prints a line before that."""
        if self._end is not None:
            self._end.observe(log)

    def data(self, max_rows: int = MAX_ROWS) -> Dict[str, Any]:
        """Return the run as plain data with at most `max_rows` rows of the curves."""
        plan, summary = self._content(PLAN), self._summary()
        config = _flat(self._content(CONFIG))
        is_running = self._state["state"] in (run_state.STARTING, run_state.RUNNING)
        drawn = plan_data(plan, config)
        curves, state = self._curves.data(max_rows), dict(self._state)
        if state["state"] == _DIED and curves["rows"]:
            # state.json is written from time to time: metrics.jsonl has what a killed process did after that
            state["update"] = int(curves["rows"][-1][0])
        evaluations = evaluation_data(self._evaluated, self._curves)
        better = plan.get("metrics")
        return {
            "id": str(self.folder),
            "name": self.folder.name,
            **state,
            "epoch": self._curves.epoch,
            "task": plan.get("task"),
            **self._starts.facts,
            "metrics": self._curves.metrics,
            "rates": self._curves.rates,
            "traces": self._curves.traces,
            "curves": curves,
            "evaluations": evaluations,
            "results": results_of(
                curves, evaluations, self._curves.metrics, better if isinstance(better, dict) else {}
            ),
            "calls": self._calls.data(),
            "timeline": self._timeline.data(time.time() if is_running else None),
            "starts": self._starts.starts,
            "instances": self._starts.instances(drawn["instances"] if drawn else []),
            "versions": self._starts.versions(),
            "plan": drawn,
            "config": with_effect(config),
            "summary": summary or None,
            "test": _with_fewer_errors(self._content(TEST), max_rows) or None,
        }

    def _summary(self) -> Dict[str, Any]:
        """Return the summary of the newest start without its evaluations; {} as long as that one has not ended."""
        summary = self._content(SUMMARY) if self._starts.has_summary else {}
        return {key: value for key, value in summary.items() if key != "evaluations"}

    def _read(self, file: GrowingFile, add: Callable[[List[Dict[str, Any]], bool], None]) -> bool:
        """Pass the new records of a file to `add`, in parts of bounded size."""
        is_new = False
        while True:
            before = file.position
            found = file.read_records()
            if found.records or found.restarted:
                add(found.records, found.restarted)
                is_new = True
            if not 0 < file.position - before < file.path.stat().st_size - before:
                return is_new

    def _add_updates(self, records: List[Dict[str, Any]], restarted: bool) -> None:
        if restarted:
            self._curves = Curves()
        self._curves.add(events_in(UpdateDone, records))

    def _add_evaluations(self, records: List[Dict[str, Any]], restarted: bool) -> None:
        if restarted:
            self._evaluated = []
        self._evaluated += events_in(EvaluationDone, records)

    def _add_events(self, records: List[Dict[str, Any]], restarted: bool) -> None:
        if restarted:
            self._restart_events()
        for record in records:
            self._timeline.handle(record)
            self._starts.handle(record)
            unix_s = record.get("unix_s")
            if record.get("event") == "call_times" and isinstance(unix_s, (int, float)):
                self._calls.handle(record, self._timeline.seconds_at(unix_s))

    def _restart_events(self) -> None:
        self._timeline, self._calls, self._starts = Timeline(), CallWindows(), Starts()

    def _load(self, name: str, parse: Callable[[str], Any]) -> bool:
        """Read a file that is replaced as a whole, if it has changed; return whether it has."""
        path = self.folder / name
        try:
            facts = path.stat()
        except FileNotFoundError:
            return self._contents.pop(name, None) is not None
        identity = (facts.st_ino, facts.st_mtime_ns)
        if name in self._contents and self._contents[name][0] == identity:
            return False
        content = None
        with contextlib.suppress(ValueError, yaml.YAMLError):  # a damaged file counts as a missing one
            content = parse(path.read_text(encoding="utf-8", errors="replace"))
        self._contents[name] = (identity, content)
        return True

    def _content(self, name: str) -> Dict[str, Any]:
        content = self._contents.get(name, ((0, 0), None))[1]
        return content if isinstance(content, dict) else {}


def _with_fewer_errors(test: Dict[str, Any], max_rows: int) -> Dict[str, Any]:
    """Return the content of `test.json` with fewer images of samples if the curves have fewer rows."""
    errors = test.get("errors")
    most = -(-MAX_REPORT_SAMPLES * max_rows // MAX_ROWS)
    return {**test, "errors": errors[:most]} if isinstance(errors, list) else test


def _state_of(folder: Path, has_died: bool) -> Dict[str, Any]:
    """Return the state of the run, from `state.json` and whether its coordinator has died."""
    state = run_state.read(folder)
    if state is None:
        unknown = dict.fromkeys(("exit_code", "update", "total_updates"))
        return {"state": "unknown", "message": "", "restarts": 0, **unknown}
    return {
        "state": _DIED if has_died and not state.has_ended else state.state,
        "exit_code": state.exit_code,
        "message": state.message[:_MAX_TEXT],
        "update": state.update,
        "total_updates": state.total_updates,
        "restarts": state.restarts,
    }


def _flat(content: Dict[str, Any], prefix: str = "") -> Dict[str, Any]:
    """Return the settings of a config by their full names; values are numbers, strings, booleans or null."""
    found: Dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            is_plain = value is None or isinstance(value, (bool, int, float))
            found[f"{prefix}{key}"] = value if is_plain else str(value)[:_MAX_TEXT]
    return found


_MAX_CYCLES = 64  # of the schedule that is drawn


def plan_data(plan: Mapping[str, Any], config: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
    """Return what is drawn of the content of `plan.json`; None if it is no plan.

    Args:
        plan: the content of `plan.json`.
        config: the settings by their full names, as in `training.execution`.
    """
    geometry, cluster = plan.get("geometry"), plan.get("cluster")
    if not isinstance(geometry, dict) or not isinstance(cluster, dict) or not isinstance(plan.get("instances"), list):
        return None
    return {
        "cluster": cluster.get("name"),
        "hosts": [host.get("name") for host in cluster.get("hosts") or ()],
        "geometry": geometry,
        "dataset": plan.get("dataset"),
        "updates_per_epoch": plan.get("updates_per_epoch"),
        "total_updates": plan.get("total_updates"),
        "legs": len(plan.get("legs") or ()),
        "instances": [
            {name: each.get(name) for name in ("index", "host", "replica_offset", "local_replicas", "link_domain")}
            for each in plan["instances"]
        ],
        "pipeline": _pipeline(plan, geometry, config),
    }


def _pipeline(
    plan: Mapping[str, Any], geometry: Mapping[str, Any], config: Mapping[str, Any]
) -> Optional[Dict[str, Any]]:
    """Return the stages of a replica and the schedule of one update; None for a replica on one IPU."""
    num_ipus, accumulation = geometry.get("ipus_per_replica"), geometry.get("gradient_accumulation")
    if not isinstance(num_ipus, int) or not isinstance(accumulation, int) or num_ipus < 2:
        return None
    splits: List[str] = [str(each) for each in plan.get("pipeline_splits") or ()]
    try:
        ipus = ipus_of(splits) if splits else tuple(range(num_ipus))
    except ValueError:  # of a later version
        return None
    names = ["the input", *(each.partition("=")[0] for each in splits)]
    if not splits:
        names = ["the blocks of the model"] * num_ipus
    execution = str(config.get("training.execution") or "pipelined")
    schedules = compare_strategies([StageCost(1.0, 2.0, 1.0, ipu) for ipu in ipus], accumulation)
    schedule = schedules.get(execution)
    found: Dict[str, Any] = {"execution": execution, "stages": names, "ipus": list(ipus), "accumulation": accumulation}
    found["cycles"] = None
    if schedule is not None:
        found["cycles"] = schedule.cycles
        found["sections"] = list(schedule.sections[:_MAX_CYCLES])
        found["cells"] = [
            [cell.cycle, cell.stage, cell.what, cell.micro_batch]
            for cell in schedule.cells
            if cell.cycle < _MAX_CYCLES and cell.what != "idle"
        ]
    return found


# Of runs whose plan.json does not say it yet: the metrics of the built-in tasks.
_BETTER = {"loss": "lower", "perplexity": "lower", "accuracy": "higher"}
_EVERY_RUN_HAS_ITS_OWN = ("run.run_dir",)


def results_of(
    training: Mapping[str, Any], evaluations: Mapping[str, Any], names: Sequence[str], better: Mapping[str, Any]
) -> List[Dict[str, Any]]:
    """Return {name, split, last, best, update of the best} of each metric, the loss first.

    Args:
        training: the curves of a run; a minimum or maximum of a long run is one of its rows.
        evaluations: the same of the test split.
        names: the metrics of the training.
        better: "lower" or "higher" by the name of a metric. Without it, `best` and its update are None.
    """
    found = []
    for split, table, of_split in (("training", training, names), ("test", evaluations, evaluations["columns"][3:])):
        for name in of_split:
            column = table["columns"].index(name)
            points = [(row[0], row[column]) for row in table["rows"] if not math.isnan(row[column])]
            update, best = _best(points, better.get(name) or _BETTER.get(name))
            last = points[-1][1] if points else None
            found.append({"name": name, "split": split, "last": last, "best": best, "update": update})
    return found


def _best(points: Sequence[Tuple[int, float]], better: Any) -> Tuple[Optional[int], Optional[float]]:
    """Return the update and the value of the best point, the first of equal ones."""
    if not points or better not in ("lower", "higher"):
        return None, None
    return (min if better == "lower" else max)(points, key=lambda point: point[1])


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> List[str]:
    """Return the names of the settings that are not equal in all runs."""
    names = list(dict.fromkeys(name for config in configs for name in config))
    return [
        name
        for name in names
        if name not in _EVERY_RUN_HAS_ITS_OWN and any(each.get(name) != configs[0].get(name) for each in configs)
    ]
