"""Which tensors of a forward would be half on a device (contract 5).

The emulated device computes in float32. While compiling, this follows what would have been half: half with half stays
half, half with float32 gives float32. A program that looks at dtypes is told those; later forwards then follow, too.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Set, Tuple

import torch
from torch.overrides import TorchFunctionMode

_TO_FLOAT = (torch.Tensor.float, torch.Tensor.double, torch.Tensor.bfloat16)
_CONVERSIONS = (*_TO_FLOAT, torch.Tensor.half, torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as)
_GET_DTYPE: Any = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_QUESTIONS: Dict[Any, Any] = {_GET_DTYPE: torch.half, torch.Tensor.type: "torch.HalfTensor"}
_QUESTIONS[torch.Tensor.element_size] = 2
_LIKE_OTHER = (torch.Tensor.to, torch.Tensor.type_as)


class HalfTracker(TorchFunctionMode):
    """Active during the forward of a compilation, and during all where the program looks at dtypes.

    Entered after the `DeviceMode`, so that it sees what the user wrote.

    Attributes:
        was_asked: whether the program looked at the dtype of a tensor that would be half.
    """

    def __init__(self, half_tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.was_asked = False
        # Holding the tensors keeps their ids from being given out again.
        self._held: List[torch.Tensor] = list(half_tensors)
        self._half: Set[int] = {id(tensor) for tensor in self._held}

    def is_half(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor would have been half."""
        return id(tensor) in self._half

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS and self.is_half(args[0]) and len(args) == 1 and not kwargs:
            self.was_asked = True
            return _QUESTIONS[func]
        result = func(*args, **kwargs)
        if args and result is args[0]:
            if func not in _CONVERSIONS:
                return result  # in place: as it was
            result = result.view_as(result)  # in float32 nothing was converted, but in half it is another tensor
        if self._gives_half(func, args, kwargs):
            for tensor in _tensors(result):
                self._held.append(tensor)
                self._half.add(id(tensor))
        return result

    def _gives_half(self, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
        asked = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        if func is torch.Tensor.half or asked:
            return not asked or asked[-1] == torch.half
        if func in _TO_FLOAT:
            return False
        operands = list(_tensors((args, kwargs)))
        if func in _LIKE_OTHER:
            operands = operands[-1:]
        return bool(operands) and all(map(self.is_half, operands))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The floating point tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
