"""Random numbers on the device: a pure function of seed, global replica and micro-batch, never of thread or process."""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
from typing import Iterator

import torch

# torch's CPU generator belongs to the process. Whoever runs a forward that draws numbers holds this lock; the wait is
# bounded by the forwards of the other replicas.
_generator_lock = threading.Lock()


@contextlib.contextmanager
def device_random(seed: int, replica: int, micro_batch: int) -> Iterator[None]:
    """Within, torch draws the numbers of that micro-batch; the host's generator is as before afterwards."""
    with _generator_lock:
        host_state = torch.get_rng_state()
        torch.default_generator.manual_seed(_mixed(seed, replica, micro_batch))
        try:
            yield
        finally:
            torch.set_rng_state(host_state)


@contextlib.contextmanager
def detect_random() -> Iterator[DrawDetector]:
    """Within, tells whether numbers were drawn. The host's generator is as before afterwards."""
    detector = DrawDetector()
    with device_random(0, 0, 0):
        before = torch.get_rng_state()
        yield detector
        detector.has_drawn = not torch.equal(before, torch.get_rng_state())


class DrawDetector:
    """The finding of `detect_random`."""

    has_drawn = False


def _mixed(seed: int, replica: int, micro_batch: int) -> int:
    # 63 bits of a hash, as torch takes any non-negative int64; neighbouring numbers give unrelated streams.
    packed = struct.pack("<Qqq", seed % 2**64, replica, micro_batch)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
