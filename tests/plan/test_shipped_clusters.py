"""The cluster files of `cluster/`: valid for `ray up` and for raypod, and identical except for their hosts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Callable

import pytest
import yaml

from raypod.__main__ import main
from raypod.plan.cluster import read_cluster

FOLDER = Path(__file__).resolve().parents[2] / "cluster"
HOSTS = {"pod4": 1, "pod16": 1, "pod64": 4, "pod128": 8, "pod256": 16, "emulated-pod": 3}
IPUS = {"pod4": 4, "pod16": 16, "pod64": 64, "pod128": 128, "pod256": 256, "emulated-pod": 0}


def document(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return loaded


def test_every_pod_size_has_a_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml") if not path.stem.startswith("kuberay")} == set(HOSTS)


def test_ray_accepts_the_files(run_python: Callable[[str], str]) -> None:
    output = run_python(
        "import json, sys, yaml\n"
        "from pathlib import Path\n"
        "from ray.autoscaler._private.util import prepare_config, validate_config\n"
        f"for name in {list(HOSTS)}:\n"
        f"    path = Path({str(FOLDER)!r}, name + '.yaml')\n"
        "    prepared = prepare_config(yaml.safe_load(path.read_text()))\n"
        "    validate_config(prepared)\n"
        "    (kind,) = prepared['available_node_types'].values()\n"
        "    print(json.dumps([path.stem, kind['min_workers'], kind['max_workers'], prepared['max_workers']]))\n"
    )
    lines = [line for line in output.splitlines() if line.startswith("[")]  # Ray prints warnings to stdout
    found = {name: counts for name, *counts in map(json.loads, lines)}
    assert found == {name: [hosts - 1] * 3 for name, hosts in HOSTS.items()}


@pytest.mark.parametrize("name", HOSTS)
def test_raypod_reads_the_file(name: str) -> None:
    cluster = read_cluster(str(FOLDER / f"{name}.yaml"))
    assert (cluster.name, len(cluster.hosts)) == (name, HOSTS[name])
    assert sum(host.ipus or 0 for host in cluster.hosts) == IPUS[name]
    if IPUS[name]:
        assert cluster.vipu is not None
        assert (cluster.vipu.size, cluster.vipu.gcds) == (IPUS[name], cluster.num_instances)
        assert cluster.vipu.link_domains == max(1, IPUS[name] // 64)


@pytest.mark.parametrize("name", HOSTS)
def test_the_start_commands_have_the_required_settings(name: str) -> None:
    given = document(name)
    starts = {kind: given[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker")}
    for command in starts.values():
        assert "RAY_AUTH_MODE=token" in command
        assert f"RAYPOD_CLUSTER={name} " in command
        assert "unset OMP_NUM_THREADS" in command
        assert "--min-worker-port=10002" in command
        assert re.findall(r'"IPU":(\d+)', command) == ([str(IPUS[name] // HOSTS[name])] if IPUS[name] else [])
    assert "RAY_enable_autoscaler_v2=0" in starts["head"]
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in starts["head"]
    assert f"--node-ip-address={given['provider']['head_ip']} " in starts["head"]
    assert "--dashboard-host=127.0.0.1" in starts["head"]
    assert f"rm -f $RAY_TMPDIR/ray/cluster-{name}.state;" in starts["head"]
    assert "ray stop" not in json.dumps(given)


@pytest.mark.parametrize("name", HOSTS)
def test_every_value_of_the_site_is_marked_edit(name: str) -> None:
    """In the line itself, or for several lines in the comment above them."""
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    marked = "\n".join(line for line in lines if "EDIT" in line)
    for value in ("head_ip: ", "ssh_user: ", "data_network: ", "EDIT: use a separate key", "EDIT: --node-ip-address, "):
        assert marked.count(value) == 1, value
    for value in ("server: ", "partition: ", "sdk: ", "also in the commands below") if IPUS[name] else ():
        assert marked.count(value) == 1, value
    command = next(at for at, line in enumerate(lines) if "EDIT: --node-ip-address, " in line)
    address = next(at for at, line in enumerate(lines) if " --node-ip-address=" in line)
    assert command < address < lines.index("worker_start_ray_commands:")


def test_the_files_differ_only_in_their_hosts() -> None:
    """A command must be changed in all files."""

    def commands(name: str) -> str:
        given = document(name)
        kept = {key: given[key] for key in sorted(given) if key.endswith("_commands") or key == "file_mounts"}
        return re.sub(r'"IPU\\*":\d+', "IPU", json.dumps(kept)).replace(name, "NAME")

    assert len({commands(name) for name in HOSTS if IPUS[name]}) == 1


def test_a_plan_shows_the_devices_of_every_instance(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--cluster", str(FOLDER / "pod128.yaml"), "--replicas", "128", "--batch-size", "2"]
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "8 instances x 16 replicas x 1 IPU = 128 IPUs" in output
    rows = {line.split()[1]: line.split() for line in output.splitlines() if " 10.0.0.1" in line and ".." in line}
    assert list(rows) == [f"10.0.0.{last}" for last in range(11, 19)]
    # instance, host, local, replicas, threads, IPUs, link domain, GCD, device
    assert rows["10.0.0.15"] == ["4", "10.0.0.15", "0", "64..79", "16", "64..79", "1", "4", "244"]


def test_the_file_determines_the_default_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cluster", str(FOLDER / "emulated-pod.yaml"), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    geometry = described["geometry"]
    assert [(each["gcd"], each["host"]) for each in described["instances"]][1] == (0, "10.0.0.12")
    assert (geometry["num_instances"], geometry["total_replicas"]) == (
        3,
        6,
    )  # the default of 4 rounded up to a multiple of 3
    assert main(["plan", "--cluster", str(FOLDER / "pod64.yaml"), "--num-instances", "2"]) == 0
    output = capsys.readouterr().out
    assert "2 hosts without an instance (10.0.0.13, 10.0.0.14)" in output
    assert "a run on IPUs would fail: partition pod64 has 4 GCDs and the run 2 instances" in output
