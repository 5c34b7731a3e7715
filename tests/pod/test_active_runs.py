"""What uses a Ray cluster before a restart, what `raypod down` ends, and heads that are joined while they run."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Tuple

import pytest
import yaml

from raypod.errors import ClusterError
from raypod.observe.status import endpoint
from raypod.plan import cluster_file
from raypod.plan.cluster import Host, Ssh, cluster_from
from raypod.pod import active_runs, stop_cluster, stop_runs, up
from raypod.runtime import ssh
from raypod.system.process import process_start_ticks
from tests.support import ROOT
from tests.support.bounded import wait_until

FILE = cluster_file.parse((ROOT / "cluster" / "pod64.yaml").read_text())
CLUSTER = cluster_from(FILE, "pod64")
TRAINING = {"address": "10.0.0.11", "pid": 5, "entrypoint": "python -m raypod.train", "namespace": "raypod"}
OTHER = {"address": "10.0.0.99", "pid": 6, "entrypoint": "python mine.py -x TOKEN=secret -x A", "namespace": "x"}


@pytest.mark.usefixtures("processes")
def test_the_start_command_refuses_while_programs_use_the_cluster(
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
def test_trainings_get_the_signal_of_raypod_stop_and_others_sigterm(monkeypatch: Any, tmp_path: Path) -> None:
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
    first, second = "/runs/a (pid 5: python -m raypod.train)", "(pid 6: python mine.py -x TOKEN=*** -x A)"
    names = [f"10.0.0.11: {first}", f"10.0.0.99: {second}"]
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


def test_only_marked_processes_of_this_user_and_their_children_are_ended(processes: None) -> None:
    def start(mark: str) -> Tuple[subprocess.Popen[bytes], int]:
        """Start a process with a mark, and a child of it without one."""
        program = "env -i sleep 60 & echo $!; wait; exec sleep 60"  # so that the parent does not end with its child
        process = subprocess.Popen(["sh", "-c", program], env={**os.environ, stop_cluster.MARK: mark}, stdout=-1)
        return process, int(process.stdout.readline())

    (ours, child), (other, other_child) = start("pod-a"), start("pod-ab")
    try:
        assert stop_cluster.members("pod-a") == {ours.pid, child}
        assert stop_cluster.stop("pod-a") == {"found": 2, "left": 0, "others": stop_cluster.stop("none")["others"]}
        assert ours.wait(10) != 0
        assert stop_cluster.members("pod-ab") == {other.pid, other_child}
        with pytest.MonkeyPatch.context() as another:
            another.setattr(stop_cluster.os, "getuid", lambda: os.geteuid() + 1)  # root reads every environment
            assert stop_cluster.members("pod-ab") == set()
    finally:
        stop_cluster.stop("pod-ab")
        for process in (ours, other):
            process.wait(10)
            process.stdout.close()
    assert wait_until(lambda: not stop_cluster.members("pod-ab"))


def test_agents_of_a_dead_raylet_are_ended(processes: None) -> None:
    """They have lost the mark and the marked parent, but are in the session of a marked process, like log_monitor."""
    agent = "(env -i bash -c 'exec -a ray::Agent sleep 60' & echo $!)"
    program, environment = f"{agent}; exec sleep 60", {**os.environ, stop_cluster.MARK: "pod-orphan"}
    ours = subprocess.Popen(["sh", "-c", program], env=environment, stdout=-1, start_new_session=True)
    other = subprocess.Popen(["sh", "-c", f"{agent}; exec sleep 60"], stdout=-1, start_new_session=True)
    try:
        orphan, not_ours = int(ours.stdout.readline()), int(other.stdout.readline())
        assert wait_until(lambda: Path(f"/proc/{not_ours}/cmdline").read_bytes().startswith(b"ray::"))
        assert wait_until(lambda: stop_cluster.members("pod-orphan") == {ours.pid, orphan})
        assert stop_cluster.stop("pod-orphan")["left"] == 0
        assert not stop_cluster.members("pod-orphan")
        assert Path(f"/proc/{not_ours}").exists()
    finally:
        stop_cluster.stop("pod-orphan")
        os.kill(not_ours, signal.SIGKILL)
        other.kill()
        for process in (ours, other):
            process.wait(10)
            process.stdout.close()  # type: ignore[union-attr]


def test_workers_that_a_template_of_another_cluster_has_forked_are_not_ended(processes: None, tmp_path: Path) -> None:
    """They have no raylet above them, and can be in the session of a marked process, as from one terminal."""
    (tmp_path / "worker_template.py").write_text("bash -c 'exec -a ray::Worker sleep 60' & echo $!; wait")
    program = f"(env -i PATH=$PATH bash {tmp_path}/worker_template.py &); exec sleep 60"
    environment = {**os.environ, stop_cluster.MARK: "pod-first"}
    ours = subprocess.Popen(["sh", "-c", program], env=environment, stdout=-1, start_new_session=True)
    worker = int(ours.stdout.readline())
    try:
        assert wait_until(lambda: Path(f"/proc/{worker}/cmdline").read_bytes().startswith(b"ray::"))
        assert stop_cluster.members("pod-first") == {ours.pid}
    finally:
        stop_cluster.stop("pod-first")
        os.kill(worker, signal.SIGKILL)  # its template ends with it
        ours.wait(10)
        ours.stdout.close()


SHIPPED = ROOT / "cluster" / "emulated-pod.yaml"
HEAD = "10.0.0.11"


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file of a cluster with an ssh key, parsed, its cluster and its path; the home folder is temporary."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    path, key = tmp_path / "pod.yaml", tmp_path / "key"
    key.write_text("a key")
    path.write_text(SHIPPED.read_text().replace("~/.ssh/id_ed25519", str(key)))
    file = cluster_file.parse(path.read_text())
    return SimpleNamespace(file=file, cluster=cluster_from(file, str(path)), path=str(path))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of Ray
@pytest.mark.parametrize("is_noted", [True, False])
@pytest.mark.parametrize("before", [None, "{", '{"10.0.0.11": {"tags": {"ray-node-type": "head"}, "state": "gone"}}'])
def test_rays_launcher_starts_a_running_head_not_again(
    processes: None, pod: Any, is_noted: bool, before: Optional[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which the next line sets
    from ray.autoscaler._private import commands, providers
    from ray.autoscaler._private.local.node_provider import LocalNodeProvider

    started: List[List[str]] = []

    class Updater:
        exitcode = 0

        def __init__(self, ray_start_commands: List[str], **_: Any) -> None:
            started.append(ray_start_commands)

        def start(self) -> None: ...
        def join(self) -> None: ...

    def create_node(provider: Any, *arguments: Any) -> None:
        created.append(arguments)
        create(provider, *arguments)

    create, created = LocalNodeProvider.create_node, []  # type: Any, List[Any]
    monkeypatch.setattr(LocalNodeProvider, "create_node", create_node)
    monkeypatch.setattr(commands, "NodeUpdaterThread", Updater)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_UP_enable_autoscaler_v2", "0")
    (tmp_path / "ray").mkdir()
    if before is not None and (is_noted or before != "{"):
        (tmp_path / "ray" / "cluster-emulated-pod.state").write_text(before)
    if is_noted:
        up.note_running_head(pod.cluster, pod.path, tmp_path / "ray")
    providers._clear_provider_cache()
    given = {**yaml.safe_load(Path(pod.path).read_text()), "file_mounts": {}}
    config = commands._bootstrap_config(given, no_config_cache=True)
    commands.get_or_create_head_node(config, pod.path, True, False, True, None, no_monitor_on_head=True)
    assert not is_noted or started == [[]]
    assert (created == []) is is_noted


@pytest.mark.parametrize(
    ("own", "of_head", "expected", "error"),
    [
        (None, "secret\n", "secret\n", ""),
        ("secret", "secret\n", "secret", ""),
        (
            "other",
            "secret",
            "other",
            f"is not the token with which emulated-pod runs.*copy {HEAD}:~/.ray/auth_token to",
        ),
        (None, None, None, ""),
    ],
)
def test_the_token_of_the_head_is_not_replaced(
    pod: Any,
    own: Optional[str],
    of_head: Optional[str],
    expected: Optional[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, said = tmp_path / ".ray" / "auth_token", []  # type: Path, List[str]
    if own is not None:
        path.parent.mkdir()
        path.write_text(own)
    answer = ssh.Result(0, "Welcome\n" + json.dumps({"token": of_head}), "")
    monkeypatch.setattr(ssh, "run_on", lambda *_: answer)
    if error:
        with pytest.raises(ClusterError, match=error):
            up.take_token(pod.cluster, pod.file, said.append)
    else:
        up.take_token(pod.cluster, pod.file, said.append)
    assert (path.read_text() if path.exists() else None) == expected
    if said:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert bool(said) == (own is None and of_head is not None)


@pytest.mark.parametrize("runs", [False, True, None])
def test_a_head_without_an_answer_counts_as_running(pod: Any, runs: Optional[bool], monkeypatch: Any) -> None:
    answer = {} if runs is None else {"drivers": [], "error": "", "runs": runs}

    def run_on(host: Host, _: Ssh, words: List[str], *__: Any) -> ssh.Result:
        return ssh.Result(0 if answer else 255, json.dumps(answer), "no answer")

    monkeypatch.setattr(ssh, "run_on", run_on)
    assert stop_runs.is_running(pod.cluster, pod.file) is (runs is not False)
