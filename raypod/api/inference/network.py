"""The network of a run in this process, in float32 and evaluation mode, with the weights of a checkpoint."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, Mapping, Tuple, Type

import torch
from torch import nn

from raypod.api.inference.checkpoints import Weights
from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import Config
from raypod.system import sdk, torchvision_import
from raypod.training.checkpoint import tensors
from raypod.training.data.loading import NO_EPOCH, SeededSamples, collated
from raypod.training.data.source import Batch, Source
from raypod.training.models.networks import TaskNetwork
from raypod.training.tasks.registry import facts_of, kind_of, task_of
from raypod.training.tasks.task import Task

Inputs = Tuple[Tuple[Any, ...], Dict[str, Any]]  # positional and keyword arguments of the network


class HostNetwork:
    """A task with its data and its network. Calling it applies `device_input` and the network, as on the device."""

    def __init__(self, task: Task, source: Source, network: nn.Module, prepare: nn.Module) -> None:
        self.task, self.source, self.network, self.prepare = task, source, network, prepare

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the output of the network. No gradients are recorded."""
        with torch.no_grad():
            return self.network(*self.prepared(inputs), **named)

    def of_task(self) -> TaskNetwork:
        """Return the network as the methods of a task get it."""
        return TaskNetwork(self.network, self)

    def prepared(self, inputs: Tuple[Any, ...]) -> Tuple[Any, ...]:
        """Return positional inputs as the network gets them."""
        with torch.no_grad():
            return (self.prepare(inputs[0]), *inputs[1:]) if inputs else inputs

    def samples(self, count: int) -> Batch:
        """Return a batch of the first test samples (training samples if there are none), at most `count`."""
        source, seed = self.source, self.task.config.training.seed
        split = source.test if len(source.test) else source.train
        indices = torch.arange(min(count, len(split))).numpy()
        if source.is_in_memory:
            return source.gather(split, indices, None)
        samples = SeededSamples(split, seed)
        loaded = []
        for index in indices.tolist():
            with user_code.reported(f"sample {index}"):
                loaded.append(samples[NO_EPOCH, index][1])
        return source.to_device_format(collated(loaded, indices.tolist()))

    def inputs_of(self, batch: Batch) -> Inputs:
        """Return the arguments with which the task calls the network for a batch, before `prepared`."""
        calls = []

        def record(*inputs: Any, **named: Any) -> Any:
            calls.append((inputs, named))
            return self(*inputs, **named)

        named = dict(zip(self.task.names, batch)) if self.task.names is not None else {}
        self.task.evaluation_outputs(TaskNetwork(self.network, record), *(() if named else batch), **named)
        return calls[0]


@contextlib.contextmanager
def open_network(config: Config, weights: Weights, method: str = "") -> Iterator[HostNetwork]:
    """Yield the network of a config with given weights; in the context its modules can import the SDK.

    Raises:
        ConfigError: the task does not implement `method`, the data cannot be used, or the weights are those of another
            network.
    """
    training = config.training.model_copy(update={"precision": "32.32"})
    run = config.run.model_copy(update={"device": "auto"})  # the network runs on the CPU, also without IPUs
    config = config.model_copy(update={"training": training, "run": run})
    torchvision_import.install()
    with sdk.importable(run.device):
        kind = kind_of(config)
        if method and getattr(kind, method) is getattr(Task, method):
            raise ConfigError(_missing(kind, config.task.name, method))
        task = task_of(config, facts_of(config).pickled)
        with contextlib.nullcontext() if task.user_code is None else user_code.reported(task.user_code):
            yield _build(task, weights.tensors)


def _missing(kind: Type[Task], name: str, method: str) -> str:
    """Return that a task has no predictions of files, or generates no text, and what it has."""
    what = "generates no text" if method == "generate" else "has no predictions of files"
    if method == "generate" and kind.predict is not Task.predict:
        way = "name files in place of --prompt"
    elif method == "predict" and kind.generate is not Task.generate:
        way = "give --prompt TEXT, which it continues"
    elif name.startswith("hf-"):
        way = "raypod export RUN --format hf writes a folder for the pipelines of transformers"
    else:
        way = "raypod evaluate RUN --predictions FILE writes those of the test split" if kind.predictions else ""
    return f"the task {name} {what}: it implements no `{method}`{way and '; '}{way}"


def _build(task: Task, weights: Mapping[str, torch.Tensor]) -> HostNetwork:
    seed, source = task.config.training.seed, task.load()
    with user_code.reported(f"training sample {source.first}"):
        batch = source.first_batch(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = task.network(batch)
    tensors.load_weights(network, weights, "use the data set on which the model was trained")
    return HostNetwork(task, source, network.eval(), task.device_input(batch).eval())
