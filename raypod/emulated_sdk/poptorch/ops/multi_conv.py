"""`MultiConv`: convolutions that a device runs in parallel."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Union

import torch
from torch.overrides import TorchFunctionMode

from poptorch.device_mode import compiling_mode
from poptorch.enums import MultiConvPlanType
from poptorch.errors import Error

_PARTIALS = (torch.float32, torch.float16)
_CONVOLUTIONS = frozenset(
    getattr(torch, name)
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
)

_active = threading.local()


class MultiConv:
    """Context manager whose convolutions, none of which feeds another, are planned together.

    Affects the speed of a device, not values. The setters return the object. A setter with a value for each convolution
    takes one value for all, a tuple or list with one value for each, or None for the default.

    Raises:
        AssertionError: values of other types.
        poptorch.Error: a wrong number of values, or no convolution, both at compilation; nested contexts.
    """

    def __init__(self) -> None:
        self._per_convolution: Dict[str, Sequence[Any]] = {}
        self._plan_type: Optional[MultiConvPlanType] = None
        self._reserved_tiles: Optional[int] = None
        self._cycle_back_off: Optional[float] = None

    def availableMemoryProportions(self, value: Union[float, Sequence[float]]) -> MultiConv:
        """Set the share of a tile's memory, in [0, 1], for each convolution."""
        return self._set_each("availableMemoryProportions", value, _is_share, "a float in [0, 1]")

    def partialsTypes(self, value: Union[torch.dtype, Sequence[torch.dtype]]) -> MultiConv:
        """Set the dtype of partial sums of each convolution; ValueError unless torch.float32 or torch.float16."""
        values = value if isinstance(value, (tuple, list)) else [] if value is None else [value]
        for dtype in values:
            if dtype not in _PARTIALS:
                raise ValueError(f"Invalid partials types. Expected torch.float32 or torch.float16, got {dtype!r}")
        return self._set_each("partialsTypes", value, lambda each: each in _PARTIALS, "a torch.dtype")

    def enableConvDithering(self, value: Union[bool, Sequence[bool]]) -> MultiConv:
        """Set whether each convolution is dithered over the tiles."""
        return self._set_each("enableConvDithering", value, lambda each: isinstance(each, bool), "a bool")

    def planType(self, value: Optional[MultiConvPlanType]) -> MultiConv:
        """Set the plan type: Parallel, Serial, or None for the default."""
        is_plan = value is None or isinstance(value, MultiConvPlanType)
        assert is_plan, f"Invalid plan type: expected a poptorch.MultiConvPlanType, got {value!r}"
        self._plan_type = value
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Set the number of tiles reserved for each convolution, at least 0."""
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        assert is_count, f"Invalid per conv reserved tiles: expected an int of at least 0, got {value!r}"
        self._reserved_tiles = value
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        """Set the share of cycles, in [0, 1], by which a plan may exceed the fastest plan."""
        assert _is_share(value), f"Invalid cycle back off: expected a float in [0, 1], got {value!r}"
        self._cycle_back_off = value
        return self

    def __enter__(self) -> MultiConv:
        if getattr(_active, "counter", None) is not None:
            raise Error("Nested poptorch.MultiConv is not supported")
        _active.counter = _ConvolutionCounter() if compiling_mode() is not None else _NoCounter()
        _active.counter.__enter__()
        return self

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        counter, _active.counter = _active.counter, None
        counter.__exit__(type, value, traceback)
        if type is None and isinstance(counter, _ConvolutionCounter):
            self._check(counter.convolutions)

    def _set_each(self, name: str, value: Any, is_valid: Callable[[Any], bool], expected: str) -> MultiConv:
        if value is None:
            self._per_convolution.pop(name, None)
            return self
        values = value if isinstance(value, (tuple, list)) else (value,)
        valid = len(values) > 0 and all(is_valid(each) for each in values)
        assert valid, f"Invalid {name}: expected {expected}, or a tuple or list of them, got {value!r}"
        self._per_convolution[name] = values
        return self

    def _check(self, convolutions: int) -> None:
        if convolutions == 0:
            raise Error("poptorch.MultiConv has no convolution: call at least one inside the context")
        for name, values in self._per_convolution.items():
            if len(values) not in (1, convolutions):
                raise Error(
                    f"poptorch.MultiConv: {name} has {len(values)} values, but there are {convolutions} convolutions: "
                    "pass one value for all, or one for each"
                )


class _NoCounter:
    """Replaces the counter outside compilation."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *exc_info: Any) -> None:
        """Do nothing."""


class _ConvolutionCounter(TorchFunctionMode):
    """Counts the convolutions that a forward calls."""

    convolutions = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        self.convolutions += func in _CONVOLUTIONS
        return func(*args, **(kwargs or {}))


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0.0 <= value <= 1.0
