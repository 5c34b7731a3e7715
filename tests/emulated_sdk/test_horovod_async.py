"""`horovod.torch`: asynchronous operations, alltoall and reducescatter, gradients, and `join`."""

from __future__ import annotations

import time
from typing import Any, Dict, List

import horovod.torch as hvd
import pytest
import torch
from ranks import both, run_ranks, set_rank


def start(rank: int, size: int) -> None:
    set_rank(rank, [("a", size)])
    hvd.init()


def in_any_order(rank: int, size: int) -> List[float]:
    """Half of the ranks submit in the opposite order."""
    tensors = [torch.full((number + 1,), float(number + rank)) for number in range(5)]
    order = range(5) if rank % 2 else range(4, -1, -1)
    handles = {number: hvd.allreduce_async(tensors[number], name=f"t{number}", op=hvd.Sum) for number in order}
    found = [hvd.synchronize(handles[number]) for number in range(5)]
    return [float(tensor.sum()) / (number + 1) for number, tensor in enumerate(found)]


def asynchronous(rank: int, size: int) -> Dict[str, Any]:
    tensor = torch.full((3,), float(rank))
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="polled")
    deadline = time.monotonic() + 20
    while not hvd.poll(handle) and time.monotonic() < deadline:
        time.sleep(0.001)
    first, second = hvd.synchronize(handle), hvd.synchronize(handle)
    group = hvd.grouped_allreduce_async_([torch.full((2,), float(rank)), torch.zeros(1)], op=hvd.Max)
    grouped = hvd.grouped_allreduce_async([torch.full((2,), float(rank))], op=hvd.Min)
    gathered = hvd.grouped_allgather_async([torch.tensor([rank]), torch.full((rank, 1), 0.5)])
    copies = hvd.broadcast_async_(torch.tensor([rank]), 1), hvd.broadcast_async(torch.tensor([rank]), 0)
    return {
        "polled": tensor.tolist() if first is tensor else None,
        "second": second,
        "group": [each.tolist() for each in hvd.synchronize(group)],
        "is_tuple": isinstance(hvd.synchronize(grouped), tuple),
        "gathered": [each.tolist() for each in hvd.synchronize(gathered)],
        "copies": [hvd.synchronize(each).tolist() for each in copies],
        "one": hvd.synchronize(hvd.allgather_async(torch.tensor([rank]))).tolist(),
    }


def rows(rank: int, size: int) -> Dict[str, Any]:
    numbers = torch.arange(2.0 * size) + 100 * rank
    uneven, received = hvd.alltoall(torch.full((sum(range(1, size + 1)), 2), rank), splits=list(range(1, size + 1)))
    return {
        "even": hvd.alltoall(numbers).tolist(),
        "uneven": uneven.tolist(),
        "received": received,
        "by_tensor": hvd.alltoall(torch.full((size,), rank), torch.ones(size, dtype=torch.int32))[0].tolist(),
        "scattered": hvd.reducescatter(torch.arange(5.0) * rank, op=hvd.Sum).tolist(),
        "mean": hvd.reducescatter(torch.arange(4.0) * rank).tolist(),
        "group": [each.tolist() for each in hvd.grouped_reducescatter([torch.ones(4), torch.ones(8)], op=hvd.Sum)],
        "later": hvd.synchronize(hvd.reducescatter_async(torch.ones(4), op=hvd.Sum)).tolist(),
    }


def gradients(rank: int, size: int) -> Dict[str, List[float]]:
    def gradient(call: Any) -> List[float]:
        leaf = torch.full((4,), rank + 1.0, requires_grad=True)
        result = call(leaf)
        (result * result).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.tolist()

    return {
        "allreduce": gradient(lambda leaf: hvd.allreduce(leaf, op=hvd.Sum)),
        "grouped": gradient(lambda leaf: hvd.grouped_allreduce([leaf, 2 * leaf], op=hvd.Average)[1]),
        "allgather": gradient(hvd.allgather),
        "broadcast": gradient(lambda leaf: hvd.broadcast(leaf, 1)),
        "alltoall": gradient(lambda leaf: hvd.alltoall(leaf, splits=[1] * size)[0]),
        "reducescatter": gradient(lambda leaf: hvd.reducescatter(leaf, op=hvd.Sum)),
    }


def uneven_data(rank: int, size: int) -> Dict[str, Any]:
    sums = []
    for step in range(rank + 1):
        sums.append(hvd.allreduce(torch.ones(2), name=f"step {step}", op=hvd.Sum).tolist())
        time.sleep(0.02)
    return {"sums": sums, "last": hvd.join(), "after": hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item()}


def join_and_gather(rank: int, size: int) -> str:
    message = ""
    if rank:
        time.sleep(0.2)
        try:
            hvd.allgather(torch.ones(1), name="while others have joined")
        except hvd.HorovodInternalError as error:
            message = str(error)
    hvd.join()
    return message


@pytest.fixture(scope="module", params=both())
def pod(request: pytest.FixtureRequest) -> Dict[str, List[Any]]:
    functions = ["start", "in_any_order", "asynchronous", "rows", "gradients", "uneven_data", "join_and_gather"]
    return run_ranks(__file__, functions, 4, horovod=request.param)


def test_ranks_may_submit_in_different_orders(pod: Dict[str, List[Any]]) -> None:
    assert pod["in_any_order"] == [[6.0, 10.0, 14.0, 18.0, 22.0]] * 4


def test_poll_and_synchronize_return_the_result(pod: Dict[str, List[Any]]) -> None:
    for found in pod["asynchronous"]:
        assert found["polled"] == [6.0, 6.0, 6.0]
        assert found["second"] is None
        assert found["copies"] == [[1], [0]]
        assert found["one"] == [0, 1, 2, 3]


def test_groups_are_returned_as_tuples(pod: Dict[str, List[Any]]) -> None:
    for found in pod["asynchronous"]:
        assert found["group"] == [[3.0, 3.0], [0.0]]
        assert found["is_tuple"]
        assert found["gathered"] == [[0, 1, 2, 3], [[0.5]] * 6]


def test_alltoall_distributes_rows(pod: Dict[str, List[Any]]) -> None:
    for rank, found in enumerate(pod["rows"]):
        assert found["even"] == [100.0 * other + 2 * rank + place for other in range(4) for place in range(2)]
        assert found["uneven"] == [[other, other] for other in range(4) for _ in range(rank + 1)]
        assert found["received"].dtype == torch.int32
        assert found["received"].tolist() == [rank + 1] * 4
        assert found["by_tensor"] == [0, 1, 2, 3]


def test_reducescatter_returns_the_ranks_rows(pod: Dict[str, List[Any]]) -> None:
    assert [found["scattered"] for found in pod["rows"]] == [[0.0, 6.0], [12.0], [18.0], [24.0]]
    assert [found["mean"] for found in pod["rows"]] == [[0.0], [1.5], [3.0], [4.5]]
    assert [found["group"] for found in pod["rows"]] == [[[4.0], [4.0, 4.0]]] * 4
    assert [found["later"] for found in pod["rows"]] == [[4.0]] * 4


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("allreduce", [[80.0] * 4] * 4),  # the sum, 10, is squared on all four ranks
        ("grouped", [[20.0] * 4] * 4),
        ("allgather", [[2.0 * (rank + 1)] * 4 for rank in range(4)]),
        ("broadcast", [[0.0] * 4, [4.0] * 4, [0.0] * 4, [0.0] * 4]),
        ("alltoall", [[2.0 * (rank + 1)] * 4 for rank in range(4)]),
        ("reducescatter", [[80.0] * 4] * 4),
    ],
)
def test_gradients_flow_through(pod: Dict[str, List[Any]], what: str, expected: Any) -> None:
    assert [found[what] for found in pod["gradients"]] == expected


def test_joined_ranks_contribute_zeros(pod: Dict[str, List[Any]]) -> None:
    for rank, found in enumerate(pod["uneven_data"]):
        assert found["sums"] == [[4.0 - step] * 2 for step in range(rank + 1)]
        assert found["last"] == 3
        assert found["after"] == 4.0


def test_other_collectives_fail_while_a_rank_has_joined(pod: Dict[str, List[Any]]) -> None:
    assert pod["join_and_gather"][0] == ""
    assert all("llgather is not supported with Join" in message for message in pod["join_and_gather"][1:])
