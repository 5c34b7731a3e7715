"""The gradient reduction over replicas: stands in for GCL, which works over IPU-Links on a pod (contract section 1.5).

All replicas of all processes are combined in ONE binary tree over the global replica index: leaves (0,1), (2,3), ...,
then pairs of pairs; a node without a right neighbour passes up. Which process holds a replica only decides who adds,
never what is added to what, so that the sum has the same bits for every placement. (On the device the order is GCL's
own; a tree over the global index is our choice where the contract is silent.)

Every process first adds up the subtrees that it holds whole. Then
- equal, aligned power-of-two blocks in a power-of-two number of processes continue by recursive halving and doubling,
  nearest process first: bandwidth-optimal, and least traffic between hosts if neighbours share a host;
- any other placement cuts the tensor into one slice per process, brings all partial sums of a slice to its owner, who
  finishes the tree, and hands the slices round: the same traffic per process if each holds one subtree, more if it
  holds several.
The tensor travels in chunks, so that the adding of one overlaps with the transfer of the next.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Dict, Iterable, Iterator, List, MutableMapping, NamedTuple, Sequence, Tuple
from weakref import WeakKeyDictionary

import _emulated_pod
import torch
from _emulated_pod import Group, Transfer

GROUP = "gcl"
# Elements that travel together, 16 MiB of float32: more chunks cost more in waking up than they gain by overlapping.
_CHUNK = 1 << 22

Schedule = List[Tuple[int, int]]


def tree_sum_(
    contributions: Sequence[torch.Tensor],
    *,
    replica_offset: int,
    total_replicas: int,
    process_id: int,
    num_processes: int,
) -> None:
    """Sums one flat tensor per replica over all replicas of all processes, in place and in a fixed order.

    contributions: one contiguous 1-D floating point tensor per local replica, of one length and dtype, in replica
        order. On return the first holds the sum over all `total_replicas`, in every process; the others are scratch.
    replica_offset: global index of the first local replica.

    All processes must call in the same order. RuntimeError if the placement does not cover every replica exactly
    once, if lengths differ, or if a peer is lost or silent (see `_emulated_pod`). ValueError for tensors that do not
    fit together.
    """
    local = len(contributions)
    _check(contributions, replica_offset, total_replicas)
    within = additions_within(total_replicas, replica_offset, replica_offset + local)
    length = contributions[0].numel()
    if num_processes == 1:
        if local != total_replicas:
            raise RuntimeError(f"one process holds {local} of {total_replicas} replicas; the others have no process")
        _add(contributions, within, replica_offset, 0, length)
        return
    group = join(process_id, num_processes)
    layout = _agree(group, replica_offset, local, total_replicas, contributions[0])
    _run_in_turn([_reduce_chunk(group, contributions, within, layout, start) for start in range(0, length, _CHUNK)])


def join(process_id: int, num_processes: int) -> Group:
    """The group of all processes. RuntimeError as `_emulated_pod.connect`; others may still compile for minutes."""
    return _emulated_pod.connect(GROUP, process_id, num_processes, join_s=_emulated_pod.timeout_s())


class Layout(NamedTuple):
    """Which replicas each process holds."""

    offsets: List[int]
    counts: List[int]
    between: Schedule  # the tree's additions that no process can do alone
    is_aligned: bool  # equal power-of-two blocks in a power-of-two number of processes


# They end with their group.
_agreements: MutableMapping[Group, Dict[Tuple[int, int, int, int, torch.dtype], Layout]] = WeakKeyDictionary()
_scratch: Dict[torch.dtype, torch.Tensor] = {}


def _check(contributions: Sequence[torch.Tensor], offset: int, total: int) -> None:
    if not contributions or not 0 <= offset <= total - len(contributions):
        raise ValueError(f"{len(contributions)} replicas from index {offset} on do not lie within 0..{total - 1}")
    first = contributions[0]
    for index, tensor in enumerate(contributions):
        if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_floating_point():
            raise ValueError(
                f"contribution {index} is {tensor.dtype} of shape {tuple(tensor.shape)}; flat contiguous floats needed"
            )
        if tensor.numel() != first.numel() or tensor.dtype != first.dtype:
            raise ValueError(
                f"contribution {index} has {tensor.numel()} elements of {tensor.dtype}, contribution 0 has"
                f" {first.numel()} of {first.dtype}"
            )


def additions_within(total: int, start: int, stop: int) -> Schedule:
    """Those additions (to, from) of the tree over `total` replicas, in order, that need replicas start..stop-1 only.

    A node is named by its first leaf: step s adds the node at i+s, which covers up to s leaves, to the one at i.
    """
    additions = []
    step = 1
    while step < total:
        for left in range(0, total - step, 2 * step):
            if start <= left and min(left + 2 * step, total) <= stop:
                additions.append((left, left + step))
        step *= 2
    return additions


def _add(contributions: Sequence[torch.Tensor], schedule: Schedule, offset: int, start: int, stop: int) -> None:
    """Runs additions of the tree on elements start..stop-1 of the replicas from index `offset` on."""
    for to, source in schedule:
        contributions[to - offset][start:stop].add_(contributions[source - offset][start:stop])


def _agree(group: Group, offset: int, count: int, total: int, like: torch.Tensor) -> Layout:
    """Learns, once for each kind of call, what the other processes hold, and checks that it makes one tree."""
    known = _agreements.setdefault(group, {})
    key = (offset, count, total, like.numel(), like.dtype)
    if key not in known:
        known[key] = checked_layout(group.gather_numbers([offset, count, total, like.numel()]), total)
    return known[key]


def checked_layout(held: List[List[int]], total: int) -> Layout:
    """The layout out of every process's [offset, count, total, length]; RuntimeError if they make no tree."""
    offsets, counts, totals, lengths = (list(column) for column in zip(*held))
    expected = [sum(counts[:process]) for process in range(len(counts))]
    if set(totals) != {total} or offsets != expected or sum(counts) != total:
        raise RuntimeError(
            f"the processes do not share out {total} replicas in order: offsets {offsets}, counts {counts},"
            f" totals {totals}"
        )
    if len(set(lengths)) > 1:
        raise RuntimeError(f"the processes bring gradients of different lengths: {lengths}")
    alone = set()
    for offset, count in zip(offsets, counts):
        alone.update(additions_within(total, offset, offset + count))
    between = [addition for addition in additions_within(total, 0, total) if addition not in alone]
    is_aligned = len(set(counts)) == 1 and _is_power_of_two(counts[0]) and _is_power_of_two(len(counts))
    return Layout(offsets, counts, between, is_aligned)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _run_in_turn(chunks: List[Iterator[None]]) -> None:
    """Advances every chunk by one step at a time: while one is added up the others' data are on the wire."""
    while chunks:
        chunks = [chunk for chunk in chunks if next(chunk, _DONE) is not _DONE]


_DONE = object()


def _reduce_chunk(
    group: Group, contributions: Sequence[torch.Tensor], within: Schedule, layout: Layout, start: int
) -> Iterator[None]:
    """Reduces the chunk that begins at `start`: first inside the process, then between processes."""
    stop = min(start + _CHUNK, contributions[0].numel())
    _add(contributions, within, layout.offsets[group.rank], start, stop)
    if layout.is_aligned:
        yield from _halve_and_double(group, contributions[0], start, stop)
    else:
        yield from _finish_at_owners(group, contributions, layout, start, stop)


def _halve_and_double(group: Group, total: torch.Tensor, start: int, stop: int) -> Iterator[None]:
    """Reduces total[start:stop] over processes: halves it down to one slice each, then doubles it up again.

    Yields whenever its transfers are under way. With two operands a+b == b+a in every bit, so both sides of a pair
    may add what they receive to what they hold.
    """
    tag = group.next_tag()
    scratch = _scratch_of(total.dtype, total.numel())
    way: List[Tuple[int, slice, slice, Transfer]] = []
    distance = 1
    while distance < group.size:
        middle = start + (stop - start) // 2
        kept, given = slice(start, middle), slice(middle, stop)
        if group.rank & distance:
            kept, given = given, kept
        peer = group.rank ^ distance
        incoming = group.receive(scratch[kept], peer, tag)
        outgoing = group.send(total[given], peer, tag)
        yield
        incoming.wait()
        total[kept].add_(scratch[kept])
        way.append((peer, kept, given, outgoing))
        start, stop = kept.start, kept.stop
        distance *= 2
    for peer, kept, given, outgoing in reversed(way):
        outgoing.wait()
        incoming = group.receive(total[given], peer, tag)
        outgoing = group.send(total[kept], peer, tag)
        yield
        incoming.wait()
        outgoing.wait()


def _finish_at_owners(
    group: Group, contributions: Sequence[torch.Tensor], layout: Layout, start: int, stop: int
) -> Iterator[None]:
    """Reduces elements start..stop-1 for any placement: the p-th slice goes to process p, who finishes the tree on it.

    Yields whenever its transfers are under way.
    """
    slices = _emulated_pod.cut(start, stop, group.size)
    mine = slices[group.rank]
    parts: Dict[int, torch.Tensor] = {}  # my slice of each partial sum that is left
    nodes = sorted({node for addition in layout.between for node in addition})
    room = iter(_room(contributions[0], len(nodes), start, group.size))
    transfers: List[Transfer] = []
    for node in nodes:
        holder, tag = _holder(layout, node), group.next_tag()
        if holder == group.rank:
            held = contributions[node - layout.offsets[holder]]
            parts[node] = held[mine]
            transfers += [group.send(held[slices[peer]], peer, tag) for peer in group.peers]
        else:
            parts[node] = next(room)[: mine.stop - mine.start]
            transfers.append(group.receive(parts[node], holder, tag))
    tag = group.next_tag()
    yield
    _wait(transfers)
    for to, source in layout.between:
        parts[to].add_(parts[source])
    result = contributions[0]
    if group.rank != _holder(layout, 0):
        result[mine].copy_(parts[0])
    transfers = [group.receive(result[slices[peer]], peer, tag) for peer in group.peers]
    transfers += [group.send(result[mine], peer, tag) for peer in group.peers]
    yield
    _wait(transfers)


def _wait(transfers: Iterable[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()


def _holder(layout: Layout, node: int) -> int:
    """The process that holds the partial sum whose first leaf is replica `node`."""
    return bisect_right(layout.offsets, node) - 1


def _scratch_of(dtype: torch.dtype, length: int) -> torch.Tensor:
    """Memory kept between calls, at least `length` elements: pages that are never touched cost nothing."""
    held = _scratch.get(dtype)
    if held is None or held.numel() < length:
        held = _scratch[dtype] = torch.empty(length, dtype=dtype)
    return held


def _room(like: torch.Tensor, rows: int, start: int, pieces: int) -> torch.Tensor:
    """Scratch for `rows` slices of the chunk that begins at `start`, apart from every other chunk's."""
    chunks = -(-like.numel() // _CHUNK)
    width = -(-min(_CHUNK, like.numel()) // pieces)
    room = _scratch_of(like.dtype, chunks * rows * width)[: chunks * rows * width]
    return room.view(chunks, rows, width)[start // _CHUNK]
