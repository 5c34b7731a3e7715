"""Code that does not run on the device: `CPU` runs a layer on the host, `custom_op` is refused."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple

import torch

from poptorch.device_mode import active_mode, is_on_device, off_device, to_device
from poptorch.errors import Error
from poptorch.ops.arguments import checked_callable
from poptorch.pytree import flatten

# The replica threads share one host, which runs one layer at a time. Reentrant, as a layer may call another.
_host_lock = threading.RLock()

_TO_HOST: Dict[torch.dtype, torch.dtype] = {torch.int64: torch.int32}


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
        is_half = self._half_inputs(tensors)
        with _host_lock, off_device(), torch.no_grad():
            on_host = [_to_host(tensor, half) for tensor, half in zip(tensors, is_half)]
            args, kwargs = arguments.unflatten(on_host)
            returned, spec = flatten(self._layer_to_call(*args, **kwargs))
            if not returned:
                raise Error(f"poptorch.CPU {self._ID!r}: the layer returned {spec}, but no tensor")
            self.inputs, self.outputs = on_host, returned
            on_device = [to_device(tensor) for tensor in returned]
        # The device stores half as float32; during compilation this call of half() is recorded.
        pairs = zip(on_device, returned)
        return spec.unflatten([tensor.half() if _is_half(on_host) else tensor for tensor, on_host in pairs])

    def _half_inputs(self, tensors: List[torch.Tensor]) -> List[bool]:
        """Return which of the inputs are half; the compilation records it for later forwards."""
        mode = active_mode()
        if mode is not None and mode.is_compiling:
            mode.half_on_host[self._ID] = [_is_half(tensor) for tensor in tensors]
            mode.has_replaced |= any(mode.half_on_host[self._ID])
        # A model without a mode has no half tensors.
        known = [] if mode is None else mode.half_on_host.get(self._ID, [])
        return known if len(known) == len(tensors) else [False] * len(tensors)


def custom_op(
    inputs: List[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: List[torch.Tensor],
    attributes: Optional[Dict[str, Any]] = None,
) -> NoReturn:
    """Raise Error: a custom operator is a library of C++ and vertex code for the IPU, which a CPU cannot run."""
    raise Error(
        f"poptorch.custom_op: the custom operator {domain}.{name}:{domain_version} is C++ for the IPU and cannot run "
        "on the emulated SDK. Run the program on IPUs, or call a torch implementation of the operator where "
        "poptorch.ipuHardwareVersion() is 0"
    )


def _stored(target: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    same = target.shape == result.shape and target.dtype == result.dtype
    return target.copy_(result) if same else result.clone()


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.half


def _to_host(tensor: torch.Tensor, is_half: bool) -> torch.Tensor:
    dtype = torch.half if is_half else _TO_HOST.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(dtype, copy=True)
