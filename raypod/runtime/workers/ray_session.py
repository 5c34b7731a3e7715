"""The Ray session of a run: join a running cluster or start a local one, watch for the loss of its head, disconnect.

The folder RAY_TMPDIR of a local Ray session: its sockets and logs are created there.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

from raypod.errors import ClusterError, RunError
from raypod.plan.placement import Placement
from raypod.runtime.workers import gcs, ray_admission
from raypod.runtime.workers.ray_processes import RayProcesses, only_needed, patient
from raypod.runtime.workers.ray_template import replaced
from raypod.system.command_line import counted
from raypod.system.private import ROOT, make_private, read_file_of
from raypod.system.process import environment_variables
from raypod.system.signals import abort, postponed_signals

_CONNECT_S = 2.0
_JOIN_S = 60.0  # longer than all of Ray's own timeouts
# Of a local session, as a host can be busy for a while: the longest time of each try, as a share of the start timeout.
_TRIES = (1 / 6, 2 / 6, 3 / 6, 3 / 6)
_START_BOUND = (120.0, "start timeout")
_DEAF_S = 10  # in which no signal is handled while Ray waits for its raylet
_START_WAIT = "RAY_raylet_start_wait_time_s"
_IDLE = "RAY_idle_worker_killing_time_threshold_ms"
_MAX_ADDRESS_BYTES = 1024
_OBJECT_STORE_BYTES = 80_000_000  # it carries only reports; Ray's minimum is 75 MB
# Since this version, workers can start, and import a module, while the session does. Older ones, as 2.10, would restart
# such workers for the job.
_PRELOADS_SINCE = (2, 50)
# The raylet often connects to its object store before that listens, and would wait a second before the next attempt.
_RAYLET_ATTEMPTS = "RAY_raylet_client_num_connect_attempts"
_CONNECT_ATTEMPTS = 500  # 10 s in all, as by default; the raylets of later tries have longer
_RAYLET_RETRIES = {
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    _RAYLET_ATTEMPTS: str(_CONNECT_ATTEMPTS),
}
_INIT_OPTIONS: Dict[str, Any] = {"namespace": "raypod", "log_to_driver": False, "logging_level": "ERROR"}

# Of the local sessions of this process: Ray reads it once, so that later sessions must have the same.
_authentication: Dict[str, str] = {}
_INTERVAL_S = 1.0
_TIMEOUT_S = 3.0
# In a row: 5 refused connections (no process listens any more), or 10 requests without an answer, because a host that
# is overloaded or restarts its network can be silent for a while. This takes 5 s or 40 s; Ray gives up after 60 s.
_MOST_MISSED, _REFUSED_COUNTS = 10, 2


class RaySession:
    """A connection to Ray: the running cluster, or a local session that this process starts."""

    def __init__(
        self,
        placement: Placement,
        cluster_file: Optional[str] = None,
        preload: str = "",
        start_bound: Tuple[float, str] = _START_BOUND,
        hint: Callable[[], str] = lambda: "start this command again",
        without_ray: str = "",
        has_template: bool = False,
    ) -> None:
        """Create a session that is not open.

        Args:
            preload: A module that the workers of a local session import while it starts, if Ray supports that.
            start_bound: The longest time to start a local session, and the setting of it. Joining a running cluster is
                bounded by Ray's own timeouts, too.
            hint: returns, for the error message if Ray's head is lost: what to do once Ray runs again.
            without_ray: for the error message if no local session starts: how the same is done without Ray.
            has_template: Whether the workers of a local session are forked from a process that has imported torch.
        """
        self._placement, self._cluster_file = placement, cluster_file
        self._preload, self._has_template = preload, has_template
        self._start_bound = start_bound
        self._hint, self._without_ray = hint, without_ray
        self._started_here = False
        self._processes: Optional[RayProcesses] = None  # of a local session
        self._head: Optional[HeadWatch] = None

    def open(self, log: Callable[[str], None] = lambda line: None) -> Any:
        """Connect, and return the `ray` module. `log` receives a line for the user before another try.

        Raises:
            ClusterError: a cluster file was given and no Ray cluster is running, or it rejects this process.
        """
        if is_connected():
            return importlib.import_module("ray")
        cluster = self._placement.cluster
        running = running_cluster(cluster.gcs_address)
        if running is None and not cluster.is_local:
            raise ClusterError(
                f"no Ray cluster is running for {cluster.name}; start it with {self._start_command}, then run this "
                "command on the head host"
            )
        ray = self._start_local(log) if running is None else self._join(running)
        _silence_worker_deaths(ray)
        self._head = self._watch_head(ray.get_runtime_context().gcs_address, is_local=running is None)
        return ray

    @property
    def _start_command(self) -> str:
        return f"`raypod up {self._cluster_file}`" if self._cluster_file else "`ray up` or `ray start`"

    def _watch_head(self, address: str, is_local: bool) -> HeadWatch:
        if is_local:
            return HeadWatch(address, "the local Ray session", self._hint)
        host = address.rpartition(":")[0]
        name = next((each.name for each in self._placement.cluster.hosts if each.address == host), host)

        def hint() -> str:
            return f"start the cluster again with {self._start_command}, then {self._hint()}"

        return HeadWatch(address, f"host {name}, the head of the Ray cluster,", hint)

    def _join(self, address: str) -> Any:
        self._started_here = True
        return _join(address, min(self._start_bound[0], _JOIN_S))

    def _start_local(self, log: Callable[[str], None]) -> Any:
        """Start a session, in several tries, each for longer, within the start timeout."""
        self._started_here = True
        bound_s, began_s = self._start_bound[0], time.monotonic()
        try_s = shortest_s = max(1, int(bound_s * _TRIES[0]))
        with environment_variables(self._variables(try_s)):
            for number in range(1, len(_TRIES) + 1):
                os.environ[_RAYLET_ATTEMPTS] = str(number * _CONNECT_ATTEMPTS)
                self._processes = RayProcesses(self._has_template)  # its template imports while this process does
                ray = importlib.import_module("ray")
                try:
                    self._start_processes(ray, try_s)
                    break
                except Exception as error:  # Ray raises this very class if its processes do not start in time
                    took_s = time.monotonic() - began_s
                    if number == len(_TRIES) or bound_s - took_s < shortest_s:
                        raise RunError(self._start_failure(error, number, took_s)) from error
                    try_s = max(1, int(min(bound_s * _TRIES[number], bound_s - took_s)))
                    log(f"Ray did not start ({_line(error)}); this host may be busy: trying again, for up to {try_s} s")
                with postponed_signals():  # as in `close`
                    self._shut_down()
        return ray

    def _start_processes(self, ray: Any, try_s: int) -> None:
        assert self._processes is not None
        services = ray._private.services
        with _connected_whole(ray), _keep_sigterm_handler(ray), only_needed(ray), self._processes.started_by(
            services
        ), patient(services, try_s):
            ray.init(address="local", include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, **_INIT_OPTIONS)

    def _start_failure(self, error: Exception, tries: int, took_s: float) -> str:
        seconds, setting = self._start_bound
        without_ray = f", or {self._without_ray}" if self._without_ray else ""
        attempts = f"{counted(tries, 'attempt')} in {took_s:.0f} s"
        return (
            f"cannot start a local Ray session on this host ({attempts}): {_line(error)}; if this host is busy, use a "
            f"longer {setting} (now {seconds:g} s){without_ray}"
        )

    def _variables(self, try_s: int) -> Dict[str, str]:
        """Return the environment of a local session. Most of it is read when ray is imported or the raylet starts."""
        variables = {"RAY_TMPDIR": socket_folder(), **_RAYLET_RETRIES}
        variables[_START_WAIT] = os.environ.get(_START_WAIT) or str(min(_DEAF_S, try_s))
        variables["RAY_worker_niceness"] = "0"  # Ray lowers the priority of workers by default
        if "ray" not in sys.modules:
            # Ray listens on all interfaces; a random token prevents other users from connecting.
            _authentication.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        variables.update(_authentication)
        if tuple(int(part) for part in version("ray").split(".")[:2]) >= _PRELOADS_SINCE:
            variables["RAY_enable_worker_prestart"] = "1"
            variables["RAY_preload_python_modules"] = self._preload
            # Such a worker is idle until its instance is placed. Ray ends idle workers after 1 s if no core is free,
            # and the reservation takes the cores first: the instance would start a worker of its own.
            variables[_IDLE] = os.environ.get(_IDLE) or "10000"
            # Read when torch is imported.
            variables["OMP_NUM_THREADS"] = str(self._placement.instances[0].threads_per_replica)
        return variables

    def close(self) -> None:
        """Disconnect, and end a session that `open` started."""
        if self._started_here:
            self._started_here = False
            try:
                if self._head is not None:
                    self._head.close()
            finally:
                # If it is interrupted (it takes seconds), dropping an object reference later makes Ray exit the process
                # with code 1, without a message.
                with postponed_signals():
                    self._shut_down()

    def _shut_down(self) -> None:
        ray = sys.modules.get("ray")  # None if its import was interrupted
        try:
            if ray is not None:
                ray.shutdown()
        finally:
            if self._processes is not None:
                self._processes.close()


@contextlib.contextmanager
def running_session() -> Iterator[Any]:
    """Yield the `ray` module, connected to the cluster that runs on this host.

    Raises:
        ClusterError: no cluster runs here, or it rejects this process.
    """
    address = running_cluster(None)
    if address is None:
        raise ClusterError("no Ray cluster is running on this host; start it with `ray start`, or set RAY_ADDRESS")
    try:
        yield _join(address, _JOIN_S)
    finally:
        if is_connected():
            with postponed_signals():
                sys.modules["ray"].shutdown()


def _join(address: str, within_s: float) -> Any:
    """Connect to a running cluster, and return the `ray` module."""
    try:
        variables = ray_admission.join_environment(address)  # `ray.init` reports a rejection after 20 s, without reason
    except ClusterError as error:
        if address != named_cluster():
            raise
        raise ClusterError(f"{error}; correct RAY_ADDRESS, or unset it") from error
    try:
        with environment_variables(variables), _exit_after(within_s, address):
            ray = importlib.import_module("ray")
            with _connected_whole(ray), _keep_sigterm_handler(ray):
                ray.init(address=address, **_INIT_OPTIONS)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"cannot join the Ray cluster at {address}: {' '.join(str(error).split())}") from error
    return ray


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def is_connected() -> bool:
    """Return whether this process is connected to Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def named_cluster() -> Optional[str]:
    """Return the address of the Ray cluster that RAY_ADDRESS names; None if it names none.

    Raises:
        ClusterError: it is another kind of address.
    """
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address in ("", "auto"):
        return None
    if re.fullmatch(r"[^/]+:\d+", address) is None:
        raise ClusterError(f"RAY_ADDRESS={address} is not HOST:PORT of a Ray cluster; correct it, or unset it")
    return address


def running_cluster(gcs_address: Optional[str]) -> Optional[str]:
    """Return the address of the Ray cluster of this host, HOST:PORT; None if it does not accept connections.

    Sources: RAY_ADDRESS, the cluster file, and the file that `ray start` writes on this host, if it is a file of this
    user or of root.

    Raises:
        ClusterError: RAY_ADDRESS is another kind of address.
    """
    named = named_cluster()
    if named is not None:
        return named
    if gcs_address is not None and _accepts_connections(gcs_address):
        return gcs_address
    file = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    content = read_file_of(str(file), (ROOT, os.getuid()), _MAX_ADDRESS_BYTES)
    address = (content or b"").decode(errors="replace").strip()
    return address if _accepts_connections(address) else None  # the file can be of a cluster that has ended


def _accepts_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _connected_whole(ray: Any) -> Iterator[None]:
    """Postpone signals while Ray connects, as its C++ code does for most of that time. Ray's own timeouts bound it.

    An interrupt in between leaves a core worker that `ray.shutdown` does not know: the process ends by a segfault.
    """
    worker = ray._private.worker
    before = worker.connect

    def connect(*arguments: Any, **options: Any) -> Any:
        with postponed_signals():
            return before(*arguments, **options)

    with replaced(worker, connect=connect):
        yield


@contextlib.contextmanager
def _keep_sigterm_handler(ray: Any) -> Iterator[None]:
    """Prevent Ray from replacing the SIGTERM handler: the SystemExit of Ray's own may be raised where it is ignored.

    Ray also puts a handler in C++ before that of Python, which prints stacks and aborts the process 3 s later.
    """
    try:
        with replaced(ray._private.utils, set_sigterm_handler=lambda handler: None):
            yield
    finally:
        handler = signal.getsignal(signal.SIGTERM)  # None: one in C++ of this program
        if handler is not None and threading.current_thread() is threading.main_thread():  # which can set handlers
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _exit_after(seconds: float, address: str) -> Iterator[None]:
    """Exit this process after a timeout: `ray.init()` can hang and ignore signals if the cluster dies during join.

    At this point the process has started nothing that needs to be ended.
    """

    error = RunError(
        f"cannot join the Ray cluster at {address} within {seconds:g} s; it may have ended meanwhile: check whether it "
        "is running (`ray status`), then start again"
    )
    timer = threading.Timer(seconds, abort, (error,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _silence_worker_deaths(ray: Any) -> None:
    """Disable Ray's messages about dead workers; raypod prints one line with host and log file."""
    worker = ray._private.worker
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


class HeadWatch:
    """Sends a request to the GCS every second; `raypod.system.signals` ends this process if it is considered lost.

    Ray needs its head: calls to it block the main thread, and after a minute Ray ends this process without a message.
    """

    def __init__(self, address: str, name: str, hint: Callable[[], str]) -> None:
        """`address` is HOST:PORT of the GCS; `name` (of what is lost) and `hint()` are for the error message."""
        self._address, self._name, self._hint = address, name, hint
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="head watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after a last request. If the head is lost, this does not return, because Ray's errors hide the cause."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        missed, is_closing = 0, False
        while missed or not is_closing:
            if missed:
                time.sleep(_INTERVAL_S)
            is_closing = self._closing.wait(0 if missed else _INTERVAL_S)
            # A refused token is an answer, too. Another user's process can have taken the port of one that has ended.
            answer = gcs.check(self._address, timeout_s=_TIMEOUT_S, only_own=True)
            if answer.state in (gcs.ANSWERED, gcs.REFUSED):
                missed = 0
            else:
                missed += _REFUSED_COUNTS if answer.detail == os.strerror(errno.ECONNREFUSED) else 1
            if missed >= _MOST_MISSED:
                abort(
                    RunError(
                        f"{self._name} is lost: its GCS at {self._address} does not respond ({answer.detail}), and "
                        f"Ray cannot continue without it; {self._hint()}"
                    )
                )


# The longest path of a Unix socket, and the longest one that Ray creates below RAY_TMPDIR.
_MAX_SOCKET_BYTES = 107
_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_{pid}/sockets/plasma_store"


def private_tmpdir() -> str:
    """Return the folder for RAY_TMPDIR of this user's processes: the given one, or one in it if others can use that.

    Ray lets all users write to the folders of its sockets and logs.

    Raises:
        ClusterError: it belongs to another user.
    """
    given = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if not make_private(given):
        return given
    folder = f"{given}/raypod-{os.getuid()}"
    problem = make_private(folder)
    if problem:
        raise ClusterError(f"no folder for the files of Ray: {problem}, or set RAY_TMPDIR to a folder of your own")
    return folder


def socket_folder() -> str:
    """Return `private_tmpdir()`, in which a local session creates its sockets.

    Raises:
        ClusterError: it belongs to another user, or its path is too long.
    """
    folder = private_tmpdir()
    size, most = len(os.fsencode(folder)), _MAX_SOCKET_BYTES - len(_SOCKET.format(pid=os.getpid()))
    if size > most:
        raise ClusterError(
            f"the path of the temporary folder {folder} is too long for the Unix sockets of Ray: it has {size} bytes, "
            f"at most {most} are possible; set RAY_TMPDIR (or TMPDIR) to a folder with a shorter path"
        )
    return folder
