"""Types of arguments and outputs that a program teaches us to take apart (contract 2.6: `registerCustomArgParser`)."""

from __future__ import annotations

import abc
from typing import Any, Dict, Iterator, Optional

import torch

from poptorch._errors import Error


class ICustomArgParser(abc.ABC):
    """Tells which tensors a value of some type holds, and builds a like value around other tensors."""

    @abc.abstractmethod
    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield every tensor of `struct`, always in the same order."""

    @abc.abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """A value like `original_structure`, which must stay as it is, with the next tensors of the iterator.

        It takes as many tensors as `yieldTensors` yields, in that order.
        """


_parsers: Dict[type, ICustomArgParser] = {}


def registerCustomArgParser(arg_data_type: type, arg_parser: ICustomArgParser) -> None:
    """Let values of this type, and of types derived from it, be arguments and outputs of wrapped models.

    The last registration of a type counts. Error unless given a type and an `ICustomArgParser` object.
    """
    if not isinstance(arg_data_type, type):
        raise Error(f"registerCustomArgParser takes a type first, not {arg_data_type!r}")
    if not isinstance(arg_parser, ICustomArgParser):
        raise Error(f"The parser of {arg_data_type.__name__} must be an ICustomArgParser, not {arg_parser!r}")
    _parsers[arg_data_type] = arg_parser


def registered() -> Dict[type, ICustomArgParser]:
    """All registrations, for a process that is to have the same."""
    return dict(_parsers)


def parser_of(value: Any) -> Optional[ICustomArgParser]:
    """The parser registered for the type of a value, or for the nearest of its base types; None without one."""
    return parser_for(type(value))


def parser_for(kind: type) -> Optional[ICustomArgParser]:
    """The parser of values of this type."""
    if not _parsers:
        return None
    return next((_parsers[base] for base in kind.__mro__ if base in _parsers), None)
