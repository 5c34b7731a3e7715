"""Random numbers on the device: a pure function of seed, global replica and micro-batch, never of thread or process."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
from typing import Any, Iterator, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# torch's CPU generator belongs to the process. Whoever runs a forward that draws numbers holds this lock; the wait is
# bounded by the forwards of the other replicas.
_generator_lock = threading.Lock()


@contextlib.contextmanager
def device_random(seed: int, replica: int, micro_batch: int) -> Iterator[None]:
    """Within, torch draws the numbers of that micro-batch; the host's generator is as before afterwards."""
    with _generator_lock:
        host_state = torch.get_rng_state()
        torch.default_generator.manual_seed(mixed(seed, replica, micro_batch))
        try:
            yield
        finally:
            torch.set_rng_state(host_state)


@contextlib.contextmanager
def detect_random() -> Iterator[DrawDetector]:
    """Within, tells whether numbers were drawn. The host's generator is as before afterwards."""
    with device_random(0, 0, 0):
        detector = DrawDetector()
        yield detector
        detector.has_drawn = detector.has_drawn_so_far()


class DrawDetector:
    """The finding of `detect_random`."""

    has_drawn = False

    def __init__(self) -> None:
        self._before = torch.get_rng_state()

    def has_drawn_so_far(self) -> bool:
        """Whether numbers were drawn since the beginning."""
        return not torch.equal(self._before, torch.get_rng_state())


class DrawsInside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a kernel inside draws random numbers, even where the generator is put back, as checkpoints do."""

    has_drawn = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else newer torch imports its compiler at the first kernel, to keep it out: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.has_drawn = True
        return func(*args, **(kwargs or {}))


def mixed(seed: int, replica: int, micro_batch: int) -> int:
    """One number out of three, alike in every process."""
    # 63 bits of a hash, as torch takes any non-negative int64; neighbouring numbers give unrelated streams.
    packed = struct.pack("<Qqq", seed % 2**64, replica, micro_batch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
