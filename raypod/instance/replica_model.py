"""The model that every replica of an instance runs: the network, its training and evaluation step, the optimizer."""

from __future__ import annotations

from typing import Any, Dict, Iterator, Optional, Sequence, Tuple

import torch

from raypod.checkpoint import tensors
from raypod.datasets.arrays import Splits
from raypod.datasets.feed import Feed
from raypod.datasets.transforms import activation_dtype, device_input
from raypod.events import CallReport
from raypod.model import classification, program, recent_results
from raypod.plan.plan import Plan


class ReplicaModel:
    """Network and optimizer on the host. Both steps share the network."""

    def __init__(self, plan: Plan, splits: Splits, feed: Feed) -> None:
        config = plan.config
        channels, side = feed.sample_shape()
        self.network = program.build_network(plan, channels, side, splits.classes)
        dtype = activation_dtype(config.training.precision)
        prepare = device_input(dtype, splits.mean, splits.std, feed.sent_shape()[1:], config.data.image_size)
        self._geometry = plan.geometry
        self._keeps_results = program.keeps_recent_results(plan)
        recent = recent_results.RecentResults(plan.geometry) if self._keeps_results else None
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

    def call_words(self, update: int, samples_digest: str) -> Tuple[torch.Tensor, ...]:
        """Return the further input of a call after `update` updates if the device keeps its results."""
        return (recent_results.call_words(self._geometry, update, samples_digest),) if self._keeps_results else ()

    def results(self, outputs: Tuple[torch.Tensor, torch.Tensor]) -> Dict[str, Any]:
        """Return the fields of a `CallReport` that hold the results of a call of the training step."""
        return classification.replica_results(outputs, self._geometry.call_shape)

    def lost_reports(self, training: Any, missing: Sequence[Tuple[int, int]]) -> Iterator[CallReport]:
        """Yield the missing reports whose results the device of `training` has; see `recent_results.lost_reports`."""
        if self._keeps_results:
            yield from recent_results.lost_reports(program.read_replica_state(training), self._geometry, missing)

    def evaluation_sums(self) -> classification.EvaluationSums:
        """Return empty sums for an evaluation."""
        return classification.EvaluationSums()

    def replica_state(self, training: Any) -> Optional[Dict[str, Any]]:
        """Return the state of the replicas as a checkpoint contains it; None if the SDK has none."""
        return recent_results.without_rows(program.read_replica_state(training))

    def load_replica_state(self, training: Any, state: Optional[Dict[str, Any]]) -> None:
        """Load a state of `replica_state`."""
        if self._keeps_results:
            state = recent_results.with_empty_rows(state, self._geometry)
        program.load_replica_state(training, state)
