"""`poptorch._impl`: the internal functions of PopTorch that published programs import."""

from __future__ import annotations

import functools
import weakref
from itertools import chain
from typing import Any, Iterator, List

import torch
from torch.utils.weak import WeakIdKeyDictionary

from poptorch.device.compile.memory import original_class
from poptorch.device_mode import compiling_mode, isRunningOnIpu
from poptorch.errors import Error
from poptorch.torch_operators import internal_cast as _cast
from poptorch.torch_operators import pop_name_scope, push_name_scope

__all__ = [
    "NameScopeHook",
    "createPoptorchError",
    "internal_cast",
    "isDispatchTracing",
    "isRunningOnIpu",
    "isWrapped",
    "rewrapModelIfNecessary",
    "unwrapIfWrapped",
    "unwrapModelIfNecessary",
]

# Weak references, as they refer to the executor, to the class that each unwrapped object had while it was wrapped.
_wrapped_classes: Any = WeakIdKeyDictionary()


def createPoptorchError(msg: str) -> Error:
    """Return a `poptorch.Error` with this message."""
    return Error(msg)


def isDispatchTracing() -> bool:
    """Return whether this thread compiles a model; `device="ipu"` then stands for the device."""
    return compiling_mode() is not None


def isWrapped(obj: Any) -> bool:
    """Return whether `obj` is a module, parameter or buffer that `trainingModel` has wrapped."""
    return original_class(type(obj)) is not type(obj)


def unwrapIfWrapped(obj: Any) -> Any:
    """Restore the original class of a module, parameter or buffer, and return it; its tensors stay wrapped."""
    if isWrapped(obj):
        obj.__class__ = original_class(type(obj))
    return obj


def unwrapModelIfNecessary(model: torch.nn.Module) -> None:
    """Restore the original classes of a module and its tensors until `rewrapModelIfNecessary`.

    Meanwhile reading a parameter does not fetch newer weights from the device, and the module can be wrapped again.
    """
    for each in _objects(model):
        if isWrapped(each):
            _wrapped_classes[each] = weakref.ref(type(each))
            unwrapIfWrapped(each)


def rewrapModelIfNecessary(model: torch.nn.Module) -> None:
    """Wrap a module and its tensors again that `unwrapModelIfNecessary` has unwrapped."""
    for each in _objects(model):
        reference = _wrapped_classes.pop(each, None)
        wrapped_class = reference and reference()
        if wrapped_class is not None:
            each.__class__ = wrapped_class


def _objects(model: torch.nn.Module) -> Iterator[Any]:
    return chain(list(model.buffers()), list(model.parameters()), (model,))


def internal_cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor cast to float or half; ValueError for another dtype."""
    names = {torch.float32: "FLOAT", torch.float16: "FLOAT16"}
    if dtype not in names:
        raise ValueError(f"internal_cast: expected torch.float or torch.half, got {dtype}")
    return _cast(tensor, names[dtype])


class NameScopeHook:
    """Puts each submodule's operators in a scope of its name, by hooks on every submodule of `module`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.hooks: List[Any] = []
        for name, submodule in module.named_modules():
            if name:
                enter = functools.partial(_enter, name.rpartition(".")[2])
                self.hooks += [submodule.register_forward_pre_hook(enter), submodule.register_forward_hook(_exit)]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()


def _enter(name: str, module: torch.nn.Module, inputs: Any) -> None:
    push_name_scope(name)


def _exit(module: torch.nn.Module, inputs: Any, output: Any) -> None:
    pop_name_scope()
