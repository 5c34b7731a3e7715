"""Check the metrics of a user's task before the first update: their first use is after a whole epoch."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from typing import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.model.predictions import check_size
from raypod.model.program import EvaluationStep, TaskOutputs
from raypod.plan.plan import Plan


def check(plan: Plan, task: TaskOutputs, network: nn.Module, prepare: nn.Module, batch: Sequence[torch.Tensor]) -> None:
    """Run the evaluation of a batch on the host, with a copy of the network, if the host can run it.

    Weights, buffers and the states of the global random generators stay as they are; a task can hold the network
    itself. Other state of a task, as a `torch.Generator` of its own, advances by this call.

    Args:
        plan: of the run.
        task: the user's task.
        network: of the task.
        prepare: see `program.EvaluationStep`.
        batch: the tensors of a batch of one sample.

    Raises:
        ConfigError: the metrics or predictions that the task returns have other names or shapes, or are too large.
        NameError: the task uses a name that is not defined.
    """
    samples = plan.geometry.micro_batch_size  # as on the device: a task can rely on it
    batch = [each.repeat(samples, *[1] * (each.dim() - 1)) for each in batch]
    with _kept(network), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the evaluation shows them
        try:
            copied = copy.deepcopy((network, prepare))
            outputs = EvaluationStep(task, plan.task.metrics, *copied).eval()(*batch)
            if plan.task.predictions:
                check_size(plan.task, outputs[1:])
        except (ConfigError, NameError):  # on the device the latter is raised, too
            raise
        except Exception:  # noqa: BLE001 - the host lacks what the device has, as half precision; the evaluation tells
            return


@contextlib.contextmanager
def _kept(network: nn.Module) -> Iterator[None]:
    """Set the evaluation mode; at the end restore modes, buffers, and the generators of torch, NumPy and Python."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    modes = {module: module.training for module in network.modules()}
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.eval()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        for module, mode in modes.items():
            module.training = mode
        for name, buffer in network.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
