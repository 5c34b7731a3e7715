"""`_pod.wires.abandon_all` ends every kind of wait for a frozen process, from another thread."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Callable, Dict, List

import _pod.reduce
import _pod.wires
import pytest
import torch

from tests.support.bounded import wait_until
from tests.support.ranks import set_rank

ENDS_WITHIN_S = 5.0  # EMULATED_POD_TIMEOUT_S is 30 s here
WAITS = ["barrier", "receive", "gather", "board", "horovod", "joining"]


def _gradient_sum(rank: int, size: int) -> Any:
    from _pod.gradient_sum import GradientSum, Placement

    return GradientSum([torch.zeros(100)], Placement(1, rank, size))


def _waits(rank: int, size: int) -> Dict[str, Callable[[], Any]]:
    """Return the ways to wait for the other rank; each runs on groups of its own."""

    def group() -> Any:
        return _pod.wires.connect("test", rank, size)

    def horovod() -> Any:
        import horovod.torch as hvd

        set_rank(rank, [("a", size)])
        hvd.init()
        return hvd

    gradients = _gradient_sum(rank, size)
    return {
        "barrier": lambda: group().barrier(),
        "receive": lambda: group().receive(torch.zeros(4), 1, 7).wait(),
        "gather": lambda: group().gather(torch.zeros(4)),
        "board": lambda: gradients([[torch.ones(100)]]),
        "horovod": lambda: horovod().allreduce(torch.ones(4)),
        "joining": lambda: _pod.reduce.join(rank, size),
    }


def frozen(rank: int, size: int) -> Dict[str, Any]:
    """Rank 1 joins rank 0 and freezes; rank 0 waits for it, and a thread of rank 0 ends the wait."""
    found = {}
    for what in WAITS:
        os.environ[_pod.wires.GENERATION] = what
        pids = _pod.wires.connect("pids", rank, size).gather_numbers([os.getpid()])
        waits = _waits(rank, size)
        if what == "board":
            waits["board"]()  # opens the board
        elif what == "horovod":
            waits["horovod"]()
        elif what != "joining":
            _pod.wires.connect("test", rank, size)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            threading.Timer(0.3, _pod.wires.abandon_all, ["rank 1 is frozen"]).start()
            began = time.monotonic()
            try:
                waits[what]()
                error = ""
            except RuntimeError as caught:
                error = f"{type(caught).__name__}: {caught}"
            found[what] = (error, time.monotonic() - began)
            os.kill(pids[1][0], signal.SIGCONT)
        _disconnect()
    return found


def _disconnect() -> None:
    import horovod.torch as hvd

    hvd.shutdown()
    for name in ("test", "gcl", "pids"):
        _pod.wires.disconnect(name)


@pytest.fixture(scope="module")
def found(ranks: Any) -> List[Dict[str, Any]]:
    return ranks(__file__, ["frozen"], 2, timeout_s=90.0)["frozen"]


@pytest.mark.parametrize("what", WAITS)
def test_abandon_all_ends_a_wait_for_a_frozen_process(found: List[Dict[str, Any]], what: str) -> None:
    error, waited_s = found[0][what]
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
        monkeypatch.setenv(_pod.wires.RENDEZVOUS, f"127.0.0.1:{address[1]}")
        monkeypatch.setenv(_pod.wires.SECRET, "00" * 32)
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
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store, _ = _pod.wires.connection_to_store(2)
        server.close()
        with pytest.raises(_pod.wires.PeerFailed, match="lost the connection"):
            store.add("a", 1)
        monkeypatch.setattr(_pod.wires, "StoreClient", None)
        _pod.wires.abandon("g", 0, 2, "a replica of this process failed")
