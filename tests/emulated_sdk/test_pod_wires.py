"""`_pod.wires` and `_pod.wires`: joining a group, its transfers, and its errors if a peer is missing or lost."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from contextlib import closing
from typing import Any, Dict, Iterator, List, Tuple

import _pod.wires
import pytest
import torch
import torch.distributed as dist

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]

c10d: Any = dist  # its stubs lack the stores


def client() -> Any:
    return _pod.wires.connection_to_store(2)[0]


def error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


# ---- run by the ranks


def exchange(rank: int, size: int) -> Dict[str, Any]:
    group = _pod.wires.connect("exchange", rank, size)
    group.barrier()
    numbers = group.gather_numbers([rank, 10 * rank])
    tensors = [torch.arange(3).add(rank).to(dtype) for dtype in DTYPES]
    for tensor in tensors:
        group.broadcast_(tensor, 1)
    is_same = _pod.wires.connect("exchange", rank, size) is group
    return {"numbers": numbers, "tensors": tensors, "is_same": is_same, "default": dist.is_initialized()}


def with_the_default_group(rank: int, size: int) -> float:
    own = c10d.PrefixStore("own", client())
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    _pod.wires.connect("exchange", rank, size).barrier()
    dist.destroy_process_group()
    return total.item()


def join_after_close(rank: int, size: int) -> List[List[int]]:
    _pod.wires.close()
    return _pod.wires.connect("exchange", rank, size).gather_numbers([rank])


def forked_child(rank: int, size: int) -> str:
    """Return the error of a forked child, such as a DataLoader worker, that uses the pod by mistake."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def connect() -> None:
        sender.send(error_of(lambda: _pod.wires.connect("exchange", rank, size)))

    worker = multiprocessing.get_context("fork").Process(target=connect)
    worker.start()
    worker.join(10)
    return str(receiver.recv()) if receiver.poll(0) else f"no answer, exit code {worker.exitcode}"


def group_after_the_fork(rank: int, size: int) -> List[List[int]]:
    return _pod.wires.connect("exchange", rank, size).gather_numbers([rank])


def timeout_of_rank_0(rank: int, size: int) -> Tuple[float, str, str]:
    os.environ[_pod.wires.TIMEOUT_S] = "0.5"
    group = _pod.wires.connect("timeout", rank, size)
    began = time.monotonic()
    message = ""
    if rank == 0:
        time.sleep(1.5)
    else:
        message = error_of(lambda: group.gather_numbers([1]))
    return time.monotonic() - began, message, error_of(group.barrier)


RANK_FUNCTIONS = [
    "exchange",
    "with_the_default_group",
    "join_after_close",
    "forked_child",
    "group_after_the_fork",
    "timeout_of_rank_0",
]

# ---- tests


@pytest.fixture(scope="module")
def pod(ranks: Any) -> Dict[str, List[Any]]:
    return ranks(__file__, RANK_FUNCTIONS, 3)


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    store = _pod.wires.StoreServer()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(_pod.wires.TIMEOUT_S, "0.3")
    yield store.address
    _pod.wires.close()
    store.close()


def test_gather_numbers_returns_the_numbers_of_all_ranks(pod: Dict[str, List[Any]]) -> None:
    assert [found["numbers"] for found in pod["exchange"]] == [[[0, 0], [1, 10], [2, 20]]] * 3


@pytest.mark.parametrize("index", range(len(DTYPES)), ids=str)
def test_broadcast_supports_every_dtype(pod: Dict[str, List[Any]], index: int) -> None:
    expected = torch.arange(3).add(1).to(DTYPES[index])
    assert all(torch.equal(found["tensors"][index], expected) for found in pod["exchange"])


def test_connect_returns_the_same_group(pod: Dict[str, List[Any]]) -> None:
    assert all(found["is_same"] for found in pod["exchange"])


def test_the_default_process_group_is_independent(pod: Dict[str, List[Any]]) -> None:
    assert not any(found["default"] for found in pod["exchange"])
    assert pod["with_the_default_group"] == [3.0, 3.0, 3.0]


def test_a_group_can_be_joined_again_after_close(pod: Dict[str, List[Any]]) -> None:
    assert pod["join_after_close"] == [[[0], [1], [2]]] * 3


def test_a_forked_child_cannot_use_the_group_of_its_parent(pod: Dict[str, List[Any]]) -> None:
    for rank, message in enumerate(pod["forked_child"]):
        assert f"rank {rank} of group 'exchange'" in message
        assert "has joined before" in message
    assert pod["group_after_the_fork"] == [[[0], [1], [2]]] * 3


def test_a_peer_that_does_not_respond_is_an_error_at_the_timeout(pod: Dict[str, List[Any]]) -> None:
    for waited_s, message, _ in pod["timeout_of_rank_0"][1:]:
        assert 0.3 < waited_s < 20  # other waits of this test have 30 s
        # The first rank that times out closes its connections, which the second detects.
        assert "waited 0.5" in message or "lost the connection" in message
    assert any("(EMULATED_POD_TIMEOUT_S=0.5)" in message for _, message, _ in pod["timeout_of_rank_0"])


def test_a_broken_group_stays_broken(pod: Dict[str, List[Any]]) -> None:
    assert all("is not usable" in later for _, _, later in pod["timeout_of_rank_0"][1:])


def test_missing_ranks_are_named_at_the_join_timeout(rendezvous: str) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank 0 waited 0.3 s for ranks 1, 2 of group 'g' at {rendezvous}"):
        _pod.wires.connect("g", 0, 3)
    assert time.monotonic() - began < 2.0


def test_a_rank_that_is_taken_is_an_error(rendezvous: str) -> None:
    client().add("0/g/1/joined/1", 1)
    with pytest.raises(RuntimeError, match=r"rank 1 of group 'g' .* need a new EMULATED_POD_GENERATION"):
        _pod.wires.connect("g", 1, 2)


def test_a_missing_rendezvous_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_pod.wires.RENDEZVOUS, raising=False)
    with pytest.raises(
        RuntimeError, match=r"EMULATED_POD_RENDEZVOUS is not set, and 2 processes .* the launcher must open"
    ):
        _pod.wires.connect("g", 0, 2)


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":80", "host:port"])
def test_a_malformed_rendezvous_is_an_error(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv(_pod.wires.RENDEZVOUS, address)
    monkeypatch.setenv(_pod.wires.SECRET, "00")
    with pytest.raises(RuntimeError, match="is not host:port"):
        _pod.wires.connect("g", 0, 2)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan", ""])
def test_an_invalid_timeout_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(_pod.wires.TIMEOUT_S, text)
    with pytest.raises(RuntimeError, match="is not a positive number of seconds"):
        _pod.wires.connect("g", 0, 1)


def test_a_closed_store_is_an_error_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _pod.wires.StoreServer()
    store.close()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(_pod.wires.TIMEOUT_S, "0.3")
    message = f"EMULATED_POD_RENDEZVOUS={store.address}: no store answers at {store.address}"
    with pytest.raises(_pod.wires.PeerFailed, match=message):
        _pod.wires.connect("g", 0, 2)


def test_a_group_of_one_needs_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_pod.wires.RENDEZVOUS, raising=False)
    group = _pod.wires.connect("alone", 0, 1)
    group.barrier()
    group.broadcast_(torch.ones(3), 0)
    assert group.gather_numbers([7]) == [[7]]
    _pod.wires.disconnect("alone")


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_group_is_an_error(rank: int, size: int) -> None:
    with pytest.raises(RuntimeError, match="is not within"):
        _pod.wires.connect("g", rank, size)


def test_a_process_cannot_join_as_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    _pod.wires.connect("alone", 0, 1)
    with pytest.raises(RuntimeError, match="cannot be rank 1 of 2"):
        _pod.wires.connect("alone", 1, 2)
    _pod.wires.disconnect("alone")


def test_gloo_socket_ifname_selects_the_interface(rendezvous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        _pod.wires.gloo_options(rendezvous, 1.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert len(_pod.wires.gloo_options(rendezvous, 1.0)._devices) == 1


@pytest.mark.parametrize(("length", "count"), [(0, 3), (2, 3), (7, 3), (9, 3)])
def test_even_slices_cover_the_range(length: int, count: int) -> None:
    slices = _pod.reduce.even_slices(5, 5 + length, count)
    assert [element for piece in slices for element in range(piece.start, piece.stop)] == list(range(5, 5 + length))
    assert {piece.stop - piece.start for piece in slices} <= {length // count, length // count + 1}


def test_a_rank_may_retry_after_a_timeout(rendezvous: str) -> None:
    with pytest.raises(RuntimeError, match="waited 0.1 s for rank 1"):
        _pod.wires.connect("g", 0, 2, join_s=0.1)
    with pytest.raises(RuntimeError, match="waited 0.2 s for rank 1"):
        _pod.wires.connect("g", 0, 2, join_s=0.2)
    assert client().add("0/g/1/joined/0", 0) == 0


def test_a_join_fails_at_once_if_another_rank_abandons(rendezvous: str) -> None:
    client()
    _pod.wires.abandon("g", 1, 2, "no gradient")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="another rank failed before it joined"):
        _pod.wires.connect("g", 0, 2, join_s=20)
    assert time.monotonic() - began < 10


def test_abandon_needs_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_pod.wires.RENDEZVOUS, raising=False)
    _pod.wires.abandon("g", 0, 1, "alone")
    _pod.wires.abandon("g", 0, 2, "no rendezvous")


def test_the_store_listens_on_its_own_address_only() -> None:
    with closing(_pod.wires.StoreServer("127.0.0.1")) as store, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(store.address.rpartition(":")[2])), timeout=5)
