"""Objects that an instance uses in an actor on the coordinator's host: results, errors, timeouts and deaths."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import Any, Iterator

import pytest
from bounded import COMMAND_S
from ray_cluster import ray_cluster

from raypod.fleet.ray_server import RayServer

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


@pytest.fixture
def ray() -> Iterator[Any]:
    with ray_cluster(("",)) as cluster:
        yield cluster.ray


def test_an_instance_uses_an_object_on_the_coordinators_host(ray: Any) -> None:
    server = RayServer(ray, disk_class(), "ab")
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
