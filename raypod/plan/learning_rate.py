"""The learning rate of every update, its default, and the loss scaling of every epoch. Needs no torch.

The rate is a warm-up, then the schedule of the config or a user's function.

The default learning rate: by the optimizer, scaled linearly with the global batch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any, Callable, Dict, Optional, Tuple

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.config import RANGE_TEST, Config, TrainingSection

_KEY = "training.lr_schedule"
_RANGE = 1e-6  # the lowest rate of a range test divided by its highest one
_CHECKED_UPDATES = 10_000  # at most so many values of a user's function are checked before the run
# The fraction of the way from the peak rate to the floor that is left after a fraction of the updates after warm-up.
_DECAYS: Dict[str, Callable[[TrainingSection, float, int], float]] = {
    "cosine": lambda training, done, span: 0.5 * (1 + math.cos(math.pi * done / span)),
    "linear": lambda training, done, span: 1 - done / span,
    "polynomial": lambda training, done, span: (1 - done / span) ** training.lr_power,
}
DEPEND_ON_LENGTH = (*_DECAYS, RANGE_TEST)  # as a user's function may


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What a user's schedule gets to know of the run as its third argument."""

    learning_rate: float  # the peak rate
    updates_per_epoch: int
    warmup_updates: int


def learning_rate(config: Config, update: int, total_updates: int, updates_per_epoch: int = 1) -> float:
    """Return the learning rate of an update (0-based).

    A user's function returns a factor of `training.learning_rate`; warm-up, 0 updates by default, multiplies it.

    Raises:
        ConfigError: the user's function raises, or returns something else than a finite number of at least 0.
    """
    training = config.training
    warmup = (update + 1) / (training.warmup_updates + 1)
    if ":" in training.lr_schedule:
        facts = RunFacts(training.learning_rate, updates_per_epoch, training.warmup_updates)
        return training.learning_rate * min(1.0, warmup) * _factor(training.lr_schedule, update, total_updates, facts)
    if training.lr_schedule == RANGE_TEST:
        return training.learning_rate * min(1.0, warmup) * range_factor(update, total_updates)
    if update < training.warmup_updates:
        return training.learning_rate * (update + 1) / (training.warmup_updates + 1)
    if training.lr_schedule == "constant":
        return training.learning_rate
    reached = max(_last_step(training, update, updates_per_epoch), training.warmup_updates)
    if training.lr_schedule == "step":
        steps_done = sum(reached >= epoch * updates_per_epoch for epoch in training.lr_steps or ())
        return training.learning_rate * training.lr_gamma**steps_done
    done = reached - training.warmup_updates
    if training.lr_schedule == "exponential":
        steps = done / updates_per_epoch * (training.lr_frequency or 1)
        return float(training.learning_rate * training.lr_gamma**steps)
    left = _DECAYS[training.lr_schedule](training, done, max(1, total_updates - training.warmup_updates))
    return training.learning_rate * (training.lr_floor + (1 - training.lr_floor) * left)


def range_factor(update: int, total_updates: int) -> float:
    """Return the factor of a range test: from a millionth at the first update to 1 at the last one."""
    return math.pow(_RANGE, 1 - update / max(1, total_updates - 1))


def _last_step(training: TrainingSection, update: int, updates_per_epoch: int) -> float:
    """Return where, in updates since the beginning of the run, the schedule made its last step before an update."""
    if training.lr_frequency is None:
        return update
    return math.floor(update * training.lr_frequency / updates_per_epoch) * updates_per_epoch / training.lr_frequency


def loss_scaling(training: TrainingSection, epoch: int) -> float:
    """Return the loss scaling of an epoch (0-based): as Graphcore's CNN application, from the initial to the final one.

    It doubles at the beginning of an epoch; the intervals are equal, and the last one has the remaining epochs.
    """
    if training.initial_loss_scaling is None:
        return training.loss_scaling
    doublings = _doublings(training, training.initial_loss_scaling)
    return float(training.initial_loss_scaling * 2 ** min(epoch // (training.epochs // (doublings + 1)), doublings))


def _doublings(training: TrainingSection, initial: float) -> int:
    """Return how often the loss scaling doubles. ConfigError if that does not end at the final one in so few epochs."""
    doublings = round(math.log2(training.loss_scaling / initial))
    if doublings < 0 or initial * 2**doublings != training.loss_scaling:
        raise ConfigError(
            f"--initial-loss-scaling {initial:g} must reach --loss-scaling {training.loss_scaling:g} by doubling"
        )
    if training.epochs <= doublings:
        raise ConfigError(
            f"--initial-loss-scaling {initial:g} needs {doublings + 1} epochs to reach --loss-scaling "
            f"{training.loss_scaling:g}, and there are {training.epochs}"
        )
    return doublings


def check_function(config: Config, total_updates: int, updates_per_epoch: int) -> None:
    """Call a user's schedule for updates of the whole run. ConfigError as `learning_rate`, or if it does not exist."""
    _function.cache_clear()  # a notebook may have defined it anew since the last run
    step = max(1, total_updates // _CHECKED_UPDATES)
    for update in (*range(0, total_updates, step), total_updates - 1):
        learning_rate(config, update, total_updates, updates_per_epoch)


def check_settings(training: TrainingSection) -> None:
    """Raise ConfigError for settings of a schedule that is not chosen, and for a loss scaling that is not reached."""
    schedule = training.lr_schedule
    if training.initial_loss_scaling is not None:
        _doublings(training, training.initial_loss_scaling)
    if training.lr_frequency is not None and (schedule in ("constant", RANGE_TEST) or ":" in schedule):
        raise ConfigError(f"--lr-frequency has no effect on --lr-schedule {schedule}; omit it")
    if (schedule == "step") != (training.lr_steps is not None):
        raise ConfigError("--lr-schedule step and --lr-steps 30,60,80 (epochs) must be given together")
    if training.lr_floor and schedule not in _DECAYS:
        raise ConfigError(f"--lr-floor has no effect on --lr-schedule {schedule}; use one of {', '.join(_DECAYS)}")
    if training.lr_power != 1 and schedule != "polynomial":
        raise ConfigError(f"--lr-power has no effect on --lr-schedule {schedule}: use polynomial, or omit it")


def _factor(name: str, update: int, total_updates: int, facts: RunFacts) -> float:
    """Return the result of a user's function of (update, total_updates) or (update, total_updates, facts)."""
    function, count = _function(name)
    with user_code.reported(f"{_KEY} = {name!r} at update {update}"):
        value: Any = user_code.invoke(function, name, _KEY, *(update, total_updates, facts)[:count])
        factor = float(value)
    if not math.isfinite(factor) or factor < 0:
        raise ConfigError(
            f"{_KEY} = {name!r} returned {value} for update {update} of {total_updates}; "
            "it must return a finite factor of the learning rate, at least 0"
        )
    return factor


@functools.lru_cache(maxsize=None)
def _function(name: str) -> Tuple[Callable[..., Any], int]:
    """Import a user's function; return it and its number of arguments, 2 or 3."""
    function = user_code.import_name(name, _KEY)
    try:
        inspect.signature(function).bind("update", "total_updates", "facts")
    except (TypeError, ValueError):  # ValueError: some built-in functions have no signature
        user_code.check_signature(function, name, _KEY, ("update", "total_updates"))
        return function, 2
    return function, 3


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
