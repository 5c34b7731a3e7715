"""Sessions of Ray, with a fake one: their start and end, signals, the watch of the head, and servers on hosts."""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional

import pytest

from raypod.errors import ClusterError, RunError
from raypod.plan.cluster import LOCAL, Cluster, Host
from raypod.plan.placement import Sizes, place
from raypod.runtime.workers import gcs, ray_admission, ray_processes, ray_session
from raypod.runtime.workers.ray import RayServer, serve_here, serve_on
from raypod.runtime.workers.ray_session import HeadWatch, RaySession
from tests.support.bounded import COMMAND_S
from tests.support.scripted_ray import NEVER, ActorDied, Ref, ScriptedActor, ScriptedRay, TaskError, node

NOTHING = "this Ray starts nothing"


class Node:
    """Records the processes that Ray's class of this name would start."""

    def __init__(self) -> None:
        self.started: List[str] = []

    def start_gcs_server(self) -> None:
        self.started.append("gcs")

    start_monitor = start_log_monitor = start_api_server = lambda self, **options: self.started.append("not needed")

    def start_all(self) -> List[str]:
        self.start_gcs_server()
        self.start_monitor()
        self.start_api_server(include_dashboard=False, raise_on_failure=False)
        self.start_log_monitor()
        return self.started


class FakeRay:
    """The module `ray`; `during` is called by `init`, and `at_shutdown` by `shutdown`. Nothing is started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: List[str] = []
        self.options: Dict[str, Any] = {}
        self.during: Callable[[], Any] = lambda: None
        self.at_shutdown: Callable[[], Any] = lambda: None
        utils = SimpleNamespace(set_sigterm_handler=lambda handler: signal.signal(signal.SIGTERM, handler))
        self.worker = SimpleNamespace(_worker_logs_enabled=True, connect=lambda: None)
        services = SimpleNamespace(wait_for_node=lambda *names, timeout=30: timeout, get_node=lambda *names: names)
        node = SimpleNamespace(Node=Node)
        self._private = SimpleNamespace(services=services, utils=utils, node=node, worker=self.worker)
        close = lambda: self.done.append("processes")  # noqa: E731
        processes = SimpleNamespace(started_by=lambda services: nullcontext(), close=close)
        monkeypatch.setattr(ray_session, "RayProcesses", lambda has_template: processes)
        monkeypatch.setattr(ray_session, "HeadWatch", self._watch)
        monkeypatch.setattr(ray_session, "running_cluster", lambda address: None)
        monkeypatch.delitem(sys.modules, "ray", raising=False)
        monkeypatch.setattr(importlib, "import_module", self._import)
        self._monkeypatch = monkeypatch

    def _import(self, name: str) -> FakeRay:
        assert name == "ray"
        self._monkeypatch.setitem(sys.modules, "ray", self)  # type: ignore[arg-type]
        return self

    def _watch(self, address: str, name: str, hint: Callable[[], str]) -> Any:
        return SimpleNamespace(close=lambda: self.done.append(f"watch of {(address, name, hint())}"))

    def init(self, **options: Any) -> None:
        self.options = options
        self.during()

    def is_initialized(self) -> bool:
        return False

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="10.0.0.1:7")

    def shutdown(self) -> None:
        self.at_shutdown()
        self.done.append("shutdown")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


@pytest.fixture
def unopened() -> RaySession:
    return RaySession(place(LOCAL, Sizes(1, 1, 1)), preload="torch", hint=lambda: "go on")


def fails(what: str = NOTHING, kind: type = Exception) -> None:
    raise kind(what)


def test_a_local_session_starts_only_the_processes_that_it_uses(
    ray: FakeRay, unopened: RaySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, variables = Node(), {}
    monkeypatch.setenv("RAY_idle_worker_killing_time_threshold_ms", "7")

    def start() -> None:
        started.start_all()
        variables.update(os.environ)

    ray.during = start
    unopened.open()
    assert started.started == ["gcs"]
    assert started._webui_url == ""  # type: ignore[attr-defined]  # ray.init() reads it
    retries = [value for name, value in variables.items() if name.startswith("RAY_raylet_client_")]
    assert [int(value) for value in retries] == [20, 500]  # 10 s in all
    assert (variables["RAY_worker_niceness"], variables["RAY_AUTH_MODE"]) == ("0", "token")
    assert len(variables["RAY_AUTH_TOKEN"]) == 64
    assert variables["RAY_idle_worker_killing_time_threshold_ms"] == "7", "the user's counts"
    assert (ray.options["address"], ray.options["log_to_driver"]) == ("local", False)
    assert not ray.worker._worker_logs_enabled
    unopened.close()
    unopened.close()
    assert ray.done == ["watch of ('10.0.0.1:7', 'the local Ray session', 'go on')", "shutdown", "processes"]
    assert Node().start_all() == ["gcs", *["not needed"] * 3]


def test_a_session_folder(ray: FakeRay, unopened: RaySession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    ray.during = lambda: used.append(os.environ["RAY_TMPDIR"])
    own = tmp_path / f"raypod-{os.getuid()}"
    monkeypatch.setattr(ray_session, "_MAX_SOCKET_BYTES", 1000)
    for given in (tmp_path / "new", tmp_path):
        tmp_path.chmod(0o1777)
        monkeypatch.setenv("RAY_TMPDIR", str(given))
        unopened.open()
        unopened.close()
    assert (used, own.stat().st_mode & 0o777) == ([str(tmp_path / "new"), str(own)], 0o700)
    own.rmdir()
    own.symlink_to("new")
    with pytest.raises(ClusterError, match=f"{own} is a symbolic link .*, or set RAY_TMPDIR to a folder of your own"):
        unopened.open()


def test_signals_while_ray_starts_and_shuts_down_take_effect(ray: FakeRay, unopened: RaySession) -> None:
    before, during = signal.getsignal(signal.SIGTERM), []

    def start() -> None:
        ray._private.utils.set_sigterm_handler(lambda number, frame: sys.exit(number))
        during.append(signal.getsignal(signal.SIGTERM))

    ray.during, ray.at_shutdown = start, lambda: signal.raise_signal(signal.SIGINT)
    unopened.open()
    with pytest.raises(KeyboardInterrupt):
        unopened.close()
    assert ray.done[1:] == ["shutdown", "processes"]  # Ctrl-C takes effect after it
    assert during == [before]  # Ray does not replace the handler
    assert signal.getsignal(signal.SIGTERM) == before


def test_too_long_a_folder(ray: FakeRay, unopened: RaySession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 107 - len(f"/ray/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store")
    monkeypatch.setattr(ray_session, "make_private", lambda folder: None)
    monkeypatch.setenv("RAY_TMPDIR", "/" + "a" * (most - 1))
    unopened.open()
    unopened.close()
    done = list(ray.done)
    monkeypatch.setenv("RAY_TMPDIR", "/" + "a" * (most - 2) + "\u00e4")
    message = f"it has {most + 1} bytes, at most {most} are possible; set RAY_TMPDIR .or TMPDIR. to a folder with a sho"
    with pytest.raises(ClusterError, match=message):
        unopened.open()
    assert ray.done == done


def test_a_session_that_does_not_start_is_tried_for_longer(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, now_s, services, said = [], [0.0], ray._private.services, []

    def unknown(*names: str) -> None:
        now_s[0] += 10.0
        raise RuntimeError("unknown node")

    services.get_node = unknown
    monkeypatch.setattr(ray_processes.time, "monotonic", lambda: now_s[0])

    def start() -> None:
        began_s = now_s[0]
        with pytest.raises(RuntimeError):
            services.get_node("gcs", "node")
        one_wait = dict(os.environ)["RAY_raylet_start_wait_time_s"]
        attempts = int(dict(os.environ)["RAY_raylet_client_num_connect_attempts"])
        waits.append((one_wait, attempts, now_s[0] - began_s, services.wait_for_node("gcs")))
        fails("The current node timed out during startup.\nSee the logs.")

    ray.during = start
    bound = (300.0, "run.start_timeout_s")
    session = RaySession(place(LOCAL, Sizes(1, 1, 1)), start_bound=bound, without_ray="--fleet inline")
    message = (
        r"^cannot start a local Ray session on this host \(3 attempts in 310 s\): The current node timed out during "
        r"startup. See the logs; if this host is busy, use a longer run.start_timeout_s \(now 300 s\), or "
        r"--fleet inline$"
    )
    with pytest.raises(RunError, match=message):
        session.open(said.append)
    session.close()
    assert waits == [("10", 500, 60.0, 50), ("10", 1000, 110.0, 100), ("10", 1500, 140.0, 130)]
    words = "this host may be busy: trying again, for up to"
    assert [line.rpartition("; ")[2] for line in said] == [f"{words} {seconds} s" for seconds in (100, 130)]
    assert (services.get_node, services.wait_for_node("gcs")) == (unknown, 30)
    assert ray.done == ["shutdown", "processes"] * 3


@pytest.mark.parametrize("appears_after", [2, None])
def test_ray_is_asked_for_its_raylet_when_that_is_known(
    appears_after: Optional[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, looks, asked = [0.0], [], []

    class State:
        def _initialize_global_state(self, options: str) -> None:
            assert options == "options of gcs:1"

        def node_table(self) -> List[str]:
            looks.append(now_s[0])
            return ["node"] if len(looks) - 1 == appears_after else []

    def get_node(*names: str) -> str:
        asked.append(names)
        if appears_after is None:
            now_s[0] += 5.0
            fails("unknown node", RuntimeError)
        return "node"

    state = SimpleNamespace(_private=SimpleNamespace(state=SimpleNamespace(GlobalState=State)))
    services = SimpleNamespace(get_node=get_node, _get_gcs_client_options=lambda gcs: f"options of {gcs}", ray=state)
    monkeypatch.setattr(ray_processes.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(ray_processes.time, "sleep", lambda seconds: now_s.__setitem__(0, now_s[0] + seconds))
    with ray_processes.patient(services, 7.0):
        if appears_after is None:
            with pytest.raises(RuntimeError, match="unknown node"):
                services.get_node("gcs:1", "id")
        else:
            assert services.get_node("gcs:1", "id") == "node"
    assert looks[:3] == [0.0, 0.02, 0.04]
    assert (asked, 7.0 <= looks[-1] < 7.03) == ([("gcs:1", "id")], appears_after is None)
    assert services.get_node is get_node


@pytest.mark.parametrize(("bound_s", "attempts"), [(120.0, "4 attempts"), (0.5, "1 attempt")])
def test_a_session_has_four_tries(ray: FakeRay, unopened: RaySession, bound_s: float, attempts: str) -> None:
    failures = [lambda: fails("The current node timed out during startup."), lambda: None]
    ray.during = lambda: failures.pop(0)()
    unopened.open()
    assert ray.done == ["shutdown", "processes"]
    unopened.close()
    assert ray.done[3:] == ["shutdown", "processes"]
    ray.during = fails
    with pytest.raises(RunError, match=rf"\({attempts} in 0 s\)"):
        RaySession(place(LOCAL, Sizes(1, 1, 1)), start_bound=(bound_s, "start timeout")).open()


def test_a_session_closes_if_interrupted(ray: FakeRay, unopened: RaySession, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        unopened.open()
    unopened.close()
    assert ray.done == ["processes"]


def test_the_host_of_a_cluster_is_joined_with_its_admission(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, modes = Cluster("pod", (Host("first", "10.0.0.1"), Host("b", "10.0.0.2"))), []
    session = RaySession(place(cluster, Sizes(2, 2, 1)), "pod.yaml", hint=lambda: "go on")
    with pytest.raises(ClusterError, match=r"no Ray cluster is running for pod; start it with `raypod up pod\.yaml`"):
        session.open()
    monkeypatch.setattr(ray_session, "running_cluster", lambda address: "10.0.0.1:7")
    monkeypatch.setattr(ray_admission, "join_environment", lambda address: {"RAY_AUTH_MODE": "token"})
    ray.during = lambda: modes.append(os.environ["RAY_AUTH_MODE"])
    session.open()
    session.close()
    assert (modes, ray.options["address"]) == (["token"], "10.0.0.1:7")
    hint = "start the cluster again with `raypod up pod.yaml`, then go on"
    assert ray.done == [f"watch of {('10.0.0.1:7', 'host first, the head of the Ray cluster,', hint)}", "shutdown"]
    ray.during = lambda: fails("the versions\ndiffer", RuntimeError)
    with pytest.raises(ClusterError, match=r"^cannot join the Ray cluster at 10\.0\.0\.1:7: the versions differ$"):
        session.open()


@pytest.mark.parametrize("foreign", ["", "owner", "link", "writable"])
def test_only_an_own_file_names_the_cluster(foreign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray_session, "_accepts_connections", bool)
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("10.0.0.1:7\n")
    if foreign == "owner":
        monkeypatch.setattr(ray_session, "ROOT", -1)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    elif foreign == "link":
        file.rename(tmp_path / "file")
        file.symlink_to(tmp_path / "file")
    elif foreign == "writable":
        file.chmod(0o666)
    assert ray_session.running_cluster(None) == (None if foreign else "10.0.0.1:7")


@pytest.mark.parametrize("address", ["ray://head:10001", "local", "10.0.0.1", "h:1"])
def test_wrong_and_dead_addresses_are_errors(
    address: str, unopened: RaySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "check", lambda *_, **__: gcs.Answer(gcs.SILENT, "refused", b""))
    monkeypatch.setenv("RAY_ADDRESS", address)
    other = f"^RAY_ADDRESS={address} is not HOST:PORT of a Ray cluster"
    dead = r"^no Ray cluster responds at h:1: refused; correct RAY_ADDRESS, or unset"
    with pytest.raises(ClusterError, match=dead if address == "h:1" else other):
        unopened.open()


def test_the_cluster_of_another_user_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with a token nor without: it would execute the code of the run."""
    calls = []

    def check(address: str, *token: str, only_own: bool = False) -> gcs.Answer:
        calls.append((address, *token))
        return gcs.Answer(gcs.FOREIGN, "why", b"") if only_own else gcs.Answer(gcs.ANSWERED, "", b"")

    monkeypatch.setattr(gcs, "check", check)
    with pytest.raises(ClusterError, match=r"^the Ray cluster at h:1 is not joined and gets no token: why$"):
        ray_admission.join_environment("h:1")
    assert calls == [("h:1",)]


@pytest.mark.usefixtures("processes")
def test_a_join_that_hangs_exits_after_the_timeout() -> None:
    work = "import time; from raypod.runtime.workers.ray_session import _exit_after\n"
    work += "with _exit_after(0.5, 'h:1'): time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("raypod: error: cannot join the Ray cluster at h:1 within 0.5 s")


# ---- the head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("details", "closed_after", "requests"),
    [
        ([os.strerror(errno.ECONNREFUSED)] * 9, 100, 5),
        (["no answer"] * 20, 100, 10),
        (["no answer"] * 9 + [""] + ["no answer"] * 20, 100, 20),
        (["no answer"] * 20, 0, 10),  # the end waits: the errors that the loss causes are not reported
        (["no answer"] * 9 + [""], 0, None),
        (["a process of uid 7"] * 20, 100, 10),
    ],
)
def test_silent_head_is_lost(
    monkeypatch: pytest.MonkeyPatch, details: List[str], closed_after: int, requests: Any
) -> None:
    asked, threads = [], []

    def check(address: str, timeout_s: float, only_own: bool) -> gcs.Answer:
        detail = details[len(asked)]
        asked.append(address)
        state = gcs.FOREIGN if only_own and "uid" in detail else gcs.SILENT
        return gcs.Answer(state if detail else gcs.REFUSED, detail, b"")

    def thread(target: Callable[[], None], **options: Any) -> Any:
        threads.append(target)
        return SimpleNamespace(start=lambda: None, join=lambda: threads.append("joined"))

    def abort(error: RunError) -> None:
        raise error

    monkeypatch.setattr(ray_session, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(gcs, "check", check)
    monkeypatch.setattr(ray_session, "abort", abort)
    monkeypatch.setattr(ray_session, "threading", SimpleNamespace(Event=threading.Event, Thread=thread))
    watch = HeadWatch("127.0.0.1:9", "host a", lambda: "do b")
    watch.close()
    assert threads[1:] == ["joined"]
    monkeypatch.setattr(watch._closing, "wait", lambda seconds: len(asked) >= closed_after)
    if requests is None:
        threads[0]()
        return
    lost = f"its GCS at 127.0.0.1:9 does not respond ({details[-1]}), and Ray cannot continue without it"
    with pytest.raises(RunError, match=f"^host a is lost: {re.escape(lost)}; do b$"):
        threads[0]()
    assert len(asked) == requests


# ---- servers ---------------------------------------------------------------------------------------------------------


def test_errors_of_a_server_are_those_of_its_object_and_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ScriptedRay(monkeypatch)
    monkeypatch.setattr(importlib, "import_module", lambda name: ray)
    refs = {"good": Ref(7), "full": Ref(TaskError(OSError(errno.ENOSPC, "full"))), "late": Ref(1, NEVER)}
    refs["dead"] = Ref(ActorDied("The actor died.\nThe node has died: no power"))
    server = RayServer(ScriptedActor(3, {name: lambda ref=ref: ref for name, ref in refs.items()}), "host b")
    assert server.result(server.request("good"), 1.0) == 7
    for name, kind, message in (
        ("full", OSError, "full"),
        ("late", TimeoutError, "^host b does not respond$"),
        ("dead", ConnectionError, "^no connection to host b: its process died: node has died: no power$"),
    ):
        with pytest.raises(kind, match=message):
            server.result(server.request(name), 1.0)
    server.close()
    assert ray.killed == [3]


def test_a_server_is_on_its_host_and_only_that_of_the_coordinator_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, started = ScriptedRay(monkeypatch, node("a"), node("b"), node("c", Alive=False)), []
    ray.start = lambda options, *given: started.append((options, given))
    monkeypatch.setattr("raypod.runtime.workers.ray.node_affinity", lambda node: {"node": node["NodeID"]})
    cluster = Cluster("pod", (Host("first", "a"), Host("second", "b"), Host("gone", "c")))
    serve_here(ray, list, 1)
    serve_on(ray, cluster, "second", list, 2, 3)
    assert started == [({"node": "a", "max_restarts": -1}, (1,)), ({"node": "b", "max_restarts": 0}, (2, 3))]
    with pytest.raises(ConnectionError, match="no Ray node is alive on host gone"):
        serve_on(ray, cluster, "gone", list)


def test_an_interrupt_waits_until_ray_is_connected() -> None:
    connected: List[bool] = []

    def connect() -> None:
        signal.raise_signal(signal.SIGINT)
        connected.append(True)

    ray = SimpleNamespace(_private=SimpleNamespace(worker=SimpleNamespace(connect=connect)))
    with pytest.raises(KeyboardInterrupt), ray_session._connected_whole(ray):
        ray._private.worker.connect()
    assert connected == [True]
    assert ray._private.worker.connect is connect
