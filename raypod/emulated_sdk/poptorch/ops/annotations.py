"""Ops that annotate a forward for the compiler: its losses, and hints; argument checks of all ops.

The hints do not change values. They concern names, memory, recomputation, overlapped I/O, and convolutions that run in
parallel.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch.overrides import TorchFunctionMode

from poptorch.device_mode import API_DTYPE, Overlap, active_mode, compiling_mode
from poptorch.enums import MatMulSerializationMode, MultiConvPlanType, OverlapMode
from poptorch.errors import Error
from poptorch.parallel.tracing import active_recorder
from poptorch.pytree import flatten

_PARTIALS = (torch.float32, torch.float16)
_CONVOLUTIONS = frozenset(
    getattr(torch, name)
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
)

_active = threading.local()  # the `MultiConv` of this thread


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark `x` as a loss, reduced by "sum", "mean" or "none".

    On the host it is the plain differentiable reduction.

    Returns:
        A 0-d tensor for "sum" and "mean", a tensor of the shape of `x` for "none".

    Raises:
        AssertionError: another reduction.
    """
    assert isinstance(reduction, str), f"Unsupported reduction {reduction!r}: use 'sum', 'mean' or 'none'"
    return marked_loss(x, reduction)


def marked_loss(x: torch.Tensor, reduction: Union[int, str]) -> torch.Tensor:
    """As `identity_loss`; also takes the numbers that the operator `torch.ops.poptorch.identity_loss` takes."""
    loss = _reduced(x, reduction)
    mode = active_mode()
    return loss if mode is None else mode.mark(loss)


def _reduced(x: torch.Tensor, reduction: Union[int, str]) -> torch.Tensor:
    if reduction in ("sum", 0):
        return x.sum()
    if reduction in ("mean", 1):
        return x.mean()
    assert reduction in ("none", 2), f"Unsupported reduction {reduction!r}: use 'sum', 'mean' or 'none'"
    return x.clone()


class NameScope:
    """Context manager that names its ops in profiles and debuggers. No effect here: the emulation does not name ops.

    Args:
        name: a string (AssertionError for anything else).
    """

    def __init__(self, name: str) -> None:
        assert isinstance(name, str), f"Parameter to NameScope must be a string, not {type(name).__name__}"
        self.name = name

    def __enter__(self) -> NameScope:
        return self

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        """Do nothing."""


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, by an op that no compiler optimization removes."""
    return checked_tensor("nop", "tensor", tensor).clone()


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Mark tensors to be stored for the backward pass instead of recomputed.

    Affects the estimate of the memory only: the emulation stores all tensors.

    Returns:
        A tensor for one tensor, a tuple for several, and the same type of sequence for a single list or tuple. As in
        the SDK, a list of one tensor gives the list of its rows.
    """
    if len(tensors) == 1:
        if isinstance(tensors[0], (list, tuple)):
            return type(tensors[0])(recomputationCheckpoint(*tensors[0]))
        return _view(tensors[0])
    return tuple(_view(tensor) for tensor in tensors)


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Limit the temporary memory of the op that made `tensor` to a share of a tile's memory. No effect here.

    Args:
        available_memory_proportion: in [0, 1].

    Returns:
        A view of the tensor.

    Raises:
        poptorch.Error and ValueError: other arguments.
    """
    checked_tensor("set_available_memory", "tensor", tensor)
    share = available_memory_proportion
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ArgumentError(f"poptorch.set_available_memory: the proportion must be in [0, 1], not {share!r}")
    return tensor.view_as(tensor)


def serializedMatMul(
    lhs: torch.Tensor, rhs: torch.Tensor, mode: MatMulSerializationMode, factor: int = 0, keep_precision: bool = False
) -> torch.Tensor:
    """Return `torch.matmul(lhs, rhs)`. A device computes it in `factor` parts to save memory, the emulation at once.

    The estimate of the memory counts the operands of one part.

    Args:
        mode: the dimension that is split: InputChannels the rows of `lhs`, ReducingDim the columns of `lhs` and rows
            of `rhs`, OutputChannels the columns of `rhs`, Disabled none.
        factor: number of parts; must divide the size of the dimension.
        keep_precision: add half partial results in float32; always done here.

    Raises:
        AssertionError: arguments of other types.
        poptorch.Error and ValueError: the factor does not divide the dimension.
    """
    is_mode = isinstance(mode, MatMulSerializationMode)
    assert is_mode, f"serializedMatMul: `mode` must be a poptorch.MatMulSerializationMode, not {mode!r}"
    is_count = isinstance(factor, int) and not isinstance(factor, bool)
    assert is_count, f"serializedMatMul: `factor` must be an int, not {factor!r}"
    assert isinstance(keep_precision, bool), (
        f"serializedMatMul: `keep_precision` must be a bool, not {keep_precision!r}"
    )
    recorder = active_recorder()
    if mode == MatMulSerializationMode.Disabled:
        return torch.matmul(lhs, rhs)
    _check_factor(lhs, rhs, mode, factor)
    if recorder is None:
        return torch.matmul(lhs, rhs)
    whole = {MatMulSerializationMode.InputChannels: rhs, MatMulSerializationMode.OutputChannels: lhs}.get(mode)
    with recorder.in_parts(factor, whole):
        return torch.matmul(lhs, rhs)


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Overlap the host-to-device transfer of inputs of the model with compute. Affects time, not values.

    Args:
        input_tensors: a tensor, or tensors nested in tuples, lists and dictionaries; returned unchanged.
        mode: the loop to overlap with (AssertionError for anything else).
    """
    return _request_overlap(input_tensors, mode, is_input=True)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Overlap the device-to-host transfer of outputs of the model with compute. Affects time, not values.

    Args:
        output_tensors: a tensor, or tensors nested in tuples, lists and dictionaries; returned unchanged.
        mode: the loop to overlap with (AssertionError for anything else).
    """
    return _request_overlap(output_tensors, mode, is_input=False)


def check_transfers(
    overlaps: Sequence[Overlap], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Raise Error if an overlap was requested for a tensor that is not an input or output of the model."""
    for overlap in overlaps:
        tensors, what = (inputs, "input") if overlap.is_input else (outputs, "output")
        is_transferred = any(overlap.tensor is tensor for tensor in tensors)
        if overlap.mode != OverlapMode.NoOverlap and not is_transferred:
            raise Error(
                f"poptorch.set_overlap_for_{what} applied on a node which is not a tensor {what} to the model. "
                f"The shape of the tensor is {list(overlap.tensor.shape)}"
            )
        if not overlap.is_input and sum(overlap.tensor is output for output in outputs) > 1:
            raise Error(
                "poptorch.set_overlap_for_output cannot be used with a tensor that is returned twice. Please check all "
                "returned tensors including those nested in tuples/lists."
            )


def _request_overlap(nested: Any, mode: OverlapMode, is_input: bool) -> Any:
    op = f"set_overlap_for_{'input' if is_input else 'output'}"
    assert isinstance(mode, OverlapMode), f"{op}: `mode` must be a poptorch.OverlapMode, not {mode!r}"
    compiling = compiling_mode()
    if compiling is not None:
        tensors: List[torch.Tensor] = flatten(nested)[0]
        compiling.overlaps += [Overlap(tensor, mode, is_input) for tensor in tensors]
    return nested


def _check_factor(lhs: torch.Tensor, rhs: torch.Tensor, mode: MatMulSerializationMode, factor: int) -> None:
    if lhs.dim() < 2 or rhs.dim() < 2:
        raise ArgumentError(
            f"poptorch.serializedMatMul: operands must have at least two dimensions, not {lhs.dim()} and {rhs.dim()}"
        )
    sizes = {
        MatMulSerializationMode.InputChannels: lhs.shape[-2],
        MatMulSerializationMode.ReducingDim: lhs.shape[-1],
        MatMulSerializationMode.OutputChannels: rhs.shape[-1],
    }
    if factor < 1 or sizes[mode] % factor:
        raise ArgumentError(
            f"poptorch.serializedMatMul: invalid serialization factor {factor} for {mode}: it must be at least 1 and "
            f"divide the dimension of size {sizes[mode]}"
        )


def _view(tensor: Any) -> torch.Tensor:
    recorder = active_recorder()
    for observer in recorder.checkpoint_observers if recorder is not None else ():
        observer(checked_tensor("recomputationCheckpoint", "tensors", tensor))
    return checked_tensor("recomputationCheckpoint", "tensors", tensor).view_as(tensor)


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

    def availableMemoryProportions(self, value: Union[float, Sequence[float]]) -> MultiConv:
        """Set the share of a tile's memory, in [0, 1], for each convolution."""
        return self._set_each("availableMemoryProportions", value, _is_share, "a float in [0, 1]")

    def partialsTypes(self, value: Union[torch.dtype, Sequence[torch.dtype]]) -> MultiConv:
        """Set the dtype of partial sums of each convolution; ValueError unless torch.float32 or torch.float16."""
        values = value if isinstance(value, (tuple, list)) else [value]
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
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Set the number of tiles reserved for each convolution, at least 0."""
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        assert is_count, f"Invalid per conv reserved tiles: expected an int of at least 0, got {value!r}"
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        """Set the share of cycles, in [0, 1], by which a plan may exceed the fastest plan."""
        assert _is_share(value), f"Invalid cycle back off: expected a float in [0, 1], got {value!r}"
        return self

    def __enter__(self) -> MultiConv:
        if getattr(_active, "counter", None) is not None:
            raise Error("Nested poptorch.MultiConv is not supported")
        _active.counter = _ConvolutionCounter() if compiling_mode() is not None else contextlib.nullcontext()
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
            raise Error(
                "Unexpected end_multi_conv: poptorch.MultiConv has no convolution. Call at least one in its context"
            )
        for name, values in self._per_convolution.items():
            if len(values) not in (1, convolutions):
                raise Error(
                    f"poptorch.MultiConv: {name} has {len(values)} values, but there are {convolutions} convolutions: "
                    "pass one value for all, or one for each"
                )


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
