"""The user's module and optimizer while a program trains them: the host's copies of weights and optimizer state.

Wrapping a module replaces the classes of its parameters and buffers, so that reading one fetches newer weights from the
device; the objects stay the same, as optimizers and users refer to them. An optimizer reads its state from the program
that it is bound to.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, Iterator, List, Optional, Protocol, Tuple, Type

import torch
from torch.utils._pytree import tree_map

from poptorch.device.compile.memory import original_class
from poptorch.device.execute.calls import check_usable
from poptorch.device.execute.program import Program, TrainingProgram
from poptorch.enums import CommGroupType, MeanReductionStrategy, VariableRetrievalMode
from poptorch.errors import Error
from poptorch.optim import Optimizer
from poptorch.optimizers.hyperparameters import Hyperparameters, decode, encode, extract
from poptorch.options import Options

# Attributes whose value does not depend on the weights.
_METADATA = frozenset(("requires_grad", "is_leaf", "shape", "dtype", "device", "layout", "ndim", "grad_fn", "is_cuda"))


class Executor(Protocol):
    """The part of `PoplarExecutor` that a wrapped module uses."""

    per_replica_params: Dict[str, Any]
    host_classes: List[type]

    @property
    def model(self) -> torch.nn.Module:
        """The user's module."""

    @property
    def options(self) -> Options:
        """The frozen options."""

    def isCompiled(self) -> bool:
        """Return whether the model is compiled."""

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Fetch the weights if the device has newer ones."""

    def destroy(self) -> None:
        """Fetch the weights and unwrap the module."""


class _Groupable:
    """Mixin for parameters that have `replicaGrouping`."""

    def _executor_and_parameter(self) -> Tuple[Executor, Any]:
        raise NotImplementedError

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode = VariableRetrievalMode.OnePerGroup,
    ) -> None:
        """Let groups of replicas have their own values of this parameter, which dimension 0 enumerates.

        Each replica computes with the value of its group, without dimension 0, and the gradients are summed in the
        group. Call it before the compilation, which raises Error if the shape does not fit.

        Args:
            shards: the number of replicas in a group; ignored for `All`, which has no effect, and `NoGrouping`.
            variable_retrieval_mode: whether the host has one value for each group, or for each replica.

        Raises:
            Error: the model is compiled already.
            AssertionError: an argument has another type.
        """
        assert isinstance(comm_group_type, CommGroupType), f"{comm_group_type!r} is not a CommGroupType"
        mode = variable_retrieval_mode
        assert isinstance(mode, VariableRetrievalMode), f"{mode!r} is not a VariableRetrievalMode"
        executor, parameter = self._executor_and_parameter()
        if executor.isCompiled():
            raise Error("replicaGrouping must be called before the model is compiled")
        names = [name for name, each in executor.model.named_parameters() if each is parameter]
        executor.per_replica_params.update(dict.fromkeys(names, (comm_group_type, shards, mode)))


class _HostParameter(_Groupable):
    """Mixin for the class of a host parameter."""

    _poptorch_executor: Executor

    def _executor_and_parameter(self) -> Tuple[Executor, Any]:
        return self._poptorch_executor, self


class GroupedParameter(_Groupable):
    """A parameter of an inference model: has `replicaGrouping`, and all else of the parameter."""

    def __init__(self, parameter: torch.nn.Parameter, executor: Executor) -> None:
        vars(self).update(_parameter=parameter, _executor=executor)

    def _executor_and_parameter(self) -> Tuple[Executor, Any]:
        return self._executor, self._parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._parameter, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._parameter.__reduce_ex__(protocol)  # copies and pickles are plain parameters

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        def parameter(value: Any) -> Any:
            return value._parameter if isinstance(value, cls) else value

        args, kwargs = tree_map(parameter, (args, kwargs or {}))
        return func(*args, **kwargs)


class _HostTensor:
    """Mixin for the class of a host tensor: using the tensor first fetches newer weights from the device."""

    _poptorch_executor: Executor
    _poptorch_original: type

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Tuple[type, ...], args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _reads_metadata(func):
            for kind in types:
                if issubclass(kind, _HostTensor):
                    kind._poptorch_executor.copyWeightsToHostIfNeeded()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        plain = copy.deepcopy(_plain(self), memo)
        memo[id(self)] = plain
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as a plain tensor, so that saved weights load without poptorch.
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _reads_metadata(func: Callable[..., Any]) -> bool:
    descriptor = getattr(func, "__self__", None)
    return getattr(func, "__name__", "") == "__get__" and getattr(descriptor, "__name__", "") in _METADATA


def _plain(tensor: Any) -> torch.Tensor:
    """Return a plain Parameter or Tensor with the same memory."""
    tensor._poptorch_executor.copyWeightsToHostIfNeeded()
    with torch._C.DisableTorchFunctionSubclass():
        values: torch.Tensor = tensor.detach()
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(values, requires_grad=tensor.requires_grad)
        return values


def host_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield all parameters and buffers, each once."""
    yield from model.parameters()
    yield from model.buffers()


def executor_of(kind: type) -> Any:
    """Return the executor of a wrapped class; None for other classes."""
    return getattr(kind, "_poptorch_executor", None)


def wrap(model: torch.nn.Module, executor: Executor) -> None:
    """Replace the classes of the model and its tensors. Raises RuntimeError if any of them is wrapped already."""
    if any(executor_of(type(wrapped)) is not None for wrapped in (model, *host_tensors(model))):
        raise RuntimeError(
            "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on the model to unwrap "
            f"before wrapping again. (It is a {original_class(type(model)).__name__}, or a part of it)"
        )
    classes: Dict[type, type] = {}
    for tensor in list(host_tensors(model)):
        kind = type(tensor)
        if kind not in classes:
            is_parameter = issubclass(kind, torch.nn.Parameter)
            name = "PoptorchParameter" if is_parameter else "PoptorchBuffer"
            bases = (_HostParameter, _HostTensor, kind) if is_parameter else (_HostTensor, kind)
            classes[kind] = _derived(name, bases, executor, kind)
        tensor.__class__ = classes[kind]
    own = type(model)
    model.__class__ = _derived(f"Poptorch{own.__name__}", (_HostModule, own), executor, own)
    executor.host_classes = [*classes.values(), type(model)]


def unwrap(model: torch.nn.Module) -> None:
    """Restore the classes of the model and its tensors."""
    for tensor in list(host_tensors(model)):
        tensor.__class__ = original_class(type(tensor))
    model.__class__ = original_class(type(model))


class _HostModule:
    """Mixin for the class of a wrapped model, which is pickled and copied as an ordinary module."""

    _poptorch_executor: Executor
    _poptorch_original: Type[torch.nn.Module]

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Fetch the weights if the device has newer ones; see `PoplarExecutor`."""
        return self._poptorch_executor.copyWeightsToHostIfNeeded()

    def destroy(self) -> None:
        """Fetch the weights and unwrap the module; see `PoplarExecutor`."""
        self._poptorch_executor.destroy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._poptorch_executor.copyWeightsToHostIfNeeded()
        # Protocol 1 has the class as an argument; from 2 on pickle requires the class of the pickled object.
        return shallow_copy(self).__reduce_ex__(1)


def shallow_copy(model: Any) -> torch.nn.Module:
    """Return a module of the original class with the same attributes, submodules and tensors."""
    plain: torch.nn.Module = object.__new__(original_class(type(model)))
    vars(plain).update(vars(model))
    return plain


def _derived(name: str, bases: Tuple[type, ...], executor: Executor, original: type) -> type:
    attributes = {"_poptorch_executor": executor, "_poptorch_original": original, "__module__": original.__module__}
    return type(name, bases, attributes)


def bind_optimizer(optimizer: torch.optim.Optimizer, program: TrainingProgram) -> None:
    """Make the host's object read its state from this program.

    A state that the object has is uploaded; the attributes are compiled with their present values, not the saved ones.
    """
    if isinstance(optimizer, Optimizer):
        if optimizer._host_is_newer:
            _load_state(optimizer, program)
        optimizer._fetch = lambda: fetch_optimizer(optimizer, program)


def unbind_optimizer(optimizer: Any, program: Program) -> None:
    """Fetch the state for the last time; another program that gets the optimizer continues with it."""
    fetch_optimizer(optimizer, program)
    if isinstance(optimizer, Optimizer):
        optimizer._fetch = None
        optimizer._host_is_newer = optimizer.has_state()


def fetch_optimizer(optimizer: Any, program: Program) -> None:
    """Copy the device's state to the host's object, unless it is an optimizer of torch itself."""
    if isinstance(optimizer, Optimizer) and isinstance(program, TrainingProgram) and not optimizer._host_is_newer:
        check_usable()
        device = program.optimizer
        optimizer._ipu_state, optimizer._ipu_param = device.state(), encode(device.hyperparameters, device.group_names)


def upload_optimizer_if_newer(optimizer: Any, program: Program) -> None:
    """Upload a state that was loaded into the host's object, with the values that it was saved with."""
    if isinstance(optimizer, Optimizer) and isinstance(program, TrainingProgram) and optimizer._host_is_newer:
        program.optimizer.hyperparameters = _load_state(optimizer, program)


def replace_optimizer(old: Any, new: torch.optim.Optimizer, values: Hyperparameters, program: TrainingProgram) -> None:
    """Upload the values of `new`. If it is another object than `old`, bind it; `old` keeps the state so far.

    An object without state does not change the device's state (inferred: the SDK's documentation does not state this).
    """
    device = program.optimizer
    program.check_optimizer(values)
    if new is not old:
        _check_groups(new, program)
        fetch_optimizer(old, program)
        bind_optimizer(new, program)  # raises Error for a state that does not fit
        if isinstance(old, Optimizer):
            old._fetch = None
    upload_optimizer_if_newer(new, program)
    device.hyperparameters = values._replace(variable=device.hyperparameters.variable)


def choose_reduction_strategy(optimizer: torch.optim.Optimizer, options: Options) -> None:
    """Set the options' `MeanReductionStrategy` to Running if the optimizer needs it, although they are frozen."""
    if extract(optimizer).needs_running_mean:
        options._unfreeze()
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)
        options._freeze()


def mark_step(optimizer: Optional[torch.optim.Optimizer]) -> None:
    """Mark the optimizer as stepped for torch's schedulers, as no program calls its `step()`."""
    if optimizer is not None:
        marked: Any = optimizer
        marked._opt_called = True
        marked._step_count = max(1, getattr(marked, "_step_count", 0))


def _load_state(optimizer: Optimizer, program: TrainingProgram) -> Hyperparameters:
    state, values = optimizer._ipu_state, optimizer._ipu_param
    assert state is not None, "the host is newer only after a state was loaded"
    assert values is not None, "ipu_state and ipu_param are loaded together"
    device = program.optimizer
    host: Any = optimizer
    saved = decode(device.hyperparameters, values, device.group_names, extract(host))
    device.load_state(state, saved)
    optimizer._host_is_newer = False
    return saved


def _check_groups(optimizer: torch.optim.Optimizer, program: TrainingProgram) -> None:
    """Raise Error if the model's parameters are in other groups than in the compiled program."""
    given = program.group_names(optimizer)
    # The groups of another copy of the model's parameters are assumed to be the same.
    if any(given) and given != [frozenset(group) for group in program.optimizer.group_names]:
        raise Error(
            "The optimizer has the model's parameters in other groups than the one that the model was compiled with"
        )
