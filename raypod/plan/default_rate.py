"""The default learning rate: by the optimizer, scaled linearly with the global batch."""

from __future__ import annotations

from typing import Optional, Tuple

# Peak rates for 32 samples per update, with which the built-in tasks learn.
DEFAULT_RATES = {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3, "lamb": 1e-2, "rmsprop": 1e-3}
# Those of tasks with a rate of their own for Adam, by its ratio: transformers diverge with the others' of images.
TRANSFORMER_RATES = {**DEFAULT_RATES, "sgd": 0.0015625, "rmsprop": 6.25e-5}
REFERENCE_SAMPLES = 32
_MOST_SCALED = 4.0  # times: of larger batches, rates that are scaled linearly diverge


def default_rate(optimizer: str, samples: int, own: Optional[Tuple[str, float]] = None) -> float:
    """Return the default of `training.learning_rate`.

    Args:
        optimizer: its name in the config.
        samples: as `rate_samples` returns them.
        own: the default optimizer and rate of a task of transformers; None: the task has none.
    """
    rate = DEFAULT_RATES[optimizer]
    if own is not None:
        rate = own[1] * TRANSFORMER_RATES[optimizer] / TRANSFORMER_RATES[own[0]]
    return rate * min(_MOST_SCALED, samples / REFERENCE_SAMPLES)


def rate_samples(optimizer: str, reduction: str, micro_batch: int, micro_batches: int) -> int:
    """Return the samples that scale the rate: of an update. A sum over `micro_batches` scales the gradient itself."""
    is_scaled = optimizer == "sgd" and reduction == "sum"
    return micro_batch if is_scaled else micro_batch * micro_batches


def scaling_text(rate: float, samples: int) -> Optional[str]:
    """Return how a default rate follows from the global batch, for the plan; None if it is not scaled."""
    factor = min(_MOST_SCALED, samples / REFERENCE_SAMPLES)
    if factor == 1:
        return None
    limit = f", at most {_MOST_SCALED:g}-fold" if samples > _MOST_SCALED * REFERENCE_SAMPLES else ""
    return f"linear scaling of {rate / factor:.4g} for {REFERENCE_SAMPLES} samples per update{limit}"
