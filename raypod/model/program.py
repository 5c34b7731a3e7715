"""The PopTorch programs of a replica: the modules, options and optimizer of training and evaluation."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Optional, Tuple

import popdist.poptorch
import poptorch
import torch
from torch import nn
from torch.nn import functional

from raypod.model.networks import build_model
from raypod.plan.config import Config
from raypod.plan.plan import Plan

_REDUCTIONS = {"sum": poptorch.ReductionType.Sum, "mean": poptorch.ReductionType.Mean}


class TrainingStep(nn.Module):
    """Network and loss for one micro-batch of training; `prepare` transforms the images on the device."""

    def __init__(self, network: nn.Module, prepare: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.network, self.prepare, self.label_smoothing = network, prepare, label_smoothing

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the mean cross-entropy, which is the loss, and the number of correct predictions; both 0-d."""
        logits = self.network(self.prepare(images)).float()
        loss = functional.cross_entropy(logits, labels)
        if self.label_smoothing:
            # PopTorch's backward pass starts at the marked loss: a sum with a torch loss needs `identity_loss`.
            of_all_classes = -functional.log_softmax(logits, dim=1).mean()
            mixed = (1 - self.label_smoothing) * loss + self.label_smoothing * of_all_classes
            loss = poptorch.identity_loss(mixed, reduction="mean")
        return loss, (logits.argmax(dim=1) == labels).sum()


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
    return options


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
    # The states of half-precision weights are half precision too, except for second moments, which would underflow.
    dtype = torch.float16 if training.precision == "16.16" else torch.float32
    common: Dict[str, Any] = {"lr": training.learning_rate, "loss_scaling": training.loss_scaling, "accum_type": dtype}
    if training.optimizer == "sgd":
        return poptorch.optim.SGD(groups, momentum=training.momentum, velocity_accum_type=dtype, **common)
    kind = {"adam": poptorch.optim.Adam, "adamw": poptorch.optim.AdamW, "lamb": poptorch.optim.LAMB}[training.optimizer]
    return kind(groups, first_order_momentum_accum_type=dtype, second_order_momentum_accum_type=torch.float32, **common)


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
