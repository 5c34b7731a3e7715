"""The Ray session of a run: joined or started, looked at before anything is asked of it, and left as it was found."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

from raypod.errors import ClusterError, RunError
from raypod.fleet import ray_admission
from raypod.plan.cluster import LOCAL
from raypod.plan.placement import Placement

_PROBE_S = 2.0
_JOIN_S = 60.0  # Ray's own bounds, where it has some, are shorter
_OBJECT_STORE_BYTES = 80_000_000  # only reports travel through it; Ray's minimum is 75 MB
# From here on Ray's workers can import torch while the session still starts: measured 0.4 to 2 s sooner with 2.60, and
# later with 2.10, which starts such workers again for the job.
_PRELOADS_SINCE = (2, 50)


class RaySession:
    """`ray.init()` of a local session, or the running cluster."""

    def __init__(self, placement: Placement, cluster_file: Optional[str] = None, preload: str = "") -> None:
        """`preload`: what Ray's workers import while a session of our own still starts, where Ray can do that."""
        self._placement, self._cluster_file, self._preload = placement, cluster_file, preload
        self._started_here = False

    def open(self) -> Any:
        """Connect; the `ray` module.

        Raises:
            ClusterError: a cluster file was given and no Ray cluster runs here, or it does not let this process in.
        """
        running = _running_cluster(self._placement.cluster.gcs_address)
        cluster = self._placement.cluster
        if running is None and cluster is not LOCAL and not _is_connected():
            up = (
                f"`python -m raypod up {self._cluster_file}`"
                if self._cluster_file
                else "start one (`ray up`, or `ray start`)"
            )
            raise ClusterError(f"no Ray cluster is running for {cluster.name}: {up}, then run this on its head")
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if _is_connected():
            return importlib.import_module("ray")
        # Asked before Ray is, which says little, and that late.
        admission = ray_admission.admission(running) if running and re.fullmatch(r"[^/]+:\d+", running) else {}
        self._started_here = True
        if running is not None:
            try:
                with _environment(admission), _own_sigterm(), _given_up_after(_JOIN_S, running):
                    ray = importlib.import_module("ray")
                    ray.init(address=running, namespace="raypod", **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ClusterError(
                    f"cannot join the Ray cluster at {running}: {' '.join(str(error).split())}"
                ) from error
        else:
            with _environment(self._variables()), _own_sigterm():
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

    def _variables(self) -> Dict[str, str]:
        """What a session of our own is started with. Most of it counts when ray is imported, or the raylet started."""
        variables = {"RAY_worker_niceness": "0"}  # the instances are the work here, not a guest beside it
        if "ray" not in sys.modules:
            # Ray listens on all interfaces; with a secret that only this session has, nobody else can use it.
            variables.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        if tuple(int(part) for part in version("ray").split(".")[:2]) >= _PRELOADS_SINCE:
            variables["RAY_enable_worker_prestart"] = "1"
            variables["RAY_preload_python_modules"] = self._preload
            # Read when torch is imported.
            variables["OMP_NUM_THREADS"] = str(self._placement.instances[0].threads_per_replica)
        return variables

    def close(self) -> None:
        """Disconnect, and end the session if it was started here."""
        if self._started_here:
            self._started_here = False
            ray = sys.modules.get("ray")  # it is not there if its import was interrupted
            if ray is not None:
                ray.shutdown()


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _running_cluster(gcs_address: Optional[str]) -> Optional[str]:
    """Address of the Ray cluster that this host belongs to, if it answers.

    RAY_ADDRESS, else that of the cluster file, else what `ray start` noted on this host.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return address
    if gcs_address is not None and _answers(gcs_address):
        return gcs_address
    note = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    if not note.is_file():
        return None
    address = note.read_text().strip()
    return address if _answers(address) else None  # it may be left over from a cluster that is gone


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError):
        return False
    return True


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


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray puts its own handler, `sys.exit(15)`, in the place of the program's, which counts again afterwards."""
    if threading.current_thread() is not threading.main_thread():  # where handlers cannot be set, by Ray neither
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as end:
        if end.code == signal.SIGTERM:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _given_up_after(seconds: float, address: str) -> Iterator[None]:
    """End this process if Ray does not come back: it waits without end, and for no signal, where a cluster ends just
    while it is being joined. Nothing has been started yet that would have to be ended in order.
    """

    def give_up() -> None:
        sys.stderr.write(
            f"raypod: error: the Ray cluster at {address} has not let this process in for {seconds:g} s; "
            "it may have ended meanwhile: see whether it still runs (`ray status`), then start again\n"
        )
        sys.stderr.flush()
        os._exit(RunError.exit_code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _silence_worker_deaths(ray: Any) -> None:
    """Ray prints a paragraph of its own for every dead worker; raypod says it in one line with host and log file."""
    worker = ray._private.worker
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


def reason_of_death(text: str) -> str:
    """The line of Ray's paragraph that says why: its first only says that."""
    lines = [line for line in text.splitlines() if line.strip()]
    if "creation task" in text:  # the constructor raised: its error comes last
        return lines[-1]
    for sign in ("node has died", "Worker exit detail", "Worker exit type"):
        for line in lines:
            if sign in line:
                # Ray goes on with what it might have been, at length.
                detail = line[line.index(sign) :].partition(" Some common causes")[0]
                return f"its process died: {detail[len(sign) :].lstrip(': ') if 'exit' in sign else detail}"
    return lines[0]
