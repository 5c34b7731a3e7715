"""The store at which processes meet: what it does for who knows its secret, and how little for everybody else."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Iterator, List, Tuple

import _pod.store_protocol as protocol
import pytest
import torch
import torch.distributed as dist
from _pod.rendezvous import Store
from _pod.store_client import StoreClient
from _pod.wires import PeerFailed, StoreServer
from bounded import wait_until
from pod import intruder

MANY = 256
c10d: Any = dist  # whose stubs lack its stores


@pytest.fixture
def server() -> Iterator[StoreServer]:
    opened = StoreServer()
    yield opened
    opened.close()


def place(server: StoreServer) -> Tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


def join(server: StoreServer, secret: str = "") -> StoreClient:
    return StoreClient(*place(server), secret or server.environment["EMULATED_POD_SECRET"], 10.0)


@pytest.fixture
def client(server: StoreServer) -> Iterator[StoreClient]:
    joined = join(server)
    yield joined
    joined.close()


# ---- for who knows the secret


def test_what_one_says_the_others_read(server: StoreServer, client: StoreClient) -> None:
    other = join(server)
    client.set("a", b"\x00\xff")
    assert (other.get("a"), other.get("b")) == (b"\x00\xff", None)
    assert [other.add("n", 2), client.add("n", -5), other.add("n", 0)] == [2, -3, -3]
    assert (client.has(["a", "n"]), client.has(["a", "b"]), client.count()) == (True, False, 2)
    assert [client.swap("a", b"x", b"y"), client.swap("a", b"\x00\xff", b"y"), other.get("a")] == [
        b"\x00\xff",
        b"y",
        b"y",
    ]
    assert [client.swap("c", b"x", b"y"), client.swap("c", b"", b"y")] == [b"x", b"y"]
    assert [client.delete("a"), client.delete("a"), other.get("a")] == [True, False, None]
    other.close()


def test_a_wait_ends_with_the_last_key_or_with_the_one_that_says_otherwise(
    server: StoreServer, client: StoreClient
) -> None:
    other = join(server)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(client.wait, ["a", "b"], 20.0, ["failed"])
        other.set("a", b"")
        other.set("b", b"")
        assert waited.result(10) == []
        waited = pool.submit(client.wait, ["a", "c", "d"], 20.0, ["failed"])
        other.set("failed", b"")
        assert waited.result(10) == ["c", "d"]
    other.close()


def test_a_wait_ends_at_its_bound_and_when_it_is_cancelled(client: StoreClient) -> None:
    assert client.wait(["a"], 0.1) == ["a"]
    threading.Timer(0.2, client.cancelled.set).start()
    began = time.monotonic()
    assert client.wait(["a", "b"], 60.0) == ["a", "b"]
    assert time.monotonic() - began < 30
    client.set("a", b"")  # and the conversation goes on
    assert client.wait(["a"], 60.0) == []


def test_many_meet(server: StoreServer) -> None:
    keys = [f"joined/{rank}" for rank in range(MANY)]

    def meet(rank: int) -> List[str]:
        joined = join(server)
        joined.set(keys[rank], b"x" * 1000)
        missing = joined.wait(keys, 60.0)
        joined.close()
        return missing

    with ThreadPoolExecutor(MANY) as pool:
        assert list(pool.map(meet, range(MANY))) == [[]] * MANY


def test_torch_takes_it_for_a_store_of_its_own(server: StoreServer) -> None:
    clients = [join(server) for _ in range(3)]

    def reduce(rank: int) -> Tuple[float, bytes]:
        store = Store(clients[rank])
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=20)
        group = c10d.ProcessGroupGloo(c10d.PrefixStore("wires", store), rank, 3, options)
        total = torch.tensor(float(rank))
        group.allreduce([total]).wait()
        prefixed = c10d.PrefixStore(f"own{rank}", store)
        prefixed.set("key", b"\x00\xff")
        return total.item(), prefixed.get("key")

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(reduce, range(3))) == [(3.0, b"\x00\xff")] * 3
    for each in clients:
        each.close()


def test_the_default_process_group_can_be_made_with_it(client: StoreClient) -> None:
    store = Store(client)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.new_group([0])
    dist.destroy_process_group()  # with no work just done: torch 2.0 may wait for its own threads without end then
    assert client.count() >= 2  # it has met itself there, twice


def test_waiting_for_a_key_in_vain_is_the_others_fault(client: StoreClient) -> None:
    store = Store(client)
    with pytest.raises(PeerFailed, match=r"waited 0.1 s for a in the store"):
        store.wait(["a"], timedelta(seconds=0.1))
    with pytest.raises(PeerFailed, match=r"waited 1 s for 0/.* in the store"):  # through Gloo, with its own keys
        c10d.ProcessGroupGloo(store, 0, 2, timedelta(seconds=1))


# ---- its end


def test_it_leaves_no_port_and_no_thread() -> None:
    before = threading.active_count()
    server = StoreServer()
    client, waiting = join(server), join(server)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(waiting.wait, ["never"], 60.0)
        server.close()
        server.close()
        with pytest.raises(PeerFailed, match=r"the store at 127.0.0.1:\d+ is gone, or its host is: "):
            waited.result(20)
    for _ in range(2):
        with pytest.raises(PeerFailed, match="the store at"):
            client.add("a", 1)
    assert not client.is_open
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place(server), 5)
    assert threading.active_count() == before


def test_a_forked_child_holds_no_port(server: StoreServer, client: StoreClient) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        client.set("a", b"here")  # the child has not disturbed it
        assert client.get("a") == b"here"
        server.close()
        assert wait_until(lambda: _is_refused(place(server)), 10)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def _is_refused(where: Tuple[str, int]) -> bool:
    try:
        socket.create_connection(where, 5).close()
    except ConnectionRefusedError:
        return True
    return False


# ---- strangers


def said_to(server: StoreServer, sent: bytes, within_s: float = 20.0) -> bytes:
    """All that a stranger hears who sends this, until the store ends the conversation."""
    heard = b""
    with socket.create_connection(place(server), within_s) as stranger:
        try:
            stranger.sendall(sent)
            while True:
                data = stranger.recv(65536)
                if not data:
                    return heard
                heard += data
        except ConnectionError:
            return heard


def test_who_has_a_wrong_secret_is_told_so_and_learns_nothing(
    server: StoreServer, client: StoreClient, capfd: pytest.CaptureFixture[str]
) -> None:
    client.set("a", b"private")
    with pytest.raises(RuntimeError, match="does not know the secret that this process has") as refused:
        join(server, protocol.new_secret())
    assert not isinstance(refused.value, PeerFailed)  # it is the program's own mistake
    theirs, wrong = bytes(32), bytes(32)
    heard = said_to(server, theirs + wrong + protocol.HEADER.pack(64) + bytes(64))
    assert len(heard) == 64
    assert bytes.fromhex(server.environment["EMULATED_POD_SECRET"]) not in heard
    assert "turned away 127.0.0.1, which does not know the secret" in capfd.readouterr().err
    assert client.get("a") == b"private"


@pytest.mark.parametrize(
    "sent", [bytes(range(256)) * 4096, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100], ids=["bytes", "http"]
)
def test_who_sends_garbage_hears_64_bytes_of_none(server: StoreServer, client: StoreClient, sent: bytes) -> None:
    assert len(said_to(server, sent)) <= 64
    client.set("a", b"")


def test_a_client_of_torch_gets_nothing(server: StoreServer, client: StoreClient) -> None:
    client.set("a", b"private")
    with pytest.raises(RuntimeError):
        c10d.TCPStore(*place(server), None, False, timedelta(seconds=1), wait_for_workers=False).get("a")
    assert client.get("a") == b"private"


def test_who_stays_silent_is_left_and_disturbs_nobody(
    server: StoreServer, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("_pod.store_server.HANDSHAKE_S", 0.5)
    monkeypatch.setattr("_pod.store_server._MAX_UNAUTHENTICATED", 4)
    strangers = [socket.create_connection(place(server), 20) for _ in range(10)]
    join(server).close()  # among them
    for stranger in strangers:
        assert stranger.recv(1) == b""  # within the 20 s of its socket
        stranger.close()
    client.set("a", b"")


def test_messages_in_between_are_not_taken(server: StoreServer, client: StoreClient) -> None:
    """Somebody who carries a conversation on, without the secret."""
    client.set("a", b"private")
    assert client._connection is not None
    client._connection.sendall(protocol.HEADER.pack(64) + bytes(64))
    with pytest.raises(PeerFailed, match="is gone"):
        client.get("a")
    again = join(server)
    assert again.get("a") == b"private"
    again.close()
    seal = protocol.Channel(bytes(32), protocol.CLIENT, b"", b"")
    message = seal.pack([b"x"])[protocol.HEADER.size :]
    opened = protocol.Channel(bytes(32), protocol.CLIENT, b"", b"")
    assert opened.unpack(message) == [b"x"]
    with pytest.raises(ConnectionError, match="not of who has proved"):
        opened.unpack(message)  # the same once more


def test_who_listens_without_the_secret_gets_no_proof() -> None:
    heard: List[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def impostor() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(1000))
                connection.sendall(bytes(64))
                heard.append(connection.recv(1000))

        served = pool.submit(impostor)
        with pytest.raises(RuntimeError, match="does not know the secret"):
            StoreClient("127.0.0.1", listener.getsockname()[1], protocol.new_secret(), 10.0)
        served.result(10)
    assert [len(each) for each in heard] == [32, 0]  # a random number, and the end


def test_the_intruder_of_the_pod_would_find_an_open_store(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes round the ports of a pod (tests/pod) tells an open store from ours, and ours from other listeners."""
    opened = c10d.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    assert any(intruder.adds(("127.0.0.1", opened.port), version) for version in intruder.TORCH_STORES)
    assert opened.add("intruder", 0) == 41
    monkeypatch.setattr(intruder, "WITHIN_S", 0.5)
    assert intruder.pod_store(("127.0.0.1", opened.port)) == (False, False)
    assert intruder.pod_store(place(server)) == (True, False)
    assert not any(intruder.adds(place(server), version) for version in intruder.TORCH_STORES)
    client = join(server)
    assert client.count() == 0
    client.close()
