"""Values and state of an optimizer on their way between the host's object and the device (contract 4)."""

from __future__ import annotations

from typing import Any, Optional

import torch

from poptorch._device.program import Program, TrainingProgram
from poptorch._errors import Error
from poptorch._optimizers.hyperparameters import Hyperparameters
from poptorch.optim import Optimizer


def bind(optimizer: torch.optim.Optimizer, program: TrainingProgram) -> None:
    """From now on the host's object reads its state from this program.

    A state that it brings goes to the device; the attributes are compiled as they are now, not as they were saved.
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
    """Bring the device's state to the host's object; torch's own optimizers have no place for it."""
    if isinstance(optimizer, Optimizer) and isinstance(program, TrainingProgram) and not optimizer._host_is_newer:
        device = program.optimizer
        optimizer._take(device.state(), device.hyperparameters.as_ipu_param())


def upload_if_newer(optimizer: Any, program: Program) -> None:
    """Bring a state that was loaded into the host's object to the device, with the values that it was saved with."""
    if isinstance(optimizer, Optimizer) and isinstance(program, TrainingProgram) and optimizer._host_is_newer:
        program.optimizer.hyperparameters = _load_state(optimizer, program)


def replace(old: Any, new: torch.optim.Optimizer, values: Hyperparameters, program: TrainingProgram) -> None:
    """Put the values of `new` in force. Another object than before gets bound, and the old one keeps the state so far.

    An object that brings no state leaves the device's as it is [inferred: contract 4 speaks of the state it has].
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


def note_step(optimizer: Optional[torch.optim.Optimizer]) -> None:
    """Let torch's schedulers see that the optimizer has stepped: on a device nobody calls its `step()`."""
    if optimizer is not None:
        marked: Any = optimizer
        marked._opt_called = True
        marked._step_count = max(1, getattr(marked, "_step_count", 0))


def _load_state(optimizer: Optimizer, program: TrainingProgram) -> Hyperparameters:
    state, values = optimizer._ipu_state, optimizer._ipu_param
    assert state is not None, "a newer host state exists only after one was loaded"
    assert values is not None, "ipu_state and ipu_param come together"
    saved = program.optimizer.hyperparameters.with_ipu_param(values)
    program.optimizer.load_state(state, saved)
    optimizer._host_is_newer = False
    return saved


def _check_groups(optimizer: torch.optim.Optimizer, program: TrainingProgram) -> None:
    """Error when the model's parameters are in other groups than they were compiled in."""
    given = program.group_names(optimizer)
    # Parameters of another copy of the model say nothing: their groups are taken to be the same.
    if any(given) and given != program.optimizer.group_names:
        raise Error(
            "The optimizer has the model's parameters in other groups than the one that the model was compiled with"
        )
