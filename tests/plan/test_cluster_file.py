from __future__ import annotations

from typing import List

import pytest

from raypod.plan.cluster_file import parse


def test_every_mistake_is_recorded_with_its_line() -> None:
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
    mistakes = [str(mistake) for mistake in parse(text).mistakes]
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


def test_an_unknown_key_without_a_near_one_lists_the_known_ones() -> None:
    (mistake,) = parse("provider: {type: local, head_ip: a}\nauth: {zzz: 1}\n").mistakes
    assert str(mistake).startswith("line 2: unknown key auth.zzz; known: ssh_user, ssh_private_key, ")


def mistakes_of(text: str) -> List[str]:
    return [str(mistake) for mistake in parse(text).mistakes]


@pytest.mark.parametrize(
    "address", ["10.0.0.999", "10.0.0", "1.2.3.4.5", "node.7", "fe80::zz", "http://a", "a b", "-a", "0.0.0.0", "a:22"]
)
def test_a_host_that_is_no_address_is_a_mistake_in_its_line(address: str) -> None:
    words = f"{address!r} is neither a host name nor an IP address"
    for text in (
        f'provider:\n  type: local\n  head_ip: a\n  worker_ips:\n  - b\n  - "{address}"\n',
        f'cluster_name: c\n\n\nprovider:\n  type: local\n  head_ip: "{address}"\n',
    ):
        (mistake,) = mistakes_of(text)
        assert mistake.startswith("line 6: provider.")
        assert mistake.endswith(words)


@pytest.mark.parametrize("address", ["10.0.0.9", "fe80::1", "fe80::1%eth0", "::1", "node7", "node-7.pod", "a_b.c."])
def test_names_and_addresses_of_hosts(address: str) -> None:
    assert not mistakes_of(f'provider: {{type: local, head_ip: "{address}"}}\n')


@pytest.mark.parametrize(
    ("value", "written"),
    [("10.77.0.12", "[10.77.0.12]"), ("10.77.0.12, 10.77.0.13", "[10.77.0.12, 10.77.0.13]"), ("a b", "[a, b]")],
)
def test_workers_that_are_no_list_are_one_mistake(value: str, written: str) -> None:
    text = f"provider:\n  type: local\n  head_ip: a\n  worker_ips: {value}\nmin_workers: 2\nmax_workers: 2\n"
    assert mistakes_of(text) == [f"line 4: provider.worker_ips must be a list, as in {written}"]


@pytest.mark.parametrize(("workers", "has"), [("[]", "0 entries"), ("[b]", "1 entry"), ("[b, c, d]", "3 entries")])
def test_a_wrong_number_of_workers_is_a_mistake(workers: str, has: str) -> None:
    (mistake,) = mistakes_of(f"provider: {{type: local, head_ip: a, worker_ips: {workers}}}\nmin_workers: 2\n")
    assert mistake == f"line 2: min_workers = 2, but worker_ips has {has}; `ray up` would not start all of them"


def test_duplicate_keys_are_mistakes_at_every_level() -> None:
    text = """provider: {type: local, head_ip: a, worker_ips: [b, {x: 1, x: 2}]}
file_mounts:
  /a: b
  /a: c
auth: {}
auth: {ssh_user: me}
"""
    assert mistakes_of(text) == [
        "line 1: provider.worker_ips: x is a duplicate key, first given in line 1",
        "line 4: file_mounts: /a is a duplicate key, first given in line 3",
        "line 6: auth is a duplicate key, first given in line 5",
    ]


def test_a_key_may_override_a_merged_one() -> None:
    text = "auth: &auth {ssh_user: a}\nprovider: {type: local, head_ip: a}\nmetadata: {x: {<<: *auth, ssh_user: b}}\n"
    assert not mistakes_of(text)


@pytest.mark.parametrize(
    ("line", "words"),
    [
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
    (mistake,) = mistakes_of(f"provider: {{type: local, head_ip: a}}\n{line}\n")
    assert mistake.startswith("line 2: ")
    assert words in mistake


def test_a_section_of_raypod_that_is_not_indented_is_named() -> None:
    mistakes = mistakes_of("provider: {type: local, head_ip: a}\nmetadata:\nraypod:\n  numa: true\n")
    assert mistakes == ["line 3: raypod belongs under metadata: indent it"]
