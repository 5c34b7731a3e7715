"""The result of a compilation, apart from the model it was made of (contract 2.6: `save`, `loadExecutable`).

Here that is what tracing found out, with what it depends on: structure, shapes and dtypes of the arguments, their
constants, the options and the layout of the model. A program made of an executable is not traced again.
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional

import torch

from poptorch._device.compilation import Trace
from poptorch._errors import Error
from poptorch._executor.arguments import Compiled
from poptorch._parallel.blocks import block_of
from poptorch.options import Options


class Executable(NamedTuple):
    """What a compilation found out, and what for, as values by name that tell a person what they are."""

    traced: Trace
    compiled: Compiled
    made_for: Dict[str, Any]

    def check(self, made_for: Dict[str, Any]) -> None:
        """Error unless the executable was made for the like."""
        for name in sorted({*self.made_for, *made_for}):
            if self.made_for.get(name) != made_for.get(name):
                raise Error(
                    f"The executable was compiled for another model or other options: {name} was "
                    f"{self.made_for.get(name)!r} and is {made_for.get(name)!r}"
                )


def describe(
    model: torch.nn.Module, options: Options, optimizer: Optional[torch.optim.Optimizer], is_training: bool
) -> Dict[str, Any]:
    """What an executable depends on. The process id is not part of it, and neither are values of weights."""
    return {"kind": "training" if is_training else "inference", **_of_options(options), **_of_model(model, optimizer)}


def _of_options(options: Options) -> Dict[str, Any]:
    training: Any = options.Training
    return {
        "device iterations": options.device_iterations,
        "gradient accumulation": training.gradient_accumulation,
        "reduction": int(training.accumulation_and_replication_reduction_type),
        "replication factor": options.replication_factor,
        "number of processes": options.Distributed.numProcesses,
        "input groups": (options.input_group_size, int(options.input_group_type)),
        "output mode": (int(options.output_mode), options.output_return_period),
        "execution strategy": options._execution_strategy._to_dict(),
        "broadcast of buffers": options.broadcast_buffers,
        "anchored tensors": {name: tuple(anchor) for name, anchor in options.anchored_tensors.items()},
    }


def _of_model(model: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer]) -> Dict[str, Any]:
    found: Dict[str, Any] = {"optimizer": None if optimizer is None else type(optimizer).__qualname__}
    for name, module in model.named_modules():
        # A wrapped class is a subclass of the user's own, of which there is one for every wrapping.
        kind = getattr(type(module), "_poptorch_original", type(module))
        found[f"module {name!r}"] = (kind.__module__, kind.__qualname__, module.training, block_of(module))
    with torch._C.DisableTorchFunctionSubclass():
        for name, parameter in model.named_parameters():
            found[f"parameter {name!r}"] = (*_of_tensor(parameter), parameter.requires_grad)
        for name, buffer in model.named_buffers():
            found[f"buffer {name!r}"] = _of_tensor(buffer)
    return found


def _of_tensor(tensor: torch.Tensor) -> Any:
    return list(tensor.shape), str(tensor.dtype)
