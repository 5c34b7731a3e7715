"""`_pod.wires`: joining, transfers, errors if a peer is missing or lost, and the end of any wait."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, Callable, Dict, Iterator, List, Tuple

import _pod.reduce
import _pod.wires
import pytest
import torch
import torch.distributed as dist

from tests.support.bounded import wait_until
from tests.support.ranks import error_of, set_rank

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
ENDS_WITHIN_S = 5.0  # EMULATED_POD_TIMEOUT_S is 30 s where `abandon_all` ends a wait
WAITS = ["barrier", "receive", "gather", "board", "horovod", "joining"]

c10d: Any = dist  # its stubs lack the stores


def client() -> Any:
    return _pod.wires.connection_to_store(2)[0]


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


def forked_child(rank: int, size: int) -> Tuple[str, List[List[int]]]:
    """Return the error of a forked child, such as a DataLoader worker, that uses the pod, and a later gather."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def connect() -> None:
        sender.send(error_of(lambda: _pod.wires.connect("exchange", rank, size)))

    worker = multiprocessing.get_context("fork").Process(target=connect)
    worker.start()
    worker.join(10)
    message = str(receiver.recv()) if receiver.poll(0) else f"no answer, exit code {worker.exitcode}"
    return message, _pod.wires.connect("exchange", rank, size).gather_numbers([rank])


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


def _waits(rank: int, size: int) -> Dict[str, Callable[[], Any]]:
    """Return the ways to wait for the other rank; each runs on groups of its own."""
    import horovod.torch as hvd
    from _pod.gradient_sum import GradientSum, Placement

    def group() -> Any:
        return _pod.wires.connect("test", rank, size)

    def horovod() -> Any:
        set_rank(rank, [("a", size)])
        hvd.init()
        return hvd.allreduce(torch.ones(4))

    gradients = GradientSum([torch.zeros(100)], Placement(1, rank, size))
    return {
        "barrier": lambda: group().barrier(),
        "receive": lambda: group().receive(torch.zeros(4), 1, 7).wait(),
        "gather": lambda: group().gather(torch.zeros(4)),
        "board": lambda: gradients([[torch.ones(100)]]),
        "horovod": horovod,
        "joining": lambda: _pod.reduce.join(rank, size),
    }


def frozen(rank: int, size: int) -> Dict[str, Any]:
    """Rank 1 joins rank 0 and freezes; rank 0 waits for it, and a thread of rank 0 ends the wait."""
    import horovod.torch as hvd

    found = {}
    for what in WAITS:
        os.environ[_pod.wires.GENERATION] = what
        pids = _pod.wires.connect("pids", rank, size).gather_numbers([os.getpid()])
        waits = _waits(rank, size)
        if what in ("board", "horovod"):
            waits[what]()  # opens the board, connects
        elif what != "joining":
            _pod.wires.connect("test", rank, size)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            threading.Timer(0.3, _pod.wires.abandon_all, ["rank 1 is frozen"]).start()
            began = time.monotonic()
            found[what] = error_of(waits[what]), time.monotonic() - began
            os.kill(pids[1][0], signal.SIGCONT)
        hvd.shutdown()
        for name in ("test", "gcl", "pids"):
            _pod.wires.disconnect(name)
    return found


# ---- tests


@pytest.fixture(scope="module")
def pod(ranks: Any) -> Dict[str, List[Any]]:
    functions = ["exchange", "with_the_default_group", "join_after_close", "forked_child", "timeout_of_rank_0"]
    return ranks(__file__, functions, 3)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: Dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    store = _pod.wires.StoreServer()
    set_all(monkeypatch, {**store.environment, _pod.wires.TIMEOUT_S: "0.3"})
    yield store.address
    _pod.wires.close()
    store.close()


def test_a_group_exchanges_every_dtype_is_independent_of_the_default_one_and_can_be_joined_again(
    pod: Dict[str, List[Any]],
) -> None:
    for found in pod["exchange"]:
        assert found["numbers"] == [[0, 0], [1, 10], [2, 20]]
        assert [each.dtype for each in found["tensors"]] == DTYPES
        assert all(torch.equal(each, torch.arange(3).add(1).to(each.dtype)) for each in found["tensors"])
        assert found["is_same"]
    assert not any(found["default"] for found in pod["exchange"])
    assert pod["with_the_default_group"] == [3.0, 3.0, 3.0]
    assert pod["join_after_close"] == [[[0], [1], [2]]] * 3


def test_a_forked_child_cannot_use_the_group_and_a_peer_that_does_not_respond_is_an_error_at_the_timeout(
    pod: Dict[str, List[Any]],
) -> None:
    for rank, (message, later) in enumerate(pod["forked_child"]):
        assert f"rank {rank} of group 'exchange'" in message
        assert "has joined before" in message
        assert later == [[0], [1], [2]]
    for waited_s, message, later in pod["timeout_of_rank_0"][1:]:
        assert 0.3 < waited_s < 20  # other waits of this test have 30 s
        # The first rank that times out closes its connections, which the second detects.
        assert "waited 0.5" in message or "lost the connection" in message
        assert "is not usable" in later, "a broken group stays broken"
    assert any("(EMULATED_POD_TIMEOUT_S=0.5)" in message for _, message, _ in pod["timeout_of_rank_0"])


def test_missing_ranks_are_named_at_the_join_timeout_and_may_be_waited_for_again(rendezvous: str) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank 0 waited 0.3 s for ranks 1, 2 of group 'g' at {rendezvous}"):
        _pod.wires.connect("g", 0, 3)
    assert time.monotonic() - began < 2.0
    for join_s in (0.1, 0.2):
        with pytest.raises(RuntimeError, match=f"waited {join_s} s for rank 1"):
            _pod.wires.connect("h", 0, 2, join_s=join_s)
    assert client().add("0/h/1/joined/0", 0) == 0


@pytest.mark.parametrize(
    ("variable", "texts", "message"),
    [
        (_pod.wires.RENDEZVOUS, ["localhost", "localhost:", ":80", "host:port"], "is not host:port"),
        (_pod.wires.TIMEOUT_S, ["soon", "0", "-1", "inf", "nan", ""], "is not a positive number of seconds"),
    ],
)
def test_an_invalid_variable_is_an_error(monkeypatch: Any, variable: str, texts: List[str], message: str) -> None:
    monkeypatch.setenv(_pod.wires.SECRET, "00")
    for text in texts:
        monkeypatch.setenv(variable, text)
        with pytest.raises(RuntimeError, match=message):
            _pod.wires.connect("g", 0, 2 if variable == _pod.wires.RENDEZVOUS else 1)


def test_a_closed_store_is_an_error_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _pod.wires.StoreServer()
    store.close()
    set_all(monkeypatch, {**store.environment, _pod.wires.TIMEOUT_S: "0.3"})
    message = f"EMULATED_POD_RENDEZVOUS={store.address}: no store answers at {store.address}"
    with pytest.raises(_pod.wires.PeerFailed, match=message):
        _pod.wires.connect("g", 0, 2)


def test_only_a_group_of_one_needs_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_pod.wires.RENDEZVOUS, raising=False)
    group = _pod.wires.connect("alone", 0, 1)
    group.barrier()
    group.broadcast_(torch.ones(3), 0)
    assert group.gather_numbers([7]) == [[7]]
    with pytest.raises(RuntimeError, match="cannot be rank 1 of 2"):
        _pod.wires.connect("alone", 1, 2)
    _pod.wires.disconnect("alone")
    for size in (1, 2):
        _pod.wires.abandon("g", 0, size, "no rendezvous")
    unset = r"EMULATED_POD_RENDEZVOUS is not set, and 2 processes .* the launcher must open"
    with pytest.raises(RuntimeError, match=unset):
        _pod.wires.connect("g", 0, 2)
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(RuntimeError, match="is not within"):
            _pod.wires.connect("g", rank, size)


def test_a_rank_that_is_taken_is_an_error_and_gloo_socket_ifname_selects_the_interface(
    rendezvous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client().add("0/g/1/joined/1", 1)
    with pytest.raises(RuntimeError, match=r"rank 1 of group 'g' .* need a new EMULATED_POD_GENERATION"):
        _pod.wires.connect("g", 1, 2)
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


def test_a_join_fails_at_once_if_another_rank_abandons(rendezvous: str) -> None:
    client()
    _pod.wires.abandon("g", 1, 2, "no gradient")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="another rank failed before it joined"):
        _pod.wires.connect("g", 0, 2, join_s=20)
    assert time.monotonic() - began < 10


def test_the_store_listens_on_its_own_address_only() -> None:
    with closing(_pod.wires.StoreServer("127.0.0.1")) as store, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(store.address.rpartition(":")[2])), timeout=5)


# ---- abandon


@pytest.fixture(scope="module")
def waits(ranks: Any) -> Dict[str, Any]:
    return ranks(__file__, ["frozen"], 2, timeout_s=90.0)["frozen"][0]


@pytest.mark.parametrize("what", WAITS)
def test_abandon_all_ends_a_wait_for_a_frozen_process(waits: Dict[str, Any], what: str) -> None:
    error, waited_s = waits[what]
    assert error.startswith(("PeerFailed: ", "HorovodInternalError: ")), error
    assert waited_s < ENDS_WITHIN_S


@pytest.mark.parametrize("store", ["ended", "frozen", "unreachable"])
def test_abandon_all_ends_the_connecting_to_a_lost_store(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as sockets, ThreadPoolExecutor(1) as pool:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        address = listener.getsockname()
        if store != "ended":
            listener.listen(0)
        for _ in range(4 if store == "unreachable" else 0):  # the kernel drops connections that do not fit the backlog
            other = sockets.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(address)
        set_all(monkeypatch, {_pod.wires.RENDEZVOUS: f"127.0.0.1:{address[1]}", _pod.wires.SECRET: "00" * 32})
        joined = pool.submit(_pod.wires.connect, "g", 0, 2)
        assert not wait_until(joined.done, within_s=0.3)

        def is_ended() -> bool:
            _pod.wires.abandon_all("another instance is lost")
            return joined.done()

        assert wait_until(is_ended, ENDS_WITHIN_S)
        with pytest.raises(_pod.wires.PeerFailed, match="cancelled while connecting"):
            joined.result()


def test_abandon_opens_no_connection_to_a_lost_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        server = _pod.wires.StoreServer()
        stack.callback(_pod.wires.close)
        set_all(monkeypatch, server.environment)
        store = client()
        server.close()
        with pytest.raises(_pod.wires.PeerFailed, match="lost the connection"):
            store.add("a", 1)
        monkeypatch.setattr(_pod.wires, "StoreClient", None)
        _pod.wires.abandon("g", 0, 2, "a replica of this process failed")
