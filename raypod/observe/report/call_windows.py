"""The durations of calls per instance, from the records `call_times` of `events.jsonl`, of bounded size."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from raypod.runs.call_times import STRAGGLER_RATIO, busy_ratios

_MAX_CELLS = 9000  # windows times instances
_LEAST_WINDOWS = 16
_MEANS = ("p50_s", "p95_s", "mean_s", "busy_s", "data_wait_share", "peer_wait_share")  # weighted with the calls
_SHOWN = ("p50_s", "p95_s", "slowest_s", "busy_s")  # of each window


class CallWindows:
    """Windows of the run, each with statistics of every instance. Neighbouring windows are merged if they are many."""

    def __init__(self) -> None:
        self._windows: List[Dict[str, Any]] = []

    def handle(self, record: Dict[str, Any], at_s: float) -> None:
        """Add a record `call_times` that was written `at_s` seconds after the start of the run."""
        found = [each for each in record.get("instances") or () if isinstance(each, dict) and "instance" in each]
        calls, first_update = record.get("calls"), record.get("first_update")
        if not found or not isinstance(calls, int) or calls < 1:
            return
        by_instance = {int(each["instance"]): each for each in found}
        self._windows.append({"end_s": at_s, "first_update": first_update, "calls": calls, "instances": by_instance})
        limit = max(_LEAST_WINDOWS, _MAX_CELLS // len(by_instance))
        if len(self._windows) > 2 * limit:
            self._windows = _halved(self._windows)

    def data(self) -> Optional[Dict[str, Any]]:
        """Return the windows and the totals as plain data; see `run_data`. None without calls."""
        if not self._windows:
            return None
        windows = self._windows
        instances = sorted({index for window in windows for index in window["instances"]})
        while len(windows) * len(instances) > _MAX_CELLS and len(windows) > _LEAST_WINDOWS:
            windows = _halved(windows)
        values = {
            name: [[_short(window["instances"].get(index, {}).get(name)) for window in windows] for index in instances]
            for name in _SHOWN
        }
        return {
            "straggler_ratio": STRAGGLER_RATIO,
            "instances": instances,
            "end_s": [round(window["end_s"], 3) for window in windows],
            "first_update": [window["first_update"] for window in windows],
            "calls": [window["calls"] for window in windows],
            **values,
            "totals": self._totals(instances),
        }

    def _totals(self, instances: List[int]) -> List[Dict[str, Any]]:
        """Return the statistics of each instance over the whole run, with `busy_ratio` and the calls."""
        whole = self._windows[0]
        for window in self._windows[1:]:
            whole = _joined(whole, window)
        found = [whole["instances"][index] for index in instances]
        ratios = busy_ratios({index: each.get("busy_s") for index, each in zip(instances, found)})
        return [
            {
                "instance": index,
                **{name: _short(each.get(name)) for name in (*_MEANS, "slowest_s")},
                "busy_ratio": _short(ratios.get(index)),
                "calls": each.get("calls", whole["calls"]),
            }
            for index, each in zip(instances, found)
        ]


def _halved(windows: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return the windows with each pair joined."""
    return [_joined(*windows[index : index + 2]) for index in range(0, len(windows), 2)]


def _joined(first: Dict[str, Any], second: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    if second is None:
        return first
    instances: Dict[int, Dict[str, Any]] = {}
    for index in {*first["instances"], *second["instances"]}:
        parts = [
            (window["instances"][index], window["instances"][index].get("calls", window["calls"]))
            for window in (first, second)
            if index in window["instances"]
        ]
        instances[index] = {name: _weighted([(each.get(name), calls) for each, calls in parts]) for name in _MEANS}
        slowest = [each["slowest_s"] for each, _ in parts if isinstance(each.get("slowest_s"), (int, float))]
        instances[index]["slowest_s"] = max(slowest) if slowest else None
        instances[index]["calls"] = sum(calls for _, calls in parts)
    return {
        "end_s": second["end_s"],
        "first_update": first["first_update"],
        "calls": first["calls"] + second["calls"],
        "instances": instances,
    }


def _weighted(pairs: List[Any]) -> Optional[float]:
    known = [(value, weight) for value, weight in pairs if isinstance(value, (int, float))]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _short(value: Any) -> Optional[float]:
    return float(f"{value:.4g}") if isinstance(value, (int, float)) else None
