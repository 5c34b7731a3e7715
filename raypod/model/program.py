"""The PopTorch programs of a replica: the modules, options and optimizer of training and evaluation."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

import popdist.poptorch
import poptorch
import torch
from torch import nn

from raypod.model import classification
from raypod.model.networks import build_model
from raypod.model.recent_results import RecentResults
from raypod.plan.config import Config, TrainingSection
from raypod.plan.plan import Plan

_REDUCTIONS = {"sum": poptorch.ReductionType.Sum, "mean": poptorch.ReductionType.Mean}


class _Optimizer(NamedTuple):
    create: Any  # the class
    states: Tuple[str, ...]  # per parameter; the option STATE_accum_type sets the dtype of each
    settings: Tuple[str, ...] = ()  # further settings of the section `training` that the class has as options


_MOMENTS = ("first_order_momentum", "second_order_momentum")
_OPTIMIZERS = {
    "sgd": _Optimizer(poptorch.optim.SGD, ("velocity",), ("momentum",)),
    "adam": _Optimizer(poptorch.optim.Adam, _MOMENTS),
    "adamw": _Optimizer(poptorch.optim.AdamW, _MOMENTS),
    "lamb": _Optimizer(poptorch.optim.LAMB, _MOMENTS),
}
_FLOAT32_STATES = {"second_order_momentum"}  # half precision would underflow


class TrainingStep(nn.Module):
    """Network and loss for one micro-batch of training; `prepare` transforms the images on the device.

    With `recent_results`, `forward` takes a row of `recent_results.call_words` as third argument.
    """

    def __init__(
        self,
        network: nn.Module,
        prepare: nn.Module,
        label_smoothing: float = 0.0,
        recent_results: Optional[RecentResults] = None,
    ) -> None:
        super().__init__()
        self.network, self.prepare, self.label_smoothing = network, prepare, label_smoothing
        self.recent_results = recent_results

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor, call: Optional[torch.Tensor] = None
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the metric of the task, both 0-d."""
        logits = self.network(self.prepare(images)).float()
        loss, metric = classification.training_outputs(logits, labels, self.label_smoothing, _mark_loss)
        if self.recent_results is not None:
            self.recent_results(loss, metric, call)
        return loss, metric


def _mark_loss(loss: torch.Tensor) -> torch.Tensor:
    """Mark the tensor at which PopTorch's backward pass starts; a torch loss as the last operator needs no mark."""
    return poptorch.identity_loss(loss, reduction="mean")


class EvaluationStep(nn.Module):
    """Network for one micro-batch of the test split; `prepare` transforms the images on the device."""

    def __init__(self, network: nn.Module, prepare: nn.Module) -> None:
        super().__init__()
        self.network, self.prepare = network, prepare

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [n, classes], float32."""
        logits: torch.Tensor = self.network(self.prepare(images)).float()
        return logits


def build_network(plan: Plan, channels: int, side: int, classes: int) -> nn.Module:
    """Return the network of a plan, with its pipeline splits and in the precision of the stored weights.

    Raises:
        ConfigError: as `networks.build_model`.
    """
    network = build_model(plan.config, channels, side, classes)
    for ipu, name in enumerate(plan.pipeline_splits, start=1):
        poptorch.BeginBlock(network.get_submodule(name), user_id=name, ipu_id=ipu)
    if plan.config.training.precision.endswith(".16"):
        network.half()
    return network


def training_options(plan: Plan) -> Any:
    """Return the `popdist.poptorch.Options` of training; popdist reads the replicas from the environment."""
    training = plan.config.training
    options = _common_options(plan)
    options.deviceIterations(training.device_iterations)
    options.Training.gradientAccumulation(training.gradient_accumulation)
    options.Training.accumulationAndReplicationReductionType(_REDUCTIONS[training.reduction])
    # A micro-batch returns two scalars, so returning all of them costs little.
    options.outputMode(poptorch.OutputMode.All)
    if keeps_recent_results(plan):
        options.broadcastBuffers(False)  # PopTorch accepts changed buffers only if they may differ between replicas
    return options


def keeps_recent_results(plan: Plan) -> bool:
    """Return whether the training step has `RecentResults`: the SDK gives each instance the buffers of the others."""
    exchanges_buffers = hasattr(poptorch.PoplarExecutor, "emulatedReplicaState")
    return exchanges_buffers and plan.geometry.num_instances > 1


def inference_options(plan: Plan) -> Any:
    """Return the `popdist.poptorch.Options` of evaluation."""
    options = _common_options(plan)
    options.deviceIterations(plan.geometry.evaluation_iterations)
    return options.outputMode(poptorch.OutputMode.All)


def _common_options(plan: Plan) -> Any:
    options = popdist.poptorch.Options(ipus_per_replica=plan.geometry.ipus_per_replica)
    options.randomSeed(plan.config.training.seed)
    options.showCompilationProgressBar(False)
    options.setExecutionStrategy(execution_strategy(plan.config.training.execution))
    if plan.config.pod.executable_cache_path is not None:
        options.enableExecutableCaching(plan.config.pod.executable_cache_path)
    return options


def execution_strategy(execution: str) -> Any:
    """Return the PopTorch strategy for several IPUs per replica: "pipelined" or "sharded"."""
    return poptorch.PipelinedExecution() if execution == "pipelined" else poptorch.ShardedExecution()


def build_optimizer(config: Config, model: nn.Module) -> Any:
    """Return the poptorch optimizer of a config. Biases and norms (dimension 1) have no weight decay."""
    training = config.training
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: List[Dict[str, Any]] = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    chosen = _OPTIMIZERS[training.optimizer]
    accumulator, states = _optimizer_dtypes(training)
    options: Dict[str, Any] = {f"{state}_accum_type": dtype for state, dtype in states.items()}
    options.update({name: getattr(training, name) for name in chosen.settings})
    common: Dict[str, Any] = {"lr": training.learning_rate, "loss_scaling": training.loss_scaling}
    return chosen.create(groups, accum_type=accumulator, **common, **options)


def optimizer_bytes(training: TrainingSection) -> int:
    """Return the bytes per parameter of the accumulated gradient and the states of `build_optimizer`."""
    accumulator, states = _optimizer_dtypes(training)
    if not training.momentum:
        states.pop("velocity", None)
    return sum(torch.finfo(dtype).bits // 8 for dtype in (accumulator, *states.values()))


def _optimizer_dtypes(training: TrainingSection) -> Tuple[torch.dtype, Dict[str, torch.dtype]]:
    """Return the dtype of the accumulated gradient, and of each optimizer state: that of the weights, mostly."""
    dtype = torch.float16 if training.precision == "16.16" else torch.float32
    states = _OPTIMIZERS[training.optimizer].states
    return dtype, {state: torch.float32 if state in _FLOAT32_STATES else dtype for state in states}


def load_optimizer_state(optimizer: Any, state: Dict[str, Any]) -> None:
    """Load a `state_dict()` but keep the optimizer's own hyperparameters, which a resumed run may change."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings):
        group.update(own)


def learning_rate(config: Config, update: int, total_updates: int, updates_per_epoch: int = 1) -> float:
    """Return the learning rate of an update (0-based): linear warm-up, then constant, steps, or a cosine to 0."""
    training = config.training
    if update < training.warmup_updates:
        return training.learning_rate * (update + 1) / (training.warmup_updates + 1)
    if training.lr_schedule == "constant":
        return training.learning_rate
    if training.lr_schedule == "step":
        steps_done = sum(update >= epoch * updates_per_epoch for epoch in training.lr_steps or ())
        return training.learning_rate * training.lr_gamma**steps_done
    span = max(1, total_updates - training.warmup_updates)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * (update - training.warmup_updates) / span))


def read_replica_state(training: Any) -> Optional[Dict[str, Any]]:
    """Return the buffers and random states of all replicas of a training model, if the SDK can read them.

    None before the first call, and with the real SDK: it reads back only the buffers of replica 0, with which a resumed
    run then starts all replicas.
    """
    reader = getattr(training, "emulatedReplicaState", None)
    state: Optional[Dict[str, Any]] = reader() if reader is not None and training.isCompiled() else None
    return state


def load_replica_state(training: Any, state: Optional[Dict[str, Any]]) -> None:
    """Restore a state of `read_replica_state`; does nothing for None or if the SDK cannot load it."""
    loader = getattr(training, "loadEmulatedReplicaState", None)
    if state is not None and loader is not None:
        loader(state)


def copy_replica_0_buffers(buffers: Iterable[Tuple[str, Any]], state: Optional[Dict[str, Any]]) -> None:
    """Copy the values of global replica 0, which are saved, to the host's buffers (name, tensor)."""
    values = state["buffers"] if state is not None else {}
    for name, buffer in buffers:
        if name in values:
            buffer.copy_(values[name][0])
