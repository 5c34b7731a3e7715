"""The sum of lists of tensors over all replicas: the gradient reduction of the device, once per update.

The additions are those of the tree in `_pod.reduce`. A process first adds its own replicas in place. Equal, aligned
power-of-two blocks on one host then finish the tree in shared memory (`_pod.board`); other placements copy their
tensors into one flat tensor and reduce that over the network.
"""

from __future__ import annotations

from typing import List, MutableMapping, NamedTuple, Optional, Sequence, Tuple
from weakref import WeakKeyDictionary

import torch

from _pod import board, reduce, wires
from _pod.board import Board
from _pod.wires import Group

# Every tensor begins on a cache line of 64 bytes: kernels may round differently for other alignments.
_ALIGNMENT = 64 // 4


class Placement(NamedTuple):
    """The position of the local replicas; all processes hold the same number."""

    local_replicas: int
    process_id: int
    num_processes: int

    @property
    def total_replicas(self) -> int:
        """Replicas of all processes."""
        return self.local_replicas * self.num_processes

    @property
    def first_replica(self) -> int:
        """Global index of the first local replica."""
        return self.local_replicas * self.process_id


class GradientSum:
    """Sums lists of tensors over all replicas of all processes.

    Args:
        like: one replica's tensors, of one floating point dtype; every list has their shapes, and preferably their
            strides.
    """

    def __init__(self, like: Sequence[torch.Tensor], placement: Placement) -> None:
        self._like = list(like)
        self._placement = placement
        self._starts, self._length = _starts(like)
        offset, count = placement.first_replica, placement.local_replicas
        self._within = reduce.additions_within(placement.total_replicas, offset, offset + count)
        self._flats: List[torch.Tensor] = []
        # A board is released with its group.
        self._boards: MutableMapping[Group, Optional[Board]] = WeakKeyDictionary()

    def __call__(self, gradients: Sequence[Sequence[Optional[torch.Tensor]]]) -> List[torch.Tensor]:
        """Return the sums, in the shapes and strides of `like`: read-only, valid until the next call.

        All processes must call in the same order.

        Args:
            gradients: one list per local replica, in replica order; scratch afterwards. None stands for zeros.

        Raises:
            PeerFailed: a peer is lost or does not respond in time.
            RuntimeError: the placements or the lengths of the processes do not match.
        """
        lists = [[self._dense(tensor, index) for index, tensor in enumerate(each)] for each in gradients]
        if self._placement.num_processes == 1 or not self._like:
            self._add_local(lists)
            return lists[0]
        group = self._group()
        if group not in self._boards:
            self._boards[group] = self._open_board(group)
        shared = self._boards[group]
        if shared is None:
            return self._sum_over_network(lists)
        self._add_local(lists)
        in_memory_order = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in lists[0]]
        shared.sum_(group, in_memory_order)
        return self._views(shared.result)

    def abandon(self) -> None:
        """Report to the other processes that this one has failed and contributes no gradients."""
        reason = "a replica of this process failed"
        wires.abandon(reduce.GROUP, self._placement.process_id, self._placement.num_processes, reason)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes, [processes, *shape]; same shape, dtype and order of calls in all.

        Raises:
            PeerFailed: a peer is lost or does not respond in time.
        """
        if self._placement.num_processes == 1:
            return row.unsqueeze(0)
        group = self._group()
        shared = self._boards.get(group)
        return group.gather(row) if shared is None else shared.gather(group, row)

    def disconnect_broken(self) -> None:
        """Close the group if it is broken; the next sum joins a new one."""
        wires.disconnect_broken(reduce.GROUP)

    def uses_board(self) -> bool:
        """Return whether the sums are computed in shared memory."""
        return any(each is not None for each in self._boards.values())

    def _group(self) -> Group:
        return reduce.join(self._placement.process_id, self._placement.num_processes)

    def _dense(self, gradient: Optional[torch.Tensor], index: int) -> torch.Tensor:
        like = self._like[index]
        if gradient is None:
            return torch.zeros_like(like, requires_grad=False)
        if gradient.stride() == like.stride() and gradient.dtype == like.dtype:
            return gradient
        return torch.empty_like(like, requires_grad=False).copy_(gradient)

    def _add_local(self, lists: Sequence[Sequence[torch.Tensor]]) -> None:
        first = self._placement.first_replica
        for target, source in self._within:
            for tensor, other in zip(lists[target - first], lists[source - first]):
                tensor.add_(other)

    def _open_board(self, group: Group) -> Optional[Board]:
        """Exchange the placements, and open a board if all processes can."""
        placement, dtype = self._placement, self._like[0].dtype
        held = [placement.first_replica, placement.local_replicas, placement.total_replicas, self._length]
        rows = group.gather_numbers([*held, *board.capability(group.size, self._length, dtype)])
        layout = reduce.checked_layout([row[:4] for row in rows], placement.total_replicas)
        if not layout.is_aligned or not board.is_possible([row[4:] for row in rows]):
            return None
        lengths = [tensor.numel() for tensor in self._like]
        return board.open_board(group, self._starts, lengths, dtype)

    def _sum_over_network(self, lists: Sequence[Sequence[torch.Tensor]]) -> List[torch.Tensor]:
        if not self._flats:
            self._flats = [torch.zeros(self._length, dtype=self._like[0].dtype) for _ in lists]
        for flat, tensors in zip(self._flats, lists):
            for view, tensor in zip(self._views(flat), tensors):
                view.copy_(tensor)
        placement = self._placement
        reduce.tree_sum_(
            self._flats,
            replica_offset=placement.first_replica,
            total_replicas=placement.total_replicas,
            process_id=placement.process_id,
            num_processes=placement.num_processes,
        )
        return self._views(self._flats[0])

    def _views(self, row: torch.Tensor) -> List[torch.Tensor]:
        # With the strides of the parameters: fused kernels iterate over both.
        return [
            row.as_strided(like.shape, like.stride(), row.storage_offset() + start)
            for like, start in zip(self._like, self._starts)
        ]


def _starts(tensors: Sequence[torch.Tensor]) -> Tuple[List[int], int]:
    """Return where each tensor begins in a flat row, and the length of the row."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = starts[-1] + tensor.numel()
    return starts, end
