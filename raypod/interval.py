"""How often something is due: "100 updates", "2 epochs", "10 minutes"."""

from __future__ import annotations

import dataclasses
import re

_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(update|epoch|minute)s?\s*$")


@dataclasses.dataclass(frozen=True)
class Interval:
    """`count` updates, epochs or minutes; whole ones but for minutes."""

    count: float
    unit: str  # "update", "epoch" or "minute"

    def updates(self, updates_per_epoch: int) -> int:
        """The same in updates; 0 for minutes, which cannot be counted in updates."""
        return {"update": int(self.count), "epoch": int(self.count) * updates_per_epoch, "minute": 0}[self.unit]

    @property
    def seconds(self) -> float:
        """The same in seconds; infinity for updates and epochs."""
        return self.count * 60 if self.unit == "minute" else float("inf")


def parse_interval(text: str) -> Interval:
    """Read "1 epoch", "100 updates" or "0.5 minutes". ValueError for anything else."""
    found = _FORM.match(text)
    if found is None:
        raise ValueError("write a number and its unit: 100 updates, 1 epoch, 10 minutes")
    interval = Interval(float(found.group(1)), found.group(2))
    if interval.count <= 0 or (interval.unit != "minute" and interval.count != int(interval.count)):
        raise ValueError(f"{interval.unit}s are counted in whole numbers from 1 on")
    return interval
