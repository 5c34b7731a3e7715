"""What an asynchronous data set may yield: a tensor, a flat tuple, list or dictionary of tensors, or a value of a type
with a registered parser (contract 1.9); and how it is rebuilt around other tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Sequence, Tuple

import torch

from poptorch._errors import Error
from poptorch._executor.custom_parsers import parser_for, parser_of


@dataclass(frozen=True)
class ElementKind:
    """What holds the tensors of an element. Two are equal when they hold tensors alike."""

    type: type
    keys: Tuple[Any, ...] = ()
    # A value that a registered parser builds its like from.
    original: Any = field(default=None, compare=False)

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """An element of this kind with these tensors."""
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

    def describe(self) -> str:
        """For messages."""
        return f"{self.type.__name__}({', '.join(map(repr, self.keys))})"


_TENSOR = ElementKind(torch.Tensor)


def take_apart(element: Any) -> Tuple[List[torch.Tensor], ElementKind]:
    """The tensors of an element, in order, and what held them. Error for anything that cannot be loaded so."""
    if isinstance(element, torch.Tensor):
        return [element], _TENSOR
    parser = parser_of(element)
    if parser is not None:
        return list(parser.yieldTensors(element)), ElementKind(type(element), original=element)
    if isinstance(element, dict):
        tensors, kind = list(element.values()), ElementKind(type(element), tuple(element))
    elif isinstance(element, (tuple, list)):
        tensors, kind = list(element), ElementKind(type(element), (len(element),))
    else:
        raise Error(_refusal(f"an element is a {type(element).__name__}"))
    for position, value in zip(kind.keys if isinstance(element, dict) else range(len(tensors)), tensors):
        if not isinstance(value, torch.Tensor):
            raise Error(_refusal(f"item {position!r} of a {type(element).__name__} is a {type(value).__name__}"))
    return tensors, kind


def _refusal(what: str) -> str:
    return (
        "Asynchronous loading takes tensors, flat tuples, lists and dictionaries of tensors, and types with a "
        f"registered parser (poptorch.registerCustomArgParser), but {what}: collate to one of those, or use "
        "DataLoaderMode.Sync"
    )
