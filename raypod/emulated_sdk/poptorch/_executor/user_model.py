"""The user's module after wrapping for training (contract 2.1).

Its parameters and buffers are the host's copy of the weights. Their classes change, so that reading one brings over
what the device has trained meanwhile; the objects stay the same, as optimizers and users hold them.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, Iterator, Protocol, Tuple, Type, TypeVar

import torch

from poptorch.enums import CommGroupType, VariableRetrievalMode

# Whether these are read says nothing about values.
_METADATA = frozenset(("requires_grad", "is_leaf", "shape", "dtype", "device", "layout", "ndim", "grad_fn", "is_cuda"))

_Class = TypeVar("_Class", bound=type)


class DeviceCopy(Protocol):
    """Whoever holds the trained weights."""

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Bring the host's copy up to date."""

    def destroy(self) -> None:
        """Fetch the weights and give the module its own class back."""

    def _check_grouping(self, comm_group_type: CommGroupType, shards: int) -> None:
        """Error unless groups of this kind are all replicas, and the model is not compiled yet."""


class _HostParameter:
    """Mixed into the class of a host parameter."""

    _poptorch_device: DeviceCopy

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode = VariableRetrievalMode.OnePerGroup,
    ) -> None:
        """Say which replicas share this parameter, before compilation: here all of them.

        `shards` is the number of replicas in a group, without meaning for `All` and `NoGrouping`. Error for groups that
        are not the whole of the replicas, as the emulated replicas share one copy of the weights; AssertionError for
        values of other types.
        """
        assert isinstance(comm_group_type, CommGroupType), f"{comm_group_type!r} is no CommGroupType"
        assert isinstance(variable_retrieval_mode, VariableRetrievalMode), (
            f"{variable_retrieval_mode!r} is no VariableRetrievalMode"
        )
        self._poptorch_device._check_grouping(comm_group_type, shards)


class _HostTensor:
    """Mixed into the class of a host tensor: using the tensor first fetches what the device has trained."""

    _poptorch_device: DeviceCopy
    _poptorch_original: type

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Tuple[type, ...], args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not _reads_metadata(func):
            for kind in types:
                if issubclass(kind, _HostTensor):
                    kind._poptorch_device.copyWeightsToHostIfNeeded()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        plain = copy.deepcopy(_plain(self), memo)
        memo[id(self)] = plain
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved weights load without poptorch.
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _reads_metadata(func: Callable[..., Any]) -> bool:
    descriptor = getattr(func, "__self__", None)
    return getattr(func, "__name__", "") == "__get__" and getattr(descriptor, "__name__", "") in _METADATA


def _plain(tensor: Any) -> torch.Tensor:
    """The same memory as an ordinary Parameter or Tensor."""
    tensor._poptorch_device.copyWeightsToHostIfNeeded()
    with torch._C.DisableTorchFunctionSubclass():
        values: torch.Tensor = tensor.detach()
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(values, requires_grad=tensor.requires_grad)
        return values


def host_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """All parameters and buffers, each once."""
    yield from model.parameters()
    yield from model.buffers()


def original_class(kind: _Class) -> _Class:
    """The class that wrapping replaced; `kind` itself when it was not wrapped."""
    return getattr(kind, "_poptorch_original", kind)


def device_of(kind: type) -> Any:
    """The executor behind a wrapped class, None for others."""
    return getattr(kind, "_poptorch_device", None)


def wrap(model: torch.nn.Module, device: DeviceCopy) -> None:
    """Change the classes of the model and its tensors. RuntimeError when it, or a part of it, is wrapped already."""
    if any(device_of(type(wrapped)) is not None for wrapped in (model, *host_tensors(model))):
        raise RuntimeError(
            "model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on the model to unwrap "
            f"before wrapping again (a {original_class(type(model)).__name__}, or a part of it)"
        )
    classes: Dict[type, type] = {}
    for tensor in list(host_tensors(model)):
        kind = type(tensor)
        if kind not in classes:
            is_parameter = issubclass(kind, torch.nn.Parameter)
            name = "PoptorchParameter" if is_parameter else "PoptorchBuffer"
            bases = (_HostParameter, _HostTensor, kind) if is_parameter else (_HostTensor, kind)
            classes[kind] = _derived(name, bases, device, kind)
        tensor.__class__ = classes[kind]
    own = type(model)
    model.__class__ = _derived(f"Poptorch{own.__name__}", (_HostModule, own), device, own)


def unwrap(model: torch.nn.Module) -> None:
    """Give the model and its tensors their own classes back."""
    for tensor in list(host_tensors(model)):
        tensor.__class__ = original_class(type(tensor))
    model.__class__ = original_class(type(model))


class _HostModule:
    """Mixed into the class of a wrapped model: it is saved and copied as an ordinary module."""

    _poptorch_device: DeviceCopy
    _poptorch_original: Type[torch.nn.Module]

    def copyWeightsToHostIfNeeded(self) -> bool:
        """As the executor's method."""
        return self._poptorch_device.copyWeightsToHostIfNeeded()

    def destroy(self) -> None:
        """As the executor's method: for a program that holds the module alone."""
        self._poptorch_device.destroy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._poptorch_device.copyWeightsToHostIfNeeded()
        # Protocol 1 names the class as an argument; from 2 on pickle insists on the class of the pickled object.
        return shallow_copy(self).__reduce_ex__(1)


def shallow_copy(model: Any) -> torch.nn.Module:
    """A module of the original class with the same attributes, submodules and tensors."""
    plain: torch.nn.Module = object.__new__(original_class(type(model)))
    vars(plain).update(vars(model))
    return plain


def _derived(name: str, bases: Tuple[type, ...], device: DeviceCopy, original: type) -> type:
    attributes = {"_poptorch_device": device, "_poptorch_original": original, "__module__": original.__module__}
    return type(name, bases, attributes)
