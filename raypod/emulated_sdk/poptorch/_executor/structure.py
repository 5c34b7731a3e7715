"""Nested arguments and outputs as flat lists of tensors, and back (contract 2.2).

Tuples, lists, dictionaries, named tuples and types with a custom parser nest freely; whatever else is no tensor is a
constant.
"""

from __future__ import annotations

from typing import Any, Iterator, List, Sequence, Tuple

import torch

from poptorch._errors import Error
from poptorch._executor.custom_parsers import ICustomArgParser, parser_for, parser_of


class Structure:
    """The shape of one nested value. Two are equal when they nest alike; constants may differ in value.

    `constant` is the value of a constant, and the value itself of a type with a custom parser: its tensors are the
    children, and only the parser knows what else belongs to it.
    """

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
        parser = parser_for(self.kind)
        if parser is not None:
            return parser.reconstruct(self.constant, iter(values))
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
    parser = parser_of(value)
    if parser is not None:
        return _parsed(value, parser, tensors)
    if isinstance(value, dict):
        children = tuple(_flatten(item, tensors) for item in value.values())
        return Structure(type(value), tuple(value), children, None)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return Structure(type(value), (), tuple(_flatten(item, tensors) for item in value), None)
    _refuse_hidden_tensors(value)
    return Structure(_Constant, (), (), value)


def _parsed(value: Any, parser: ICustomArgParser, tensors: List[torch.Tensor]) -> Structure:
    found = list(parser.yieldTensors(value))
    strangers = [item for item in found if not isinstance(item, torch.Tensor)]
    if strangers:
        raise Error(
            f"{type(parser).__name__}.yieldTensors yielded a {type(strangers[0]).__name__} for a "
            f"{type(value).__name__}: it must yield tensors only"
        )
    tensors += found
    return Structure(type(value), (), (_LEAF,) * len(found), value)


def _refuse_hidden_tensors(value: Any) -> None:
    """Error for an object with tensors in it: as a constant it would never reach the device."""
    if any(isinstance(item, torch.Tensor) for item in getattr(value, "__dict__", {}).values()):
        if isinstance(value, (torch.nn.Module, type)):
            return
        raise Error(
            f"A {type(value).__name__} holds tensors, but the device does not know how to take it apart: call "
            f"poptorch.registerCustomArgParser({type(value).__name__}, parser), or pass the tensors themselves"
        )


_LEAF = Structure(torch.Tensor, (), (), None)
