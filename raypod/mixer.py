"""The one source of the random numbers of a run: a 64-bit hash of integers, whatever numpy's version."""

from __future__ import annotations

import numpy as np


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
