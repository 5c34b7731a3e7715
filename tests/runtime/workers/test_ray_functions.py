"""`raypod.run` with scripted actors, and metrics through a simulated `ray.util.metrics`."""

from __future__ import annotations

import math
import types
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Tuple

import cloudpickle  # type: ignore[import-untyped]
import pytest

from raypod.errors import ClusterError, FunctionFailed, WaitTimedOut
from raypod.observe.status.prometheus import COUNTER, GAUGE, HISTOGRAM, NO_LABELS, Family, Labels, Sample
from raypod.runtime.worker.function_process import STDOUT, Outcome
from raypod.runtime.workers.ray import RayMetrics
from raypod.runtime.workers.ray_functions import RayFunctions
from tests.support.bounded import wait_until
from tests.support.scripted_ray import NEVER, ActorDied, Ref, ScriptedActor, ScriptedRay, TaskError

Connect = Callable[..., RayFunctions]
DEAD = ActorDied("The actor died.\nThe node has died: no power")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ScriptedRay:
    return ScriptedRay(monkeypatch)


@pytest.fixture
def written() -> List[Any]:
    return []


@pytest.fixture
def connect(ray: ScriptedRay, written: List[Any]) -> Connect:
    """`connect(*calls)`: instances whose methods return a reference; each has written a line."""

    def build(*calls: Ref) -> RayFunctions:
        setup: Any = SimpleNamespace(placement=SimpleNamespace(cluster=None))
        found = RayFunctions(setup, None, 30.0, lambda *given: written.append(given))
        found._ray = ray
        for index, ref in enumerate(calls):
            lines = [[(STDOUT, b"line")]]
            scripts: Dict[str, Any] = {"output": lambda lines=lines: Ref(lines.pop() if lines else [])}
            scripts.update(dict.fromkeys(("call", "prepare"), lambda *_, ref=ref: ref), close=lambda: Ref(None, NEVER))
            found._actors.append(ScriptedActor(index, scripts))
            found._hosts.append(f"h{index}")
        return found

    return build


def returns(value: Any, ready_s: float = 0.0) -> Ref:
    return Ref(Outcome(cloudpickle.dumps(value)), ready_s)


def raises(error: Exception, ready_s: float = 0.0, is_of_peer: bool = False) -> Ref:
    return Ref(Outcome(cloudpickle.dumps(error), f"cause {error}", "trace", is_of_peer), ready_s)


def test_results_are_in_order_and_output_is_passed_on(ray: ScriptedRay, connect: Connect, written: List[Any]) -> None:
    found = connect(returns("a", ray.now_s + 400.0), returns("b"))
    assert (found.call(b"", None), written) == (["a", "b"], [(0, STDOUT, b"line"), (1, STDOUT, b"line")])
    began_s = ray.now_s
    found.close()
    assert ray.now_s - began_s == 5  # to leave the process group
    assert ray.killed == [0, 1]


def test_the_first_cause_is_raised_and_not_what_it_caused_in_others(ray: ScriptedRay, connect: Connect) -> None:
    found = connect(raises(ConnectionError("peer"), is_of_peer=True), raises(KeyError("x"), ray.now_s + 4.5))
    with pytest.raises(FunctionFailed, match="instance 1 on host h1 failed: cause 'x'") as caught:
        found.call(b"", None)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.traceback == "trace"
    began_s = ray.now_s
    found.close()
    assert ray.now_s == began_s  # nothing is asked of instances that may be busy
    assert ray.killed == [0, 1]


@pytest.mark.parametrize("other", [Ref(None, NEVER), Ref(DEAD)])
def test_an_instance_that_died_or_never_ends_is_no_first_cause(ray: ScriptedRay, connect: Connect, other: Ref) -> None:
    found, began_s = connect(raises(ConnectionError("peer"), is_of_peer=True), other), ray.now_s
    cause = "instance 1 on host h1 failed: its process died: node has died: no power"
    with pytest.raises(FunctionFailed, match="instance 0 on host h0 failed: cause peer" if other.ready_s else cause):
        found.call(b"", None)
    assert ray.now_s - began_s < 7


def test_a_function_and_a_start_that_do_not_end_are_timeouts(ray: ScriptedRay, connect: Connect) -> None:
    found, began_s = connect(returns(1), Ref(None, NEVER)), ray.now_s
    with pytest.raises(WaitTimedOut, match="waited 20 s for the function to end in instance 1 on host h1; timeout_s"):
        found.call(b"", 20.0)
    assert 20 <= ray.now_s - began_s < 22
    began_s = ray.now_s
    with pytest.raises(WaitTimedOut, match="waited 30 s for prepare of instance 1 on host h1; start_timeout_s"):
        connect(Ref(None), Ref(None, NEVER))._all("prepare")
    assert 30 <= ray.now_s - began_s < 31


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (TaskError(ClusterError("no partition")), ClusterError, "^no partition$"),
        (TaskError(ValueError("bad")), FunctionFailed, "instance 1 on host h1 failed: ValueError: bad"),
        (DEAD, FunctionFailed, "instance 1 on host h1 failed: its process died: node has died: no power"),
    ],
)
def test_an_instance_that_does_not_start_is_named(connect: Connect, error: Exception, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        connect(Ref(None), Ref(error))._all("prepare")


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
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def export(metrics: Metrics) -> Iterator[Callable[..., RayMetrics]]:
    started: List[RayMetrics] = []

    def start(collect: Callable[[], List[Family]], log: Callable[[str], None] = print, interval_s: float = 60.0) -> Any:
        started.append(RayMetrics(metrics.module, collect, CONSTANT, log, interval_s))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_the_last_values_are_exported_at_the_end(metrics: Metrics, export: Callable[..., RayMetrics]) -> None:
    labels = Labels((("instance", "1"),))
    bucket = Sample(Labels((*labels, ("le", "0.1"))), 3, "_bucket")
    families = [
        Family("m", GAUGE, "", [Sample(labels, math.nan)]),
        Family("h", HISTOGRAM, "", [bucket, Sample(labels, 3, "_count")]),
        Family("n_total", COUNTER, "", [Sample(NO_LABELS, 5), Sample(NO_LABELS, 0)]),
    ]
    export(lambda: families).close()
    tags = {"run": "r", "instance": "1"}
    assert math.isnan(metrics.recorded[0][2])
    assert [(kind, name, tags) for kind, name, _, tags in metrics.recorded[:1]] == [("gauge", "m", tags)]
    assert metrics.recorded[1:] == [
        ("gauge", "h_bucket", 3.0, {**tags, "le": "0.1"}),
        ("gauge", "h_count", 3.0, tags),
        ("counter", "n_total", 5.0, {"run": "r"}),
    ]


def test_counters_increase_by_the_new_and_gauges_repeat(metrics: Metrics, export: Callable[..., RayMetrics]) -> None:
    values = iter([2, 5, 5, 1])  # 1: the host was started again

    def collect() -> List[Family]:
        value = next(values, 1)
        return [
            Family("n_total", COUNTER, "", [Sample(NO_LABELS, value)]),
            Family("g", GAUGE, "", [Sample(NO_LABELS, 1)]),
        ]

    started = export(collect, interval_s=0.001)
    assert wait_until(lambda: len([each for each in metrics.recorded if each[1] == "g"]) >= 5)
    started.close()
    assert [value for _, name, value, _ in metrics.recorded if name == "n_total"] == [2.0, 3.0, 1.0]


def test_a_failure_is_one_warning(metrics: Metrics, export: Callable[..., RayMetrics]) -> None:
    said: List[str] = []

    def collect() -> List[Family]:
        raise RuntimeError("no exporter")

    export(collect, said.append, interval_s=0.001)
    assert wait_until(lambda: said != [])
    assert said == ["warning: no more metrics through Ray: RuntimeError: no exporter"]
