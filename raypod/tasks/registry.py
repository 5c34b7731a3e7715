"""Tasks by name: what planning has to know of them, without torch, and what the instances compute."""

from __future__ import annotations

from raypod import datasets
from raypod.plan.config import Config
from raypod.plan.metric import LOSS, Metric
from raypod.plan.plan import TaskFacts
from raypod.tasks.task import Task

_ACCURACY = Metric("accuracy", "higher", label="acc", unit="%", scale=100.0, formats=(".1f", ".2f"))


def facts_of(config: Config, may_be_missing: bool = False) -> TaskFacts:
    """Return what planning has to know of a config's task.

    Args:
        may_be_missing: if files of the data set are missing, return its published size, where there is one.

    Raises:
        ConfigError: as `datasets.load`.
    """
    size = datasets.dataset_size_or_published(config) if may_be_missing else datasets.dataset_size(config)
    return TaskFacts(size, (LOSS, _ACCURACY), best=_ACCURACY.name, samples_are="images")


def task_of(config: Config) -> Task:
    """Return a config's task. Imports torch."""
    from raypod.tasks.image_classification import ImageClassification  # as above

    return ImageClassification(config)
