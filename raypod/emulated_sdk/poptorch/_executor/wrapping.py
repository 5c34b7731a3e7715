"""`trainingModel`, `inferenceModel` and `load`: what makes executors (contract 2.1, 2.6)."""

from __future__ import annotations

import os
from typing import Any, Callable, Optional, Union

import torch

from poptorch._errors import Error
from poptorch._executor.executor import PoplarExecutor
from poptorch._executor.saving import content_of, edited
from poptorch._executor.user_model import shallow_copy
from poptorch._version import VERSION
from poptorch.enums import OutputMode
from poptorch.optim import SGD
from poptorch.options import Options


def trainingModel(
    model: Union[torch.nn.Module, PoplarExecutor],
    options: Optional[Options] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> PoplarExecutor:
    """Wrap a module, whose forward marks a loss, for training; the optimizer defaults to `poptorch.optim.SGD(lr=0.01)`.

    The module itself is wrapped: reading its parameters fetches trained weights. RuntimeError when it is wrapped
    already.
    """
    module = _module_of(model)
    chosen = _fixed(options, OutputMode.Final)
    if optimizer is None:
        # A model may have a loss and nothing to train, but an optimizer of torch wants a parameter.
        optimizer = SGD(list(module.parameters()) or [torch.nn.Parameter(torch.zeros(()))], lr=0.01)
    return PoplarExecutor(shallow_copy(module), chosen, True, VERSION, optimizer, module)


def inferenceModel(model: Union[torch.nn.Module, PoplarExecutor], options: Optional[Options] = None) -> PoplarExecutor:
    """Wrap a module for inference. Error when gradient accumulation is not 1."""
    module = _module_of(model)
    chosen = _fixed(options, OutputMode.All)
    if chosen.Training.gradient_accumulation != 1:
        raise Error(
            "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default value (1) "
            "when running a poptorch.inferenceModel(). "
            f"It is {chosen.Training.gradient_accumulation}: use options of their own for validation"
        )
    return PoplarExecutor(shallow_copy(module), chosen, False, VERSION, None, module)


def _module_of(model: Union[torch.nn.Module, PoplarExecutor]) -> torch.nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if not isinstance(model, torch.nn.Module):
        raise Error(f"A torch.nn.Module can be wrapped, not {type(model).__name__}")
    scripts = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripts:
        raise Error(
            f"The module {scripts[0]!r} is a torch.jit.ScriptModule: wrap the Python module that it was made of"
        )
    return model


def _fixed(options: Optional[Options], default_mode: OutputMode) -> Options:
    """A frozen clone with an output mode; the given object is frozen too."""
    given = Options() if options is None else options
    if not isinstance(given, Options):
        raise Error(f"options is a poptorch.Options, not {type(given).__name__}")
    chosen = given.clone()
    given._freeze()
    if chosen.defaultOutputMode():
        chosen.outputMode(default_mode)
    chosen._freeze()
    return chosen


def load(
    filename: Union[str, os.PathLike[str]], edit_opts_fn: Optional[Callable[[Options], Any]] = None
) -> PoplarExecutor:
    """The executor that `save` wrote: model with its weights, optimizer, options, executable and random state.

    `edit_opts_fn(options)` may change the options in place before they are used, though none that the executable
    depends on. Error for a file without a model, of another version of poptorch, of another kind, or damaged.
    """
    sections, (model, optimizer, options, is_training) = content_of(filename)
    chosen = edited(options, edit_opts_fn)
    executor = trainingModel(model, chosen, optimizer) if is_training else inferenceModel(model, chosen)
    executor._load_sections(sections)
    return executor
