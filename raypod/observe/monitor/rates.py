"""Rates of the network counters of hosts, from consecutive measurements."""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional, Tuple

from raypod.observe.monitor.model import Usage

_STILL_S = 5.0  # counters that do not change for so long have the rate 0

_Counters = Tuple[Optional[int], Optional[int]]
_Rates = Tuple[Optional[float], Optional[float]]


class RateMeter:
    """Adds the rates to the usage of hosts. A measurement that is shown again within 5 s keeps its rates."""

    def __init__(self) -> None:
        self._last: Dict[str, Tuple[float, _Counters, _Rates]] = {}

    def add(self, host: str, usage: Usage, now_s: float) -> Usage:
        """Return the usage at the monotonic time `now_s` with the rates since the previous different counters."""
        counters = (usage.network_received_bytes, usage.network_sent_bytes)
        before = self._last.get(host)
        if before is None:
            self._last[host] = (now_s, counters, (None, None))
        elif counters != before[1] and now_s > before[0]:
            seconds = now_s - before[0]
            rates = (_rate(counters[0], before[1][0], seconds), _rate(counters[1], before[1][1], seconds))
            self._last[host] = (now_s, counters, rates)
        changed_s, _, (received, sent) = self._last[host]
        if now_s - changed_s >= _STILL_S:
            received, sent = (None if each is None else 0.0 for each in counters)
        return dataclasses.replace(usage, received_bytes_per_s=received, sent_bytes_per_s=sent)


def _rate(now: Optional[int], before: Optional[int], seconds: float) -> Optional[float]:
    """Return the rate of a counter; None if it is unknown or began anew."""
    return None if now is None or before is None or now < before else (now - before) / seconds
