"""`_pod.reduce`: the sum over replicas has the same bits for every placement, and no wait is unbounded."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Tuple

import _pod.reduce
import _pod.wires
import pytest
import torch
from _pod.gradient_sum import GradientSum
from poptorch.device.execute.weight_update import WeightUpdate

PLACEMENTS = [(4,), (2, 2), (1, 1, 1, 1), (3, 3), (2, 2, 2), (4, 4), (2, 2, 2, 2), (1, 4), (5, 2, 1), (3, 2, 2, 4)]
LENGTHS = [0, 1, 3, 1000]
CHUNK = 256  # 1000 elements are several chunks, the last one shorter


def gradients(replicas: int, length: int) -> List[torch.Tensor]:
    """Return one tensor per replica, of very different magnitudes: the order of additions affects the bits."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(length, generator=generator) * 10.0 ** (replica % 5) for replica in range(replicas)]


def reference_sum(leaves: List[torch.Tensor]) -> torch.Tensor:
    while len(leaves) > 1:
        pairs = [leaves[place : place + 2] for place in range(0, len(leaves), 2)]
        leaves = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


def reduce_local(counts: Tuple[int, ...], rank: int, length: int) -> torch.Tensor:
    offset = sum(counts[:rank])
    own = gradients(sum(counts), length)[offset : offset + counts[rank]]
    _pod.reduce.tree_sum_(
        own, replica_offset=offset, total_replicas=sum(counts), process_id=rank, num_processes=len(counts)
    )
    return own[0]


# ---- run by the ranks


def sums(rank: int, size: int) -> Dict[Any, torch.Tensor]:
    _pod.reduce._CHUNK = CHUNK
    results = {}
    for generation, counts in enumerate(PLACEMENTS):
        os.environ[_pod.wires.GENERATION] = str(generation)
        if rank < len(counts):
            results.update({(counts, length): reduce_local(counts, rank, length) for length in LENGTHS})
        _pod.wires.disconnect("gcl")
    return results


def different_lengths(rank: int, size: int) -> str:
    os.environ[_pod.wires.GENERATION] = "lengths"
    try:
        reduce_local((1, 1, 1, 1), rank, 10 + rank // 3)
    except RuntimeError as error:
        return str(error)
    return "no error"


def death_of_rank_3(rank: int, size: int) -> Tuple[float, str]:
    os.environ[_pod.wires.GENERATION] = "death"
    _pod.wires.disconnect("gcl")
    reduce_local((1, 1, 1, 1), rank, 1000)
    if rank == 3:
        os._exit(0)
    began = time.monotonic()
    try:
        reduce_local((1, 1, 1, 1), rank, 1000)
    except RuntimeError as error:
        waited_s = time.monotonic() - began
        time.sleep(1.0)  # rank 0 depends on rank 2, which must not end before
        return waited_s, str(error)
    return 0.0, "no error"


# ---- tests


@pytest.fixture(scope="module")
def pod(ranks: Any) -> Dict[str, List[Any]]:
    return ranks(__file__, ["sums", "different_lengths", "death_of_rank_3"], 4)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("counts", PLACEMENTS)
def test_every_placement_has_the_bits_of_the_reference(
    pod: Dict[str, List[Any]], counts: Tuple[int, ...], length: int
) -> None:
    expected = reference_sum(gradients(sum(counts), length))
    for rank in range(len(counts)):
        assert torch.equal(pod["sums"][rank][counts, length], expected), f"rank {rank}"


def test_the_order_of_additions_affects_the_bits() -> None:
    leaves = gradients(8, 1000)
    sequential = leaves[0].clone()
    for leaf in leaves[1:]:
        sequential += leaf
    assert not torch.equal(sequential, reference_sum(leaves))


def test_different_lengths_are_an_error_on_all_ranks(pod: Dict[str, List[Any]]) -> None:
    assert all("have different lengths: [10, 10, 10, 11]" in message for message in pod["different_lengths"])


def test_a_killed_peer_is_an_error_at_once_on_all_ranks(pod: Dict[str, List[Any]]) -> None:
    for waited_s, message in pod["death_of_rank_3"][:3]:
        assert waited_s < 0.9, message  # before rank 2 ends
        assert "lost the connection" in message


def test_one_process_needs_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_pod.wires.RENDEZVOUS, raising=False)
    assert torch.equal(reduce_local((6,), 0, 1000), reference_sum(gradients(6, 1000)))


def test_one_process_must_hold_all_replicas() -> None:
    with pytest.raises(RuntimeError, match="one process holds 2 of 4 replicas"):
        _pod.reduce.tree_sum_(gradients(2, 3), replica_offset=0, total_replicas=4, process_id=0, num_processes=1)


@pytest.mark.parametrize(
    ("contributions", "message"),
    [
        ([], "0 replicas"),
        ([torch.zeros(2, 2)], r"shape \(2, 2\)"),
        ([torch.zeros(4)[::2]], "contiguous"),
        ([torch.zeros(2, dtype=torch.int64)], "int64"),
        ([torch.zeros(2), torch.zeros(3)], "3 elements"),
        ([torch.zeros(2), torch.zeros(2), torch.zeros(2)], "0..1"),
    ],
)
def test_invalid_contributions_are_an_error(contributions: List[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _pod.reduce.tree_sum_(contributions, replica_offset=0, total_replicas=2, process_id=0, num_processes=1)


def test_a_gap_between_the_processes_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"offsets \[0, 3\], counts \[2, 2\]"):
        _pod.reduce.checked_layout([[0, 2, 5, 10], [3, 2, 5, 10]], 5)


def test_the_additions_of_a_process_are_numbered_from_its_first_replica() -> None:
    own = [torch.full((4,), float(number)) for number in (2, 3, 4)]
    _pod.reduce._add(own, [(2, 3), (2, 4)], offset=2, start=1, stop=3)
    assert own[0].tolist() == [2.0, 9.0, 9.0, 2.0]


def test_a_broken_group_is_closed_when_the_device_is_released() -> None:
    group = _pod.wires.connect(_pod.reduce.GROUP, 0, 1)
    update: Any = object.__new__(WeightUpdate)
    update._sum = object.__new__(GradientSum)
    update.close_connections()
    assert _pod.wires.connect(_pod.reduce.GROUP, 0, 1) is group
    group.abandon("a process is lost")
    update.close_connections()
    assert _pod.wires.connect(_pod.reduce.GROUP, 0, 1) is not group
    _pod.wires.disconnect(_pod.reduce.GROUP)
