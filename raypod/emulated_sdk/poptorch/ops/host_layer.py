"""`CPU`: a layer that runs on the host in the middle of an inference graph (contract 2.6)."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple

import torch

from poptorch.device_mode import active_mode, is_on_device, off_device, to_device
from poptorch.errors import Error
from poptorch.ops.arguments import checked_callable
from poptorch.pytree import flatten

# There is one host for all replicas: layers run one after the other. The wait is bounded by the layers' own time; a
# layer may call another one.
_host = threading.RLock()

_TO_HOST: Dict[torch.dtype, torch.dtype] = {torch.int64: torch.int32}


class CPU:
    """Calls `layer_to_call` on the host, wherever the `CPU` itself is called.

    layer_to_call: a module or function that takes and returns tensors, also nested ones. It sees the host's weights,
        and tensors of the dtypes of the API (32-bit integers).
    ID: a name of this layer, its own within a model.

    Inside the forward of a wrapped model no gradient flows through it: Error in training where an input needs one.
    Outside it is an ordinary, differentiable call. While a model is compiled the layer runs once, to learn the shapes
    of its outputs.

    Attributes:
        inputs: the tensors that `execute` reads.
        outputs: the tensors that it writes.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._layer_to_call = checked_callable("CPU", "layer_to_call", layer_to_call)
        self._ID = ID
        self.inputs: List[torch.Tensor] = []
        self.outputs: List[torch.Tensor] = []

    def execute(self) -> None:
        """Run the layer on `inputs`, and write what it returns to `outputs`."""
        with torch.no_grad():
            results = flatten(self._layer_to_call(*self.inputs))[0]
            if len(results) != len(self.outputs):
                self.outputs = [result.clone() for result in results]
            self.outputs = [_stored(place, result) for place, result in zip(self.outputs, results)]

    def registerPersistentData(self) -> None:
        """Give `inputs` and `outputs` memory of their own, which every later `execute` reuses."""
        self.inputs = [tensor.detach().clone() for tensor in self.inputs]
        self.outputs = [tensor.detach().clone() for tensor in self.outputs]

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        """What the layer returns for these arguments."""
        if not is_on_device():
            return self._layer_to_call(*input, **kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in flatten((input, kwargs))[0]):
            raise Error(
                f"poptorch.CPU {self._ID!r}: no gradient flows through a layer on the host. Use it in inference "
                "graphs, or on tensors without gradient (detach())"
            )
        return self._from_device(input, kwargs)

    def __deepcopy__(self, memo: Dict[int, Any]) -> CPU:
        return self  # the layer is the host's: the replicas of a model share it

    def _from_device(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        tensors, arguments = flatten((args, kwargs))
        is_half = self._note_half(tensors)
        with _host, off_device(), torch.no_grad():
            on_host = [_to_host(tensor, half) for tensor, half in zip(tensors, is_half)]
            args, kwargs = arguments.unflatten(on_host)
            returned, structure = flatten(self._layer_to_call(*args, **kwargs))
            if not returned:
                raise Error(f"poptorch.CPU {self._ID!r}: the layer returned {structure}, but no tensor")
            self.inputs, self.outputs = on_host, returned
            on_device = [to_device(tensor) for tensor in returned]
        # Half is held as float32; while compiling, the conversion tells that it is half.
        pairs = zip(on_device, returned)
        return structure.unflatten([tensor.half() if _is_half(on_host) else tensor for tensor, on_host in pairs])

    def _note_half(self, tensors: List[torch.Tensor]) -> List[bool]:
        """Which of the tensors are half: known while compiling, and remembered from there."""
        mode = active_mode()
        if mode is not None and mode.is_compiling:
            mode.half_on_host[self._ID] = [_is_half(tensor) for tensor in tensors]
            mode.has_replaced |= any(mode.half_on_host[self._ID])
        # Without a mode nothing in the model is half.
        known = [] if mode is None else mode.half_on_host.get(self._ID, [])
        return known if len(known) == len(tensors) else [False] * len(tensors)


def _stored(place: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    same = place.shape == result.shape and place.dtype == result.dtype
    return place.copy_(result) if same else result.clone()


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.half


def _to_host(tensor: torch.Tensor, is_half: bool) -> torch.Tensor:
    dtype = torch.half if is_half else _TO_HOST.get(tensor.dtype, tensor.dtype)
    return tensor.detach().to(dtype, copy=True)


def custom_op(
    inputs: List[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: List[torch.Tensor],
    attributes: Optional[Dict[str, Any]] = None,
) -> NoReturn:
    """Raises Error: a custom operator is a library of C++ and vertex code for the device, which is not there."""
    raise Error(
        f"poptorch.custom_op: the custom operator {domain}.{name}:{domain_version} is C++ for the IPU and cannot run "
        "on the emulated SDK. Run the program on IPUs, or call a torch implementation of the operator where "
        "poptorch.ipuHardwareVersion() is 0"
    )
