"""The recipes and cluster files that raypod contains: found from any folder, and valid for `ray up` and for raypod."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict

import pytest
import yaml

from raypod.__main__ import main
from raypod.plan import shipped
from raypod.plan.cluster import read_cluster
from tests.support import ROOT

HOSTS = {"pod4": 1, "pod16": 1, "pod64": 4, "pod128": 8, "pod256": 16, "emulated-pod": 3}
IPUS = {"pod4": 4, "pod16": 16, "pod64": 64, "pod128": 128, "pod256": 256, "emulated-pod": 0}


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["gpt-tiny.yaml", "gpt-tiny", "configs/gpt-tiny.yaml"])
def test_a_recipe_is_found_by_its_name_and_a_file_of_the_user_comes_first(name: str, empty: Path) -> None:
    assert shipped.find(name, shipped.RECIPES) == ROOT / "configs" / "gpt-tiny.yaml"
    if name.endswith(".yaml"):
        (empty / "configs").mkdir()
        (empty / name).write_text("{}")
        assert shipped.find(name, shipped.RECIPES) == Path(name)


def test_another_path_stays_as_it_is_and_the_copy_of_an_installed_package_is_used(
    empty: Path, monkeypatch: Any
) -> None:
    for name in ("other.yaml", "elsewhere/gpt-tiny.yaml", "/gpt-tiny.yaml", "pod4.yaml"):
        assert shipped.find(name, shipped.RECIPES) == Path(name)
    folder = empty / "raypod" / "shipped" / "configs"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").touch()
    monkeypatch.setattr(shipped, "_PACKAGE", empty / "raypod")
    assert shipped.names(shipped.RECIPES) == ["mine.yaml"]
    assert shipped.find("mine", shipped.RECIPES) == folder / "mine.yaml"


def test_plans_from_an_empty_folder(empty: Path, capsys: Any) -> None:
    assert main(["train", "--config", "digits", "--cluster", "pod4.yaml", "--dry-run"]) == 0
    assert "pod4: 1 host (10.0.0.11)" in capsys.readouterr().out
    assert not [*empty.iterdir()]
    for name in ("pod64", "pod64.yaml", "cluster/pod64.yaml"):  # the plan says that the file is that of raypod
        assert main(["plan", "--cluster", name]) == 0
        assert f"cluster file  pod64.yaml of raypod; there is no file {name} here\n" in capsys.readouterr().out
        (empty / name).parent.mkdir(exist_ok=True)
        (empty / name).write_text(text_of("pod64"))
        assert main(["plan", "--cluster", name]) == 0
        assert "of raypod" not in capsys.readouterr().out
        (empty / name).unlink()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --config gtp-tiny.yaml", "did you mean gpt-tiny.yaml, which raypod contains?"),
        ("train --config zzz", "raypod contains cifar10-resnet101-2ipu.yaml, "),
        ("plan --cluster pdo64.yaml", "did you mean pod64.yaml, which raypod contains?"),
        ("up pod64.yaml", "`raypod files pod64.yaml > pod64.yaml` writes the one that raypod contains: edit"),
        ("down cluster/pod64.yaml", "`raypod files pod64.yaml > pod64.yaml` writes the one that raypod contains: edit"),
        ("files pod46", "did you mean pod4.yaml?"),
    ],
)
def test_a_missing_file_is_one_line(line: str, message: str, empty: Path, capsys: Any) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err


def test_files_are_listed_and_printed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert main(["files"]) == 0
    out = capsys.readouterr().out
    assert "a ResNet-101 on two IPUs, eight replicas in four instances\n" in out  # a pipe: one line for each file
    monkeypatch.setattr("raypod.cli.runs.width_of", lambda stream: 80)
    assert main(["files"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "..." not in out
    assert re.search(r"\n( {20,})64x64 with a ResNet-101 on two IPUs,\n\1eight replicas in four instances\n", out)
    assert all(name in out for kind in (shipped.RECIPES, shipped.CLUSTERS) for name in shipped.names(kind))
    assert main(["files", "pod64"]) == 0
    assert capsys.readouterr().out == text_of("pod64")


def text_of(name: str) -> str:
    return (ROOT / "cluster" / f"{name}.yaml").read_text()


def test_ray_accepts_the_cluster_files(processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # which the next line sets
    from ray.autoscaler._private.util import prepare_config, validate_config

    files = {path.stem for path in (ROOT / "cluster").glob("*.yaml")}
    assert {name for name in files if not name.startswith("kuberay")} == set(HOSTS)
    for name, hosts in HOSTS.items():
        prepared: Dict[str, Any] = prepare_config(yaml.safe_load(text_of(name)))
        validate_config(prepared)
        (kind,) = prepared["available_node_types"].values()
        assert [kind["min_workers"], kind["max_workers"], prepared["max_workers"]] == [hosts - 1] * 3


@pytest.mark.parametrize("name", HOSTS)
def test_raypod_reads_the_cluster_file_and_every_value_of_the_site_is_marked_edit(name: str) -> None:
    cluster = read_cluster(str(ROOT / "cluster" / f"{name}.yaml"))
    assert (cluster.name, len(cluster.hosts)) == (name, HOSTS[name])
    assert sum(host.ipus or 0 for host in cluster.hosts) == IPUS[name]
    if IPUS[name]:
        assert cluster.vipu is not None
        found = (cluster.vipu.size, cluster.vipu.gcds, cluster.vipu.link_domains)
        assert found == (IPUS[name], cluster.num_instances, max(1, IPUS[name] // 64))
    # In the line itself, or for several lines in the comment above them.
    lines = text_of(name).splitlines()
    marked = "\n".join(line for line in lines if "EDIT" in line)
    values = ["head_ip: ", "ssh_user: ", "data_network: ", "EDIT: use a separate key", "EDIT: --node-ip-address, "]
    values += ["server: ", "partition: ", "sdk: ", "also in the commands below"] if IPUS[name] else []
    assert {value: marked.count(value) for value in values} == dict.fromkeys(values, 1)
    command = next(at for at, line in enumerate(lines) if "EDIT: --node-ip-address, " in line)
    address = next(at for at, line in enumerate(lines) if " --node-ip-address=" in line)
    assert command < address < lines.index("worker_start_ray_commands:")


@pytest.mark.parametrize("name", HOSTS)
def test_the_start_commands_have_the_required_settings(name: str) -> None:
    given = yaml.safe_load(text_of(name))
    head, worker = (given[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker"))
    for command in (head, worker):
        assert "/raypod/system/private.py $RAY_TMPDIR || exit 1;" in command
        for words in ("RAY_AUTH_MODE=token", f"RAYPOD_CLUSTER={name} ", "unset OMP_NUM_THREADS", "worker-port=10002"):
            assert words in command
        assert re.findall(r'"IPU":(\d+)', command) == ([str(IPUS[name] // HOSTS[name])] if IPUS[name] else [])
    for words in (
        "RAY_enable_autoscaler_v2=0",
        "--autoscaling-config=~/ray_bootstrap_config.yaml",
        f"--node-ip-address={given['provider']['head_ip']} ",
        "--dashboard-host=127.0.0.1",
        f"rm -f $RAY_TMPDIR/ray/cluster-{name}.state;",
    ):
        assert words in head
    assert "ray stop" not in json.dumps(given)


def test_the_cluster_files_differ_only_in_their_hosts() -> None:
    """A command must be changed in all files."""

    def commands(name: str) -> str:
        given = yaml.safe_load(text_of(name))
        kept = {key: given[key] for key in sorted(given) if key.endswith("_commands") or key == "file_mounts"}
        return re.sub(r'"IPU\\*":\d+', "IPU", json.dumps(kept)).replace(name, "NAME")

    assert len({commands(name) for name in HOSTS if IPUS[name]}) == 1


def test_a_plan_names_the_devices_of_every_instance_and_has_the_default_counts_of_its_file(capsys: Any) -> None:
    assert main(["plan", "--cluster", "pod128", "--replicas", "128", "--batch-size", "2"]) == 0
    output = capsys.readouterr().out
    assert "8 instances x 16 replicas x 1 IPU = 128 IPUs" in output
    rows = {line.split()[1]: line.split() for line in output.splitlines() if " 10.0.0.1" in line and ".." in line}
    assert list(rows) == [f"10.0.0.{last}" for last in range(11, 19)]
    # instance, host, local, replicas, threads, IPUs, link domain, GCD, device
    assert rows["10.0.0.15"] == ["4", "10.0.0.15", "0", "64..79", "16", "64..79", "1", "4", "244"]
    assert main(["plan", "--cluster", "emulated-pod", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert [(each["gcd"], each["host"]) for each in described["instances"]][1] == (0, "10.0.0.12")
    # The default of 4 replicas is rounded up to a multiple of 3.
    assert [described["geometry"][name] for name in ("num_instances", "total_replicas")] == [3, 6]
    assert main(["plan", "--cluster", "pod64", "--num-instances", "2"]) == 0
    output = capsys.readouterr().out
    assert "2 hosts without an instance (10.0.0.13, 10.0.0.14)" in output
    assert "a run on IPUs would fail: partition pod64 has 4 GCDs and the run 2 instances" in output
