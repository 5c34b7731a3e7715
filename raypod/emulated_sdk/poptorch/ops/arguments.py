"""The error of an op that refuses its arguments, and the checks that several ops share."""

from __future__ import annotations

from typing import Any, List, Tuple

import torch

from poptorch.device_mode import API_DTYPE
from poptorch.errors import Error


class ArgumentError(Error, ValueError):
    """An op refuses its arguments.

    The SDK raises the one or the other, depending on whether its Python or its compiler notices [inferred]: programs
    that expect either are served.
    """


class Signature(Tuple[Tuple[torch.dtype, Tuple[int, ...]], ...]):
    """Dtypes and shapes of a list of tensors, as the device sees them: comparable, and readable in a message."""

    @classmethod
    def of(cls, tensors: List[torch.Tensor]) -> Signature:
        """That of these tensors."""
        return cls((API_DTYPE.get(tensor.dtype, tensor.dtype), tuple(tensor.shape)) for tensor in tensors)

    def __str__(self) -> str:
        return ", ".join(f"{str(dtype).replace('torch.', '')} {list(shape)}" for dtype, shape in self) or "nothing"


def checked_tensor(op: str, name: str, value: Any) -> torch.Tensor:
    """`value`; ArgumentError unless it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"poptorch.{op}: `{name}` is a tensor, not {type(value).__name__}")
    return value


def checked_int(op: str, name: str, value: Any, least: int) -> int:
    """`value`; ArgumentError unless it is a Python int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"poptorch.{op}: `{name}` is a constant int of at least {least}, not {value!r}")
    return value


def checked_callable(op: str, name: str, value: Any) -> Any:
    """`value`; ArgumentError unless it can be called."""
    if not callable(value):
        raise ArgumentError(f"poptorch.{op}: `{name}` is a function, not {type(value).__name__}")
    return value
