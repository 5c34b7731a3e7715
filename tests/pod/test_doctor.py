"""The command, on this host; and the probe as it is sent to others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import pytest

from raypod.__main__ import main
from raypod.fleet import gcs
from raypod.pod import probe, ssh

SHIPPED = Path(__file__).resolve().parent.parent.parent / "cluster" / "emulated-pod.yaml"


def ask(**settings: Any) -> Dict[str, Any]:
    """The facts, asked as a host is asked."""
    words = [sys.executable, "-I", "-S", "-", json.dumps(settings)]
    text = Path(probe.__file__).read_text()
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    facts: Dict[str, Any] = json.loads(done.stdout)
    return facts


def test_the_probe_tells_what_there_is(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o640)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts = ask(
            python=sys.executable,
            packages=["torch", "no-such-package"],
            folders={"run folder": str(tmp_path / "to" / "come"), "data set": str(tmp_path / "none"), "cache": None},
            token=str(token),
            peers=["127.0.0.1"],
            tools=["bash", "no-such-tool"],
        )
    assert facts["hostname"] == socket.gethostname()
    assert facts["python"]["packages"]["torch"]
    assert facts["python"]["packages"]["no-such-package"] is None
    assert facts["tools"]["bash"]
    assert facts["tools"]["no-such-tool"] is None
    assert facts["interfaces"]["lo"] == ["127.0.0.1", 8]
    assert facts["towards"] == {"127.0.0.1": "127.0.0.1"}
    assert facts["unreachable"] == {}
    (own,) = [each for each in facts["listening"] if each["port"] == port]
    assert (own["address"], own["pid"], own["cluster"]) == ("127.0.0.1", os.getpid(), None)
    assert facts["folders"]["run folder"]["is_writable"]
    assert not facts["folders"]["data set"]["exists"]
    assert facts["token"]["mode"] == "0640"
    assert "secret" not in json.dumps(facts)


def test_an_interpreter_that_is_not_there_is_told() -> None:
    assert ask(python="/no/python")["python"] == {"error": "/no/python is not there"}


def test_this_host_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {finding["level"] for finding in told["findings"]} <= {"ok", "warn"}
    assert list(told["hosts"]) == ["localhost"]


def test_a_data_set_that_is_not_there_is_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--data-dir", "/no/data"]) == 2
    told = capsys.readouterr().out
    assert "trouble  data set        localhost /no/data is not there; mount it" in told
    assert told.splitlines()[-1].startswith("not ready: 1 host")


def test_every_host_of_the_file_is_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(SHIPPED.parent.parent)
    monkeypatch.setattr(ssh, "run_on", lambda host, *_, **__: ssh.Done(255, "", f"no way to {host.address}"))
    monkeypatch.setattr(gcs, "check", lambda _: gcs.Answer(gcs.SILENT, "nobody", b""))
    assert main(["doctor", "--cluster", str(SHIPPED)]) == 2
    told = capsys.readouterr().out
    for last in (11, 12, 13):
        assert f"no way to 10.0.0.{last}" in told
    assert "nothing at 10.0.0.11:6379 for one without a token (nobody)" in told
