"""Signals while Ray starts."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, List

import psutil
import pytest
from bounded import COMMAND_S, GONE_WITHIN_S, wait_until

from raypod.errors import RunError
from raypod.fleet.ray_session import RaySession
from raypod.plan.cluster import LOCAL
from raypod.plan.placement import Sizes, place


def test_sigterm_while_ray_starts_exits_with_130_and_leaves_no_process(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "raypod.train", "--device", "emulated", "--run-dir", str(tmp_path / "run")]
    pipe = subprocess.PIPE
    command = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    train = psutil.Process(command.pid)
    assert wait_until(lambda: any(_is_of_ray(child) for child in train.children()), 60)  # inside ray.init
    started = train.children(recursive=True)
    command.send_signal(signal.SIGTERM)
    _, err = command.communicate(timeout=COMMAND_S)
    assert command.returncode == 130, err
    _, alive = psutil.wait_procs(started, timeout=GONE_WITHIN_S)
    assert not alive
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def _is_of_ray(process: psutil.Process) -> bool:
    """Tell Ray's processes from short-lived ones, as `uname` during an import in Python 3.8."""
    try:
        return any("ray" in Path(word).parts for word in process.cmdline())
    except psutil.Error:
        return False


def test_a_session_can_be_closed_after_an_interrupted_import_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(importlib, "import_module", interrupted)
    session = RaySession(place(LOCAL, Sizes(1, 1, 1)))
    with pytest.raises(KeyboardInterrupt):
        session.open()
    session.close()


UTILS = SimpleNamespace(set_sigterm_handler=lambda handler: signal.signal(signal.SIGTERM, handler))
SERVICES = SimpleNamespace(ConsolePopen=subprocess.Popen)


class Node:
    """Records the processes that Ray's class of this name would start."""

    def __init__(self) -> None:
        self.started: List[str] = []

    def start_gcs_server(self) -> None:
        self.started.append("gcs")

    def start_monitor(self) -> None:
        self.started.append("monitor")

    def start_api_server(self, *, include_dashboard: bool, raise_on_failure: bool) -> None:
        self.started.append("dashboard")

    def start_log_monitor(self) -> None:
        self.started.append("log monitor")

    def start_all(self) -> List[str]:
        self.start_gcs_server()
        self.start_monitor()
        self.start_api_server(include_dashboard=False, raise_on_failure=False)
        self.start_log_monitor()
        return self.started


def replace_ray(monkeypatch: pytest.MonkeyPatch, init: Callable[..., None]) -> None:
    """Let `import ray` return a module with this `init`."""
    private = SimpleNamespace(services=SERVICES, utils=UTILS, node=SimpleNamespace(Node=Node))
    ray = SimpleNamespace(_private=private, init=init)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(importlib, "import_module", lambda name: ray)


def test_a_local_session_starts_only_the_processes_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    node, retries = Node(), []

    def start(**options: Any) -> None:
        node.start_all()
        retries.append({name: os.environ[name] for name in os.environ if name.startswith("RAY_raylet_client_")})
        raise Exception("this Ray starts nothing")

    replace_ray(monkeypatch, start)
    session = RaySession(place(LOCAL, Sizes(1, 1, 1)))
    with pytest.raises(RunError, match="this Ray starts nothing"):
        session.open()
    session.close()
    assert node.started == ["gcs"]
    assert node._webui_url == ""  # type: ignore[attr-defined]  # ray.init() reads it
    (variables,) = retries
    assert [int(value) for value in variables.values()] == [20, 500]  # 10 s in all
    assert Node().start_all() == ["gcs", "monitor", "dashboard", "log monitor"]


def test_ray_does_not_replace_the_sigterm_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    during: List[Any] = []

    def start(**options: Any) -> None:
        UTILS.set_sigterm_handler(lambda number, frame: sys.exit(number))
        during.append(signal.getsignal(signal.SIGTERM))
        raise Exception("this Ray starts nothing")

    replace_ray(monkeypatch, start)
    before = signal.getsignal(signal.SIGTERM)
    session = RaySession(place(LOCAL, Sizes(1, 1, 1)))
    with pytest.raises(RunError, match="this Ray starts nothing"):
        session.open()
    session.close()
    assert during == [before]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_session_whose_processes_do_not_start_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**options: Any) -> None:
        raise Exception("The current node timed out during startup.\nSee the logs.")

    replace_ray(monkeypatch, start)
    session = RaySession(place(LOCAL, Sizes(1, 1, 1)))
    with pytest.raises(RunError, match="cannot start a local Ray session on this host: The current node timed out"):
        session.open()
    session.close()
