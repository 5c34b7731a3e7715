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


class WorkerCrashed(RayError):
    """The process of a task has ended."""


class GetTimeout(RayError):
    """A result was not ready in time."""


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


def node(name: str, **changed: Any) -> Dict[str, Any]:
    """Return a live node with the id and address `name`."""
    address = {"NodeManagerAddress": name, "NodeManagerHostname": f"host-{name}"}
    return {"NodeID": name, "Alive": True, **address, "Resources": {}, **changed}


class ScriptedRay:
    """`now_s` replaces time.monotonic, and `start` starts a task or an actor with its options and arguments.

    This process is on the first of `found_nodes`.
    """

    exceptions = SimpleNamespace(
        RayError=RayError,
        RayActorError=ActorDied,
        RayTaskError=TaskError,
        GetTimeoutError=GetTimeout,
        WorkerCrashedError=WorkerCrashed,
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *nodes: Dict[str, Any]) -> None:
        self.now_s, self.waits = 1000.0, 0
        self.found_nodes = list(nodes)
        self.killed: List[Any] = []
        self.cancelled: List[Any] = []
        self.start: Script = lambda options, *arguments: Ref(None)
        self.on_host: Callable[[str, int], Optional[Ref]] = lambda function, index: Ref(None)
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("time.sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, refs: List[Any], num_returns: int = 1, timeout: Optional[float] = None) -> Tuple[List[Any], Any]:
        assert len(set(map(id, refs))) == len(refs) >= num_returns > 0
        self.waits += 1
        ready = [ref for ref in refs if ref.ready_s <= self.now_s]
        if len(ready) < num_returns and timeout:
            first_s = min(ref.ready_s for ref in refs if ref not in ready)
            self.now_s = max(self.now_s, min(first_s, self.now_s + timeout))
            ready = [ref for ref in refs if ref.ready_s <= self.now_s]
        ready = ready[:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, refs: Any, timeout: Optional[float] = None) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        if timeout is not None and refs.ready_s > self.now_s + timeout:
            raise GetTimeout
        if isinstance(refs.value, Exception):
            raise refs.value
        return refs.value

    def nodes(self) -> List[Dict[str, Any]]:
        return self.found_nodes

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self.found_nodes[0]["NodeID"])

    def remote(self, kind: Any) -> Any:
        def options(**given: Any) -> Any:
            return SimpleNamespace(remote=lambda *arguments: self.start(given, *arguments))

        return SimpleNamespace(options=options)

    def is_initialized(self) -> bool:
        return True

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.index)

    def kill_frozen(self, actor: Any) -> None:
        """See `ProcessKiller.kill_frozen`."""
        self.kill(actor)

    def on_its_host(self, function: Any, actor: Any) -> Optional[Ref]:
        """See `ProcessKiller.on_its_host`."""
        return self.on_host(function.__name__, actor.index)

    def cancel(self, ref: Any, force: bool) -> None:
        assert force
        self.cancelled.append(ref)


class ScriptedActor:
    """An actor; `scripts` maps the names of its methods to functions that return a Ref or a Stream."""

    def __init__(self, index: int, scripts: Dict[str, Script]) -> None:
        self.index, self._scripts = index, scripts
        self.called: List[str] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.called.append(name)
            return self._scripts[name](*arguments)

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))
