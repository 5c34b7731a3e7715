"""`_pod.board`: barrier and gather of the processes of one host, and their errors."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Dict, List

import _pod.board
import _pod.wires
import pytest
import torch
from _pod.gradient_sum import GradientSum, Placement

from tests.support.ranks import error_of

ROWS = [torch.arange(length, dtype=dtype) for dtype in (torch.uint8, torch.float32) for length in (1, 7, 200, 20000)]
SIZE = 4


def _connected(name: str, rank: int, size: int) -> Any:
    """Return a group, and the local exchange of its processes."""
    group = _pod.wires.connect(name, rank, size)
    folder = tempfile.gettempdir() if rank == 0 else ""
    path = _pod.board._broadcast_path(group, str(Path(folder, f"exchange-{name}")))
    return group, _pod.board.connect_locally(group, path), path


def gathers(rank: int, size: int) -> Dict[str, Any]:
    group, exchange, path = _connected("gathers", rank, size)
    rows = [row + rank for row in ROWS]
    fitting = [row for row in rows if exchange.fits(group, row)]
    for _ in range(3):  # the calls alternate
        exchange.barrier(group)
        same = [torch.equal(exchange.gather(group, row), group.gather(row)) for row in fitting]
    return {"same": same, "files": sorted(str(each) for each in Path(path).parent.glob("exchange-gathers*"))}


def messages(rank: int, size: int) -> Dict[str, int]:
    """Return the number of operations of Gloo, and of local exchanges, of two sums and gathers."""
    gradients = GradientSum([torch.zeros(100)], Placement(1, rank, size))
    gradients([[torch.ones(100)]])  # connects
    counts = {"gloo": 0, "local": 0}

    def counted(kind: str, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            counts[kind] += 1
            return method(*arguments)

        return call

    group, exchange = _pod.wires.Group, _pod.board.LocalExchange
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_run", counted("gloo", group._run))
        patch.setattr(group, "_start", counted("gloo", group._start))
        patch.setattr(exchange, "_exchange", counted("local", exchange._exchange))
        for _ in range(2):
            gradients([[torch.ones(100)]])
            gradients.gather(torch.zeros(8, dtype=torch.uint8))
    return counts


def out_of_step(rank: int, size: int) -> str:
    group, exchange, _ = _connected("out of step", rank, size)
    if rank == 0:
        return error_of(lambda: exchange.gather(group, torch.zeros(8)))
    return error_of(lambda: exchange.barrier(group))


def not_connected(rank: int, size: int) -> bool:
    """Return whether there is no exchange if one process cannot create its socket."""
    group = _pod.wires.connect("not connected", rank, size)
    folder = "/no/such/folder" if rank == 1 else tempfile.gettempdir()
    return _pod.board.connect_locally(group, f"{folder}/exchange-none") is None


@pytest.fixture(scope="module")
def found(ranks: Any) -> Dict[str, List[Any]]:
    return ranks(__file__, ["gathers", "messages", "not_connected", "out_of_step"], SIZE)


def test_a_gather_has_the_bits_of_that_over_the_network(found: Dict[str, List[Any]]) -> None:
    assert [each["same"] for each in found["gathers"]] == [[True] * 6] * SIZE


def test_the_sockets_have_no_names_afterwards(found: Dict[str, List[Any]]) -> None:
    assert [each["files"] for each in found["gathers"]] == [[]] * SIZE


def test_an_update_has_two_barriers_and_a_gather_and_nothing_over_gloo(found: Dict[str, List[Any]]) -> None:
    assert found["messages"] == [{"gloo": 0, "local": 2 * 3}] * SIZE


def test_processes_at_different_operations_are_an_error_on_all(found: Dict[str, List[Any]]) -> None:
    assert all(error.startswith("PeerFailed: ") for error in found["out_of_step"]), found["out_of_step"]
    assert any("is at another operation" in error for error in found["out_of_step"])


def test_no_process_has_an_exchange_if_one_cannot_connect(found: Dict[str, List[Any]]) -> None:
    assert found["not_connected"] == [True] * SIZE
