"""The numerics of the emulated device: its random numbers, and what a weight update rounds to half.

Random numbers are a function of seed, global replica and micro-batch, not of thread or process.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poptorch.device.kernels.half import round_stochastically
from poptorch.options import Options

# torch's CPU generator belongs to the process, so forwards that draw numbers run one after the other.
_generator_lock = threading.Lock()


@contextlib.contextmanager
def device_random(seed: int, replica: int, micro_batch: int) -> Iterator[None]:
    """Context in which torch draws the numbers of that micro-batch. The host's generator is restored afterwards."""
    with _generator_lock:
        host_state = torch.get_rng_state()
        torch.default_generator.manual_seed(mixed_seed(seed, replica, micro_batch))
        try:
            yield
        finally:
            torch.set_rng_state(host_state)


@contextlib.contextmanager
def detect_random() -> Iterator[DrawDetector]:
    """Context that detects whether numbers are drawn. The host's generator is restored afterwards."""
    with device_random(0, 0, 0):
        detector = DrawDetector()
        yield detector
        detector.has_drawn = detector.has_drawn_so_far()


class DrawDetector:
    """The result of `detect_random`: `has_drawn` is set when its context ends."""

    has_drawn = False

    def __init__(self) -> None:
        self._before = torch.get_rng_state()

    def has_drawn_so_far(self) -> bool:
        """Return whether numbers were drawn since the context began."""
        return not torch.equal(self._before, torch.get_rng_state())


class DrawKernelDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects kernels that draw random numbers, even if the generator is restored, as checkpointing does."""

    has_drawn = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise newer torch imports its compiler at the first kernel, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.has_drawn = True
        return func(*args, **(kwargs or {}))


def mixed_seed(seed: int, replica: int, micro_batch: int) -> int:
    """Return a generator seed that is the same in every process, and unrelated for neighboring arguments."""
    # 63 bits of a hash, as torch accepts any non-negative int64.
    packed = struct.pack("<Qqq", seed % 2**64, replica, micro_batch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def rounds_stochastically(options: Options) -> bool:
    """Return whether `options.Precision.enableStochasticRounding` is set."""
    return bool(options._Popart.options.get("enableStochasticRounding"))


class HalfWeights:
    """Rounds the float32 copies of the half weights after every update, and stores them in half.

    With `Precision.enableStochasticRounding` values round up or down at random, so that many small updates count on
    average. The random numbers are a function of `options.random_seed` (0 if unset) and of the micro-batches that a
    replica has run, so they are the same in every process and after a restart.
    """

    def __init__(
        self,
        weights: List[Tuple[torch.Tensor, torch.Tensor]],
        options: Options,
        count_micro_batches: Callable[[], int],
    ) -> None:
        """`weights`: each with its float32 copy."""
        self._weights = weights
        self._is_stochastic = rounds_stochastically(options)
        self._seed = int(options.random_seed) if options.exists("random_seed") else 0
        self._count_micro_batches = count_micro_batches
        self._generator = torch.Generator()

    def round(self) -> None:
        """Round every such weight to values that half can represent."""
        if self._weights and self._is_stochastic:
            self._generator.manual_seed(mixed_seed(self._seed, -1, self._count_micro_batches()))
        with torch.no_grad():
            for weight, copy in self._weights:
                weight.copy_(round_stochastically(copy, self._generator) if self._is_stochastic else copy)
                copy.copy_(weight)


class LossScaleUpdates:
    """Automatic loss scaling: halves the factor of the loss if gradients come near the largest half, else doubles it.

    As PopART's, it counts the gradients above a bin edge: if their share exceeds a threshold, the next update has half
    the factor. PopART counts every gradient in half; here it is those of the parameters, by their mean magnitude over
    the micro-batches of an update.
    """

    def __init__(self, options: Options, micro_batches: int, count_micro_batches: Callable[[], int]) -> None:
        settings, name = options._Popart.options, "automaticLossScalingSettings"
        self._edge = float(settings.get(f"{name}.binEdgeLocation", 0.125)) * torch.finfo(torch.half).max
        self._threshold = float(settings.get(f"{name}.thresholdUpperCountProportion", 1e-7))
        self._period = int(settings.get(f"{name}.updatePeriod", 1))
        self._edge *= micro_batches
        self._accumulation = int(options.Training.gradient_accumulation)
        self._count_micro_batches = count_micro_batches

    def count(self, gradients: List[Optional[torch.Tensor]]) -> List[float]:
        """Return the numbers of elements above the bin edge, and of all elements."""
        present = [gradient for gradient in gradients if gradient is not None]
        upper = sum(int((gradient.abs() > self._edge).sum()) for gradient in present)
        return [float(upper), float(sum(gradient.numel() for gradient in present))]

    def factor(self, upper: float, total: float) -> float:
        """Return what the factor of the loss is multiplied by after an update with these counts of all replicas."""
        if self._count_micro_batches() // self._accumulation % self._period or not total:
            return 1.0
        return 0.5 if upper > self._threshold * total else 2.0


class HalfAccumulator:
    """Context for the backward pass of each micro-batch of a replica: rounds the accumulated gradients to half.

    `is_running`: accumulate the mean over the micro-batches so far, which stays in the range of half.
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

    def reset(self) -> None:
        """Start a new update with the next micro-batch."""
        self._micro_batches = 0

    def _gradients(self) -> List[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]
