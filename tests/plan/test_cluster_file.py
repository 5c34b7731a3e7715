from __future__ import annotations

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
