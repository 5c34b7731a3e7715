"""The interface of a task."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Tuple

from raypod.plan.config import Config

if TYPE_CHECKING:  # planning imports this module, and must not import torch
    import torch
    from torch import nn

    from raypod.datasets.source import Batch, Source

Ratios = Dict[str, Tuple[Any, Any]]  # numerator and denominator by the name of the metric


class Task(abc.ABC):
    """The data, the network, the loss and the metrics of a run. Instances and planning create it from the config."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @abc.abstractmethod
    def load(self) -> Source:
        """Load the data. ConfigError if it cannot be used."""

    @abc.abstractmethod
    def network(self, first_batch: Batch) -> nn.Module:
        """Return the network in float32, for the first batch as the host sends it. ConfigError if it does not fit."""

    @abc.abstractmethod
    def example(self, samples: int) -> Batch:
        """Return a batch of zeros as the network gets it, for a plan without the data."""

    def device_input(self, first_batch: Batch) -> nn.Module:
        """Return the module that transforms the first tensor of a batch on the device, before the network."""
        from torch import nn  # as above

        return nn.Identity()

    @abc.abstractmethod
    def training_outputs(self, network: Any, *batch: torch.Tensor) -> Tuple[torch.Tensor, Ratios]:
        """Return the loss (0-d) of a micro-batch, and the other metrics as pairs of 0-d tensors or numbers.

        Runs on the device.

        Args:
            network: a callable, which applies `device_input` to its first argument, and then the network.
        """

    @abc.abstractmethod
    def evaluation_outputs(self, network: Any, *batch: torch.Tensor) -> Ratios:
        """Return all metrics of a micro-batch, the loss included, as pairs of tensors [samples] or numbers.

        Runs on the device.
        """

    def parameter_groups(self, network: nn.Module, weight_decay: float) -> List[Dict[str, Any]]:
        """Return the parameter groups of the optimizer. Biases and norms (dimension 1) have no weight decay."""
        parameters = list(network.parameters())
        return [
            {"params": _with(parameters, is_matrix=True), "weight_decay": weight_decay},
            {"params": _with(parameters, is_matrix=False), "weight_decay": 0.0},
        ]


def _with(parameters: Iterable[nn.Parameter], *, is_matrix: bool) -> List[nn.Parameter]:
    return [parameter for parameter in parameters if (parameter.dim() > 1) == is_matrix]
