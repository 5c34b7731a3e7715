"""`raypod average`: the mean of the weights of the newest checkpoints, as a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import torch

from raypod.api.inference import checkpoints, settings
from raypod.api.inference.checkpoints import PathLike, Weights
from raypod.api.inference.evaluate import measure
from raypod.api.inference.formats import completed, write_safetensors
from raypod.errors import ConfigError
from raypod.plan.plan import Plan
from raypod.training.checkpoint import tensors


def average(run: PathLike, last: int = 3, output: Optional[PathLike] = None, **changes: Any) -> Dict[str, Any]:
    """Average the weights of the newest checkpoints of a run, write them, and evaluate them and the newest ones.

    Sums are computed in float64; integer buffers are those of the newest checkpoint.

    Args:
        run: a run folder that does not train.
        last: the number of checkpoints, at least 1.
        output: the file; default: `average-<last>.safetensors` in the run folder. It is replaced.
        changes: settings of the evaluation, as of `evaluate`.

    Returns:
        `output`, `checkpoints`, `weights_sha256`, and `average` and `newest` with the metrics of both.

    Raises:
        UserError: there is no such run, it still trains, it has fewer checkpoints, or one is damaged.
        RunError: an instance fails.
    """
    found = checkpoints.open_run(run, settings.trusted_of(changes))
    return average_run(found, last, output, settings.by_name(found.config, changes))[0]


def average_run(
    run: checkpoints.Run, last: int, output: Optional[PathLike], changes: Mapping[str, Any]
) -> Tuple[Dict[str, Any], Plan]:
    """Return the result of `average`, and the plan; `changes` are by section.key."""
    if run.checkpoint is not None:
        raise ConfigError(f"{run.checkpoint} is a checkpoint: name its run folder {run.folder}")
    if last < 1:
        raise ConfigError(f"--last {last} must be at least 1")
    checkpoints.check_has_ended(run, "wait for its end: it removes old checkpoints")
    path = Path(output) if output is not None else run.outputs / f"average-{last}.safetensors"
    settings.check_writable(path)
    newest_first = [checkpoints.load_checkpoint(each.path) for each in checkpoints.newest(run, last)]
    averaged = Weights(mean([each.tensors for each in newest_first]), path, newest_first[0].update)
    plan = settings.plan_of(run.config, changes, str(run.folder))
    results, device = measure(plan, [averaged, newest_first[0]])
    names = [each.path.name for each in newest_first]
    sha256 = tensors.weights_sha256(averaged.tensors)
    metadata = {
        "raypod.task": run.config.task.name,
        "raypod.update": str(averaged.update),
        "raypod.averaged": ",".join(names),
        "raypod.weights_sha256": sha256,
        "raypod.config": run.config.to_yaml(),
    }
    with completed(path) as partial:
        write_safetensors(partial, averaged.tensors, metadata)
    shown = [{**found.metrics, "samples": found.samples} for found in results]
    result = {"output": str(path), "checkpoints": names, "update": averaged.update, "weights_sha256": sha256}
    return {**result, "device": device, "average": shown[0], "newest": shown[1]}, plan


def mean(states: Sequence[Mapping[str, torch.Tensor]]) -> Dict[str, torch.Tensor]:
    """Return the mean of state dicts in their dtypes, computed in float64; integers are those of the first one.

    Raises:
        ConfigError: names or shapes differ.
    """
    first = states[0]
    for other in states[1:]:
        for name in tensors.different_shapes(first, other):
            raise ConfigError(f"the checkpoints are of different models: {name} differs")
    return {name: _mean([state[name] for state in states]) for name in first}


def _mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    if not values[0].is_floating_point():
        return values[0]
    total = torch.zeros(values[0].shape, dtype=torch.float64)
    for value in values:
        total += value.double()
    return (total / len(values)).to(values[0].dtype)
