"""`DistributedOptimizer`: an optimizer whose gradients are reduced over all ranks, for training on the host.

The device reduces the gradients of IPU programs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import torch

from horovod.torch._basics import ProcessSet, global_process_set, size
from horovod.torch._collectives import absent_allreduce_async_
from horovod.torch._operations import reject_adasum
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import (
    Average,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)

_Parameters = Tuple[torch.Tensor, ...]


class _Pending(NamedTuple):
    """The reduction of a group of gradients in progress, and the context of each tensor for decompression."""

    wait: Callable[[], Sequence[torch.Tensor]]
    contexts: Sequence[Any]


class _Settings(NamedTuple):
    compression: Any
    op: int
    gradient_predivide_factor: float
    groups: Any
    sparse_as_dense: bool
    process_set: ProcessSet


class _DistributedOptimizer(torch.optim.Optimizer):
    """Mixin of the user's optimizer class. The reduction of a gradient starts when `backward` has computed it."""

    _local_class: Any  # the class of the user's optimizer

    def _distribute(
        self, named: List[Tuple[str, torch.Tensor]], backward_passes_per_step: int, settings: _Settings
    ) -> None:
        self._parameter_names = {parameter: name for name, parameter in named}
        self._settings = settings
        self.op, self.process_set = settings.op, settings.process_set
        self.gradient_predivide_factor = settings.gradient_predivide_factor
        self.sparse_as_dense = settings.sparse_as_dense
        self._pending: Dict[int, _Pending] = {}  # by group
        self._is_synchronized, self._must_synchronize = False, True
        self._groups: List[_Parameters] = []
        self._group_of: Dict[torch.Tensor, int] = {}
        self._accumulators: List[Any] = []  # a hook exists as long as its gradient accumulator
        if size() > 1 and self.process_set.included():
            trained = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
            self._groups = _grouped(trained, self._parameter_names, settings)
            for number, members in enumerate(self._groups):
                self._group_of.update(dict.fromkeys(members, number))
            for parameter in trained:
                self._register_hook(parameter)
        self.set_backward_passes_per_step(backward_passes_per_step)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes whose gradients are accumulated before the reduction."""
        if passes != passes:
            raise ValueError("backward_passes_per_step is NaN")
        self.backward_passes_per_step = passes
        self._passes_left: Dict[torch.Tensor, int] = dict.fromkeys(self._parameter_names, passes)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load the user's optimizer, and discard the gradients accumulated so far."""
        self._pending = {}
        self._is_synchronized, self._must_synchronize = False, True
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        self._local_class.load_state_dict(self, *args, **kwargs)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. A rank without a gradient contributes zeros, to a sparse one no rows.

        Use it with `skip_synchronize` to read or clip the reduced gradients before `step`.
        """
        for number in range(len(self._groups)):
            if number not in self._pending:
                self._start(number)
        for number, pending in self._pending.items():
            for parameter, result, context in zip(self._groups[number], pending.wait(), pending.contexts):
                self._passes_left[parameter] = self.backward_passes_per_step
                reduced = self._settings.compression.decompress(result, context)
                assert parameter.grad is not None, "`_start` sets it"
                if parameter.grad.is_sparse or reduced.is_sparse:
                    parameter.grad = reduced if reduced.is_sparse else reduced.to_sparse()
                else:
                    parameter.grad.data = reduced
        self._pending.clear()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` use the gradients as they are, after `synchronize`."""
        self._must_synchronize = False
        try:
            yield
        finally:
            self._must_synchronize = True

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Reduce the gradients and take the step of the user's optimizer."""
        if self._must_synchronize:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after"
                    " optimizer.synchronize(). This can cause training slowdown. You may want to consider using"
                    " optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return self._local_class.step(self, closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients; AssertionError while reductions are in progress."""
        if self._pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or"
                " optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        self._local_class.zero_grad(self, *args, **kwargs)

    def _register_hook(self, parameter: torch.Tensor) -> None:
        """Call `_on_gradient` after each accumulation into the gradient (torch 2.0 has no simpler hook)."""
        view: Any = parameter.expand_as(parameter)
        accumulator = view.grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *_: self._on_gradient(parameter))
        self._accumulators.append(accumulator)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase"
                " backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[parameter] -= 1
        number = self._group_of[parameter]
        if all(self._passes_left[member] == 0 for member in self._groups[number]):
            self._start(number)

    def _start(self, number: int) -> None:
        """Start the reduction of a group of gradients."""
        members, settings = self._groups[number], self._settings
        is_absent = members[0].grad is None and not settings.sparse_as_dense
        gradients = [self._gradient(member) for member in members]
        name = self._parameter_names[members[0]]
        common: Any = {"name": name, "op": settings.op, "process_set": settings.process_set}
        if settings.groups is None and gradients[0].is_sparse:
            wait = sparse_allreduce_async(gradients[0], **common)
            self._pending[number] = _Pending(lambda: [wait()], [None])
            return
        packed = [settings.compression.compress(gradient) for gradient in gradients]
        tensors, contexts = [tensor for tensor, _ in packed], [context for _, context in packed]
        if settings.groups is not None:  # As Horovod, which does not predivide groups.
            handle = grouped_allreduce_async_(tensors, **common)
            self._pending[number] = _Pending(lambda: synchronize(handle), contexts)
            return
        factor = settings.gradient_predivide_factor
        common.update(prescale_factor=1.0 / factor, postscale_factor=factor)
        start = absent_allreduce_async_ if is_absent else allreduce_async_
        handle = start(tensors[0], **common)
        self._pending[number] = _Pending(lambda: [synchronize(handle)], contexts)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor to reduce, zeros if there is no gradient; ValueError for a sparse one in a group."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if not parameter.grad.is_sparse:
            return parameter.grad.contiguous()
        if self._settings.sparse_as_dense:
            return parameter.grad.to_dense()
        if self._settings.groups is not None:
            raise ValueError(
                f"Tensor type {parameter.grad.type()} is not supported in groups of gradients:"
                f" {self._parameter_names[parameter]} has a sparse gradient. Specify sparse_as_dense=True."
            )
        return parameter.grad


def DistributedOptimizer(  # noqa: PLR0913  # Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Union[None, int, List[List[torch.Tensor]]] = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the optimizer with gradients reduced by `op` over all ranks before each step. The class keeps its name.

    As in Horovod, the state of the optimizer, as of momentum or `broadcast_optimizer_state`, is not taken over.

    Args:
        named_parameters: (name, parameter) pairs for all parameters, usually `model.named_parameters()`; the names must
            be unique, and the same on all ranks. By default "allreduce.noname.<group>.<index>".
        backward_passes_per_step: number of backward passes whose gradients are accumulated before the reduction.
        gradient_predivide_factor: with Average, divide by it before the sum, and multiply by it afterwards.
        groups: the number of groups of gradients that are reduced together, or the groups themselves.
        sparse_as_dense: reduce sparse gradients as dense ones; otherwise their indices and values are gathered. Horovod
            then waits forever if a rank has no gradient; here that rank contributes no rows. Groups need it.
        process_set: the ranks whose gradients are reduced. On other ranks the optimizer is local.

    Raises:
        NotImplementedError: Adasum.
        ValueError: another argument is invalid. In `backward`: a sparse gradient in a group, without `sparse_as_dense`.
    """
    reject_adasum(op)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    _check_groups(groups)
    local_class: Any = type(optimizer)
    distributed: Any = type(local_class.__name__, (_DistributedOptimizer, local_class), {"_local_class": local_class})
    wrapped = distributed.__new__(distributed)
    # As in Horovod: the groups of parameters are those of the optimizer, the defaults those of its class, no state.
    local_class.__init__(wrapped, optimizer.param_groups)
    named = _checked_names(optimizer, named_parameters)
    settings = _Settings(compression, op, gradient_predivide_factor, groups, sparse_as_dense, process_set)
    wrapped._distribute(named, backward_passes_per_step, settings)
    return wrapped


def _checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]]
) -> List[Tuple[str, torch.Tensor]]:
    in_groups = [
        (f"allreduce.noname.{number}.{index}", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    ]
    named = in_groups if named_parameters is None else list(named_parameters)
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by"
            " model.named_parameters()."
        )
    duplicates = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(map(str, duplicates))}"
        )
    ids = {id(parameter) for _, parameter in named}
    unnamed = [f"{name} {list(each.shape)}" for name, each in in_groups if id(each) not in ids]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: by group and index"
            f" {', '.join(unnamed)}"
        )
    return named


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    if isinstance(groups, list):
        if any(torch.is_tensor(members) for members in groups):
            raise ValueError("groups must consist of lists of torch.Tensor.")
        grouped: Set[int] = set()
        for parameter in [each for members in groups for each in members]:
            if not torch.is_tensor(parameter):
                raise ValueError("groups must consist of torch.Tensor.")
            if id(parameter) in grouped:
                raise ValueError("A parameter can only appear once in groups.")
            grouped.add(id(parameter))


def _grouped(trained: List[torch.Tensor], names: Dict[torch.Tensor, str], settings: _Settings) -> List[_Parameters]:
    """Return the groups of parameters that are reduced together, in root's order; by default one per parameter."""
    groups, process_set = settings.groups, settings.process_set
    if groups is None:
        return [(parameter,) for parameter in trained]
    root = (process_set.ranks or [0])[0]
    order = broadcast_object([names[parameter] for parameter in trained], root, "order of parameters", process_set)
    trained = sorted(trained, key=lambda parameter: order.index(names[parameter]))
    if isinstance(groups, int):
        edges = [len(trained) * number // groups for number in range(groups + 1)]
        members = [tuple(trained[low:high]) for low, high in zip(edges, edges[1:])]
    else:
        ids = {id(parameter) for parameter in trained}
        members = [tuple(each for each in group if id(each) in ids) for group in groups]
        grouped = {id(each) for group in members for each in group}
        members += [(parameter,) for parameter in trained if id(parameter) not in grouped]
    return [group for group in members if group]
