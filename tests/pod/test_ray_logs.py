"""Causes of failed starts, in lines that Ray 2.60 wrote."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from raypod.pod import ray_logs

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
    assert ray_logs.launcher_error(log) == "bash: ray: command not found"
    assert ray_logs.launcher_error("FileNotFoundError: no 'key'\nbye\n") == "FileNotFoundError: no 'key'"
    assert ray_logs.launcher_error("") == "no output"


def printed(number: int, log: str) -> str:
    return f"==> /tmp/ray-root/ray/session_latest/logs/raylet.{number}.out <==\n{log}"


def test_the_error_of_a_raylet_is_the_newest_and_names_its_log() -> None:
    slow = (
        "raylet ended there: its agents did not start within Ray's limit of 15 s: is the host overloaded? "
        "(log: /tmp/ray-root/ray/session_latest/logs/raylet.2.out)"
    )
    assert ray_logs.raylet_error(printed(1, STOPPED) + printed(2, SLOW_AGENT)) == slow
    assert ray_logs.raylet_error(printed(2, SLOW_AGENT) + printed(3, RUNNING)) == slow  # it was started again
    checked = SLOW_AGENT.replace("Timed out waiting for file", "the disk is full:")
    assert "ended there: the disk is full: /tmp" in str(ray_logs.raylet_error(printed(1, checked)))


def test_a_raylet_that_has_not_ended_or_was_stopped_is_no_cause() -> None:
    for log in ("", printed(1, STOPPED), printed(1, RUNNING)):
        assert ray_logs.raylet_error(log) is None


def test_the_logs_of_a_raylet_are_printed_the_newest_last(processes: None, tmp_path: Path) -> None:
    logs = tmp_path / "session_latest" / "logs"
    script = ray_logs.raylet_logs_script(150).replace(ray_logs._FOLDERS, f"{tmp_path}/none {tmp_path}")
    command = ["bash", "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == ""
    logs.mkdir(parents=True)
    for name, age_s in (("raylet.out", 1), ("raylet.1.out", 60), ("raylet.2.out", 200)):  # the last: an earlier start
        (logs / name).write_text(f"of {name}\n")
        changed_s = time.time() - age_s
        os.utime(str(logs / name), (changed_s, changed_s))
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"==> {logs}/raylet.1.out <==\nof raylet.1.out\n==> {logs}/raylet.out <==\nof raylet.out\n"
    if os.getuid() == 0:
        os.chown(str(tmp_path), 7, -1)  # another user's
        assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == ""
