"""Check that all instances train on the same data set."""

from __future__ import annotations

from typing import List, Optional

from raypod.checkpoint.format import Checkpoint
from raypod.checkpoint.resume import check_data
from raypod.errors import ConfigError
from raypod.events import InstanceStarted
from raypod.plan.plan import Plan


def check_same_data(plan: Plan, started: List[InstanceStarted], resumed: Optional[Checkpoint] = None) -> None:
    """Check that all instances loaded the same data set, and that it is the one of the checkpoint."""
    first = started[0]
    for other in started:
        if other.data_fingerprint != first.data_fingerprint:
            raise ConfigError(
                f"the data set of instance {other.instance} on host {other.host} differs from that of instance "
                f"{first.instance} on host {first.host}: fingerprints {other.data_fingerprint} and "
                f"{first.data_fingerprint}; copy one to all hosts"
            )
    if resumed is not None:
        check_data(plan, resumed, first.data_fingerprint)
