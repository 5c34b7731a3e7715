"""How processes find each other, and how they learn that one does not come, ends or stays silent."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from contextlib import closing
from typing import Any, Dict, Iterator, List, Tuple

import _pod.rendezvous
import _pod.wires
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]

c10d: Any = dist  # whose stubs lack its stores


def client() -> Any:
    return _pod.rendezvous.client(2)[0]


def error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


# ---- what the ranks run


def exchange(rank: int, size: int) -> Dict[str, Any]:
    group = _pod.wires.connect("exchange", rank, size)
    group.barrier()
    numbers = group.gather_numbers([rank, 10 * rank])
    tensors = [torch.arange(3).add(rank).to(dtype) for dtype in DTYPES]
    for tensor in tensors:
        group.broadcast_(tensor, 1)
    is_same = _pod.wires.connect("exchange", rank, size) is group
    return {"numbers": numbers, "tensors": tensors, "is_same": is_same, "default": dist.is_initialized()}


def beside_the_default_group(rank: int, size: int) -> float:
    own = c10d.PrefixStore("own", client())
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    _pod.wires.connect("exchange", rank, size).barrier()
    dist.destroy_process_group()
    return total.item()


def again_after_closing(rank: int, size: int) -> List[List[int]]:
    _pod.wires.close()
    return _pod.wires.connect("exchange", rank, size).gather_numbers([rank])


def forked_child(rank: int, size: int) -> str:
    """What a DataLoader worker sees that uses the pod by mistake."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def use() -> None:
        sender.send(error_of(lambda: _pod.wires.connect("exchange", rank, size)))

    worker = multiprocessing.get_context("fork").Process(target=use)
    worker.start()
    worker.join(10)
    return str(receiver.recv()) if receiver.poll(0) else f"no answer, exit code {worker.exitcode}"


def wires_after_the_fork(rank: int, size: int) -> List[List[int]]:
    return _pod.wires.connect("exchange", rank, size).gather_numbers([rank])


def silence_of_rank_0(rank: int, size: int) -> Tuple[float, str, str]:
    os.environ[_pod.wires.TIMEOUT_S] = "0.5"
    group = _pod.wires.connect("silence", rank, size)
    began = time.monotonic()
    message = ""
    if rank == 0:
        time.sleep(1.5)
    else:
        message = error_of(lambda: group.gather_numbers([1]))
    return time.monotonic() - began, message, error_of(group.barrier)


RANK_FUNCTIONS = [
    "exchange",
    "beside_the_default_group",
    "again_after_closing",
    "forked_child",
    "wires_after_the_fork",
    "silence_of_rank_0",
]

# ---- tests


@pytest.fixture(scope="module")
def pod() -> Dict[str, List[Any]]:
    return run_ranks(__file__, RANK_FUNCTIONS, 3)


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    store = _pod.wires.StoreServer()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(_pod.wires.TIMEOUT_S, "0.3")
    yield store.address
    _pod.wires.close()
    store.close()


def test_everyone_learns_everyones_numbers(pod: Dict[str, List[Any]]) -> None:
    assert [found["numbers"] for found in pod["exchange"]] == [[[0, 0], [1, 10], [2, 20]]] * 3


@pytest.mark.parametrize("index", range(len(DTYPES)), ids=str)
def test_broadcast_carries_every_dtype(pod: Dict[str, List[Any]], index: int) -> None:
    expected = torch.arange(3).add(1).to(DTYPES[index])
    assert all(torch.equal(found["tensors"][index], expected) for found in pod["exchange"])


def test_a_group_is_joined_once(pod: Dict[str, List[Any]]) -> None:
    assert all(found["is_same"] for found in pod["exchange"])


def test_the_default_process_group_stays_the_programs_own(pod: Dict[str, List[Any]]) -> None:
    assert not any(found["default"] for found in pod["exchange"])
    assert pod["beside_the_default_group"] == [3.0, 3.0, 3.0]


def test_a_group_can_be_joined_again_after_closing(pod: Dict[str, List[Any]]) -> None:
    assert pod["again_after_closing"] == [[[0], [1], [2]]] * 3


def test_a_forked_child_is_no_second_copy_of_its_rank(pod: Dict[str, List[Any]]) -> None:
    for rank, message in enumerate(pod["forked_child"]):
        assert f"rank {rank} of group 'exchange'" in message
        assert "has joined before" in message
    assert pod["wires_after_the_fork"] == [[[0], [1], [2]]] * 3


def test_a_silent_peer_is_an_error_at_the_bound(pod: Dict[str, List[Any]]) -> None:
    for waited_s, message, _ in pod["silence_of_rank_0"][1:]:
        assert 0.3 < waited_s < 1.4
        assert (
            "waited 0.5" in message or "lost the connection" in message
        )  # the second to give up learns from the first
    assert any("(EMULATED_POD_TIMEOUT_S=0.5)" in message for _, message, _ in pod["silence_of_rank_0"])


def test_a_broken_group_stays_broken(pod: Dict[str, List[Any]]) -> None:
    assert all("cannot be used any more" in later for _, _, later in pod["silence_of_rank_0"][1:])


def test_missing_ranks_are_named_at_the_join_bound(rendezvous: str) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank 0 waited 0.3 s for ranks 1, 2 of group 'g' at {rendezvous}"):
        _pod.wires.connect("g", 0, 3)
    assert time.monotonic() - began < 2.0


def test_a_rank_that_is_taken_is_refused(rendezvous: str) -> None:
    client().add("0/g/1/joined/1", 1)
    with pytest.raises(RuntimeError, match=r"rank 1 of group 'g' .* need a new EMULATED_POD_GENERATION"):
        _pod.wires.connect("g", 1, 2)


def test_a_missing_rendezvous_says_who_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_pod.wires.RENDEZVOUS, raising=False)
    with pytest.raises(RuntimeError, match=r"EMULATED_POD_RENDEZVOUS is not set, and 2 processes .* whoever launches"):
        _pod.wires.connect("g", 0, 2)


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":80", "host:port"])
def test_a_malformed_rendezvous_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv(_pod.wires.RENDEZVOUS, address)
    monkeypatch.setenv(_pod.wires.SECRET, "00")
    with pytest.raises(RuntimeError, match="is not host:port"):
        _pod.wires.connect("g", 0, 2)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan", ""])
def test_a_bound_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(_pod.wires.TIMEOUT_S, text)
    with pytest.raises(RuntimeError, match="is not a positive number of seconds"):
        _pod.wires.connect("g", 0, 1)


def test_a_closed_rendezvous_is_an_error_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _pod.wires.StoreServer()
    store.close()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(_pod.wires.TIMEOUT_S, "0.3")
    told = f"EMULATED_POD_RENDEZVOUS={store.address}: no store answers at {store.address}"
    with pytest.raises(_pod.wires.PeerFailed, match=told):
        _pod.wires.connect("g", 0, 2)


def test_a_group_of_one_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_pod.wires.RENDEZVOUS, raising=False)
    group = _pod.wires.connect("alone", 0, 1)
    group.barrier()
    group.broadcast_(torch.ones(3), 0)
    assert group.gather_numbers([7]) == [[7]]
    _pod.wires.disconnect("alone")


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(RuntimeError, match="is not within"):
        _pod.wires.connect("g", rank, size)


def test_one_process_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    _pod.wires.connect("alone", 0, 1)
    with pytest.raises(RuntimeError, match="cannot be rank 1 of 2"):
        _pod.wires.connect("alone", 1, 2)
    _pod.wires.disconnect("alone")


def test_the_interface_that_is_asked_for_is_used(rendezvous: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        _pod.rendezvous.gloo_options(rendezvous, 1.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert len(_pod.rendezvous.gloo_options(rendezvous, 1.0)._devices) == 1


@pytest.mark.parametrize(("length", "pieces"), [(0, 3), (2, 3), (7, 3), (9, 3)])
def test_even_slices_cover_everything_evenly(length: int, pieces: int) -> None:
    slices = _pod.wires.even_slices(5, 5 + length, pieces)
    assert [element for piece in slices for element in range(piece.start, piece.stop)] == list(range(5, 5 + length))
    assert {piece.stop - piece.start for piece in slices} <= {length // pieces, length // pieces + 1}


def test_a_rank_that_gave_up_may_try_again(rendezvous: str) -> None:
    with pytest.raises(RuntimeError, match="waited 0.1 s for rank 1"):
        _pod.wires.connect("g", 0, 2, join_s=0.1)
    with pytest.raises(RuntimeError, match="waited 0.2 s for rank 1"):
        _pod.wires.connect("g", 0, 2, join_s=0.2)
    assert client().add("0/g/1/joined/0", 0) == 0


def test_who_joins_learns_at_once_that_another_has_failed(rendezvous: str) -> None:
    _pod.wires.abandon("g", 1, 2, "no gradient")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="another rank has failed before it joined"):
        _pod.wires.connect("g", 0, 2, join_s=20)
    assert time.monotonic() - began < 10


def test_giving_up_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_pod.wires.RENDEZVOUS, raising=False)
    _pod.wires.abandon("g", 0, 1, "alone")
    _pod.wires.abandon("g", 0, 2, "nobody to tell")


def test_the_rendezvous_listens_on_its_own_address_alone() -> None:
    with closing(_pod.wires.StoreServer("127.0.0.1")) as store, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(store.address.rpartition(":")[2])), timeout=5)
