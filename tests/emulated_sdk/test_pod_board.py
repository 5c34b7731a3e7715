"""`_pod.board` and `_pod.gradient_sum`: the reduction in shared memory has the bits of that over the network."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import _pod.board
import _pod.reduce
import _pod.wires
import pytest
import torch
from _pod.gradient_sum import GradientSum, Placement

PLACEMENTS = [(1, 1), (2, 2), (4, 4), (1, 1, 1, 1), (2, 2, 2, 2)]
LENGTHS = [1, 3, 17, 63, 1001]
Key = Tuple[Tuple[int, ...], int, torch.dtype, int]


def gradients(replicas: int, length: int, call: int, dtype: torch.dtype = torch.float32) -> List[torch.Tensor]:
    """Return one tensor per replica, of very different magnitudes: the order of additions affects the bits."""
    generator = torch.Generator().manual_seed(1000 * length + call)
    return [(torch.randn(length, generator=generator) * 10.0 ** (replica % 5)).to(dtype) for replica in range(replicas)]


def reference_sum(leaves: List[torch.Tensor]) -> torch.Tensor:
    while len(leaves) > 1:
        leaves = [left + right for left, right in zip(leaves[::2], leaves[1::2])]
    return leaves[0]


def as_tensors(flat: torch.Tensor) -> List[torch.Tensor]:
    """Split a tensor into several, the first of which is a column-major matrix."""
    cut = flat.numel() // 3 // 2 * 2
    return [flat[:cut].view(2, -1).t().contiguous().t(), flat[cut:].clone()] if cut else [flat]


def as_flat(tensors: List[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


_sums: Dict[Any, GradientSum] = {}


def reduce_local(
    counts: Tuple[int, ...], rank: int, length: int, call: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    offset = sum(counts[:rank])
    own = gradients(sum(counts), length, call, dtype)[offset : offset + counts[rank]]
    lists = [as_tensors(each) for each in own]
    key = (counts, rank, length, dtype)
    if key not in _sums:
        _sums[key] = GradientSum(lists[0], Placement(counts[rank], rank, len(counts)))
    return as_flat(_sums[key](lists))


def new_generation(generation: str) -> None:
    _pod.wires.disconnect("gcl")
    os.environ[_pod.wires.GENERATION] = generation


def count_boards() -> int:
    return sum(each.uses_board() for each in _sums.values())


def mapped_boards() -> List[bool]:
    """Return, for each board that this process has mapped, whether its file still has a name."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/emulated_pod_" in line]
    return [not line.endswith("(deleted)") for line in lines]


def all_sums(rank: int, generation: str) -> Tuple[Dict[Key, torch.Tensor], List[int]]:
    """Return the sums of several calls for every placement, and how many boards they used."""
    _pod.reduce._CHUNK = 256
    sums, used = {}, []
    for counts in PLACEMENTS:
        new_generation(f"{generation} {counts}")
        if rank < len(counts):
            for call in range(4):  # the lengths alternate
                for length in LENGTHS:
                    key = (counts, length, torch.float32, call)
                    sums[key] = reduce_local(*key[:1], rank, length, call)
            sums[counts, 63, torch.float16, 0] = reduce_local(counts, rank, 63, 0, torch.float16)
            used.append(count_boards())
    return sums, used


# ---- run by the ranks


def on_boards(rank: int, size: int) -> Tuple[Dict[Key, torch.Tensor], List[int]]:
    return all_sums(rank, "boards")


def over_network(rank: int, size: int) -> Tuple[Dict[Key, torch.Tensor], List[int]]:
    free, _pod.board._free_bytes = _pod.board._free_bytes, lambda: 1000
    try:
        return all_sums(rank, "network")
    finally:
        _pod.board._free_bytes = free


def without_memory_on_rank_1(rank: int, size: int) -> Tuple[int, torch.Tensor]:
    new_generation("rank 1")
    free = _pod.board._free_bytes
    if rank == 1:
        _pod.board._free_bytes = lambda: 1000
    total = reduce_local((1, 1, 1, 1), rank, 1001)
    _pod.board._free_bytes = free
    return count_boards(), total


def allocation_failure(rank: int, size: int) -> Tuple[int, torch.Tensor]:
    new_generation("no memory")
    needed = _pod.board._bytes_needed
    _pod.board._free_bytes, free = (lambda: 1 << 62), _pod.board._free_bytes
    _pod.board._bytes_needed = lambda *_: 1 << 60
    total = reduce_local((1, 1, 1, 1), rank, 1001)
    _pod.board._free_bytes, _pod.board._bytes_needed = free, needed
    return count_boards(), total


def mapping_failure_on_rank_2(rank: int, size: int) -> Tuple[int, torch.Tensor]:
    new_generation("no map")
    map_it = _pod.board._map
    if rank == 2:
        _pod.board._map = lambda path, *rest: map_it(path + "x", *rest)
    total = reduce_local((1, 1, 1, 1), rank, 1001)
    _pod.board._map = map_it
    return count_boards(), total


def boards_during_and_after(rank: int, size: int) -> Tuple[List[bool], List[bool]]:
    """Return the boards mapped after the first call on all ranks, and after the group is closed."""
    new_generation("boards during and after")
    reduce_local((1, 1, 1, 1), rank, 1001)
    _pod.wires.connect("gcl", rank, size).barrier()
    during = mapped_boards()
    _pod.wires.disconnect("gcl")
    return during, mapped_boards()


def death_of_rank_3(rank: int, size: int) -> Tuple[float, str]:
    new_generation("death")
    reduce_local((1, 1, 1, 1), rank, 1001)
    assert count_boards() == 1
    if rank == 3:
        os._exit(0)
    began = time.monotonic()
    try:
        reduce_local((1, 1, 1, 1), rank, 1001)
    except RuntimeError as error:
        waited_s = time.monotonic() - began
        time.sleep(1.0)  # the others depend on this rank, which must not end before
        return waited_s, str(error)
    return 0.0, "no error"


RUNS = ["on_boards", "over_network", "without_memory_on_rank_1", "allocation_failure", "mapping_failure_on_rank_2"]


# ---- tests


@pytest.fixture(scope="module")
def pod(ranks: Any) -> Dict[str, List[Any]]:
    return ranks(__file__, [*RUNS, "boards_during_and_after", "death_of_rank_3"], 4)


@pytest.mark.parametrize("function", ["on_boards", "over_network"])
def test_every_call_has_the_bits_of_the_reference(pod: Dict[str, List[Any]], function: str) -> None:
    for rank, (sums, _) in enumerate(pod[function]):
        for (counts, length, dtype, call), total in sums.items():
            expected = reference_sum(gradients(sum(counts), length, call, dtype))
            assert torch.equal(total, expected), f"rank {rank}, {counts}, length {length}, {dtype}, call {call}"


def test_each_length_and_dtype_has_its_board_if_memory_allows(pod: Dict[str, List[Any]]) -> None:
    assert [used for _, used in pod["on_boards"]] == [[len(LENGTHS) + 1] * 5] * 2 + [[len(LENGTHS) + 1] * 2] * 2
    assert [used for _, used in pod["over_network"]] == [[0] * 5] * 2 + [[0] * 2] * 2


@pytest.mark.parametrize("function", RUNS[2:])
def test_all_ranks_use_the_network_if_one_cannot_map_the_board(pod: Dict[str, List[Any]], function: str) -> None:
    for used, total in pod[function]:
        assert used == 0
        assert torch.equal(total, reference_sum(gradients(4, 1001, 0)))


def test_a_board_is_unlinked_and_unmapped_with_its_group(pod: Dict[str, List[Any]]) -> None:
    assert pod["boards_during_and_after"] == [([False], [])] * 4


def test_a_killed_peer_is_an_error_at_once_on_all_ranks(pod: Dict[str, List[Any]]) -> None:
    for waited_s, message in pod["death_of_rank_3"][:3]:
        assert waited_s < 0.9, message  # before another rank ends
        assert "lost the connection" in message


@pytest.mark.parametrize("length", [0, 1, 16, 17, 64, 1001])
def test_slices_cover_the_length_and_begin_on_cache_lines(length: int) -> None:
    slices = _pod.board.aligned_slices(length, 4)
    assert [part.start for part in slices[1:]] == [part.stop for part in slices[:-1]]
    assert (slices[0].start, slices[-1].stop) == (0, length)
    assert all(part.start % 16 == 0 or part.start == length for part in slices)
    sizes = [part.stop - part.start for part in slices]
    assert max(sizes) - min(sizes) <= 32


def test_a_board_needs_the_same_host_and_enough_memory() -> None:
    assert _pod.board.is_possible([[7, 1], [7, 1]])
    assert not _pod.board.is_possible([[7, 1], [8, 1]])
    assert not _pod.board.is_possible([[7, 1], [7, 0]])


def test_a_host_without_shared_memory_has_no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pod.board, "_FOLDER", "/no/such/folder")
    assert _pod.board.capability(2, 1000, torch.float32) == [0, 0]


def test_a_file_is_removed_if_its_memory_cannot_be_allocated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_pod.board, "_FOLDER", str(tmp_path))
    assert _pod.board._create(1 << 62) == ""
    assert not list(tmp_path.iterdir())
