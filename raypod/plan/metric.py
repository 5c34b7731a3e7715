"""What a task measures: named ratios of two sums, which are the same for every placement of the replicas."""

from __future__ import annotations

import dataclasses
import math
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from typing_extensions import Literal

_MAX_PARTS = 1024  # values that are kept before they are combined to a few parts
Sums = Tuple[float, ...]  # numerator and denominator of each metric, one after the other
EpochSums = Dict[str, List[List[float]]]  # by metric: numerator and denominator, each as parts of `exact_parts`


@dataclasses.dataclass(frozen=True)
class Metric:
    """A ratio of two sums over samples.

    Attributes:
        name: the key in files, as in `loss`.
        better: whether a lower or a higher value is better.
        transform: applied to the ratio; a function of a module, because plans are pickled. None: the ratio itself.
        scale: factor of the ratio, as in 100 for percent.
        label: the name in the progress bar and in lines of a training.
        unit: printed after a value.
        formats: format specifications of a value: of the training, and of an evaluation.
    """

    name: str
    better: Literal["lower", "higher"] = "lower"
    transform: Optional[Callable[[float], float]] = None
    label: str = ""
    unit: str = ""
    scale: float = 1.0
    formats: Tuple[str, str] = (".3f", ".3f")

    def value(self, numerator: float, denominator: float) -> float:
        """Return the value of two sums; NaN without samples, infinity if the transform overflows."""
        if not denominator:
            return math.nan
        try:
            ratio = self.scale * numerator / denominator
            return ratio if self.transform is None else self.transform(ratio)
        except OverflowError:
            return math.inf

    def is_better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another one; NaN is the worst value."""
        if math.isnan(value) or math.isnan(other):
            return not math.isnan(value)
        return value < other if self.better == "lower" else value > other

    def shown(self, value: float, kind: int = 0, separator: str = ": ") -> str:
        """Return label and value in format `kind`."""
        return f"{self.label or self.name}{separator}{value:{self.formats[kind]}}"

    def text(self, value: float) -> str:
        """Return the value of an evaluation with its unit."""
        return f"{value:{self.formats[1]}}{f' {self.unit}' if self.unit else ''}"


LOSS = Metric("loss")
SAMPLE = "sample"  # among the predictions of a test split: the numbers of the samples


def values_of(metrics: Sequence[Metric], sums: Sequence[float]) -> Dict[str, float]:
    """Return the value of each metric by name."""
    return {metric.name: metric.value(*sums[2 * i : 2 * i + 2]) for i, metric in enumerate(metrics)}


def exact_parts(values: Iterable[float]) -> Tuple[float, ...]:
    """Return few numbers with exactly the sum of the values: sums of parts do not depend on the order of the values.

    A sum that is not finite is one part: NaN or infinity.
    """
    left = list(values)
    parts: List[float] = []
    while True:
        part = sum_exactly(left)
        if part == 0 and parts:
            return tuple(parts)
        parts.append(part)
        if part == 0 or not math.isfinite(part):
            return (part,) if not math.isfinite(part) else tuple(parts)
        left.append(-part)


def sum_exactly(values: Iterable[float]) -> float:
    """Return the correctly rounded sum, independent of the order; NaN if infinities cancel."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan


class ExactSum:
    """The sum of any number of values, in bounded memory; it does not depend on their order."""

    def __init__(self, parts: Iterable[float] = ()) -> None:
        """Continue the sum that had these `parts`."""
        self._parts = list(parts)

    def add(self, value: float) -> None:
        self._parts.append(value)
        if len(self._parts) >= _MAX_PARTS:
            self._parts = list(self.parts)

    @property
    def parts(self) -> Tuple[float, ...]:
        """Few numbers with exactly this sum; see `exact_parts`."""
        return exact_parts(self._parts)

    @property
    def value(self) -> float:
        """The correctly rounded sum; 0 without values."""
        return sum_exactly(self._parts)


def add_sums(rows: Sequence[Sums]) -> List[float]:
    """Return the correctly rounded sums over the rows of each entry."""
    return [sum_exactly(column) for column in zip(*rows)]
