"""Cluster files: what raypod reads from them, each mistake with its line, and those and the recipes that raypod has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List

import pytest
import yaml

from raypod.__main__ import main
from raypod.errors import ClusterError
from raypod.plan import shipped
from raypod.plan.cluster import LOCAL, VipuPartition, read_cluster
from raypod.plan.cluster_file import parse
from tests.support import ROOT

GOOD = """
cluster_name: pod64
provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2, 10.0.0.3]}
head_start_ray_commands:
  - ray stop
  - ray start --head --resources='{"IPU":16}'
"""
PROVIDER, LINES = "provider: {type: local, head_ip: a}\n", "provider:\n  type: local\n  head_ip: a\n"
HOSTS = {"pod4": 1, "pod16": 1, "pod64": 4, "pod128": 8, "pod256": 16, "emulated-pod": 3}
IPUS = {"pod4": 4, "pod16": 16, "pod64": 64, "pod128": 128, "pod256": 256, "emulated-pod": 0}


def write(folder: Path, text: str) -> str:
    (folder / "pod.yaml").write_text(text)
    return str(folder / "pod.yaml")


def test_hosts_have_the_order_of_the_file_and_the_settings_of_raypod_and_of_the_start_commands(tmp_path: Path) -> None:
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
