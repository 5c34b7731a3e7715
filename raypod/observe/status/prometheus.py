"""The metrics of a training run for Prometheus: one table, from the state that the status endpoint serves.

Counters begin at 0 with the coordinator's process, as Prometheus expects of counters: a resumed run continues with a
reset. `raypod_update` is the position of the training. Unknown values yield no sample; NaN is exported only if the
training produced NaN.

Metrics as plain data, and their rendering in the Prometheus text format 0.0.4.
"""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Union

from typing_extensions import get_args

from raypod.errors import as_utf8
from raypod.events import Phase
from raypod.observe.status.run_status import RunStatus
from raypod.observe.status.token_server import Response
from raypod.runs.call_times import BUCKETS_S, RecentCalls
from raypod.runs.event_log import raypod_version

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
Number = Union[int, float]


class Labels(Tuple[Tuple[str, str], ...]):
    """The labels of a sample as (name, value). An object that is used for several scrapes is rendered only once."""

    @functools.cached_property
    def text(self) -> str:
        """The labels in the text format, without braces."""
        return ",".join(f'{name}="{_escaped(value)}"' for name, value in self)

    @functools.cached_property
    def buckets(self) -> List[Labels]:
        """These labels with those of each bucket of a histogram of calls."""
        return [Labels((*self, ("le", _number(bound)))) for bound in (*BUCKETS_S, math.inf)]


NO_LABELS = Labels()


class Sample(NamedTuple):
    """One value of a metric; `suffix` is appended to the metric's name (`_bucket`, `_sum` and `_count`)."""

    labels: Labels
    value: Number
    suffix: str = ""


class Family(NamedTuple):
    """A metric with all its samples. `kind` is COUNTER, GAUGE or HISTOGRAM; `help` describes the metric in one line."""

    name: str
    kind: str
    help: str
    samples: List[Sample]


def histogram_samples(labels: Labels, calls: RecentCalls) -> List[Sample]:
    """Return the samples of a histogram of the durations of an instance's calls, in seconds."""
    counts = list(itertools.accumulate(calls.buckets))
    buckets = [Sample(each, count, "_bucket") for each, count in zip(labels.buckets, counts)]
    return [*buckets, Sample(labels, calls.call_s, "_sum"), Sample(labels, counts[-1], "_count")]


def render(families: Iterable[Family], constant: Labels = NO_LABELS) -> str:
    """Return metrics in the text format; `constant` labels are added to each sample. Empty families are left out."""
    lines: List[str] = []
    common = constant.text
    for family in families:
        if not family.samples:
            continue
        text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}"]
        name = family.name
        lines += [  # an integer that is no bool needs no function: most samples are counts of buckets
            f"{name}{suffix}{_braced(common, labels.text)} {value if type(value) is int else _number(value)}"
            for labels, value, suffix in family.samples
        ]
    return "\n".join(lines) + "\n"


def metrics_response(text: str) -> Response:
    """Return the response to a scrape."""
    return Response(as_utf8(text).encode(), CONTENT_TYPE)


def _braced(common: str, own: str) -> str:
    if own and common:
        return f"{{{common},{own}}}"
    return f"{{{common}{own}}}" if own or common else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: Number) -> str:
    if isinstance(value, int):
        return str(int(value))
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


_RATE = "_per_s"  # end of the names of part rates


class Scrape(NamedTuple):
    """What the metrics are computed from: `RunStatus.current`, and the calls of each instance."""

    state: Mapping[str, Any]
    calls: Mapping[int, RecentCalls]


class Metric(NamedTuple):
    """A line of the table."""

    name: str
    kind: str
    help: str
    samples: Callable[[Scrape], Iterable[Sample]]


Get = Union[str, Callable[[Mapping[str, Any]], Any]]  # a path of keys, as in "call_s.busy_ratio", or a function


def _value(content: Optional[Mapping[str, Any]], get: Get) -> Any:
    """Return the value at a path, None if the content has no such entry, or the result of a function."""
    if callable(get):
        return get(content or {})
    found: Any = content
    for key in get.split("."):
        found = (found or {}).get(key)
    return found


def one(get: Get) -> Callable[[Scrape], Iterable[Sample]]:
    """One sample without labels, from the state."""

    def samples(scrape: Scrape) -> List[Sample]:
        value = _value(scrape.state, get)
        return [] if value is None else [Sample(NO_LABELS, value)]

    return samples


def _by_name(label: str, get: Get) -> Callable[[Scrape], Iterable[Sample]]:
    """One sample per name, which is the value of `label`."""

    def samples(scrape: Scrape) -> List[Sample]:
        values = _value(scrape.state, get) or {}
        return [Sample(Labels(((label, name),)), value) for name, value in values.items()]

    return samples


def by_instance(get: Get) -> Callable[[Scrape], Iterable[Sample]]:
    """One sample per instance, from its entry in the state."""

    def samples(scrape: Scrape) -> List[Sample]:
        found = ((each, _value(each, get)) for each in scrape.state["instances"])
        return [Sample(instance_labels(each), value) for each, value in found if value is not None]

    return samples


def _by_calls(get: Callable[[Labels, RecentCalls], List[Sample]]) -> Callable[[Scrape], Iterable[Sample]]:
    """The samples of each instance, from its calls."""

    def samples(scrape: Scrape) -> List[Sample]:
        known = ((each, scrape.calls.get(each["instance"])) for each in scrape.state["instances"])
        return [sample for each, calls in known if calls is not None for sample in get(instance_labels(each), calls)]

    return samples


def by_host(key: str) -> Callable[[Scrape], Iterable[Sample]]:
    """One sample per host, from its usage."""

    def samples(scrape: Scrape) -> List[Sample]:
        found = ((host, _value(usage, key)) for host, usage in scrape.state["hosts"].items())
        return [Sample(Labels((("host", host),)), value) for host, value in found if value is not None]

    return samples


def instance_labels(instance: Mapping[str, Any]) -> Labels:
    return _labels_of(instance["instance"], instance["host"])


@functools.lru_cache(maxsize=4096)  # so that they are rendered once
def _labels_of(instance: int, host: str) -> Labels:
    return Labels((("instance", str(instance)), ("host", host)))


def _info(scrape: Scrape) -> List[Sample]:
    state = scrape.state
    values = {
        "kind": state["kind"],
        "task": state["task"],
        "device": state["device"] or "",
        "user": state["user"],
        "coordinator": state["host"],
        "run_dir": state["run_dir"],
        "version": raypod_version() or "",
    }
    return [Sample(Labels(values.items()), 1)]


def _phases(state: Mapping[str, Any]) -> Dict[str, Number]:
    return {phase: int(state["phase"] == phase) for phase in get_args(Phase)}


HOST_METRICS = (
    Metric("raypod_host_cpu_ratio", GAUGE, "Used share of all cores of a host (0..1).", by_host("cpu_share")),
    Metric("raypod_host_memory_used_bytes", GAUGE, "Used memory of a host.", by_host("memory_used_bytes")),
    Metric("raypod_host_memory_size_bytes", GAUGE, "Memory of a host.", by_host("memory_total_bytes")),
    Metric(
        "raypod_host_disk_used_bytes", GAUGE, "Used space of the working folder's disk.", by_host("disk_used_bytes")
    ),
    Metric("raypod_host_disk_size_bytes", GAUGE, "Size of the working folder's disk.", by_host("disk_total_bytes")),
    Metric(
        "raypod_host_network_receive_bytes_total",
        COUNTER,
        "Bytes that a host has received since its boot, without loopback.",
        by_host("network_received_bytes"),
    ),
    Metric(
        "raypod_host_network_transmit_bytes_total",
        COUNTER,
        "Bytes that a host has sent since its boot, without loopback.",
        by_host("network_sent_bytes"),
    ),
)
_RUN_METRICS = (
    Metric("raypod_info", GAUGE, "Facts about the run as labels; the value is 1.", _info),
    Metric(
        "raypod_start_time_seconds",
        GAUGE,
        "Time at which the coordinator began, in seconds since 1970.",
        one("started_unix_s"),
    ),
    Metric("raypod_phase", GAUGE, "1 for the current phase of the run, 0 for others.", _by_name("phase", _phases)),
    Metric("raypod_updates_total", COUNTER, "Weight updates of this process of the coordinator.", one("updates_done")),
    Metric("raypod_update", GAUGE, "Weight updates since the training began.", one("update")),
    Metric("raypod_update_limit", GAUGE, "Weight updates of the whole run.", one("total_updates")),
    Metric("raypod_epoch", GAUGE, "Current epoch, the first is 1.", one("epoch")),
    Metric("raypod_eta_seconds", GAUGE, "Training time that is left.", one("eta_s")),
    Metric(
        "raypod_samples_total",
        COUNTER,
        "Samples that this process of the coordinator trained, over all replicas.",
        one("samples_done"),
    ),
    Metric(
        "raypod_samples_per_second",
        GAUGE,
        "Samples per second over the last second of training, of all replicas.",
        one("samples_per_s"),
    ),
    Metric(
        "raypod_sample_parts_per_second",
        GAUGE,
        "Parts of samples, for example tokens, per second over the last second of training.",
        _by_name(
            "part",
            lambda state: {
                name[: -len(_RATE)] if name.endswith(_RATE) else name: value
                for name, value in state["part_rates"].items()
            },
        ),
    ),
    Metric(
        "raypod_data_wait_ratio",
        GAUGE,
        "Share of the last call that the instances waited for data (0..1).",
        one("data_wait_share"),
    ),
    Metric("raypod_training_metric", GAUGE, "Metrics of the last update, as the loss.", _by_name("name", "metrics")),
    Metric(
        "raypod_evaluation_metric",
        GAUGE,
        "Metrics of the last evaluation of the test split.",
        _by_name("name", "last_evaluation.metrics"),
    ),
    Metric(
        "raypod_last_update_timestamp_seconds",
        GAUGE,
        "Time of the last weight update, in seconds since 1970.",
        one("last_update_unix_s"),
    ),
    Metric(
        "raypod_last_evaluation_timestamp_seconds",
        GAUGE,
        "Time of the last evaluation, in seconds since 1970.",
        one("last_evaluation.unix_s"),
    ),
    Metric(
        "raypod_last_checkpoint_timestamp_seconds",
        GAUGE,
        "Time of the last checkpoint of this process, in seconds since 1970.",
        one("checkpoints.last.unix_s"),
    ),
    Metric(
        "raypod_last_checkpoint_update",
        GAUGE,
        "Update of the last checkpoint of this process.",
        one("checkpoints.last.update"),
    ),
    Metric("raypod_checkpoints_total", COUNTER, "Written checkpoints.", one("checkpoints.saved")),
    Metric(
        "raypod_checkpoint_failures_total", COUNTER, "Checkpoints that could not be written.", one("checkpoints.failed")
    ),
    Metric("raypod_restarts_total", COUNTER, "Repairs of the fleet.", one("restarts")),
    Metric("raypod_generation", GAUGE, "Starts and repairs of the fleet since the training began.", one("generation")),
)
_INSTANCE_METRICS = (
    Metric(
        "raypod_instance_up",
        GAUGE,
        "1 if an instance is ready, 0 while it starts and while it is lost.",
        by_instance(lambda each: int(each["pid"] is not None and each["state"] != "lost")),
    ),
    Metric(
        "raypod_instance_heartbeat_age_seconds",
        GAUGE,
        "Time since the last heartbeat of an instance.",
        by_instance("heartbeat_age_s"),
    ),
    Metric(
        "raypod_instance_busy_ratio",
        GAUGE,
        "Time of recent calls without the wait for other instances, over the median of all instances.",
        by_instance("call_s.busy_ratio"),
    ),
    Metric(
        "raypod_instance_data_wait_ratio",
        GAUGE,
        "Share of recent calls that an instance waited for data (0..1).",
        by_instance("call_s.data_wait_share"),
    ),
    Metric(
        "raypod_instance_peer_wait_ratio",
        GAUGE,
        "Share of recent calls that an instance waited for other instances (0..1).",
        by_instance("call_s.peer_wait_share"),
    ),
    Metric(
        "raypod_instance_samples_per_second",
        GAUGE,
        "Samples of one call over the median duration of recent calls.",
        by_instance("samples_per_s"),
    ),
    Metric(
        "raypod_instance_cpu_seconds",
        GAUGE,
        "CPU time of an instance's running threads and of their child processes.",
        by_instance("cpu_s"),
    ),
    Metric(
        "raypod_instance_call_seconds",
        HISTOGRAM,
        "Duration of the calls of an instance, without the first one of each process.",
        _by_calls(histogram_samples),
    ),
    Metric(
        "raypod_instance_data_wait_seconds_total",
        COUNTER,
        "Time that the calls of an instance waited for data.",
        _by_calls(lambda labels, calls: [Sample(labels, calls.data_wait_s)]),
    ),
    Metric(
        "raypod_instance_peer_wait_seconds_total",
        COUNTER,
        "Time that the calls of an instance waited for other instances.",
        _by_calls(lambda labels, calls: [Sample(labels, calls.peer_wait_s)]),
    ),
)
METRICS = (*_RUN_METRICS, *_INSTANCE_METRICS, *HOST_METRICS)


def families(metrics: Iterable[Metric], scrape: Scrape) -> List[Family]:
    """Return the current samples of a table."""
    return [Family(each.name, each.kind, each.help, list(each.samples(scrape))) for each in metrics]


def run_families(status: RunStatus) -> List[Family]:
    """Return the metrics of a training run."""
    return families(METRICS, Scrape(status.current(), status.calls.by_instance()))


def started_families(status: RunStatus) -> List[Family]:
    """Return the metrics of a training run whose instances have started, else []."""
    return run_families(status) if status.started is not None else []


def run_label(run_dir: str) -> Labels:
    """Return the label that distinguishes the metrics of runs: the name of the run folder."""
    return Labels((("run", Path(run_dir).name),))


def scrape_response(status: RunStatus) -> Response:
    """Return the response to a scrape of a training run."""
    return metrics_response(render(run_families(status), run_label(status.run_dir)))
