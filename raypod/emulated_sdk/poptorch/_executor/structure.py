"""Nested arguments and outputs as flat lists of tensors, and back (contract 2.2).

Tuples, lists, dictionaries and named tuples nest freely; whatever else is no tensor is a constant.
"""

from __future__ import annotations

from typing import Any, Iterator, List, Sequence, Tuple

import torch


class Structure:
    """The shape of one nested value. Two are equal when they nest alike; constants may differ in value."""

    __slots__ = ("children", "constant", "keys", "kind")

    def __init__(self, kind: type, keys: Tuple[Any, ...], children: Tuple[Structure, ...], constant: Any) -> None:
        self.kind = kind
        self.keys = keys
        self.children = children
        self.constant = constant

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        return self.kind is other.kind and self.keys == other.keys and self.children == other.children

    __hash__ = None  # type: ignore[assignment]  # equal only up to constants

    def __repr__(self) -> str:
        if self.kind is torch.Tensor:
            return "tensor"
        if self.kind is _Constant:
            return repr(self.constant)
        inner = ", ".join(map(repr, self.children))
        return f"{self.kind.__name__}({inner})"

    @property
    def is_constant(self) -> bool:
        """Whether this is a value that is no tensor and no container."""
        return self.kind is _Constant

    def constants(self) -> List[Any]:
        """All constants, in order."""
        if self.is_constant:
            return [self.constant]
        return [value for child in self.children for value in child.constants()]

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The nested value with these tensors for leaves and the constants of this structure."""
        return self._rebuild(iter(tensors))

    def _rebuild(self, tensors: Iterator[torch.Tensor]) -> Any:
        kind: Any = self.kind
        if self.kind is torch.Tensor:
            return next(tensors)
        if self.kind is _Constant:
            return self.constant
        values = [child._rebuild(tensors) for child in self.children]
        if issubclass(self.kind, dict):
            # Filled item by item: subclasses of dict differ in what their constructors and methods take.
            filled: Any = kind()
            for key, value in zip(self.keys, values):
                filled[key] = value
            return filled
        if hasattr(self.kind, "_fields"):
            return kind(*values)
        return kind(values)


class _Constant:
    """Marks a constant in a structure."""


def flatten(value: Any) -> Tuple[List[torch.Tensor], Structure]:
    """The tensors of a nested value in order, and its structure."""
    tensors: List[torch.Tensor] = []
    return tensors, _flatten(value, tensors)


def _flatten(value: Any, tensors: List[torch.Tensor]) -> Structure:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _LEAF
    if isinstance(value, dict):
        children = tuple(_flatten(item, tensors) for item in value.values())
        return Structure(type(value), tuple(value), children, None)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return Structure(type(value), (), tuple(_flatten(item, tensors) for item in value), None)
    return Structure(_Constant, (), (), value)


_LEAF = Structure(torch.Tensor, (), (), None)
