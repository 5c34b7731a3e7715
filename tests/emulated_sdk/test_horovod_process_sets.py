"""Process sets: collectives and optimizers of some of the ranks, emulated and installed."""

from __future__ import annotations

import os
from typing import Any, Dict, List

import horovod.torch as hvd
import pytest
import torch

from tests.support.ranks import both, error_of, set_rank

# ---- run by 4 ranks, 2 on each of 2 hosts


def start(rank: int, size: int) -> Dict[str, Any]:
    """Two static sets, and dynamic ones later."""
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    set_rank(rank, [("a", 2), ("b", 2)])
    ends, middle = hvd.ProcessSet([3, 0]), hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[ends, middle])
    own = ends if rank in (0, 3) else middle
    found = {
        "ranks": ends.ranks,
        "position": (ends.included(), ends.size(), ends.rank() if ends.included() else error_of(ends.rank)),
        "unregistered": (hvd.ProcessSet([0]).size(), hvd.ProcessSet([0]).rank(), hvd.ProcessSet([0]).included()),
        "id": ends.process_set_id,
        "sum": hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum, process_set=own).item(),
        "removed": [hvd.remove_process_set(each) for each in (ends, ends, hvd.global_process_set)],
    }
    hvd.remove_process_set(middle)
    return found


def collectives(rank: int, size: int) -> Dict[str, Any]:
    """Even and odd ranks work at the same time, with equal names."""
    even, odd = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet(range(1, size, 2)))
    own, root = (odd, 3) if rank % 2 else (even, 2)
    for _ in range(2):
        total = hvd.allreduce(torch.tensor([1.0 + rank]), name="x", op=hvd.Sum, process_set=own)
    in_place = torch.tensor([float(rank)])
    hvd.broadcast_(in_place, root, "x", own)
    whole = hvd.allreduce(total, op=hvd.Sum)
    rows = torch.arange(3.0) + rank
    mean, _ = hvd.grouped_allreduce([rows, torch.ones(2)], process_set=own)
    value = torch.full((2,), float(rank), requires_grad=True)
    (hvd.allgather(value, process_set=own) * torch.arange(4.0)).sum().backward()
    hvd.barrier(own)
    found = {
        "ids": (even.process_set_id, odd.process_set_id),
        "total": total.item(),
        "whole": whole.item(),
        "in_place": in_place.item(),
        "mean": mean.tolist(),
        "rows": hvd.allgather(torch.full((rank,), rank), process_set=own).tolist(),
        "gradient": value.grad.tolist() if value.grad is not None else None,
        "exchanged": hvd.alltoall(torch.tensor([10 * rank, 10 * rank + 1]), process_set=own).tolist(),
        "scattered": hvd.reducescatter(rows, op=hvd.Sum, process_set=own).tolist(),
        "object": hvd.broadcast_object({"rank": rank}, root, process_set=own),
        "duplicate": error_of(lambda: hvd.add_process_set([0, 2])),
        "no_member": error_of(lambda: hvd.allreduce(torch.zeros(1), process_set=even if rank % 2 else odd)),
        "no_member_barrier": error_of(lambda: hvd.barrier(even if rank % 2 else odd)),
        "root": error_of(lambda: hvd.broadcast(torch.zeros(1), 3 - root + 2, process_set=own)),
        "mismatch": error_of(lambda: hvd.allreduce(torch.zeros(1 + rank // 2), name="y", process_set=own)),
        "after": hvd.allreduce(torch.ones(1), name="y", op=hvd.Sum, process_set=own).item(),
        "removed": (hvd.remove_process_set(even), hvd.remove_process_set(odd), even.process_set_id),
    }
    again = hvd.add_process_set([0, 2])
    found["again"] = again.process_set_id
    hvd.remove_process_set(again)
    return found


def optimizers(rank: int, size: int) -> List[List[float]]:
    """An optimizer of ranks 1 and 2, which is local on the other ranks, and one of all ranks."""
    middle = hvd.add_process_set([1, 2])
    weights = []
    for process_set in (middle, hvd.global_process_set):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, process_set=process_set)
        model(torch.full((1, 1), float(rank))).sum().backward()
        optimizer.step()
        weights.append(model.weight.item())
    hvd.remove_process_set(middle)
    return weights


def static_only(rank: int, size: int) -> Dict[str, Any]:
    hvd.shutdown()
    del os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"]
    hvd.init(process_sets=[hvd.ProcessSet([0, 1])])
    found = {"add": error_of(lambda: hvd.add_process_set([0])), "again": hvd.global_process_set.ranks}
    hvd.shutdown()
    return found


FUNCTIONS = ["start", "collectives", "optimizers", "static_only"]


@pytest.fixture(scope="module", params=both())
def pod(ranks: Any, request: pytest.FixtureRequest) -> Dict[str, List[Any]]:
    return ranks(__file__, FUNCTIONS, 4, horovod=request.param)


def values(pod: Dict[str, List[Any]], function: str, key: str) -> List[Any]:
    return [found[key] for found in pod[function]]


def test_init_registers_process_sets(pod: Dict[str, List[Any]]) -> None:
    foreign = "ValueError: Process is not part of provided process set."
    assert values(pod, "start", "ranks") == [[0, 3]] * 4
    assert values(pod, "start", "position") == [(True, 2, 0), (False, 2, foreign), (False, 2, foreign), (True, 2, 1)]
    assert values(pod, "start", "unregistered") == [(None, None, rank == 0) for rank in range(4)]
    assert values(pod, "start", "id") == [1] * 4
    assert values(pod, "start", "sum") == [3] * 4
    assert values(pod, "start", "removed") == [[True, False, False]] * 4


def test_collectives_of_a_process_set_concern_its_ranks_only(pod: Dict[str, List[Any]]) -> None:
    assert values(pod, "collectives", "total") == [4.0, 6.0, 4.0, 6.0]
    assert values(pod, "collectives", "whole") == [20.0] * 4
    assert values(pod, "collectives", "in_place") == [2.0, 3.0, 2.0, 3.0]
    assert values(pod, "collectives", "mean") == [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]] * 2
    assert values(pod, "collectives", "rows") == [[2, 2], [1, 3, 3, 3]] * 2
    assert values(pod, "collectives", "gradient") == [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [2.0, 3.0]]
    assert values(pod, "collectives", "exchanged") == [[0, 20], [10, 30], [1, 21], [11, 31]]
    assert values(pod, "collectives", "scattered") == [[2.0, 4.0], [4.0, 6.0], [6.0], [8.0]]
    assert values(pod, "collectives", "object") == [{"rank": 2}, {"rank": 3}] * 2


def test_a_process_set_can_be_removed_and_added_again(pod: Dict[str, List[Any]]) -> None:
    assert values(pod, "collectives", "ids") == [(1, 2)] * 4
    assert values(pod, "collectives", "removed") == [(True, True, None)] * 4
    assert values(pod, "collectives", "again") == [1] * 4


def test_errors_of_process_sets(pod: Dict[str, List[Any]]) -> None:
    for rank, found in enumerate(pod["collectives"]):
        assert found["duplicate"].startswith("ValueError: Attempted to add a duplicate process set: ProcessSet(")
        member = f"Rank {rank} is not a member of the provided process set"
        assert found["no_member"].startswith(f"ValueError: Allreduce: {member}")
        assert found["no_member_barrier"].startswith(f"ValueError: Barrier: {member}")
        assert found["root"].startswith("ValueError: broadcast received invalid root rank")
        assert found["mismatch"].startswith("HorovodInternalError: Mismatched ALLREDUCE tensor shapes: One rank sent")
        assert found["after"] == 2.0
    assert all("HOROVOD_DYNAMIC_PROCESS_SETS=1" in text for text in values(pod, "static_only", "add"))
    assert values(pod, "static_only", "again") == [[0, 1, 2, 3]] * 4


def test_an_optimizer_reduces_the_gradients_of_its_process_set(pod: Dict[str, List[Any]]) -> None:
    assert pod["optimizers"] == [[1.0, -0.5], [-0.5, -0.5], [-0.5, -0.5], [-2.0, -0.5]]
