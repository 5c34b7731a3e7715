"""The exponential moving average of a network's parameters (`--ema`), on the host."""

from __future__ import annotations

import contextlib
from typing import Dict, Iterator, Mapping, Tuple

import torch
from torch import nn


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
