"""Metrics as plain data, and their rendering in the Prometheus text format 0.0.4."""

from __future__ import annotations

import functools
import math
from typing import Iterable, List, NamedTuple, Tuple, Union

from raypod.errors import as_utf8
from raypod.observe.status.token_server import Response
from raypod.runs.call_times import BUCKETS_S, RecentCalls, cumulative_buckets

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
    counts = [count for _, count in cumulative_buckets(calls.buckets)]
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
