"""What differs between torch on the host and a forward on the device: marked losses and dtypes (contract 2.4, 5).

`DeviceMode` sees every torch function that a forward calls. Losses are marked, types that the device has not are
replaced by those that it computes in, and moving a tensor off the device is refused. Seeing costs time: where compiling
finds nothing to replace and the loss among the outputs, later forwards run without it, as `OnDevice`.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily

from poptorch._device.dtypes import DEVICE_DTYPE
from poptorch._errors import Error
from poptorch.enums import OverlapMode

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


def is_on_device() -> bool:
    """Whether this thread runs a forward on the device."""
    return getattr(_active, "is_on_device", False)


def active_mode() -> Optional[DeviceMode]:
    """The mode that sees this thread's forward; None where there is none."""
    return getattr(_active, "mode", None)


def compiling_mode() -> Optional[DeviceMode]:
    """The mode of this thread's forward if that is the one of a compilation, whose values nobody will see."""
    mode = active_mode()
    return mode if mode is not None and mode.is_compiling else None


@contextlib.contextmanager
def off_device() -> Iterator[None]:
    """Within, this thread runs on the host, as if it were in no forward: what it calls is plain torch."""
    mode, was_on_device = active_mode(), is_on_device()
    _active.mode, _active.is_on_device = None, False
    stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    above = len(stack) - next((index for index, each in enumerate(stack) if each is mode), len(stack))
    try:
        with contextlib.ExitStack() as popped:
            for _ in range(above):
                popped.enter_context(_pop_mode_temporarily())
            yield
    finally:
        _active.mode, _active.is_on_device = mode, was_on_device


class Overlap(NamedTuple):
    """A request to overlap the transfer of an input or output tensor with computing (contract 3)."""

    tensor: torch.Tensor
    mode: OverlapMode
    is_input: bool


class OnDevice:
    """Says that a forward runs on the device, and changes nothing."""

    def __enter__(self) -> None:
        _active.is_on_device = True

    def __exit__(self, *exc_info: Any) -> None:
        _active.is_on_device = False


class DeviceMode(TorchFunctionMode):
    """Active during one forward.

    Attributes:
        marks: the losses in the order of their marking.
        passed_on: what the forward went on with instead of each.
        statistics: the running statistics that normalisations were given.
        overlaps: the transfers that were asked to overlap.
        has_replaced: whether a dtype was replaced, in any forward so far.
        is_compiling: whether the forward only finds out what the model does.
        half_on_host: for each layer on the host, by its ID, which tensors it is given in half; compiling finds that
            out for the forwards that follow.
    """

    def __init__(self, is_compiling: bool = False, half_on_host: Optional[Dict[str, List[bool]]] = None) -> None:
        super().__init__()
        self.is_compiling = is_compiling
        self.half_on_host = {} if half_on_host is None else half_on_host
        self.has_replaced = False
        self._begin()

    def _begin(self) -> None:
        self.marks: List[torch.Tensor] = []
        self.passed_on: List[torch.Tensor] = []
        self.statistics: List[torch.Tensor] = []
        self.overlaps: List[Overlap] = []

    def __enter__(self) -> DeviceMode:
        self._begin()
        _active.is_on_device = True
        _active.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _active.is_on_device = False
        _active.mode = None
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def mark(self, loss: torch.Tensor) -> torch.Tensor:
        """Mark a loss; returns what the forward goes on with.

        That is a copy: gradients start at the mark even if the program then scales the loss in place.
        """
        self.marks.append(loss)
        self.passed_on.append(loss.clone())
        return self.passed_on[-1]

    def replaced(self, value: Any) -> Any:
        """What stands for an argument: another dtype for one that the device has not."""
        if isinstance(value, torch.dtype) and value in DEVICE_DTYPE:
            self.has_replaced = True
            return DEVICE_DTYPE[value]
        return value

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        if kwargs:
            if "dtype" in kwargs:
                kwargs = {**kwargs, "dtype": self.replaced(kwargs["dtype"])}
            return func(*args, **kwargs)
        return func(*args)


def _loss(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    return mode.mark(func(*args, **kwargs))


def _convert(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    if any(isinstance(value, str) and value == "cpu" for value in (*args[1:], kwargs.get("device"))):
        return _leave_device(mode, func, args, kwargs)
    result = func(*map(mode.replaced, args), **{name: mode.replaced(value) for name, value in kwargs.items()})
    asks_for_half = any(value is torch.half for value in (*args, *kwargs.values()))
    return _rounded(result) if asks_for_half else result


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Values that half can hold: a program that casts asks for them."""
    return tensor.half().to(tensor.dtype)


def _to_half(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    mode.has_replaced = True
    return _rounded(args[0].float())


def _leave_device(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    raise Error("A tensor cannot be moved to the CPU inside forward: return it instead, or use it on the device")


def _norm(first_statistic: int) -> _Handler:
    """Normalisations update their running statistics by themselves: no change of a buffer in the sense of contract 2.6.

    The running mean is positional argument number `first_statistic`, the variance the next.
    """

    def norm(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        given = [*args[first_statistic : first_statistic + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
        mode.statistics += [value for value in given if isinstance(value, torch.Tensor)]
        return func(*args, **kwargs)

    return norm


def _replaced_by(replacement: Callable[..., Any]) -> _Handler:
    def convert(mode: DeviceMode, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        mode.has_replaced = True
        return replacement(*args, **kwargs)

    return convert


def _handlers() -> Dict[Callable[..., Any], _Handler]:
    handlers: Dict[Callable[..., Any], _Handler] = dict.fromkeys(_loss_functions(), _loss)
    # functional.batch_norm(input, running_mean, ...), but torch.batch_norm(input, weight, bias, running_mean, ...)
    handlers.update(dict.fromkeys((F.batch_norm, F.instance_norm), _norm(1)))
    handlers.update(dict.fromkeys((torch.batch_norm, torch.instance_norm, torch.native_batch_norm), _norm(3)))
    handlers.update(dict.fromkeys((torch.Tensor.to, torch.Tensor.type), _convert))
    handlers.update(dict.fromkeys((torch.Tensor.double, torch.Tensor.bfloat16), _replaced_by(torch.Tensor.float)))
    handlers[torch.Tensor.half] = _to_half
    handlers[torch.Tensor.int] = _replaced_by(torch.Tensor.long)
    handlers[torch.Tensor.cpu] = _leave_device
    return handlers


def _loss_functions() -> FrozenSet[Callable[..., Any]]:
    found = [getattr(module, name, None) for module in (F, torch, torch._C._nn) for name in _LOSS_NAMES]
    return frozenset(function for function in found if function is not None)


_HANDLERS = _handlers()
