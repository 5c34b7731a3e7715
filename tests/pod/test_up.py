"""What `raypod up` and `down` check, make and ask for, without a host."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import pytest

from raypod.__main__ import main
from raypod.errors import ClusterError
from raypod.fleet import ray_admission
from raypod.plan import cluster_file
from raypod.plan.cluster import Cluster, Host, Ssh
from raypod.pod import ssh, up
from raypod.pod.file_checks import advice_for_launch, is_marked, mistakes_for_launch, tls_variables

SHIPPED = Path(__file__).resolve().parents[2] / "cluster" / "pod64.yaml"


def told(text: str, check: Any) -> List[str]:
    return [str(each) for each in check(cluster_file.parse(text))]


def test_the_shipped_file_has_neither_mistake_nor_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SHIPPED.parent.parent)
    assert told(SHIPPED.read_text(), mistakes_for_launch) == []
    assert told(SHIPPED.read_text(), advice_for_launch) == []
    assert is_marked(cluster_file.parse(SHIPPED.read_text()))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("cluster_name: pod64", "", "cluster_name is missing"),
        ("  ssh_user: ubuntu", "", "auth.ssh_user is missing"),
        ('"raypod"', '"rayopd"', "file_mounts: rayopd (for ~/raypod/source/raypod) is not there"),
        ("--autoscaling-config", "--autoscaling", "--autoscaling-config=~/ray_bootstrap_config.yaml is missing"),
        ("RAY_AUTH_MODE=token ", "", "worker_start_ray_commands: RAY_AUTH_MODE=token is missing"),
        ("address=10.0.0.11", "address=10.0.0.1", "--node-ip-address=10.0.0.1, and provider.head_ip is 10.0.0.11"),
        ("ipus_per_host: 16", "ipus_per_host: 8", "says 16 IPUs, and metadata.raypod.ipus_per_host is 8"),
        (" --resources='{\"IPU\":16}'", "", "says nothing of IPUs, and metadata.raypod.ipus_per_host is 16"),
    ],
)
def test_what_cannot_start_is_refused(monkeypatch: pytest.MonkeyPatch, old: str, new: str, line: str) -> None:
    monkeypatch.chdir(SHIPPED.parent.parent)
    assert any(line in each for each in told(SHIPPED.read_text().replace(old, new), mistakes_for_launch))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("unset OMP_NUM_THREADS;", "", "sets OMP_NUM_THREADS=1"),
        ("RAY_enable_autoscaler_v2=0", "", "autoscaler v2 starts one worker too few"),
        ("--dashboard-host=127.0.0.1", "--dashboard-host=0.0.0.0", "the dashboard is open to the network"),
        ("RAY_AUTH_MODE=token", "RAY_AUTH_MODE=disabled", "whoever reaches a port can run commands"),
        ("python3 ~/raypod/source/raypod/pod/stop_cluster.py pod64", "ray stop", "ends the Ray of other clusters"),
        ("RAYPOD_CLUSTER=pod64 ", "", "export RAYPOD_CLUSTER=<cluster_name>"),
    ],
)
def test_what_works_and_is_no_good_is_told(old: str, new: str, line: str) -> None:
    assert any(line in each for each in told(SHIPPED.read_text().replace(old, new), advice_for_launch))


def test_a_token_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "ray" / "token"
    assert "made the cluster's token" in str(ray_admission.ensure_token(path))
    assert path.stat().st_mode & 0o777 == 0o600
    token = path.read_text()
    assert len(token) == 64
    assert ray_admission.ensure_token(path) is None
    path.chmod(0o644)
    assert "was readable for others (mode 0644)" in str(ray_admission.ensure_token(path))
    assert (path.read_text(), path.stat().st_mode & 0o777) == (token, 0o600)


def test_a_head_that_cannot_be_reached_ends_it_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(SHIPPED.parent.parent)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ssh, "run_on", lambda *_, **__: ssh.Done(255, "", "No route to host"))
    monkeypatch.setattr(up, "_ray", lambda *_: pytest.fail("ray up was called"))
    assert main(["up", str(SHIPPED)]) == 2
    assert "line 23: auth.ssh_private_key: ~/.ssh/id_ed25519 is not there" in capsys.readouterr().err
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").touch()
    assert main(["up", str(SHIPPED)]) == 2
    assert "the head 10.0.0.11 cannot be reached: No route to host" in capsys.readouterr().err
    assert len((tmp_path / ".ray" / "auth_token").read_text()) == 64


def test_ssh_asks_nothing_and_keeps_the_keys_of_hosts(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("")
    words = ssh.connection(Host("h", "10.0.0.9"), Ssh("me", str(key), "nc %h %p"))
    assert words[0] == "ssh"
    assert words[-1] == "me@10.0.0.9"
    assert {"BatchMode=yes", "StrictHostKeyChecking=accept-new", "ProxyCommand=nc %h %p"} <= set(words)
    assert words[words.index("-i") + 1] == str(key)


def test_this_machine_is_reached_without_ssh() -> None:
    done = ssh.run_on(Host("h", "127.0.0.1"), Ssh(), ["sh", "-c", "cat; echo no >&2; exit 3"], stdin="yes")
    assert (done.exit_code, done.output, done.complaint) == (3, "yes", "no")
    slow = ssh.run_on(Host("h", "127.0.0.1"), Ssh(), ["sleep", "9"], timeout_s=0.2)
    assert slow.complaint == "no answer within 0.2 s"


@pytest.mark.parametrize(
    ("code", "words"), [(255, "host h cannot be reached over ssh"), (127, "host h has no ~/venv/bin/python")]
)
def test_a_command_on_a_host_that_does_not_begin_is_told(
    monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    monkeypatch.setattr(ssh, "connection", lambda *_: ["sh", "-c", f"exit {code}"])
    with pytest.raises(ClusterError, match=words):
        ssh.pass_through(Host("h", "10.0.0.9"), Ssh(), ["~/venv/bin/python", "-V"])


def test_a_command_on_a_host_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".bashrc").write_text("export SAID=out\n")
    (tmp_path / "tool").write_text('#!/bin/sh\necho "$SAID $1"; echo err >&2; exit 3\n')
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ssh, "connection", lambda *_: ["sh", "-c"])
    assert ssh.pass_through(Host("h", "10.0.0.9"), Ssh(), ["~/tool", "a  b"]) == 3
    assert capfd.readouterr() == ("out a  b\n", "err\n")


def test_what_a_host_said_is_told_and_not_what_rays_launcher_makes_of_it() -> None:
    log = (
        "2026-11-21 15:59:28,010\tINFO updater.py:509 -- [7/7] Starting the Ray runtime\n"
        "bash: ray: command not found\n"
        "Shared connection to 10.77.0.11 closed.\n"
        "2026-11-21 15:59:28,068\tERR updater.py:177 -- New status: update-failed\n"
        "click.exceptions.ClickException: SSH command failed.\n"
        "Error: Failed to setup head node.\n"
    )
    assert up._last_words(log) == "bash: ray: command not found"
    assert up._last_words("FileNotFoundError: no such file: 'key'\nbye\n") == "FileNotFoundError: no such file: 'key'"
    assert up._last_words("") == "nothing"


def test_notes_of_an_earlier_life_of_the_cluster_are_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    stale, other = (tmp_path / "ray" / f"cluster-{name}.state" for name in ("pod", "pod-b"))
    stale.touch()
    other.touch()
    cluster = Cluster("pod", (Host("h", "h"),))
    up._forget(cluster)
    up._forget(cluster)
    assert not stale.exists()
    assert other.exists()


def test_with_tls_the_head_is_asked_with_tls() -> None:
    words = "RAY_USE_TLS=1 RAY_TLS_SERVER_CERT=/c RAY_TLS_SERVER_KEY=/k RAY_TLS_CA_CERT=/ca "
    text = SHIPPED.read_text().replace("export RAYPOD", f"export {words}RAYPOD")
    assert " ".join(tls_variables(cluster_file.parse(text))) + " " == words
    assert tls_variables(cluster_file.parse(SHIPPED.read_text())) == []
