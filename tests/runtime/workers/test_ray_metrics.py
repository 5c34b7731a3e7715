"""Metrics through `ray.util.metrics`: what is recorded, how often, and what a failure does. Ray itself is simulated."""

from __future__ import annotations

import math
import types
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from raypod.observe.status.prometheus import COUNTER, GAUGE, HISTOGRAM, NO_LABELS, Family, Labels, Sample
from raypod.runtime.workers.ray_metrics import RayMetrics
from tests.support.bounded import wait_until

Recorded = List[Tuple[str, str, float, Dict[str, str]]]
CONSTANT = (("run", "r"),)


class Metrics:
    """`ray.util.metrics`; `recorded` holds (kind, name, value, tags) of every record."""

    def __init__(self) -> None:
        self.recorded: Recorded = []
        self.module = types.SimpleNamespace(Counter=self._kind("counter"), Gauge=self._kind("gauge"))

    def _kind(self, kind: str) -> Callable[..., Any]:
        def make(name: str, description: str, tag_keys: Tuple[str, ...]) -> Any:
            def record(value: float, tags: Dict[str, str]) -> None:
                assert set(tags) == set(tag_keys)  # as Ray requires
                assert isinstance(value, float)
                assert kind == "gauge" or value > 0
                self.recorded.append((kind, name, value, tags))

            return types.SimpleNamespace(inc=record, set=record)

        return make


@pytest.fixture
def ray() -> Metrics:
    return Metrics()


@pytest.fixture
def export(ray: Metrics) -> Iterator[Callable[..., RayMetrics]]:
    started: List[RayMetrics] = []

    def start(collect: Callable[[], List[Family]], log: Callable[[str], None] = print, interval_s: float = 60.0) -> Any:
        started.append(RayMetrics(ray.module, collect, CONSTANT, log, interval_s))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_the_last_values_are_exported_at_the_end(ray: Metrics, export: Callable[..., RayMetrics]) -> None:
    labels = Labels((("instance", "1"),))
    bucket = Sample(Labels((*labels, ("le", "0.1"))), 3, "_bucket")
    families = [
        Family("m", GAUGE, "", [Sample(labels, math.nan)]),
        Family("h", HISTOGRAM, "", [bucket, Sample(labels, 3, "_count")]),
        Family("n_total", COUNTER, "", [Sample(NO_LABELS, 5), Sample(NO_LABELS, 0)]),
    ]
    export(lambda: families).close()
    tags = {"run": "r", "instance": "1"}
    assert math.isnan(ray.recorded[0][2])
    assert [(kind, name, tags) for kind, name, _, tags in ray.recorded[:1]] == [("gauge", "m", tags)]
    assert ray.recorded[1:] == [
        ("gauge", "h_bucket", 3.0, {**tags, "le": "0.1"}),
        ("gauge", "h_count", 3.0, tags),
        ("counter", "n_total", 5.0, {"run": "r"}),
    ]


def test_counters_are_increased_by_what_is_new_and_gauges_are_always_recorded(
    ray: Metrics, export: Callable[..., RayMetrics]
) -> None:
    values = iter([2, 5, 5, 1])  # 1: the host was started again

    def collect() -> List[Family]:
        value = next(values, 1)
        return [
            Family("n_total", COUNTER, "", [Sample(NO_LABELS, value)]),
            Family("g", GAUGE, "", [Sample(NO_LABELS, 1)]),
        ]

    started = export(collect, interval_s=0.001)
    assert wait_until(lambda: len([each for each in ray.recorded if each[1] == "g"]) >= 5)
    started.close()
    assert [value for _, name, value, _ in ray.recorded if name == "n_total"] == [2.0, 3.0, 1.0]


def test_a_failure_is_one_warning(ray: Metrics, export: Callable[..., RayMetrics]) -> None:
    said: List[str] = []

    def collect() -> List[Family]:
        raise RuntimeError("no exporter")

    export(collect, said.append, interval_s=0.001)
    assert wait_until(lambda: said != [])
    assert said == ["warning: no more metrics through Ray: RuntimeError: no exporter"]
