"""Elements of an asynchronous data set: flatten one into its tensors, and build one from other tensors.

An element is a tensor, a flat tuple, list or dictionary of tensors, or a value of a type with a registered parser.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Sequence, Tuple

import torch

from poptorch.errors import Error
from poptorch.pytree import parser_for, parser_of


@dataclass(frozen=True)
class ElementSpec:
    """The container of an element's tensors. Specs are equal if their elements have the same structure.

    Attributes:
        type: class of the element.
        keys: keys of a dictionary; the length of a tuple or list.
        original: an element of a type with a registered parser, which needs it to build others.
    """

    type: type
    keys: Tuple[Any, ...] = ()
    original: Any = field(default=None, compare=False)

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return an element with these tensors."""
        kind: Any = self.type
        if kind is torch.Tensor:
            return tensors[0]
        parser = parser_for(kind)
        if parser is not None:
            return parser.reconstruct(self.original, iter(tensors))
        if issubclass(kind, dict):
            filled = kind()
            filled.update(zip(self.keys, tensors))
            return filled
        return kind(*tensors) if hasattr(kind, "_fields") else kind(tensors)

    def __str__(self) -> str:
        return f"{self.type.__name__}({', '.join(map(repr, self.keys))})"


_TENSOR = ElementSpec(torch.Tensor)


def flatten_element(element: Any) -> Tuple[List[torch.Tensor], ElementSpec]:
    """Return the tensors of an element, in order, and its spec; Error for any other value."""
    if isinstance(element, torch.Tensor):
        return [element], _TENSOR
    parser = parser_of(element)
    if parser is not None:
        return list(parser.yieldTensors(element)), ElementSpec(type(element), original=element)
    if isinstance(element, dict):
        tensors, spec = list(element.values()), ElementSpec(type(element), tuple(element))
    elif isinstance(element, (tuple, list)):
        tensors, spec = list(element), ElementSpec(type(element), (len(element),))
    else:
        raise Error(_refusal(f"an element is a {type(element).__name__}"))
    for position, value in zip(spec.keys if isinstance(element, dict) else range(len(tensors)), tensors):
        if not isinstance(value, torch.Tensor):
            raise Error(_refusal(f"item {position!r} of a {type(element).__name__} is a {type(value).__name__}"))
    return tensors, spec


def _refusal(what: str) -> str:
    return (
        "Asynchronous loading supports tensors, flat tuples, lists and dictionaries of tensors, and types with a "
        f"registered parser (poptorch.registerCustomArgParser), but {what}: collate to one of those, or use "
        "DataLoaderMode.Sync"
    )
