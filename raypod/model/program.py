"""The two programs that the replicas run, a training step and an evaluation step, and the IPUs that they lie on."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import popdist.poptorch
import poptorch
import torch
from torch import nn
from torch.nn import functional

from raypod.plan.config import Config
from raypod.plan.plan import Plan


class TrainingStep(nn.Module):
    """What a replica does with one micro-batch in training."""

    def __init__(self, network: nn.Module, prepare: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.network, self.prepare, self.label_smoothing = network, prepare, label_smoothing

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy (the marked loss) and the number of right predictions, both 0-d."""
        logits = self.network(self.prepare(images)).float()
        loss = functional.cross_entropy(logits, labels)
        if self.label_smoothing:
            # Gradients start at the marked loss: what is added to a torch loss must be marked with it (contract 2.4).
            of_all_classes = -functional.log_softmax(logits, dim=1).mean()
            mixed = (1 - self.label_smoothing) * loss + self.label_smoothing * of_all_classes
            loss = poptorch.identity_loss(mixed, reduction="mean")
        return loss, (logits.argmax(dim=1) == labels).sum()


class EvaluationStep(nn.Module):
    """What a replica does with one micro-batch of the test split."""

    def __init__(self, network: nn.Module, prepare: nn.Module) -> None:
        super().__init__()
        self.network, self.prepare = network, prepare

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [n, classes], float32."""
        logits: torch.Tensor = self.network(self.prepare(images)).float()
        return logits


def begin_blocks(network: nn.Module, splits: Sequence[str]) -> None:
    """Let the next IPU begin with each of these modules of the network, in their order."""
    for ipu, name in enumerate(splits, start=1):
        poptorch.BeginBlock(network.get_submodule(name), user_id=name, ipu_id=ipu)


def execution_strategy(execution: str) -> Any:
    """How the IPUs of a replica work together: "pipelined" or "sharded" (contract section 3)."""
    return poptorch.PipelinedExecution() if execution == "pipelined" else poptorch.ShardedExecution()


# --- from options: What the SDK is told of a plan: the options of the training and of the inference program of an instance.

_REDUCTIONS = {"sum": poptorch.ReductionType.Sum, "mean": poptorch.ReductionType.Mean}


def training_options(plan: Plan) -> Any:
    """`popdist.poptorch.Options` for the training program; replicas come from the environment of the instance."""
    training = plan.config.training
    options = _common_options(plan)
    options.deviceIterations(training.device_iterations)
    options.Training.gradientAccumulation(training.gradient_accumulation)
    options.Training.accumulationAndReplicationReductionType(_REDUCTIONS[training.reduction])
    # Loss and count of right predictions are all that comes back, so every one of them may.
    options.outputMode(poptorch.OutputMode.All)
    return options


def inference_options(plan: Plan) -> Any:
    """The same for the program that evaluates."""
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


# --- from optimizers: Optimizers by name, and the learning rate of every update.


def build_optimizer(config: Config, model: nn.Module) -> Any:
    """The poptorch optimizer of a config. Weight decay is for matrices and kernels, not for biases and norms."""
    training = config.training
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: List[Dict[str, Any]] = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # With half weights their states are half too, but the squares: they would vanish there.
    half = training.precision == "16.16"
    dtype = torch.float16 if half else torch.float32
    common: Dict[str, Any] = {"lr": training.learning_rate, "loss_scaling": training.loss_scaling, "accum_type": dtype}
    if training.optimizer == "sgd":
        return poptorch.optim.SGD(groups, momentum=training.momentum, velocity_accum_type=dtype, **common)
    kind = {"adam": poptorch.optim.Adam, "adamw": poptorch.optim.AdamW, "lamb": poptorch.optim.LAMB}[training.optimizer]
    return kind(groups, first_order_momentum_accum_type=dtype, second_order_momentum_accum_type=torch.float32, **common)


def load_optimizer_state(optimizer: Any, state: Dict[str, Any]) -> None:
    """Take over a `state_dict()`, but for its settings: a run may go on with others than it was saved with."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings):
        group.update(own)


def learning_rate(config: Config, update: int, total_updates: int, updates_per_epoch: int = 1) -> float:
    """The learning rate of update `update` (0-based): linear warm-up, then flat, in steps, or half a cosine to 0."""
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


# --- from state.replica_state: What each replica has of its own (BatchNorm statistics, random states), where the SDK lets a program read_replica_state it.
#
# The real SDK reads back the buffers of replica 0 only (contract section 13), and has no such methods; there a run goes
# on with those for all replicas.
#


def read_replica_state(training: Any) -> Optional[Dict[str, Any]]:
    """The state of all replicas of a training model; None before its first call, and where it cannot be read_replica_state."""
    reader = getattr(training, "emulatedReplicaState", None)
    state: Optional[Dict[str, Any]] = reader() if reader is not None and training.isCompiled() else None
    return state


def load_replica_state(training: Any, state: Optional[Dict[str, Any]]) -> None:
    """Let all replicas go on from such a state, if there is one."""
    taker = getattr(training, "loadEmulatedReplicaState", None)
    if state is not None and taker is not None:
        taker(state)


def show_replica_0(buffers: Iterable[Tuple[str, Any]], state: Optional[Dict[str, Any]]) -> None:
    """Give the host's buffers (name, tensor) the values of global replica 0, which are those that are saved."""
    values = state["buffers"] if state is not None else {}
    for name, buffer in buffers:
        if name in values:
            buffer.copy_(values[name][0])
