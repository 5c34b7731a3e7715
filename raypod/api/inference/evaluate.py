"""`raypod evaluate`: the metrics of a checkpoint on a test split, computed by instances as during a training."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from raypod.api.inference import checkpoints, settings
from raypod.api.inference.checkpoints import PathLike, Weights
from raypod.errors import ConfigError, RunError
from raypod.plan.plan import Plan
from raypod.runs.predictions import check_format, write
from raypod.runtime.coordinator.evaluated import Evaluated, combined
from raypod.runtime.coordinator.same_data import check_same_data
from raypod.runtime.coordinator.stop import Stop, stop_on_signal
from raypod.runtime.workers.choice import fleet_for
from raypod.system.command_line import say


def evaluate(
    run: PathLike,
    checkpoint: Optional[str] = None,
    ema: Optional[bool] = None,
    predictions: Optional[PathLike] = None,
    **changes: Any,
) -> Dict[str, Any]:
    """Evaluate a checkpoint of a run on the test split of its data set, or of another one. Writes nothing into the run.

    On the data set of the run the result equals, bit for bit, that of the training at this update, for any placement.

    Args:
        run: a run folder, or a checkpoint in it.
        checkpoint: "last" (default), "best", the name or update of a checkpoint of the run, or the path of a
            checkpoint or of a safetensors file.
        ema: whether to use the moving average of the weights (`--ema` of the training); default: where there is one,
            as the training does.
        predictions: a file for the predictions of the task, a row per sample in their order: Parquet if it is named
            so (which needs pyarrow), else CSV.
        changes: settings that differ from those of the run, with the names of the command line and underscores:
            `dataset`, `data_dir`, `batch_size`, `replicas`, `num_instances`, `fleet`, `device`, and others.

    Returns:
        The value of each metric by name, and `samples`, `update`, `checkpoint`, `weights_sha256`, `dataset`, `device`;
        `details` of tasks that have some, as the confusion matrix of image classification.

    Raises:
        UserError: there is no such run or checkpoint, it is damaged, or the data set or another setting does not fit.
        RunError: an instance fails.
    """
    if predictions is not None:
        check_format(Path(predictions))
        settings.check_writable(Path(predictions), "--predictions")
    return evaluate_run(*settings.opened(run, checkpoint, ema, changes), predictions)[0]


def evaluate_run(
    run: checkpoints.Run, weights: Weights, changes: Mapping[str, Any], predictions: Optional[PathLike] = None
) -> Tuple[Dict[str, Any], Plan]:
    """Return the result of `evaluate`, and the plan; `changes` are by section.key."""
    plan = settings.plan_of(run.config, changes, str(run.folder))
    if predictions is not None and not plan.task.predictions:
        raise ConfigError(
            f"--predictions {predictions}: the task {run.config.task.name} returns none for each sample; name them in "
            "its attribute `predictions`"
        )
    (found,), device = measure(plan, [weights])
    if predictions is not None and found.predictions is not None:
        write(Path(predictions), found.predictions)
    described = {**checkpoints.described(weights), "dataset": plan.task.data, "device": device}
    details = {"details": found.details} if found.details else {}
    return {**found.metrics, "samples": found.samples, **described, **details}, plan


def measure(plan: Plan, several: Sequence[Weights]) -> Tuple[List[Evaluated], str]:
    """Return what is measured of weights, one after the other, on the test split of a plan; and the device.

    Raises:
        UserError: weights are not those of the plan's model, or the pod cannot be used.
        RunError: an instance fails; the message names its log.
    """
    with _temporary(plan) as plan, stop_on_signal(Stop()), contextlib.closing(fleet_for(plan, say)) as fleet:
        started = fleet.start()
        check_same_data(plan, started)
        results = []
        for weights in several:
            fleet.call("load_weights", _packed(weights))
            results.append(combined(plan, fleet, fleet.call("evaluate")))
        return results, started[0].device


@contextlib.contextmanager
def _temporary(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with a temporary folder for the logs of the instances; it is kept if an instance fails."""
    folder = tempfile.mkdtemp(prefix="raypod-evaluate-")
    try:
        yield dataclasses.replace(plan, run_dir=folder)
    except RunError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _packed(weights: Weights) -> np.ndarray:
    from raypod.training.checkpoint import tensors  # help works without torch

    return np.concatenate(tensors.pack_flat(dict(weights.tensors)))
