"""The five collectives: arguments and gradients of each, and the function that makes all their variants.

Each collective is one class; `collective_function` derives the synchronous, asynchronous, in-place and grouped
functions from it, with Horovod's signatures.

Operations are matched by name, in whatever order the ranks submit them; unnamed ones are numbered. All functions raise
ValueError for unsupported tensors and for a name in use, NotImplementedError for what is not emulated, and
HorovodInternalError before `init`, if the ranks disagree, and if a rank is lost or does not respond.
"""

from __future__ import annotations

import inspect
from operator import itemgetter
from typing import Any, Callable, FrozenSet, List, Optional, Sequence, Tuple, Type

import torch
from _pod.wires import Group

from horovod.common.exceptions import HorovodInternalError
from horovod.torch import _operations as operations
from horovod.torch._engine import submit, synchronize
from horovod.torch._operations import (
    MOVED,
    REDUCED,
    ReduceOp,
    Tensors,
    check_tensors,
    checked_compression,
    checked_factor,
    checked_op,
    checked_root,
    checked_splits,
    chosen_op,
)
from horovod.torch._process_sets import ProcessSet, engine_of, global_process_set
from horovod.torch.compression import Compression

_Make = Callable[[str], operations.Operation]


class Collective:
    """One call of a collective: its arguments, its submission and its gradient.

    The parameters of `__init__` after `kind` are those of the public functions after the tensors; the docstring of the
    class is theirs.

    Args:
        kind: "allreduce" or "grouped_allreduce": part of the operation's key, and used in errors.
    """

    operation = ""
    dtypes: FrozenSet[torch.dtype] = MOVED
    needs_rows = False

    def __init__(self, kind: str, name: Optional[str], process_set: Any, compression: Any = None) -> None:
        self.kind, self.name, self.process_set, self.compression = kind, name, process_set, compression
        self.returns_tuple = kind != self.operation  # of one result per tensor

    def submit(self, inputs: Tensors, outputs: Optional[Tensors] = None) -> int:
        """Check the arguments, submit the operation and return its handle; `outputs` None: new tensors."""
        engine = engine_of(self.process_set, self.operation)
        check_tensors(inputs, self.dtypes, self.kind if self.needs_rows else "")
        make = self.make(inputs, outputs, engine.ranks)
        return submit(engine, self.kind, self.name, make, tuple if self.returns_tuple else itemgetter(0))

    def make(self, inputs: Tensors, outputs: Optional[Tensors], ranks: List[int]) -> _Make:
        """Check the arguments further, and return the constructor of the operation from its key.

        `ranks` are those of the process set.
        """
        raise NotImplementedError

    def backward(self, gradients: Tensors) -> Tensors:
        """Return the gradients of the inputs, from those of the results."""
        raise NotImplementedError

    def run(self, tensors: Tensors) -> Any:
        """Run the collective into new tensors and return them; gradients flow through the results."""
        if self.compression is None:
            return _apply(self, tensors)
        packed = [self.compression.compress(tensor) for tensor in tensors]
        results = _apply(self, [tensor for tensor, _ in packed])
        return [self.compression.decompress(result, context) for result, (_, context) in zip(results, packed)]

    def unpack(self, results: Any) -> Any:
        """Return what the synchronous function returns."""
        return results if self.returns_tuple else results[0]


class Allreduce(Collective):
    """Reduce tensors of the same shape and dtype over all ranks by `op` (default Average).

    The result has the same bits on all ranks. The tensors are contiguous, of any shape, and int32, int64, float16,
    float32 or float64; the Average of integers is rounded towards zero. The factors multiply before and after the
    reduction. Gradients are reduced like the values.
    """

    operation = "allreduce"
    dtypes = REDUCED

    def __init__(
        self,
        kind: str,
        average: Optional[bool] = None,
        name: Optional[str] = None,
        compression: Any = Compression.none,
        op: Optional[int] = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Any = global_process_set,
    ) -> None:
        super().__init__(kind, name, process_set, checked_compression(compression))
        self.op, self.factors = chosen_op(op, average), _factors(prescale_factor, postscale_factor)

    def make(self, inputs: Tensors, outputs: Optional[Tensors], ranks: List[int]) -> _Make:
        op = checked_op(self.op)
        outputs = [torch.empty_like(tensor) for tensor in inputs] if outputs is None else outputs
        return lambda key: operations.Allreduce(key, inputs, outputs, op, self.factors)

    def backward(self, gradients: Tensors) -> Tensors:
        call = Allreduce(self.kind, None, None, Compression.none, self.op, *self.factors, self.process_set)
        return list(call.run(gradients))


class Allgather(Collective):
    """Concatenate the tensors of all ranks, [n_rank, ...], to [sum of n_rank, ...], by rank.

    The first dimension may differ between ranks; dtype and other dimensions must not. A 0-d tensor
    raises IndexError (ValueError in the asynchronous functions). Each rank's gradient is the mean of all ranks'
    gradients of its rows.
    """

    operation = "allgather"
    needs_rows = True

    def __init__(self, kind: str, name: Optional[str] = None, process_set: Any = global_process_set) -> None:
        super().__init__(kind, name, process_set)

    def make(self, inputs: Tensors, outputs: Optional[Tensors], ranks: List[int]) -> _Make:
        self.lengths = [tensor.shape[0] for tensor in inputs]
        return lambda key: operations.Allgather(key, inputs)

    def run(self, tensors: Tensors) -> Any:
        if not all(tensor.dim() for tensor in tensors):
            raise IndexError(f"{self.kind} concatenates the first dimensions; a 0-d tensor has none: use reshape(1)")
        return super().run(tensors)

    def backward(self, gradients: Tensors) -> Tensors:
        means = Allreduce("grouped_allreduce", process_set=self.process_set).run(gradients)
        (lengths,) = Allgather("allgather", process_set=self.process_set).run([torch.tensor([self.lengths])])
        starts = lengths[: self.process_set.rank()].sum(dim=0).tolist()
        return [mean.narrow(0, *rows) for mean, *rows in zip(means, starts, self.lengths)]


class Broadcast(Collective):
    """Copy root's tensor bit by bit; shape and dtype must be the same on all ranks, and not bool or bfloat16.

    Root's gradient is the mean of all ranks' gradients, the others' are zero.
    """

    operation = "broadcast"

    def __init__(
        self, kind: str, root_rank: int, name: Optional[str] = None, process_set: Any = global_process_set
    ) -> None:
        super().__init__(kind, name, process_set)
        self.root_rank = root_rank

    def make(self, inputs: Tensors, outputs: Optional[Tensors], ranks: List[int]) -> _Make:
        root = checked_root(self.root_rank, ranks)
        outputs = [torch.empty_like(tensor) for tensor in inputs] if outputs is None else outputs
        return lambda key: operations.Broadcast(key, inputs, outputs, root)

    def backward(self, gradients: Tensors) -> Tensors:
        means = Allreduce("allreduce", process_set=self.process_set).run(gradients)
        ranks = engine_of(self.process_set, self.operation).ranks
        is_root = ranks[self.process_set.rank()] == self.root_rank
        return means if is_root else [torch.zeros_like(mean) for mean in means]


class Alltoall(Collective):
    """Send splits[r] rows of the tensor to each rank r, in order, and concatenate the rows from all ranks, by rank.

    Without `splits` (a list or an int32 tensor) every rank gets the same number of rows. With `splits`, and always
    from `alltoall_async`, the result is a pair: the rows, and the number of rows from each rank, int32
    [size]. Gradients flow back to the rows' ranks; rows that were not sent have gradient zero.
    """

    operation = "alltoall"
    needs_rows = True

    def __init__(
        self, kind: str, splits: Any = None, name: Optional[str] = None, process_set: Any = global_process_set
    ) -> None:
        super().__init__(kind, name, process_set)
        self.returns_tuple = True  # of rows and their number
        self.splits = splits

    def make(self, inputs: Tensors, outputs: Optional[Tensors], ranks: List[int]) -> _Make:
        (tensor,) = inputs
        self.rows, splits = tensor.shape[0], checked_splits(tensor, self.splits, len(ranks))
        return lambda key: operations.Alltoall(key, tensor, splits)

    def run(self, tensors: Tensors) -> Any:
        results = super().run(tensors)
        self.received = results[1]
        return results

    def backward(self, gradients: Tensors) -> Tensors:
        returned = Alltoall(self.kind, self.received, process_set=self.process_set).run(gradients[:1])[0]
        unsent = returned.new_zeros(self.rows - returned.shape[0], *returned.shape[1:])
        return [torch.cat([returned, unsent])]

    def unpack(self, results: Any) -> Any:
        return results[0] if self.splits is None else results


class Reducescatter(Collective):
    """Reduce the tensors over all ranks by Average or Sum, and return this rank's rows of the result.

    The rows are distributed evenly; the first ranks get one more if needed. The factors multiply before and after the
    reduction, and also multiply the gradients, which are gathered from all ranks.
    """

    operation = "reducescatter"
    dtypes = REDUCED
    needs_rows = True

    def __init__(
        self,
        kind: str,
        name: Optional[str] = None,
        compression: Any = Compression.none,
        op: int = ReduceOp.Average,
        process_set: Any = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> None:
        super().__init__(kind, name, process_set, checked_compression(compression))
        self.op, self.factors = op, _factors(prescale_factor, postscale_factor)

    def make(self, inputs: Tensors, outputs: Optional[Tensors], ranks: List[int]) -> _Make:
        op = checked_op(self.op)
        if op not in (ReduceOp.Average, ReduceOp.Sum):
            raise HorovodInternalError(f"Reducescatter currently only supports AVERAGE and SUM; got {op.name}")
        return lambda key: operations.Reducescatter(key, inputs, op, self.factors)

    def backward(self, gradients: Tensors) -> Tensors:
        factor = self.factors[0] * self.factors[1] * (self.process_set.size() if self.op == ReduceOp.Sum else 1)
        gather = Allgather("grouped_allgather", process_set=self.process_set)
        return list(gather.run([gradient * factor for gradient in gradients]))


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Collective, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        results = synchronize(call.submit(tensors))
        return results if isinstance(results, tuple) else (results,)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # Gradients are often expanded scalars, and Horovod takes contiguous tensors.
        return (None, *ctx.call.backward([gradient.contiguous() for gradient in gradients]))


def _apply(call: Collective, tensors: Tensors) -> Any:
    apply: Any = _Differentiable.apply  # untyped in torch 2.13
    return apply(call, *tensors)


_NOTES = {
    "grouped": "Takes several tensors, of any shapes and dtypes, with one transfer per dtype.",
    "in_place": "Overwrites the input, which is also the result; no gradient flows.",
    "asynchronous": (
        "Returns a handle at once; `synchronize` waits and returns the result (a tuple if there are several tensors).\n"
        "The tensors must not change until then. No gradient flows."
    ),
}


def collective_function(
    call_type: Type[Collective], *, grouped: bool = False, in_place: bool = False, asynchronous: bool = False
) -> Callable[..., Any]:
    """Return the public function for one variant of a collective, with name, signature and docstring."""
    kind = f"grouped_{call_type.operation}" if grouped else call_type.operation
    first = "tensors" if grouped else "tensor"
    _, *parameters = inspect.signature(call_type).parameters.values()
    if in_place or asynchronous:
        parameters = [parameter for parameter in parameters if parameter.name != "compression"]
    annotation = "Sequence[torch.Tensor]" if grouped else "torch.Tensor"
    tensor = inspect.Parameter(first, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)
    signature = inspect.Signature([tensor, *parameters])
    names = list(signature.parameters)
    required = {each.name for each in signature.parameters.values() if each.default is inspect.Parameter.empty}

    def function(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args), **kwargs)
        if len(arguments) < len(args) + len(kwargs) or not required <= arguments.keys() <= signature.parameters.keys():
            signature.bind(*args, **kwargs)  # raises TypeError; too slow for every call
        given = arguments.pop(first)
        tensors = _checked_group(given, kind) if grouped else [given]
        call = call_type(kind, **arguments)
        if not in_place and not asynchronous:
            return call.unpack(call.run(tensors))
        handle = call.submit(tensors, tensors if in_place else None)
        return handle if asynchronous else synchronize(handle)

    public: Any = function
    public.__name__ = public.__qualname__ = kind + "_async" * asynchronous + "_" * in_place
    public.__module__ = "horovod.torch.mpi_ops"
    public.__signature__ = signature
    flags = {"grouped": grouped, "in_place": in_place, "asynchronous": asynchronous}
    notes = "\n\n".join(_NOTES[flag] for flag, is_set in flags.items() if is_set)
    public.__doc__ = f"{inspect.cleandoc(call_type.__doc__ or '')}\n\n{notes}".rstrip()
    return function


def _checked_group(tensors: Any, kind: str) -> Tensors:
    """Return the tensors; TypeError for another type than a list or tuple, ValueError if there is none."""
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"{kind} takes a list or tuple of tensors, got a {type(tensors).__name__}")
    if not tensors:
        raise ValueError(f"{kind} needs at least one tensor")
    return tensors


def _factors(prescale_factor: Any, postscale_factor: Any) -> Tuple[float, float]:
    return checked_factor(prescale_factor, "prescale_factor"), checked_factor(postscale_factor, "postscale_factor")


def broadcast_all(tensors: Tensors, names: Sequence[str], root_rank: int) -> int:
    """Submit a broadcast of several tensors, in place, as one operation; the names must agree too."""
    engine = engine_of(global_process_set, "broadcast")
    check_tensors(tensors, MOVED)
    root = checked_root(root_rank, engine.ranks)
    return submit(
        engine, "broadcast_parameters", None, lambda key: operations.Broadcast(key, tensors, tensors, root, names)
    )


_KEY = "allreduce"  # of a dense gradient, also for a sparse one: the operation of a rank without a gradient meets both


def sparse_allreduce_async(
    tensor: torch.Tensor, name: Any, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to sum a sparse tensor over all ranks; return the function that waits and returns the sum, uncoalesced.

    `name` is of any type: its text is the name, "None" for None.
    The indices and values of all ranks are gathered, whose numbers may differ; with Average the values are divided by
    the number of ranks. Other reductions are HorovodInternalError.
    """
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise HorovodInternalError(f"sparse tensors are reduced by Average or Sum only, not {ReduceOp(op).name}")
    rows = [tensor._indices().t().contiguous(), tensor._values().contiguous()]
    handle = Allgather(_KEY, str(name), process_set).submit(rows)
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

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.description = self.description._replace(own=[0])  # see `Description.is_absent`

    def run(self, group: Group) -> None:
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
