"""The numerics of the emulated device: its random numbers, and half precision in forwards and weight updates.

Random numbers are a function of seed, global replica and micro-batch, not of thread or process.

Operators of half tensors run in float32, and their results are rounded to half. So tensors are half where the
program makes them half, torch promotes their dtypes, partial sums are in float32 (the default on the IPU), and torch
needs no CPU kernels for half, which it lacks or which are slow.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import struct
import threading
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poptorch.device_mode import is_in_host_layer
from poptorch.options import Options
from poptorch.parallel.tracing import tensors_in

# torch's CPU generator belongs to the process, so forwards that draw numbers run one after the other. A layer on the
# host, within such a forward, may call another model.
_generator_lock = threading.RLock()


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
def detect_random() -> Iterator[Callable[[], bool]]:
    """Context of a function: were numbers drawn since it began? The host's generator is restored afterwards."""
    with device_random(0, 0, 0):
        before = torch.get_rng_state()
        yield lambda: not torch.equal(before, torch.get_rng_state())


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


_aten: Any = torch.ops.aten
_Replaced = Dict[int, Tuple[torch.Tensor, torch.Tensor]]

# The mantissa bits of a float32 that half does not have.
_EXTRA_BITS = 13


def _existing(names: str) -> FrozenSet[Any]:
    return frozenset(getattr(_aten, name) for name in names.split() if hasattr(_aten, name))


# Operators that create, copy or read elements: torch has kernels for half.
_EXACT = _existing(
    "_local_scalar_dense _to_copy _unsafe_view cat clone copy_ empty empty_like empty_strided fill_ full full_like "
    "new_empty new_empty_strided new_full new_ones new_zeros ones ones_like resize_ scalar_tensor zero_ zeros "
    "zeros_like"
)
# Their first result has the dtype of the first operand; the others are saved for the backward pass, in float32.
_SAVES_RESULTS = _existing(
    "_batch_norm_with_update _fused_rms_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "_scaled_dot_product_flash_attention_for_cpu log_sigmoid_forward native_batch_norm native_group_norm "
    "native_layer_norm nll_loss2d_forward nll_loss_forward"
)
# Their results have the dtype of the first operand, although others may be in float32.
_LIKE_FIRST = _SAVES_RESULTS | _existing(
    "_fused_rms_norm_backward _scaled_dot_product_flash_attention_for_cpu_backward batch_norm_backward "
    "log_sigmoid_backward native_batch_norm_backward native_group_norm_backward native_layer_norm_backward "
    "nll_loss2d_backward nll_loss_backward"
)
# The arguments that an operator changes although its schema does not state it: the running statistics.
_ALSO_WRITTEN = {_aten.native_batch_norm: ("running_mean", "running_var")}


class _Operator:
    """What `HalfMode` needs to know of an operator."""

    def __init__(self, overload: Any) -> None:
        schema, packet = overload._schema, overload.overloadpacket
        aliases = [result.alias_info for result in schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        changes_shape = torch.Tag.inplace_view in overload.tags
        self.is_exact = is_view or changes_shape or packet in _EXACT
        self.is_like_first = packet in _LIKE_FIRST
        self.saves_results = packet in _SAVES_RESULTS
        also = _ALSO_WRITTEN.get(packet, ())
        self.written = frozenset(
            key
            for index, argument in enumerate(schema.arguments)
            if argument.name in also or (argument.alias_info is not None and argument.alias_info.is_write)
            for key in (index, argument.name)
        )


_operator = functools.lru_cache(maxsize=None)(_Operator)


class HalfMode(TorchDispatchMode):
    """Runs each operator that has a half operand in float32 and rounds its results to half.

    The results are half if the program states that dtype, or if all floating point operands are half; operands with
    dimensions have precedence over those without.

    Args:
        is_stochastic: round up or down at random, with probabilities that keep the mean, instead of to nearest.

    Attributes:
        has_half: whether an operator had a half operand or result.
    """

    def __init__(self, is_stochastic: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_half = False
        self._generator = torch.Generator() if is_stochastic else None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise newer torch imports its compiler at the first kernel, which takes seconds

    def seed(self, seed: int) -> None:
        """Set the seed of the random numbers that round."""
        if self._generator is not None:
            self._generator.manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = [operand for operand in tensors_in((args, kwargs)) if operand.dtype.is_floating_point]
        dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        if torch.half not in dtypes and all(operand.dtype is not torch.half for operand in operands):
            return func(*args, **kwargs)
        self.has_half = True
        operator = _operator(func)
        if operator.is_exact:
            return func(*self._rounded_source(func, args, kwargs), **kwargs)
        replaced: _Replaced = {}
        result = func(
            *(_upcast(value, replaced, index in operator.written) for index, value in enumerate(args)),
            **{name: _upcast(value, replaced, name in operator.written) for name, value in kwargs.items()},
        )
        for copy, original in replaced.values():
            original.copy_(self._rounded(copy))
        is_half = dtypes[-1] is torch.half if dtypes else _give_half(operands, operator.is_like_first)
        if operator.saves_results:
            return (self._result(result[0], is_half, replaced), *result[1:])
        return self._result(result, is_half, replaced)

    def _result(self, value: Any, is_half: bool, replaced: _Replaced) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in replaced:
                return replaced[id(value)][1]
            return self._rounded(value) if is_half and value.dtype is torch.float32 else value
        if isinstance(value, (list, tuple)):
            return type(value)([self._result(item, is_half, replaced) for item in value])
        return value

    def _rounded(self, value: torch.Tensor) -> torch.Tensor:
        generator = self._noise()
        return (value if generator is None else round_stochastically(value, generator)).half()

    def _noise(self) -> Optional[torch.Generator]:
        """Return the generator of the numbers that round; None to round to nearest, as layers on the host do."""
        return None if is_in_host_layer() else self._generator

    def _rounded_source(self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[Any, ...]:
        """Return the arguments of an operator; if it converts float32 to half, with stochastically rounded values."""
        generator = self._noise()
        if generator is None:
            return args
        if func is _aten._to_copy.default and kwargs.get("dtype") is torch.half and args[0].dtype is torch.float32:
            return (round_stochastically(args[0], generator), *args[1:])
        if func is _aten.copy_.default and args[0].dtype is torch.half and args[1].dtype is torch.float32:
            return (args[0], round_stochastically(args[1], generator), *args[2:])
        return args


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 values to the mantissa of half, up or down with probabilities that keep the mean.

    Below the normal numbers of half (6e-5) the remaining bits round to nearest.
    """
    count = values.numel()
    drawn = torch.empty((count + 3) // 4, dtype=torch.int64).random_(generator=generator)  # of each number four parts
    noise = drawn.view(torch.int16)[:count].view(values.shape).bitwise_and(2**_EXTRA_BITS - 1).to(torch.int32)
    bits = noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-(2**_EXTRA_BITS))
    rounded = bits.view(torch.float32)
    # The noise can carry from a NaN's mantissa into its sign. A sum is faster than a search for NaN.
    return torch.where(values.isnan(), values, rounded) if values.sum().isnan() else rounded


def _give_half(operands: List[torch.Tensor], is_like_first: bool) -> bool:
    if is_like_first:
        return operands[0].dtype is torch.half
    deciding = [operand for operand in operands if operand.dim()] or operands
    return all(operand.dtype is torch.half for operand in deciding)


def _upcast(value: Any, replaced: _Replaced, is_written: bool) -> Any:
    """Return an argument with float32 in the place of half; copies that the operator writes are added to `replaced`."""
    if isinstance(value, torch.Tensor):
        if value.dtype is not torch.half:
            return value
        copy = value.float()
        if is_written:
            replaced[id(copy)] = copy, value
        return copy
    if value is torch.half:
        return torch.float32
    if isinstance(value, (list, tuple)):
        return type(value)([_upcast(item, replaced, is_written) for item in value])
    return value
