"""Saved models: what `save` writes to a file, and what `loadExecutable` and `poptorch.load` read from it.

A saved executable is what the model was compiled for: the arguments with one micro-batch of example inputs, and a
description of model and options. Loading it traces the model again.
"""

from __future__ import annotations

import io
import json
import pickle
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from poptorch.device.arguments import Arguments, ArgumentSpec
from poptorch.device.memory import original_class
from poptorch.errors import Error, ModelFileError
from poptorch.executor import model_file
from poptorch.options import Options
from poptorch.parallel.blocks import block_of

Description = Dict[str, Any]

_EXECUTABLE, _MODEL, _RNG_STATE = "executable", "model", "rng_state"
# What pickling an arbitrary Python object may raise.
_UNPICKLABLE = (TypeError, AttributeError, RuntimeError, ValueError, pickle.PickleError)


class SavedModel(NamedTuple):
    """The model of a file, as the arguments of `trainingModel` or `inferenceModel`."""

    model: torch.nn.Module
    optimizer: Optional[torch.optim.Optimizer]
    options: Options
    is_training: bool


class SavedExecutable(NamedTuple):
    """The executable of a file.

    Attributes:
        spec: the arguments that the model was compiled for.
        example_inputs: the tensors of one micro-batch.
        compiled_for: the description of model and options.
        rng_state: the state of the device's random numbers; None if it was not saved.
    """

    spec: ArgumentSpec
    example_inputs: List[torch.Tensor]
    compiled_for: Description
    rng_state: Optional[List[int]]

    def arguments(self, forward: Callable[..., Any], expected: Description) -> Arguments:
        """Return the arguments for this model. Raises Error if it was compiled for another description."""
        for name in sorted({*self.compiled_for, *expected}):
            if self.compiled_for.get(name) != expected.get(name):
                raise Error(
                    f"The executable was compiled for another model or other options: {name} was "
                    f"{self.compiled_for.get(name)!r} and is {expected.get(name)!r}"
                )
        return Arguments(forward, self.spec, self.example_inputs)


def write(
    filename: model_file.Filename,
    arguments: Arguments,
    compiled_for: Description,
    saved_model: Optional[SavedModel],
    rng_state: Optional[List[int]],
) -> None:
    """Write an executable to a file, with the model and the state of the random numbers if they are given."""
    executable = (tuple(arguments.spec), arguments.example_inputs, compiled_for)
    sections = {_EXECUTABLE: _pickled("the executable", executable)}
    if saved_model is not None:
        sections[_MODEL] = _pickled("the model (export_model=False leaves it out)", tuple(saved_model))
    if rng_state is not None:
        sections[_RNG_STATE] = json.dumps(rng_state).encode()
    model_file.write(filename, sections)


def read_executable(sections: Dict[str, bytes]) -> SavedExecutable:
    """Return the executable of a file's sections."""
    spec, example_inputs, compiled_for = _unpickled("the executable", sections[_EXECUTABLE])
    rng_state = json.loads(sections[_RNG_STATE]) if _RNG_STATE in sections else None
    return SavedExecutable(ArgumentSpec(*spec), example_inputs, compiled_for, rng_state)


def read_model(filename: model_file.Filename, sections: Dict[str, bytes]) -> SavedModel:
    """Return the model of a file's sections. Raises ModelFileError if the file has none."""
    if _MODEL not in sections:
        raise ModelFileError(
            f"{filename} is a valid PopTorch file but was created with 'export_model=False' which means you need to "
            "re-create the PopTorch model using poptorch.inferenceModel or poptorch.trainingModel then call "
            f'`model.loadExecutable("{filename}")` to restore its state.'
        )
    return SavedModel(*_unpickled("the model", sections[_MODEL]))


def _pickled(what: str, content: Tuple[Any, ...]) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(content, file)
    except _UNPICKLABLE as error:
        raise Error(f"{what} cannot be saved: {error}") from error
    return file.getvalue()


def _unpickled(what: str, data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=False)
    except (AttributeError, ImportError) as error:
        raise Error(f"{what} needs classes that cannot be imported here: {error}") from error


def describe(
    model: torch.nn.Module, options: Options, optimizer: Optional[torch.optim.Optimizer], is_training: bool
) -> Description:
    """Return what an executable depends on, by name: neither the process id nor the values of the weights."""
    return {"kind": "training" if is_training else "inference", **_of_options(options), **_of_model(model, optimizer)}


def _of_options(options: Options) -> Description:
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


def _of_model(model: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer]) -> Description:
    found: Description = {"optimizer": None if optimizer is None else type(optimizer).__qualname__}
    for name, module in model.named_modules():
        kind = original_class(type(module))
        found[f"module {name!r}"] = (kind.__module__, kind.__qualname__, module.training, block_of(module))
    with torch._C.DisableTorchFunctionSubclass():
        for name, parameter in model.named_parameters():
            found[f"parameter {name!r}"] = (*_of_tensor(parameter), parameter.requires_grad)
        for name, buffer in model.named_buffers():
            found[f"buffer {name!r}"] = _of_tensor(buffer)
    return found


def _of_tensor(tensor: torch.Tensor) -> Any:
    return list(tensor.shape), str(tensor.dtype)
