"""Objects in Ray actors on a host, see `Fleet.serve` and `Fleet.serve_on`; metrics of the run for Ray's dashboard."""

from __future__ import annotations

import importlib
import threading
from typing import Any, Callable, Dict, Iterable, Tuple

from raypod.plan.cluster import Cluster
from raypod.runtime.workers.death_cause import death_reason
from raypod.runtime.workers.fleet import Family, Labels
from raypod.runtime.workers.ray_nodes import nodes_of
from raypod.runtime.workers.ray_reservation import node_affinity

_INTERVAL_S = 5.0  # less than the interval at which Ray's workers report, 10 s
_CLOSE_S = 5.0


class RayServer:
    """A `checkpoint.transfer.Server`. It can be sent to other processes of the Ray session."""

    def __init__(self, actor: Any, host: str) -> None:
        """`host` names the host of the actor in errors."""
        self._actor, self._host = actor, host

    def request(self, method: str, *arguments: Any) -> Any:
        """See `Server.request`."""
        return getattr(self._actor, method).remote(*arguments)

    def result(self, handle: Any, timeout_s: float) -> Any:
        """See `Server.result`."""
        ray = importlib.import_module("ray")
        try:
            return ray.get(handle, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"{self._host} does not respond") from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise ConnectionError(f"no connection to {self._host}: {death_reason(str(error))}") from error

    def close(self) -> None:
        """See `Server.close`."""
        importlib.import_module("ray").kill(self._actor)


def serve_here(ray: Any, kind: Callable[..., Any], *arguments: Any) -> RayServer:
    """Start an actor on the node of this process, without waiting for it."""
    node = {"NodeID": ray.get_runtime_context().get_node_id()}
    # If it dies, the checkpoint that it was writing fails, and the next one succeeds.
    options = {**node_affinity(node), "max_restarts": -1}
    return RayServer(ray.remote(kind).options(**options).remote(*arguments), "the coordinator's host")


def serve_on(ray: Any, cluster: Cluster, host: str, kind: Callable[..., Any], *arguments: Any) -> RayServer:
    """Start an actor on the host of a cluster with the name `host`, without waiting for it.

    Raises:
        ConnectionError: the host has no live node.
    """
    (node,) = nodes_of(ray, [each for each in cluster.hosts if each.name == host])
    if not node:
        raise ConnectionError(f"no Ray node is alive on host {host}")
    options = {**node_affinity(node), "max_restarts": 0}
    return RayServer(ray.remote(kind).options(**options).remote(*arguments), f"host {host}")


# Export the metrics of a run through `ray.util.metrics`, so that Ray's own exporter and dashboards carry them.
#
# A thread records all metrics every few seconds, also while nothing happens in the run: Ray's exporter forgets a gauge
# that is not recorded again. The parts of a histogram are gauges, because Ray's Histogram accepts only single
# observations, one per call and instance. Ray exports the metrics with the prefix `ray_`, and only with `raypod[pod]`;
# without it, it discards them.


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
