"""Export the metrics of a run through `ray.util.metrics`, so that Ray's own exporter and dashboards carry them.

A thread records all metrics every few seconds, also while nothing happens in the run: Ray's exporter forgets a gauge
that is not recorded again. The parts of a histogram are gauges, because Ray's Histogram accepts only single
observations, one per call and instance. Ray exports the metrics with the prefix `ray_`, and only with `raypod[pod]`;
without it, it discards them.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, Iterable, Tuple

from raypod.runtime.workers.fleet import Family, Labels

_INTERVAL_S = 5.0  # less than the interval at which Ray's workers report, 10 s
_CLOSE_S = 5.0


class RayMetrics:
    """Records metrics in a thread, from its creation to `close`."""

    def __init__(
        self,
        metrics: Any,
        collect: Callable[[], Iterable[Family]],
        constant: Labels,
        log: Callable[[str], None],
        interval_s: float = _INTERVAL_S,
    ) -> None:
        """Start the thread.

        Args:
            metrics: the module `ray.util.metrics`, of a connected Ray.
            collect: returns the current metrics; called in the thread.
            constant: labels that are added to each sample.
            log: receives one line if the export fails; then it ends, and the run goes on.
            interval_s: between two exports.
        """
        self._metrics, self._collect, self._constant, self._log = metrics, collect, dict(constant), log
        self._interval_s = interval_s
        self._made: Dict[str, Any] = {}  # Ray's metrics by name
        self._counted: Dict[Tuple[str, Labels], float] = {}  # the value of each counter that Ray has
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Export the last values and end the thread, within a bound; before Ray's session is closed."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            is_last = False
            while not is_last:
                is_last = self._closing.wait(self._interval_s)
                for family in self._collect():
                    self._export(family)
        except Exception as error:  # of any version of Ray; the run does not depend on its metrics
            self._log(f"warning: no more metrics through Ray: {type(error).__name__}: {error}")

    def _export(self, family: Family) -> None:
        for labels, value, suffix in family.samples:
            name, tags = family.name + suffix, {**self._constant, **dict(labels)}
            metric = self._made.get(name)
            if metric is None:
                kind = self._metrics.Counter if family.kind == "counter" else self._metrics.Gauge
                metric = self._made[name] = kind(name, family.help, tuple(tags))
            if family.kind != "counter":
                metric.set(float(value), tags)
                continue
            before = self._counted.get((name, labels), 0.0)
            if value > 0 and value != before:  # a counter of a host begins again with its boot
                metric.inc(float(value - before if value > before else value), tags)
                self._counted[name, labels] = value
