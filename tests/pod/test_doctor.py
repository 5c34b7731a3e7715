"""Tests of pod/doctor on this host, and of pod/probe as it runs on other hosts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from raypod.__main__ import main
from raypod.plan.cluster import Host
from raypod.pod import probe
from raypod.runtime import ssh
from raypod.runtime.workers import gcs
from raypod.system.process import sources_digest
from tests.support import ROOT

SHIPPED = ROOT / "cluster" / "emulated-pod.yaml"


def run_probe(**settings: Any) -> Dict[str, Any]:
    """Run the probe as on another host; return its facts."""
    words = [sys.executable, "-I", "-S", "-", json.dumps(settings)]
    text = Path(probe.__file__).read_text()
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    facts: Dict[str, Any] = json.loads(done.stdout)
    return facts


def test_probe_facts(processes: None, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o640)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts = run_probe(
            python=sys.executable,
            packages=["torch", "no-such-package"],
            environment={"PYTHONPATH": str(ROOT)},
            folders={"run folder": str(tmp_path / "to" / "come"), "data set": str(tmp_path / "none"), "cache": None},
            token=str(token),
            peers=["127.0.0.1"],
            tools=["bash", "no-such-tool"],
        )
    assert facts["python"]["raypod_sha256"] == sources_digest()
    assert facts["hostname"] == socket.gethostname()
    assert facts["own_name"]["address"] or facts["own_name"]["error"]
    assert facts["python"]["packages"]["torch"]
    assert facts["python"]["packages"]["no-such-package"] is None
    assert [name for name, path in facts["tools"].items() if path] == ["bash"]
    assert facts["interfaces"]["lo"] == ["127.0.0.1", 8]
    assert (facts["towards"], facts["unreachable"]) == ({"127.0.0.1": "127.0.0.1"}, {})
    (own,) = [each for each in facts["listening"] if each["port"] == port]
    assert (own["address"], own["pid"], own["cluster"]) == ("127.0.0.1", os.getpid(), None)
    assert facts["folders"]["run folder"]["is_writable"]
    assert not facts["folders"]["data set"]["exists"]
    assert facts["token"]["mode"] == "0640"
    assert "secret" not in json.dumps(facts)


def test_an_agent_of_a_raylet_that_has_ended_is_known(processes: None) -> None:
    serve = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    agent = subprocess.Popen(
        ["ray::RuntimeEnvAgent", "-c", serve],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with agent:
        port = int(agent.stdout.readline())  # type: ignore[union-attr]
        listening = run_probe()["listening"]
        agent.communicate("\n", timeout=60)
    (own,) = [each for each in listening if each["port"] == port]
    assert (own["program"], own["is_orphan"]) == ("ray::RuntimeEnvAgent", True)


def test_a_missing_interpreter_is_reported(processes: None) -> None:
    assert run_probe(python="/no/python")["python"] == {"error": "/no/python does not exist"}
    assert [*run_probe(python="/no/python", only="python")] == ["python"]


def test_this_host_is_ready_unless_a_data_set_is_missing(processes: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert {finding["level"] for finding in output["findings"]} <= {"ok", "warn"}
    assert list(output["hosts"]) == ["localhost"]
    assert main(["doctor", "--data-dir", "/no/data"]) == 2
    text = capsys.readouterr().out
    assert "trouble  data set        localhost /no/data does not exist; mount it" in text
    assert text.splitlines()[-1].startswith("not ready: 1 host")


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host answers."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(ssh, "run_on", lambda host, *_, **__: ssh.Result(255, "", f"no way to {host.address}"))
    monkeypatch.setattr(gcs, "check", lambda _: gcs.Answer(gcs.SILENT, "no reply", b""))


def test_every_host_of_the_file_is_probed(unreachable: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--cluster", str(SHIPPED)]) == 2
    output = capsys.readouterr().out
    for last in (11, 12, 13):
        assert f"no way to 10.0.0.{last}" in output
    assert "no answer at 10.0.0.11:6379 without a token (no reply)" in output


def test_a_file_without_the_key_of_the_operator_is_a_warning(unreachable: None, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(SHIPPED.read_text().replace("  ssh_private_key: ~/.ssh/id_ed25519\n", ""))
    main(["doctor", "--json", "--cluster", str(file)])
    findings = json.loads(capsys.readouterr().out)["findings"]
    (warning,) = [each for each in findings if each["level"] == "warn"]
    assert warning["what"] == "cluster file"
    assert "auth.ssh_private_key is not set: the head logs in to the workers with its own" in warning["text"]


def test_a_folder_that_other_users_can_use_is_trouble(unreachable: None, monkeypatch: Any, capsys: Any) -> None:
    def run_on(host: Host, _: Any, words: List[str], *__: Any) -> ssh.Result:
        assert "exec python3 - --check /tmp/ray-$(id -un)" in words or words[0] != "bash"
        return ssh.Result(1, "", f"/tmp/ray-root on {host.name} belongs to uid 7")

    monkeypatch.setattr(ssh, "run_on", run_on)
    main(["doctor", "--json", "--cluster", str(SHIPPED)])
    findings = json.loads(capsys.readouterr().out)["findings"]
    found = [(each["level"], each["text"]) for each in findings if each["what"] == "RAY_TMPDIR"]
    assert found == [("trouble", f"/tmp/ray-root on 10.0.0.{last} belongs to uid 7") for last in (11, 12, 13)]


def test_a_local_session_without_a_folder_of_its_own_is_trouble(
    processes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    tmp_path.chmod(0o777)
    (tmp_path / f"raypod-{os.getuid()}").touch()
    assert main(["doctor"]) == 2
    assert "trouble  RAY_TMPDIR      localhost no folder for the files of Ray: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("ray://head:1", "RAY_ADDRESS=ray://head:1 is not HOST:PORT of a Ray cluster; correct it, or unset it"),
        ("10.0.0.1:7", "no Ray cluster responds at 10.0.0.1:7: refused"),
    ],
)
def test_a_cluster_of_ray_address_that_cannot_be_joined_is_trouble(
    unreachable: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str, text: str
) -> None:
    monkeypatch.setattr(gcs, "check", lambda *_, **__: gcs.Answer(gcs.SILENT, "refused", b""))
    monkeypatch.setenv("RAY_ADDRESS", address)
    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    found = [(each["level"], each["text"]) for each in findings if each["what"] == "RAY_ADDRESS"]
    assert found == [("trouble", text)]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    main(["doctor", "--json"])
    assert "RAY_ADDRESS" not in capsys.readouterr().out
