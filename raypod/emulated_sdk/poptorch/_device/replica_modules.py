"""Copies of the user's module for the replicas: shared weights, buffers of their own."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from typing import Any, Dict

import torch

from poptorch._executor.user_model import original_class

# What copying an arbitrary Python object may raise: such attributes are shared instead.
_UNCOPYABLE = (TypeError, RuntimeError, AttributeError, ValueError, pickle.PickleError, copy.Error)
_TENSORS = ("_parameters", "_buffers")


def copy_module(root: torch.nn.Module, tensors: Dict[int, torch.Tensor], known_as: torch.nn.Module) -> torch.nn.Module:
    """A copy of `root`, which others know as `known_as`, in which the tensor with id i is `tensors[i]`.

    Submodules are copied; so are other attributes where Python can copy them, else they are shared. Methods, closures
    and hooks that refer to what was copied refer to the copies.
    """
    memo: Dict[int, Any] = dict(tensors)
    modules = list(root.modules())
    for module in modules:
        memo[id(module)] = object.__new__(original_class(type(module)))
    memo[id(known_as)] = memo[id(root)]
    memo.update({id(copied): copied for copied in memo.values()})  # once rebound, nothing is copied again
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
    value = _rebound(value, memo)
    try:
        return copy.deepcopy(value, memo)
    except _UNCOPYABLE:
        return value


def _rebound(value: Any, memo: Dict[int, Any]) -> Any:
    """A method, a function or a container of such that refers to something copied, made to refer to the copy.

    Whatever does not is returned as it is. Python's own deep copies take functions for constants.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType):
        function, owner = _rebound(value.__func__, memo), _rebound(value.__self__, memo)
        is_same = function is value.__func__ and owner is value.__self__
        return value if is_same else types.MethodType(function, owner)
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _rebound_function(value, memo)
    if isinstance(value, functools.partial):
        return _rebound_partial(value, memo)
    if type(value) in (list, tuple):
        items = [_rebound(item, memo) for item in value]
        return value if all(new is old for new, old in zip(items, value)) else type(value)(items)
    if type(value) is dict:
        rebound = {key: _rebound(item, memo) for key, item in value.items()}
        return value if all(rebound[key] is item for key, item in value.items()) else rebound
    return value


def _rebound_function(function: types.FunctionType, memo: Dict[int, Any]) -> Any:
    memo[id(function)] = function  # a function that refers to itself ends here
    cells = [_rebound_cell(cell, memo) for cell in function.__closure__ or ()]
    if all(new is old for new, old in zip(cells, function.__closure__ or ())):
        return function
    rebound = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    rebound.__kwdefaults__ = function.__kwdefaults__
    vars(rebound).update(vars(function))
    memo[id(function)] = rebound
    return rebound


def _rebound_cell(cell: Any, memo: Dict[int, Any]) -> Any:
    try:
        content = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    rebound = _rebound(content, memo)
    return cell if rebound is content else types.CellType(rebound)


def _rebound_partial(value: Any, memo: Dict[int, Any]) -> Any:
    function, args = _rebound(value.func, memo), _rebound(value.args, memo)
    return functools.partial(function, *args, **_rebound(value.keywords, memo))
