"""`CPU`: a layer that runs on the host in the middle of an inference graph (contract 2.6)."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Tuple

import torch

from poptorch._device.dtypes import to_device
from poptorch._device.mode import active_mode, compiling_mode, is_on_device, off_device
from poptorch._errors import Error

from .arguments import checked_callable

# There is one host for all replicas: layers run one after the other. The wait is bounded by the layers' own time; a
# layer may call another one.
_host = threading.RLock()

_TO_HOST: Dict[torch.dtype, torch.dtype] = {torch.int64: torch.int32}


class CPU:
    """Calls `layer_to_call` on the host, wherever the `CPU` itself is called.

    layer_to_call: a module or function of tensors, which returns a tensor or a flat tuple or list of tensors. It sees
        the host's weights, and tensors of the dtypes of the API (32-bit integers).
    ID: a name of this layer.

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
        self._half_inputs: Tuple[bool, ...] = ()
        self._half_outputs: Tuple[bool, ...] = ()
        self.inputs: List[torch.Tensor] = []
        self.outputs: List[torch.Tensor] = []

    def execute(self) -> None:
        """Run the layer on `inputs`, and write what it returns to `outputs`."""
        with torch.no_grad():
            results = _as_list(self._layer_to_call(*self.inputs))
            if len(results) != len(self.outputs):
                self.outputs = [result.clone() for result in results]
            for index, (place, result) in enumerate(zip(self.outputs, results)):
                self.outputs[index] = _stored(place, result)

    def registerPersistentData(self) -> None:
        """Give `inputs` and `outputs` memory of their own, which every later `execute` reuses."""
        self.inputs = [tensor.detach().clone() for tensor in self.inputs]
        self.outputs = [tensor.detach().clone() for tensor in self.outputs]

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        """What the layer returns for these arguments."""
        if not is_on_device():
            return self._layer_to_call(*input, **kwargs)
        if torch.is_grad_enabled() and any(_needs_gradient(value) for value in (*input, *kwargs.values())):
            raise Error(
                f"poptorch.CPU {self._ID!r}: no gradient flows through a layer on the host. Use it in inference "
                "graphs, or on tensors without gradient (detach())"
            )
        return self._from_device(input, kwargs)

    def __deepcopy__(self, memo: Dict[int, Any]) -> CPU:
        return self  # the layer is the host's: the replicas of a model share it

    def _from_device(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        values = [*args, *kwargs.values()]
        compiling = compiling_mode() is not None
        with _host:
            if compiling:
                self._half_inputs = tuple(_is_half(value) for value in values)
            with off_device(), torch.no_grad():
                on_host = [_to_host(value, half) for value, half in zip(values, self._half_inputs)]
                results = self._run(on_host[: len(args)], dict(zip(kwargs, on_host[len(args) :])))
                if compiling:
                    self._half_outputs = tuple(_is_half(result) for result in _as_list(results))
                on_device = [to_device(result) for result in _as_list(results)]
            marked = [_marked(tensor, half) for tensor, half in zip(on_device, self._half_outputs)]
        return type(results)(marked) if isinstance(results, (list, tuple)) else marked[0]

    def _run(self, args: List[Any], kwargs: Dict[str, Any]) -> Any:
        results = self._layer_to_call(*args, **kwargs)
        self.inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        self.outputs = _as_list(results)
        for result in self.outputs:
            if not isinstance(result, torch.Tensor):
                raise Error(
                    f"poptorch.CPU {self._ID!r}: the layer returned {type(result).__name__}; it must return a tensor, "
                    "or a flat tuple or list of tensors"
                )
        return results


def _as_list(results: Any) -> List[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _stored(place: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    same = place.shape == result.shape and place.dtype == result.dtype
    return place.copy_(result) if same else result.clone()


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.half


def _to_host(value: Any, half: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    dtype = torch.half if half else _TO_HOST.get(value.dtype, value.dtype)
    return value.detach().to(dtype, copy=True)


def _marked(tensor: torch.Tensor, half: bool) -> torch.Tensor:
    """On the device half is held as float32; while compiling, the conversion tells that it is half."""
    return tensor.half() if half and active_mode() is not None else tensor
