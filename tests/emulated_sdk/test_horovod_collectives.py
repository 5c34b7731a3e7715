"""`horovod.torch`, emulated and installed: collectives, asynchronous operations, `join`, process sets."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from tests.support.bounded import wait_until
from tests.support.ranks import both, error_of, set_rank

LARGE = 5001  # not a multiple of the number of ranks
REDUCED = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32]
UNSUPPORTED = [torch.bool, torch.bfloat16, torch.uint8, torch.complex64]
MOVED = [*REDUCED, torch.uint8, torch.int8, torch.int16]


def numbers(rank: int, length: int = LARGE) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def start(rank: int, size: int) -> Dict[str, Any]:
    before = [error_of(hvd.rank), error_of(lambda: hvd.allreduce(torch.zeros(1)))]
    set_rank(rank, [("a", 2), ("b", 2)])
    hvd.init()
    hvd.init()
    own = hvd.global_process_set
    place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    return {
        "before": before,
        "position": (place, hvd.is_initialized(), (own.rank(), own.size(), own.ranks, own.included())),
        "built": (hvd.gloo_built(), hvd.gloo_enabled(), hvd.mpi_built(), hvd.mpi_enabled(), hvd.nccl_built()),
        "mpi": error_of(hvd.mpi_threads_supported),
        "timeline": error_of(lambda: hvd.start_timeline("timeline.json")),
    }


def reduce(rank: int, size: int) -> Dict[str, Any]:
    own = torch.tensor(float(rank))
    in_place, parameter = torch.full((2, 3), float(rank)), torch.nn.Parameter(torch.full((2,), float(rank)))
    assert hvd.allreduce_(in_place, None, "in place", hvd.Sum) is in_place
    hvd.grouped_allreduce_([parameter], op=hvd.Max)
    with pytest.warns(DeprecationWarning, match="average"):
        averages = [hvd.allreduce(own, average) for average in (True, False)]
    near_one, fp16 = torch.tensor([1.0001]), {"compression": hvd.Compression.fp16}
    found = {
        "metrics": hvd.grouped_allreduce([own, 2 * own], op=hvd.Average),
        "mixed": hvd.grouped_allreduce([torch.full((2, 2), rank), torch.tensor(5), torch.full((3,), rank)], op=hvd.Sum),
        "in_place": [in_place],
        "parameter": [parameter.detach()],
        "dtypes": [hvd.allreduce(torch.full((1000,), 2 * rank + 1).to(dtype), op=hvd.Sum) for dtype in REDUCED],
        "integers": [hvd.allreduce(torch.tensor([rank, -rank]))],
        "ops": [hvd.allreduce(torch.tensor([rank + 1.0]), op=op) for op in (hvd.Min, hvd.Max, hvd.Product)],
        "average": averages,
        "scaled": [hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5)],
        "empty": [hvd.allreduce(torch.empty(0))],
        "compressed": [hvd.allreduce(near_one, **fp16), *hvd.grouped_allreduce([near_one], **fp16)],
    }
    errors = [
        [error_of(lambda dtype=dtype: hvd.allreduce(torch.zeros(2).to(dtype))) for dtype in UNSUPPORTED],
        error_of(lambda: hvd.allreduce(torch.zeros(2, 3).t())),
        error_of(lambda: hvd.allreduce(torch.zeros(1), True, op=hvd.Sum)),
        error_of(lambda: hvd.allreduce(torch.zeros(1), op=9)),
    ]
    averages = {"large": hvd.allreduce(numbers(rank)), "small": hvd.allreduce(numbers(rank, 5))}
    return {**{key: list(each) for key, each in found.items()}, **averages, "errors": errors}


def factors(rank: int, size: int) -> Dict[str, Any]:
    """Each rank has the same numbers, so that the sums are exact, in any order."""
    given = {dtype: (100 * numbers(1, 12)).to(dtype) for dtype in REDUCED}
    before, after = {"op": hvd.Sum, "prescale_factor": 0.37}, {"op": hvd.Sum, "postscale_factor": 0.37}
    return {
        "before": [hvd.allreduce(each, **before) for each in given.values()],
        "after": [hvd.allreduce(each, **after) for each in given.values()],
        "grouped": hvd.grouped_allreduce(list(given.values()), **before),
        "scattered": [hvd.allgather(hvd.reducescatter(each, **before)) for each in given.values()],
        "scattered_group": [hvd.allgather(part) for part in hvd.grouped_reducescatter(list(given.values()), **after)],
        "mean": hvd.allreduce(given[torch.float32], op=hvd.Average, postscale_factor=3.0),
    }


def gather(rank: int, size: int) -> Dict[str, Any]:
    return {
        "ragged": hvd.allgather(torch.full((rank, 2), rank)),
        "one": hvd.allgather(torch.tensor([float(rank)])),
        "dtypes": [hvd.allgather(torch.full((2,), rank).to(dtype)) for dtype in MOVED],
        "scalar": error_of(lambda: hvd.allgather(torch.tensor(1.0))),
        "objects": hvd.allgather_object({"rank": rank, "text": "x" * 100 * rank}),
    }


def state(rank: int) -> Dict[str, torch.Tensor]:
    random = torch.randn(40, 30, generator=torch.Generator().manual_seed(rank))
    return {
        "weight": random.clone(),
        "half": random.half(),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, float(rank)]),
        "count": torch.tensor(2**62 + rank),
        "bytes": random.to(torch.uint8),
        "double": random.double(),
        "empty": torch.empty(0, 3),
    }


def copy(rank: int, size: int) -> Dict[str, Any]:
    own = state(rank)
    hvd.broadcast_parameters(own, root_rank=1)
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    hvd.broadcast_parameters(list(model.named_parameters()), 2)
    in_place = torch.full((3,), float(rank))
    return {
        "state": own,
        "weight": model.weight.detach(),
        "in_place": in_place if hvd.broadcast_(in_place, 3) is in_place else None,
        "seed": hvd.broadcast(torch.tensor(7 + rank), root_rank=0, name="seed"),
        "object": hvd.broadcast_object({"epoch": rank, "nothing": None}, 3),
        "root_object": hvd.broadcast_object(rank),
        "root": error_of(lambda: hvd.broadcast(torch.zeros(1), 4)),
        "generator": error_of(lambda: hvd.broadcast_parameters(model.named_parameters(), 0)),
    }


def disagreements(rank: int, size: int) -> Dict[str, str]:
    dtype = torch.float64 if rank == 3 else torch.float32
    found = {
        "shape": error_of(lambda: hvd.allreduce(torch.zeros(2 + rank // 3), name="shape")),
        "dtype": error_of(lambda: hvd.allreduce(torch.zeros(2, dtype=dtype), name="dtype")),
        "op": error_of(lambda: hvd.allreduce(torch.zeros(2), op=hvd.Max if rank == 3 else hvd.Min, name="op")),
        "factor": error_of(lambda: hvd.allreduce(torch.zeros(2), prescale_factor=1.0 + rank // 3, name="factor")),
        "root": error_of(lambda: hvd.broadcast(torch.zeros(2), rank // 3, name="root")),
        "gather": error_of(lambda: hvd.allgather(torch.zeros(1, 1 + rank // 3), name="gather")),
    }
    hvd.barrier()  # the ranks are still in step
    return found


def restart(rank: int, size: int) -> Any:
    hvd.shutdown()
    after = [error_of(hvd.rank), error_of(lambda: hvd.allreduce(torch.zeros(1))), hvd.is_initialized()]
    set_rank(size - 1 - rank, [("a", 1), ("b", 3)])
    hvd.init()
    return after, hvd.rank(), hvd.local_size(), hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item()


def death_of_a_rank(rank: int, size: int) -> str:
    if rank == 2:
        os._exit(0)
    return error_of(lambda: hvd.allreduce(numbers(rank), name="death"))


ASYNCHRONOUS = ["in_any_order", "asynchronous", "rows", "gradients", "uneven_data"]


@pytest.fixture(scope="module", params=both())
def pod(ranks: Any, request: pytest.FixtureRequest) -> Dict[str, List[Any]]:
    functions = ["start", "reduce", "factors", "gather", "copy", *ASYNCHRONOUS, "disagreements", "join_and_gather"]
    return ranks(__file__, [*functions, "restart", "death_of_a_rank"], 4, horovod=request.param)


def common(pod: Dict[str, List[Any]], function: str, key: str) -> Any:
    """Return a tensor or tensors that a function has returned, which must have the same bits on all ranks."""
    first, *others = [found[key] for found in pod[function]]
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)
    return first


def test_init_determines_the_position_of_each_rank_and_only_gloo_is_built(pod: Dict[str, List[Any]]) -> None:
    places = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
    expected = [(place, True, (rank, 4, [0, 1, 2, 3], True)) for rank, place in enumerate(places)]
    assert [found["position"] for found in pod["start"]] == expected
    assert pod["start"][0]["built"] == (True, True, False, False, 0)
    assert pod["start"][0]["mpi"].startswith("ValueError: Horovod MPI is not enabled")
    assert pod["start"][0]["timeline"] == "ValueError: Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage."


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("metrics", [torch.tensor(1.5), torch.tensor(3.0)]),
        ("mixed", [torch.full((2, 2), 6), torch.tensor(20), torch.full((3,), 6)]),
        ("in_place", [torch.full((2, 3), 6.0)]),
        ("parameter", [torch.tensor([3.0, 3.0])]),
        ("dtypes", [torch.full((1000,), 16).to(dtype) for dtype in REDUCED]),
        ("integers", [torch.tensor([1, -1])]),  # rounded towards zero
        ("ops", [torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([24.0])]),
        ("average", [torch.tensor(1.5), torch.tensor(6.0)]),
        ("scaled", [torch.tensor(6.0)]),
        ("empty", [torch.empty(0)]),
        ("compressed", [torch.tensor([1.0])] * 2),  # rounded to float16
    ],
)
def test_reductions_have_the_bits_and_dtypes_of(pod: Dict[str, List[Any]], key: str, expected: Any) -> None:
    torch.testing.assert_close(common(pod, "reduce", key), expected, rtol=0, atol=0)


def in_numpy(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the product in the tensor's dtype; half in float32, integers in float64."""
    array = tensor.numpy()
    wide = {"float16": np.float32, "int32": np.float64, "int64": np.float64}.get(array.dtype.name, array.dtype)
    return torch.from_numpy((array.astype(wide) * np.dtype(wide).type(factor)).astype(array.dtype))


def test_average_is_the_mean_and_factors_multiply_in_the_dtype_of_the_tensors(pod: Dict[str, List[Any]]) -> None:
    for key, length in (("large", LARGE), ("small", 5)):
        mean = torch.stack([numbers(rank, length) for rank in range(4)]).double().mean(dim=0).float()
        torch.testing.assert_close(common(pod, "reduce", key), mean, rtol=1e-6, atol=1e-6)
    assert torch.equal(common(pod, "factors", "mean"), in_numpy(100 * numbers(1, 12) * 4, 3.0 / 4))
    for index, dtype in enumerate(REDUCED):
        given = (100 * numbers(1, 12)).to(dtype)
        for key in ("before", "grouped", "scattered"):
            assert torch.equal(common(pod, "factors", key)[index], in_numpy(given, 0.37) * 4), (key, dtype)
        for key in ("after", "scattered_group"):
            assert torch.equal(common(pod, "factors", key)[index], in_numpy(given * 4, 0.37)), (key, dtype)


def test_unsupported_arguments_are_an_error(pod: Dict[str, List[Any]]) -> None:
    unsupported, strided, both, bad_op = pod["reduce"][0]["errors"]
    assert all(text.startswith("ValueError: Tensor type torch.") for text in unsupported), unsupported
    assert strided == "ValueError: Tensor is required to be contiguous."
    assert "supersedes average" in both
    assert bad_op.startswith("HorovodInternalError: Reduction op type not supported")


def test_broadcast_copies_parameters_tensors_and_objects(pod: Dict[str, List[Any]]) -> None:
    for found in pod["copy"]:
        for name, expected in state(1).items():
            assert found["state"][name].dtype == expected.dtype
            given, wanted = (
                each.contiguous().reshape(-1).view(torch.uint8) for each in (found["state"][name], expected)
            )
            assert torch.equal(given, wanted), name
        assert torch.equal(found["weight"], torch.full((2, 3), 2.0))
        assert (found["seed"].item(), found["in_place"].tolist()) == (7, [3.0] * 3)
        assert (found["object"], found["root_object"]) == ({"epoch": 3, "nothing": None}, 0)
        assert found["root"].startswith("ValueError: broadcast received invalid root rank 4")
        assert found["generator"].startswith("ValueError: invalid params of type: <class 'generator'>")


DISAGREEMENTS = {  # the subject, and what one rank and another have
    "shape": ("ALLREDUCE tensor shapes", "sent a tensor of shape [2]", "sent a tensor of shape [3]"),
    "dtype": ("data types", "had type float32", "had type float64"),
    "op": ("reduction operation", "sent reduction op 3", "sent reduction op 4"),
    "factor": ("prescale and/or postscale factors", "sent factors (1, 1)", "sent factors (2, 1)"),
    "root": ("BROADCAST root ranks", "specified root rank 0", "specified root rank 1"),
    "gather": ("ALLGATHER tensor shapes", *(f"sent a tensor with dimension 1 equal to {length}" for length in (1, 2))),
}


@pytest.mark.parametrize("argument", DISAGREEMENTS)
def test_a_disagreement_is_the_same_error_on_all_ranks(pod: Dict[str, List[Any]], argument: str) -> None:
    what, one, other = DISAGREEMENTS[argument]
    expected = f"HorovodInternalError: Mismatched {what}: One rank {one}, but another rank {other}."
    message, *others = [found[argument] for found in pod["disagreements"]]
    # The installed one names first the rank that was first.
    words = [sorted(each.strip(",.") for each in text.split()) for text in (message.split(" Operation ")[0], expected)]
    assert (words[0], set(others)) == (words[1], {message})


def test_init_may_follow_shutdown_and_a_killed_rank_is_an_error_for_the_others(pod: Dict[str, List[Any]]) -> None:
    not_initialized = "Error: Horovod has not been initialized; use hvd.init()."
    before = ["Value" + not_initialized, "HorovodInternal" + not_initialized]
    assert [found["before"] for found in pod["start"]] == [before] * 4
    assert pod["restart"] == [([*before, False], 3 - rank, 3 if rank < 3 else 1, 4.0) for rank in range(4)]
    assert all(pod["death_of_a_rank"][rank].startswith("HorovodInternalError: ") for rank in (0, 1, 3))


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


def test_ranks_may_submit_in_different_orders_and_poll_and_synchronize(pod: Dict[str, List[Any]]) -> None:
    assert pod["in_any_order"] == [[6.0, 10.0, 14.0, 18.0, 22.0]] * 4
    expected = {"polled": [6.0, 6.0, 6.0], "second": None, "copies": [[1], [0]], "one": [0, 1, 2, 3]}
    groups = {"group": [[3.0, 3.0], [0.0]], "gathered": [[0, 1, 2, 3], [[0.5]] * 6]}
    assert pod["asynchronous"] == [{**expected, **groups}] * 4


def test_allgather_concatenates_and_alltoall_and_reducescatter_distribute_rows(pod: Dict[str, List[Any]]) -> None:
    assert torch.equal(common(pod, "gather", "ragged"), torch.tensor([[1, 1], [2, 2], [2, 2], [3, 3], [3, 3], [3, 3]]))
    assert common(pod, "gather", "one").tolist() == [0.0, 1.0, 2.0, 3.0]
    for gathered, dtype in zip(common(pod, "gather", "dtypes"), MOVED):
        assert torch.equal(gathered, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]).to(dtype))
    assert pod["gather"][0]["scalar"].startswith("IndexError")
    for found in pod["gather"]:
        assert found["objects"] == [{"rank": rank, "text": "x" * 100 * rank} for rank in range(4)]
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


def test_gradients_flow_through_collectives_and_joined_ranks_contribute_zeros(pod: Dict[str, List[Any]]) -> None:
    for rank, found in enumerate(pod["gradients"]):
        own, root = 2.0 * (rank + 1), 4.0 if rank == 1 else 0.0
        # The sum, 10, is squared on all four ranks.
        assert found == [[each] * 4 for each in (80.0, 20.0, own, root, own, 80.0)]
    for rank, found in enumerate(pod["uneven_data"]):
        assert found == {"sums": [[4.0 - step] * 2 for step in range(rank + 1)], "last": 3, "after": 4.0}
    first, *others = pod["join_and_gather"]
    assert first == ""
    assert all("llgather is not supported with Join" in message for message in others)


def start_sets(rank: int, size: int) -> Dict[str, Any]:
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


@pytest.fixture(scope="module", params=both())
def sets(ranks: Any, request: pytest.FixtureRequest) -> Dict[str, List[Any]]:
    return ranks(__file__, ["start_sets", "collectives", "optimizers", "static_only"], 4, horovod=request.param)


def assert_values(found: List[Any], expected: Dict[str, List[Any]]) -> None:
    assert {key: [each[key] for each in found] for key in expected} == expected


def test_collectives_of_a_process_set_concern_its_ranks_only_and_it_can_be_added_again(sets: Any) -> None:
    expected = {
        "total": [4.0, 6.0, 4.0, 6.0],
        "whole": [20.0] * 4,
        "in_place": [2.0, 3.0, 2.0, 3.0],
        "mean": [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]] * 2,
        "rows": [[2, 2], [1, 3, 3, 3]] * 2,
        "gradient": [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [2.0, 3.0]],
        "exchanged": [[0, 20], [10, 30], [1, 21], [11, 31]],
        "scattered": [[2.0, 4.0], [4.0, 6.0], [6.0], [8.0]],
        "object": [{"rank": 2}, {"rank": 3}] * 2,
        "ids": [(1, 2)] * 4,
        "removed": [(True, True, None)] * 4,
        "again": [1] * 4,
        "after": [2.0] * 4,
    }
    assert_values(sets["collectives"], expected)


def test_errors_of_process_sets(sets: Dict[str, List[Any]]) -> None:
    for rank, found in enumerate(sets["collectives"]):
        expected = {
            "duplicate": "ValueError: Attempted to add a duplicate process set: ProcessSet(",
            "no_member": f"ValueError: Allreduce: Rank {rank} is not a member of the provided process set",
            "no_member_barrier": f"ValueError: Barrier: Rank {rank} is not a member of the provided process set",
            "root": "ValueError: broadcast received invalid root rank",
            "mismatch": "HorovodInternalError: Mismatched ALLREDUCE tensor shapes: One rank sent",
        }
        assert {key: found[key][: len(text)] for key, text in expected.items()} == expected
    assert all("HOROVOD_DYNAMIC_PROCESS_SETS=1" in found["add"] for found in sets["static_only"])
    assert [found["again"] for found in sets["static_only"]] == [[0, 1, 2, 3]] * 4


def test_init_registers_process_sets_and_an_optimizer_reduces_the_gradients_of_its_own(
    sets: Dict[str, List[Any]],
) -> None:
    foreign = "ValueError: Process is not part of provided process set."
    expected = {
        "ranks": [[0, 3]] * 4,
        "position": [(True, 2, 0), (False, 2, foreign), (False, 2, foreign), (True, 2, 1)],
        "unregistered": [(None, None, rank == 0) for rank in range(4)],
        "id": [1] * 4,
        "sum": [3] * 4,
        "removed": [[True, False, False]] * 4,
    }
    assert_values(sets["start_sets"], expected)
    assert sets["optimizers"] == [[1.0, -0.5], [-0.5, -0.5], [-0.5, -0.5], [-2.0, -0.5]]
