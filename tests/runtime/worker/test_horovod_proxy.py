"""The rendezvous proxy of a real Horovod, with the requests that Horovod sends."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from typing import Iterator, Tuple

import pytest

from raypod.plan.environment import horovod_identity
from raypod.runtime.worker.collectives import horovod_proxy
from raypod.runtime.worker.horovod_proxy import HorovodProxy
from raypod.system.sdk import rendezvous as door


@pytest.fixture
def rendezvous() -> Iterator[door.StoreServer]:
    opened = door.serve("127.0.0.1", 0)
    yield opened
    opened.close()


@pytest.fixture
def proxy(rendezvous: door.StoreServer) -> Iterator[HorovodProxy]:
    opened = horovod_proxy(rendezvous.environment)
    yield opened
    opened.close()


def address_of(proxy: HorovodProxy) -> Tuple[str, int, str]:
    """Return address, port and the path before the scope of the URL that Horovod's C++ code builds and parses."""
    variables = proxy.environment
    address, port = variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(variables["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    domain, _, path = f"{address}:{port}".partition("/")
    name, _, port_text = domain.partition(":")
    assert int(port_text) == port
    return name, port, f"/{path}"


def request(proxy: HorovodProxy, method: str, path: str, content: bytes = b"", **given: str) -> Tuple[int, bytes]:
    address, port, secret = address_of(proxy)
    headers = {"Content-Length": given["length"]} if "length" in given else {}
    with contextlib.closing(http.client.HTTPConnection(address, port, timeout=10)) as connection:
        connection.request(method, given.get("secret", secret) + path, content, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_a_value_is_readable_on_every_host_until_deleted(rendezvous: door.StoreServer, proxy: HorovodProxy) -> None:
    other = horovod_proxy(rendezvous.environment)
    assert request(proxy, "GET", "/global/0")[0] == 404
    assert request(other, "PUT", "/global/0", b"\x00\xffwhere") == (200, b"")
    assert request(proxy, "GET", "/global/0") == (200, b"\x00\xffwhere")
    assert request(proxy, "GET", "/local_a/0")[0] == 404
    for key in ("rank_0", "1"):
        request(proxy, "PUT", f"/global/{key}", b"x")
    assert request(other, "DELETE", "/global/0")[0] == 200
    assert [request(proxy, "GET", f"/global/{key}")[0] for key in ("0", "rank_0", "1")] == [404, 404, 200]
    other.close()
    assert request(proxy, "PUT", "/global/0", length=str(1 << 30))[0] == 413
    rendezvous.close()
    assert [request(proxy, method, "/global/0")[0] for method in ("GET", "PUT", "DELETE")] == [503] * 3


@pytest.mark.parametrize("secret", ["/global", "/x", "/0123456789abcdef0123456789abcdef:1"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_requests_without_the_secret_path_are_forbidden(proxy: HorovodProxy, method: str, secret: str) -> None:
    request(proxy, "PUT", "/global/0", b"where")
    assert request(proxy, method, "/global/0", b"", secret=secret) == (403, b"")
    assert request(proxy, "GET", "/global/0") == (200, b"where")


def test_it_listens_on_the_loopback_interface_only_until_it_is_closed(rendezvous: door.StoreServer) -> None:
    before = threading.active_count()
    opened = horovod_proxy(rendezvous.environment)
    address, port, _ = address_of(opened)
    assert address == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    opened.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, port), timeout=5)
    assert threading.active_count() == before


def test_cross_ranks_with_different_numbers_of_instances_per_host() -> None:
    identities = [horovod_identity([("a", 1), ("b", 2), ("c", 2)], index) for index in range(5)]
    names = ("HOSTNAME", "RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [tuple(identity[f"HOROVOD_{name}"] for name in names) for identity in identities] == [
        ("a", "0", "0", "1", "0", "3"),
        ("b", "1", "0", "2", "1", "3"),
        ("b", "2", "1", "2", "0", "2"),
        ("c", "3", "0", "2", "2", "3"),
        ("c", "4", "1", "2", "1", "2"),
    ]
    assert {identity["HOROVOD_SIZE"] for identity in identities} == {"5"}
