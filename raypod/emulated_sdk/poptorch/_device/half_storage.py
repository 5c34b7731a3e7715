"""What the device stores in half: weights of half models, and accumulators of type half (contract 4, 5).

The emulation computes in float32; here values take on what half can hold, at the moment at which the device stores
them.
"""

from __future__ import annotations

from typing import Any, Callable, List

import torch

from poptorch._device.memory import DeviceMemory
from poptorch._device.random import mixed
from poptorch.options import Options

# The bits of a float32 that half has no room for.
_EXTRA_BITS = 13


class HalfWeights:
    """Rounds the parameters that are half on the host, after every update.

    With `Precision.enableStochasticRounding` up or down at random, so that many small updates count on average. The
    random numbers are a function of `options.random_seed` (0 when unset) and of the micro-batches that a replica has
    run: the same in every process and after a restart.
    """

    def __init__(self, memory: DeviceMemory, options: Options, count_micro_batches: Callable[[], int]) -> None:
        self._parameters = [memory.parameters[name] for name in memory.half_parameters]
        self._is_stochastic = bool(options.Precision.enable_stochastic_rounding)
        self._seed = int(options.random_seed) if options.exists("random_seed") else 0
        self._count_micro_batches = count_micro_batches
        self._generator = torch.Generator()

    def round(self) -> None:
        """Give every such parameter values that half can hold."""
        if self._parameters and self._is_stochastic:
            self._generator.manual_seed(mixed(self._seed, -1, self._count_micro_batches()))
        with torch.no_grad():
            for parameter in self._parameters:
                value = _dithered(parameter, self._generator) if self._is_stochastic else parameter
                parameter.copy_(value.half())


class HalfAccumulator:
    """Entered around the backward pass of each micro-batch of a replica: its sum of gradients is kept in half.

    `is_running`: the sum is a mean over the micro-batches so far, which stays in the range of half.
    """

    def __init__(self, parameters: List[torch.nn.Parameter], is_running: bool) -> None:
        self.is_running = is_running
        self._parameters = parameters
        self._micro_batches = 0

    def __enter__(self) -> None:
        if self.is_running:
            for gradient in self._gradients():
                gradient.mul_(self._micro_batches)

    def __exit__(self, *exc_info: Any) -> None:
        self._micro_batches += 1
        for gradient in self._gradients():
            if self.is_running:
                gradient.div_(self._micro_batches)
            gradient.copy_(gradient.half())

    def start_again(self) -> None:
        """The next micro-batch begins a new update."""
        self._micro_batches = 0

    def _gradients(self) -> List[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


def _dithered(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Float32 values in the range of half, rounded up or down with probabilities that keep the mean.

    Below the normal numbers of half (6e-5) the remaining bits round to nearest.
    """
    noise = torch.randint(2**_EXTRA_BITS, values.shape, generator=generator, dtype=torch.int32)
    bits = values.contiguous().view(torch.int32).add(noise)
    return bits.bitwise_and_(-(2**_EXTRA_BITS)).view(torch.float32)
