"""Metrics as plain data, and their rendering in the Prometheus text format 0.0.4."""

from __future__ import annotations

import functools
import math
from typing import Iterable, List, NamedTuple, Tuple, Union

from raypod.record.call_times import BUCKETS_S, RecentCalls, cumulative_buckets
from raypod.status.token_server import Response

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
Labels = Tuple[Tuple[str, str], ...]  # (name, value)
Number = Union[int, float]


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
    counts = [count for _, count in cumulative_buckets(calls.buckets)]
    buckets = [Sample((*labels, each), count, "_bucket") for each, count in zip(_BOUNDS, counts)]
    return [*buckets, Sample(labels, calls.call_s, "_sum"), Sample(labels, counts[-1], "_count")]


def render(families: Iterable[Family], constant: Labels = ()) -> str:
    """Return metrics in the text format; `constant` labels are added to each sample. Empty families are left out."""
    lines: List[str] = []
    for family in families:
        if not family.samples:
            continue
        text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}"]
        lines += [
            f"{family.name}{suffix}{_label_text(constant + labels)} {_number(value)}"
            for labels, value, suffix in family.samples
        ]
    return "\n".join(lines) + "\n"


def metrics_response(text: str) -> Response:
    """Return the response to a scrape."""
    return Response(text.encode(), CONTENT_TYPE)


@functools.lru_cache(maxsize=8192)  # the labels of a run are the same in every scrape
def _label_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


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


_BOUNDS = tuple(("le", _number(bound)) for bound in (*BUCKETS_S, math.inf))
