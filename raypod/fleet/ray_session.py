"""The Ray session of a run: joined or started, looked at before anything is asked of it, and left as it was found."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import socket
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from raypod.cluster import LOCAL, Host
from raypod.errors import ClusterError
from raypod.plan import Plan

_PROBE_S = 2.0
_OBJECT_STORE_BYTES = 80_000_000  # only reports travel through it; Ray's minimum is 75 MB
# From here on Ray's workers can import torch while the session still starts: measured 0.4 to 2 s sooner with 2.60, and
# later with 2.10, which starts such workers again for the job.
_PRELOADS_SINCE = (2, 50)


class RaySession:
    """`ray.init()` of a local session, or the running cluster."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._started_here = False

    def open(self) -> Any:
        """Connect; the `ray` module.

        Raises:
            ClusterError: a cluster file was given and no Ray cluster runs here.
        """
        running = _running_cluster()
        if running is None and self._plan.cluster is not LOCAL and not _is_connected():
            raise ClusterError(
                f"no Ray cluster is running for {self._plan.cluster.name}: `ray up {self._plan.config.pod.cluster}`, "
                "then run this on its head"
            )
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if _is_connected():
            return importlib.import_module("ray")
        self._started_here = True
        if running is not None:
            ray = importlib.import_module("ray")
            try:
                ray.init(address=running, namespace="raypod", **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ClusterError(
                    f"cannot join the Ray cluster at {running}: {' '.join(str(error).split())}"
                ) from error
        else:
            with _environment(_session_variables(self._plan)):
                ray = importlib.import_module("ray")
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    namespace="raypod",
                    **quiet,
                )
        _silence_worker_deaths(ray)
        return ray

    def close(self) -> None:
        """Disconnect, and end the session if it was started here."""
        if self._started_here:
            self._started_here = False
            importlib.import_module("ray").shutdown()


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _running_cluster() -> Optional[str]:
    """Address of the Ray cluster that this host belongs to: RAY_ADDRESS, else what `ray start` noted, if it answers."""
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return address
    note = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    if not note.is_file():
        return None
    address = note.read_text().strip()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError):  # left over from a cluster that is gone
        return None
    return address


def _session_variables(plan: Plan) -> Dict[str, str]:
    """What a session of our own is started with. Most of it counts when ray is imported, or the raylet started."""
    variables = {"RAY_worker_niceness": "0"}  # the instances are the work here, not a guest beside it
    if "ray" not in sys.modules:
        # Ray listens on all interfaces; with a secret that only this session has, nobody else can use it.
        variables.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    if tuple(int(part) for part in version("ray").split(".")[:2]) >= _PRELOADS_SINCE:
        variables["RAY_enable_worker_prestart"] = "1"
        variables["RAY_preload_python_modules"] = "torch"
        variables["OMP_NUM_THREADS"] = str(plan.instances[0].threads_per_replica)  # read when torch is imported
    return variables


@contextlib.contextmanager
def _environment(variables: Dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _silence_worker_deaths(ray: Any) -> None:
    """Ray prints a paragraph of its own for every dead worker; raypod says it in one line with host and log file."""
    worker = ray._private.worker
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


def match_hosts(ray: Any, plan: Plan) -> List[Dict[str, Any]]:
    """The Ray node of every host of the plan, in order.

    Raises:
        ClusterError: hosts that are not there, or IPUs that they do not have, by name.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    if plan.cluster is LOCAL:
        own = ray.get_runtime_context().get_node_id()
        nodes = [node for node in alive if node["NodeID"] == own]
    else:
        nodes = [next((node for node in alive if _is(host, node)), {}) for host in plan.hosts]
        missing = [host.name for host, node in zip(plan.hosts, nodes) if not node]
        if missing:
            raise ClusterError(
                f"{plan.cluster.name}: no Ray node is alive on {', '.join(missing)}; "
                f"alive: {', '.join(node['NodeManagerAddress'] for node in alive)}"
            )
    for index, (host, node) in enumerate(zip(plan.hosts, nodes)):
        needed, has = len(plan.instances_on(index)) * plan.geometry.local_ipus, node["Resources"].get("IPU")
        if has is not None and needed > has:
            total = sum(each["Resources"].get("IPU", 0) for each in alive)
            raise ClusterError(
                f"host {host.name} has {has:g} IPUs and the plan puts {needed} on it (the pod has {total:g} in all, "
                f"the plan needs {plan.geometry.total_ipus}); use fewer replicas or more hosts"
            )
    return nodes


def _is(host: Host, node: Dict[str, Any]) -> bool:
    return host.address in (node["NodeManagerAddress"], node["NodeManagerHostname"], node.get("NodeName"))


def bundle_for(node: Dict[str, Any], instances: int, ipus: int) -> Dict[str, float]:
    """What a host's instances reserve: a share of its cores (fractional, so that 4 fit on 2 cores), IPUs, the host."""
    resources = node["Resources"]
    bundle = {f"node:{node['NodeManagerAddress']}": 0.001}
    share = min(1.0, int(100 * resources.get("CPU", 0) / instances) / 100)
    if share:
        bundle["CPU"] = share * instances
    if "IPU" in resources:
        bundle["IPU"] = float(ipus)
    return bundle
