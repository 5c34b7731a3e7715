"""Values and state of an optimizer on their way between the host's object and the device (contract 4)."""

from __future__ import annotations

from typing import Any, Optional

import torch

from poptorch._device.program import Program, TrainingProgram
from poptorch._optimizers.hyperparameters import Hyperparameters
from poptorch.optim import Optimizer


def bind(optimizer: torch.optim.Optimizer, program: TrainingProgram) -> None:
    """From now on the host's object reads its state from this program."""
    if isinstance(optimizer, Optimizer):
        optimizer._fetch = lambda: fetch(optimizer, program)
        if optimizer._host_is_newer:  # compiled with the attributes of now, not with the saved ones
            optimizer._ipu_param = program.optimizer.hyperparameters.as_ipu_param()


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
    """Bring a state that was loaded into the host's object to the device."""
    if isinstance(optimizer, Optimizer) and isinstance(program, TrainingProgram) and optimizer._host_is_newer:
        state, values = optimizer._ipu_state, optimizer._ipu_param
        assert state is not None, "a newer host state exists only after one was loaded"
        assert values is not None, "ipu_state and ipu_param come together"
        program.optimizer.load_state(state)
        program.optimizer.hyperparameters = program.optimizer.hyperparameters.with_ipu_param(values)
        optimizer._host_is_newer = False


def replace(old: Any, new: torch.optim.Optimizer, values: Hyperparameters, program: TrainingProgram) -> None:
    """Put the values of `new` in force. Another object than before gets bound, and the old one keeps the state so far.

    An object that brings no state leaves the device's as it is [inferred: contract 4 speaks of the state it has].
    """
    device = program.optimizer
    device.hyperparameters.check_change(values)
    if new is not old:
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
