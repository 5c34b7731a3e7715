"""The doctor: its probe on this host, its findings, and a program on the emulated SDK until its first call."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import psutil
import pytest

from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.plan.cluster import LOCAL, Cluster, Host, VipuPartition
from raypod.pod import probe, program_check
from raypod.pod.doctor import render_findings
from raypod.pod.findings import OK, TROUBLE, WARN, Expected, Finding, examine
from raypod.pod.program_check import Outcome, conclude, render
from raypod.runtime import ssh
from raypod.runtime.launcher.records import ProgramEnd
from raypod.runtime.workers import gcs
from raypod.system.process import sources_digest
from tests.support import ROOT
from tests.support.bounded import wait_until

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
    words, pipes = ["ray::RuntimeEnvAgent", "-c", serve], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, executable=sys.executable, text=True, **pipes) as agent:
        port = int(agent.stdout.readline())
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
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(ssh, "run_on", lambda host, *_, **__: ssh.Result(255, "", f"no way to {host.address}"))
    monkeypatch.setattr(gcs, "check", lambda _: gcs.Answer(gcs.SILENT, "no reply", b""))


def findings(capsys: Any, name: str, *words: str) -> List[Tuple[str, ...]]:
    """Return the levels, names and texts of the findings of a level or a name."""
    main(["doctor", "--json", *words])
    found = json.loads(capsys.readouterr().out)["findings"]
    return [(each["level"], each["what"], each["text"]) for each in found if name in (each["level"], each["what"])]


def test_every_host_of_the_file_is_probed(unreachable: None, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    assert main(["doctor", "--cluster", str(SHIPPED)]) == 2
    output = capsys.readouterr().out
    assert [last for last in (11, 12, 13) if f"no way to 10.0.0.{last}" not in output] == []
    assert "no answer at 10.0.0.11:6379 without a token (no reply)" in output
    file = tmp_path / "pod.yaml"
    file.write_text(SHIPPED.read_text().replace("  ssh_private_key: ~/.ssh/id_ed25519\n", ""))
    ((_, what, text),) = findings(capsys, "warn", "--cluster", str(file))
    assert what == "cluster file"
    assert "auth.ssh_private_key is not set: the head logs in to the workers with its own" in text

    def run_on(host: Host, _: Any, words: List[str], *__: Any) -> ssh.Result:
        assert "exec python3 - --check /tmp/ray-$(id -un)" in words or words[0] != "bash"
        return ssh.Result(1, "", f"/tmp/ray-root on {host.name} belongs to uid 7")

    monkeypatch.setattr(ssh, "run_on", run_on)
    found = findings(capsys, "RAY_TMPDIR", "--cluster", str(SHIPPED))
    texts = [f"/tmp/ray-root on 10.0.0.{last} belongs to uid 7" for last in (11, 12, 13)]
    assert found == [("trouble", "RAY_TMPDIR", text) for text in texts]


def test_a_local_session_without_its_own_folder_is_trouble(
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
        ("auto", None),
    ],
)
def test_wrong_ray_addresses(unreachable: None, monkeypatch: Any, capsys: Any, address: str, text: Any) -> None:
    monkeypatch.setattr(gcs, "check", lambda *_, **__: gcs.Answer(gcs.SILENT, "refused", b""))
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert findings(capsys, "RAY_ADDRESS") == ([("trouble", "RAY_ADDRESS", text)] if text else [])


GIB = 1 << 30
HOSTS = ("10.0.0.1", "10.0.0.2")
POD = Cluster(
    "pod",
    tuple(Host(name, name, 16) for name in HOSTS),
    data_network="10.1.0.0/16",
    vipu=VipuPartition("p", size=32),
    gcs_port=6379,
    auth_mode="token",
)
EXPECTED = Expected(POD, ports=(6379, 6380, 6384, 8265), worker_ports=(10002, 10999), metrics_port=6384)
Pod = Dict[str, Any]


def folder(free_bytes: int = 100 * GIB, **changed: Any) -> Dict[str, Any]:
    is_there = {"exists": True, "is_folder": True, "is_empty": False, "is_writable": True}
    return {"path": "/f", **is_there, "free_bytes": free_bytes, "total_bytes": 200 * GIB, **changed}


def healthy() -> Pod:
    """Return the facts of both hosts, in the form of the probe."""
    packages = {"ray": "2.60.0", "torch": "2.0.1", "torchvision": "0.15.2", "raypod": "0.1.0", "poptorch": "3.3.0"}
    sizes = {"cpus": 8, "memory_bytes": 64 * GIB, "numa_nodes": 2, "open_files": 65536, "skew_s": 0.0}
    lists: Dict[str, Any] = {"unreachable": {}, "listening": [], "clusters": []}
    facts = {
        "hostname": "h",
        "own_name": {"address": "127.0.1.1", "error": ""},
        "user": "me",
        "python": {"path": "/p", "version": "3.8.10", "packages": packages, "raypod_sha256": "ab" * 32},
        "tools": {"rsync": "/usr/bin/rsync"},
        "ipus": {"count": 16, "error": None},
        "partition": {"exit_code": 0, "output": "Name | p\nSize | 32\nState | ACTIVE\n", "error": None},
        "folders": {"run folder": folder(), "object store": folder(), "data set": folder()},
        "token": {"path": "~/.ray/auth_token", "mode": "0600", "is_own": True, "sha256": "cd" * 32},
    }
    pod = {name: copy.deepcopy({**facts, **sizes, **lists}) for name in HOSTS}
    for number, name in enumerate(HOSTS, 1):
        pod[name]["interfaces"] = {"lo": ["127.0.0.1", 8], "eth0": [name, 24], "eth1": [f"10.1.0.{number}", 16]}
        pod[name]["towards"] = dict.fromkeys(HOSTS, name)
    return pod


def bad(pod: Pod, expected: Expected = EXPECTED) -> List[Finding]:
    return [finding for finding in examine(expected, pod) if finding.level != OK]


def listen(
    facts: Dict[str, Any], port: int, cluster: Optional[str] = "pod", address: str = "0.0.0.0", **changed: Any
) -> None:
    place = {"address": address, "port": port, "cluster": cluster, "is_ray": cluster is not None, "is_orphan": False}
    facts["listening"].append({**place, "pid": 7, "program": "nginx", **changed})


@pytest.mark.parametrize(
    ("host", "ray", "filelock", "is_warned"),
    [
        (HOSTS[0], "2.10.0", "3.16.1", True),
        (HOSTS[0], "2.10.0", "3.11.0", True),
        (HOSTS[0], "2.10.0", "3.10.7", False),
        (HOSTS[0], "2.10.0", "3.9.1", False),
        (HOSTS[0], "2.10.0", None, False),
        (HOSTS[0], "2.60.0", "4.3.1", False),
        (HOSTS[1], "2.10.0", "3.16.1", False),
    ],
)
def test_an_autoscaler_that_can_block_itself(host: str, ray: str, filelock: Any, is_warned: bool) -> None:
    pod = healthy()
    pod[host]["python"]["packages"].update(ray=ray, filelock=filelock)
    found = [each for each in examine(EXPECTED, pod) if each.what == "autoscaler"]
    assert [(each.level, each.host) for each in found] == [(WARN, HOSTS[0])] * is_warned
    assert all("filelock<3.11" in each.hint for each in found)


def test_a_healthy_pod_has_only_ok_findings_also_without_what_it_does_not_need() -> None:
    assert bad(healthy()) == []
    whats = {finding.what for finding in examine(EXPECTED, healthy())}
    named = "reachable, python, same everywhere, SDK, IPUs, partition, data network, clocks, ports, run folder, token"
    assert {*named.split(", "), "object store", "data set"} <= whats
    facts = {**healthy()[HOSTS[0]], "interfaces": {}, "token": {"path": "t", "error": "No such file"}}
    assert bad({"localhost": facts}, Expected(LOCAL)) == []
    without = on_second(lambda facts: facts.update(ipus=None))
    (finding,) = bad(without, Expected(POD, requires_ipus=True))
    assert (finding.level, finding.what) == (TROUBLE, "IPUs")
    assert bad(without, Expected(POD, requires_ipus=False)) == []
    pod = {**healthy(), HOSTS[1]: "ssh: No route to host"}
    (finding,) = bad(pod)
    assert (finding.level, finding.host, finding.text) == (TROUBLE, HOSTS[1], "ssh: No route to host")
    assert any(each.host == HOSTS[0] and each.what == "IPUs" for each in examine(EXPECTED, pod))
    hosts, text = tuple(dataclasses.replace(host, cpus=9) for host in POD.hosts), "8, but the cluster file has {}: 9"
    found = bad(healthy(), dataclasses.replace(EXPECTED, cluster=dataclasses.replace(POD, hosts=hosts)))
    expected = [(WARN, name, text.format("cpus_per_host")) for name in HOSTS]
    assert [(each.level, each.host, each.text) for each in found] == expected


def test_ports_of_a_running_pod_are_counted() -> None:
    pod = healthy()
    for name in HOSTS:
        network = pod[name]["interfaces"]["eth1"][0]
        listen(pod[name], 6380, address="::")
        listen(pod[name], 10500)
        for port, address in ((40001, network), (40002, f"::ffff:{network}"), (40003, "127.0.0.1")):
            listen(pod[name], port, address=address)
        listen(pod[name], 10600, None, is_ray=True)  # a run that was started from a shell
    assert bad(pod) == []
    exposed = [finding for finding in examine(EXPECTED, pod) if finding.what == "exposed"]
    assert {(finding.level, finding.text) for finding in exposed} == {
        (OK, "2 ports of Ray, 2 of instances in 10.1.0.0/16 (see docs/explanation/security.md)")
    }


def on_second(change: Callable[[Dict[str, Any]], Any]) -> Pod:
    pod = healthy()
    change(pod[HOSTS[1]])
    return pod


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda f: f["python"]["packages"].update(ray=None), "trouble ray: not installed in /p"),
        (lambda f: f.update(python={"error": "python3 does not exist"}), "trouble python: python3 does not exist"),
        (lambda f: f["tools"].update(rsync=None), "trouble rsync: not installed"),
        (lambda f: f["python"]["packages"].update(poptorch=None), "warn SDK: poptorch is not installed"),
        (lambda f: f.update(ipus=None), "warn IPUs: neither gc-info nor gc-monitor"),
        (lambda f: f["ipus"].update(count=4), "warn IPUs: 4 visible, but the cluster file requires 16"),
        (lambda f: f["partition"].update(output="Size | 32\nState | ERROR"), "warn partition: p is ERROR"),
        (
            lambda f: f["partition"].update(output="Size | 16"),
            "warn partition: p has 16 IPUs, but the cluster file requires 32",
        ),
        (lambda f: f["partition"].update(exit_code=1, error="no such"), "warn partition: p: no such"),
        (lambda f: f.update(cpus=2), "warn CPUs: differ: 8: 10.0.0.1; 2: 10.0.0.2"),
        (lambda f: f.update(memory_bytes=16 * GIB), "warn memory: differs: 64 GiB: 10.0.0.1; 16 GiB: 10.0.0.2"),
        (lambda f: f["unreachable"].update({"10.0.0.1": "timed out"}), "trouble network: cannot reach 10.0.0.1"),
        (lambda f: f["interfaces"].pop("eth1"), "trouble data network: no interface in data_network 10.1.0.0/16"),
        (lambda f: f["towards"].update({"10.0.0.1": "10.9.0.2"}), "trouble network: Ray uses 10.9.0.2"),
        (lambda f: f.update(skew_s=5.0), "warn clocks: differ by up to 5.0 s, 10.0.0.2 is ahead"),
        (lambda f: f.update(skew_s=-90.0), "trouble clocks: differ by up to 90.0 s, 10.0.0.1 is ahead"),
        (lambda f: listen(f, 6380, None), "trouble ports: 6380 is in use by nginx, pid 7"),
        (
            lambda f: listen(f, 6380, None, is_orphan=True),
            "warn ports: 6380 is in use by nginx, pid 7, which is left of a Ray that has ended",
        ),
        (lambda f: listen(f, 10500, "b"), "trouble ports: pid 7 of the cluster b"),
        (lambda f: f["clusters"].append("b"), "warn ports: 1 other Ray cluster on this host"),
        (lambda f: listen(f, 8265), "trouble dashboard: listens on 0.0.0.0:8265"),
        (lambda f: listen(f, 4711), "warn exposed: 4711: ports of Ray on all interfaces"),
        (
            lambda f: listen(f, 40001, address="10.0.0.2"),
            "warn exposed: 10.0.0.2:40001: of an instance, outside the data network 10.1",
        ),
        (lambda f: listen(f, 6384), "warn exposed: 6384: metrics, readable without"),
        (lambda f: f["folders"].update({"run folder": folder(GIB)}), "warn run folder: 1.0 GiB free"),
        (lambda f: f["folders"].update({"run folder": folder(9)}), "trouble run folder: 0.0 GiB free"),
        (lambda f: f["folders"].update(cache=folder(is_writable=False)), "trouble cache: is not writable by me"),
        (lambda f: f["folders"].update({"object store": folder(9)}), "warn object store: 0.0 GiB free"),
        (lambda f: f["folders"]["data set"].update(exists=False), "trouble data set: /f does not exist"),
        (lambda f: f["folders"]["data set"].update(is_empty=True), "trouble data set: /f is empty"),
        (lambda f: f.update(open_files=1024), "warn limits: at most 1024 open files"),
        (lambda f: f.update(token={"path": "t", "error": "No such file"}), "trouble token: t: No such file"),
        (lambda f: f["token"].update(mode="0644"), "trouble token: has mode 0644: other users can read it"),
    ],
)
def test_a_problem_is_reported_with_its_host_and_what_to_do(change: Callable[[Dict[str, Any]], Any], line: str) -> None:
    level, what, words = re.split(r"(?<=^trouble) |(?<=^warn) |: ", line, maxsplit=2)
    found = [finding for finding in bad(on_second(change)) if finding.what == what]
    assert [finding.level for finding in found] == [level]
    assert words in found[0].text
    assert found[0].host in (HOSTS[1], "")
    assert found[0].hint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f["token"].update(sha256="ef" * 32), "(sha256 cdcdcdcdcdcd: 10.0.0.1; efefefefefef: 10.0.0.2)"),
        (lambda f: f["python"].update(version="3.8.11"), "Python differs: 3.8.10: 10.0.0.1; 3.8.11: 10.0.0.2"),
        (lambda f: f["python"]["packages"].update(torch="2.1.0"), "torch differs: 2.0.1: 10.0.0.1; 2.1.0: 10.0.0.2"),
        (lambda f: f["python"].update(raypod_sha256="ef" * 32), "raypod's files differs: abababababab: 10.0.0.1"),
    ],
)
def test_versions_and_tokens_must_be_the_same_on_all_hosts(change: Callable[[Dict[str, Any]], Any], words: str) -> None:
    (finding,) = bad(on_second(change))
    what = "token" if "sha256 " in words else "same everywhere"
    assert (finding.level, finding.host, finding.what) == (TROUBLE, "", what)
    assert words in finding.text


@pytest.mark.parametrize(
    ("other", "text"),
    [("9.5.0", "pillow differs: 10: 10.0.0.1; 9: 10.0.0.2"), ("10.4.0", None), (None, "None: 10.0.0.2")],
)
def test_the_decoder_of_the_data_set_has_the_same_major_version(other: Optional[str], text: Optional[str]) -> None:
    pod = healthy()
    for name, version in zip(HOSTS, ("10.0.1", other)):
        pod[name]["python"]["packages"]["pillow"] = version
    assert bad(pod) == [], "a run without images"
    found = bad(pod, dataclasses.replace(EXPECTED, decoder="pillow"))
    assert [each.level for each in found] == [TROUBLE] * (text is not None)
    assert all(str(text) in each.text for each in found)


def test_a_ray_version_without_tokens_is_reported_with_what_to_do() -> None:
    pod = healthy()
    for facts in pod.values():
        facts["python"]["packages"]["ray"] = "2.10.0"
    found = bad(pod)
    assert {(finding.level, finding.what) for finding in found} == {(WARN, "token")}
    assert "Ray 2.10.0 does not support token authentication" in found[0].text
    for words in ("firewall", "enable TLS: see docs/explanation/security.md"):
        assert words in found[0].hint


@pytest.mark.parametrize(
    ("answer", "level", "words"),
    [
        (gcs.Answer(gcs.REFUSED, "", b""), OK, "refuses requests without the token"),
        (gcs.Answer(gcs.SILENT, "No reply", b""), OK, "no answer at 10.0.0.1:6379 without a token (No reply)"),
        (gcs.Answer(gcs.ANSWERED, "2.60.0", b""), TROUBLE, "answers requests without a token"),
        (gcs.Answer(gcs.ANSWERED, "2.10.0", b""), WARN, "answers every request"),
    ],
)
def test_the_gcs_must_refuse_requests_without_a_token(answer: gcs.Answer, level: str, words: str) -> None:
    found = [each for each in examine(Expected(POD, gcs=answer), healthy()) if each.what == "closed"]
    assert [each.level for each in found] == [level]
    assert words in found[0].text


@pytest.mark.parametrize(
    ("release", "address", "words"),
    [
        ("0.28.1", "127.0.1.1", "its own name h resolves to the loopback address 127.0.1.1, and Horovod 0.28.1 "),
        ("0.28.1", "::1", "its own name h resolves to the loopback address ::1"),
        ("0.28.1", "", "its own name h does not resolve to an own address (unknown)"),
        ("0.28.1", "10.0.0.2", ""),
        ("0.28.1+gloo.iface", "127.0.1.1", ""),
        (None, "127.0.1.1", ""),
    ],
)
def test_other_hosts_must_reach_an_installed_horovod(release: Optional[str], address: str, words: str) -> None:
    pod = healthy()
    for facts in pod.values():
        facts["python"]["packages"]["horovod"] = release
        facts["own_name"] = {"address": "10.0.0.1", "error": ""}
    pod[HOSTS[1]]["own_name"] = {"address": address, "error": "" if address else "unknown"}
    texts = [f"{each.host} {each.text} {each.hint}" for each in bad(pod)]
    assert len(texts) == bool(words)
    for text in texts:
        assert text.startswith(f"{HOSTS[1]} {words}")
        assert "scripts/install_horovod.sh" in text
        assert "/etc/hosts" in text
    assert bad(pod, dataclasses.replace(EXPECTED, may_use_horovod=False)) == []


@pytest.mark.parametrize(
    ("state", "clusters", "port", "text"),
    [
        (gcs.SILENT, [], 22, "Ray does not run on the head yet"),
        (gcs.SILENT, ["other"], 6379, "Ray does not run on the head yet"),
        (gcs.SILENT, ["pod"], 6379, ""),  # a firewall
        (gcs.SILENT, ["pod"], 22, "the GCS has ended, and the other processes of Ray follow"),
        (gcs.SILENT, [None], 6379, ""),  # of which cluster is unknown
        (gcs.REFUSED, [], 6379, ""),
    ],
)
def test_a_pod_without_ray_is_ready_for_its_start(state: str, clusters: Any, port: int, text: str) -> None:
    pod, is_stopped = healthy(), bool(text)
    pod[HOSTS[0]]["clusters"] = clusters
    listen(pod[HOSTS[0]], port)
    findings = examine(dataclasses.replace(EXPECTED, gcs=gcs.Answer(state, "", b""), file="my.yaml"), pod)
    stopped = Finding(OK, HOSTS[0], "Ray cluster", text, "raypod up my.yaml")
    assert [each for each in findings if each.what == "Ray cluster"] == ([stopped] if is_stopped else [])
    start = "ready for raypod up my.yaml: 2 hosts, " if is_stopped else "ready: 2 hosts, "
    assert render_findings(findings, HOSTS).splitlines()[-1].startswith(start)
    pod[HOSTS[1]] = "no route"
    findings = examine(dataclasses.replace(EXPECTED, gcs=gcs.Answer(state, "", b"")), pod)
    assert render_findings(findings, HOSTS).splitlines()[-1].startswith("not ready: 2 hosts, ")


def test_an_unknown_interpreter_is_named_once_with_its_setting() -> None:
    cluster = dataclasses.replace(POD, python="python4")
    expected = dataclasses.replace(EXPECTED, cluster=cluster, python_setting="metadata.raypod.python in line 7")
    (finding,) = bad(on_second(lambda facts: facts.update(python={"error": "python4 does not exist"})), expected)[:1]
    assert finding.text == "python4 does not exist"
    assert finding.hint == (
        "`raypod up` installs it by setup_commands of the cluster file; if it has run, "
        "correct metadata.raypod.python in line 7"
    )


def test_equal_findings_are_one_row_and_long_ones_are_folded() -> None:
    pod = on_second(lambda facts: facts.update(open_files=1024))
    lines = render_findings(examine(EXPECTED, pod), HOSTS).splitlines()
    assert [line for line in lines if "SDK" in line] == ["ok       SDK             all 2    poptorch 3.3.0"]
    assert any(line.startswith("warn     limits          10.0.0.2 at most 1024 open files; raise") for line in lines)
    assert lines[-1].startswith("ready: 2 hosts, ")
    assert lines[-1].endswith(" 1 warn, 0 trouble")
    text = "3.11.2; ray 2.60.0, torch 2.13.0+cpu, raypod 0.1.0"
    findings = [Finding(OK, host, "python", text) for host in HOSTS]
    assert render_findings(findings, HOSTS, 80).splitlines()[1:3] == [
        "ok       python          all 2 3.11.2; ray 2.60.0, torch 2.13.0+cpu, raypod",
        "                               0.1.0",
    ]
    assert render_findings(findings, HOSTS).splitlines()[1].endswith(text)


FAILED, DONE = ProgramEnd(0, 1, "exit code 1"), ProgramEnd(0, 0, "exit code 0")
BEGUN: Dict[str, Any] = {"call": {"limit_s": 300.0}, "compilation": {}}
END = {"call_s": 1.0, "compile_s": 0.5, "micro_batches": 8}
REFUSED = Finding(TROUBLE, "main.py:3", "operator", "aten::tril: PopTorch does not support it")


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome(), "no call of a PopTorch model within 9 s"),
        (Outcome(end=DONE), "ended without a call"),
        (
            Outcome(end=FAILED, last_line="ValueError: x"),
            r"failed before its first call \(exit code 1\): ValueError: x",
        ),
        (Outcome(end=ProgramEnd(0, 127, "cannot start x: No such file")), "--program: cannot start x: No such file"),
    ],
)
def test_a_program_without_a_call_is_a_mistake(outcome: Outcome, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        conclude(outcome, 9.0)


@pytest.mark.parametrize(
    ("outcome", "level", "text"),
    [
        (Outcome(events={**BEGUN, "end": END}, end=DONE), OK, "the limit there is 300 s"),
        (Outcome(events={**BEGUN, "end": {**END, "call_s": 301.0}}), WARN, "an IPU ends calls of more than 300 s"),
        (Outcome(events=BEGUN), WARN, "not finished after 9 s"),
        (Outcome(events=BEGUN, end=ProgramEnd(0, 137, "killed by signal 9")), TROUBLE, "killed by signal 9"),
        (Outcome(events={"compilation": {}}, end=DONE), OK, "makes no call"),
    ],
)
def test_the_end_of_the_call_is_a_finding(outcome: Outcome, level: str, text: str) -> None:
    (found,) = conclude(outcome, 9.0)
    assert (found.level, text in found.text) == (level, True)


def test_trouble_comes_first_and_equal_findings_are_one_row() -> None:
    warning = Finding(WARN, "", "warning", "w")
    places = [Finding(TROUBLE, f"main.py:{line}", "operator", REFUSED.text) for line in (3, 4, 3)]
    found = conclude(Outcome([warning, *places], {**BEGUN, "end": END}, DONE), 9.0)
    header, row, *_, summary = render(found).splitlines()
    assert header.split() == ["what", "where", "finding"]
    assert "main.py:3, main.py:4  aten::tril" in row
    assert summary == "not ready: 1 ok, 1 warn, 2 trouble"


PROGRAM = """
import os, pathlib, subprocess, sys, tempfile, poptorch, torch

class Net(torch.nn.Module):
    def forward(self, x):
        return x.tril()

assert poptorch.ipuHardwareIsAvailable(2)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
tempfile.mkstemp()
pathlib.Path("facts").write_text(f"{child.pid} {tempfile.gettempdir()}")
model = poptorch.inferenceModel(Net())
while True:
    model(torch.ones(2, 2))
"""


def test_a_program_is_checked_for_one_call_and_leaves_nothing(
    processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program_check, "TIMEOUT_S", 200.0)
    Path("main.py").write_text(textwrap.dedent(PROGRAM))
    assert main(["doctor", "--program", "python main.py", "--json"]) == 2
    refused, *others = json.loads(capsys.readouterr().out)["findings"]
    assert (refused["level"], refused["where"], refused["what"]) == ("trouble", "main.py:6", "operator")
    assert [each["what"] for each in others] == ["memory", "call"]
    pid, folder = Path("facts").read_text().split()
    assert wait_until(lambda: not psutil.pid_exists(int(pid)))
    assert not Path(folder).exists()
    assert {each.name for each in tmp_path.iterdir()} == {"main.py", "facts"}
