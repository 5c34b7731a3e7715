"""Tests of launcher/options, launcher/mpi_arguments, and the host lists and topology table of `raypod.launch`."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest

from raypod.errors import ClusterError, ConfigError
from raypod.launch import main
from raypod.launcher.mpi_arguments import parse_mpi_arguments
from raypod.launcher.options import OPTIONS, Request, export, parse
from raypod.plan import tables
from raypod.plan.cluster import LOCAL, cluster_of, expand_hosts
from raypod.plan.placement import Sizes, check_ilds, place


def request(*words: str) -> Request:
    parsed, query = parse(words)
    assert query is None
    return parsed


def test_defaults_are_those_of_poprun() -> None:
    found = request("python", "x.py")
    assert (found.num_replicas, found.num_instances, found.ipus_per_replica) == (1, 1, 1)
    assert (found.vipu_server_host, found.vipu_server_port, found.vipu_server_timeout) == ("localhost", 8090, 120)
    assert (found.remove_partition, found.update_partition, found.vipu_partition_attempts) == (True, False, 1)


def test_words_after_the_program_are_its_own() -> None:
    found = request("--num-replicas", "8", "--num-instances=4", "python", "main.py", "--num-replicas", "2", "-v", "--")
    assert found.program == ("python", "main.py", "--num-replicas", "2", "-v", "--")
    assert (found.num_replicas, found.num_instances, found.verbosity) == (8, 4, 0)
    assert request("--", "--odd-name").program == ("--odd-name",)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--numa-aware"], True),
        (["--numa-aware=yes"], True),
        (["--numa-aware", "1"], True),
        (["--numa-aware=off"], False),
        (["--numa-aware", "no"], False),
    ],
)
def test_yes_no_options_take_the_forms_of_poprun(words: List[str], expected: bool) -> None:
    found = request(*words, "python", "x.py")
    assert found.numa_aware is expected
    assert found.program == ("python", "x.py")


def test_a_program_may_be_named_yes() -> None:
    assert request("--print-topology", "yes").program == ("yes",)


@pytest.mark.parametrize("words", [["-v", "-v"], ["-vv"], ["--vv"]])
def test_verbosity_adds_up(words: List[str]) -> None:
    assert request(*words, "x").verbosity == 2


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
        (["--num-instances", "2", "--num-replicas", "2", "--num-ilds", "4", "x"], "between 4 IPU-Link domains"),
        (["--mpi-global-args=--mca pml ucx", "x"], "--mpi-global-args: --mca pml: not supported without MPI"),
        (
            ["--mpi-local-args", "--bind-to none", "x"],
            "'bind-to' is not supported without mpirun; use --numa-aware",
        ),
        (["--instance-mpi-local-args=7:-x A=1", "x"], "with an instance from 0 to 0"),
        (["-x", "=1", "x"], "-x =1: must be VAR or VAR=VALUE"),
        (["-H", "a", "--cluster", "c.yaml", "x"], "--host and --cluster both list the hosts; give only one"),
        (["--only-output-from-instance", "2", "x"], "--only-output-from-instance 2: the last instance is 0"),
        (["--import-config", "/nowhere.yaml", "x"], "--import-config /nowhere.yaml: No such file or directory"),
        (["--device", "gpu", "x"], "--device gpu: use auto, ipu or emulated"),
        (["--process-placement", "sideways", "x"], "--process-placement sideways: must be disabled or spreadnuma"),
        ([], "no program to launch"),
    ],
)
def test_a_mistake_prints_one_line_and_exits_with_2(
    words: List[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("raypod: error: ")
    assert message in line


def test_mpirun_arguments_set_environment_and_network() -> None:
    found = parse_mpi_arguments(
        request(
            *("--num-instances", "2", "--num-replicas", "2", "-x", "A=1", "-x", "HOME"),
            "--mpi-global-args=--tag-output --mca btl_tcp_if_include 10.0.0.0/8",
            "--mpi-local-args=-x 'B=two words' -x NOT_THERE",
            *('--instance-mpi-local-args=1:"-x A=9"', "program"),
        )
    )
    caller = {"HOME": "/home/me"}
    assert found.network == "10.0.0.0/8"
    assert found.environment(0, caller) == {"A": "1", "HOME": "/home/me", "B": "two words"}
    assert found.environment(1, caller)["A"] == "9"


def test_exported_options_import_to_the_same_request(tmp_path: Path) -> None:
    given = request("--num-replicas", "8", "--numa-aware", "--remove-partition=no", "-x", "A=1", "-x", "B", "prog")
    file = tmp_path / "options.yaml"
    file.write_text(export(given))
    again = request("--import-config", str(file), "--num-replicas", "4", "prog")
    assert {**given.values, "num_replicas": 4} == {**again.values, "import_config": None}


def test_export_does_not_overwrite_a_file_without_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--export-config", str(tmp_path / "o.yaml"), "--num-replicas", "4"]
    assert main(words) == 0
    assert main(words) == 2
    assert "--overwrite-config replaces it" in capsys.readouterr().err
    assert main([*words, "--overwrite-config"]) == 0
    assert (tmp_path / "o.yaml").read_text() == "num-replicas: 4\n"


def test_an_unknown_option_in_a_file_is_reported_with_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "o.yaml").write_text("num-instanzes: 4\n")
    assert main(["--import-config", str(tmp_path / "o.yaml"), "x"]) == 2
    assert f"--num-instanzes in {tmp_path}/o.yaml; did you mean --num-instances?" in capsys.readouterr().err


def test_help_lists_every_option_and_version_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"--{option.name} " in page or option.letter == "x" for option in OPTIONS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("raypod")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b", ["a", "b"]),
        ("host[0-2,4]", ["host0", "host1", "host2", "host4"]),
        ("a, n[08-10].pod,b", ["a", "n08.pod", "n09.pod", "n10.pod", "b"]),
    ],
)
def test_lists_and_ranges_of_hosts(text: str, expected: List[str]) -> None:
    assert expand_hosts(text) == expected


@pytest.mark.parametrize("text", ["host[2-0]", "host[a]", "host[0", "a,a", ","])
def test_invalid_host_lists(text: str) -> None:
    with pytest.raises(ClusterError):
        cluster_of(text)


def test_localhost_is_the_local_cluster() -> None:
    assert cluster_of("localhost") is LOCAL


def test_a_hosts_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# the pod\nh0 slots=4\nh1\n\n")
    assert [host.name for host in cluster_of(str(tmp_path / "hosts")).hosts] == ["h0", "h1"]


def test_topology_table() -> None:
    placement = place(cluster_of("h0,h1"), Sizes(8, 4, 2))
    lines = tables.render_topology(placement, 2).splitlines()
    assert [cell.strip() for cell in lines[5].strip("|").split("|")] == ["h1", "1", "2", "4..5", "8..11"]
    with pytest.raises(ConfigError):
        check_ilds(placement, 3)
