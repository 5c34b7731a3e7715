"""The order of the samples and the seeds of their random numbers, as pure functions of the run's seed.

Everything here is independent of instances and worker processes. Random numbers come from a 64-bit integer hash, not
from numpy's generators, whose sequences may change between numpy versions.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, List, Optional, Sequence, Tuple

import numpy as np

if TYPE_CHECKING:
    from raypod.plan.plan import Geometry

EpochSamples = Tuple[int, np.ndarray]  # the samples of one call: (epoch, indices int64 [combined_batch_size])
_ORDER, _AUGMENTATION, _PAIRS, _SHARDS = 1, 2, 3, 4  # independent streams of random numbers


def epoch_order(
    seed: int, epoch: int, num_samples: int, shards: Sequence[int] = (), window: Optional[int] = None
) -> np.ndarray:
    """Return the permutation of an epoch: int64 [num_samples], the sample index at each position.

    With a window, the shards are permuted, and the samples of each `window` successive ones are shuffled together. As
    many shards as there are have the order of no window.

    Args:
        shards: the number of samples of each shard, of samples that are in shards as `packed_order` has them.
        window: shards that are shuffled together; None shuffles all samples.
    """
    keys = hash_integers(_ORDER, seed, epoch, np.arange(num_samples))
    order: np.ndarray = np.argsort(keys, kind="stable")
    if window is None:
        return order
    ranks = np.argsort(np.argsort(hash_integers(_SHARDS, seed, epoch, np.arange(len(shards))), kind="stable"))
    windows = np.empty(num_samples, dtype=np.int64)  # of each sample
    windows[packed_order(num_samples)] = np.repeat(ranks // window, shards)
    return order[np.argsort(windows[order], kind="stable")]


def packed_order(num_samples: int) -> np.ndarray:
    """Return the indices of the training samples in the order of their shards: int64 [num_samples].

    It is random: programs that read shards one after the other get mixed classes.
    """
    return epoch_order(0, 0, num_samples)


def in_place_of(left_out: Sequence[int], samples: np.ndarray, num_samples: int) -> np.ndarray:
    """Return sample indices in which the next sample takes the place of each one that is left out."""
    if not left_out:
        return samples
    kept = kept_samples(left_out, num_samples)
    return kept[np.searchsorted(kept, samples) % len(kept)]


def kept_samples(left_out: Sequence[int], num_samples: int) -> np.ndarray:
    """Return the samples that are not left out, in ascending order: int64."""
    return np.setdiff1d(np.arange(num_samples), np.asarray(left_out, dtype=np.int64))


def call_positions(geometry: Geometry, instance: int, call: int) -> np.ndarray:
    """Return the positions of the epoch that an instance feeds in one call: int64 [combined_batch_size].

    Position p of an epoch belongs to update p // global_batch_size. Inside an update, positions are laid out
    [accumulation step, global replica, micro-batch]; the combined batch of an instance is laid out
    [device iteration, accumulation step, local replica, micro-batch], as PopTorch expects it.
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
    return positions[:, :, replicas.start : replicas.stop].reshape(-1)


def augmentation_integers(seed: int, epoch: int, samples: np.ndarray, bounds: int, draws: int) -> np.ndarray:
    """Return `draws` random integers in [0, bounds) for each sample: int64 [len(samples), draws]."""
    words = hash_integers(_AUGMENTATION, seed, epoch, np.asarray(samples)[:, None], np.arange(draws))
    drawn: np.ndarray = (words % np.uint64(bounds)).astype(np.int64)
    return drawn


def pair_fractions(
    seed_and_epoch: Tuple[int, int], samples: np.ndarray, partners: np.ndarray, first_draw: int, draws: int
) -> np.ndarray:
    """Return `draws` random numbers in (0, 1) for each pair of a sample and its partner: float64 [pairs, draws]."""
    pairs = np.asarray(samples)[:, None], np.asarray(partners)[:, None]
    words = hash_integers(_PAIRS, *seed_and_epoch, *pairs, first_draw + np.arange(draws))
    fractions: np.ndarray = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return fractions


def sample_seeds(seed: int, keys: Sequence[Tuple[int, int]]) -> List[int]:
    """Return the seeds, in [0, 2**31), of the random numbers that a map-style data set draws for (epoch, sample)."""
    epochs, samples = np.array(keys).T
    found: List[int] = (hash_integers(_AUGMENTATION, seed, epochs, samples) >> np.uint64(33)).tolist()
    return found


def samples_digest(samples: np.ndarray) -> str:
    """Return a digest of sample indices, in the order in which they were fed: 16 hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(samples, dtype="<i8").tobytes()).hexdigest()[:16]


def hash_integers(*words: object) -> np.ndarray:
    """Hash integers (scalars or arrays, broadcast together) to uniform uint64 (SplitMix64: Steele et al. 2014)."""
    value = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64
        for word in words:
            value = value + np.asarray(word).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
            value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            value = value ^ (value >> np.uint64(31))
    return value
