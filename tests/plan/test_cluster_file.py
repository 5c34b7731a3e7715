"""Cluster files: what raypod reads from them, and each mistake with its line."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest

from raypod.errors import ClusterError
from raypod.plan.cluster import LOCAL, VipuPartition, read_cluster
from raypod.plan.cluster_file import parse

GOOD = """
cluster_name: pod64
provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2, 10.0.0.3]}
head_start_ray_commands:
  - ray stop
  - ray start --head --resources='{"IPU":16}'
"""
PROVIDER, LINES = "provider: {type: local, head_ip: a}\n", "provider:\n  type: local\n  head_ip: a\n"


def write(folder: Path, text: str) -> str:
    (folder / "pod.yaml").write_text(text)
    return str(folder / "pod.yaml")


def test_hosts_have_the_order_of_the_file_and_the_ipus_of_the_start_commands(tmp_path: Path) -> None:
    assert read_cluster(None) is LOCAL
    cluster = read_cluster(write(tmp_path, GOOD))
    addresses = [host.address for host in cluster.hosts]
    assert (cluster.name, addresses) == ("pod64", ["10.0.0.1", "10.0.0.2", "10.0.0.3"])
    assert {host.ipus for host in cluster.hosts} == {16}
    text = GOOD + "metadata: {raypod: {ipus_per_host: 4, cpus_per_host: 64}}\n"
    host = read_cluster(write(tmp_path, text)).hosts[0]
    assert (host.ipus, host.cpus) == (4, 64)
    workers = "worker_start_ray_commands:\n  - ray start --resources='{\"IPU\":4}'\n"
    assert [host.ipus for host in read_cluster(write(tmp_path, GOOD + workers)).hosts] == [16, 4, 4]


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
        (PROVIDER + "metadata: {raypod: {ipus_per_host: many}}", "ipus_per_host = 'many'"),
        ("provider: 3", "provider must be a mapping"),
        ("[]", "expected the keys"),
        ("apiVersion: ray.io/v1\nkind: RayCluster", r"those of a Kubernetes file \(kind RayCluster\): kubectl applies"),
        ("a: [", "is not YAML, line 1"),
        (
            "a:\n  b: 1\n c: 2",
            r"is not YAML, line 3: .*begins in line 1\): indent it like the other keys of this section",
        ),
        (f"{LINES}  worker_ips: 3", "pod.yaml, line 4: provider.worker_ips must be a list"),
        (PROVIDER + "max_worker: 3\nauth: {ssh_usr: me}", "^.*pod.yaml has 2 mistakes\n +line 2: .*\n +line 3: .*$"),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        read_cluster(write(tmp_path, text))
    with pytest.raises(ClusterError, match=r"/nowhere/pod\.yaml"):
        read_cluster("/nowhere/pod.yaml")


def mistakes_of(text: str) -> List[str]:
    return [str(mistake) for mistake in parse(text).mistakes]


def test_every_mistake_is_recorded_with_its_line() -> None:
    mistakes = mistakes_of("""cluster_name: pod
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
""")
    for line, words in [
        (2, "provider.worker_ip; did you mean worker_ips?"),
        (3, "max_worker; did you mean max_workers?"),
        (4, "max_workers = 1, but worker_ips has 2"),
        (5, "auth.ssh_usr; did you mean ssh_user?"),
        (9, "16 IPUs per host cannot be divided equally between 3 instances"),
        (10, "data_network = '10.0.0' must be a network"),
        (12, "vipu.prot; did you mean port?"),
        (12, "partition is missing"),
        (12, "40 IPUs, must be a power of two"),
        (12, "7 GCDs for 3 hosts x 3 instances: must be one for each (9)"),
        (13, "numa is a duplicate key, first given in line 11"),
    ]:
        assert any(each.startswith(f"line {line}: ") and words in each for each in mistakes), words


def test_a_host_that_is_no_address_is_a_mistake_in_its_line() -> None:
    wrong = ("10.0.0.999", "10.0.0", "1.2.3.4.5", "node.7", "fe80::zz", "http://a", "a b", "-a", "0.0.0.0", "a:22")
    for address in wrong:
        for text in (
            f'{LINES}  worker_ips:\n  - "{address}"\n',
            f'\n\nprovider:\n  type: local\n  head_ip: "{address}"\n',
        ):
            (mistake,) = mistakes_of(text)
            assert mistake.startswith("line 5: provider.")
            assert mistake.endswith(f"{address!r} is neither a host name nor an IP address")
    for address in ("10.0.0.9", "fe80::1", "fe80::1%eth0", "::1", "node7", "node-7.pod", "a_b.c."):
        assert not mistakes_of(f'provider: {{type: local, head_ip: "{address}"}}\n')


def test_workers_that_are_no_list_or_too_few_and_a_section_that_is_not_indented_are_one_mistake() -> None:
    for value, written in (
        ("10.7.0.1", "[10.7.0.1]"),
        ("10.7.0.1, 10.7.0.2", "[10.7.0.1, 10.7.0.2]"),
        ("a b", "[a, b]"),
    ):
        text = f"{LINES}  worker_ips: {value}\nmin_workers: 2\nmax_workers: 2\n"
        assert mistakes_of(text) == [f"line 4: provider.worker_ips must be a list, as in {written}"]
    for workers, has in (("[]", "0 entries"), ("[b]", "1 entry"), ("[b, c, d]", "3 entries")):
        (mistake,) = mistakes_of(f"provider: {{type: local, head_ip: a, worker_ips: {workers}}}\nmin_workers: 2\n")
        assert mistake == f"line 2: min_workers = 2, but worker_ips has {has}; `ray up` would not start all of them"
    mistakes = mistakes_of(f"{PROVIDER}metadata:\nraypod:\n  numa: true\n")
    assert mistakes == ["line 3: raypod belongs under metadata: indent it"]


def test_duplicate_keys_are_mistakes_at_every_level_and_may_override_merged_ones() -> None:
    text = "provider: {type: local, head_ip: a, worker_ips: [b, {x: 1, x: 2}]}\n"
    assert mistakes_of(f"{text}file_mounts:\n  /a: b\n  /a: c\nauth: {{}}\nauth: {{ssh_user: me}}\n") == [
        "line 1: provider.worker_ips: x is a duplicate key, first given in line 1",
        "line 4: file_mounts: /a is a duplicate key, first given in line 3",
        "line 6: auth is a duplicate key, first given in line 5",
    ]
    assert not mistakes_of(f"auth: &auth {{ssh_user: a}}\n{PROVIDER}metadata: {{x: {{<<: *auth, ssh_user: b}}}}\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("auth: {ssh_user: -oProxyCommand=sh}", "auth.ssh_user: '-oProxyCommand=sh' is not the name of a user"),
        ("auth: {zzz: 1}", "unknown key auth.zzz; known: ssh_user, ssh_private_key, "),
        ("metadata: {vipu: {size: 4}}", "metadata.vipu has no effect; did you mean metadata.raypod.vipu?"),
        ("metadata: {raypodd: {numa: true}}", "unknown key metadata.raypodd; did you mean raypod?"),
        ("metadata: {raypod: {vipu: {partition: p, port: 65536}}}", "vipu.port = 65536 must be at most 65535"),
        ("metadata: {raypod: {vipu: {partition: p, server: 10.0.0.256}}}", "'10.0.0.256' is neither"),
        ("metadata: {raypod: {ipus_per_host: 1.5}}", "ipus_per_host = 1.5 must be an integer"),
        ("metadata: {raypod: {ipus_per_host: -4}}", "ipus_per_host = -4 must be an integer of at least 1"),
        ("metadata: {raypod: {instances_per_host: .nan}}", "instances_per_host = nan must be an integer"),
        ("raypod: {numa: true}", "raypod belongs under metadata: write metadata: above it and indent it"),
        ("metadata: {raypod: []}", "metadata.raypod must be a mapping, not list"),
        ("setup_commands: [true]", "setup_commands has the entry True, which must be a string"),
        ("setup_commands: [null]", "setup_commands has the entry None, which must be a string"),
    ],
)
def test_wrong_keys_and_values_are_mistakes(line: str, words: str) -> None:
    (mistake,) = mistakes_of(f"{PROVIDER}{line}\n")
    assert mistake.startswith("line 2: ")
    assert words in mistake
