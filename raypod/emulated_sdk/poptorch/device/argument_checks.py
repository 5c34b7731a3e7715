"""Checks the arguments of a call against the compiled ones: structure, constants, dtypes and shapes."""

from __future__ import annotations

from typing import Any, Iterator, Sequence, Tuple

import torch

from poptorch.errors import Error
from poptorch.pytree import TreeSpec

_HINT = (
    "The arguments are fixed when the model is compiled, by its first call: drop the last short batch of an epoch, or, "
    "for other arguments, wrap the model again or call destroy()"
)


Description = Tuple[torch.dtype, torch.Size]  # of a tensor; the SDK tells int64 from int32, which are one on the device


def check_arguments(
    compiled: TreeSpec, given: TreeSpec, names: Sequence[str], tensors: Iterator[Tuple[Description, Description]]
) -> None:
    """Raise Error at the first difference.

    Args:
        compiled: the spec of (positional arguments, named arguments) that the model was compiled for.
        given: the spec of the call; its dictionaries are in the order of `compiled` where they have the same keys.
        names: the names of the positional arguments of the call.
        tensors: for each tensor, what the model was compiled for, and what is given.
    """
    expected, found = compiled.children[0].children, given.children[0].children
    if len(expected) != len(found):
        raise _mismatch("Number of positional arguments", "", f"{len(expected)} arguments", len(found))
    for name, one, other in zip(names, expected, found):
        _check(name, one, other, tensors)
    named, given_named = compiled.children[1], given.children[1]
    _check_keys("named arguments", named, given_named)
    for name, one, other in zip(named.keys, named.children, given_named.children):
        _check(name, one, other, tensors)


def _check(name: str, compiled: TreeSpec, given: TreeSpec, tensors: Iterator[Tuple[Description, Description]]) -> None:
    if compiled.value_type is not given.value_type:
        raise _mismatch("Type", name, compiled.value_type, given.value_type)
    if compiled.value_type is torch.Tensor:
        one, other = next(tensors)
        if one != other:
            what, index = ("Data type", 0) if one[0] != other[0] else ("Shape", 1)
            raise _mismatch(what, name, one[index], other[index])
        return
    if compiled.is_constant:
        if not _is_same(compiled.constant, given.constant):
            raise _mismatch("Value", name, repr(compiled.constant), repr(given.constant))
        return
    if issubclass(compiled.value_type, dict):
        _check_keys(name, compiled, given)
    if len(compiled.children) != len(given.children):
        raise _mismatch("Length", name, f"{len(compiled.children)} elements", len(given.children))
    labels = compiled.keys or range(len(compiled.children))
    for label, one_child, other_child in zip(labels, compiled.children, given.children):
        _check(f"{name}[{label}]", one_child, other_child, tensors)


def _check_keys(name: str, compiled: TreeSpec, given: TreeSpec) -> None:
    expected, found = set(compiled.keys), set(given.keys)
    details = [
        f"{what}: {', '.join(sorted(map(str, keys)))}"
        for what, keys in (("Unexpected arguments", found - expected), ("Missing arguments", expected - found))
        if keys
    ]
    if details:
        raise Error(f"Keys mismatch for {name}: {'. '.join(details)}. {_HINT}")


def _is_same(compiled: Any, value: Any) -> bool:
    """Return whether two constants are equal; different objects that cannot be compared are not."""
    if compiled is value:
        return True
    if getattr(compiled, "shape", None) != getattr(value, "shape", None):  # arrays are compared with broadcasting
        return False
    try:
        equal = compiled == value
        return bool(equal.all()) if hasattr(equal, "all") else bool(equal)  # arrays compare item by item
    except (TypeError, ValueError, RuntimeError):
        return False


def _mismatch(what: str, name: str, expected: Any, found: Any) -> Error:
    of = f" for {name}" if name else ""
    return Error(f"{what} mismatch{of}: expected {expected} but got {found}. {_HINT}")
