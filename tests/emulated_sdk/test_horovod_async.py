"""`horovod.torch`: asynchronous operations, alltoall and reducescatter, gradients, and `join`."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List

import horovod.torch as hvd
import pytest
import torch

from tests.support.bounded import wait_until
from tests.support.ranks import both, error_of, set_rank


def start(rank: int, size: int) -> None:
    set_rank(rank, [("a", size)])
    hvd.init()


def in_any_order(rank: int, size: int) -> List[float]:
    """Half of the ranks submit in the opposite order."""
    order = range(5) if rank % 2 else range(4, -1, -1)
    handles = {
        number: hvd.allreduce_async(torch.full((number + 1,), float(number + rank)), name=f"t{number}", op=hvd.Sum)
        for number in order
    }
    return [hvd.synchronize(handles[number]).mean().item() for number in range(5)]


def asynchronous(rank: int, size: int) -> Dict[str, Any]:
    tensor = torch.full((3,), float(rank))
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="polled")
    assert wait_until(lambda: hvd.poll(handle))
    first, second = hvd.synchronize(handle), hvd.synchronize(handle)
    assert first is tensor
    group = hvd.grouped_allreduce_async_([torch.full((2,), float(rank)), torch.zeros(1)], op=hvd.Max)
    grouped = hvd.grouped_allreduce_async([torch.full((2,), float(rank))], op=hvd.Min)
    gathered = hvd.grouped_allgather_async([torch.tensor([rank]), torch.full((rank, 1), 0.5)])
    copies = hvd.broadcast_async_(torch.tensor([rank]), 1), hvd.broadcast_async(torch.tensor([rank]), 0)
    assert isinstance(hvd.synchronize(grouped), tuple)
    return {
        "polled": tensor.tolist(),
        "second": second,
        "group": [each.tolist() for each in hvd.synchronize(group)],
        "gathered": [each.tolist() for each in hvd.synchronize(gathered)],
        "copies": [hvd.synchronize(each).tolist() for each in copies],
        "one": hvd.synchronize(hvd.allgather_async(torch.tensor([rank]))).tolist(),
    }


def rows(rank: int, size: int) -> Dict[str, Any]:
    numbers = torch.arange(2.0 * size) + 100 * rank
    uneven, received = hvd.alltoall(torch.full((sum(range(1, size + 1)), 2), rank), splits=list(range(1, size + 1)))
    assert received.dtype == torch.int32
    return {
        "even": hvd.alltoall(numbers).tolist(),
        "uneven": uneven.tolist(),
        "received": received.tolist(),
        "by_tensor": hvd.alltoall(torch.full((size,), rank), torch.ones(size, dtype=torch.int32))[0].tolist(),
        "scattered": hvd.reducescatter(torch.arange(5.0) * rank, op=hvd.Sum).tolist(),
        "mean": hvd.reducescatter(torch.arange(4.0) * rank).tolist(),
        "group": [each.tolist() for each in hvd.grouped_reducescatter([torch.ones(4), torch.ones(8)], op=hvd.Sum)],
        "later": hvd.synchronize(hvd.reducescatter_async(torch.ones(4), op=hvd.Sum)).tolist(),
    }


def gradients(rank: int, size: int) -> List[List[float]]:
    calls: List[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda leaf: hvd.allreduce(leaf, op=hvd.Sum),
        lambda leaf: hvd.grouped_allreduce([leaf, 2 * leaf], op=hvd.Average)[1],
        hvd.allgather,
        lambda leaf: hvd.broadcast(leaf, 1),
        lambda leaf: hvd.alltoall(leaf, splits=[1] * size)[0],
        lambda leaf: hvd.reducescatter(leaf, op=hvd.Sum),
    ]
    leaves = [torch.full((4,), rank + 1.0, requires_grad=True) for _ in calls]
    for call, leaf in zip(calls, leaves):
        call(leaf).square().sum().backward()
    return [leaf.grad.tolist() for leaf in leaves if leaf.grad is not None]


def uneven_data(rank: int, size: int) -> Dict[str, Any]:
    sums = [hvd.allreduce(torch.ones(2), name=f"step {step}", op=hvd.Sum).tolist() for step in range(rank + 1)]
    return {"sums": sums, "last": hvd.join(), "after": hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item()}


def join_and_gather(rank: int, size: int) -> str:
    message = ""
    if rank:
        time.sleep(0.2)
        message = error_of(lambda: hvd.allgather(torch.ones(1), name="while others have joined"))
    hvd.join()
    return message


@pytest.fixture(scope="module", params=both())
def pod(ranks: Any, request: pytest.FixtureRequest) -> Dict[str, List[Any]]:
    functions = ["start", "in_any_order", "asynchronous", "rows", "gradients", "uneven_data", "join_and_gather"]
    return ranks(__file__, functions, 4, horovod=request.param)


def test_ranks_may_submit_in_different_orders(pod: Dict[str, List[Any]]) -> None:
    assert pod["in_any_order"] == [[6.0, 10.0, 14.0, 18.0, 22.0]] * 4


def test_poll_and_synchronize_return_the_result(pod: Dict[str, List[Any]]) -> None:
    expected = {"polled": [6.0, 6.0, 6.0], "second": None, "copies": [[1], [0]], "one": [0, 1, 2, 3]}
    groups = {"group": [[3.0, 3.0], [0.0]], "gathered": [[0, 1, 2, 3], [[0.5]] * 6]}
    assert pod["asynchronous"] == [{**expected, **groups}] * 4


def test_alltoall_and_reducescatter_distribute_rows(pod: Dict[str, List[Any]]) -> None:
    scattered, means = [[0.0, 6.0], [12.0], [18.0], [24.0]], [[0.0], [1.5], [3.0], [4.5]]
    for rank, found in enumerate(pod["rows"]):
        assert found == {
            "even": [100.0 * other + 2 * rank + place for other in range(4) for place in range(2)],
            "uneven": [[other, other] for other in range(4) for _ in range(rank + 1)],
            "received": [rank + 1] * 4,
            "by_tensor": [0, 1, 2, 3],
            "scattered": scattered[rank],
            "mean": means[rank],
            "group": [[4.0], [4.0, 4.0]],
            "later": [4.0],
        }


def test_gradients_flow_through_collectives(pod: Dict[str, List[Any]]) -> None:
    for rank, found in enumerate(pod["gradients"]):
        own, root = 2.0 * (rank + 1), 4.0 if rank == 1 else 0.0
        # The sum, 10, is squared on all four ranks.
        assert found == [[each] * 4 for each in (80.0, 20.0, own, root, own, 80.0)]


def test_joined_ranks_contribute_zeros(pod: Dict[str, List[Any]]) -> None:
    for rank, found in enumerate(pod["uneven_data"]):
        assert found == {"sums": [[4.0 - step] * 2 for step in range(rank + 1)], "last": 3, "after": 4.0}


def test_other_collectives_fail_while_a_rank_has_joined(pod: Dict[str, List[Any]]) -> None:
    assert pod["join_and_gather"][0] == ""
    assert all("llgather is not supported with Join" in message for message in pod["join_and_gather"][1:])
