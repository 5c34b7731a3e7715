"""Random numbers on the device: a function of seed, global replica and micro-batch, not of thread or process."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
from typing import Any, Iterator, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
