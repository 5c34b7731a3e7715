"""`horovod.torch`: initialization and the synchronous collectives, emulated and installed."""

from __future__ import annotations

import os
from typing import Any, Dict, List

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from tests.support.ranks import both, error_of, set_rank

LARGE = 5001  # not a multiple of the number of ranks
REDUCED = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32]
UNSUPPORTED = [torch.bool, torch.bfloat16, torch.uint8, torch.complex64]
MOVED = [*REDUCED, torch.uint8, torch.int8, torch.int16]


def numbers(rank: int, length: int = LARGE) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


# ---- run by 4 ranks, 2 on each of 2 hosts


def start(rank: int, size: int) -> Dict[str, Any]:
    before = [error_of(hvd.rank), error_of(lambda: hvd.allreduce(torch.zeros(1)))]
    set_rank(rank, [("a", 2), ("b", 2)])
    hvd.init()
    hvd.init()
    position = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    process_set = hvd.global_process_set
    return {
        "before": before,
        "position": position,
        "is_initialized": hvd.is_initialized(),
        "process_set": (process_set.rank(), process_set.size(), process_set.ranks, process_set.included()),
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
    fp16 = {"compression": hvd.Compression.fp16}
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
        "compressed": [
            hvd.allreduce(torch.tensor([1.0001]), **fp16),
            *hvd.grouped_allreduce([torch.tensor([1.0001])], **fp16),
        ],
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
    generator = torch.Generator().manual_seed(rank)
    random = torch.randn(40, 30, generator=generator)
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


@pytest.fixture(scope="module", params=both())
def pod(ranks: Any, request: pytest.FixtureRequest) -> Dict[str, List[Any]]:
    functions = ["start", "reduce", "factors", "gather", "copy", "disagreements", "restart", "death_of_a_rank"]
    return ranks(__file__, functions, 4, horovod=request.param)


def common(pod: Dict[str, List[Any]], function: str, key: str) -> Any:
    """Return a tensor or tensors that a function has returned, which must have the same bits on all ranks."""
    first, *others = [found[key] for found in pod[function]]
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)
    return first


def test_init_determines_the_position_of_each_rank(pod: Dict[str, List[Any]]) -> None:
    places = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]
    assert [found["position"] for found in pod["start"]] == places
    assert all(found["is_initialized"] for found in pod["start"])
    assert [found["process_set"] for found in pod["start"]] == [(rank, 4, [0, 1, 2, 3], True) for rank in range(4)]


def test_only_gloo_is_built(pod: Dict[str, List[Any]]) -> None:
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


@pytest.mark.parametrize(("key", "length"), [("large", LARGE), ("small", 5)])
def test_average_is_the_mean_over_the_ranks(pod: Dict[str, List[Any]], key: str, length: int) -> None:
    mean = torch.stack([numbers(rank, length) for rank in range(4)]).double().mean(dim=0).float()
    torch.testing.assert_close(common(pod, "reduce", key), mean, rtol=1e-6, atol=1e-6)


def in_numpy(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the product in the tensor's dtype; half in float32, integers in float64."""
    array = tensor.numpy()
    wide = {"float16": np.float32, "int32": np.float64, "int64": np.float64}.get(array.dtype.name, array.dtype)
    return torch.from_numpy((array.astype(wide) * np.dtype(wide).type(factor)).astype(array.dtype))


@pytest.mark.parametrize("index", range(len(REDUCED)), ids=str)
def test_factors_multiply_in_the_dtype_of_the_tensors(pod: Dict[str, List[Any]], index: int) -> None:
    given = (100 * numbers(1, 12)).to(REDUCED[index])
    for key in ("before", "grouped", "scattered"):
        assert torch.equal(common(pod, "factors", key)[index], in_numpy(given, 0.37) * 4)
    for key in ("after", "scattered_group"):
        assert torch.equal(common(pod, "factors", key)[index], in_numpy(given * 4, 0.37))


def test_the_average_is_a_factor_after_the_sum(pod: Dict[str, List[Any]]) -> None:
    assert torch.equal(common(pod, "factors", "mean"), in_numpy(100 * numbers(1, 12) * 4, 3.0 / 4))


def test_unsupported_arguments_are_an_error(pod: Dict[str, List[Any]]) -> None:
    unsupported, strided, both, bad_op = pod["reduce"][0]["errors"]
    assert all(text.startswith("ValueError: Tensor type torch.") for text in unsupported), unsupported
    assert strided == "ValueError: Tensor is required to be contiguous."
    assert "supersedes average" in both
    assert bad_op.startswith("HorovodInternalError: Reduction op type not supported")


def test_allgather_concatenates_different_lengths(pod: Dict[str, List[Any]]) -> None:
    assert torch.equal(common(pod, "gather", "ragged"), torch.tensor([[1, 1], [2, 2], [2, 2], [3, 3], [3, 3], [3, 3]]))
    assert common(pod, "gather", "one").tolist() == [0.0, 1.0, 2.0, 3.0]
    for gathered, dtype in zip(common(pod, "gather", "dtypes"), MOVED):
        assert torch.equal(gathered, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]).to(dtype))
    assert pod["gather"][0]["scalar"].startswith("IndexError")
    for found in pod["gather"]:
        assert found["objects"] == [{"rank": rank, "text": "x" * 100 * rank} for rank in range(4)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_broadcast_copies_parameters_tensors_and_objects(pod: Dict[str, List[Any]]) -> None:
    for found in pod["copy"]:
        for name, expected in state(1).items():
            assert found["state"][name].dtype == expected.dtype
            assert torch.equal(bits(found["state"][name]), bits(expected)), name
        assert torch.equal(found["weight"], torch.full((2, 3), 2.0))
        assert found["seed"].item() == 7
        assert found["in_place"].tolist() == [3.0] * 3
        assert found["object"] == {"epoch": 3, "nothing": None}
        assert found["root_object"] == 0
        assert found["root"].startswith("ValueError: broadcast received invalid root rank 4")
        assert found["generator"].startswith("ValueError: invalid params of type: <class 'generator'>")


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        (
            "shape",
            "ALLREDUCE tensor shapes: One rank sent a tensor of shape [2], but another rank sent a tensor of"
            " shape [3].",
        ),
        ("dtype", "data types: One rank had type float32, but another rank had type float64."),
        ("op", "reduction operation: One rank sent reduction op 3, but another rank sent reduction op 4."),
        (
            "factor",
            "prescale and/or postscale factors: One rank sent factors (1, 1), but another rank sent factors (2, 1).",
        ),
        ("root", "BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1."),
        (
            "gather",
            "ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 1, but another rank"
            " sent a tensor with dimension 1 equal to 2.",
        ),
    ],
)
def test_a_disagreement_is_the_same_error_on_all_ranks(pod: Dict[str, List[Any]], argument: str, sentence: str) -> None:
    message, *others = [found[argument] for found in pod["disagreements"]]
    # The installed one names first the rank that was first.
    words, expected = (
        sorted(each.strip(",.") for each in text.split())
        for text in (message.split(" Operation ")[0], f"HorovodInternalError: Mismatched {sentence}")
    )
    assert words == expected
    assert set(others) == {message}


def test_init_may_follow_shutdown(pod: Dict[str, List[Any]]) -> None:
    not_initialized = "Error: Horovod has not been initialized; use hvd.init()."
    before = ["Value" + not_initialized, "HorovodInternal" + not_initialized]
    assert [found["before"] for found in pod["start"]] == [before] * 4
    assert pod["restart"] == [([*before, False], 3 - rank, 3 if rank < 3 else 1, 4.0) for rank in range(4)]


def test_a_killed_rank_is_an_error_for_the_others(pod: Dict[str, List[Any]]) -> None:
    for rank in (0, 1, 3):
        assert pod["death_of_a_rank"][rank].startswith("HorovodInternalError: ")
