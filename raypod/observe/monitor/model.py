"""What the monitor shows, as immutable plain data: hosts, IPUs, runs, network rates; and what the user looks at.

`to_json` and `from_json` define the output of `raypod monitor --json`; docs/reference/observability.md has its keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Tuple, Type, TypeVar

VERSION = 1  # of the JSON: raised when the meaning of a key changes

T = TypeVar("T")
Series = Tuple[Optional[float], ...]


@dataclasses.dataclass(frozen=True)
class Usage:
    """The load of a host. Rates are bytes per second since the previous measurement; None if unknown."""

    cpu_share: Optional[float] = None  # of all cores, 0..1
    memory_used_bytes: Optional[int] = None
    memory_total_bytes: Optional[int] = None
    network_received_bytes: Optional[int] = None  # since boot
    network_sent_bytes: Optional[int] = None
    disk_used_bytes: Optional[int] = None
    disk_total_bytes: Optional[int] = None
    received_bytes_per_s: Optional[float] = None
    sent_bytes_per_s: Optional[float] = None


@dataclasses.dataclass(frozen=True)
class Instance:
    """An instance of a training, or a program of a launch. None for what is unknown."""

    instance: int
    host: str = ""
    pid: Optional[int] = None
    state: str = ""
    first_replica: int = 0
    num_replicas: int = 0
    first_ipu: int = 0
    num_ipus: int = 0
    activity: Optional[str] = None
    activity_s: Optional[float] = None
    waits_for_others: Optional[bool] = None
    samples_per_s: Optional[float] = None  # while it is in calls
    data_wait_share: Optional[float] = None  # of the time of its calls, 0..1
    p50_s: Optional[float] = None  # of its recent calls
    p95_s: Optional[float] = None
    slowest_s: Optional[float] = None  # of all its calls but the first
    busy_ratio: Optional[float] = None  # busy time over the median of all instances
    heartbeat_age_s: Optional[float] = None
    log_file: Optional[str] = None
    log_line: Optional[str] = None


@dataclasses.dataclass(frozen=True)
class EventLine:
    """An event of a run in one line."""

    unix_s: Optional[float]
    kind: str  # the event's name in events.jsonl
    text: str


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run, or the programs of a launch."""

    run_dir: str
    kind: str = "training"  # or "launch"
    host: str = ""  # of the coordinator
    pid: Optional[int] = None
    user: str = ""
    program: str = ""  # the task of a training, the command of a launch
    state: str = ""  # starting, running, done, interrupted, preempted, failed, or died: without an end on record
    problem: Optional[str] = None  # why the state is not current
    phase: str = ""
    started_unix_s: Optional[float] = None
    message: str = ""  # why it ended: of an error or of early stopping
    exit_code: Optional[int] = None
    device_line: Optional[str] = None
    update: int = 0
    total_updates: int = 0
    epoch: Optional[int] = None
    epochs: Optional[float] = None
    eta_s: Optional[float] = None
    last_update_unix_s: Optional[float] = None
    samples_are: str = "samples"
    samples_per_s: Optional[float] = None  # the mean of a run that has ended
    part_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    data_wait_share: Optional[float] = None
    metrics: Mapping[str, Optional[float]] = dataclasses.field(default_factory=dict)
    restarts: int = 0
    repaired_unix_s: Optional[float] = None  # the last repair
    generation: int = 0
    checkpoint_update: Optional[int] = None
    checkpoint_unix_s: Optional[float] = None
    checkpoints_failed: int = 0
    evaluation: Mapping[str, Optional[float]] = dataclasses.field(default_factory=dict)
    evaluation_update: Optional[int] = None
    instances: Tuple[Instance, ...] = ()
    hosts: Mapping[str, Usage] = dataclasses.field(default_factory=dict)
    series: Mapping[str, Series] = dataclasses.field(default_factory=dict)  # of the newest updates, oldest first
    events: Tuple[EventLine, ...] = ()  # oldest first

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.run_dir.rstrip("/").rpartition("/")[2] or self.run_dir

    @property
    def is_active(self) -> bool:
        """Whether the run has not ended."""
        return self.state in ("starting", "running")


@dataclasses.dataclass(frozen=True)
class Ipu:
    """An IPU of a host and what works on it; `run` is empty if it is idle."""

    ipu: int  # its index in the partition, as the plan and gc-monitor count
    state: str
    owner: str = ""
    run: str = ""
    instance: Optional[int] = None
    replica: Optional[int] = None
    program: str = ""
    pid: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class HostView:
    """A host, its load and its IPUs."""

    name: str
    usage: Usage = dataclasses.field(default_factory=Usage)
    ipus: Tuple[Ipu, ...] = ()
    problem: Optional[str] = None  # why nothing is known of it


@dataclasses.dataclass(frozen=True)
class Device:
    """An IPU as `gc-monitor` lists it."""

    ipu: int
    pid: Optional[int] = None
    owner: str = ""
    program: str = ""


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """What a monitor on a host finds there besides the runs."""

    name: str
    usage: Usage = dataclasses.field(default_factory=Usage)
    devices: Optional[Tuple[Device, ...]] = None  # None without gc-monitor
    num_ipus: Optional[int] = None  # according to the cluster file
    problem: Optional[str] = None


@dataclasses.dataclass(frozen=True)
class Pod:
    """All hosts and runs."""

    name: str
    unix_s: float
    hosts: Tuple[HostView, ...] = ()
    runs: Tuple[Run, ...] = ()


def to_json(pod: Pod, facts: HostFacts) -> Dict[str, Any]:
    """Return the pod as plain data, with the facts of this host for a monitor on another one."""
    return {
        "version": VERSION,
        "unix_s": pod.unix_s,
        "pod": pod.name,
        "host": facts.name,
        "hosts": [dataclasses.asdict(each) for each in pod.hosts],
        "runs": [{**dataclasses.asdict(each), "name": each.name} for each in pod.runs],
        "devices": None if facts.devices is None else [dataclasses.asdict(each) for each in facts.devices],
        "usage": dataclasses.asdict(facts.usage),
    }


def from_json(content: Mapping[str, Any]) -> Tuple[HostFacts, List[Run]]:
    """Return the facts and the runs of `to_json`. Keys of other versions are ignored.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: it is something else.
    """
    devices = content.get("devices")
    found = None if devices is None else tuple(built(Device, each) for each in devices)
    facts = HostFacts(str(content["host"]), built(Usage, content["usage"]), found)
    return facts, [_run(each) for each in content["runs"]]


def _run(content: Mapping[str, Any]) -> Run:
    nested = {
        "instances": tuple(built(Instance, each) for each in content["instances"]),
        "hosts": {name: built(Usage, each) for name, each in content["hosts"].items()},
        "series": {name: tuple(values) for name, values in content["series"].items()},
        "events": tuple(built(EventLine, each) for each in content["events"]),
    }
    return built(Run, {**content, **nested})


def built(kind: Type[T], content: Mapping[str, Any]) -> T:
    """Return a dataclass from the keys that it knows."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in content.items() if name in names})


_STILL_S = 5.0  # counters that do not change for so long have the rate 0

_Counters = Tuple[Optional[int], Optional[int]]
_Rates = Tuple[Optional[float], Optional[float]]


class RateMeter:
    """Adds the rates to the usage of hosts. A measurement that is shown again within 5 s keeps its rates."""

    def __init__(self) -> None:
        self._last: Dict[str, Tuple[float, _Counters, _Rates]] = {}

    def add(self, host: str, usage: Usage, now_s: float) -> Usage:
        """Return the usage at the monotonic time `now_s` with the rates since the previous different counters."""
        counters = (usage.network_received_bytes, usage.network_sent_bytes)
        before = self._last.get(host)
        if before is None:
            self._last[host] = (now_s, counters, (None, None))
        elif counters != before[1] and now_s > before[0]:
            seconds = now_s - before[0]
            rates = (_rate(counters[0], before[1][0], seconds), _rate(counters[1], before[1][1], seconds))
            self._last[host] = (now_s, counters, rates)
        changed_s, _, (received, sent) = self._last[host]
        if now_s - changed_s >= _STILL_S:
            received, sent = (None if each is None else 0.0 for each in counters)
        return dataclasses.replace(usage, received_bytes_per_s=received, sent_bytes_per_s=sent)


def _rate(now: Optional[int], before: Optional[int], seconds: float) -> Optional[float]:
    """Return the rate of a counter; None if it is unknown or began anew."""
    return None if now is None or before is None or now < before else (now - before) / seconds


POD, RUN, LOG, EVENTS = "pod", "run", "log", "events"
_VIEWS = {"p": POD, "r": RUN, "l": LOG, "e": EVENTS}
_NEXT = {POD: RUN, RUN: LOG, LOG: EVENTS, EVENTS: POD}
_PAGE = 10


@dataclasses.dataclass(frozen=True)
class Screen:
    """The state of the display. `run_dir` None: the first run."""

    view: str = POD
    run_dir: Optional[str] = None
    instance: int = 0  # position in the list of instances
    scroll: int = 0  # lines back from the end in logs and events, and down from the top in the pod
    shows_help: bool = False

    def run(self, pod: Pod) -> Optional[Run]:
        """Return the selected run; the first one if it is gone."""
        found = next((run for run in pod.runs if run.run_dir == self.run_dir), None)
        return found or (pod.runs[0] if pod.runs else None)

    def pressed(self, key: str, pod: Pod) -> Screen:
        """Return the screen after a key: a character, or up, down, left, right, tab, page up, page down, escape."""
        if self.shows_help:
            return dataclasses.replace(self, shows_help=False)
        if key in ("h", "?"):
            return dataclasses.replace(self, shows_help=True)
        if key in _VIEWS:
            return dataclasses.replace(self, view=_VIEWS[key], scroll=0)
        if key == "tab":
            return dataclasses.replace(self, view=_NEXT[self.view], scroll=0)
        if key == "escape":
            return dataclasses.replace(self, view=POD, scroll=0)
        if key == "enter":
            return dataclasses.replace(self, view={POD: RUN, RUN: LOG}.get(self.view, self.view), scroll=0)
        if key in ("left", "right", "n", "N"):
            return self._other_run(pod, -1 if key in ("left", "N") else 1)
        if key.isdigit():
            return self._with_instance(pod, int(key))
        return self._moved(key, pod)

    def _moved(self, key: str, pod: Pod) -> Screen:
        steps: Dict[str, int] = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -_PAGE, "page down": _PAGE}
        step = steps.get(key)
        if step is None:
            return self
        if self.view == RUN:
            return self._with_instance(pod, self.instance + step)
        down = step if self.view == POD else -step
        return dataclasses.replace(self, scroll=max(0, self.scroll + down))

    def _with_instance(self, pod: Pod, instance: int) -> Screen:
        run = self.run(pod)
        last = max(0, len(run.instances) - 1) if run is not None else 0
        return dataclasses.replace(self, instance=min(max(0, instance), last), scroll=0)

    def _other_run(self, pod: Pod, step: int) -> Screen:
        run = self.run(pod)
        if run is None:
            return self
        index = (pod.runs.index(run) + step) % len(pod.runs)
        return dataclasses.replace(self, run_dir=pod.runs[index].run_dir, instance=0, scroll=0)
