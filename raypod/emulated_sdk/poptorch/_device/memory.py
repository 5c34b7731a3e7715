"""The device's copy of parameters and buffers, and its exchange with the host's (contract 2.6).

All local replicas share one copy of the weights: they are equal anyway. Each replica has buffers of its own.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from poptorch._device.dtypes import DEVICE_DTYPE
from poptorch._device.replica_modules import copy_module
from poptorch._errors import Error


class ReplicaMemory(NamedTuple):
    """One replica: its module and, by name, its parameters, floating point buffers and constant buffers.

    `half_tensors` are those of them that are half on the host.
    """

    module: torch.nn.Module
    parameters: Dict[str, torch.nn.Parameter]
    buffers: Dict[str, torch.Tensor]
    constants: Dict[str, torch.Tensor]
    half_tensors: List[torch.Tensor]


class DeviceMemory:
    """Parameters and buffers of all local replicas.

    `model` is the host's module. It is asked for its tensors by name at every exchange, as a program may replace them.
    `user_model` is the one that the program holds, if `model` is a shallow copy of it.
    """

    def __init__(self, model: torch.nn.Module, replicas: int, user_model: Optional[torch.nn.Module] = None) -> None:
        self._model = model
        self._user_model = model if user_model is None else user_model
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._weights = {name: _device_copy(tensor) for name, tensor in model.named_parameters()}
            self.replicas = [self._replica(self._weights) for _ in range(replicas)]
        self.half_parameters = [name for name, tensor in model.named_parameters() if tensor.dtype == torch.half]

    @property
    def parameters(self) -> Dict[str, torch.nn.Parameter]:
        """The shared weights, as the parameters of replica 0."""
        return self.replicas[0].parameters

    def scratch(self) -> ReplicaMemory:
        """One more replica with the same weights, to try a forward on: what it does to the module is forgotten."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            return self._replica(self._weights)

    def upload(self) -> None:
        """Bring the host's weights and floating point buffers to every replica; other buffers are constants."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for name, tensor in self._model.named_parameters():
                self.parameters[name].copy_(tensor)
            for name, buffer in self._model.named_buffers():
                for replica in self.replicas:
                    if name in replica.buffers:
                        replica.buffers[name].copy_(buffer)

    def upload_buffers(self, names: Sequence[str]) -> None:
        """Bring these buffers of the host to every replica, constants too. Error for names of no buffer."""
        host = dict(self._model.named_buffers())
        unknown = [name for name in names if name not in host]
        if unknown:
            raise Error(f"The model has no buffer {unknown[0]!r}: there are {', '.join(sorted(host)) or 'none'}")
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for replica in self.replicas:
                for name in names:
                    place = replica.buffers[name] if name in replica.buffers else replica.constants[name]
                    place.copy_(host[name])

    def download(self) -> None:
        """Bring the weights, and the buffers of replica 0 [inferred: contract 2.6], to the host."""
        values: Dict[str, torch.Tensor] = {**self.parameters, **self.replicas[0].buffers}
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for tensors in (self._model.named_parameters(), self._model.named_buffers()):
                for name, tensor in tensors:
                    if name in values:
                        tensor.copy_(values[name])

    def _replica(self, weights: Dict[str, torch.Tensor]) -> ReplicaMemory:
        host = dict(self._model.named_parameters())
        parameters = {
            name: torch.nn.Parameter(weight, requires_grad=host[name].requires_grad) for name, weight in weights.items()
        }
        host_buffers = dict(self._model.named_buffers())
        buffers = {name: _device_copy(buffer) for name, buffer in host_buffers.items()}
        pairs: List[Tuple[torch.Tensor, torch.Tensor]] = [(host[name], parameters[name]) for name in parameters]
        pairs += [(host_buffers[name], buffers[name]) for name in buffers]
        floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        return ReplicaMemory(
            module=copy_module(self._model, {id(tensor): copy for tensor, copy in pairs}, self._user_model),
            parameters=parameters,
            buffers=floating,
            constants={name: buffer for name, buffer in buffers.items() if name not in floating},
            half_tensors=[copy for tensor, copy in pairs if tensor.dtype == torch.half],
        )


def _device_copy(tensor: torch.Tensor) -> torch.Tensor:
    # Constant integer buffers keep their type: nothing computes their successor.
    dtype = DEVICE_DTYPE.get(tensor.dtype, tensor.dtype) if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(dtype, copy=True)
