"""The door by which a real Horovod's ranks meet, asked as Horovod asks it."""

from __future__ import annotations

import http.client
import socket
import threading
from typing import Iterator, Tuple

import pytest

from raypod.instance.collectives import Rendezvous, horovod_door
from raypod.instance.horovod_rendezvous import HorovodDoor
from raypod.plan.environment import horovod_identity


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    opened = Rendezvous("127.0.0.1")
    yield opened
    opened.close()


@pytest.fixture
def door(rendezvous: Rendezvous) -> Iterator[HorovodDoor]:
    opened = horovod_door(rendezvous.environment)
    yield opened
    opened.close()


def place(door: HorovodDoor) -> Tuple[str, int, str]:
    """Address, port and the path before every scope, of the URL that Horovod's C++ makes and takes apart."""
    told = door.environment
    address, port = told["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(told["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    domain, _, path = f"{address}:{port}".partition("/")
    name, _, port_text = domain.partition(":")
    assert int(port_text) == port
    return name, port, f"/{path}"


def ask(door: HorovodDoor, method: str, path: str, content: bytes = b"", way: str = "") -> Tuple[int, bytes]:
    address, port, own_way = place(door)
    connection = http.client.HTTPConnection(address, port, timeout=10)
    connection.request(method, (way or own_way) + path, content)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_what_a_rank_says_the_others_read_on_every_host(rendezvous: Rendezvous, door: HorovodDoor) -> None:
    other = horovod_door(rendezvous.environment)
    assert ask(door, "GET", "/global/0")[0] == 404
    assert ask(other, "PUT", "/global/0", b"\x00\xffwhere") == (200, b"")
    assert ask(door, "GET", "/global/0") == (200, b"\x00\xffwhere")
    assert ask(door, "GET", "/local_a/0")[0] == 404
    other.close()


def test_a_rank_that_has_met_the_others_leaves_nothing(door: HorovodDoor) -> None:
    for key in ("0", "rank_0", "1"):
        ask(door, "PUT", f"/global/{key}", b"x")
    assert ask(door, "DELETE", "/global/0")[0] == 200
    assert [ask(door, "GET", f"/global/{key}")[0] for key in ("0", "rank_0", "1")] == [404, 404, 200]


def test_it_keeps_no_load_of_data(door: HorovodDoor) -> None:
    address, port, way = place(door)
    connection = http.client.HTTPConnection(address, port, timeout=10)
    connection.putrequest("PUT", f"{way}/global/0")
    connection.putheader("Content-Length", str(1 << 30))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_it_cannot_be_reached_from_the_network(door: HorovodDoor) -> None:
    address, port, _ = place(door)
    assert address == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


@pytest.mark.parametrize("way", ["/global", "/x", "/0123456789abcdef0123456789abcdef:1"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_who_does_not_know_the_way_gets_nothing(door: HorovodDoor, method: str, way: str) -> None:
    ask(door, "PUT", "/global/0", b"where")
    assert ask(door, method, "/global/0", b"", way) == (403, b"")
    assert ask(door, "GET", "/global/0") == (200, b"where")


def test_a_store_that_is_gone_is_answered_at_once(rendezvous: Rendezvous, door: HorovodDoor) -> None:
    rendezvous.close()
    assert [ask(door, method, "/global/0")[0] for method in ("GET", "PUT", "DELETE")] == [503] * 3


def test_its_port_and_its_thread_end_with_it(rendezvous: Rendezvous) -> None:
    before = threading.active_count()
    opened = horovod_door(rendezvous.environment)
    opened.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place(opened)[:2], timeout=5)
    assert threading.active_count() == before


def test_uneven_hosts_have_cross_ranks_of_their_own() -> None:
    places = [horovod_identity([("a", 1), ("b", 2), ("c", 2)], index) for index in range(5)]
    names = ("HOSTNAME", "RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [tuple(place[f"HOROVOD_{name}"] for name in names) for place in places] == [
        ("a", "0", "0", "1", "0", "3"),
        ("b", "1", "0", "2", "1", "3"),
        ("b", "2", "1", "2", "0", "2"),
        ("c", "3", "0", "2", "2", "3"),
        ("c", "4", "1", "2", "1", "2"),
    ]
    assert {place["HOROVOD_SIZE"] for place in places} == {"5"}
