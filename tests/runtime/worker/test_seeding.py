"""Broadcasts of weights along a chain: instances in threads, each on its own loopback address."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Dict, Iterator, List, Optional, Tuple

import numpy as np
import pytest

from raypod.errors import PeerLost
from raypod.runtime.worker import seeding as seeding_module
from raypod.runtime.worker.seeding import Endpoint, Seeding, SeedingPeer, new_seeding
from tests.support.bounded import wait_until

STATE = np.random.default_rng(0).integers(0, 256, 3_500_000, dtype=np.uint8)
# Buffers smaller and larger than a chunk, and an empty one.
BUFFERS = np.split(STATE, [3, 3, 5000, 5100, 1_400_000, 3_499_990])
TIMEOUT_S = 2.0


@pytest.fixture
def peers() -> Iterator[List[SeedingPeer]]:
    opened = [SeedingPeer(index, f"h{index}", f"127.0.0.{index + 1}", TIMEOUT_S) for index in range(4)]
    yield opened
    for peer in opened:
        peer.close()


def seeding_of(peers: List[SeedingPeer], root: int = 0, receivers: Optional[List[int]] = None) -> Seeding:
    return new_seeding([peer.endpoint for peer in peers], root, receivers)


def broadcast(
    peers: List[SeedingPeer], seeding: Seeding, without: Optional[int] = None
) -> Dict[int, Future[np.ndarray]]:
    """The result of every instance of the chain, except of `without`, which does not take part."""

    def take_part(index: int) -> np.ndarray:
        if index == seeding.root:
            peers[index].send(seeding, BUFFERS)
            return STATE
        return peers[index].receive(seeding)

    with ThreadPoolExecutor(len(peers)) as pool:
        return {index: pool.submit(take_part, index) for index in seeding.chain if index != without}


def connect(peer: SeedingPeer, own: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection((peer.endpoint.address, peer.endpoint.port), 10, (own, 0))


def send_message(connection: socket.socket, kind: bytes, content: bytes) -> None:
    connection.sendall(seeding_module._HEADER.pack(kind, len(content)) + content)


@pytest.mark.parametrize(
    ("root", "receivers", "chain"),
    [(0, None, (0, 1, 2, 3)), (2, None, (2, 3, 0, 1)), (3, [1], (3, 1)), (1, [3, 0], (1, 3, 0)), (0, [], (0,))],
)
def test_the_state_of_any_root_reaches_its_receivers(
    peers: List[SeedingPeer], root: int, receivers: Optional[List[int]], chain: Tuple[int, ...]
) -> None:
    seeding = seeding_of(peers, root, receivers)
    assert seeding.chain == chain
    assert all((result.result() == STATE).all() for result in broadcast(peers, seeding).values())


def test_instances_forward_chunks_while_they_receive(peers: List[SeedingPeer]) -> None:
    seeding = seeding_of(peers, 0, [1, 2])
    forwarded: List[bytes] = []

    def listen_as_the_last() -> None:
        with peers[2]._accept(seeding, peers[1].endpoint) as accepted:
            forwarded.append(seeding_module._read(accepted, 5 + 8 + 5 + 1000))

    with ThreadPoolExecutor(2) as pool:
        received = pool.submit(peers[1].receive, seeding)
        pool.submit(listen_as_the_last)
        with connect(peers[1]) as root:
            seeding_module._authenticate_receiver(root, seeding.secret)
            send_message(root, b"S", (2000).to_bytes(8, "big"))
            send_message(root, b"P", bytes(1000))
            assert wait_until(lambda: bool(forwarded), 5), "the first half was not forwarded before the second came"
    with pytest.raises(PeerLost, match="instance 1 on host h1 lost instance 0 on host h0"):
        received.result()


def test_a_missing_instance_is_named_by_its_neighbours_and_a_missing_root_by_all(peers: List[SeedingPeer]) -> None:
    results = broadcast(peers, seeding_of(peers), without=0)
    for index in (1, 2, 3):
        with pytest.raises(PeerLost, match="instance [123] on host h[123] lost instance 0 on host h0"):
            results[index].result()
    seeding = seeding_of(peers)
    peers[2].close()
    results = broadcast(peers, seeding, without=2)
    assert results[0].result() is STATE
    with pytest.raises(PeerLost, match="instance 1 on host h1 lost instance 2 on host h2 .*refused"):
        results[1].result()
    with pytest.raises(PeerLost, match="instance 3 on host h3 lost instance 2 on host h2 .*not connected within"):
        results[3].result()


def test_connections_without_secret_are_rejected(peers: List[SeedingPeer], capfd: pytest.CaptureFixture[str]) -> None:
    seeding = seeding_of(peers)
    received: List[bytes] = []

    def intrude(intruder: socket.socket) -> None:
        with intruder:
            intruder.sendall(bytes(32))
            try:
                answer = seeding_module._read(intruder, 64)
                intruder.sendall(answer[32:])  # reflect the receiver's own proof
                received.append(intruder.recv(1000))
            except (OSError, EOFError):
                received.append(b"")

    # Connected before the predecessor, so that the receiver accepts them first.
    connections = [connect(peers[1], own) for own in ("127.0.0.1", "127.0.0.9")]
    intruders = [threading.Thread(target=intrude, args=[each]) for each in connections]
    for intruder in intruders:
        intruder.start()
    results = broadcast(peers, seeding)
    for intruder in intruders:
        intruder.join(10)
    assert all((result.result() == STATE).all() for result in results.values())
    assert received == [b"", b""]
    errors = capfd.readouterr().err
    assert "seeding: rejected a connection from 127.0.0.1: authentication failed" in errors
    assert "seeding: rejected a connection from 127.0.0.9: expected 127.0.0.1" in errors


def test_a_handshake_is_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding_module, "_HANDSHAKE_S", 0.3)
    accepted, slow = socket.socketpair()
    with accepted, slow, ThreadPoolExecutor(1) as pool:
        result, sent = pool.submit(seeding_module._authenticate_sender, accepted, b"secret"), 0
        while not result.done() and sent < seeding_module._NONCE_BYTES:
            slow.sendall(b"x")
            sent += 1
            wait([result], 0.05)
        slow.shutdown(socket.SHUT_WR)
        assert not result.result()
    assert sent < seeding_module._NONCE_BYTES


def test_no_secret_receives_nothing_and_a_wrong_hmac_is_refused(peers: List[SeedingPeer]) -> None:
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(peers[0].send, seeding_of(peers, 0, [1]), BUFFERS)
        connection, _ = peers[1]._listener.accept()
        with connection:
            connection.sendall(bytes(64))
            assert seeding_module._read(connection, 32)  # its nonce, and nothing after it
            assert connection.recv(1) == b""
        with pytest.raises(PeerLost, match="authentication failed"):
            sent.result()
        seeding = seeding_of(peers, 0, [1])
        received = pool.submit(peers[1].receive, seeding)
        with connect(peers[1]) as sender:
            seeding_module._authenticate_receiver(sender, seeding.secret)
            for kind, content in ((b"S", (4).to_bytes(8, "big")), (b"P", b"evil"), (b"E", bytes(32))):
                send_message(sender, kind, content)
            with pytest.raises(PeerLost, match="not those of the root"):
                received.result()


def test_it_listens_on_its_own_address_alone_and_the_secret_is_not_in_the_repr(peers: List[SeedingPeer]) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.9", peers[1].endpoint.port), 5)
    seeding = new_seeding([], 0, [])
    assert repr(seeding.secret) not in repr(seeding)


@pytest.mark.parametrize("absent", [0, 2])
def test_abort_ends_the_waits_for_a_lost_instance(absent: int) -> None:
    peers = [SeedingPeer(index, f"h{index}", f"127.0.0.{index + 1}", 600.0) for index in range(3)]
    seeding = seeding_of(peers)
    with ThreadPoolExecutor(3) as pool:
        members = {0: lambda: peers[0].send(seeding, BUFFERS), 1: lambda: peers[1].receive(seeding)}
        results = {index: pool.submit(work) for index, work in members.items() if index != absent}
        assert not wait_until(results[1].done, 0.5)  # the absent one listens and does nothing
        for peer in peers:
            peer.abort()
        error = results[1].exception(10)
    assert isinstance(error, PeerLost)
    assert error.peer == absent
    for peer in peers:
        peer.close()


@pytest.mark.parametrize("is_aborted_before", [False, True])
def test_abort_ends_the_connecting_to_a_host_that_drops_all_packets(is_aborted_before: bool) -> None:
    with contextlib.ExitStack() as stack:
        root = SeedingPeer(0, "h0", "127.0.0.1", 600.0)
        stack.callback(root.close)
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.2", 0))
        listener.listen(0)
        for _ in range(4):  # the kernel drops connections that do not fit the backlog
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listener.getsockname())
        seeding = new_seeding([root.endpoint, Endpoint(1, "h1", *listener.getsockname())])
        with ThreadPoolExecutor(1) as pool:
            if is_aborted_before:
                root.abort()
            sent = pool.submit(root.send, seeding, BUFFERS)
            assert is_aborted_before or not wait_until(sent.done, 0.5)
            root.abort()
            assert isinstance(sent.exception(10), PeerLost)
