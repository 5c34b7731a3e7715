"""`MultiConv`: convolutions that a device runs side by side (contract 2.6)."""

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

_open = threading.local()


class MultiConv:
    """Context: the convolutions within, none of which feeds another, are planned together.

    It changes the speed of a device, never values. The setters return the object; those that take a value for each
    convolution take one value for all, a tuple or list with as many as there are convolutions, or None for the default.
    AssertionError for values of other types; Error, when a model is compiled, for a wrong number of values and for no
    convolution.
    """

    def __init__(self) -> None:
        self._per_convolution: Dict[str, Sequence[Any]] = {}
        self._plan_type: Optional[MultiConvPlanType] = None
        self._reserved_tiles: Optional[int] = None
        self._cycle_back_off: Optional[float] = None

    def availableMemoryProportions(self, value: Union[float, Sequence[float]]) -> MultiConv:
        """Share of a tile's memory, in [0, 1], for each convolution."""
        return self._set_each("availableMemoryProportions", value, _is_share, "a float in [0, 1]")

    def partialsTypes(self, value: Union[torch.dtype, Sequence[torch.dtype]]) -> MultiConv:
        """Type of the partial sums of each convolution; ValueError unless torch.float32 or torch.float16."""
        values = value if isinstance(value, (tuple, list)) else [] if value is None else [value]
        for dtype in values:
            if dtype not in _PARTIALS:
                raise ValueError(f"Invalid partials types. Expected torch.float32 or torch.float16, got {dtype!r}")
        return self._set_each("partialsTypes", value, lambda each: each in _PARTIALS, "a torch.dtype")

    def enableConvDithering(self, value: Union[bool, Sequence[bool]]) -> MultiConv:
        """Whether each convolution is dithered over the tiles."""
        return self._set_each("enableConvDithering", value, lambda each: isinstance(each, bool), "a bool")

    def planType(self, value: Optional[MultiConvPlanType]) -> MultiConv:
        """Parallel or Serial; None for the default."""
        is_plan = value is None or isinstance(value, MultiConvPlanType)
        assert is_plan, f"Invalid plan type: a poptorch.MultiConvPlanType is needed, not {value!r}"
        self._plan_type = value
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Tiles reserved for each convolution, at least 0."""
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        assert is_count, f"Invalid per conv reserved tiles: an int of at least 0 is needed, not {value!r}"
        self._reserved_tiles = value
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        """Share of cycles, in [0, 1], that a plan may cost more than the fastest."""
        assert _is_share(value), f"Invalid cycle back off: a float in [0, 1] is needed, not {value!r}"
        self._cycle_back_off = value
        return self

    def __enter__(self) -> MultiConv:
        if getattr(_open, "counter", None) is not None:
            raise Error("Nested poptorch.MultiConv is not supported: it cannot be nested in another one")
        _open.counter = _ConvolutionCounter() if compiling_mode() is not None else _NoCounter()
        _open.counter.__enter__()
        return self

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        counter, _open.counter = _open.counter, None
        counter.__exit__(type, value, traceback)
        if type is None and isinstance(counter, _ConvolutionCounter):
            self._check(counter.convolutions)

    def _set_each(self, name: str, value: Any, is_valid: Callable[[Any], bool], expected: str) -> MultiConv:
        if value is None:
            self._per_convolution.pop(name, None)
            return self
        values = value if isinstance(value, (tuple, list)) else (value,)
        valid = len(values) > 0 and all(is_valid(each) for each in values)
        assert valid, f"Invalid {name}: {expected} is needed, or a tuple or list of them, not {value!r}"
        self._per_convolution[name] = values
        return self

    def _check(self, convolutions: int) -> None:
        if convolutions == 0:
            raise Error("poptorch.MultiConv holds no convolution")
        for name, values in self._per_convolution.items():
            if len(values) not in (1, convolutions):
                raise Error(
                    f"poptorch.MultiConv: {name} has {len(values)} values, but there are {convolutions} convolutions: "
                    "give one value for all, or one for each"
                )


class _NoCounter:
    """Stands for the counter where no model is compiled."""

    def __enter__(self) -> None:
        """Nothing to count."""

    def __exit__(self, *exc_info: Any) -> None:
        """Nothing was counted."""


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
