"""The differences between torch on the host and a forward on the device: losses, dtypes, moving averages.

`DeviceMode` intercepts every torch function that a forward calls. It marks losses, replaces dtypes that the device does
not have by those that it computes in and the host's weights by the device's, and raises Error if a tensor is moved off
the device. As this costs time, later forwards use `OnDevice` instead if compilation replaced nothing and found the loss
among the outputs.

Of a parameter that is the moving average of another, forward requests an update, and the weight update makes it. PopART
moves such an update out of the accumulation, so it happens once per weight update.
"""

from __future__ import annotations

import contextlib
import threading
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily

from poptorch.enums import OverlapMode
from poptorch.errors import Error

# The dtype of a tensor at the API, for inputs and outputs.
API_DTYPE: Dict[torch.dtype, torch.dtype] = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.bfloat16: torch.float32,
}

# The dtype of the same tensor on the emulated device. 32-bit integers are stored in 64 bits, as torch's losses and
# indexing take nothing else.
DEVICE_DTYPE: Dict[torch.dtype, torch.dtype] = {
    torch.bfloat16: torch.float32,
    torch.float64: torch.float32,
    torch.int32: torch.int64,
}

_Handler = Callable[["DeviceMode", Callable[..., Any], Tuple[Any, ...], Dict[str, Any]], Any]

_active = threading.local()

_LOSS_NAMES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)


# Functions of layers: PopTorch casts their weights to the dtype of the input.
_LAYER_NAMES = (
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "group_norm",
    "gru",
    "gru_cell",
    "layer_norm",
    "linear",
    "lstm",
    "lstm_cell",
    "multi_head_attention_forward",
    "prelu",
    "rms_norm",
    "rnn_relu",
    "rnn_relu_cell",
    "rnn_tanh",
    "rnn_tanh_cell",
)


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the device's dtype that shares no memory with the given tensor."""
    # A copy even where a view would do: vectorized kernels may round differently with another alignment.
    return tensor.detach().to(DEVICE_DTYPE.get(tensor.dtype, tensor.dtype), copy=True)


def from_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a forward has computed in `off_device`, as a tensor of the device."""
    # The compilation takes the result of this call for one; the device's memory is the host's.
    return torch.as_tensor(tensor, device="cpu")


def is_on_device() -> bool:
    """Return whether this thread runs a forward on the device."""
    return getattr(_active, "is_on_device", False)


def is_in_host_layer() -> bool:
    """Return whether this thread runs a layer on the host that a forward on the device has called."""
    return getattr(_active, "is_in_host_layer", False)


def isRunningOnIpu() -> bool:
    """Return whether the caller runs inside the forward of a wrapped model."""
    return is_on_device()


def active_mode() -> Optional[DeviceMode]:
    """Return the `DeviceMode` of this thread's forward; None if there is none."""
    return getattr(_active, "mode", None)


def compiling_mode() -> Optional[DeviceMode]:
    """Return the `DeviceMode` of this thread's forward if it is the forward of a compilation, else None."""
    mode = active_mode()
    return mode if mode is not None and mode.is_compiling else None


@contextlib.contextmanager
def off_device() -> Iterator[None]:
    """Context in which this thread runs on the host: `DeviceMode` and the modes above it are inactive."""
    mode, was_on_device = active_mode(), is_on_device()
    _active.mode, _active.is_on_device, _active.is_in_host_layer = None, False, was_on_device
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    above = len(stack) - next((index for index, each in enumerate(stack) if each is mode), len(stack))
    try:
        with contextlib.ExitStack() as popped:
            for _ in range(above):
                popped.enter_context(_pop_mode_temporarily())
            yield
    finally:
        _active.mode, _active.is_on_device, _active.is_in_host_layer = mode, was_on_device, False


@contextlib.contextmanager
def caller_modes_disabled() -> Iterator[None]:
    """Context without the modes of the caller's thread, which replicas in other threads would not have.

    An autocast in a forward caches no casts: torch's cache is one for all threads, and ends with the outermost
    autocast, which is this one, so that it would have weights before their update.
    """
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False, cache_enabled=False):
        yield


class Overlap(NamedTuple):
    """A request to overlap the transfer of an input or output tensor with compute."""

    tensor: torch.Tensor
    mode: OverlapMode
    is_input: bool


class OnDevice:
    """Context that only sets `is_on_device()`."""

    def __enter__(self) -> None:
        _active.is_on_device = True

    def __exit__(self, *exc_info: Any) -> None:
        _active.is_on_device = False


class DeviceMode(TorchFunctionMode):
    """Intercepts the torch functions of one forward.

    Attributes:
        marks: the losses, in the order in which they were marked.
        loss_copies: for each loss the copy that the forward continues with.
        statistics: the running statistics passed to normalizations.
        overlaps: the requested overlaps.
        has_replaced: whether a dtype or a tensor of the host was replaced in any forward so far.
        uses_originals: whether a tensor of the host was replaced.
        is_compiling: whether this is the forward of a compilation.
    """

    def __init__(
        self,
        is_compiling: bool = False,
        originals: Optional[Dict[int, Tuple[torch.Tensor, torch.Tensor]]] = None,
    ) -> None:
        """`originals` holds, by its `id`, each tensor of the host and the device's that replaces it."""
        super().__init__()
        self.is_compiling = is_compiling
        self.has_replaced = self.uses_originals = False
        self._originals = originals
        self.begin()

    def begin(self) -> None:
        """Forget the tensors of the last forward, with their graph."""
        self.marks: List[torch.Tensor] = []
        self.loss_copies: List[torch.Tensor] = []
        self.statistics: List[torch.Tensor] = []
        self.overlaps: List[Overlap] = []

    def __enter__(self) -> DeviceMode:
        self.begin()
        _active.is_on_device = True
        _active.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _active.is_on_device = False
        _active.mode = None
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def mark(self, loss: torch.Tensor) -> torch.Tensor:
        """Mark a loss and return the copy that the forward continues with.

        With a copy, gradients start at the mark even if the program then scales the loss in place.
        """
        self.marks.append(loss)
        self.loss_copies.append(loss.clone())
        return self.loss_copies[-1]

    def replaced(self, value: Any) -> Any:
        """Return the value, the device's dtype if it is a dtype that the device does not have, or "cpu" for "ipu"."""
        if isinstance(value, torch.dtype) and value in DEVICE_DTYPE:
            self.has_replaced = True
            return DEVICE_DTYPE[value]
        if isinstance(value, (str, torch.device)) and str(value).split(":")[0] == "ipu":
            self.has_replaced = True
            return "cpu"
        return value

    def _on_device(self, value: Any) -> Any:
        """Return an argument with the device's tensors in the place of the host's.

        `forward` reaches the host's tensors where it uses a module of the model through a closure or a global.
        """
        if isinstance(value, torch.Tensor):
            pair = self._originals.get(id(value)) if self._originals else None
            if pair is None:
                return value
            self.has_replaced = self.uses_originals = True
            return pair[1]
        if type(value) in (list, tuple):
            return type(value)(map(self._on_device, value))
        return value

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        if self._originals:
            args = tuple(map(self._on_device, args))
            kwargs = {name: self._on_device(value) for name, value in (kwargs or {}).items()}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        if kwargs:
            for name in ("dtype", "device"):
                if name in kwargs:
                    kwargs = {**kwargs, name: self.replaced(kwargs[name])}
            return func(*args, **kwargs)
        return func(*args)


def _loss(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    return mode.mark(func(*args, **kwargs))


def _convert(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    if any(isinstance(value, str) and value == "cpu" for value in (*args[1:], kwargs.get("device"))):
        return _reject_cpu(mode, func, args, kwargs)
    return func(*map(mode.replaced, args), **{name: mode.replaced(value) for name, value in kwargs.items()})


def _weights_like_input(
    mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]
) -> Any:
    """Call a layer's function with its weights cast to the dtype of its input, if that is half or float32."""
    given = (*args, kwargs.get("input"), kwargs.get("query"), *kwargs.values())
    dtype = next(value.dtype for value in given if isinstance(value, torch.Tensor))
    if not dtype.is_floating_point:
        return func(*args, **kwargs)

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dtype == dtype or not value.is_floating_point() or any(value is each for each in mode.statistics):
                return value
            mode.has_replaced = True
            return value.to(dtype)
        return type(value)(map(cast, value)) if type(value) in (list, tuple) else value

    return func(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def _reject_cpu(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    raise Error("A tensor cannot be moved to the CPU inside forward: return it instead, or use it on the device")


def _norm(first_statistic: int) -> _Handler:
    """Return a handler that records running statistics: normalizations may update these buffers.

    The running mean is positional argument number `first_statistic`, the variance the next one.
    """

    def norm(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        given = [*args[first_statistic : first_statistic + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
        mode.statistics += [value for value in given if isinstance(value, torch.Tensor)]
        return _weights_like_input(mode, func, args, kwargs)

    return norm


def _replaced_by(replacement: Callable[..., Any]) -> _Handler:
    def convert(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        mode.has_replaced = True
        return replacement(*args, **kwargs)

    return convert


def _long_indices(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """Return indices in the device's integers where the program asks for 32 bits."""
    if not kwargs.get("out_int32"):
        return func(*args, **kwargs)
    mode.has_replaced = True
    return func(*args, **{**kwargs, "out_int32": False})


def _handlers() -> Dict[Callable[..., Any], _Handler]:
    handlers: Dict[Callable[..., Any], _Handler] = dict.fromkeys(_functions(_LOSS_NAMES), _loss)
    handlers.update(dict.fromkeys(_functions(_LAYER_NAMES), _weights_like_input))
    # functional.batch_norm(input, running_mean, ...), but torch.batch_norm(input, weight, bias, running_mean, ...)
    handlers.update(dict.fromkeys((F.batch_norm, F.instance_norm), _norm(1)))
    handlers.update(dict.fromkeys((torch.batch_norm, torch.instance_norm, torch.native_batch_norm), _norm(3)))
    handlers.update(dict.fromkeys((torch.Tensor.to, torch.Tensor.type), _convert))
    handlers.update(dict.fromkeys((torch.Tensor.double, torch.Tensor.bfloat16), _replaced_by(torch.Tensor.float)))
    handlers[torch.Tensor.int] = _replaced_by(torch.Tensor.long)
    handlers[torch.Tensor.cpu] = _reject_cpu
    handlers.update(dict.fromkeys((torch.bucketize, torch.searchsorted), _long_indices))
    return handlers


def _functions(names: Sequence[str]) -> FrozenSet[Callable[..., Any]]:
    found = [getattr(module, name, None) for module in (F, torch, torch._C._nn) for name in names]
    return frozenset(function for function in found if function is not None)


_HANDLERS = _handlers()


_REQUEST = "_requested_average"  # an attribute of parameters


class _RequestedAverage(NamedTuple):
    weight: torch.Tensor
    factor: torch.Tensor


def updated_average(average: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return factor x average + (1 - factor) x weight."""
    return factor * average + (1 - factor) * weight


def request_average(average: torch.nn.Parameter, weight: torch.Tensor, factor: torch.Tensor) -> None:
    """Update a parameter in the next weight update; the last request of a parameter before it counts."""
    setattr(average, _REQUEST, _RequestedAverage(weight.detach(), factor.detach()))


def apply_averages(parameters: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Make the updates that a forward with `parameters` has requested, in `weights` (float32 for half)."""
    for name, parameter in parameters.items():
        requested = vars(parameter).pop(_REQUEST, None)
        if requested is not None:
            with torch.no_grad():
                new = updated_average(weights[name], requested.weight.to(weights[name].dtype), requested.factor)
                weights[name].copy_(new)


def discard_averages(parameters: Iterable[torch.Tensor]) -> None:
    """Discard the requests of a failed call."""
    for parameter in parameters:
        vars(parameter).pop(_REQUEST, None)
