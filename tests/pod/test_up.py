"""pod/up, pod/file_checks and pod/ssh, without hosts or with a fake `ssh` that prints other text, too."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Optional

import pytest
import yaml

from raypod.__main__ import main
from raypod.errors import ClusterError, RunError
from raypod.plan import cluster_file
from raypod.plan.cluster import Cluster, Host, Ssh, cluster_from
from raypod.pod import file_checks, started, up, with_template
from raypod.pod.file_checks import is_marked, key_warnings, name_errors, python_setting, ray_folder, tls_variables
from raypod.pod.file_checks import launch_errors as errors
from raypod.pod.file_checks import launch_warnings as warnings
from raypod.runtime import ssh
from raypod.runtime.workers import ray_admission
from raypod.system.command_line import say
from raypod.system.private import make_private
from tests.support import ROOT
from tests.support.refused import refused

SHIPPED = ROOT / "cluster" / "pod64.yaml"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of an operator with a key, in a checkout."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").touch()
    return tmp_path


def problems(text: str, check: Any) -> List[str]:
    return [str(each) for each in check(cluster_file.parse(text))]


def test_the_shipped_file_has_no_errors_and_no_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert problems(SHIPPED.read_text(), errors) == []
    assert problems(SHIPPED.read_text(), warnings) == []
    assert is_marked(cluster_file.parse(SHIPPED.read_text()))


@pytest.mark.parametrize(
    ("check", "old", "new", "line"),
    [
        (errors, "cluster_name: pod64", "", "cluster_name is missing"),
        (errors, "  ssh_user: ubuntu", "", "auth.ssh_user is missing"),
        (errors, '"raypod"', '"rayopd"', "file_mounts: rayopd (for ~/raypod/source/raypod) does not exist"),
        (errors, "--autoscaling-config", "--a", "--autoscaling-config=~/ray_bootstrap_config.yaml is missing"),
        (errors, "RAY_AUTH_MODE=token ", "", "worker_start_ray_commands: RAY_AUTH_MODE=token is missing"),
        (errors, "s=10.0.0.11", "s=10.0.0.1", "-address=10.0.0.1 differs from provider.head_ip 10.0.0.11"),
        (errors, "per_host: 16", "per_host: 8", "16 IPUs in --resources, but metadata.raypod.ipus_per_host is 8"),
        (errors, " --resources='{\"IPU\":16}'", "", "no IPUs in --resources, but metadata.raypod.ipus_per_host"),
        (errors, "/private_ssh:", "/other:", "head_start_ray_commands: PATH=$HOME/raypod/source/raypod/pod/priv"),
        (warnings, "/system/private.py $RAY_TMPDIR", "/x", "RAY_TMPDIR can be a folder of another user"),
        (warnings, "RAY_TMPDIR=/tmp/", "", "worker_start_ray_commands: all users can write to /tmp/ray"),
        (warnings, "unset OMP_NUM_THREADS;", "", "sets OMP_NUM_THREADS=1"),
        (warnings, "RAY_enable_autoscaler_v2=0", "", "autoscaler v2 starts one worker too few"),
        (warnings, "host=127.0.0.1", "host=0.0.0.0", "the dashboard is open to the network"),
        (warnings, "AUTH_MODE=token", "AUTH_MODE=disabled", "anyone with access to a port can run commands"),
        (warnings, "python3 ~/raypod/source/raypod/pod/stop_cluster.py", "ray stop", "stops other Ray clusters"),
        (warnings, "/pod/active_runs.py", "/x", "plain `ray up` ends active runs; begin with python3"),
        (warnings, "RAYPOD_CLUSTER=pod64 ", "", "export RAYPOD_CLUSTER=<cluster_name>"),
    ],
)
def test_errors_and_warnings(check: Any, old: str, new: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert any(line in each for each in problems(SHIPPED.read_text().replace(old, new), check))


@pytest.mark.parametrize("path", sorted(SHIPPED.parent.glob("*pod*.yaml")), ids=lambda path: path.stem)
def test_a_renamed_cluster_is_an_error_in_both_start_commands(path: Path) -> None:
    assert problems(path.read_text(), name_errors) == []
    renamed = path.read_text().replace(f"cluster_name: {path.stem}", "cluster_name: my pod")
    assert problems(renamed, name_errors) == [
        f"line {renamed.splitlines().index(f'{kind}_start_ray_commands:') + 1}: {kind}_start_ray_commands: "
        f"RAYPOD_CLUSTER={path.stem}, stop_cluster.py {path.stem}{rest} differ from cluster_name 'my pod': use one name"
        for kind, rest in (("head", f", active_runs.py {path.stem}, cluster-{path.stem}.state"), ("worker", ""))
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("export RAYPOD_CLUSTER=pod2;", "RAYPOD_CLUSTER=pod2 differs from cluster_name 'pod': use one name"),
        ("python3 stop_cluster.py 'a pod'", "stop_cluster.py a pod differs from cluster_name 'pod'"),
        ('export RAYPOD_CLUSTER="pod"; ray start', ""),
        ("RAYPOD_CLUSTER=$NAME ray start", ""),
        ("python3 stop_cluster.py $(cat name)", ""),
        ("python3 stop_cluster.py pod-$NAME", ""),
        ("rm $RAY_TMPDIR/ray/cluster-pod2.state; ray start", "cluster-pod2.state differs from cluster_name 'pod'"),
        ("rm $RAY_TMPDIR/ray/cluster-pod.state", ""),
        ("rm -f $RAY_TMPDIR/ray/cluster-*.state", ""),
        ("test -f stop_cluster.py ] && python3 stop_cluster.py pod>/dev/null 2>&1", ""),
        ("python3 stop_cluster.py\n- export A=1; ray start", ""),
        ("python3 stop_cluster.py pod2; python3 stop_cluster.py pod", ""),
        ("python3 stop_cluster.py pod2>/dev/null", "stop_cluster.py pod2 differs from cluster_name 'pod'"),
        ("ray start", ""),
    ],
)
def test_only_a_literal_other_name_is_an_error(command: str, words: str) -> None:
    text = f"cluster_name: pod\nprovider: {{type: local, head_ip: a}}\nhead_start_ray_commands:\n- {command}\n"
    found = problems(text, name_errors)
    assert len(found) == bool(words)
    assert not words or words in found[0]


def test_missing_relative_sources_are_one_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = [each for each in problems(SHIPPED.read_text(), errors) if "file_mounts" in each]
    assert len(found) == 1
    assert "raypod (for ~/raypod/source/raypod), cluster (for ~/raypod/source/cluster), " in found[0]
    assert "run this command in the folder to which these paths are relative" in found[0]


@pytest.mark.parametrize(
    ("path", "before", "file"),
    [
        ("cluster/mine.yaml", "in ~/raypod/source: ", "cluster/mine.yaml"),
        (str(ROOT / "cluster/mine.yaml"), "in ~/raypod/source: ", "cluster/mine.yaml"),
        ("mine.yaml", "after copying mine.yaml there: ", "mine.yaml"),
        ("/tmp/mine.yaml", "after copying /tmp/mine.yaml there: ", "mine.yaml"),
    ],
)
def test_the_hint_names_the_cluster_file_on_the_head(path: str, before: str, file: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    shipped = cluster_file.parse(SHIPPED.read_text())
    words = f"{before}~/raypod/venv/bin/python -m raypod.train --cluster {file}"
    assert words in up._train_hint(cluster_from(shipped, "pod64"), shipped, Path(path))


def test_the_token_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "ray" / "token"
    assert "created the cluster's token" in str(ray_admission.ensure_token(path))
    assert path.stat().st_mode & 0o777 == 0o600
    token = path.read_text()
    assert len(token) == 64
    assert ray_admission.ensure_token(path) is None
    path.chmod(0o644)
    assert "was readable by other users (mode 0644)" in str(ray_admission.ensure_token(path))
    assert (path.read_text(), path.stat().st_mode & 0o777) == (token, 0o600)


def test_a_missing_key_a_lost_head_and_another_name_end_up(home: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(ssh, "run_on", lambda *_, **__: ssh.Result(255, "", "No route to host"))
    monkeypatch.setattr(up, "_run_ray", lambda *_: pytest.fail("ray up was called"))
    (home / ".ssh" / "id_ed25519").rename(home / "key")
    assert main(["up", str(SHIPPED)]) == 2
    assert "line 25: auth.ssh_private_key: ~/.ssh/id_ed25519 does not exist" in capsys.readouterr().err
    (home / "key").rename(home / ".ssh" / "id_ed25519")
    assert main(["up", str(SHIPPED)]) == 2
    assert "the head 10.0.0.11 is unreachable: No route to host" in capsys.readouterr().err
    assert len((home / ".ray" / "auth_token").read_text()) == 64
    monkeypatch.setattr(ssh, "run_on", lambda *_, **__: pytest.fail("a host was contacted"))
    (home / "mine.yaml").write_text(SHIPPED.read_text().replace("cluster_name: pod64", "cluster_name: mine"))
    assert main(["up", str(home / "mine.yaml")]) == 2
    assert "RAYPOD_CLUSTER=pod64, stop_cluster.py pod64, active_runs.py pod64, cluster-pod64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("export A=1 RAY_TMPDIR=/tmp/ray-$(id -un) B=2; ray start", "/tmp/ray-$(id -un)"),
        ('export RAY_TMPDIR="/tmp/my ray"; ray start', '"/tmp/my ray"'),
        ("RAY_TMPDIR=~/ray;ray start", "~/ray"),
        ("ray start", None),
    ],
)
def test_the_folder_of_ray_is_that_of_the_start_commands(command: str, folder: Optional[str]) -> None:
    file = cluster_file.parse(yaml.safe_dump({"worker_start_ray_commands": [command]}))
    assert ray_folder(file, "worker") == folder


def test_folders_that_other_users_can_use_are_found_on_the_hosts(processes: None, tmp_path: Path) -> None:
    """This machine is the head, whose folder is missing, and a worker, whose folder is a link."""
    head, worker = tmp_path / "head", tmp_path / "worker"
    worker.symlink_to("elsewhere")
    commands = {f"{each.name}_start_ray_commands": [f"export RAY_TMPDIR=$(echo {each})"] for each in (head, worker)}
    file = cluster_file.parse(yaml.safe_dump(commands))
    cluster = Cluster("pod", (Host("h", "127.0.0.1"), Host("w", "localhost")))
    for create in (False, True):
        (problem,) = file_checks.folder_problems(cluster, file, create).items()
        assert problem == ("w", f"{worker} is a symbolic link of uid {os.getuid()}, not a folder: remove it")
        assert head.is_dir() == create


def test_a_host_whose_folder_others_can_use_is_not_started(home: Path, monkeypatch: Any, capsys: Any) -> None:

    def run_on(host: Host, _: Ssh, words: List[str], *__: Any, **___: Any) -> ssh.Result:
        is_bad = host.address == "10.0.0.13" and "exec python3 - /tmp/ray-$(id -un)" in words
        return ssh.Result(1, "", "/tmp/ray-root belongs to uid 7") if is_bad else ssh.Result(0, "", "")

    monkeypatch.setattr(ssh, "run_on", run_on)
    monkeypatch.setattr(up, "cluster_lock", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(up, "_run_ray", lambda *_: pytest.fail("ray up was called"))
    assert main(["up", str(SHIPPED)]) == 2
    error = "pod64: RAY_TMPDIR of the start commands is not safe\n  10.0.0.13: /tmp/ray-root belongs to uid 7\n"
    assert capsys.readouterr().err.endswith(error)


def test_the_ssh_of_rays_launcher_shares_no_session(processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which the next line sets
    from ray.autoscaler._private.command_runner import SSHCommandRunner

    path = up._path_with_private_ssh()
    of_ray = SSHCommandRunner("", "node", None, {"ssh_user": "me"}, "pod", None, False).ssh_options
    for options, shares in ((of_ray.to_ssh_options_list(), False), (["-o", "ControlPath=/run/me/%C"], True)):
        words = ["ssh", "-F", "none", "-G", *options, "host"]
        done = subprocess.run(words, env={"PATH": path}, capture_output=True, text=True, timeout=60, check=True)
        assert ("\ncontrolpath " in done.stdout) == shares
        assert "\ncontrolmaster false\n" in done.stdout


def test_rays_launcher_has_folders_of_this_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For its state, and for the configuration that it would execute."""
    seen: List[Dict[str, str]] = []

    def run(command: List[str], env: Dict[str, str], **_: Any) -> Any:
        assert not make_private(env["TMPDIR"])
        seen.append(env)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(up, "subprocess", SimpleNamespace(run=run, DEVNULL=0, STDOUT=0, TimeoutExpired=TimeoutError))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    tmp_path.chmod(0o1777)
    (tmp_path / "ray").mkdir(0o700)
    up._run_ray("up", "pod.yaml", [], {}, 1.0)
    (tmp_path / "ray").chmod(0o777)
    up._run_ray("down", "pod.yaml", [], {}, 1.0)
    assert [env["RAY_TMPDIR"] for env in seen] == [str(tmp_path), str(tmp_path / f"raypod-{os.getuid()}")]
    assert not any(Path(env["TMPDIR"]).exists() for env in seen)
    assert all(env["PATH"].startswith(str(Path(up.__file__).with_name("private_ssh"))) for env in seen)


def test_ssh_never_prompts_and_adds_the_keys_of_new_hosts(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("")
    words = ssh.ssh_command(Host("h", "10.0.0.9"), Ssh("me", str(key), "nc %h %p"))
    assert (words[0], words[-1]) == ("ssh", "me@10.0.0.9")
    assert {"BatchMode=yes", "StrictHostKeyChecking=accept-new", "ProxyCommand=nc %h %p"} <= set(words)
    assert words[words.index("-i") + 1] == str(key)


def test_this_machine_is_reached_without_ssh(processes: None) -> None:
    done = ssh.run_on(Host("h", "127.0.0.1"), Ssh(), ["sh", "-c", "cat; echo no >&2; exit 3"], stdin="yes")
    assert (done.exit_code, done.output, done.error) == (3, "yes", "no")
    slow = ssh.run_on(Host("h", "127.0.0.1"), Ssh(), ["sleep", "9"], timeout_s=0.2)
    assert slow.error == "no answer within 0.2 s"


@pytest.mark.parametrize(
    ("code", "words"), [(255, "host h is unreachable over ssh"), (127, "host h has no ~/venv/bin/python")]
)
def test_a_remote_command_that_does_not_start(processes: None, monkeypatch: Any, code: int, words: str) -> None:
    monkeypatch.setattr(ssh, "ssh_command", lambda *_: ["sh", "-c", f"exit {code}"])
    with pytest.raises(ClusterError, match=words):
        ssh.pass_through(Host("h", "10.0.0.9"), Ssh(), ["~/venv/bin/python", "-V"])


def test_pass_through_keeps_output_and_exit_code(processes: None, monkeypatch: Any, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / ".bashrc").write_text("export NAME=out\n")
    (tmp_path / "tool").write_text('#!/bin/sh\necho "$NAME $1"; echo err >&2; exit 3\n')
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ssh, "ssh_command", lambda *_: ["sh", "-c"])
    assert ssh.pass_through(Host("h", "10.0.0.9"), Ssh(), ["~/tool", "a  b"]) == 3
    assert capfd.readouterr() == ("out a  b\n", "err\n")


def test_the_launcher_state_of_an_earlier_start_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    for name in ("pod", "pod-b"):
        (tmp_path / "ray" / f"cluster-{name}.state").touch()
    for _ in range(2):
        up._remove_launcher_state(Cluster("pod", (Host("h", "h"),)))
    assert [path.name for path in (tmp_path / "ray").iterdir()] == ["cluster-pod-b.state"]


def test_an_added_host_is_told_to_the_autoscaler_once_the_files_are_on_the_head(home: Path, monkeypatch: Any) -> None:
    calls: List[List[str]] = []

    def run_on(host: Host, _: Ssh, words: List[str], *__: Any, **___: Any) -> ssh.Result:
        if "cluster-pod64.state" in "".join(words):
            assert words[:3] == ["bash", "-c", 'exec python3 - /tmp/ray-$(id -un)/ray/cluster-pod64.state "$@"']
            calls.append([host.address, *words[4:]])
        answers: Dict[str, Any] = {"failed": ["10.0.0.13"], "drivers": [], "missing": [], "error": "", "raylet": 1}
        answers.update(changes=[], runs=True, foreign=False, token=None)
        return ssh.Result(0, json.dumps(answers), "")

    monkeypatch.setattr(ssh, "run_on", run_on)
    monkeypatch.setattr(up, "cluster_lock", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(up, "_run_ray", lambda *_: calls.append(["ray up"]))
    monkeypatch.setattr(up, "note_running_head", lambda *_: calls.append(["joins"]))
    monkeypatch.setattr(up.collect_copies, "collect", lambda *_: None)
    assert main(["up", "--no-restart", str(SHIPPED)]) == 0
    head, workers = "10.0.0.11", ["10.0.0.12", "10.0.0.13", "10.0.0.14"]
    expected = [["joins"], [head, "keep", *workers], ["ray up"], [head, "again", "10.0.0.13"], [head, "add", *workers]]
    assert calls == expected
    calls.clear()
    assert main(["up", str(SHIPPED)]) == 0
    assert calls == [["ray up"]]


def test_hosts_that_do_not_join_are_named_with_the_error_of_the_gcs(processes: None) -> None:
    cluster = Cluster("pod", (Host("h", "127.0.0.1"),), gcs_port=1)  # this machine, where nothing listens
    words = r"pod: 1 of 1 hosts did not join within 0 s \(--wait-hosts\) \(.*127\.0\.0\.1:1.*\)\n  h: "
    with pytest.raises(RunError, match=words):
        started.wait_for_hosts(cluster, cluster_file.parse("provider: {type: local, head_ip: h}"), 0, 0, say)


def answer_missing(monkeypatch: pytest.MonkeyPatch, *answers: List[str]) -> List[str]:
    """Let the head answer which hosts are missing, once with each of the answers; return the timeouts of the waits."""
    left, waits = list(answers), []

    def run_on(host: Host, _: Ssh, words: List[str], *__: Any, **___: Any) -> ssh.Result:
        if "bash" not in words[3:4]:
            return ssh.Result(0, "", "")  # no log
        waits.append(words[5])
        return ssh.Result(0, json.dumps({"missing": left.pop(0), "error": ""}), "")

    monkeypatch.setattr(ssh, "run_on", run_on)
    return waits


def wait_for_hosts(text: str, within_s: float) -> None:
    file = cluster_file.parse(text)
    started.wait_for_hosts(cluster_from(file, "pod64"), file, within_s, time.monotonic(), say)


def test_only_the_wait_for_missing_hosts_is_announced(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    waits = answer_missing(monkeypatch, ["10.0.0.14"], [])
    wait_for_hosts(SHIPPED.read_text(), 120)
    assert waits == ["0", "120"]
    line = "raypod: waiting up to 120 s for 1 of 4 hosts: 10.0.0.14 (--wait-hosts changes it)\n"
    assert capsys.readouterr() == ("", line)
    assert answer_missing(monkeypatch, []) == []
    wait_for_hosts(SHIPPED.read_text(), 120)
    assert capsys.readouterr().err == ""


def test_a_host_with_another_version_of_ray_than_the_head_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_missing(monkeypatch, *2 * [["10.0.0.13", "10.0.0.14"]])
    answer = ssh.run_on

    def run_on(host: Host, options: Ssh, words: List[str], *rest: Any, **others: Any) -> ssh.Result:
        if '"only": "python"' not in words[2]:
            return answer(host, options, words, *rest, **others)
        packages = {"ray": "2.10.0" if host.address == "10.0.0.14" else "2.60.0"}
        return ssh.Result(0, json.dumps({"python": {"version": "3.11.7", "packages": packages}}), "")

    monkeypatch.setattr(ssh, "run_on", run_on)
    with pytest.raises(RunError) as error:
        wait_for_hosts(SHIPPED.read_text(), 9)
    reasons = str(error.value).splitlines()[1:]
    assert "Ray 2" not in reasons[0]
    cause = "has Ray 2.10.0 with Python 3.11.7, but the head Ray 2.60.0 with Python 3.11.7: install the same versions"
    assert reasons[1] == f"  10.0.0.14: {cause}"


def test_hosts_that_do_not_join_without_a_key_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "auth.ssh_private_key is not set: the head logs in to the workers with its own default key"
    for removed in ("", "  ssh_private_key: ~/.ssh/id_ed25519\n"):
        answer_missing(monkeypatch, ["10.0.0.14"], ["10.0.0.14"])
        with pytest.raises(RunError, match=r"pod64: 1 of 4 hosts did not join within 9 s") as error:
            wait_for_hosts(SHIPPED.read_text().replace(removed, ""), 9)
        assert (words in str(error.value)) == bool(removed)


def test_the_text_of_the_start_commands_and_settings_is_read() -> None:
    words = "RAY_USE_TLS=1 RAY_TLS_SERVER_CERT=/c RAY_TLS_SERVER_KEY=/k RAY_TLS_CA_CERT=/ca "
    text = SHIPPED.read_text().replace("export RAYPOD", f"export {words}RAYPOD")
    assert " ".join(tls_variables(cluster_file.parse(text))) + " " == words
    assert tls_variables(cluster_file.parse(SHIPPED.read_text())) == []
    provider = "provider: {type: local, head_ip: a}\n"
    for text, setting in (
        (f"metadata:\n  raypod:\n    python: python4\n{provider}", "metadata.raypod.python in line 3"),
        (provider, "metadata.raypod.python (default: python3)"),
    ):
        assert python_setting(cluster_file.parse(text)) == setting
    text = SHIPPED.read_text().replace("  ssh_private_key:", "  # ")
    (warning,) = problems(text, key_warnings)
    assert warning.startswith("line 19: auth.ssh_private_key is not set")
    assert problems(text.replace("worker_ips: [10.0.0.12, 10.0.0.13, 10.0.0.14]", "worker_ips: []"), key_warnings) == []


def test_a_missing_interpreter_is_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file = cluster_file.parse(SHIPPED.read_text().replace("python: ~/raypod/venv/bin/python", "python: python4"))
    facts = {"python": {"error": "python4 does not exist"}}
    answers = {"10.0.0.11": ssh.Result(255, "", "lost"), "10.0.0.12": ssh.Result(0, '{"python": {"path": "/p"}}', "")}
    missing = ssh.Result(0, json.dumps(facts), "")
    monkeypatch.setattr(ssh, "run_on", lambda host, *_, **__: answers.get(host.address, missing))
    started.check_python(cluster_from(file, "pod64"), file, say)
    assert capsys.readouterr().err == (
        "raypod: warning: 10.0.0.11: whether python4 exists was not checked: lost\n"
        "raypod: warning: 10.0.0.13, 10.0.0.14: python4 does not exist; correct metadata.raypod.python in line "
        f"{file.raypod.line_of('python')}, or setup_commands\n"
    )


BANNER = r"printf '\377\376 {Gr\374\337e} '; printf '\377\376 last\n' >&2"
RUN = 'for last; do :; done; sh -c "$last"; code=$?; printf "{logout} \\377\\n"; exit $code'


def use_ssh(monkeypatch: pytest.MonkeyPatch, home: Path, *lines: str) -> str:
    """Put a fake `ssh` on PATH; return a cluster file whose hosts are reached by it, as addresses of this machine."""
    (home / "ssh").write_text("\n".join(["#!/bin/sh", *lines, ""]))
    (home / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    text = (ROOT / "cluster" / "emulated-pod.yaml").read_text().replace("10.0.0.", "127.0.0.")
    file = home / "cluster.yaml"
    file.write_text(text.replace("emulated-pod", f"t{uuid.uuid4().hex}"))
    return str(file)


def test_doctor_and_down_read_between_banners(processes: None, monkeypatch: Any, home: Path, capsys: Any) -> None:
    file = use_ssh(monkeypatch, home, BANNER, RUN)
    assert main(["doctor", "--json", "--cluster", file]) in (0, 2)
    hosts = json.loads(capsys.readouterr().out)["hosts"]
    assert [facts["user"] for facts in hosts.values()] == ["root" if os.getuid() == 0 else os.environ["USER"]] * 3
    monkeypatch.setattr(up, "_run_ray", lambda *_: None)
    assert main(["down", file]) == 0
    assert "stopped on all 3 hosts" in capsys.readouterr().err


def test_the_error_of_a_head_can_have_any_bytes(processes: None, monkeypatch: Any, home: Path, capsys: Any) -> None:
    file = use_ssh(monkeypatch, home, BANNER, "exit 255")
    assert main(["up", file]) == 2
    assert "the head 127.0.0.11 is unreachable: \\xff\\xfe last" in capsys.readouterr().err
    file = use_ssh(monkeypatch, home, BANNER, "printf '{\\n}'")
    done = ssh.run_on(Host("h", "127.0.0.11"), Ssh(), ["true"])
    assert done.json_object("hostname") is None
    assert done.excerpt.startswith(r"'\\xff\\xfe {Gr\\xfc\\xdfe} {")


@pytest.mark.parametrize("options", [["-t", "ed25519"], ["-t", "rsa", "-b", "2048", "-m", "PEM"], ["-m", "PKCS8"]])
def test_a_passphrase_is_named(processes: None, monkeypatch: Any, home: Path, options: List[str]) -> None:
    """As the cause where ssh cannot ask for it, and before a start of workers, which the head cannot log in to."""
    file = use_ssh(monkeypatch, home, "echo 'me@host: Permission denied (publickey).' >&2; exit 255")
    key, host = home / ".ssh" / "id_ed25519", Host("h", "127.0.0.11")
    for phrase, hint in (("", ""), ("secret", f" ({key} has a passphrase, and no ssh agent here has the key: eval ")):
        key.unlink()
        subprocess.run(["ssh-keygen", "-q", *options, "-N", phrase, "-f", str(key)], timeout=60, check=True)
        error = ssh.run_on(host, Ssh("me", str(key)), ["true"]).error
        assert error.startswith(f"me@host: Permission denied (publickey).{hint}")
        assert error.endswith(")" if hint else ".")
        text = Path(file).read_text()
        errors = file_checks.key_errors(cluster_file.parse(text))
        assert [f"{key.name} has a passphrase, which the head" in str(each) for each in errors] == [True] * bool(hint)
        one_host = text.replace("worker_ips: [127.0.0.12, 127.0.0.13]", "worker_ips: []")
        assert file_checks.key_errors(cluster_file.parse(one_host)) == []


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (["printf", "abc"], ["wc", "-c"], (0, "3", "")),
        (["sh", "-c", "printf abc; echo full >&2; exit 3"], ["wc", "-c"], (0, "3", "full")),
        (["printf", "abc"], ["sh", "-c", "cat; echo broken >&2; exit 4"], (4, "abc", "broken")),
        (["yes"], ["head", "-c", "2"], (0, "y", "exit code -13")),  # the first command ends with the second one
        (["sleep", "600"], ["cat"], (124, "", "no answer within 0.2 s")),
    ],
)
def test_output_is_the_input_of_another_hosts_command(processes: None, source: Any, target: Any, expected: Any) -> None:
    host, timeout_s = Host("localhost", "localhost"), 0.2 if "600" in source else 60.0
    done = ssh.pipe((host, source), (host, target), Ssh(), timeout_s)
    assert (done.exit_code, done.output.strip(), done.error) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the command is missing: python with_template.py ray start OPTION..."),
        ("nothing-here start", "with_template.py nothing-here: no such program in PATH"),
        ("sh start", "/sh: this is no Python program"),
        ("{program} start", "run it with the Python of .*program: .* has no Ray"),
    ],
)
def test_a_start_with_a_template_refuses_what_is_not_ray(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/usr/bin/env python3\n")
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(message, with_template.run, words.format(program=program).split())
