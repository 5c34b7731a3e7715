"""`trainingModel`, `inferenceModel` and `load`, which construct executors."""

from __future__ import annotations

from typing import Any, Callable, Optional, Union

import torch

from poptorch.enums import ConnectionType
from poptorch.environment import VERSION
from poptorch.errors import Error
from poptorch.executor.executor import PoplarExecutor
from poptorch.executor.host_state import shallow_copy
from poptorch.executor.saving import Filename, read_model, read_sections
from poptorch.options import Options


def trainingModel(
    model: Union[torch.nn.Module, PoplarExecutor],
    options: Optional[Options] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> PoplarExecutor:
    """Wrap a module, whose forward marks a loss, for training.

    The module itself is wrapped: reading its parameters fetches trained weights.

    Args:
        optimizer: default: `poptorch.optim.SGD(lr=0.01)`.

    Raises:
        RuntimeError: the module is wrapped already.
    """
    module = _module_of(model)
    return PoplarExecutor(shallow_copy(module), options, True, VERSION, optimizer, module)


def inferenceModel(model: Union[torch.nn.Module, PoplarExecutor], options: Optional[Options] = None) -> PoplarExecutor:
    """Wrap a module for inference. Raises Error unless gradient accumulation is 1."""
    module = _module_of(model)
    return PoplarExecutor(shallow_copy(module), options, False, VERSION, None, module)


def _module_of(model: Union[torch.nn.Module, PoplarExecutor]) -> torch.nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if not isinstance(model, torch.nn.Module):
        raise Error(f"Only a torch.nn.Module can be wrapped, not {type(model).__name__}")
    scripts = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripts:
        raise Error(f"The module {scripts[0]!r} is a torch.jit.ScriptModule: wrap the Python module it was made of")
    return model


def load(filename: Filename, edit_opts_fn: Optional[Callable[[Options], Any]] = None) -> PoplarExecutor:
    """Return the executor that `save` wrote: model with weights, optimizer, options, executable and random state.

    Args:
        filename: the file, or a directory that contains `model.poptorch`.
        edit_opts_fn: changes the options in place before they are used. Options that the executable was compiled for
            must stay.

    Raises:
        Error: the file has no model, is of another kind or version, or is damaged.
    """
    sections = read_sections(filename)
    saved = read_model(filename, sections)
    options = saved.options.clone()
    options.deleteIfExists("ipu_version")
    if options.connection_type == ConnectionType.Never:  # compiled offline, to be run here
        options.connectionType(ConnectionType.Always)
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    executor = (
        trainingModel(saved.model, options, saved.optimizer)
        if saved.is_training
        else inferenceModel(saved.model, options)
    )
    executor._load(sections)
    return executor
