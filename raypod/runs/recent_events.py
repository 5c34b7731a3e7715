"""The newest events of a run, in memory: many epochs and checkpoints do not displace a repair."""

from __future__ import annotations

import collections
from typing import Any, Deque, Dict, List, Mapping, Tuple

ROUTINE = frozenset(("epoch_done", "evaluation_done", "checkpoint_saved"))  # a healthy run has them again and again


class RecentEvents:
    """Keeps records as `events.jsonl` has them: the newest `most` of routine and the newest `most` of all others."""

    def __init__(self, most: int) -> None:
        self._count = 0
        self._routine: Deque[Tuple[int, Mapping[str, Any]]] = collections.deque(maxlen=most)
        self._others: Deque[Tuple[int, Mapping[str, Any]]] = collections.deque(maxlen=most)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the newest event."""
        kept = self._routine if record.get("event") in ROUTINE else self._others
        kept.append((self._count, record))
        self._count += 1

    def records(self) -> List[Dict[str, Any]]:
        """Return the kept records, oldest first. Any thread may call it: `list` copies a deque at once."""
        kept = sorted(list(self._routine) + list(self._others), key=lambda each: each[0])
        return [dict(record) for _, record in kept]
