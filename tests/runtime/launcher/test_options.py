"""The options and mpi_arguments of the launcher, host lists, the topology table, and the V-IPU partition."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import psutil
import pytest

from raypod.errors import ClusterError, ConfigError, RunError
from raypod.launch import main, write_options
from raypod.plan import tables
from raypod.plan.cluster import LOCAL, Cluster, cluster_of, cluster_of_file, expand_hosts
from raypod.plan.placement import Sizes, check_ilds, place
from raypod.runtime.launcher.options import OPTIONS, Request, export, parse, parse_mpi_arguments, without_values
from raypod.runtime.launcher.programs import partition
from raypod.system.signals import abort
from raypod.system.vipu import Controller, Vipu
from tests.support.fake_vipu import FakeVipu

TWO = ("--num-instances", "2", "--num-replicas", "2")


def request(*words: str) -> Request:
    parsed, query = parse(words)
    assert query is None
    return parsed


def test_defaults_and_forms_of_options_are_those_of_poprun() -> None:
    found = request("python", "x.py")
    assert (found.num_replicas, found.num_instances, found.ipus_per_replica) == (1, 1, 1)
    assert (found.vipu_server_host, found.vipu_server_port, found.vipu_server_timeout) == ("localhost", 8090, 120)
    assert (found.remove_partition, found.update_partition, found.vipu_partition_attempts) == (True, False, 1)
    found = request("--num-replicas", "8", "--num-instances=4", "python", "main.py", "--num-replicas", "2", "-v", "--")
    assert found.program == ("python", "main.py", "--num-replicas", "2", "-v", "--")  # the words after it are its own
    assert (found.num_replicas, found.num_instances, found.verbosity) == (8, 4, 0)
    assert request("--", "--odd-name").program == ("--odd-name",)
    for form, expected in {"": True, "=yes": True, " 1": True, "=off": False, " no": False}.items():
        found = request(*f"--numa-aware{form}".split(), "python", "x.py")
        assert (found.numa_aware, found.program) == (expected, ("python", "x.py"))
    assert request("--print-topology", "yes").program == ("yes",)
    assert [request(*words, "x").verbosity for words in (["-v", "-v"], ["-vv"], ["--vv"])] == [2, 2, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-replica", "4", "x"], "unknown option --num-replica; did you mean --num-replicas?"),
        (["--num-replicas", "many", "x"], "--num-replicas many: must be an integer"),
        (["--num-replicas", "0", "x"], "--num-replicas 0: must be at least 1"),
        (["--num-replicas"], "--num-replicas needs a value"),
        (["--offline-mode=perhaps", "x"], "--offline-mode perhaps: must be yes or no"),
        (["--distribute-ssh-key", "x"], "--distribute-ssh-key: raypod copies nothing to hosts; Ray connects the hosts"),
        (["--num-replicas", "6", "--num-instances", "4", "x"], "6 replicas cannot be divided equally between 4"),
        ([*TWO, "--num-ilds", "4", "x"], "between 4 IPU-Link domains"),
        (["--mpi-global-args=--mca pml ucx", "x"], "--mpi-global-args: --mca pml: not supported without MPI"),
        (["--mpi-local-args", "--bind-to none", "x"], "'bind-to' is not supported without mpirun; use --numa-aware"),
        (["--instance-mpi-local-args=7:-x A=1", "x"], "with an instance from 0 to 0"),
        (["-x", "=1", "x"], "-x =1: must be VAR or VAR=VALUE"),
        (["-H", "a", "--cluster", "c.yaml", "x"], "--host and --cluster both list the hosts; give only one"),
        (["--only-output-from-instance", "2", "x"], "--only-output-from-instance 2: the last instance is 0"),
        (["--import-config", "/nowhere.yaml", "x"], "--import-config /nowhere.yaml: No such file or directory"),
        (["--device", "gpu", "x"], "--device gpu: use auto, ipu or emulated"),
        (["--process-placement", "sideways", "x"], "--process-placement sideways: must be disabled or spreadnuma"),
        (["--run-dir", "--device", "ipu", "x"], "--run-dir needs a value, not --device"),
        (["--cluster=", "x"], "--cluster needs a value; it is empty"),
        (["--start-timeout", "inf", "x"], "--start-timeout inf: must be at least 0.1"),
        (["--vipu-server-port", "70000", "x"], "--vipu-server-port 70000: must be at most 65535"),
        (["--host-subnet", "10.0.0.0/99", "x"], "network 10.0.0.0/99: must be a network in CIDR notation"),
        (["--instance-mpi-local-args=²:-x A=1", "x"], "with an instance from 0 to 0"),
        (["--instance-mpi-local-args=0:--mca btl_tcp_if_include lo", "x"], "all instances use one network"),
        (["--export-config", "/nowhere/o.yaml", "x"], "--export-config /nowhere/o.yaml: not a file in a folder"),
        (["-H", "h:1", *TWO, "x"], "host h of h:1 is listed with slots=1 and would get 2"),
        ([], "no program to launch: raypod launch [options] PROGRAM [ARGS...] (--help lists options)"),
    ],
)
def test_a_mistake_is_one_line(words: List[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("raypod: error: ")
    assert message in line


def test_mpirun_arguments_set_environment_and_network() -> None:
    words = (*TWO, "-x", "A=1", "-x", "HOME", "--mpi-global-args=--tag-output --mca btl_tcp_if_include 10.0.0.0/8")
    words += ("--mpi-local-args=-x 'B=two words' -x NOT_THERE", '--instance-mpi-local-args=1:"-x A=9"', "program")
    found, caller = parse_mpi_arguments(request(*words)), {"HOME": "/home/me"}
    assert found.network == "10.0.0.0/8"
    assert found.environment(0, caller) == {"A": "1", "HOME": "/home/me", "B": "two words"}
    assert found.environment(1, caller)["A"] == "9"


def test_exported_options_import_to_the_same_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = request("--num-replicas", "8", "--numa-aware", "--remove-partition=no", "-x", "A=1", "-x", "B", "prog")
    file = tmp_path / "options.yaml"
    file.write_text(export(given))
    again = request("--import-config", str(file), "--num-replicas", "4", "prog")
    assert {**given.values, "num_replicas": 4} == {**again.values, "import_config": None}
    words = ["--export-config", str(tmp_path / "o.yaml"), "--num-replicas", "4"]
    assert (main(words), main(words)) == (0, 2)
    assert "--overwrite-config replaces it" in capsys.readouterr().err
    assert main([*words, "--overwrite-config"]) == 0
    assert (tmp_path / "o.yaml").read_text() == "num-replicas: 4\n"


def test_the_options_in_a_run_folder_name_variables_without_their_values(tmp_path: Path) -> None:
    words = ["--num-replicas", "2", "--num-instances", "2", "-x", "A=s3cret", "-x", "B", "--mpi-global-args"]
    words += ["-x C=s3cret --tag-output -x=D=s3cret", '--instance-mpi-local-args=1:"-x E=s3cret"', "prog"]
    file = tmp_path / "launch.yaml"
    write_options(without_values(request(*words)), file, "--run-dir")
    assert "s3cret" not in file.read_text()
    again = parse_mpi_arguments(request("--import-config", str(file), "prog"))
    assert (again.missing({}), again.environment(1, {"E": "1"})) == (["A", "B", "C", "D", "E"], {"E": "1"})
    write_options(request(*words), tmp_path / "exported.yaml", "--export-config")
    assert stat.S_IMODE((tmp_path / "exported.yaml").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num-instanzes: 4\n", "--num-instanzes in {file}; did you mean --num-instances?"),
        ("vipu-partition:\n", "vipu-partition must have a single value"),
        ("run-dir: {{a: 1}}\n", "run-dir must have a single value"),
        ("num-replicas: 2\nnum-replicas: 4\n", "num-replicas is a duplicate key, first given in line 1"),
        ("num-replicas: 2\nnum_replicas: 4\n", "is given twice"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    file = tmp_path / "o.yaml"
    file.write_text(text.format())
    assert main(["--import-config", str(file), "x"]) == 2
    assert message.format(file=file) in capsys.readouterr().err


def test_no_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--export-config", "o.yaml", "--run-dir", "a/b", "-H", "nowhere", "x"]) == 2
    assert "no Ray cluster is running for nowhere" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_no_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("kept")
    for folder, problem in ((tmp_path, "the folder is not empty"), (tmp_path / "mine", "Not a directory")):
        assert main(["--run-dir", str(folder), "x"]) == 2
        assert f"--run-dir {folder}: {problem}; choose another folder" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_ranges_of_hosts_the_topology_table_and_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert expand_hosts("host[0-2,4]") == ["host0", "host1", "host2", "host4"]
    assert expand_hosts("a, n[08-10].pod,b") == ["a", "n08.pod", "n09.pod", "n10.pod", "b"]
    placement = place(cluster_of("h0,h1"), Sizes(8, 4, 2))
    lines = tables.render_topology(placement, 2).splitlines()
    assert [cell.strip() for cell in lines[5].strip("|").split("|")] == ["h1", "1", "2", "4..5", "8..11"]
    with pytest.raises(ConfigError):
        check_ilds(placement, 3)
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"--{option.name} " in page or option.letter == "x" for option in OPTIONS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("raypod")


def hosts_of(kind: str, lines: List[str], folder: Path) -> Cluster:
    if kind == "list":
        return cluster_of(",".join(lines))
    (folder / "hosts").write_text("# the pod\n" + "\n".join(lines) + "\n\n")
    return cluster_of_file(str(folder / "hosts"))


@pytest.fixture(params=["list", "file"])
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Cluster]:
    return lambda *lines: hosts_of(request.param, list(lines), tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["host[2-0]"], "cannot parse the range '2-0' of 'host[2-0]'"),
        (["host[a]"], "cannot parse the host 'host[a]'"),
        (["host[0"], "cannot parse the host 'host[0'"),
        (["a", "b", "a"], "host a is listed twice"),
        (["localhost", socket.gethostname()], f"host {socket.gethostname()} is listed twice, as localhost"),
        (["10.0.0.999"], "'10.0.0.999' is neither a host name nor an IP address"),
        (["a/b"], "'a/b' is neither a host name nor an IP address"),
        (["a:0"], "'a:0' is neither a host name nor an IP address"),
        ([], "no host in "),
    ],
)
def test_mistakes_in_host_lists_and_host_files(hosts: Callable[..., Cluster], lines: List[str], message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        hosts(*lines)


def test_a_mistake_in_a_host_file_has_its_line_and_slots_limit_the_instances(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as error:
        hosts_of("file", ["a", "b", "", "a"], tmp_path)
    file = f"{tmp_path}/hosts"
    assert str(error.value) == f"{file}, line 5: host a is listed twice in {file}, line 2; list it once"
    with pytest.raises(ClusterError, match="hosts, line 2: cannot parse 'port=22'"):
        hosts_of("file", ["a slots=1 port=22"], tmp_path)
    cluster = hosts_of("file", ["h[0-1] slots=4", "h2 slots=2 max_slots=3", "h3:1", "h4"], tmp_path)
    assert {host.name: host.slots for host in cluster.hosts} == {"h0": 4, "h1": 4, "h2": 2, "h3": 1, "h4": None}
    assert cluster_of(str(tmp_path / "hosts")) == cluster
    place(cluster, Sizes(4, 4, 1))
    with pytest.raises(ConfigError, match=r"host h3 of .*hosts is listed with slots=1 and would get 2 instances"):
        place(cluster, Sizes(10, 10, 1))


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_host_alone_is_the_local_cluster(hosts: Callable[..., Cluster], name: str) -> None:
    assert hosts(name) is LOCAL
    limited = hosts(f"{name}:2")
    assert limited.is_local
    assert limited.hosts[0].slots == 2
    others = [(host.name, host.address) for host in hosts("b", "localhost").hosts]
    assert others == [("b", "b"), ("localhost", LOCAL.hosts[0].address)]


NAMED, ON_THE_EMULATED_SDK = ("--vipu-partition", "p"), "the programs run on the emulated SDK"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVipu]:
    made = FakeVipu(monkeypatch)
    monkeypatch.setattr("raypod.system.vipu._RETRY_S", 0.0)
    yield made
    assert all(process.is_awaited for process in made.processes)


# ---- the V-IPU partition, with a fake `vipu` tool whose behaviour is inferred ----------------------------------------


def use(*words: str, has_ipus: bool = True, log: Any = print, **caller: str) -> Dict[int, Dict[str, str]]:
    """Return the environments of 4 instances with 8 replicas of 2 IPUs."""
    request, _ = parse(["--num-replicas", "8", "--num-instances", "4", "--ipus-per-replica", "2", *words, "program"])
    with partition(request, place(LOCAL, Sizes(8, 4, 2)), has_ipus, caller, log) as environment:
        return environment


def test_a_missing_partition_is_created_and_removed(tool: FakeVipu) -> None:
    found = use(*NAMED, "--vipu-allocation", "a", "--sync-type", "ST_POD_NATIVE_DEFAULT")
    sizes = "--size 16 --num-gcds 4 --gcd-sync-replicas 4 --allocation a --sync-type ST_POD_NATIVE_DEFAULT"
    assert tool.changes == [f"create partition p {sizes}", "remove partition p"]
    assert [each["IPUOF_VIPU_API_GCD_ID"] for each in found.values()] == ["0", "1", "2", "3"]
    assert {each["IPUOF_VIPU_API_PARTITION_ID"] for each in found.values()} == {"p"}
    names = ("HOST", "PORT", "TIMEOUT")
    assert [found[0][f"IPUOF_VIPU_API_{name}"] for name in names] == ["localhost", "8090", "120"]
    assert '"instanceSize":"4"' in found[0]["POPLAR_TARGET_OPTIONS"]
    tool.commands.clear()
    tool.timeouts.clear()
    found = use(*NAMED, "--vipu-server-host", "10.1.2.3", "--vipu-server-timeout", "7")
    assert all(each.startswith("--api-host 10.1.2.3 --api-port 8090 ") for each in tool.commands)
    assert (found[3]["IPUOF_VIPU_API_HOST"], set(tool.timeouts)) == ("10.1.2.3", {7})


ALL = {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("existing", "words", "verbs", "gcd_ids"),
    [
        ((16, 4, False), (), ["reset"], ALL),
        ((16, 4, False), ("--reset-partition=no",), [], ALL),
        ((64, 1, True), (), [], {"0"}),  # a larger reconfigurable one is used as it is
        ((64, 1, True), ("--reset-partition=yes",), ["reset"], {"0"}),
        ((8, 4, False), ("--update-partition=yes",), ["remove", "create"], ALL),
        ((8, 4, False), (), [], None),
        (None, ("--remove-partition=no",), ["create"], ALL),
    ],
)
def test_partition_stays(tool: FakeVipu, existing: Any, words: Tuple[str, ...], verbs: List[str], gcd_ids: Any) -> None:
    if existing is not None:
        tool.partitions["p"] = existing
    if gcd_ids is None:
        with pytest.raises(ClusterError, match=r"p has 8 IPUs in 4 GCDs, and 16 IPUs in 4 .*--update-partition=yes"):
            use(*NAMED, *words)
    else:
        assert {each["IPUOF_VIPU_API_GCD_ID"] for each in use(*NAMED, *words).values()} == gcd_ids
    assert (tool.verbs, list(tool.partitions)) == (verbs, ["p"])


def test_creation_is_attempted_as_often_as_requested(tool: FakeVipu) -> None:
    tool.failures = ["no IPUs are free"] * 2
    use(*NAMED, "--vipu-partition-attempts", "3")
    assert tool.verbs == ["create"] * 3 + ["remove"]
    tool.failures = ["no IPUs are\nfree"]
    with pytest.raises(ClusterError, match=r"vipu create partition p .*: exit code 1: no IPUs are free$"):
        use(*NAMED)


@pytest.mark.parametrize(
    ("verb", "raised", "match", "verbs"),
    [
        ("list", subprocess.TimeoutExpired("vipu", 1), r"no answer within 120 s \(--vipu-server-timeout\)", []),
        ("create", subprocess.TimeoutExpired("vipu", 1), "create partition p .*no answer", ["create", "remove"]),
        ("create", KeyboardInterrupt(), "^$", ["create", "remove"]),
    ],
)
def test_a_creation_is_undone(tool: FakeVipu, verb: str, raised: BaseException, match: str, verbs: List[str]) -> None:
    tool.raised[verb] = raised
    with pytest.raises(KeyboardInterrupt if isinstance(raised, KeyboardInterrupt) else ClusterError, match=match):
        use(*NAMED)
    assert tool.verbs == verbs
    assert not tool.partitions


@pytest.mark.usefixtures("processes")
def test_a_tool_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vipu").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    (tmp_path / "vipu").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ClusterError, match="no answer within 1 s"):
        Vipu(Controller("localhost", 8090, 1)).run("list", "partitions")
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_abort_removes_it(tool: FakeVipu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    at_exit: List[Any] = []

    def leave(code: int) -> None:
        at_exit.append((code, tool.verbs))
        raise SystemExit

    monkeypatch.setattr("os._exit", leave)
    placement, (request, _) = place(LOCAL, Sizes(1, 1, 1)), parse([*NAMED, "program"])
    with pytest.raises(SystemExit), partition(request, placement, True, {}, print):
        abort(RunError("the head is lost"))
    assert at_exit == [(1, ["create", "remove"])]
    assert capsys.readouterr().err == "raypod: error: the head is lost\n"


@pytest.mark.parametrize(
    ("words", "has_ipus", "said"),
    [
        ((*NAMED, "--offline-mode"), True, ["(--offline-mode): --vipu-partition"]),
        ((*NAMED, "--sync-type", "S"), False, [f"({ON_THE_EMULATED_SDK}): --vipu-partition, --sync-type"]),
        ((), True, []),
    ],
)
def test_an_unused_partition_is_not_created(tool: FakeVipu, words: Any, has_ipus: bool, said: List[str]) -> None:
    lines: List[str] = []
    assert (use(*words, has_ipus=has_ipus, log=lines.append), tool.commands) == ({}, [])
    assert lines == [f"partition options have no effect {each}" for each in said]


def test_the_callers_partition_and_no_tool(tool: FakeVipu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool.partitions["mine"] = (16, 4, False)
    found = use(IPUOF_VIPU_API_PARTITION_ID="mine", POPLAR_TARGET_OPTIONS="{}")
    assert (tool.changes, found[1]["POPLAR_TARGET_OPTIONS"]) == (["reset partition mine"], "{}")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="vipu is not installed here"):
        use(*NAMED)
