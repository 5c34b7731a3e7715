"""Which sample goes where, and which random numbers it meets: pure functions, never of an instance or a worker.

The order of an epoch is a function of (seed, epoch, position). Position p of an epoch belongs to update
p // global_batch_size, and inside it to [accumulation step, global replica, place in the micro-batch]. Random numbers
of augmentation are a function of (seed, epoch, sample). All of it comes from one 64-bit mixer (`mixer.py`), so that it
does not change with a version of numpy.
"""

from __future__ import annotations

import hashlib

import numpy as np

from raypod.plan.plan import Geometry

_ORDER, _AUGMENTATION = 1, 2  # streams: never the same numbers for two purposes


def epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """The permutation of an epoch: int64 [num_samples], sample index by position."""
    order: np.ndarray = np.argsort(mix(_ORDER, seed, epoch, np.arange(num_samples)), kind="stable")
    return order


def call_positions(geometry: Geometry, instance: int, call: int) -> np.ndarray:
    """Positions in the epoch that an instance feeds in one call: int64 [combined_batch_size].

    Laid out [device iteration, accumulation step, local replica, micro-batch], replica innermost but for the
    micro-batch (contract section 2.2), so that each update consumes one contiguous stretch of positions.
    """
    shape = (
        geometry.device_iterations,
        geometry.gradient_accumulation,
        geometry.total_replicas,
        geometry.micro_batch_size,
    )
    first = call * geometry.samples_per_call
    positions = np.arange(first, first + geometry.samples_per_call).reshape(shape)
    replicas = geometry.replicas_of(instance)
    fed: np.ndarray = positions[:, :, replicas.start : replicas.stop].reshape(-1)
    return fed


def augmentation_integers(seed: int, epoch: int, samples: np.ndarray, bounds: int, draws: int) -> np.ndarray:
    """`draws` integers in [0, bounds) for each sample: int64 [len(samples), draws]."""
    words = mix(_AUGMENTATION, seed, epoch, np.asarray(samples)[:, None], np.arange(draws))
    drawn: np.ndarray = (words % np.uint64(bounds)).astype(np.int64)
    return drawn


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Seed in [0, 2**31) for whatever a data set of your own draws while it makes one sample."""
    return int(mix(_AUGMENTATION, seed, epoch, sample) >> np.uint64(33))


# --- from mixer: The one source of the random numbers of a run: a 64-bit hash of integers, whatever numpy's version.


def mix(*words: object) -> np.ndarray:
    """Hash integers (scalars or arrays, broadcast together) to uniform uint64 (SplitMix64: Steele et al. 2014)."""
    value = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64
        for word in words:
            value = value + np.asarray(word).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            value = value ^ (value >> np.uint64(31))
    return value


def digest(samples: np.ndarray) -> str:
    """Digest of sample indices, in the order they were fed: 16 hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(samples, dtype="<i8").tobytes()).hexdigest()[:16]
