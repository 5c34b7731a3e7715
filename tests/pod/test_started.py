"""Causes of failed starts, in lines that Ray 2.60 wrote, and the hosts of Ray's autoscaler."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest

from raypod.pod import autoscaler_hosts, started
from raypod.pod.autoscaler_hosts import ADD, AGAIN, KEEP, change

HEAD, FIRST, SECOND, THIRD = (f"10.0.0.1{last}" for last in range(1, 5))
TAGS = {"ray-node-type": "worker", "ray-node-status": "uninitialized"}  # of a worker that the autoscaler will start


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which the import of the provider sets
    return tmp_path / "ray" / "cluster-pod.state"


@pytest.fixture
def provider(processes: None, state: Path) -> Any:  # the import of Ray 2.10 starts a process
    from ray.autoscaler._private.local import node_provider

    made = node_provider.LocalNodeProvider({"head_ip": HEAD, "worker_ips": [FIRST]}, "pod")
    node_provider.record_local_head_state_if_needed(made)
    made.create_node({}, dict(TAGS), 1)
    made.set_node_tags(FIRST, {"ray-node-status": "up-to-date"})
    return made


def workers(provider: Any) -> List[str]:
    return list(provider.non_terminated_nodes({"ray-node-type": "worker"}))


def entries(state: Path) -> Dict[str, Any]:
    return dict(json.loads(state.read_text()))


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
def test_a_running_autoscaler_starts_a_host_that_was_added_to_the_file(provider: Any, state: Path) -> None:
    provider.create_node({}, dict(TAGS), 1)  # what it does for a file with one more worker
    assert workers(provider) == [FIRST]
    before = entries(state)
    assert change(state, KEEP, [FIRST, SECOND]) == {"failed": []}
    assert change(state, ADD, [FIRST, SECOND]) == {"failed": []}
    assert workers(provider) == [FIRST]
    provider.create_node({}, dict(TAGS), 1)
    assert workers(provider) == [FIRST, SECOND]
    assert {name: entries(state)[name] for name in before} == before  # the others are not started again
    assert sorted(path.name for path in state.parent.iterdir()) == ["cluster-pod.lock", "cluster-pod.state"]


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
def test_a_host_replaced_in_the_file_is_forgotten_before_its_number_changes(provider: Any, state: Path) -> None:
    change(state, KEEP, [SECOND])
    assert workers(provider) == []
    provider.create_node({}, dict(TAGS), 1)  # nothing yet
    change(state, ADD, [SECOND])
    provider.create_node({}, dict(TAGS), 1)
    assert workers(provider) == [SECOND]
    assert provider.node_tags(HEAD)["ray-node-type"] == "head"


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
def test_a_host_whose_start_has_failed_is_started_again(provider: Any, state: Path) -> None:
    """Under a name that the autoscaler has not seen: it starts each name once."""
    change(state, ADD, [FIRST, SECOND, THIRD])
    provider.create_node({}, dict(TAGS), 2)
    provider.set_node_tags(THIRD, {"ray-node-status": "setting-up"})
    seen = {FIRST, SECOND, THIRD}
    for _ in range(3):
        assert change(state, KEEP, [FIRST, SECOND, THIRD]) == {"failed": [SECOND]}
        change(state, AGAIN, [SECOND])
        provider.create_node({}, dict(TAGS), 1)
        change(state, ADD, [FIRST, SECOND, THIRD])
        (again,) = set(workers(provider)) - seen
        assert (provider.internal_ip(again), len(workers(provider))) == (SECOND, 3)
        seen.add(again)
    provider.set_node_tags(again, {"ray-node-status": "up-to-date"})
    change(state, AGAIN, [SECOND])  # it was started in the meantime
    assert again in workers(provider)


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
def test_an_autoscaler_that_blocks_itself_is_named(provider: Any, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler_hosts, "_LOCK_S", 0.2)
    with provider.state.file_lock, pytest.raises(TimeoutError, match="held the lock .*filelock<3.11"):
        change(state, ADD, [FIRST, SECOND])


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
def test_without_an_autoscaler_nothing_is_written(state: Path) -> None:
    assert change(state, ADD, [FIRST]) == {"failed": []}
    assert not state.parent.exists()


@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves files to the garbage collector
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_the_folder_of_another_user_is_not_used(provider: Any, state: Path) -> None:
    os.chown(str(state.parent), 7, -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        change(state, ADD, [FIRST])


SLOW_AGENT = (
    "[2026-11-25 03:22:23,322 I 11 15] (raylet) agent_manager.cc:81: Monitor agent process with name dashboard_agent\n"
    "[2026-11-25 03:22:39,547 C 11 11] (raylet) node_manager.cc:3588:  An unexpected system state has occurred. You "
    "have likely discovered a bug in Ray. Please report this issue at https://github.com/ray-project/ray/issues and "
    "we'll work with you to fix it. Check failed: statussetor3588.has_value() Timed out waiting for file "
    "/tmp/ray-root/ray/session_1/dashboard_agent_listen_port_e124\n"
    "*** StackTrace Information ***\n"
)
STOPPED = (
    "[2026-11-25 03:21:38,114 E 932 960] (raylet) agent_manager.cc:87: The raylet exited immediately because one Ray "
    "agent failed, agent_name = runtime_env_agent.\n"
    "[2026-11-25 03:21:38,336 I 932 958] (raylet) main.cc:477: Raylet shutdown already triggered\n"
)
RUNNING = (
    "[2026-11-25 03:22:23,322 I 11 15] (raylet) agent_manager.cc:81: Monitor agent process with name dashboard_agent\n"
    "[2026-11-25 03:19:21,897 E 585 585] (raylet) main.cc:1108: Failed to connect to the metrics agent\n"
)


def test_the_error_line_is_the_output_of_the_failed_command() -> None:
    log = (
        "2026-11-21 15:59:28,010\tINFO updater.py:509 -- [7/7] Starting the Ray runtime\n"
        "bash: ray: command not found\n"
        "\x1b[0mShared connection to 10.77.0.11 closed.\n"
        "2026-11-21 15:59:28,068\tERR updater.py:177 -- New status: update-failed\n"
        "click.exceptions.ClickException: SSH command failed.\n"
        "Error: Failed to setup head node.\n"
    )
    assert started.launcher_error(log) == "bash: ray: command not found"
    log = (
        "[2026-11-27 17:43:49,397 C 9 9] (gcs_server) grpc_server.cc:134:  An unexpected system state has occurred. "
        "Check failed: server_ Failed to start the grpc server. The specified port is 6379.\n\n"
        ".Please check /tmp/ray-a/ray/session_1/logs/gcs_server.out for details.\n"
        "\x1b[0mConnection to 10.77.0.11 closed.\n"
        "2026-11-21 15:59:28,068\tERR updater.py:177 -- New status: update-failed\n"
    )
    assert started.launcher_error(log) == "Failed to start the grpc server. The specified port is 6379."
    without_abort = "\n".join(line for line in log.splitlines() if "Check failed" not in line)
    assert started.launcher_error(without_abort).startswith(".Please check /tmp/ray-a/ray/session_1/logs")
    assert started.launcher_error("FileNotFoundError: no 'key'\nbye\n") == "FileNotFoundError: no 'key'"
    assert started.launcher_error("") == "no output"


def printed(number: int, log: str) -> str:
    return f"==> /tmp/ray-root/ray/session_latest/logs/raylet.{number}.out <==\n{log}"


def test_the_error_of_a_raylet_that_has_ended_is_the_newest_and_names_its_log() -> None:
    slow = (
        "raylet ended there: its agents did not start within Ray's limit of 15 s: is the host overloaded? "
        "(log: /tmp/ray-root/ray/session_latest/logs/raylet.2.out)"
    )
    assert started.raylet_error(printed(1, STOPPED) + printed(2, SLOW_AGENT)) == slow
    assert started.raylet_error(printed(2, SLOW_AGENT) + printed(3, RUNNING)) == slow  # it was started again
    checked = SLOW_AGENT.replace("Timed out waiting for file", "the disk is full:")
    assert "ended there: the disk is full: /tmp" in str(started.raylet_error(printed(1, checked)))
    for log in ("", printed(1, STOPPED), printed(1, RUNNING)):
        assert started.raylet_error(log) is None


def log_time(age_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S,123", time.localtime(time.time() - age_s))


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Ray's logs on this host; it does not exist."""
    monkeypatch.setattr(started, "_FOLDERS", f"{tmp_path}/none/ray {tmp_path}/ray")
    return tmp_path / "ray" / "session_latest" / "logs"


def output_of(script: str) -> str:
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout


def test_only_what_raylets_have_logged_since_the_command_is_printed(processes: None, logs: Path) -> None:
    assert output_of(started.raylet_logs_script(150)) == ""
    logs.mkdir(parents=True)
    old, new = f"[{log_time(300)} C 1 1] (raylet) a.cc:1: old\nof it\n", f"[{log_time(9)} C 1 1] (raylet) a.cc:1: new\n"
    for name, age_s, log in (("raylet.out", 1, old + new), ("raylet.1.out", 60, old), ("raylet.2.out", 200, new)):
        (logs / name).write_text(log)
        changed_s = time.time() - age_s
        os.utime(str(logs / name), (changed_s, changed_s))
    script = started.raylet_logs_script(150)
    assert output_of(script) == f"==> {logs}/raylet.1.out <==\n==> {logs}/raylet.out <==\n{new}"
    if os.getuid() == 0:
        os.chown(str(logs.parents[1]), 7, -1)  # another user's
        assert output_of(script) == ""


def test_the_cause_in_the_log_of_the_autoscaler_is_newer_than_the_command(processes: None, logs: Path) -> None:
    logs.mkdir(parents=True)
    nothing = "the autoscaler on the head has logged nothing about it since this command began (RAY_TMPDIR/ray/session_"
    log = f"{log_time(300)}\tERR updater.py:1 -- NodeUpdater: 10.0.0.13: Error\nError: old\n"
    log += f"\x1b[0m{log_time(20)}\tINFO updater.py:210 -- New status: up-to-date\n"
    for more, cause in (
        ("", nothing),
        (f"{log_time(9)}\tINFO log_timer.py:25 -- NodeUpdater: 10.0.0.12: Ray start commands succeeded\n", nothing),
        (
            f"{log_time(9)}\tINFO log_timer.py:25 -- NodeUpdater: 10.0.0.13: Got IP\nmkdir: no space\n"
            f"{log_time(8)}\tERR updater.py:177 -- New status: update-failed\n",
            "the end of RAY_TMPDIR/ray/session_latest/logs/monitor.out on the head: mkdir: no space",
        ),
    ):
        log += more
        (logs / "monitor.out").write_text(log)
        assert started.autoscaler_error(output_of(started.monitor_log_script(150)), "10.0.0.13").startswith(cause)
