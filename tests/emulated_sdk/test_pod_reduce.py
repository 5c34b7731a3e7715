"""The sum over replicas has the same bits for every placement, in shared memory and over the network, and no wait is
unbounded (`_pod.reduce`, `_pod.board`, `_pod.gradient_sum`); the exchange of one host."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import _pod.board
import _pod.reduce
import _pod.wires
import pytest
import torch
from _pod.gradient_sum import GradientSum, Placement
from poptorch.device.execute.weight_update import WeightUpdate

from tests.support.ranks import error_of

Counts = Tuple[int, ...]
Sums = Tuple[Dict[Tuple[Counts, int, torch.dtype, int], torch.Tensor], List[int]]
PLACEMENTS = [(4,), (2, 2), (1, 1, 1, 1), (3, 3), (2, 2, 2), (4, 4), (2, 2, 2, 2), (1, 4), (5, 2, 1), (3, 2, 2, 4)]
BOARDS = [(1, 1), (2, 2), (4, 4), (1, 1, 1, 1), (2, 2, 2, 2)]
LENGTHS = [1, 3, 17, 63, 1001]
ROWS = [torch.arange(length, dtype=dtype) for dtype in (torch.uint8, torch.float32) for length in (1, 7, 200, 20000)]
FOUR = (1, 1, 1, 1)
CHUNK = 256  # 1000 elements are several chunks, the last one shorter


def gradients(replicas: int, length: int, call: int = 0, dtype: torch.dtype = torch.float32) -> List[torch.Tensor]:
    """Return one tensor per replica, of very different magnitudes: the order of additions affects the bits."""
    generator = torch.Generator().manual_seed(1000 * length + call)
    return [(torch.randn(length, generator=generator) * 10.0 ** (replica % 5)).to(dtype) for replica in range(replicas)]


def reference_sum(leaves: List[torch.Tensor]) -> torch.Tensor:
    while len(leaves) > 1:
        pairs = [leaves[place : place + 2] for place in range(0, len(leaves), 2)]
        leaves = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


def tree_sum(counts: Counts, rank: int, length: int) -> torch.Tensor:
    offset, total = sum(counts[:rank]), sum(counts)
    own = gradients(total, length)[offset : offset + counts[rank]]
    _pod.reduce.tree_sum_(own, replica_offset=offset, total_replicas=total, process_id=rank, num_processes=len(counts))
    return own[0]


def as_tensors(flat: torch.Tensor) -> List[torch.Tensor]:
    """Split a tensor into several, the first of which is a column-major matrix."""
    cut = flat.numel() // 3 // 2 * 2
    return [flat[:cut].view(2, -1).t().contiguous().t(), flat[cut:].clone()] if cut else [flat]


_sums: Dict[Any, GradientSum] = {}


def gradient_sum(counts: Counts, rank: int, length: int, call: int = 0, dtype: Any = torch.float32) -> torch.Tensor:
    offset = sum(counts[:rank])
    own = gradients(sum(counts), length, call, dtype)[offset : offset + counts[rank]]
    lists = [as_tensors(each) for each in own]
    key = (counts, rank, length, dtype)
    if key not in _sums:
        _sums[key] = GradientSum(lists[0], Placement(counts[rank], rank, len(counts)))
    return torch.cat([tensor.flatten() for tensor in _sums[key](lists)])


def new_generation(generation: str) -> None:
    _pod.wires.disconnect("gcl")
    os.environ[_pod.wires.GENERATION] = generation


def count_boards() -> int:
    return sum(each.uses_board() for each in _sums.values())


def mapped_boards() -> List[bool]:
    """Return, for each board that this process has mapped, whether its file still has a name."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/emulated_pod_" in line]
    return [not line.endswith("(deleted)") for line in lines]


def all_sums(rank: int, generation: str) -> Sums:
    """Return the sums of several calls for every placement, and how many boards they used."""
    _pod.reduce._CHUNK, sums, used = CHUNK, {}, []
    for counts in BOARDS:
        new_generation(f"{generation} {counts}")
        if rank < len(counts):
            for call in range(4):  # the lengths alternate
                for length in LENGTHS:
                    sums[counts, length, torch.float32, call] = gradient_sum(counts, rank, length, call)
            sums[counts, 63, torch.float16, 0] = gradient_sum(counts, rank, 63, 0, torch.float16)
            used.append(count_boards())
    return sums, used


# ---- run by the ranks


def tree_sums(rank: int, size: int) -> Sums:
    _pod.reduce._CHUNK, sums = CHUNK, {}
    for counts in PLACEMENTS:
        new_generation(f"tree {counts}")
        for length in (0, 1, 3, 1000) if rank < len(counts) else ():
            sums[counts, length, torch.float32, 0] = tree_sum(counts, rank, length)
    return sums, []


def on_boards(rank: int, size: int) -> Sums:
    return all_sums(rank, "boards")


def over_network(rank: int, size: int) -> Sums:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pod.board, "_free_bytes", lambda: 1000)
        return all_sums(rank, "network")


def different_lengths(rank: int, size: int) -> str:
    new_generation("lengths")
    return error_of(lambda: tree_sum(FOUR, rank, 10 + rank // 3))


def sum_with(rank: int, generation: str, **replaced: Any) -> Tuple[int, torch.Tensor]:
    new_generation(generation)
    with pytest.MonkeyPatch.context() as patch:
        for name, function in replaced.items():
            patch.setattr(_pod.board, name, function)
        total = gradient_sum(FOUR, rank, 1001)
    return count_boards(), total


def without_memory_on_rank_1(rank: int, size: int) -> Tuple[int, torch.Tensor]:
    return sum_with(rank, "rank 1", **({"_free_bytes": lambda: 1000} if rank == 1 else {}))


def allocation_failure(rank: int, size: int) -> Tuple[int, torch.Tensor]:
    return sum_with(rank, "no memory", _free_bytes=lambda: 1 << 62, _bytes_needed=lambda *_: 1 << 60)


def mapping_failure_on_rank_2(rank: int, size: int) -> Tuple[int, torch.Tensor]:
    map_it = _pod.board._map
    replaced = {"_map": lambda path, *rest: map_it(path + "x", *rest)} if rank == 2 else {}
    return sum_with(rank, "no map", **replaced)


def boards_during_and_after(rank: int, size: int) -> Tuple[List[bool], List[bool]]:
    """Return the boards mapped after the first call on all ranks, and after the group is closed."""
    new_generation("boards during and after")
    gradient_sum(FOUR, rank, 1001)
    _pod.wires.connect("gcl", rank, size).barrier()
    during = mapped_boards()
    _pod.wires.disconnect("gcl")
    return during, mapped_boards()


def death_of_rank_3(rank: int, call: Callable[[], Any]) -> Tuple[float, str]:
    """Return how long a sum waits after rank 3 has ended, and its error."""
    new_generation("death")
    call()
    if rank == 3:
        os._exit(0)
    began = time.monotonic()
    message = error_of(call)
    waited_s = time.monotonic() - began
    time.sleep(1.0)  # the others depend on this rank, which must not end before
    return waited_s, message


def death_over_the_network(rank: int, size: int) -> Tuple[float, str]:
    return death_of_rank_3(rank, lambda: tree_sum(FOUR, rank, 1000))


def death_on_boards(rank: int, size: int) -> Tuple[float, str]:
    def call() -> None:
        gradient_sum(FOUR, rank, 1001)
        assert count_boards() == 1

    return death_of_rank_3(rank, call)


def _connected(name: str, rank: int, size: int) -> Any:
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
    new_generation("messages")
    of_ones = GradientSum([torch.zeros(100)], Placement(1, rank, size))
    of_ones([[torch.ones(100)]])  # connects
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
            of_ones([[torch.ones(100)]])
            of_ones.gather(torch.zeros(8, dtype=torch.uint8))
    return counts


def out_of_step(rank: int, size: int) -> str:
    group, exchange, _ = _connected("out of step", rank, size)
    return error_of(lambda: exchange.barrier(group) if rank else exchange.gather(group, torch.zeros(8)))


def not_connected(rank: int, size: int) -> bool:
    """Return whether there is no exchange if one process cannot create its socket."""
    group = _pod.wires.connect("not connected", rank, size)
    folder = "/no/such/folder" if rank == 1 else tempfile.gettempdir()
    return _pod.board.connect_locally(group, f"{folder}/exchange-none") is None


FAILURES = ["without_memory_on_rank_1", "allocation_failure", "mapping_failure_on_rank_2"]


@pytest.fixture(scope="module")
def pod(ranks: Any) -> Dict[str, List[Any]]:
    functions = ["tree_sums", "on_boards", "over_network", *FAILURES, "different_lengths", "gathers", "messages"]
    found = ranks(__file__, [*functions, "not_connected", "out_of_step", "death_over_the_network"], 4)
    return {**found, **ranks(__file__, ["boards_during_and_after", "death_on_boards"], 4)}


# ---- tests


@pytest.mark.parametrize("function", ["tree_sums", "on_boards", "over_network"])
def test_every_placement_has_the_bits_of_the_reference(pod: Dict[str, List[Any]], function: str) -> None:
    for rank, (sums, _) in enumerate(pod[function]):
        placements = PLACEMENTS if function == "tree_sums" else BOARDS
        assert {counts for counts, *_ in sums} == {counts for counts in placements if rank < len(counts)}
        for (counts, length, dtype, call), total in sums.items():
            expected = reference_sum(gradients(sum(counts), length, call, dtype))
            assert torch.equal(total, expected), f"rank {rank}, {counts}, length {length}, {dtype}, call {call}"


@pytest.mark.parametrize("function", FAILURES)
def test_all_ranks_use_the_network_if_one_cannot_map_the_board(pod: Dict[str, List[Any]], function: str) -> None:
    for used, total in pod[function]:
        assert used == 0
        assert torch.equal(total, reference_sum(gradients(4, 1001)))


def test_each_length_and_dtype_has_its_board_which_is_unlinked_and_unmapped_with_its_group(
    pod: Dict[str, List[Any]],
) -> None:
    assert [used for _, used in pod["on_boards"]] == [[len(LENGTHS) + 1] * 5] * 2 + [[len(LENGTHS) + 1] * 2] * 2
    assert [used for _, used in pod["over_network"]] == [[0] * 5] * 2 + [[0] * 2] * 2
    assert pod["boards_during_and_after"] == [([False], [])] * 4


def test_a_local_exchange_has_the_bits_of_the_network_few_messages_and_its_own_errors(
    pod: Dict[str, List[Any]],
) -> None:
    assert pod["gathers"] == [{"same": [True] * 6, "files": []}] * 4
    assert pod["messages"] == [{"gloo": 0, "local": 2 * 3}] * 4
    assert all(error.startswith("PeerFailed: ") for error in pod["out_of_step"]), pod["out_of_step"]
    assert any("is at another operation" in error for error in pod["out_of_step"])
    assert pod["not_connected"] == [True] * 4
    assert all("have different lengths: [10, 10, 10, 11]" in message for message in pod["different_lengths"])


@pytest.mark.parametrize("function", ["death_over_the_network", "death_on_boards"])
def test_a_killed_peer_is_an_error_at_once_on_all_ranks(pod: Dict[str, List[Any]], function: str) -> None:
    for waited_s, message in pod[function][:3]:
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


def test_a_board_needs_the_same_host_and_enough_memory_which_is_freed(monkeypatch: Any, tmp_path: Path) -> None:
    found = [_pod.board.is_possible([[7, 1], other]) for other in ([7, 1], [8, 1], [7, 0])]
    assert found == [True, False, False]
    monkeypatch.setattr(_pod.board, "_FOLDER", "/no/such/folder")
    assert _pod.board.capability(2, 1000, torch.float32) == [0, 0]
    monkeypatch.setattr(_pod.board, "_FOLDER", str(tmp_path))
    assert _pod.board._create(1 << 62) == ""
    assert not list(tmp_path.iterdir())


def test_one_process_needs_no_rendezvous_and_holds_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_pod.wires.RENDEZVOUS, raising=False)
    assert torch.equal(tree_sum((6,), 0, 1000), reference_sum(gradients(6, 1000)))
    with pytest.raises(RuntimeError, match="one process holds 2 of 4 replicas"):
        _pod.reduce.tree_sum_(gradients(2, 3), replica_offset=0, total_replicas=4, process_id=0, num_processes=1)
    with pytest.raises(RuntimeError, match=r"offsets \[0, 3\], counts \[2, 2\]"):  # a gap between the processes
        _pod.reduce.checked_layout([[0, 2, 5, 10], [3, 2, 5, 10]], 5)


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


def test_the_order_of_additions_affects_the_bits_and_begins_with_the_first_replica_of_the_process() -> None:
    leaves = gradients(8, 1000)
    assert not torch.equal(sum(leaves[1:], leaves[0]), reference_sum(leaves))
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
