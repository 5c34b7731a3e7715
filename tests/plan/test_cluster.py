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


def test_without_a_file_the_cluster_is_this_host() -> None:
    assert read_cluster(None) is LOCAL


def test_hosts_have_the_order_of_the_file(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, GOOD))
    assert cluster.name == "pod64"
    assert [host.address for host in cluster.hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert {host.ipus for host in cluster.hosts} == {16}


def test_metadata_overrides_the_start_commands(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, GOOD + "metadata: {raypod: {ipus_per_host: 4, cpus_per_host: 64}}\n"))
    assert (cluster.hosts[0].ipus, cluster.hosts[0].cpus) == (4, 64)


def test_settings_of_raypod_and_of_the_start_commands(tmp_path: Path) -> None:
    text = (
        "cluster_name: pod\nprovider: {type: local, head_ip: a, worker_ips: [b]}\nauth: {ssh_user: me}\n"
        "metadata: {raypod: {instances_per_host: 2, data_network: 10.1.0.0/16, numa: true, sdk: /opt/sdk, "
        "python: /p, vipu: {partition: p, server: v, gcds: 4, link_domains: 2}}}\n"
        "head_start_ray_commands: [RAY_AUTH_MODE=token ray start --head --port=7000]\n"
    )
    cluster = read_cluster(write(tmp_path, text))
    assert (cluster.num_instances, cluster.data_network, cluster.numa) == (4, "10.1.0.0/16", True)
    assert (cluster.sdk, cluster.python, cluster.ssh.user) == ("/opt/sdk", "/p", "me")
    assert cluster.vipu == VipuPartition("p", server="v", gcds=4, link_domains=2)
    assert (cluster.gcs_address, cluster.auth_mode) == ("a:7000", "token")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("provider: {type: aws}", "'aws'"),
        ("provider: {type: local}", "head_ip is missing"),
        ("provider: {type: local, head_ip: a, worker_ips: [b, b]}", "host b is listed 2 times"),
        ("provider: {type: local, head_ip: a}\nmetadata: {raypod: {ipus_per_host: many}}", "ipus_per_host = 'many'"),
        ("provider: 3", "provider must be a mapping"),
        ("[]", "expected the keys"),
        (
            "apiVersion: ray.io/v1\nkind: RayCluster\nspec: {}",
            r"keys of a Ray cluster file, found those of a Kubernetes file \(kind RayCluster\): kubectl applies it",
        ),
        ("a: [", "is not YAML, line 1"),
        (
            "a:\n    b: 1\n   c: 2",
            r"is not YAML, line 3: .*begins in line 1\): is its indentation that of its siblings\?",
        ),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        read_cluster(write(tmp_path, text))


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ClusterError, match=r"/nowhere/pod\.yaml"):
        read_cluster("/nowhere/pod.yaml")


def test_a_single_mistake_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as error:
        read_cluster(write(tmp_path, "provider:\n  type: local\n  head_ip: a\n  worker_ips: 3\n"))
    assert str(error.value).endswith("pod.yaml, line 4: provider.worker_ips must be a list of strings")


def test_several_mistakes_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as error:
        read_cluster(write(tmp_path, "provider: {type: local, head_ip: a}\nmax_worker: 3\nauth: {ssh_usr: me}\n"))
    lines = str(error.value).splitlines()
    assert lines[0].endswith("pod.yaml has 2 mistakes")
    assert [line.strip()[:7] for line in lines[1:]] == ["line 2:", "line 3:"]
