"""A scripted Ray: actors whose replies and streams are prepared in advance, and a clock that only waits advance."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

import pytest

Script = Callable[..., Any]
NEVER = float("inf")


class RayError(Exception):
    """Base class of the errors of Ray."""


class ActorDied(RayError):
    """The process of an actor has ended."""


class TaskError(RayError):
    """A method of an actor raised `cause`."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Ref:
    """A result that is ready at a time; an exception is raised by `get`."""

    def __init__(self, value: Any, ready_s: float = 0.0) -> None:
        self.value, self.ready_s = value, ready_s


class Stream:
    """A stream of items (ready at, value). It ends after the last one."""

    def __init__(self, items: List[Tuple[float, Any]], end_s: float = 0.0) -> None:
        self.items: Deque[Tuple[float, Any]] = collections.deque(items)
        self.end_s = end_s

    @property
    def ready_s(self) -> float:
        return self.items[0][0] if self.items else self.end_s

    def __next__(self) -> Ref:
        if not self.items:
            raise StopIteration
        return Ref(self.items.popleft()[1])


class ScriptedRay:
    """`wait` and `get` of Ray. `now_s` replaces time.monotonic."""

    exceptions = SimpleNamespace(RayError=RayError, RayActorError=ActorDied, RayTaskError=TaskError)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.waits, self.killed = 1000.0, 0, []  # type: float, int, List[Any]
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)

    def wait(self, refs: List[Any], num_returns: int = 1, timeout: Optional[float] = None) -> Tuple[List[Any], Any]:
        assert len(set(map(id, refs))) == len(refs) >= num_returns > 0
        self.waits += 1
        ready = [ref for ref in refs if ref.ready_s <= self.now_s]
        if len(ready) < num_returns and timeout:
            first_s = min(ref.ready_s for ref in refs)
            self.now_s = max(self.now_s, min(first_s, self.now_s + timeout))
            ready = [ref for ref in refs if ref.ready_s <= self.now_s]
        ready = ready[:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, refs: Any) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        if isinstance(refs.value, Exception):
            raise refs.value
        return refs.value

    def nodes(self) -> List[Dict[str, Any]]:
        return []

    def kill_frozen(self, actor: Any) -> None:
        """See `ProcessKiller.kill_frozen`."""
        self.killed.append(actor.index)


class ScriptedActor:
    """An actor; `scripts` maps the names of its methods to functions that return a Ref or a Stream."""

    def __init__(self, index: int, scripts: Dict[str, Script]) -> None:
        self.index, self._scripts = index, scripts
        self.called: List[str] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.called.append(name)
            return self._scripts[name](*arguments)

        return SimpleNamespace(remote=remote)
