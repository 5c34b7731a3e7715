"""Tests of pod/ssh: hosts whose ssh server or shell prints other text, not in UTF-8, around the output of a command."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from pathlib import Path
from typing import Any, List

import pytest

from raypod.__main__ import main
from raypod.plan import cluster_file
from raypod.plan.cluster import Host, Ssh
from raypod.pod import file_checks, up
from raypod.runtime import ssh
from tests.support import ROOT

pytestmark = pytest.mark.usefixtures("processes")
BANNER = r"printf '\377\376 {Gr\374\337e} '; printf '\377\376 last\n' >&2"
RUN = 'for last; do :; done; sh -c "$last"; code=$?; printf "{logout} \\377\\n"; exit $code'


def use_ssh(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str) -> str:
    """Put a fake `ssh` on PATH; return a cluster file whose hosts are reached by it, as addresses of this machine."""
    (folder / "ssh").write_text("\n".join(["#!/bin/sh", *lines, ""]))
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(ROOT)
    (folder / ".ssh").mkdir()
    (folder / ".ssh" / "id_ed25519").touch()
    text = (ROOT / "cluster" / "emulated-pod.yaml").read_text().replace("10.0.0.", "127.0.0.")
    file = folder / "cluster.yaml"
    file.write_text(text.replace("emulated-pod", f"t{uuid.uuid4().hex}"))
    return str(file)


def test_doctor_and_down_read_the_results_between_banners(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    file = use_ssh(monkeypatch, tmp_path, BANNER, RUN)
    assert main(["doctor", "--json", "--cluster", file]) in (0, 2)
    hosts = json.loads(capsys.readouterr().out)["hosts"]
    assert [facts["user"] for facts in hosts.values()] == ["root" if os.getuid() == 0 else os.environ["USER"]] * 3
    monkeypatch.setattr(up, "_run_ray", lambda *_: None)
    assert main(["down", file]) == 0
    assert "stopped on all 3 hosts" in capsys.readouterr().err


def test_the_error_of_an_unreachable_head_can_have_any_bytes(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    file = use_ssh(monkeypatch, tmp_path, BANNER, "exit 255")
    assert main(["up", file]) == 2
    assert "the head 127.0.0.11 is unreachable: \\xff\\xfe last" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["-t", "ed25519"], ["-t", "rsa", "-b", "2048", "-m", "PEM"], ["-m", "PKCS8"]])
def test_a_passphrase_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: List[str]) -> None:
    """As the cause where ssh cannot ask for it, and before a start of workers, which the head cannot log in to."""
    file = use_ssh(monkeypatch, tmp_path, "echo 'me@host: Permission denied (publickey).' >&2; exit 255")
    key, host = tmp_path / ".ssh" / "id_ed25519", Host("h", "127.0.0.11")
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


def test_a_host_without_facts_is_reported_with_its_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_ssh(monkeypatch, tmp_path, BANNER, "printf '{\\n}'")
    done = ssh.run_on(Host("h", "127.0.0.11"), Ssh(), ["true"])
    assert done.json_object("hostname") is None
    assert done.excerpt.startswith(r"'\\xff\\xfe {Gr\\xfc\\xdfe} {")


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
def test_the_output_of_a_command_is_the_input_of_one_on_another_host(source: Any, target: Any, expected: Any) -> None:
    host = Host("localhost", "localhost")
    timeout_s = 0.2 if "600" in source else 60.0
    done = ssh.pipe((host, source), (host, target), Ssh(), timeout_s)
    assert (done.exit_code, done.output.strip(), done.error) == expected
