"""Compiles the programs of an instance without a device: the executables are those of a run with the same settings."""

from __future__ import annotations

import time
from typing import Any, Iterator, Optional, Tuple

import poptorch
import torch

from raypod.plan import user_code
from raypod.plan.plan import Plan
from raypod.runtime.worker import devices
from raypod.runtime.worker.replica_model import ReplicaModel
from raypod.training.models import program
from raypod.training.tasks.registry import task_of_plan

_DIGEST = "0" * 16  # of samples, which the programs get as numbers


def compile_programs(plan: Plan, cache: Optional[str]) -> Iterator[Tuple[str, float]]:
    """Compile training and evaluation for `useOfflineIpuTarget`; yield the name of each and its seconds.

    The environment is that of instance 0. The data determines shapes and constants of the programs.

    Args:
        plan: the plan of the run.
        cache: the folder of executables; None for none.

    Raises:
        ConfigError: the data is missing, the SDK rejects an option, or the user's code fails.
    """
    with user_code.reported(plan.config.model_name), devices.CallGuard():
        task = task_of_plan(plan)
        torch.manual_seed(plan.config.training.seed)
        model = ReplicaModel(plan, task, task.load().first_batch(plan.config.training.seed))
        options = program.training_options(plan, cache).useOfflineIpuTarget()
        training = poptorch.trainingModel(model.training_step, options, model.optimizer)
        batch = task.example(plan.geometry.combined_batch_size)
        yield "training", _seconds(training, (*batch, *model.call_words(0, _DIGEST)))
        training.destroy()
        if plan.dataset_size.test_samples:
            model.network.eval()
            options = program.inference_options(plan, cache).useOfflineIpuTarget()
            inference = poptorch.inferenceModel(model.evaluation_step, options)
            yield "evaluation", _seconds(inference, task.example(plan.geometry.evaluation_batch_size))
            inference.destroy()


def _seconds(model: Any, inputs: Tuple[Any, ...]) -> float:
    began = time.monotonic()
    model.compile(*inputs)
    return time.monotonic() - began
