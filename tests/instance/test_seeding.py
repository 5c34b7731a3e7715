"""The chain that carries a state: instances in threads, on loopback addresses of their own."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, Iterator, List, Optional

import numpy as np
import pytest
from bounded import wait_until

from raypod.errors import PeerLost
from raypod.instance import seeding as seeding_module
from raypod.instance.seeding import Seeding, SeedingEnd, new_seeding

STATE = np.random.default_rng(0).integers(0, 256, 3_500_000, dtype=np.uint8)
# Of all sizes: smaller than what is worth a message, and larger than one.
PARTS = np.split(STATE, [3, 3, 5000, 5100, 1_400_000, 3_499_990])
TIMEOUT_S = 2.0


@pytest.fixture
def ends() -> Iterator[List[SeedingEnd]]:
    opened = [SeedingEnd(index, f"h{index}", f"127.0.0.{index + 1}", TIMEOUT_S) for index in range(4)]
    yield opened
    for end in opened:
        end.close()


def seed(ends: List[SeedingEnd], seeding: Seeding, without: Optional[int] = None) -> Dict[int, Future[np.ndarray]]:
    """What came of every member of the chain."""

    def take_part(index: int) -> np.ndarray:
        if index == seeding.root:
            ends[index].give(seeding, PARTS)
            return STATE
        return ends[index].take(seeding)

    with ThreadPoolExecutor(len(ends)) as pool:
        return {index: pool.submit(take_part, index) for index in seeding.chain if index != without}


@pytest.mark.parametrize(
    ("root", "receivers", "chain"),
    [(0, None, (0, 1, 2, 3)), (2, None, (2, 3, 0, 1)), (3, [1], (3, 1)), (1, [3, 0], (1, 3, 0)), (0, [], (0,))],
)
def test_the_state_of_any_root_reaches_its_receivers(
    ends: List[SeedingEnd], root: int, receivers: Optional[List[int]], chain: tuple[int, ...]
) -> None:
    seeding = new_seeding([end.place for end in ends], root, receivers)
    assert seeding.chain == chain
    results = seed(ends, seeding)
    assert all((result.result() == STATE).all() for result in results.values())


def test_instances_pass_on_what_they_have_while_they_receive(ends: List[SeedingEnd]) -> None:
    seeding = new_seeding([end.place for end in ends], 0, [1, 2])
    first = socket.create_connection((ends[1].place.address, ends[1].place.port), 5, ("127.0.0.1", 0))
    last: List[bytes] = []

    def listen_as_the_last() -> None:
        accepted = ends[2]._accept(seeding, ends[1].place)
        with accepted:
            last.append(seeding_module._read(accepted, 5 + 8 + 5 + 1000))

    threads = [threading.Thread(target=listen_as_the_last), threading.Thread(target=lambda: lost.append(taken()))]
    lost: List[Optional[PeerLost]] = []

    def taken() -> Optional[PeerLost]:
        try:
            ends[1].take(seeding)
        except PeerLost as error:
            return error
        return None

    for thread in threads:
        thread.start()
    with first:
        seeding_module._introduce(first, seeding.secret)
        first.sendall(seeding_module._HEAD.pack(b"S", 8) + (2000).to_bytes(8, "big"))
        first.sendall(seeding_module._HEAD.pack(b"P", 1000) + bytes(1000))
        assert wait_until(lambda: bool(last), 5), "the first half was not passed on before the second came"
    for thread in threads:
        thread.join(10)
    assert "instance 1 on host h1 lost instance 0 on host h0" in str(lost[0])


def test_a_missing_receiver_is_named_by_those_who_needed_it(ends: List[SeedingEnd]) -> None:
    seeding = new_seeding([end.place for end in ends])
    ends[2].close()
    results = seed(ends, seeding, without=2)
    assert results[0].result() is STATE
    with pytest.raises(PeerLost, match="instance 1 on host h1 lost instance 2 on host h2 .*refused"):
        results[1].result()
    with pytest.raises(PeerLost, match="instance 3 on host h3 lost instance 2 on host h2 .*not connected within"):
        results[3].result()


def test_the_whole_chain_tells_the_first_cause(ends: List[SeedingEnd]) -> None:
    seeding = new_seeding([end.place for end in ends])
    results = seed(ends, seeding, without=0)
    for index in (1, 2, 3):
        with pytest.raises(PeerLost, match="instance [123] on host h[123] lost instance 0 on host h0"):
            results[index].result()


def test_who_does_not_know_the_secret_learns_nothing_and_disturbs_nobody(
    ends: List[SeedingEnd], capfd: pytest.CaptureFixture[str]
) -> None:
    seeding = new_seeding([end.place for end in ends])
    heard: List[bytes] = []

    def intrude(own: str) -> None:
        where = (ends[1].place.address, ends[1].place.port)
        with socket.create_connection(where, 10, (own, 0)) as stranger:
            stranger.sendall(bytes(32))
            try:
                answer = seeding_module._read(stranger, 64)
                stranger.sendall(answer[32:])  # what a stranger could try: the receiver's own proof
                heard.append(stranger.recv(1000))
            except (OSError, EOFError):
                heard.append(b"")

    strangers = [threading.Thread(target=intrude, args=[own]) for own in ("127.0.0.1", "127.0.0.9")]
    for stranger in strangers:
        stranger.start()
    results = seed(ends, seeding)
    for stranger in strangers:
        stranger.join(10)
    assert all((result.result() == STATE).all() for result in results.values())
    assert heard == [b"", b""]
    assert "seeding: turned away 127.0.0.9, expected instance 0" in capfd.readouterr().err


def test_a_listener_that_does_not_know_the_secret_gets_nothing(ends: List[SeedingEnd]) -> None:
    seeding = new_seeding([end.place for end in ends], 0, [1])
    with ThreadPoolExecutor(1) as pool:
        given = pool.submit(ends[0].give, seeding, PARTS)
        connection, _ = ends[1]._listener.accept()
        with connection:
            connection.sendall(bytes(64))
            assert seeding_module._read(connection, 32)  # its nonce, and nothing after it
            assert connection.recv(1) == b""
    with pytest.raises(PeerLost, match="does not know the secret"):
        given.result()


def test_bytes_that_are_not_the_roots_are_refused(ends: List[SeedingEnd]) -> None:
    seeding = new_seeding([end.place for end in ends], 0, [1])
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(ends[1].take, seeding)
        where = (ends[1].place.address, ends[1].place.port)
        with socket.create_connection(where, 5, ("127.0.0.1", 0)) as liar:
            seeding_module._introduce(liar, seeding.secret)
            for kind, content in ((b"S", (4).to_bytes(8, "big")), (b"P", b"evil"), (b"E", bytes(32))):
                liar.sendall(seeding_module._HEAD.pack(kind, len(content)) + content)
            with pytest.raises(PeerLost, match="not those of the root"):
                taken.result()


def test_it_listens_on_its_own_address_alone(ends: List[SeedingEnd]) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.9", ends[1].place.port), 5)


def test_the_secret_is_not_shown() -> None:
    seeding = new_seeding([], 0, [])
    assert repr(seeding.secret) not in repr(seeding)


@pytest.mark.parametrize("absent", [0, 2])
def test_who_is_told_that_others_are_lost_waits_no_longer(absent: int) -> None:
    ends = [SeedingEnd(index, f"h{index}", f"127.0.0.{index + 1}", 600.0) for index in range(3)]
    seeding = new_seeding([end.place for end in ends])
    with ThreadPoolExecutor(3) as pool:
        members = {0: lambda: ends[0].give(seeding, PARTS), 1: lambda: ends[1].take(seeding)}
        parts = {index: pool.submit(work) for index, work in members.items() if index != absent}
        assert not wait_until(parts[1].done, 0.5)  # for the absent one, which listens and does nothing
        for end in ends:
            end.abandon()
        error = parts[1].exception(10)
    assert isinstance(error, PeerLost)
    assert error.peer == absent
    for end in ends:
        end.close()
