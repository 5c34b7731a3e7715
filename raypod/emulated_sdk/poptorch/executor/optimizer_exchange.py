"""Exchange of an optimizer's values and state between the host's object and the device."""

from __future__ import annotations

from typing import Any, Optional

import torch

from poptorch.device.program import Program, TrainingProgram
from poptorch.errors import Error
from poptorch.optim import Optimizer
from poptorch.optimizers.hyperparameters import Hyperparameters


def bind(optimizer: torch.optim.Optimizer, program: TrainingProgram) -> None:
    """Make the host's object read its state from this program.

    A state that the object has is uploaded; the attributes are compiled with their present values, not the saved ones.
    """
    if isinstance(optimizer, Optimizer):
        if optimizer._host_is_newer:
            _load_state(optimizer, program)
        optimizer._fetch = lambda: fetch(optimizer, program)


def unbind(optimizer: Any, program: Program) -> None:
    """Fetch the state for the last time; another program that gets the optimizer continues with it."""
    fetch(optimizer, program)
    if isinstance(optimizer, Optimizer):
        optimizer._fetch = None
        optimizer._host_is_newer = optimizer.has_state()


def fetch(optimizer: Any, program: Program) -> None:
    """Copy the device's state to the host's object, unless it is an optimizer of torch itself."""
    if isinstance(optimizer, Optimizer) and isinstance(program, TrainingProgram) and not optimizer._host_is_newer:
        device = program.optimizer
        optimizer._take(device.state(), device.hyperparameters.as_ipu_param())


def upload_if_newer(optimizer: Any, program: Program) -> None:
    """Upload a state that was loaded into the host's object, with the values that it was saved with."""
    if isinstance(optimizer, Optimizer) and isinstance(program, TrainingProgram) and optimizer._host_is_newer:
        program.optimizer.hyperparameters = _load_state(optimizer, program)


def replace(old: Any, new: torch.optim.Optimizer, values: Hyperparameters, program: TrainingProgram) -> None:
    """Upload the values of `new`. If it is another object than `old`, bind it; `old` keeps the state so far.

    An object without state does not change the device's state (inferred: the SDK's documentation does not state this).
    """
    device = program.optimizer
    program.check_optimizer(values)
    if new is not old:
        _check_groups(new, program)
        fetch(old, program)
        if isinstance(old, Optimizer):
            old._fetch = None
        bind(new, program)
    upload_if_newer(new, program)
    device.hyperparameters = values._replace(variable=device.hyperparameters.variable)


def mark_step(optimizer: Optional[torch.optim.Optimizer]) -> None:
    """Mark the optimizer as stepped for torch's schedulers, as no program calls its `step()`."""
    if optimizer is not None:
        marked: Any = optimizer
        marked._opt_called = True
        marked._step_count = max(1, getattr(marked, "_step_count", 0))


def _load_state(optimizer: Optimizer, program: TrainingProgram) -> Hyperparameters:
    state, values = optimizer._ipu_state, optimizer._ipu_param
    assert state is not None, "the host is newer only after a state was loaded"
    assert values is not None, "ipu_state and ipu_param are loaded together"
    saved = program.optimizer.hyperparameters.with_ipu_param(values)
    program.optimizer.load_state(state, saved)
    optimizer._host_is_newer = False
    return saved


def _check_groups(optimizer: torch.optim.Optimizer, program: TrainingProgram) -> None:
    """Raise Error if the model's parameters are in other groups than in the compiled program."""
    given = program.group_names(optimizer)
    # The groups of another copy of the model's parameters are assumed to be the same.
    if any(given) and given != program.optimizer.group_names:
        raise Error(
            "The optimizer has the model's parameters in other groups than the one that the model was compiled with"
        )
