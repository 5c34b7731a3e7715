from __future__ import annotations

from pathlib import Path

import pytest

from raypod.cluster import LOCAL, read_cluster
from raypod.errors import ClusterError

GOOD = """
cluster_name: pod64
provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2, 10.0.0.3]}
head_start_ray_commands:
  - ray stop
  - ray start --head --resources='{"IPU":16}'
"""


def write(folder: Path, text: str) -> str:
    (folder / "pod.yaml").write_text(text)
    return str(folder / "pod.yaml")


def test_no_file_is_this_host() -> None:
    assert read_cluster(None) is LOCAL


def test_hosts_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, GOOD))
    assert cluster.name == "pod64"
    assert [host.address for host in cluster.hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert {host.ipus for host in cluster.hosts} == {16}


def test_metadata_wins_over_the_start_commands(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, GOOD + "metadata: {raypod: {ipus_per_host: 4, cpus_per_host: 64}}\n"))
    assert (cluster.hosts[0].ipus, cluster.hosts[0].cpus) == (4, 64)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("provider: {type: aws}", "'aws'"),
        ("provider: {type: local}", "head_ip is missing"),
        ("provider: {type: local, head_ip: a, worker_ips: [b, b]}", "host b is listed 2 times"),
        ("provider: {type: local, head_ip: a}\nmetadata: {raypod: {ipus_per_host: many}}", "ipus_per_host = 'many'"),
        ("provider: 3", "provider must be a mapping"),
        ("[]", "expected the keys"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        read_cluster(write(tmp_path, text))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ClusterError, match=r"/nowhere/pod\.yaml"):
        read_cluster("/nowhere/pod.yaml")
