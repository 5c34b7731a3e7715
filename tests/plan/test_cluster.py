from __future__ import annotations

from pathlib import Path

import pytest

from raypod.errors import ClusterError
from raypod.plan.cluster import LOCAL, VipuPartition, read_cluster

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


def test_every_mistake_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    text = """cluster_name: pod
provider: {type: local, head_ip: a, worker_ips: [b, c], worker_ip: d}
max_worker: 3
max_workers: 1
auth: {ssh_usr: me}
metadata:
  raypod:
    ipus_per_host: 16
    instances_per_host: 3
    data_network: 10.0.0
    numa: perhaps
    vipu: {prot: 1, size: 40, gcds: 7}
    numa: true
"""
    with pytest.raises(ClusterError) as told:
        read_cluster(write(tmp_path, text))
    lines = [line.strip() for line in str(told.value).splitlines()]
    assert lines[0].endswith(f"has {len(lines) - 1} mistakes")
    for line, words in [
        (2, "provider.worker_ip; did you mean worker_ips?"),
        (3, "max_worker; did you mean max_workers?"),
        (4, "max_workers = 1, and worker_ips has 2"),
        (5, "auth.ssh_usr; did you mean ssh_user?"),
        (9, "16 IPUs of a host cannot be divided equally between 3 instances"),
        (10, "data_network = '10.0.0' must be a network"),
        (12, "vipu.prot; did you mean port?"),
        (12, "partition is missing"),
        (12, "40 IPUs: the size must be a power of two"),
        (12, "7 GCDs for 3 hosts x 3 instances: one for each (9)"),
        (13, "numa is given twice, first in line 11"),
    ]:
        assert any(each.startswith(f"line {line}: ") and words in each for each in lines), words


def test_a_single_mistake_is_a_single_line(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as told:
        read_cluster(write(tmp_path, "provider:\n  type: local\n  head_ip: a\n  worker_ips: 3\n"))
    assert str(told.value).endswith("pod.yaml, line 4: provider.worker_ips must be a list of texts")


def test_what_ray_has_no_place_for_is_read(tmp_path: Path) -> None:
    cluster = read_cluster(
        write(
            tmp_path,
            "cluster_name: pod\nprovider: {type: local, head_ip: a, worker_ips: [b]}\nauth: {ssh_user: me}\n"
            "metadata: {raypod: {instances_per_host: 2, data_network: 10.1.0.0/16, numa: true, sdk: /opt/sdk, "
            "python: /p, vipu: {partition: p, server: v, gcds: 4, link_domains: 2}}}\n"
            "head_start_ray_commands: [RAY_AUTH_MODE=token ray start --head --port=7000]\n",
        )
    )
    assert (cluster.num_instances, cluster.data_network, cluster.numa) == (4, "10.1.0.0/16", True)
    assert (cluster.sdk, cluster.python, cluster.ssh.user) == ("/opt/sdk", "/p", "me")
    assert cluster.vipu == VipuPartition("p", server="v", gcds=4, link_domains=2)
    assert (cluster.gcs_address, cluster.auth_mode) == ("a:7000", "token")
