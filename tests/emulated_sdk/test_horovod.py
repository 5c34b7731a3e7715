"""`horovod.torch`: the collectives that PopTorch programs use on the host."""

from __future__ import annotations

import os
from typing import Any, Dict, List

import horovod.torch as hvd
import pytest
import torch
from horovod.torch import _identity
from ranks import run_ranks

LARGE = 5001  # does not travel with the agreement, and does not divide by the ranks
REDUCED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


def error_of(call: Any) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def numbers(rank: int, length: int = LARGE) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


# ---- what the ranks run: 4 ranks, as popdist would have them on 2 hosts


def start(rank: int, size: int) -> Dict[str, Any]:
    before = error_of(hvd.rank)
    os.environ.update(POPDIST_NUM_TOTAL_REPLICAS=str(2 * size), POPDIST_NUM_LOCAL_REPLICAS="2")
    os.environ.update(POPDIST_REPLICA_INDEX_OFFSET=str(2 * rank), POPDIST_LOCAL_INSTANCE_INDEX=str(rank % 2))
    hvd.init()
    hvd.init()
    place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    return {"before": before, "place": place, "is_initialized": hvd.is_initialized()}


def reduce(rank: int, size: int) -> Dict[str, Any]:
    loss, accuracy = hvd.grouped_allreduce([torch.tensor(float(rank)), torch.tensor(2.0 * rank)], op=hvd.Average)
    mixed = hvd.grouped_allreduce([torch.full((2, 2), rank), torch.tensor(0.5), torch.full((3,), rank)], op=hvd.Sum)
    in_place = torch.full((2, 3), float(rank)).t()  # not contiguous
    returned = hvd.allreduce_(in_place, None, "in place", hvd.Sum)
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    hvd.grouped_allreduce_([parameter], op=hvd.Max)
    return {
        "metrics": (loss, accuracy),
        "mixed": mixed,
        "in_place": in_place if returned is in_place else None,
        "parameter": parameter.detach(),
        "large": hvd.allreduce(numbers(rank)),
        "small": hvd.allreduce(numbers(rank, 5)),
        "dtypes": [hvd.allreduce(torch.full((1000,), 2 * rank + 1).to(dtype), op=hvd.Sum) for dtype in REDUCED],
        "integers": hvd.allreduce(torch.tensor([rank, -rank])),
        "ops": [hvd.allreduce(torch.tensor([rank + 1.0]), op=op) for op in (hvd.Min, hvd.Max, hvd.Product)],
        "average": [hvd.allreduce(torch.tensor(float(rank)), average) for average in (True, False)],
        "scaled": hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5),
        "compressed": hvd.allreduce(torch.tensor([1.0001]), compression=hvd.Compression.fp16),
        "empty": hvd.allreduce(torch.empty(0)),
    }


def gather(rank: int, size: int) -> Dict[str, Any]:
    return {
        "ragged": hvd.allgather(torch.full((rank, 2), rank)),
        "one": hvd.allgather(torch.tensor([float(rank)])),
        "flags": hvd.allgather(torch.tensor([rank == 2])),
        "strided": hvd.allgather(torch.full((2, 1), rank).expand(2, 3).t()),
    }


def state(rank: int) -> Dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    random = torch.randn(40, 30, generator=generator)
    return {
        "weight": random.clone(),
        "strided": random.t(),
        "half": random.half(),
        "bfloat": random.bfloat16(),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, float(rank)]),
        "count": torch.tensor(2**62 + rank),
        "mask": random > 0,
        "bytes": random.to(torch.uint8),
        "double": random.double(),
        "empty": torch.empty(0, 3),
    }


def spread(rank: int, size: int) -> Dict[str, Any]:
    mine = state(rank)
    hvd.broadcast_parameters(mine, root_rank=1)
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    hvd.broadcast_parameters(model.named_parameters(), 2)
    column = torch.full((3, 2), float(rank))
    hvd.broadcast_(column[:, 0], 3)
    return {
        "state": mine,
        "weight": model.weight.detach(),
        "column": column,
        "seed": hvd.broadcast(torch.tensor(7 + rank), root_rank=0, name="seed"),
        "object": hvd.broadcast_object({"epoch": rank, "nothing": None} if rank == 3 else None, 3),
        "root_object": hvd.broadcast_object(rank),
    }


def mistakes(rank: int, size: int) -> Dict[str, str]:
    found = {
        "shape": error_of(lambda: hvd.allreduce(torch.zeros(2 + rank // 3))),
        "call": error_of(hvd.barrier if rank else lambda: hvd.broadcast(torch.zeros(1), 0)),
        "name": error_of(lambda: hvd.allreduce(torch.zeros(1), name=f"x{rank}")),
        "long": error_of(lambda: hvd.grouped_allreduce([torch.zeros(2)] * 50 + [torch.zeros(2 + rank)])),
        "parameters": error_of(lambda: hvd.broadcast_parameters([torch.zeros(3, 1 + rank)], 0)),
        "gather": error_of(lambda: hvd.allgather(torch.zeros(1, 1 + rank))),
    }
    hvd.barrier()  # nobody fell out of step
    return found


def restart(rank: int, size: int) -> Any:
    hvd.shutdown()
    after = error_of(lambda: hvd.allreduce(torch.zeros(1)))
    os.environ.update(HOROVOD_RANK=str(size - 1 - rank), HOROVOD_SIZE=str(size), HOROVOD_LOCAL_SIZE="9")
    hvd.init()
    return after, hvd.rank(), hvd.local_size(), hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item()


def death_of_rank_2(rank: int, size: int) -> str:
    if rank == 2:
        os._exit(0)
    return error_of(lambda: hvd.allreduce(numbers(rank)))


RANK_FUNCTIONS = ["start", "reduce", "gather", "spread", "mistakes", "restart", "death_of_rank_2"]

# ---- tests of several ranks


@pytest.fixture(scope="module")
def pod() -> Dict[str, List[Any]]:
    return run_ranks(__file__, RANK_FUNCTIONS, 4)


def everywhere(found: List[Dict[str, Any]], key: str) -> Any:
    """The value of a key, which must be the same on all ranks in every bit."""
    for other in found[1:]:
        torch.testing.assert_close(other[key], found[0][key], rtol=0, atol=0, equal_nan=True)
    return found[0][key]


def test_rank_and_size_are_those_of_popdist(pod: Dict[str, List[Any]]) -> None:
    assert [found["place"] for found in pod["start"]] == [
        (0, 4, 0, 2, 0, 2),
        (1, 4, 1, 2, 0, 2),
        (2, 4, 0, 2, 1, 2),
        (3, 4, 1, 2, 1, 2),
    ]
    assert all(found["is_initialized"] for found in pod["start"])


def test_grouped_metrics_are_averaged(pod: Dict[str, List[Any]]) -> None:
    loss, accuracy = everywhere(pod["reduce"], "metrics")
    assert (loss.item(), accuracy.item()) == (1.5, 3.0)
    assert loss.shape == ()


def test_a_group_may_mix_shapes_and_dtypes(pod: Dict[str, List[Any]]) -> None:
    first, second, third = everywhere(pod["reduce"], "mixed")
    assert torch.equal(first, torch.full((2, 2), 6))
    assert second.item() == 2.0
    assert torch.equal(third, torch.full((3,), 6))


def test_in_place_writes_through_strides_and_leaves(pod: Dict[str, List[Any]]) -> None:
    assert torch.equal(everywhere(pod["reduce"], "in_place"), torch.full((3, 2), 6.0))
    assert torch.equal(everywhere(pod["reduce"], "parameter"), torch.tensor([3.0, 3.0]))


@pytest.mark.parametrize(("key", "length"), [("large", LARGE), ("small", 5)])
def test_average_adds_in_the_order_of_the_ranks(pod: Dict[str, List[Any]], key: str, length: int) -> None:
    parts = [numbers(rank, length) for rank in range(4)]
    assert torch.equal(everywhere(pod["reduce"], key), (((parts[0] + parts[1]) + parts[2]) + parts[3]) / 4)


@pytest.mark.parametrize("index", range(len(REDUCED)), ids=str)
def test_every_dtype_can_be_summed(pod: Dict[str, List[Any]], index: int) -> None:
    assert torch.equal(everywhere(pod["reduce"], "dtypes")[index], torch.full((1000,), 16).to(REDUCED[index]))


def test_the_average_of_integers_is_rounded_towards_zero(pod: Dict[str, List[Any]]) -> None:
    assert everywhere(pod["reduce"], "integers").tolist() == [1, -1]


def test_other_ways_to_combine(pod: Dict[str, List[Any]]) -> None:
    assert [value.item() for value in everywhere(pod["reduce"], "ops")] == [1.0, 4.0, 24.0]
    assert [value.item() for value in everywhere(pod["reduce"], "average")] == [1.5, 6.0]
    assert everywhere(pod["reduce"], "scaled").item() == 6.0
    assert everywhere(pod["reduce"], "empty").shape == (0,)


def test_compression_rounds_to_half_for_the_way(pod: Dict[str, List[Any]]) -> None:
    compressed = everywhere(pod["reduce"], "compressed")
    assert compressed.dtype == torch.float32
    assert compressed.item() == 1.0


def test_allgather_joins_unequal_lengths(pod: Dict[str, List[Any]]) -> None:
    assert torch.equal(
        everywhere(pod["gather"], "ragged"), torch.tensor([[1, 1], [2, 2], [2, 2], [3, 3], [3, 3], [3, 3]])
    )
    assert everywhere(pod["gather"], "one").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert everywhere(pod["gather"], "flags").tolist() == [False, False, True, False]
    assert everywhere(pod["gather"], "strided").shape == (12, 2)


@pytest.mark.parametrize("name", list(state(0)))
def test_broadcast_parameters_copies_every_bit(pod: Dict[str, List[Any]], name: str) -> None:
    expected = state(1)[name]
    for found in pod["spread"]:
        assert found["state"][name].dtype == expected.dtype
        assert torch.equal(bits(found["state"][name]), bits(expected))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_broadcast_takes_parameters_columns_and_objects(pod: Dict[str, List[Any]]) -> None:
    assert torch.equal(everywhere(pod["spread"], "weight"), torch.full((2, 3), 2.0))
    assert everywhere(pod["spread"], "seed").item() == 7
    for rank, found in enumerate(pod["spread"]):
        assert found["column"].tolist() == [[3.0, float(rank)]] * 3
        assert found["object"] == {"epoch": 3, "nothing": None}
        assert found["root_object"] == 0


@pytest.mark.parametrize("mistake", ["shape", "call", "name", "long", "parameters", "gather"])
def test_ranks_out_of_step_are_told_so(pod: Dict[str, List[Any]], mistake: str) -> None:
    messages = [found[mistake] for found in pod["mistakes"]]
    assert messages[0].startswith("RuntimeError: the ranks are out of step")
    assert "rank 3: " in messages[0]
    assert len(set(messages)) == 1


def test_it_can_be_shut_down_and_started_again(pod: Dict[str, List[Any]]) -> None:
    not_initialized = "ValueError: Horovod has not been initialized; use hvd.init()."
    assert [found["before"] for found in pod["start"]] == [not_initialized] * 4
    assert pod["restart"] == [(not_initialized, 3 - rank, 9, 4.0) for rank in range(4)]


def test_a_killed_rank_is_an_error_for_the_others(pod: Dict[str, List[Any]]) -> None:
    for rank in (0, 1, 3):
        assert "lost the connection" in pod["death_of_rank_2"][rank]


# ---- tests of one rank


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in [name for name in os.environ if name.startswith(("HOROVOD_", "OMPI_", "POPDIST_", "EMULATED_POD_"))]:
        monkeypatch.delenv(name)
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("alone")
def test_one_rank_needs_nobody() -> None:
    tensor = torch.randn(3, 2)
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (
        0,
        1,
        0,
        1,
        0,
        1,
    )
    assert torch.equal(hvd.allreduce(tensor), tensor)
    assert torch.equal(hvd.allgather(tensor), tensor)
    assert torch.equal(hvd.broadcast(tensor, 0), tensor)
    hvd.broadcast_parameters({"x": tensor}, root_rank=0)
    assert hvd.broadcast_object("x") == "x"
    hvd.barrier()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hvd.allreduce(torch.zeros(1), op=hvd.Adasum), "no Adasum"),
        (lambda: hvd.allreduce(torch.zeros(1), True, op=hvd.Sum), "supersedes average"),
        (lambda: hvd.allreduce(torch.zeros(1), op=9), "9"),
        (lambda: hvd.allreduce(torch.zeros(1, dtype=torch.bool)), "bool"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "0-d"),
        (lambda: hvd.broadcast(torch.zeros(1), 1), "root_rank 1 is not among the 1 ranks"),
        (lambda: hvd.broadcast_parameters({"step": 3}, 0), "'step' is a int"),  # type: ignore[arg-type]
        (lambda: hvd.barrier(process_set=[0]), "one process set only"),
        (lambda: hvd.init(comm=[0]), "all ranks only"),
    ],
)
def test_what_does_not_work_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (0, 1, 0, 1, 0, 1)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "HOROVOD_CROSS_SIZE": "3"}, (0, 1, 0, 1, 0, 3)),
        ({"POPDIST_NUM_TOTAL_REPLICAS": "2", "POPDIST_NUM_LOCAL_REPLICAS": "2"}, (0, 1, 0, 1, 0, 1)),
    ],
)
def test_where_rank_and_size_come_from(monkeypatch: pytest.MonkeyPatch, variables: Dict[str, str], place: Any) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert tuple(_identity._find_identity()) == place
    hvd.shutdown()


def test_garbage_in_the_environment_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "many")
    with pytest.raises(RuntimeError, match="HOROVOD_SIZE='many'"):
        hvd.init()
