"""The model that every replica of an instance runs: the network, its training and evaluation step, the optimizer."""

from __future__ import annotations

from typing import Any, Dict

from raypod.checkpoint import tensors
from raypod.datasets.arrays import Splits
from raypod.datasets.feed import Feed
from raypod.datasets.transforms import activation_dtype, device_input
from raypod.model import program
from raypod.model.recent_results import RecentResults
from raypod.plan.plan import Plan


class ReplicaModel:
    """Network and optimizer on the host. Both steps share the network."""

    def __init__(self, plan: Plan, splits: Splits, feed: Feed) -> None:
        config = plan.config
        channels, side = feed.sample_shape()
        self.network = program.build_network(plan, channels, side, splits.classes)
        dtype = activation_dtype(config.training.precision)
        prepare = device_input(dtype, splits.mean, splits.std, feed.sent_shape()[1:], config.data.image_size)
        self.keeps_results = program.keeps_recent_results(plan)
        recent = RecentResults(plan.geometry) if self.keeps_results else None
        step = program.TrainingStep(self.network, prepare, config.training.label_smoothing, recent)
        self.training_step = step.train()
        self.evaluation_step = program.EvaluationStep(self.network, prepare)
        self.optimizer = program.build_optimizer(config, self.network)

    def state(self) -> Dict[str, Any]:
        """Return `weights` and `optimizer`, the state dicts. Their tensors are not copied."""
        return {"weights": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: Dict[str, Any]) -> None:
        """Load `weights` and `optimizer`. ConfigError if they are those of another model."""
        tensors.load_weights(self.network, state["weights"])
        program.load_optimizer_state(self.optimizer, state["optimizer"])

    def weights_sha256(self) -> str:
        """Return the hash of the weights, as checkpoints record it."""
        return tensors.weights_sha256(self.network.state_dict())

    def num_parameters(self) -> int:
        """Return the number of scalars in all parameters."""
        return sum(parameter.numel() for parameter in self.network.parameters())
