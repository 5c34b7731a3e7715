"""Hosts of a cluster file, whose monitors are reached by a fake `ssh` that runs the command here."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from raypod.observe.monitor.log_lines import LogTail, RemoteLog
from raypod.observe.monitor.model import HostFacts, Pod, Usage, to_json
from raypod.observe.monitor.pod_source import PodSource, RemoteHost, build_pod
from raypod.plan.cluster import Cluster, Host, Ssh
from raypod.runtime import ssh
from raypod.system.files import strict_json
from tests.support.bounded import wait_until
from tests.support.monitor_models import instance, make_run

CLUSTER = Cluster("far", (Host("203.0.113.1", "203.0.113.1", 8), Host("203.0.113.2", "203.0.113.2", 8)), ssh=Ssh("u"))
FEED = "for last; do :; done; case $* in *113.2*) echo no route >&2; exit 255;; esac\n"


@pytest.fixture
def use_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: None) -> Callable[[str], None]:
    """Let `ssh` run a script."""

    def use(script: str) -> None:
        (tmp_path / "ssh").write_text(f'#!/bin/sh\n{FEED}echo "$last" > {tmp_path}/asked\n{script}\n')
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return use


def feed(folder: Path, **changed: Any) -> None:
    facts = HostFacts("head")
    pod = build_pod("head", 0.0, [facts], [make_run(**{"host": "head", **changed})])
    (folder / "feed.json").write_text(strict_json(to_json(pod, facts)) + "\n")


def problems(pod: Pod) -> Dict[str, str]:
    return {host.name: str(host.problem) for host in pod.hosts}


def test_the_hosts_of_a_cluster_file_with_the_runs_of_their_monitors(use_ssh: Any, tmp_path: Path) -> None:
    feed(tmp_path, instances=[instance(0, host="localhost")], hosts={})
    use_ssh(f"echo 'Welcome {{'; cat {tmp_path}/feed.json; exec sleep 60")
    with PodSource(0.2, cluster=CLUSTER) as source:
        source.wait()
        pod = source.poll()
    assert "raypod monitor --json --follow --interval 0.2" in (tmp_path / "asked").read_text()
    assert problems(pod) == {"203.0.113.1": "None", "203.0.113.2": "unreachable (no route)"}
    (run,) = pod.runs
    assert (run.host, run.instances[0].host, run.problem) == ("203.0.113.1", "203.0.113.1", None)
    states = [[each.state for each in host.ipus] for host in pod.hosts]
    assert states == [["training"] * 2 + ["idle"] * 6, []]


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo 'No module named raypod' >&2; exit 1", "No module named raypod"),
        (r"printf 'u@h: Permission denied.\r\n' >&2; exit 255", "unreachable (u@h: Permission denied.)"),
        ("exit 255", "unreachable (ssh: no connection)"),
        ("exit 3", "the monitor there ended with exit code 3"),
        ('echo "{}"; echo "[1]"; echo "{"; exit 4', "the monitor there ended with exit code 4"),
        ("", "ssh: No such file or directory"),
    ],
)
def test_a_host_whose_monitor_fails(use_ssh: Any, script: str, problem: str, tmp_path: Path, monkeypatch: Any) -> None:
    use_ssh(script)
    if not script:
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    host = RemoteHost(CLUSTER, CLUSTER.hosts[0], 0.2)
    try:
        assert host.first_try.wait(20)
        facts, runs, found = host.poll()
        assert (facts.name, runs, found) == ("203.0.113.1", [], problem)
    finally:
        host.stop()
        host.join()


def test_a_passphrase_is_named(use_ssh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ssh("echo 'u@h: Permission denied (publickey).' >&2; exit 255")
    key = tmp_path / "key"
    key.touch()
    monkeypatch.setattr(ssh, "has_passphrase", lambda path: path == str(key))
    cluster = dataclasses.replace(CLUSTER, ssh=dataclasses.replace(CLUSTER.ssh, private_key=str(key)))
    host = RemoteHost(cluster, cluster.hosts[0], 0.2)
    try:
        assert host.first_try.wait(20)
        assert f"(publickey). ({key} has a passphrase, and no ssh agent here has the key" in str(host.poll()[2])
    finally:
        host.stop()
        host.join()


def test_a_host_that_becomes_silent_keeps_its_last_state(use_ssh: Any, tmp_path: Path, monkeypatch: Any) -> None:
    feed(tmp_path)
    monkeypatch.setattr("raypod.observe.monitor.pod_source._SILENT_S", 0.3)
    use_ssh(f"cat {tmp_path}/feed.json; exec sleep 60")
    with PodSource(0.1, cluster=CLUSTER) as source:
        source.wait()
        assert wait_until(lambda: "no data for" in problems(source.poll())["203.0.113.1"], 20)
        (run,) = source.poll().runs
        assert "no data for" in str(run.problem)
        assert run.update == 250


def test_a_log_on_another_host_is_followed(use_ssh: Any, tmp_path: Path) -> None:
    log = tmp_path / "a log"
    log.write_text("one\n")
    use_ssh('exec sh -c "$last"')
    with PodSource(0.1, cluster=CLUSTER) as source:
        following = source.log(make_run(host="203.0.113.1"), str(log))
        try:
            assert wait_until(lambda: following.lines() == ["one"], 20)
            with log.open("a") as file:
                file.write("two\x1b[2J\n")
            assert wait_until(lambda: following.lines() == ["one", "two"], 20)
        finally:
            following.close()
        assert isinstance(source.log(make_run(host="elsewhere"), str(log)), LogTail)
    unreachable = RemoteLog(CLUSTER, CLUSTER.hosts[1], "/log")
    assert wait_until(lambda: unreachable.lines()[-1:] == ["(the connection has ended with exit code 255)"], 20)
    assert unreachable.lines()[0] == "no route"
    unreachable.close()


def test_the_facts_for_other_monitors_have_the_rates_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    received = iter((1000, 3000))
    source = PodSource(0.2)
    usage = lambda: Usage(network_received_bytes=next(received), network_sent_bytes=0)  # noqa: E731
    monkeypatch.setattr(source._this_host, "poll", lambda: (HostFacts("here", usage()), []))
    source.poll()
    assert source.facts.usage.received_bytes_per_s is None
    source.poll()
    assert (source.facts.usage.received_bytes_per_s or 0.0) > 0.0
