"""The numerics of the emulated device: its random numbers, and half precision although it computes in float32.

Random numbers are a function of seed, global replica and micro-batch, not of thread or process. `HalfTracker` tracks
which tensors of a forward would be half; `HalfWeights` and `HalfAccumulator` round what the device stores in half.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Set, Tuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from poptorch.device.memory import DeviceMemory
from poptorch.options import Options

# torch's CPU generator belongs to the process, so forwards that draw numbers run one after the other.
_generator_lock = threading.Lock()

_TO_FLOAT = (torch.Tensor.float, torch.Tensor.double, torch.Tensor.bfloat16)
_CONVERSIONS = (*_TO_FLOAT, torch.Tensor.half, torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as)
_LIKE_OTHER = (torch.Tensor.to, torch.Tensor.type_as)
_GET_DTYPE: Any = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
# What functions that read the dtype return for a half tensor.
_DTYPE_READS: Dict[Any, Any] = {
    _GET_DTYPE: torch.half,
    torch.Tensor.type: "torch.HalfTensor",
    torch.Tensor.element_size: 2,
}

# The mantissa bits of a float32 that half does not have.
_EXTRA_BITS = 13


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


class HalfTracker(TorchFunctionMode):
    """Tracks which tensors would be half: half with half gives half, half with float32 gives float32.

    Active in the forward of the compilation, and in later forwards if the program reads the dtype of such a tensor,
    which then reads as half. Enter it after the `DeviceMode`, so that it intercepts the user's calls first.

    Attributes:
        has_read_dtype: whether the program read the dtype of a tensor that would be half.
    """

    def __init__(self, half_tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.has_read_dtype = False
        # References to the tensors, so that Python does not reuse their ids.
        self._tensors: List[torch.Tensor] = list(half_tensors)
        self._half: Set[int] = {id(tensor) for tensor in self._tensors}

    def is_half(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor would be half."""
        return id(tensor) in self._half

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DTYPE_READS and self.is_half(args[0]) and len(args) == 1 and not kwargs:
            self.has_read_dtype = True
            return _DTYPE_READS[func]
        result = func(*args, **kwargs)
        if args and result is args[0]:
            if func not in _CONVERSIONS:
                return result  # in place: the dtype stays
            result = result.view_as(result)  # no conversion in float32, but on a device this is another tensor
        if self._gives_half(func, args, kwargs):
            for tensor in _floating_point_tensors(result):
                self._tensors.append(tensor)
                self._half.add(id(tensor))
        return result

    def _gives_half(self, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
        dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        if func is torch.Tensor.half or dtypes:
            return not dtypes or dtypes[-1] == torch.half
        if func in _TO_FLOAT:
            return False
        operands = list(_floating_point_tensors((args, kwargs)))
        if func in _LIKE_OTHER:
            operands = operands[-1:]
        return bool(operands) and all(map(self.is_half, operands))


def _floating_point_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floating_point_tensors(item)
    elif isinstance(value, dict):
        yield from _floating_point_tensors(tuple(value.values()))


class HalfWeights:
    """Rounds the parameters that are half on the host after every update.

    With `Precision.enableStochasticRounding` values round up or down at random, so that many small updates count on
    average. The random numbers are a function of `options.random_seed` (0 if unset) and of the micro-batches that a
    replica has run, so they are the same in every process and after a restart.
    """

    def __init__(self, memory: DeviceMemory, options: Options, count_micro_batches: Callable[[], int]) -> None:
        self._parameters = [memory.parameters[name] for name in memory.half_parameters]
        self._is_stochastic = bool(options._Popart.options.get("enableStochasticRounding"))
        self._seed = int(options.random_seed) if options.exists("random_seed") else 0
        self._count_micro_batches = count_micro_batches
        self._generator = torch.Generator()

    def round(self) -> None:
        """Round every such parameter to values that half can represent."""
        if self._parameters and self._is_stochastic:
            self._generator.manual_seed(mixed_seed(self._seed, -1, self._count_micro_batches()))
        with torch.no_grad():
            for parameter in self._parameters:
                value = _round_stochastically(parameter, self._generator) if self._is_stochastic else parameter
                parameter.copy_(value.half())


def _round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 values to the mantissa of half, up or down with probabilities that keep the mean.

    Below the normal numbers of half (6e-5) the remaining bits round to nearest.
    """
    noise = torch.randint(2**_EXTRA_BITS, values.shape, generator=generator, dtype=torch.int32)
    bits = values.contiguous().view(torch.int32).add(noise)
    return bits.bitwise_and_(-(2**_EXTRA_BITS)).view(torch.float32)


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
