"""Flatten nested arguments and outputs into a list of tensors and a `TreeSpec`, and unflatten them again.

Tuples, lists, dictionaries, named tuples and types with a registered `ICustomArgParser` are nodes, tensors are leaves,
and every other value is a constant of the `TreeSpec`.
"""

from __future__ import annotations

import abc
import itertools
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from poptorch.errors import Error


class ICustomArgParser(abc.ABC):
    """Interface that flattens and unflattens the values of one type."""

    @abc.abstractmethod
    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield every tensor of `struct`, always in the same order."""

    @abc.abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Return a value like `original_structure` with the next tensors of the iterator.

        It takes as many tensors as `yieldTensors` yields, in the same order, and must not modify `original_structure`.
        """


_parsers: Dict[type, ICustomArgParser] = {}


def registerCustomArgParser(arg_data_type: type, arg_parser: Optional[ICustomArgParser]) -> None:
    """Register a parser for the arguments and outputs of this type and of its subclasses.

    A later registration of the same type replaces the earlier one; None removes it.

    Raises:
        Error: `arg_data_type` is not a type, or `arg_parser` is not an `ICustomArgParser` object.
    """
    if not isinstance(arg_data_type, type):
        raise Error(f"registerCustomArgParser: the first argument must be a type, not {arg_data_type!r}")
    if arg_parser is None:
        _parsers.pop(arg_data_type, None)
        return
    if not isinstance(arg_parser, ICustomArgParser):
        raise Error(f"The parser of {arg_data_type.__name__} must be an ICustomArgParser object, not {arg_parser!r}")
    _parsers[arg_data_type] = arg_parser


def registered_parsers() -> Dict[type, ICustomArgParser]:
    """Return all registrations, for example to repeat them in another process."""
    return dict(_parsers)


def parser_for(kind: type) -> Optional[ICustomArgParser]:
    """Return the parser registered for this type or its nearest base class; None if there is none."""
    if not _parsers:
        return None
    return next((_parsers[base] for base in kind.__mro__ if base in _parsers), None)


class TreeSpec:
    """The structure of a nested value. Two specs are equal if they nest alike; their constants may differ.

    Attributes:
        kind: the type of the node.
        keys: the keys of a dictionary.
        children: the specs of the items.
        constant: the value of a constant, or the original value of a type with a custom parser.
    """

    __slots__ = ("children", "constant", "keys", "kind")

    def __init__(self, kind: type, keys: Tuple[Any, ...], children: Tuple[TreeSpec, ...], constant: Any) -> None:
        self.kind = kind
        self.keys = keys
        self.children = children
        self.constant = constant

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeSpec):
            return NotImplemented
        return self.kind is other.kind and self.keys == other.keys and self.children == other.children

    __hash__ = None  # type: ignore[assignment]  # equality ignores the constants

    def __repr__(self) -> str:
        if self.kind is torch.Tensor:
            return "tensor"
        if self.kind is _Constant:
            return repr(self.constant)
        inner = ", ".join(map(repr, self.children))
        return f"{self.kind.__name__}({inner})"

    @property
    def is_constant(self) -> bool:
        """Whether this is a constant."""
        return self.kind is _Constant

    @property
    def value_type(self) -> type:
        """The type of the value."""
        return type(self.constant) if self.is_constant else self.kind

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the nested value with these tensors as leaves and the constants of this spec."""
        return self._unflatten(iter(tensors))

    def _unflatten(self, tensors: Iterator[torch.Tensor]) -> Any:
        kind: Any = self.kind
        if self.kind is torch.Tensor:
            return next(tensors)
        if self.kind is _Constant:
            return self.constant
        values = [child._unflatten(tensors) for child in self.children]
        parser = parser_for(self.kind)
        if parser is not None:
            return parser.reconstruct(self.constant, iter(values))
        if issubclass(self.kind, dict):
            # Filled item by item: the constructors of dict subclasses differ.
            filled: Any = kind()
            for key, value in zip(self.keys, values):
                filled[key] = value
            return filled
        if hasattr(self.kind, "_fields"):
            return kind(*values)
        return kind(values)


class _Constant:
    """The `kind` of a constant."""


def flatten(value: Any, like: Optional[TreeSpec] = None) -> Tuple[List[torch.Tensor], TreeSpec]:
    """Return the tensors of a nested value in order, and its `TreeSpec`.

    The items of a dictionary that has the keys of its counterpart in `like` are in the order of the counterpart.
    """
    tensors: List[torch.Tensor] = []
    return tensors, _flatten(value, tensors, _NO_SPEC if like is None else like)


def _flatten(value: Any, tensors: List[torch.Tensor], like: TreeSpec) -> TreeSpec:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _LEAF
    parser = parser_for(type(value))
    if parser is not None:
        return _flatten_with_parser(value, parser, tensors)
    if isinstance(value, dict):
        keys = like.keys if value.keys() == set(like.keys) else tuple(value)
        likes = like.children if keys is like.keys else ()
        items = itertools.zip_longest(keys, likes, fillvalue=_NO_SPEC)
        return TreeSpec(type(value), keys, tuple(_flatten(value[key], tensors, each) for key, each in items), None)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        likes = like.children if len(like.children) == len(value) else ()
        pairs = itertools.zip_longest(value, likes, fillvalue=_NO_SPEC)
        return TreeSpec(type(value), (), tuple(_flatten(item, tensors, each) for item, each in pairs), None)
    _reject_tensor_attributes(value)
    return TreeSpec(_Constant, (), (), value)


def _flatten_with_parser(value: Any, parser: ICustomArgParser, tensors: List[torch.Tensor]) -> TreeSpec:
    found = list(parser.yieldTensors(value))
    others = [item for item in found if not isinstance(item, torch.Tensor)]
    if others:
        raise Error(
            f"{type(parser).__name__}.yieldTensors yielded a {type(others[0]).__name__} for a "
            f"{type(value).__name__}: it must yield tensors only"
        )
    tensors += found
    return TreeSpec(type(value), (), (_LEAF,) * len(found), value)


def _reject_tensor_attributes(value: Any) -> None:
    """Raise Error for an object with tensors in its attributes: as a constant they would not reach the device."""
    if any(isinstance(item, torch.Tensor) for item in getattr(value, "__dict__", {}).values()):
        if isinstance(value, (torch.nn.Module, type)):
            return
        raise Error(
            f"A {type(value).__name__} has tensor attributes, but no parser is registered for its type: call "
            f"poptorch.registerCustomArgParser({type(value).__name__}, parser), or pass the tensors themselves"
        )


_LEAF = TreeSpec(torch.Tensor, (), (), None)
_NO_SPEC = TreeSpec(_Constant, (), (), None)


def flatten_element(element: Any) -> Tuple[List[torch.Tensor], TreeSpec]:
    """Return the tensors of an element of an asynchronous data set, in order, and its spec; Error for any other value.

    An element is flat: a tensor, a tuple, list or dictionary of tensors, or a value of a type with a registered parser.
    """
    parser = parser_for(type(element))
    if isinstance(element, torch.Tensor):
        return [element], _LEAF
    if parser is not None:
        tensors = list(parser.yieldTensors(element))
        return tensors, TreeSpec(type(element), (), (_LEAF,) * len(tensors), element)
    if not isinstance(element, (dict, tuple, list)):
        raise Error(_not_an_element(f"an element is a {type(element).__name__}"))
    items = element if isinstance(element, dict) else dict(enumerate(element))
    for position, value in items.items():
        if not isinstance(value, torch.Tensor):
            raise Error(_not_an_element(f"item {position!r} of a {type(element).__name__} is a {type(value).__name__}"))
    keys = tuple(element) if isinstance(element, dict) else ()
    return list(items.values()), TreeSpec(type(element), keys, (_LEAF,) * len(items), None)


def described_element(spec: TreeSpec) -> str:
    """Return the type of an element, and the keys of a dictionary or the length of a tuple or list."""
    has_keys = issubclass(spec.kind, (dict, torch.Tensor)) or spec.constant is not None
    keys = spec.keys if has_keys else (len(spec.children),)
    return f"{spec.kind.__name__}({', '.join(map(repr, keys))})"


def _not_an_element(what: str) -> str:
    return (
        "Asynchronous loading supports tensors, flat tuples, lists and dictionaries of tensors, and types with a "
        f"registered parser (poptorch.registerCustomArgParser), but {what}: collate to one of those, or use "
        "DataLoaderMode.Sync"
    )
