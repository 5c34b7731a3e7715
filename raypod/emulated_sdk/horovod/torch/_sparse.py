"""Sparse gradients: the rows of all ranks are gathered.

A rank without a gradient contributes none. It need not know whether the gradients of the others are sparse.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from _pod.wires import Group

from horovod.common.exceptions import HorovodInternalError
from horovod.torch import _operations as operations
from horovod.torch._checks import REDUCED, check_tensors, checked_op
from horovod.torch._collectives import Allgather
from horovod.torch._engine import submit, synchronize
from horovod.torch._operations import ReduceOp
from horovod.torch._process_sets import ProcessSet, engine_of, global_process_set

_KEY = "allreduce"  # of a dense gradient, also for a sparse one: the operation of a rank without a gradient meets both


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to sum a sparse tensor over all ranks; return the function that waits and returns the sum, uncoalesced.

    The indices and values of all ranks are gathered, whose numbers may differ; with Average the values are divided by
    the number of ranks. Other reductions are HorovodInternalError.
    """
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise HorovodInternalError(f"sparse tensors are reduced by Average or Sum only, not {ReduceOp(op).name}")
    rows = [tensor._indices().t().contiguous(), tensor._values().contiguous()]
    handle = Allgather(_KEY, name, process_set).submit(rows)
    return lambda: _sum(synchronize(handle), tensor.shape, op, process_set)


def absent_allreduce_async_(
    zeros: torch.Tensor,
    name: str,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start the part of a rank without a gradient in its reduction; return the handle.

    The result is the reduction in the layout of the other ranks' gradients: `zeros`, changed in place, or a new sparse
    tensor.
    """
    check_tensors([zeros], REDUCED)
    reduction, factors = checked_op(op), (prescale_factor, postscale_factor)

    def result(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0] if len(tensors) == 1 else _sum(tensors, zeros.shape, op, process_set)

    return submit(
        engine_of(process_set, _KEY), _KEY, name, lambda key: _Absent(key, [zeros], [zeros], reduction, factors), result
    )


class _Absent(operations.Allreduce):
    """An allreduce of zeros, or the allgather of no rows that the engine has described instead."""

    def __init__(
        self,
        key: str,
        inputs: operations.Tensors,
        outputs: operations.Tensors,
        op: ReduceOp,
        factors: operations.Factors,
    ) -> None:
        super().__init__(key, inputs, outputs, op, factors)
        self.description = self.description._replace(own=[0])  # see `Description.is_absent`

    def run(self, group: Group) -> None:
        """See the class."""
        if self.description.kind == self.kind:
            super().run(group)
            return
        tensors = self.description.tensors
        gather = operations.Allgather(
            self.description.key, [torch.empty(0, *shape[1:], dtype=getattr(torch, dtype)) for dtype, shape in tensors]
        )
        gather.owns = self.owns
        gather.run(group)
        self.result = gather.result


def _sum(gathered: Any, shape: torch.Size, op: int, process_set: ProcessSet) -> torch.Tensor:
    indices, values = gathered
    if op == ReduceOp.Average:
        values = values / process_set.size()
    return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False)
