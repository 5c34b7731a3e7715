"""The server at which a real Horovod's ranks meet, asked as Horovod asks it."""

from __future__ import annotations

import http.client
import socket
from typing import Iterator, Tuple

import pytest

from raypod.environment import horovod_identity
from raypod.horovod_rendezvous import HorovodRendezvous


@pytest.fixture
def server() -> Iterator[HorovodRendezvous]:
    opened = HorovodRendezvous("127.0.0.1", ["localhost"])
    yield opened
    opened.close()


def place(server: HorovodRendezvous) -> Tuple[str, int]:
    found = server.environment
    return found["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(found["HOROVOD_GLOO_RENDEZVOUS_PORT"])


def ask(server: HorovodRendezvous, method: str, path: str, content: bytes = b"") -> Tuple[int, bytes]:
    connection = http.client.HTTPConnection(*place(server), timeout=10)
    connection.request(method, path, content)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_what_a_rank_says_the_others_read(server: HorovodRendezvous) -> None:
    assert ask(server, "GET", "/global/0")[0] == 404
    assert ask(server, "PUT", "/global/0", b"\x00\xffwhere") == (200, b"")
    assert ask(server, "GET", "/global/0") == (200, b"\x00\xffwhere")
    assert ask(server, "GET", "/local_a/0")[0] == 404


def test_a_rank_that_has_met_the_others_leaves_nothing(server: HorovodRendezvous) -> None:
    for key in ("0", "rank_0", "1"):
        ask(server, "PUT", f"/global/{key}", b"x")
    assert ask(server, "DELETE", "/global/0")[0] == 200
    assert [ask(server, "GET", f"/global/{key}")[0] for key in ("0", "rank_0", "1")] == [404, 404, 200]


def test_it_keeps_no_load_of_data(server: HorovodRendezvous) -> None:
    connection = http.client.HTTPConnection(*place(server), timeout=10)
    connection.putrequest("PUT", "/global/0")
    connection.putheader("Content-Length", str(1 << 30))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_it_listens_on_its_own_address_alone(server: HorovodRendezvous) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", place(server)[1]), timeout=5)


def test_a_stranger_is_turned_away(server: HorovodRendezvous, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(place(server), timeout=5, source_address=("127.0.0.3", 0)) as stranger:
        assert answer_of(stranger) == b""
    assert "refused 127.0.0.3, which is no host of this run (127.0.0.1)" in capfd.readouterr().err


def answer_of(stranger: socket.socket) -> bytes:
    try:
        stranger.sendall(b"GET /global/0 HTTP/1.0\r\n\r\n")
        return stranger.recv(100)
    except ConnectionError:
        return b""


def test_its_port_ends_with_it() -> None:
    opened = HorovodRendezvous("127.0.0.1", [])
    opened.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place(opened), timeout=5)


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
