"""The sum of all replicas' gradients, tensor by tensor, update after update: over GCL on a pod (contract section 1.5).

The additions are those of the one tree in `_emulated_gcl`. A process first adds up its own replicas where their
gradients lie. Equal, aligned power-of-two blocks on one host then finish the tree on a board in shared memory; others
put their gradients side by side and send them over the wires.
"""

from __future__ import annotations

from typing import List, MutableMapping, NamedTuple, Optional, Sequence, Tuple
from weakref import WeakKeyDictionary

import _emulated_gcl
import _emulated_pod
import _emulated_shared_memory
import torch
from _emulated_pod import Group
from _emulated_shared_memory import Board

# Every tensor begins on a cache line, as tensors of their own do: kernels may round differently elsewhere.
_ALIGNMENT = 64 // 4


class Placement(NamedTuple):
    """Where the local replicas stand among all; every process has as many."""

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

    like: one replica's tensors, of one floating point dtype; every list has their shapes, and preferably their strides.
    """

    def __init__(self, like: Sequence[torch.Tensor], placement: Placement) -> None:
        self._like = list(like)
        self._placement = placement
        self._starts, self._length = _starts(like)
        offset, count = placement.first_replica, placement.local_replicas
        self._within = _emulated_gcl.additions_within(placement.total_replicas, offset, offset + count)
        self._flats: List[torch.Tensor] = []
        # They end with their group, and so do the boards.
        self._boards: MutableMapping[Group, Optional[Board]] = WeakKeyDictionary()

    def __call__(self, gradients: Sequence[Sequence[Optional[torch.Tensor]]]) -> List[torch.Tensor]:
        """The sums, in the shapes and strides of `like`: valid, and not to be written to, until the next call.

        gradients: one list per local replica, in replica order; scratch afterwards; None stands for zeros. All
        processes must call in the same order. RuntimeError if the processes do not fit together, or if a peer is lost
        or silent (see `_emulated_pod`).
        """
        lists = [[self._dense(tensor, index) for index, tensor in enumerate(each)] for each in gradients]
        placement = self._placement
        if placement.num_processes == 1 or not self._like:
            self._add_local(lists)
            return lists[0]
        group = _emulated_gcl.join(placement.process_id, placement.num_processes)
        if group not in self._boards:
            self._boards[group] = self._agree(group)
        board = self._boards[group]
        if board is None:
            return self._sum_on_wires(lists)
        self._add_local(lists)
        board.sum_(group, [_flat(tensor) for tensor in lists[0]])
        return self._views(board.result)

    def abandon(self) -> None:
        """Tell the other processes that this one has failed: they wait for its gradients in vain."""
        placement = self._placement
        reason = "a replica of this process failed"
        _emulated_pod.abandon(_emulated_gcl.GROUP, placement.process_id, placement.num_processes, reason)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Every process's tensor of one shape and dtype, [processes, *shape]; called in the same order by all.

        RuntimeError if a peer is lost or silent.
        """
        if self._placement.num_processes == 1:
            return row.unsqueeze(0)
        return _emulated_gcl.join(self._placement.process_id, self._placement.num_processes).gather(row)

    def let_go(self) -> None:
        """Leave the wires if they are broken; the next sum joins new ones."""
        _emulated_pod.disconnect_broken(_emulated_gcl.GROUP)

    def uses_board(self) -> bool:
        """Whether the last sums lie in shared memory."""
        return any(board is not None for board in self._boards.values())

    def _dense(self, gradient: Optional[torch.Tensor], index: int) -> torch.Tensor:
        like = self._like[index]
        if gradient is None:
            return torch.zeros_like(like, requires_grad=False)
        if gradient.stride() == like.stride() and gradient.dtype == like.dtype:
            return gradient
        return torch.empty_like(like, requires_grad=False).copy_(gradient)

    def _add_local(self, lists: Sequence[Sequence[torch.Tensor]]) -> None:
        first = self._placement.first_replica
        for to, source in self._within:
            for mine, other in zip(lists[to - first], lists[source - first]):
                mine.add_(other)

    def _agree(self, group: Group) -> Optional[Board]:
        """Tell each other who holds what, and open a board if all can."""
        placement, dtype = self._placement, self._like[0].dtype
        held = [placement.first_replica, placement.local_replicas, placement.total_replicas, self._length]
        told = group.gather_numbers([*held, *_emulated_shared_memory.offer(group.size, self._length, dtype)])
        layout = _emulated_gcl.checked_layout([row[:4] for row in told], placement.total_replicas)
        if not layout.is_aligned or not _emulated_shared_memory.is_wanted([row[4:] for row in told]):
            return None
        lengths = [tensor.numel() for tensor in self._like]
        return _emulated_shared_memory.open_board(group, self._starts, lengths, dtype)

    def _sum_on_wires(self, lists: Sequence[Sequence[torch.Tensor]]) -> List[torch.Tensor]:
        if not self._flats:
            self._flats = [torch.zeros(self._length, dtype=self._like[0].dtype) for _ in lists]
        for flat, tensors in zip(self._flats, lists):
            for place, tensor in zip(self._views(flat), tensors):
                place.copy_(tensor)
        placement = self._placement
        _emulated_gcl.tree_sum_(
            self._flats,
            replica_offset=placement.first_replica,
            total_replicas=placement.total_replicas,
            process_id=placement.process_id,
            num_processes=placement.num_processes,
        )
        return self._views(self._flats[0])

    def _views(self, row: torch.Tensor) -> List[torch.Tensor]:
        # With the strides of the parameters: fused kernels walk through both side by side.
        return [
            row.as_strided(like.shape, like.stride(), row.storage_offset() + start)
            for like, start in zip(self._like, self._starts)
        ]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _starts(tensors: Sequence[torch.Tensor]) -> Tuple[List[int], int]:
    """Where each tensor begins in a row, and where the last one ends."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = starts[-1] + tensor.numel()
    return starts, end
