"""Argument checks that several ops share."""

from __future__ import annotations

from typing import Any, List, Tuple

import torch

from poptorch.device_mode import API_DTYPE
from poptorch.errors import Error


class ArgumentError(Error, ValueError):
    """An op does not accept its arguments.

    Both base classes, as in the SDK either Python or the compiler raises the error (inferred: the SDK's documentation
    does not state this).
    """


class Signature(Tuple[Tuple[torch.dtype, Tuple[int, ...]], ...]):
    """Dtypes and shapes of a list of tensors at the API of the device."""

    @classmethod
    def of(cls, tensors: List[torch.Tensor]) -> Signature:
        """Return the signature of these tensors."""
        return cls((API_DTYPE.get(tensor.dtype, tensor.dtype), tuple(tensor.shape)) for tensor in tensors)

    def __str__(self) -> str:
        return ", ".join(f"{str(dtype).replace('torch.', '')} {list(shape)}" for dtype, shape in self) or "no tensors"


def checked_tensor(op: str, name: str, value: Any) -> torch.Tensor:
    """Return `value`; ArgumentError unless it is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"poptorch.{op}: `{name}` must be a tensor, not {type(value).__name__}")
    return value


def checked_int(op: str, name: str, value: Any, minimum: int) -> int:
    """Return `value`; ArgumentError unless it is a Python int of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ArgumentError(f"poptorch.{op}: `{name}` must be a constant int of at least {minimum}, not {value!r}")
    return value


def checked_callable(op: str, name: str, value: Any) -> Any:
    """Return `value`; ArgumentError unless it is callable."""
    if not callable(value):
        raise ArgumentError(f"poptorch.{op}: `{name}` must be a function, not {type(value).__name__}")
    return value
