"""The sum over all replicas of one flat tensor each. Replaces GCL, which works over the IPU-Links of a real pod.

The replicas of all processes are added in ONE binary tree over the global replica index: leaves (0,1), (2,3), ...,
then pairs of pairs; a node without a right neighbour moves up unchanged. The process that holds a replica affects only
which process adds, never the order of additions: the sum has the same bits for every placement. (inferred: the SDK's
documentation does not state GCL's order.)

Every process first adds the subtrees that it holds completely. Then
- equal, aligned power-of-two blocks in a power-of-two number of processes use recursive halving and doubling, nearest
  process first: bandwidth-optimal, with the least traffic between hosts if neighbours share a host;
- any other placement assigns one slice of the tensor to each process; the process receives all partial sums of its
  slice, finishes the tree on it, and sends the result to all. The traffic per process is the same if each process
  holds one subtree, and higher otherwise.
The tensor is transferred in chunks: one is added while the others are transferred.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Dict, Iterator, List, MutableMapping, NamedTuple, Sequence, Tuple
from weakref import WeakKeyDictionary

import torch

from _pod import wires
from _pod.rendezvous import timeout_s
from _pod.wires import Group, Transfer, wait_all

GROUP = "gcl"
# Elements per chunk, 16 MiB of float32: with smaller chunks the overhead per transfer exceeds the gain of overlapping.
_CHUNK = 1 << 22

Schedule = List[Tuple[int, int]]  # additions (target, source)


def tree_sum_(
    contributions: Sequence[torch.Tensor],
    *,
    replica_offset: int,
    total_replicas: int,
    process_id: int,
    num_processes: int,
) -> None:
    """Sum one flat tensor per replica over all replicas of all processes, in place and in a fixed order.

    All processes must call in the same order.

    Args:
        contributions: one contiguous 1-D floating point tensor per local replica, of one length and dtype, in replica
            order. On return the first holds the sum over all `total_replicas`, in every process; the others are
            scratch.
        replica_offset: global index of the first local replica.

    Raises:
        PeerFailed: a peer is lost or does not respond in time (see `_pod.wires`).
        RuntimeError: the placement does not cover every replica exactly once, or lengths differ between processes.
        ValueError: the local tensors do not fit together.
    """
    local = len(contributions)
    _check(contributions, replica_offset, total_replicas)
    within = additions_within(total_replicas, replica_offset, replica_offset + local)
    length = contributions[0].numel()
    if num_processes == 1:
        if local != total_replicas:
            raise RuntimeError(f"one process holds {local} of {total_replicas} replicas; no process holds the others")
        _add(contributions, within, replica_offset, 0, length)
        return
    group = join(process_id, num_processes)
    layout = _exchange_layout(group, replica_offset, local, total_replicas, contributions[0])
    _interleave([_reduce_chunk(group, contributions, within, layout, start) for start in range(0, length, _CHUNK)])


def join(process_id: int, num_processes: int) -> Group:
    """Join the group of all processes, as `wires.connect`; with the full timeout, as others may compile for minutes."""
    return wires.connect(GROUP, process_id, num_processes, join_s=timeout_s())


class Layout(NamedTuple):
    """The replicas that each process holds."""

    offsets: List[int]
    counts: List[int]
    between: Schedule  # the additions that need replicas of several processes
    is_aligned: bool  # equal power-of-two blocks in a power-of-two number of processes


# The layouts are released with their group.
_layouts: MutableMapping[Group, Dict[Tuple[int, int, int, int, torch.dtype], Layout]] = WeakKeyDictionary()
_scratch: Dict[torch.dtype, torch.Tensor] = {}


def _check(contributions: Sequence[torch.Tensor], offset: int, total: int) -> None:
    if not contributions or not 0 <= offset <= total - len(contributions):
        raise ValueError(f"{len(contributions)} replicas from index {offset} are not within 0..{total - 1}")
    first = contributions[0]
    for index, tensor in enumerate(contributions):
        if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_floating_point():
            raise ValueError(
                f"contribution {index} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be a contiguous 1-D"
                " floating point tensor"
            )
        if tensor.numel() != first.numel() or tensor.dtype != first.dtype:
            raise ValueError(
                f"contribution {index} has {tensor.numel()} elements of {tensor.dtype}, contribution 0 has"
                f" {first.numel()} of {first.dtype}"
            )


def additions_within(total: int, start: int, stop: int) -> Schedule:
    """Return the additions of the tree over `total` replicas, in order, that need replicas start..stop-1 only.

    A node is identified by its first leaf: step s adds the node at i+s, which covers up to s leaves, to that at i.
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
    """Run additions on elements start..stop-1 of the local replicas, the first of which has index `offset`."""
    for target, source in schedule:
        contributions[target - offset][start:stop].add_(contributions[source - offset][start:stop])


def _exchange_layout(group: Group, offset: int, count: int, total: int, like: torch.Tensor) -> Layout:
    """Return the layout of all processes; it is exchanged and checked once per kind of call."""
    layouts = _layouts.setdefault(group, {})
    key = (offset, count, total, like.numel(), like.dtype)
    if key not in layouts:
        layouts[key] = checked_layout(group.gather_numbers([offset, count, total, like.numel()]), total)
    return layouts[key]


def checked_layout(rows: List[List[int]], total: int) -> Layout:
    """Return the layout from [offset, count, total, length] of each process; RuntimeError if they do not match."""
    offsets, counts, totals, lengths = (list(column) for column in zip(*rows))
    expected = [sum(counts[:process]) for process in range(len(counts))]
    if set(totals) != {total} or offsets != expected or sum(counts) != total:
        raise RuntimeError(
            f"the processes do not hold {total} replicas in order: offsets {offsets}, counts {counts}, totals {totals}"
        )
    if len(set(lengths)) > 1:
        raise RuntimeError(f"the gradients of the processes have different lengths: {lengths}")
    local = set()
    for offset, count in zip(offsets, counts):
        local.update(additions_within(total, offset, offset + count))
    between = [addition for addition in additions_within(total, 0, total) if addition not in local]
    is_aligned = len(set(counts)) == 1 and _is_power_of_two(counts[0]) and _is_power_of_two(len(counts))
    return Layout(offsets, counts, between, is_aligned)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _interleave(chunks: List[Iterator[None]]) -> None:
    """Advance every chunk by one step at a time: one is added while the others are transferred."""
    while chunks:
        chunks = [chunk for chunk in chunks if next(chunk, _DONE) is not _DONE]


_DONE = object()


def _reduce_chunk(
    group: Group, contributions: Sequence[torch.Tensor], within: Schedule, layout: Layout, start: int
) -> Iterator[None]:
    """Reduce the chunk from `start`: within the process, then between processes. Yields after starting transfers."""
    stop = min(start + _CHUNK, contributions[0].numel())
    _add(contributions, within, layout.offsets[group.rank], start, stop)
    if layout.is_aligned:
        yield from _halve_and_double(group, contributions[0], start, stop)
    else:
        yield from _reduce_at_owners(group, contributions, layout, start, stop)


def _halve_and_double(group: Group, total: torch.Tensor, start: int, stop: int) -> Iterator[None]:
    """Reduce total[start:stop] over processes by recursive halving (reduce-scatter) and doubling (allgather).

    Both sides of a pair may add what they receive to what they hold: a+b and b+a have the same bits.
    """
    tag = group.next_tag()
    scratch = _scratch_of(total.dtype, total.numel())
    path: List[Tuple[int, slice, slice, Transfer]] = []
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
        path.append((peer, kept, given, outgoing))
        start, stop = kept.start, kept.stop
        distance *= 2
    for peer, kept, given, outgoing in reversed(path):
        outgoing.wait()
        incoming = group.receive(total[given], peer, tag)
        outgoing = group.send(total[kept], peer, tag)
        yield
        incoming.wait()
        outgoing.wait()


def _reduce_at_owners(
    group: Group, contributions: Sequence[torch.Tensor], layout: Layout, start: int, stop: int
) -> Iterator[None]:
    """Reduce elements start..stop-1 for any placement: process p owns the p-th slice and finishes the tree on it."""
    slices = even_slices(start, stop, group.size)
    own = slices[group.rank]
    parts: Dict[int, torch.Tensor] = {}  # own slice of each remaining partial sum, by node
    nodes = sorted({node for addition in layout.between for node in addition})
    buffers = iter(_chunk_buffers(contributions[0], len(nodes), start, group.size))
    transfers: List[Transfer] = []
    for node in nodes:
        holder, tag = _holder(layout, node), group.next_tag()
        if holder == group.rank:
            partial_sum = contributions[node - layout.offsets[holder]]
            parts[node] = partial_sum[own]
            transfers += [group.send(partial_sum[slices[peer]], peer, tag) for peer in group.peers]
        else:
            parts[node] = next(buffers)[: own.stop - own.start]
            transfers.append(group.receive(parts[node], holder, tag))
    tag = group.next_tag()
    yield
    wait_all(transfers)
    for target, source in layout.between:
        parts[target].add_(parts[source])
    result = contributions[0]
    if group.rank != _holder(layout, 0):
        result[own].copy_(parts[0])
    transfers = [group.receive(result[slices[peer]], peer, tag) for peer in group.peers]
    transfers += [group.send(result[own], peer, tag) for peer in group.peers]
    yield
    wait_all(transfers)


def _holder(layout: Layout, node: int) -> int:
    """Return the process that holds the partial sum whose first leaf is replica `node`."""
    return bisect_right(layout.offsets, node) - 1


def _scratch_of(dtype: torch.dtype, length: int) -> torch.Tensor:
    """Return a buffer of at least `length` elements that is kept between calls; untouched pages take no memory."""
    buffer = _scratch.get(dtype)
    if buffer is None or buffer.numel() < length:
        buffer = _scratch[dtype] = torch.empty(length, dtype=dtype)
    return buffer


def _chunk_buffers(like: torch.Tensor, rows: int, start: int, processes: int) -> torch.Tensor:
    """Return scratch for `rows` slices of the chunk from `start`, [rows, width], distinct from other chunks'."""
    chunks = -(-like.numel() // _CHUNK)
    width = -(-min(_CHUNK, like.numel()) // processes)
    buffer = _scratch_of(like.dtype, chunks * rows * width)[: chunks * rows * width]
    return buffer.view(chunks, rows, width)[start // _CHUNK]


def even_slices(start: int, stop: int, count: int) -> List[slice]:
    """Cut start..stop-1 into `count` slices whose lengths differ by one at most; some may be empty."""
    edges = [start + (stop - start) * index // count for index in range(count + 1)]
    return [slice(low, high) for low, high in zip(edges, edges[1:])]
