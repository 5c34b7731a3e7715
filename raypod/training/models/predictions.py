"""The predictions of a task for the samples of the test split, which an evaluation returns besides its sums."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from raypod.errors import ConfigError
from raypod.plan.metric import SAMPLE
from raypod.plan.plan import TaskFacts

MAX_BYTES = 256 << 20  # of the predictions for all test samples, which one process holds


class Predictions:
    """The predictions for the test samples of one instance."""

    def __init__(self, task: TaskFacts) -> None:
        self._task = task
        self._parts: Dict[str, List[np.ndarray]] = {name: [] for name in task.predictions}

    def add(self, outputs: Any, valid: int) -> torch.Tensor:
        """Add the predictions among the outputs of the evaluation step, and return its sums.

        Args:
            outputs: the sums, float32 [samples, number], and a tensor [samples, ...] of each prediction.
            valid: the samples that count; later ones are padding.

        Raises:
            ConfigError: the predictions are too large.
        """
        sums: torch.Tensor
        sums, *tensors = outputs if self._parts else (outputs,)
        check_size(self._task, tensors)
        for name, tensor in zip(self._parts, tensors):
            self._parts[name].append(_array(tensor[:valid]))
        return sums[:valid]

    def arrays(self, samples: np.ndarray) -> Optional[Mapping[str, np.ndarray]]:
        """Return the arrays by name, with the numbers of the samples; None if the task has no predictions."""
        if not self._parts:
            return None
        return {SAMPLE: samples, **{name: np.concatenate(parts) for name, parts in self._parts.items()}}


def check_size(task: TaskFacts, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ConfigError if the predictions for all test samples would be too large."""
    sizes = {name: _array(each[:1]).nbytes for name, each in zip(task.predictions, tensors)}
    total = sum(sizes.values()) * task.size.test_samples
    if total > MAX_BYTES:
        shown = ", ".join(f"{name!r} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"the predictions of a sample have {sum(sizes.values())} bytes ({shown}), those of "
            f"{task.size.test_samples} test samples {total >> 20} MiB; at most {MAX_BYTES >> 20} MiB are kept: return "
            "less of each sample, as the most probable classes in place of all"
        )


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as float32, int64 or bool, as every device can return it."""
    if tensor.dtype is torch.bool:
        return tensor.numpy()
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64).numpy()


def measured(task: Any, facts: TaskFacts, predictions: Mapping[str, np.ndarray]) -> Tuple[Dict[str, float], Any]:
    """Return the values of the test metrics of a task, and its details, of the predictions for all test samples.

    Raises:
        ConfigError: the task returns other metrics.
    """
    names = [metric.name for metric in facts.test_metrics]
    found = task.prediction_metrics(_own(predictions)) if names else {}
    if not isinstance(found, dict) or set(found) != set(names):
        shown = ", ".join(map(repr, found)) if isinstance(found, dict) else f"a {type(found).__name__}"
        raise ConfigError(
            f"{type(task).__name__}.prediction_metrics returned {shown}; `test_metrics` are "
            f"{', '.join(map(repr, names))}"
        )
    try:
        values = {name: float(found[name]) for name in names}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{type(task).__name__}.prediction_metrics: a metric is a number ({error})") from None
    return values, task.prediction_details(_own(predictions))


def most_probable(logits: torch.Tensor, names: Sequence[str], top: int) -> List[Dict[str, Any]]:
    """Return `class`, `name` and `probability` of the most probable classes of a sample, of its logits [classes]."""
    values, classes = torch.softmax(logits.float(), dim=0).topk(min(top, len(names)))
    pairs = zip(classes.tolist(), values.tolist())
    return [{"class": number, "name": names[number], "probability": value} for number, value in pairs]


def _own(predictions: Mapping[str, np.ndarray]) -> Dict[str, np.ndarray]:
    """Return copies, which a task may change: arrays from other processes are read-only."""
    return {name: np.array(array) for name, array in predictions.items() if name != SAMPLE}
