"""`raypod cluster-file`: the cluster file of a running Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import yaml
from ray_cluster import SECOND_HOST, ray_cluster

from raypod.__main__ import main
from raypod.fleet.ray_cluster_file import cluster_of_nodes
from raypod.plan.cluster import read_cluster

# Ray leaves log files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
HEAD = {"node:__internal_head__": 1.0}


def node(address: str, **resources: float) -> Dict[str, Any]:
    return {"NodeManagerAddress": address, "Resources": resources}


def test_raypod_reads_the_file(tmp_path: Path) -> None:
    nodes = [node("10.0.0.2", IPU=16.0, **HEAD), node("10.0.0.3", IPU=16.0)]
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster_of_nodes(nodes, "job-7", 2)))
    cluster = read_cluster(str(tmp_path / "cluster.yaml"))
    assert (cluster.name, [host.address for host in cluster.hosts]) == ("job-7", ["10.0.0.2", "10.0.0.3"])
    assert ([host.ipus for host in cluster.hosts], cluster.num_instances) == ([16, 16], 4)
    without = cluster_of_nodes([node("10.0.0.2", **HEAD)], "pod", 1)
    assert "ipus_per_host" not in without["metadata"]["raypod"]


def test_the_nodes_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cluster.yaml"
    with ray_cluster() as started:
        own, address = started.nodes[0].node_ip_address, started.cluster.address
        started.ray.shutdown()  # the command is a driver of its own
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert main(["cluster-file", "--hosts", "2", "--output", str(output), "--wait-s", "60"]) == 0
        assert f"{output}: 2 hosts: {own}, {SECOND_HOST}" in capsys.readouterr().out
        assert main(["cluster-file", "--hosts", "3", "--output", str(tmp_path / "no"), "--wait-s", "0"]) == 2
        assert "2 of 3 Ray nodes have joined within 0 s" in capsys.readouterr().err
    assert [host.address for host in read_cluster(str(output)).hosts] == [own, SECOND_HOST]
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "x"], "--hosts"),
        (["--hosts", "0", "--output", "x"], "--hosts 0 must be at least 1"),
        (["--hosts", "1", "--output", "x", "--wait-s", "-1"], "--wait-s -1 must be between"),
        (["--hosts", "1", "--output", "x"], "no Ray cluster is running on this host"),
    ],
)
def test_mistakes_are_one_line(
    words: List[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert main(["cluster-file", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())
