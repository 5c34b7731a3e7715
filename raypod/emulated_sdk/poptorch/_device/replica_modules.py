"""Copies of the user's module for the replicas: shared weights, buffers of their own."""

from __future__ import annotations

import copy
import pickle
import types
from typing import Any, Dict

import torch

from poptorch._executor.user_model import original_class

# What copying an arbitrary Python object may raise: such attributes are shared instead.
_UNCOPYABLE = (TypeError, RuntimeError, AttributeError, ValueError, pickle.PickleError, copy.Error)
_TENSORS = ("_parameters", "_buffers")


def copy_module(root: torch.nn.Module, tensors: Dict[int, torch.Tensor]) -> torch.nn.Module:
    """A copy of `root` in which the tensor with id i is `tensors[i]`.

    Submodules are copied; so are other attributes where Python can copy them, else they are shared.
    """
    memo: Dict[int, Any] = dict(tensors)
    modules = list(root.modules())
    for module in modules:
        memo[id(module)] = object.__new__(original_class(type(module)))
    for module in modules:
        attributes = {name: _copied(name, value, memo) for name, value in vars(module).items()}
        vars(memo[id(module)]).update(attributes)
    copied: torch.nn.Module = memo[id(root)]
    return copied


def _copied(name: str, value: Any, memo: Dict[int, Any]) -> Any:
    if name in _TENSORS or name == "_modules":
        return type(value)((key, memo.get(id(item), item)) for key, item in value.items())
    if name.endswith("_hooks"):
        return type(value)((key, _rebound(hook, memo)) for key, hook in value.items())
    try:
        return copy.deepcopy(value, memo)
    except _UNCOPYABLE:
        return value


def _rebound(hook: Any, memo: Dict[int, Any]) -> Any:
    """A hook that is a method of a copied module becomes the copy's; other hooks are shared."""
    if isinstance(hook, types.MethodType) and id(hook.__self__) in memo:
        return types.MethodType(hook.__func__, memo[id(hook.__self__)])
    return hook
