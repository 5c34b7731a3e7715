"""`raypod.run` with scripted actors: results, output, the first cause of failures, timeouts, and the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Dict, List

import cloudpickle  # type: ignore[import-untyped]
import pytest

from raypod.errors import ClusterError, FunctionFailed, WaitTimedOut
from raypod.runtime.worker.function_process import STDOUT, Outcome
from raypod.runtime.workers.ray_functions import RayFunctions
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


def test_results_are_in_instance_order_and_the_output_is_passed_on(
    ray: ScriptedRay, connect: Connect, written: List[Any]
) -> None:
    found = connect(returns("a", ray.now_s + 400.0), returns("b"))
    assert found.call(b"", None) == ["a", "b"]
    assert written == [(0, STDOUT, b"line"), (1, STDOUT, b"line")]
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


def test_a_function_that_does_not_end_is_a_timeout(ray: ScriptedRay, connect: Connect) -> None:
    found, began_s = connect(returns(1), Ref(None, NEVER)), ray.now_s
    with pytest.raises(WaitTimedOut, match="waited 20 s for the function to end in instance 1 on host h1; timeout_s"):
        found.call(b"", 20.0)
    assert 20 <= ray.now_s - began_s < 22


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


def test_the_start_has_a_timeout(ray: ScriptedRay, connect: Connect) -> None:
    began_s = ray.now_s
    with pytest.raises(WaitTimedOut, match="waited 30 s for prepare of instance 1 on host h1; start_timeout_s"):
        connect(Ref(None), Ref(None, NEVER))._all("prepare")
    assert 30 <= ray.now_s - began_s < 31
