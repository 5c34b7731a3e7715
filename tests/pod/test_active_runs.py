"""What uses a Ray cluster is named before a restart, and stopped only on request: on the hosts, and by `raypod up`."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from raypod.errors import ClusterError
from raypod.observe.status import endpoint
from raypod.plan import cluster_file
from raypod.plan.cluster import Host, Ssh, cluster_from
from raypod.pod import active_runs, stop_runs, up
from raypod.runtime import ssh
from raypod.system.process import process_start_ticks
from tests.support import ROOT
from tests.support.bounded import wait_until

FILE = cluster_file.parse((ROOT / "cluster" / "pod64.yaml").read_text())
CLUSTER = cluster_from(FILE, "pod64")
TRAINING = {"address": "10.0.0.11", "pid": 5, "entrypoint": "python -m raypod.train", "namespace": "raypod"}
OTHER = {"address": "10.0.0.99", "pid": 6, "entrypoint": "python mine.py -x TOKEN=secret -x A", "namespace": "x"}


@pytest.mark.usefixtures("processes")
def test_the_start_command_of_the_head_refuses_while_programs_use_the_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = tmp_path / "gcs.py"
    monkeypatch.setattr(active_runs, "_GCS_CLIENT", str(client))
    words = ["/a/gcs_server", "-c", "input()", "--gcs_server_port=77", "--node-ip-address=10.0.0.1"]
    marked = {**os.environ, "RAYPOD_CLUSTER": "pod-active", "MINE": "1"}
    assert active_runs.main(["pod-active"]) == 0  # Ray does not run
    with subprocess.Popen(words, executable=sys.executable, stdin=subprocess.PIPE, env=marked) as server:
        assert wait_until(lambda: active_runs._gcs_server("pod-active") is not None)
        assert active_runs.main(["pod"]) == 0
        with monkeypatch.context() as another:
            another.setattr(active_runs.os, "getuid", lambda: os.geteuid() + 1)
            assert active_runs._gcs_server("pod-active") is None, "that of another user"
        for answer, code, text in (
            ({"drivers": [], "error": ""}, 0, ""),
            (
                {"drivers": [], "error": "no answer"},
                1,
                "raypod: whether programs use pod-active is unknown: no answer; `raypod up --stop-runs` restarts Ray "
                "all the same\n",
            ),
            (
                {"drivers": [{**TRAINING, "pid": 1 << 30}], "error": ""},
                1,
                "raypod: a restart of Ray would end active programs; `raypod up --stop-runs` stops them first: "
                f"python -m raypod.train (pid {1 << 30} on 10.0.0.11)\n",
            ),
        ):
            assertion = 'import os, sys; assert sys.argv[1:] == ["--drivers", "10.0.0.1:77"] and os.environ["MINE"]'
            client.write_text(f"{assertion}; print({json.dumps(answer)!r})")
            assert active_runs.main(["pod-active"]) == code
            assert capsys.readouterr().err == text
        server.communicate(b"\n")


def test_the_run_folder_of_a_driver_is_known_from_its_entry_for_the_monitor(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.delenv(endpoint.VARIABLE, raising=False)
    monkeypatch.setattr(endpoint, "_PARENT", tmp_path)
    monkeypatch.setattr(active_runs, "_ENTRIES", tmp_path)
    own: Dict[str, Any] = {**TRAINING, "pid": os.getpid()}
    with endpoint.registered(Path("/runs/a"), 7, "token"):
        assert active_runs.run_folders([own, {**own, "pid": os.getppid()}]) == {str(os.getpid()): "/runs/a"}
        (tmp_path / f"raypod-{os.getuid()}").chmod(0o755)
        assert active_runs.run_folders([own]) == {}


@pytest.mark.usefixtures("processes")
def test_trainings_get_the_signal_of_raypod_stop_and_other_programs_sigterm(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(active_runs, "_EXIT_S", 0)
    program = "trap '{}' {}; echo; while :; do sleep 0.05; done"
    started: Dict[str, Any] = {}
    lease = tmp_path / "lease-2.json"
    for name, *trap in (
        *(("training", "exit 3", "INT"), ("other", "exit 3", "TERM"), ("stuck", "", "TERM")),
        ("notebook", f"rm {lease}", "INT"),  # it goes on after its run
    ):
        words = ["bash", "-c", program.format(*trap)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # its handler is installed
        driver = {"pid": process.pid, "entrypoint": subprocess.list2cmdline(words)}
        started[name] = (process, {**driver, "namespace": "raypod" if name == "training" else "x"})
    stuck, notebook = started["stuck"][1], started["notebook"][1]
    holder = {"pid": notebook["pid"], "started_ticks": process_start_ticks(notebook["pid"])}
    lease.write_text(json.dumps(holder))
    monkeypatch.setattr(active_runs, "run_folders", lambda drivers: {str(notebook["pid"]): str(tmp_path)})
    try:
        left = active_runs.stop([{**stuck, "entrypoint": "python another.py"}])
        assert left == {str(stuck["pid"]): "its process is not visible on this host"}
        assert active_runs.stop([started["training"][1], started["other"][1]]) == {}
        assert [started[name][0].wait(10) for name in ("training", "other")] == [3, 3]
        reason = "it has not ended within 0 s: it has no active run"
        assert active_runs.stop([stuck], end_s=0) == {str(stuck["pid"]): reason}
        assert active_runs.stop([notebook]) == {str(notebook["pid"]): "its run has ended, but the program goes on"}
        started["stuck"][0].send_signal(signal.SIGSTOP)
        (reason,) = active_runs.stop([stuck]).values()
        assert reason.startswith("it is stopped (SIGSTOP); ")
    finally:
        for process, _ in started.values():
            process.kill()
            process.communicate()


def answer_of_hosts(monkeypatch: pytest.MonkeyPatch, drivers: List[Dict[str, Any]], error: str, left: Any) -> List[str]:
    """Answer for the head and the hosts of drivers; return the list of requests."""
    asked = []

    def run_on(host: Host, _: Ssh, words: List[str], program: str, *__: Any) -> ssh.Result:
        if "--drivers" in words:
            report = {"drivers": drivers, "error": error, "foreign": error.startswith("foreign")}
            return ssh.Result(0, json.dumps(report), "")
        pids = [each["pid"] for each in json.loads(ast.literal_eval(program[program.index("(") : program.index("\n")]))]
        asked.append(f"{words[2]} {host.address} {pids}")
        folders = {"5": "/runs/a"} if host.address == "10.0.0.11" else {}
        of_host = {pid: reason for pid, reason in left.items() if int(pid) in pids}
        return ssh.Result(0, json.dumps({"folders": folders} if words[2] == "folders" else {"stop": of_host}), "")

    monkeypatch.setattr(ssh, "run_on", run_on)
    return asked


def test_up_names_what_is_active_and_stops_it_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    said: List[str] = []
    asked = answer_of_hosts(monkeypatch, [TRAINING, OTHER], "", {})
    names = [
        "10.0.0.11: /runs/a (pid 5: python -m raypod.train)",
        "10.0.0.99: (pid 6: python mine.py -x TOKEN=*** -x A)",
    ]
    words = "pod64: a restart of Ray would end 2 active programs; --stop-runs stops them first, .*\n  "
    with pytest.raises(ClusterError, match=words + re.escape("\n  ".join(names))):
        stop_runs.make_way(CLUSTER, FILE, False, said.append)
    assert (sorted(asked), said) == (["folders 10.0.0.11 [5]", "folders 10.0.0.99 [6]"], [])
    stop_runs.make_way(CLUSTER, FILE, True, said.append)
    assert sorted(asked)[-2:] == ["stop 10.0.0.11 [5]", "stop 10.0.0.99 [6]"]
    assert said[:2] == [f"stopping {names[0]} (within 900 s)", f"stopping {names[1]} (within 30 s: no active run)"]
    answer_of_hosts(monkeypatch, [TRAINING, OTHER], "", {"6": "Operation not permitted"})
    stop_runs.make_way(CLUSTER, FILE, True, said.append)
    assert said[-1] == "warning: 10.0.0.99: pid 6: Operation not permitted; the restart of Ray takes its cluster away"


def test_up_starts_ray_at_once_only_if_nothing_can_be_active(monkeypatch: pytest.MonkeyPatch) -> None:
    said: List[str] = []
    answer_of_hosts(monkeypatch, [], "", {})
    stop_runs.make_way(CLUSTER, FILE, False, said.append)
    answer_of_hosts(monkeypatch, [], "no answer within 10 s", {})
    with pytest.raises(ClusterError, match="whether runs are active is unknown: no answer within 10 s; --stop-runs"):
        stop_runs.make_way(CLUSTER, FILE, False, said.append)
    assert said == []
    stop_runs.make_way(CLUSTER, FILE, True, said.append)
    assert said == ["warning: whether runs are active is unknown: no answer within 10 s; the restart of Ray ends them"]
    answer_of_hosts(monkeypatch, [], "foreign", {})
    with pytest.raises(ClusterError, match="pod64: foreign; two clusters need different ports in the start commands"):
        stop_runs.make_way(CLUSTER, FILE, True, said.append)


@pytest.mark.usefixtures("processes")
def test_a_second_up_says_which_one_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ssh, "is_local", lambda host: True)
    said: List[str] = []
    for _ in range(2):  # the lock ends with its context
        with up.cluster_lock(CLUSTER, said.append):
            words = rf"another `raypod up` runs: pid {os.getpid()} of .*; if it has ended, `kill \d+` on the head; "
            with pytest.raises(ClusterError, match=words), up.cluster_lock(CLUSTER, said.append):
                pytest.fail("both hold the lock")
    (tmp_path / ".raypod").rename(tmp_path / "before")
    (tmp_path / ".raypod").touch()
    with up.cluster_lock(CLUSTER, said.append):
        assert said == ["warning: 10.0.0.11: cannot lock pod64; no other `raypod up` may run for it now"]
