"""What the monitor shows, as immutable plain data: the hosts of a pod with their IPUs, and the runs on them.

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
    message: str = ""  # of the error that ended it
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
    found = None if devices is None else tuple(_built(Device, each) for each in devices)
    facts = HostFacts(str(content["host"]), _built(Usage, content["usage"]), found)
    return facts, [_run(each) for each in content["runs"]]


def _run(content: Mapping[str, Any]) -> Run:
    nested = {
        "instances": tuple(_built(Instance, each) for each in content["instances"]),
        "hosts": {name: _built(Usage, each) for name, each in content["hosts"].items()},
        "series": {name: tuple(values) for name, values in content["series"].items()},
        "events": tuple(_built(EventLine, each) for each in content["events"]),
    }
    return _built(Run, {**content, **nested})


def _built(kind: Type[T], content: Mapping[str, Any]) -> T:
    """Return a dataclass from the keys that it knows."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in content.items() if name in names})
