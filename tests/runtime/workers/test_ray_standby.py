"""Standbys: how many wait where, which of them replaces an instance, and what happens to those that cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict, List, Optional

import pytest

from raypod.runtime.workers import ray_replace
from raypod.runtime.workers.ray_replace import Standbys
from tests.support.scripted_ray import NEVER, ActorDied, Ref, ScriptedActor, ScriptedRay, TaskError, node

NODES = [node("a"), node("b")]


class Scene:
    """Two standbys on each of two hosts; `prepared` and `begun` hold the result of each actor, in starting order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prepared: Dict[int, Ref], begun: Dict[int, Ref]) -> None:
        monkeypatch.setattr(ray_replace, "node_affinity", lambda node: {"node": node["NodeID"]})
        self.ray = ScriptedRay(monkeypatch, *NODES)
        self.prepared, self.begun = prepared, begun
        self.started: List[str] = []
        self.begins: List[Any] = []
        self.lines: List[str] = []
        instances = [SimpleNamespace(host="host-a"), SimpleNamespace(host="host-b")]
        config = SimpleNamespace(run=SimpleNamespace(standby=2))
        plan: Any = SimpleNamespace(config=config, placement=SimpleNamespace(instances=instances))
        self.standbys = Standbys(self.ray, plan, self._start, self.ray.kill_frozen, self.lines.append)
        self.standbys.fill(NODES)

    def _start(self, index: Optional[int], node: Dict[str, Any], options: Dict[str, Any]) -> Any:
        assert index is None
        assert options == {"node": node["NodeID"], "max_restarts": 0}
        number = len(self.started)
        self.started.append(node["NodeID"])

        def begin(index: int, how: str) -> Ref:
            self.begins.append((number, index))
            return self.begun.get(number, Ref(None))

        return ScriptedActor(
            number, {"prepare": lambda host_index: self.prepared.get(number, Ref(host_index)), "begin": begin}
        )

    def take(self, index: int, name: str) -> Optional[int]:
        """Return the number of the standby that is taken."""
        taken = self.standbys.take(index, node(name))
        return None if taken is None else int(taken.index)


def test_each_host_has_its_standbys_and_those_that_are_taken_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {}, {})
    assert scene.started == ["a", "a", "b", "b"]
    assert scene.take(1, "b") == 2
    assert scene.take(0, "c") is None  # a spare host has none
    scene.standbys.fill(NODES)
    assert scene.started == ["a", "a", "b", "b", "b"]
    scene.standbys.close()
    assert (sorted(scene.ray.killed), scene.begins, scene.lines) == ([0, 1, 3, 4], [(2, 1)], [])


def test_the_first_prepared_one_is_taken_and_none_that_is_not_prepared_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {0: Ref(None, 1004.0), 1: Ref(None, 1002.0), 2: Ref(None, NEVER)}, {})
    assert scene.take(0, "a") == 1
    assert scene.ray.now_s == 1002.0
    assert scene.take(0, "a") == 0
    assert scene.take(1, "b") == 3
    assert scene.take(1, "b") is None
    assert scene.ray.now_s == 1004.0 + ray_replace._WITHIN_S
    assert not scene.ray.killed  # it is still being prepared
    assert scene.lines == ["a standby on host-b cannot be used for instance 1: not prepared within 5 s"]


def test_one_that_failed_died_or_is_frozen_is_ended_and_the_next_one_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, begun = {0: Ref(ActorDied("out of memory"))}, {1: Ref(None, NEVER), 2: Ref(ActorDied("killed"))}
    scene = Scene(monkeypatch, prepared, begun)
    assert scene.take(0, "a") is None
    assert scene.take(1, "b") == 3
    assert scene.ray.killed == [0, 1, 2]
    causes = ["out of memory", "it did not respond within 5 s", "killed"]
    lines = [f"a standby on host-{host} cannot be used for instance {index}" for host, index in ("a0", "a0", "b1")]
    assert scene.lines == [f"{line}: {cause}" for line, cause in zip(lines, causes)]


def test_the_error_of_a_preparation_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, {number: Ref(TaskError(OSError("no such\ndisk"))) for number in (0, 1)}, {})
    assert scene.take(0, "a") is None
    assert scene.lines == ["a standby on host-a cannot be used for instance 0: OSError: no such disk"] * 2
