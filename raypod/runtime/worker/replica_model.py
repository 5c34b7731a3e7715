"""The model of every replica of an instance: network, steps, optimizer with its rates, average of the weights."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import warnings
from typing import Any, ContextManager, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.events import CallReport, EvaluationReport
from raypod.plan import user_code
from raypod.plan.learning_rate import learning_rate, loss_scaling
from raypod.plan.metric import exact_parts
from raypod.plan.plan import Plan
from raypod.training.checkpoint import initial_weights, tensors
from raypod.training.checkpoint.format import Manifest
from raypod.training.checkpoint.resume import record_memory_format
from raypod.training.checkpoint.weights_file import find_weights
from raypod.training.data.source import Batch
from raypod.training.models import optimizers, program, recent_results
from raypod.training.models.predictions import check_size
from raypod.training.models.program import EvaluationStep, TaskOutputs
from raypod.training.tasks.task import Task


class ReplicaModel:
    """Network and optimizer on the host. Both steps share the network."""

    def __init__(self, plan: Plan, task: Task, first_batch: Batch) -> None:
        metrics = plan.task.metrics
        self.network = program.finish_network(plan, task.network(first_batch))
        prepare = task.device_input(first_batch)
        self._geometry, self._num_sums = plan.geometry, 2 * len(metrics)
        self._keeps_results = program.keeps_recent_results(plan)
        self._loaded_replica_state: Optional[Dict[str, Any]] = None
        recent = recent_results.RecentResults(plan.geometry, self._num_sums) if self._keeps_results else None
        self.training_step = program.TrainingStep(task, metrics, self.network, prepare, recent)
        self.train()
        self.evaluation_step = program.EvaluationStep(task, metrics, self.network, prepare)
        decay, self._average_every = plan.config.training.ema, plan.config.training.ema_interval
        self.average = None if decay is None else WeightAverage(self.network, decay, self._average_every)
        groups = task.parameter_groups(self.network, plan.config.training.weight_decay)
        self.optimizer = optimizers.build_optimizer(plan.config, groups)

    def check_evaluation(self, plan: Plan, task: Task, first_batch: Batch) -> None:
        """Check the parameters of a user's methods, and the metrics that they return; see `check`."""
        if ":" not in plan.config.task.name:
            return
        check_parameters(task, first_batch)
        if plan.dataset_size.test_samples:
            check(plan, task, self.network, self.evaluation_step.prepare, first_batch)

    def train(self) -> None:
        """Set the training mode of both steps' modules; see `optimizers.train`."""
        self.training_step.train()
        optimizers.train(self.network)

    def state(self) -> Dict[str, Any]:
        """Return the state dicts `weights`, `optimizer` and `ema`, None without average. Tensors are not copied."""
        ema = None if self.average is None else self.average.state()
        return {"weights": self.network.state_dict(), "optimizer": self.optimizer.state_dict(), "ema": ema}

    def load_state(self, state: Dict[str, Any]) -> None:
        """Load a `state`. ConfigError if it is that of another model."""
        tensors.load_weights(self.network, state["weights"])
        if self.average is not None:
            self.average.load(state["ema"])
        optimizers.load_optimizer_state(self.optimizer, state["optimizer"])

    def load_weights(self, flat: np.ndarray) -> str:
        """Load weights alone, for an evaluation; return their hash.

        Args:
            flat: the buffers of `tensors.pack_flat` of a state dict, concatenated: uint8 [bytes].

        Raises:
            ConfigError: they are those of another model.
        """
        hint = "evaluate with data and task options that give the network the shapes of the training"
        tensors.load_weights(self.network, tensors.unpack_flat(flat), hint)
        self.reset_average()
        return self.weights_sha256()

    def load_initial_weights(self, plan: Plan) -> None:
        """Load the file of `--init-weights`, if the plan has one. ConfigError as `initial_weights.load`."""
        training = plan.config.training
        if training.init_weights is not None:
            path = find_weights(plan, training.init_weights)
            initial_weights.load(self.network, path, training.init_ignore or ())
            self.reset_average()

    def is_averaged_after(self, update: int) -> bool:
        """Return whether the weights after `update` updates are due to be added to the average."""
        return self.average is not None and self.average.update != update and update % self._average_every == 0

    def average_after(self, update: int) -> None:
        """Add the weights after `update` updates, which are on the host, to the average if they are due."""
        if self.average is not None and self.is_averaged_after(update):
            self.average.add(update)

    def begin_average_at(self, update: int) -> None:
        """Record that the average is that after `update` updates."""
        if self.average is not None:
            self.average.update = update

    def reset_average(self) -> None:
        """Begin the average with the present weights."""
        if self.average is not None:
            self.average.reset()

    def evaluated_weights(self) -> ContextManager[None]:
        """Return a context in which the network has the weights that are evaluated: the average, if there is one."""
        return contextlib.nullcontext() if self.average is None else self.average.applied()

    def buffers(self) -> Dict[str, torch.Tensor]:
        """Return the buffers of the network by name; of bool ones, which Horovod does not send, the bytes."""
        named = self.network.named_buffers()
        return {name: each.view(torch.uint8) if each.dtype is torch.bool else each for name, each in named}

    def weights_sha256(self) -> str:
        """Return the hash of the weights, as checkpoints record it."""
        return tensors.weights_sha256(self.network.state_dict())

    def memory_format(self, training: Any) -> Optional[str]:
        """Return the memory format that the SDK has chosen; None if it has not, or is PopTorch's."""
        chosen = getattr(training, "emulatedMemoryFormat", None) if training.isCompiled() else None
        return None if chosen is None else str(chosen())

    def recorded(self, manifest: Manifest, training: Any) -> Manifest:
        """Return the manifest with the memory format; see `record_memory_format`."""
        return record_memory_format(manifest, self.memory_format(training))

    def call_words(self, update: int, samples_digest: str) -> Tuple[torch.Tensor, ...]:
        """Return the further input of a call after `update` updates if the device keeps its results."""
        return (recent_results.call_words(self._geometry, update, samples_digest),) if self._keeps_results else ()

    def sums(self, outputs: Tuple[torch.Tensor, torch.Tensor]) -> Tuple[Tuple[Tuple[float, ...], ...], ...]:
        """Return the `CallReport.sums` of the outputs of a call of the training step."""
        return recent_results.replica_sums(outputs[1], self._geometry.call_shape)

    def lost_reports(self, training: Any, missing: Sequence[Tuple[int, int]]) -> Iterator[CallReport]:
        """Yield the missing reports whose results the device of `training` has; see `recent_results.lost_reports`."""
        if self._keeps_results:
            yield from recent_results.lost_reports(program.read_replica_state(training), self._geometry, missing)

    def replica_state(self, training: Any) -> Optional[Dict[str, Any]]:
        """Return the state of the replicas as a checkpoint contains it; None if the SDK has none."""
        if not training.isCompiled():  # before the first call: what was loaded, for the instances that it is sent to
            return self._loaded_replica_state
        return recent_results.without_rows(program.read_replica_state(training))

    def load_replica_state(self, training: Any, state: Optional[Dict[str, Any]]) -> None:
        """Load a state of `replica_state`, also that of another number of replicas."""
        state = program.replica_state_for(self._geometry.total_replicas, state)
        self._loaded_replica_state = state
        if state is not None and "buffers" not in state:  # of a run on IPUs; see `RandomStates`
            return
        if self._keeps_results:
            state = recent_results.with_empty_rows(state, self._geometry, self._num_sums)
        program.load_replica_state(training, state)


class EvaluationSums:
    """The sums over the test samples of one instance."""

    def __init__(self, num_sums: int) -> None:
        self._columns: List[List[float]] = [[] for _ in range(num_sums)]

    def add(self, outputs: torch.Tensor) -> None:
        """Add the outputs of the evaluation step: float32 [samples, num_sums]."""
        for column, values in zip(self._columns, outputs.T.tolist()):
            column.extend(values)

    def report(self, instance: int, predictions: Optional[Mapping[str, Any]] = None) -> EvaluationReport:
        """Return the sums over all samples, and the predictions for them."""
        sums = tuple(map(exact_parts, self._columns))
        return EvaluationReport(instance, len(self._columns[0]), sums, predictions=predictions)


def check_parameters(task: TaskOutputs, batch: Sequence[torch.Tensor]) -> None:
    """Raise ConfigError if a method of the task cannot be called with the network and the tensors of a batch."""
    positional, named = (batch, {}) if task.names is None else ((), dict(zip(task.names, batch)))
    for method in (task.training_outputs, task.evaluation_outputs):
        try:
            inspect.signature(method).bind(task, *positional, **named)
        except TypeError as error:
            entries = f"{len(batch)} tensor(s) of a sample" if task.names is None else ", ".join(task.names)
            raise ConfigError(
                f"{type(task).__name__}.{method.__name__}{user_code.place_of_function(method)} cannot be called with "
                f"the network and {entries}, each an argument: {error}"
            ) from None


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


class WeightAverage:
    """The average of the parameters after every `every` updates, in float32. It begins with the initial parameters.

    Its arithmetic is per element and depends on the parameters and the number of additions only. Buffers, such as the
    statistics of BatchNorm, are not averaged.
    """

    def __init__(self, network: nn.Module, decay: float, every: int) -> None:
        self._network, self._share = network, 1 - decay**every
        self.update = -1  # that of the newest parameters in the average; -1: not trained yet
        self.reset()

    def reset(self) -> None:
        """Begin again with the present parameters."""
        self._values = {name: parameter.detach().float().clone() for name, parameter in self._parameters()}

    def add(self, update: int) -> None:
        """Add the parameters after `update` updates."""
        for name, parameter in self._parameters():
            average = self._values[name]
            average += (parameter.detach().float() - average).mul_(self._share)
        self.update = update

    def state(self) -> Dict[str, torch.Tensor]:
        """Return the network's state dict with the averaged parameters. Tensors are not copied."""
        return {**self._network.state_dict(), **self._values}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a `state`."""
        for name, average in self._values.items():
            average.copy_(state[name])

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the network's parameters by the average within the context."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters()}
        self._copy(self._values)
        try:
            yield
        finally:
            self._copy(own)

    def _copy(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters():
                parameter.copy_(values[name])

    def _parameters(self) -> Iterator[Tuple[str, nn.Parameter]]:
        return self._network.named_parameters(remove_duplicate=False)


class ScheduledRate:
    """Sets the learning rate of the schedule and the loss scaling; values that the device has already cost nothing.

    A parameter group with an `lr` of its own follows the schedule from that one, as with torch's schedulers. The
    scaling of a combined accumulator follows the loss scaling unless the config has one for it.
    """

    def __init__(self, plan: Plan) -> None:
        training = plan.config.training
        self._plan = plan
        self.is_set = True  # the device has, or will be compiled with, the optimizer's current values
        # As the optimizer is built; the rate is that of the groups without their own.
        self._rate, self._scaling = training.learning_rate, loss_scaling(training, epoch=0)
        self._peaks: List[float] = []  # of each group
        self._scales_velocity = training.combined_accumulator and training.velocity_scaling is None

    def set(self, training: Any, optimizer: Any, update: int) -> None:
        """Set the values of an update (0-based) in `optimizer` and in the training model on the device."""
        plan, peak = self._plan, self._plan.config.training.learning_rate
        rate = learning_rate(plan.config, update, plan.total_updates, plan.updates_per_epoch)
        scaling = loss_scaling(plan.config.training, update // plan.updates_per_epoch)
        self._peaks = self._peaks or [group["lr"] for group in optimizer.param_groups]
        if self.is_set and (rate, scaling) == (self._rate, self._scaling):
            return
        for group, own in zip(optimizer.param_groups, self._peaks):
            group["lr"] = rate if own == peak else own * (rate / peak)
            if self._scales_velocity:
                group["velocity_scaling"] = scaling
        optimizer.loss_scaling = scaling
        training.setOptimizer(optimizer)
        self._rate, self._scaling, self.is_set = rate, scaling, True
