"""The rendezvous store, client and server: requests, waits, shutdown, and clients without the secret."""

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
from _pod.store_client import StoreClient
from _pod.wires import PeerFailed, Store, StoreServer

from tests.support import intruder

MANY = 256
c10d: Any = dist  # its stubs lack the stores


@pytest.fixture
def server() -> Iterator[StoreServer]:
    opened = StoreServer()
    yield opened
    opened.close()


def address_of(server: StoreServer) -> Tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


def connect(server: StoreServer, secret: str = "") -> StoreClient:
    return StoreClient(*address_of(server), secret or server.environment["EMULATED_POD_SECRET"], 10.0)


@pytest.fixture
def client(server: StoreServer) -> Iterator[StoreClient]:
    connected = connect(server)
    yield connected
    connected.close()


def test_clients_share_keys_and_values(server: StoreServer, client: StoreClient) -> None:
    other, old = connect(server), b"\x00\xff"
    client.set("a", old)
    assert (other.get("a"), other.get("b")) == (old, None)
    assert [other.add("n", 2), client.add("n", -5), other.add("n", 0)] == [2, -3, -3]
    assert (client.has(["a", "n"]), client.has(["a", "b"]), client.count()) == (True, False, 2)
    assert [client.swap("a", b"x", b"y"), client.swap("a", old, b"y"), other.get("a")] == [old, b"y", b"y"]
    assert [client.swap("c", b"x", b"y"), client.swap("c", b"", b"y")] == [b"x", b"y"]
    assert [client.delete("a"), client.delete("a"), other.get("a")] == [True, False, None]
    other.close()


def test_a_wait_ends_with_the_last_key_an_unless_key_its_timeout_and_when_cancelled(server: Any, client: Any) -> None:
    other = connect(server)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(client.wait, ["a", "b"], 20.0, ["failed"])
        other.set("a", b"")
        other.set("b", b"")
        assert waited.result(10) == []
        waited = pool.submit(client.wait, ["a", "c", "d"], 20.0, ["failed"])
        other.set("failed", b"")
        assert waited.result(10) == ["c", "d"]
    other.close()
    assert client.wait(["e"], 0.1) == ["e"]
    threading.Timer(0.2, client.cancelled.set).start()
    began = time.monotonic()
    assert client.wait(["e", "f"], 60.0) == ["e", "f"]
    assert time.monotonic() - began < 30
    client.set("e", b"")  # the connection remains usable
    assert client.wait(["e"], 60.0) == []


def test_many_clients_wait_for_each_other_and_gloo_process_groups_use_the_store(server: StoreServer) -> None:
    keys = [f"joined/{rank}" for rank in range(MANY)]

    def join(rank: int) -> List[str]:
        client = connect(server)
        client.set(keys[rank], b"x" * 1000)
        missing = client.wait(keys, 60.0)
        client.close()
        return missing

    with ThreadPoolExecutor(MANY) as pool:
        assert list(pool.map(join, range(MANY))) == [[]] * MANY
    clients = [connect(server) for _ in range(3)]

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


def test_the_default_process_group_uses_the_store_and_a_missing_key_raises_peer_failed(client: StoreClient) -> None:
    store = Store(client)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.new_group([0])
    dist.destroy_process_group()  # not directly after a collective: torch 2.0 may hang then
    assert client.count() >= 2  # the keys of both groups
    with pytest.raises(PeerFailed, match=r"waited 0.1 s for a in the store"):
        store.wait(["a"], timedelta(seconds=0.1))
    with pytest.raises(PeerFailed, match=r"waited 1 s for 0/.* in the store"):  # raised through Gloo
        c10d.ProcessGroupGloo(store, 0, 2, timedelta(seconds=1))


def test_close_ends_the_port_the_thread_and_all_waits() -> None:
    before = threading.active_count()
    server = StoreServer()
    client, waiting = connect(server), connect(server)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(waiting.wait, ["never"], 60.0)
        server.close()
        server.close()
        with pytest.raises(PeerFailed, match=r"lost the connection to the store at 127.0.0.1:\d+: "):
            waited.result(20)
    for message in ("lost the connection to the store at", "the connection to the store at .* was closed"):
        with pytest.raises(PeerFailed, match=message):
            client.add("a", 1)
    assert not client.is_open
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address_of(server), 5)
    assert threading.active_count() == before


@pytest.mark.usefixtures("processes")
def test_a_forked_child_does_not_keep_the_port_open(server: StoreServer, client: StoreClient) -> None:
    forked, in_child = socket.socketpair()
    child = os.fork()
    if child == 0:
        in_child.send(b"x")  # what a fork runs in a child precedes the return of os.fork
        time.sleep(60)
        os._exit(0)
    try:
        with forked, in_child:
            forked.settimeout(20)
            assert forked.recv(1) == b"x"
        client.set("a", b"here")  # the fork does not disturb the connection
        assert client.get("a") == b"here"
        server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address_of(server), 5)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def response_to(server: StoreServer, sent: bytes, within_s: float = 20.0) -> bytes:
    """Return all that the server sends to an unauthenticated client until it closes the connection."""
    response = b""
    with socket.create_connection(address_of(server), within_s) as connection:
        try:
            connection.sendall(sent)
            while True:
                data = connection.recv(65536)
                if not data:
                    return response
                response += data
        except ConnectionError:
            return response


def test_a_client_with_a_wrong_secret_garbage_and_torchs_client_are_rejected(
    server: StoreServer, client: StoreClient, capfd: pytest.CaptureFixture[str]
) -> None:
    client.set("a", b"private")
    with pytest.raises(RuntimeError, match="does not have the secret of this process") as rejected:
        connect(server, protocol.new_secret())
    assert not isinstance(rejected.value, PeerFailed)  # an error of configuration
    nonce, wrong_proof = bytes(32), bytes(32)
    response = response_to(server, nonce + wrong_proof + protocol.HEADER.pack(64) + bytes(64))
    assert len(response) == 64
    assert bytes.fromhex(server.environment["EMULATED_POD_SECRET"]) not in response
    assert "rejected 127.0.0.1, which does not have the secret" in capfd.readouterr().err
    for garbage in (bytes(range(256)) * 4096, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100):
        assert len(response_to(server, garbage)) <= 64
    with pytest.raises(RuntimeError):
        c10d.TCPStore(*address_of(server), None, False, timedelta(seconds=1), wait_for_workers=False).get("a")
    assert client.get("a") == b"private"


def test_unauthenticated_connections_are_closed_and_forged_and_replayed_messages_rejected(
    server: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("_pod.store_server.HANDSHAKE_S", 0.5)
    monkeypatch.setattr("_pod.store_server._MAX_UNAUTHENTICATED", 4)
    connections = [socket.create_connection(address_of(server), 20) for _ in range(10)]
    connect(server).close()  # is authenticated meanwhile
    for connection in connections:
        assert connection.recv(1) == b""  # within the socket's 20 s
        connection.close()
    client.set("a", b"")
    client.set("a", b"private")
    assert client._connection is not None
    client._connection.sendall(protocol.HEADER.pack(64) + bytes(64))
    with pytest.raises(PeerFailed, match="lost the connection"):
        client.get("a")
    again = connect(server)
    assert again.get("a") == b"private"
    again.close()
    channel, receiver = (protocol.Channel(bytes(32), protocol.CLIENT, b"", b"") for _ in range(2))
    message = channel.pack([b"x"])[protocol.HEADER.size :]
    assert receiver.unpack(message) == [b"x"]
    with pytest.raises(ConnectionError, match="does not carry the HMAC"):
        receiver.unpack(message)  # a replay


def test_a_client_sends_no_proof_to_a_server_without_the_secret() -> None:
    received: List[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def impostor() -> None:
            connection, _ = listener.accept()
            with connection:
                received.append(connection.recv(1000))
                connection.sendall(bytes(64))
                received.append(connection.recv(1000))

        served = pool.submit(impostor)
        with pytest.raises(RuntimeError, match="does not have the secret"):
            StoreClient("127.0.0.1", listener.getsockname()[1], protocol.new_secret(), 10.0)
        served.result(10)
    assert [len(each) for each in received] == [32, 0]  # the nonce, then the end


def test_the_pod_tests_intruder_detects_an_open_store(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port scan of tests/pod distinguishes an unprotected store, ours, and other services."""
    opened = c10d.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    assert any(intruder.adds(("127.0.0.1", opened.port), version) for version in intruder.TORCH_STORES)
    assert opened.add("intruder", 0) == 41
    monkeypatch.setattr(intruder, "WITHIN_S", 0.5)
    assert intruder.pod_store(("127.0.0.1", opened.port)) == (False, False)
    assert intruder.pod_store(address_of(server)) == (True, False)
    assert not any(intruder.adds(address_of(server), version) for version in intruder.TORCH_STORES)
    client = connect(server)
    assert client.count() == 0
    client.close()
