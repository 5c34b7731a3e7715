"""Objects that an instance uses in an actor on the coordinator's host: results, errors, timeouts and deaths."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from pathlib import Path
from typing import Any, Callable, Iterator, List

import pytest
from bounded import COMMAND_S, wait_until
from checkpoint.saved_runs import save
from ray_cluster import SECOND_HOST, ray_cluster

from raypod.checkpoint.copies import CopyReceiver, held_copies
from raypod.coordinator import copy_sender
from raypod.fleet.ray_nodes import peers_of
from raypod.fleet.ray_server import RayServer, serve_here, serve_on
from raypod.plan.cluster import Cluster, Host
from raypod.plan.plan import Plan
from raypod.record import run_state

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def disk_class() -> type:
    """Return a local class: Ray cannot import test modules in its workers, and copies the class instead."""

    class Disk:
        """Stores bytes in memory."""

        def __init__(self, name: str) -> None:
            self._content = name.encode()

        def append(self, data: bytes) -> int:
            """Append; return the size."""
            self._content += data
            return len(self._content)

        def fill(self) -> None:
            """Fail as on a full disk."""
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def hang(self) -> None:
            """Do not return soon."""
            time.sleep(600)

        def die(self) -> None:
            """End the process."""
            os._exit(1)

    return Disk


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_cluster(("", SECOND_HOST)) as cluster:
        yield cluster.ray


def test_an_instance_uses_an_object_on_the_coordinators_host(ray: Any) -> None:
    server = serve_here(ray, disk_class(), "ab")
    use = ray.remote(lambda copy: [copy.result(copy.request("append", bytes(3 << 20)), 60) for _ in range(2)])
    assert ray.get(use.remote(server), timeout=COMMAND_S) == [2 + (3 << 20), 2 + 2 * (3 << 20)]
    with pytest.raises(OSError, match="No space left") as caught:
        server.result(server.request("fill"), 60)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(ConnectionError, match="^no connection to the coordinator's host: .*$"):
        server.result(server.request("die"), 60)
    deadline = time.monotonic() + COMMAND_S
    size = 0
    while not size:  # the actor starts again, empty
        assert time.monotonic() < deadline
        with contextlib.suppress(ConnectionError):
            size = server.result(server.request("append", b"c"), 60)
    assert size == 3
    hanging = server.request("hang")
    with pytest.raises(TimeoutError, match="does not respond"):
        server.result(hanging, 0.1)
    server.close()
    with pytest.raises(ConnectionError):
        server.result(hanging, 60)


class KilledInTheMiddle:
    """A server on another host whose process is killed instead of a request of `at_method`."""

    def __init__(self, server: RayServer, at_method: str) -> None:
        self._server, self._at_method = server, at_method
        self._before: List[Any] = []

    def request(self, method: str, *arguments: Any) -> Any:
        """See `Server.request`."""
        if method == self._at_method:
            for handle in self._before:
                self._server.result(handle, COMMAND_S)
            self._server.close()
            assert wait_until(self._has_ended)  # Ray ends the process later
        self._before.append(self._server.request(method, *arguments))
        return self._before[-1]

    def _has_ended(self) -> bool:
        try:
            self._server.result(self._server.request("__ray_ready__"), COMMAND_S)
        except ConnectionError:
            return True
        return False

    def result(self, handle: Any, timeout_s: float) -> Any:
        """See `Server.result`."""
        return self._server.result(handle, timeout_s)

    def close(self) -> None:
        """See `Server.close`."""


def test_a_copy_on_another_host_is_absent_until_it_is_complete(
    ray: Any, make: Callable[..., Plan], tmp_path: Path
) -> None:
    cluster = Cluster("pod", (Host("gone", "127.0.0.9"), Host("second", SECOND_HOST), Host("own", own_address(ray))))
    assert peers_of(ray, cluster) == ["second"]
    with pytest.raises(ConnectionError, match="no Ray node is alive on host gone"):
        serve_on(ray, cluster, "gone", CopyReceiver, str(tmp_path), "run")
    plan = make()
    checkpoint = save(plan, 44)
    state = run_state.RunState(1, 2, "head", run_state.RUNNING, 44, 200)
    Path(plan.run_dir, run_state.NAME).write_text(json.dumps(vars(state)))
    for method in ("commit", "finish", ""):
        server = serve_on(ray, cluster, "second", CopyReceiver, str(tmp_path / "there"), "run")
        with copy_sender.opened(Path(plan.run_dir), checkpoint.path) as source, contextlib.ExitStack() as stack:
            if method:
                stack.enter_context(pytest.raises(ConnectionError, match="^no connection to host second: "))
            copy_sender.send(KilledInTheMiddle(server, method), source, "run", 60, lambda: False)
        names = [path.name for path in (tmp_path / "there" / "run").iterdir()]
        assert names == (["copy.partial"] if method else ["000001-00000044"])
    assert server.result(server.request("open", "mark", ()), 60).held == (1, 44)
    assert [age for age, _ in held_copies(tmp_path / "there" / "run")] == [(1, 44)]
    server.close()


def own_address(ray: Any) -> str:
    """Return the address of the node of this process."""
    own = ray.get_runtime_context().get_node_id()
    (node,) = [each for each in ray.nodes() if each["NodeID"] == own]
    return str(node["NodeManagerAddress"])
