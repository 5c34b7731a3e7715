"""Ops that run on the host: `CPU` runs a layer, `ipu_print_tensor` prints a tensor."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch

from poptorch.device_mode import compiling_mode, from_host, is_on_device, off_device, to_device
from poptorch.errors import Error
from poptorch.ops.annotations import checked_callable, checked_tensor
from poptorch.python_state import visible_objects
from poptorch.pytree import flatten

# The replica threads share one host, which runs one layer at a time. Reentrant, as a layer may call another.
_host_lock = threading.RLock()

FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")


class CPU:
    """Runs a layer on the host, in the middle of an inference graph on the device.

    Inside the forward of a wrapped model no gradient flows through it. Outside it is an ordinary, differentiable call.
    Compilation runs the layer once, for the shapes of its outputs.

    Args:
        layer_to_call: a module or function that takes and returns tensors, which may be nested. It uses the host's
            weights, and tensors in the dtypes of the API (32-bit integers).
        ID: a name of the layer that is unique in the model.

    Attributes:
        inputs: the tensors that `execute` reads.
        outputs: the tensors that `execute` writes.

    Raises:
        poptorch.Error: an input needs a gradient on the device, or the layer returns no tensor.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._layer_to_call = checked_callable("CPU", "layer_to_call", layer_to_call)
        self._ID = ID
        self.inputs: List[torch.Tensor] = []
        self.outputs: List[torch.Tensor] = []

    def execute(self) -> None:
        """Run the layer on `inputs` and write its results to `outputs`."""
        with torch.no_grad():
            results = flatten(self._layer_to_call(*self.inputs))[0]
            if len(results) != len(self.outputs):
                self.outputs = [result.clone() for result in results]
            self.outputs = [_stored(target, result) for target, result in zip(self.outputs, results)]

    def registerPersistentData(self) -> None:
        """Allocate memory for `inputs` and `outputs`, which every later `execute` reuses."""
        self.inputs = [tensor.detach().clone() for tensor in self.inputs]
        self.outputs = [tensor.detach().clone() for tensor in self.outputs]

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        """Return the layer's outputs for these arguments."""
        if not is_on_device():
            return self._layer_to_call(*input, **kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in flatten((input, kwargs))[0]):
            raise Error(
                f"poptorch.CPU {self._ID!r}: no gradient flows through a layer on the host. Use it in inference "
                "graphs, or on tensors without gradient (detach())"
            )
        return self._call_from_device(input, kwargs)

    def __deepcopy__(self, memo: Dict[int, Any]) -> CPU:
        return self  # the replicas of a model share the layer

    def _call_from_device(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        tensors, arguments = flatten((args, kwargs))
        with visible_objects(), _host_lock, off_device(), torch.no_grad():
            dtypes = [torch.int32 if tensor.dtype == torch.int64 else tensor.dtype for tensor in tensors]
            on_host = [tensor.detach().to(dtype, copy=True) for tensor, dtype in zip(tensors, dtypes)]
            args, kwargs = arguments.unflatten(on_host)
            returned, spec = flatten(self._layer_to_call(*args, **kwargs))
            if not returned:
                raise Error(f"poptorch.CPU {self._ID!r}: the layer returned {spec}, but no tensor")
            self.inputs, self.outputs = on_host, returned
            results = [to_device(tensor) for tensor in returned]
        return spec.unflatten(list(map(from_host, results)))


def _stored(target: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    same = target.shape == result.shape and target.dtype == result.dtype
    return target.copy_(result) if same else result.clone()


def ipu_print_tensor(  # noqa: PLR0913  # the SDK's signature
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """Return a copy of a tensor that each replica prints to stderr in every run on the device.

    Use the returned tensor. On the host and during compilation nothing is printed.

    Args:
        title: printed before the values; the title of the gradient is "<title>_gradient" (inferred: the SDK's
            documentation does not state this).
        print_gradient: print the gradient in the backward pass.
        summarise_threshold: with more elements, print only the first and last of each dimension; 0 prints all.
        edge_items: number of elements at each end of a dimension in a summary.
        max_line_width: characters per line; 0 for any number.
        digits: digits after the decimal point.
        float_format: "auto", "fixed", "scientific" or "none" (all digits).
        separator: printed between values.
        open_bracket, close_bracket: printed around each dimension.

    Raises:
        ValueError: any other format.
        TypeError: `print_gradient` is no bool or number.
    """
    checked_tensor("ipu_print_tensor", "tensor", tensor)
    prints_gradient = int(print_gradient)  # as in the SDK: an exception for what is no number
    style = PrintFormat(
        summarise_threshold, edge_items, max_line_width, digits, float_format, separator, open_bracket, close_bracket
    )
    style.check()
    printed = tensor.clone()
    if is_on_device() and compiling_mode() is None:
        _print(title or "print_tensor", tensor, style)
        if prints_gradient and printed.requires_grad:
            printed.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: _print(f"{title or 'print_tensor'}_gradient", gradient, style)
            )
    return printed


class PrintFormat(NamedTuple):
    """The format of a printed tensor: the arguments of `ipu_print_tensor` of the same names."""

    summarise_threshold: int
    edge_items: int
    max_line_width: int
    digits: int
    float_format: str
    separator: str
    open_bracket: str
    close_bracket: str

    def check(self) -> None:
        """Raise ValueError for invalid settings."""
        if self.float_format not in FLOAT_FORMATS:
            raise ValueError(f"float_format must be one of {', '.join(FLOAT_FORMATS)}, not {self.float_format!r}")
        for name in ("summarise_threshold", "edge_items", "max_line_width", "digits"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an int of at least 0, not {value!r}")
        for name in ("separator", "open_bracket", "close_bracket"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, not {getattr(self, name)!r}")

    def text(self, tensor: torch.Tensor) -> str:
        """Return the tensor as text: nested brackets, aligned numbers, several lines for long or nested values."""
        write = self._writer(tensor)
        if tensor.dim() == 0:
            return write(tensor.item())
        is_summary = 0 < self.summarise_threshold < tensor.numel()
        shown = [self._shown(size, is_summary) for size in tensor.shape]
        width = max((len(write(value)) for value in _values(tensor, shown)), default=0)
        return self._nested(tensor, shown, lambda value: write(value).rjust(width), indent=1)

    def _shown(self, size: int, is_summary: bool) -> List[int]:
        """Return the printed indices of a dimension; -1 for the omitted ones."""
        if not is_summary or size <= 2 * self.edge_items:
            return list(range(size))
        return [*range(self.edge_items), -1, *range(size - self.edge_items, size)]

    def _nested(self, tensor: torch.Tensor, shown: List[List[int]], write: Callable[[float], str], indent: int) -> str:
        if len(shown) == 1:
            return self._row(["..." if index < 0 else write(tensor[index].item()) for index in shown[0]], indent)
        items = ["..." if i < 0 else self._nested(tensor[i], shown[1:], write, indent + 1) for i in shown[0]]
        return self._bracketed(items, indent)

    def _row(self, words: List[str], indent: int) -> str:
        lines: List[str] = []
        for word in words:
            length = len(lines[-1]) + len(self.separator) + len(word) if lines else 0
            if lines and (length < self.max_line_width - indent or not self.max_line_width):
                lines[-1] += self.separator + word
            else:
                lines.append(word)
        return self._bracketed(lines, indent)

    def _bracketed(self, lines: List[str], indent: int) -> str:
        line_break = f"{self.separator.rstrip()}\n{' ' * indent}"
        return f"{self.open_bracket}{line_break.join(lines)}{self.close_bracket}"

    def _writer(self, tensor: torch.Tensor) -> Callable[[float], str]:
        if not tensor.is_floating_point():
            return lambda value: str(int(value))
        if self.float_format == "none":
            return str
        is_scientific = self.float_format == "scientific" or (self.float_format == "auto" and _has_wide_range(tensor))
        return (f"{{:.{self.digits}{'e' if is_scientific else 'f'}}}").format


def _print(title: str, tensor: torch.Tensor, style: PrintFormat) -> None:
    with off_device(), torch.no_grad():
        # In one write, as the replicas print concurrently.
        sys.stderr.write(f"{title}: {style.text(tensor.detach())}\n")
        sys.stderr.flush()


def _has_wide_range(tensor: torch.Tensor) -> bool:
    """Return whether fixed-point format would lose small values or print too many digits."""
    sizes = tensor.abs()
    sizes = sizes[torch.isfinite(sizes) & (sizes > 0)]
    if not sizes.numel():
        return False
    smallest, largest = float(sizes.min()), float(sizes.max())
    return largest >= 1e8 or smallest < 1e-4 or math.log10(largest / smallest) > 3


def _values(tensor: torch.Tensor, shown: List[List[int]]) -> List[float]:
    for dim, indices in enumerate(shown):
        tensor = tensor.index_select(dim, torch.tensor([index for index in indices if index >= 0], dtype=torch.long))
    values: List[float] = tensor.flatten().tolist()
    return values
