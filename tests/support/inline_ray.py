"""Ray without a cluster: actors are objects of this process, and their methods run in threads."""

from __future__ import annotations

from concurrent import futures
from types import SimpleNamespace
from typing import Any, Callable, List, Optional, Sequence, Tuple

from tests.support.scripted_ray import ScriptedRay, TaskError


class InlineRay:
    """Nodes with these addresses; this process is on the first one."""

    exceptions = ScriptedRay.exceptions

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    def nodes(self) -> List[Any]:
        names = ("NodeID", "NodeManagerAddress", "NodeManagerHostname")
        return [{**dict.fromkeys(names, each), "Alive": True, "Resources": {}} for each in self._addresses]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self._addresses[0])

    def is_initialized(self) -> bool:
        return True

    def remote(self, kind: Callable[..., Any]) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *given: InlineActor(kind(*given))))

    def wait(
        self, refs: Sequence[Any], num_returns: int = 1, timeout: Optional[float] = None
    ) -> Tuple[List[Any], List[Any]]:
        when = futures.FIRST_COMPLETED if num_returns == 1 else futures.ALL_COMPLETED
        ready = list(futures.wait(refs, timeout, when).done)[:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, refs: Any) -> Any:
        return [each.result() for each in refs] if isinstance(refs, list) else refs.result()

    def kill(self, actor: InlineActor) -> None:
        actor._threads.shutdown()
        actor._made.close()


class InlineActor:
    """An object with a `close` method. As Ray, its methods return references, and raise TaskError."""

    def __init__(self, made: Any) -> None:
        self._made, self._threads = made, futures.ThreadPoolExecutor(4)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self._threads.submit(self._call, name, given))

    def _call(self, name: str, given: Tuple[Any, ...]) -> Any:
        try:
            return getattr(self._made, name)(*given)
        except Exception as error:
            raise TaskError(error) from error
