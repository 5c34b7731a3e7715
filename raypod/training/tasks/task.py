"""The interface of a task: its data, network, loss and metrics. A user's task is a subclass of `Task`."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Type, Union

from raypod.errors import ConfigError
from raypod.events import EvaluationDone, UpdateDone
from raypod.plan.config import Config, TaskOptions
from raypod.plan.metric import LOSS, Metric
from raypod.plan.plan import DatasetSize, TaskFacts
from raypod.plan.values import TRACES
from raypod.system.urls import is_url

if TYPE_CHECKING:  # planning imports this module, and must not import torch
    import numpy as np
    import torch
    from torch import nn

    from raypod.training.data.source import Batch, Source

Ratios = Dict[str, Tuple[Any, Any]]  # numerator and denominator by the name of the metric
Predicted = Dict[str, Any]  # a tensor [samples, ...] by the name of the prediction
_RESERVED = {  # keys of metrics.jsonl, evaluations.jsonl, a checkpoint's manifest and summary.json
    *(field.name for event in (UpdateDone, EvaluationDone) for field in dataclasses.fields(event)),
    *("updates", "epochs", "evaluations", "device", "restarts", "topology", "interrupted", "preempted", "checkpoint"),
    *TRACES,
    *("seconds_to_first_update", "seconds_to_start", "weights_sha256", "ema_sha256", "stopped_early"),
}
# What tasks of other libraries create optimizers with.
_OF_OTHERS = ("configure_optimizers", "create_optimizer", "optimizers")


class Task(abc.ABC):
    """What a run trains. Planning and every instance create the task from the config.

    A subclass implements `datasets`, `network`, `training_outputs` and `evaluation_outputs`. A sample is a tensor, or
    a tuple or dict of tensors; the last two methods get the tensors of a micro-batch as positional arguments, or by
    the names of the dict as keyword arguments. Both are compiled for the device as `forward` of a PopTorch model.

    Attributes:
        Options: the task's own options, which are flags and keys of the section `task`; `self.options` has the values.
        metrics: what is measured besides the loss. A `Metric("loss", ...)` replaces the way in which the loss is shown.
        predictions: the names of what `evaluation_outputs` also returns for each sample.
        test_metrics: what `prediction_metrics` computes of the predictions for all test samples, as F1 or AUC.
        best: name of the metric by which the best checkpoint is kept.
        defaults: of other keys of the config, as in `{"training.learning_rate": 0.01}`.
        samples_are: what a sample is, in the plural.
        collate: makes a batch of a list of samples: `raypod.pad_collate(64, 128)`, or a method with the argument
            `samples`. It gets one sample at a time, so that a batch does not depend on the placement, and must return
            the same shapes for all. None: samples have the same shapes.
    """

    collate: Any = None
    Options: ClassVar[Type[TaskOptions]] = TaskOptions
    metrics: ClassVar[Tuple[Metric, ...]] = ()
    predictions: ClassVar[Tuple[str, ...]] = ()
    test_metrics: ClassVar[Tuple[Metric, ...]] = ()
    best: ClassVar[str] = LOSS.name
    defaults: ClassVar[Mapping[str, Any]] = {}
    samples_are: ClassVar[str] = "samples"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options: Any = self.Options.model_validate(config.task.options)
        self.names: Optional[Tuple[str, ...]] = None  # of the tensors of a batch, if samples are dicts
        self._packed_size: Optional[DatasetSize] = None  # of what `raypod pack` has written, once it is loaded
        self.user_code: Optional[str] = config.task.name if ":" in config.task.name else None

    def datasets(self) -> Tuple[Any, Any]:
        """Return the training split, and the test split or None.

        A split is a map-style data set, or `Arrays` for data in memory. Samples may draw random numbers from torch,
        NumPy and `random`, which are seeded by (seed, epoch, sample).
        """
        raise NotImplementedError(f"{type(self).__name__} must implement datasets(), or needs --data-dir")

    @abc.abstractmethod
    def network(self, first_batch: Batch) -> nn.Module:
        """Return the network in float32. The global generator of torch is seeded before.

        Args:
            first_batch: the tensors of a batch that consists of the first training sample, as the host sends them: by
                number, as in `first_batch[0]`, and by name if samples are dicts, as in `first_batch["x"]`.

        Raises:
            ConfigError: the network does not fit the data.
        """

    @abc.abstractmethod
    def training_outputs(self, network: Any, *batch: Any, **named: Any) -> Tuple[torch.Tensor, Ratios]:
        """Return the loss (0-d) of a micro-batch, and numerator and denominator of each other metric.

        The loss is the mean over the samples, of one or of several terms; the training marks it for PopTorch.
        Numerators and denominators are 0-d tensors or numbers.

        Args:
            network: calls the network; floating-point inputs are converted to the precision of the activations. It has
                the attributes of the module, as in `network.parameters()`.
        """

    @abc.abstractmethod
    def evaluation_outputs(self, network: Any, *batch: Any, **named: Any) -> Union[Ratios, Tuple[Ratios, Predicted]]:
        """Return numerator and denominator of each metric and of "loss", per sample: tensors [samples] or numbers.

        With `predictions`, return a tuple of that and `{name: tensor [samples, ...]}`.
        """

    def prediction_metrics(self, predictions: Mapping[str, np.ndarray]) -> Dict[str, float]:
        """Return the value of each of `test_metrics`, of the predictions for all test samples.

        It runs on a host, in one process, after each evaluation.

        Args:
            predictions: an array [test samples, ...] by name: float32, int64 or bool, in the order of the samples,
                whatever the placement.
        """
        raise NotImplementedError(f"{type(self).__name__} has test_metrics and must implement prediction_metrics()")

    def prediction_details(self, predictions: Mapping[str, np.ndarray]) -> Dict[str, Any]:
        """Return what the report shows of the predictions, as plain data: see `raypod.classification_details`."""
        return {}

    def parameter_groups(self, network: nn.Module, weight_decay: float) -> List[Dict[str, Any]]:
        """Return the parameter groups of the optimizer. Biases and norms (dimension 1) have no weight decay.

        A group can have its own `lr`, in place of `training.learning_rate`; the schedule applies to both.
        """
        parameters = list(network.parameters())
        return [
            {"params": [each for each in parameters if each.dim() > 1], "weight_decay": weight_decay},
            {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
        ]

    def load(self) -> Source:
        """Load the data: shards in `data.data_dir`, or else `datasets`. ConfigError if it cannot be used."""
        from raypod.training.data import packed_samples
        from raypod.training.data.samples import SampleSource  # imports torch

        config = self.config
        if config.data.data_dir is None:
            splits = self.datasets()
        else:
            packed = packed_samples.opened(config)
            splits, self._packed_size = packed_samples.splits_of(packed, config), packed_samples.size_of(packed, config)
        seed, first = config.training.seed, config.data.first_sample
        source = SampleSource(config.task.name, splits, seed, first, self.collate)
        self.names = source.names
        return source

    def facts(self) -> TaskFacts:
        """Return what planning has to know. ConfigError if the data or the metrics cannot be used."""
        from raypod.training.data.samples import SampleSource  # imports torch

        place, name = self.config.data.data_dir, self.config.task.name.rpartition(":")[2]
        source = self.load()
        is_local = place is None or not is_url(place)  # a plan reads only the index and the first sample of a URL
        if is_local and isinstance(source, SampleSource):  # a task can override `load`
            source.check_batches(self.config.training.seed)
        if place is not None and self._packed_size is None:
            raise ConfigError(f"--data-dir has no effect on the task {name}, whose own `load` loads its data: omit it")
        for attribute in _OF_OTHERS:
            if callable(getattr(self, attribute, None)):
                raise ConfigError(
                    f"task {name}: {attribute} has no effect: a compiled model has one optimizer, --optimizer, whose "
                    "groups `parameter_groups` returns; two optimizers, as of a GAN, are two programs"
                )
        metrics = _checked_metrics(self.metrics, self.test_metrics, self.best, name)
        if isinstance(self.predictions, str):
            raise ConfigError(f"task {name}: predictions is a tuple of names; write ({self.predictions!r},)")
        if self.test_metrics and not self.predictions:
            raise ConfigError(f"task {name}: test_metrics are computed of predictions; name those in `predictions`")
        size = self._packed_size or DatasetSize(len(source.train), len(source.test))
        return TaskFacts(
            *(size, metrics, self.best, self.samples_are),
            data=name,
            model=name,
            test_metrics=self.test_metrics,
            predictions=self.predictions,
        )

    def example(self, samples: int) -> Batch:
        """Return a batch in the shapes and dtypes of the device, for a plan."""
        from raypod.training.data.samples import NamedBatch  # imports torch

        first_batch = self.load().first_batch(self.config.training.seed)
        repeated = tuple(each.repeat(samples, *[1] * (each.dim() - 1)) for each in first_batch)
        return NamedBatch.of(repeated, self.names)

    def device_input(self, first_batch: Batch) -> nn.Module:
        """Return the module that transforms the first positional input of the network on the device."""
        from torch import nn  # as above

        return nn.Identity()

    def description(self) -> Dict[str, Any]:
        """Return what the users of an exported model need, as plain data. `load` has been called."""
        return {}

    def predict(self, network: Any, inputs: Sequence[str], top: int) -> Iterable[Dict[str, Any]]:
        """Yield a record, plain data, for each input of `raypod predict RUN INPUTS...`. `load` has been called.

        Args:
            network: calls the network in float32 and evaluation mode.
            inputs: the words of the command line: mostly files or folders.
            top: the number of predictions per input.

        Raises:
            ConfigError: an input cannot be used, or the task has no predictions.
        """
        raise ConfigError(f"the task {self.config.task.name} has no predictions of files: it implements no `predict`")

    def generate(self, network: Any, prompt: str, length: int, temperature: float, seed: int) -> str:
        """Return the continuation of a prompt, for `raypod predict RUN --prompt TEXT`. `load` has been called.

        Args:
            network: as of `predict`.
            prompt: the text.
            length: the number of tokens to generate.
            temperature: divides the logits; 0 chooses the most probable token.
            seed: of the random numbers.

        Raises:
            ConfigError: the prompt cannot be used, or the task generates no text.
        """
        raise ConfigError(f"the task {self.config.task.name} generates no text: it implements no `generate`")


def _checked_metrics(
    metrics: Tuple[Metric, ...], of_predictions: Tuple[Metric, ...], best: str, name: str
) -> Tuple[Metric, ...]:
    """Return the metrics with the loss first. ConfigError if they, or those of the test, cannot be used."""
    for attribute, each in (("metrics", metrics), ("test_metrics", of_predictions)):
        if not isinstance(each, (tuple, list)) or not all(isinstance(metric, Metric) for metric in each):
            form = f'{attribute} = (raypod.Metric("NAME"),)'
            raise ConfigError(f"task {name}: {attribute} = {each!r} is no tuple of metrics; write {form}")
    loss = next((metric for metric in metrics if metric.name == LOSS.name), LOSS)
    found = (loss, *(metric for metric in metrics if metric is not loss))
    names = [metric.name for metric in (*found, *of_predictions)]
    for metric in names:
        if names.count(metric) > 1 or metric in _RESERVED:
            reason = "is given twice" if names.count(metric) > 1 else "is another key of the files of a run"
            raise ConfigError(f"task {name}: the metric {metric!r} {reason}; rename it")
    if best not in names:
        raise ConfigError(f"task {name}: best = {best!r} is none of its metrics ({', '.join(names)})")
    return found
