"""`raypod launch` without Ray: programs of poprun run unchanged, their environment, hosts, output and ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import List, Optional, Tuple

import pytest

from raypod.errors import ClusterError
from raypod.launch import main
from raypod.plan.cluster import Cluster, Host
from raypod.plan.placement import Sizes, place
from raypod.runtime.launcher import ray_hosts
from raypod.runtime.launcher.options import parse, parse_mpi_arguments
from raypod.runtime.launcher.programs import Programs, partition
from raypod.runtime.launcher.records import HostFacts
from raypod.system.sdk import without_horovod
from tests.support import ROOT
from tests.support.fake_vipu import FakeVipu
from tests.support.launches import (
    EIGHT_IN_FOUR,
    FOUR,
    FOUR_IN_TWO,
    TWO,
    Launch,
    launcher,
    program,
    python,
    use_inline_ray,
)
from tests.support.ray_cluster import SECOND_HOST

HEAD, ONE = "127.0.0.1", place(Cluster("pod", (Host("a", "a"),)), Sizes(1, 1, 1))
FIRST_OF_PATH = ("sh", "-c", "echo ${PATH%%:*}")


@pytest.fixture
def launch(
    processes: None, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Launch:
    """Run the command in this process on hosts of an InlineRay, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    use_inline_ray(monkeypatch)
    return launcher(capfdbinary)


@pytest.mark.parametrize(
    ("strict", "inherited", "expected"),
    [([], None, None), ([], "1", "1"), (["--strict"], "0", "1"), (["--strict", "no"], "1", "0")],
)
def test_strict_mode_is_a_variable(strict: List[str], inherited: Optional[str], expected: Optional[str]) -> None:
    request, _ = parse([*strict, "--num-instances", "2", "program"])
    caller = {"EMULATED_POD_STRICT": inherited} if inherited else {}
    placement = place(Cluster("pod", (Host("a", "a"), Host("b", "b"))), Sizes(2, 2, 1))
    interpreters = [sys.executable] * 2
    programs = Programs(request, placement, parse_mpi_arguments(request), caller, ".", (), interpreters=interpreters)
    for spec in placement.instances:
        assert programs.environment(spec, HostFacts("", {})).get("EMULATED_POD_STRICT") == expected


OWN = ["--device", "emulated", "--strict", "--run-dir", "r", "--grace", "1", "--start-timeout", "9", "-v"]


@pytest.mark.parametrize(
    ("words", "is_instance"),
    [([], False), (OWN, False), (["--status-port", "0"], False), (["--num-instances", "1"], True)]
    + [(["--num-replicas", "1"], True), (["-x", "A=1"], True), (["--host", "a"], True), (["--print-topology"], True)],
)
def test_a_program_is_an_instance_only_with_an_option_of_poprun(words: List[str], is_instance: bool) -> None:
    request, _ = parse([*words, "python", "main.py", "--num-instances", "4"])
    programs = Programs(request, ONE, parse_mpi_arguments(request), {}, ".", ("/sdk",), interpreters=["/bin/p"])
    env = programs.environment(ONE.instances[0], HostFacts("", {}))
    assert any(name.startswith(("POPDIST_", "OMPI_", "HOROVOD_")) for name in env) is is_instance
    assert env["PYTHONPATH"].endswith(":/sdk")


def test_imported_options_count_and_a_plain_program_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, is_plain in (("run-dir: r\n", True), ("num-instances: 1\n", False)):
        (tmp_path / "launch.yaml").write_text(text)
        assert parse(["--import-config", str(tmp_path / "launch.yaml"), "program"])[0].is_plain is is_plain
    tool, caller = FakeVipu(monkeypatch), {"IPUOF_VIPU_API_PARTITION_ID": "mine"}
    with partition(parse(["program"])[0], ONE, True, caller, pytest.fail) as variables:
        assert (variables, tool.commands) == ({}, [])


def test_cluster_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hangs(log: object) -> None:
        raise ClusterError("no Ray cluster responds at h:1: no answer within 3 s")

    tool, closed = FakeVipu(monkeypatch), []
    session = SimpleNamespace(open=hangs, close=lambda: closed.append(True))
    monkeypatch.setattr(ray_hosts, "RaySession", lambda *_: session)
    monkeypatch.setattr("raypod.launch.sdk_for_programs", lambda device: (SimpleNamespace(has_ipus=True), ()))
    monkeypatch.chdir(tmp_path)
    assert main(["--vipu-partition", "p", "true"]) == 2
    assert capsys.readouterr().err == "raypod: error: no Ray cluster responds at h:1: no answer within 3 s\n"
    assert (tool.commands, closed, list(tmp_path.iterdir())) == ([], [True], [])


def test_ray_accepts_only_command_lines_in_utf8(processes: None, tmp_path: Path) -> None:
    def launched(*words: str) -> str:
        line, env = [sys.executable, "-m", "raypod.launch", *words], {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, cwd=tmp_path, env=env, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 2
        return done.stderr.decode()

    end = " is not UTF-8, and Ray accepts no other: rename it, or make a link with another name to it\n"
    assert launched("--run-dir", "caf\udce9", "true") == f"raypod: error: --run-dir: the name caf\\xe9{end}"
    assert launched("echo", "caf\udce9") == f"raypod: error: the command line: the name caf\\xe9{end}"
    assert not list(tmp_path.iterdir())


IMPORTS = """
import horovod.torch, popdist, importlib.util
print(horovod.__version__, popdist.__file__, importlib.util.find_spec("poptorch"))
"""


@pytest.mark.parametrize("installed", [False, True])
def test_horovod_on_ipus(processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    (tmp_path / "popdist.py").write_text("")
    if installed:
        (tmp_path / "horovod" / "torch").mkdir(parents=True)
        (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'installed'")
    request, _ = parse(["--num-instances", "1", "program"])
    caller = {**os.environ, "PYTHONPATH": str(tmp_path)}
    arguments = parse_mpi_arguments(request)
    programs = Programs(request, ONE, arguments, caller, ".", (), interpreters=[sys.executable])
    env = programs.environment(ONE.instances[0], HostFacts("", {}))
    words = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    version = "installed" if installed else "0.28.1+emulated"
    assert (done.stdout, done.stderr) == (f"{version} {tmp_path}/popdist.py None\n", "")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert ("no Horovod is installed here" in without_horovod()) is not installed


# ---- programs of poprun ----------------------------------------------------------------------------------------------


def test_a_program_without_options_runs_as_without_a_launcher(launch: Launch) -> None:
    ask = "import popdist; print(popdist.isPopdistEnvSet(), popdist.getNumInstances())"
    assert launch(*python(ask)).lines(0) == ["False 1"]
    assert launch("--num-instances", "1", *python(ask)).lines(0) == ["True 1"]


def test_every_query_of_popdist(launch: Launch) -> None:
    found = launch(*EIGHT_IN_FOUR, *program("queries.py"))
    assert found.code == 0, found.err
    for index in range(4):
        assert found.lines(index) == [
            f"instance {index} of 4 local {index} replicas 2 of 8 from {2 * index} ipus 2 device {24 + index} "
            f"set True check True options 2 {index} 4 plain {index} 4"
        ]


def test_horovod_allreduce_in_both_precisions(launch: Launch) -> None:
    found = launch(*FOUR, *program("reductions.py"))
    assert found.code == 0, found.err
    assert found.lines(0)[:2] == ["torch.float32 1.5 [150.0, 0.5]", "torch.float16 1.5 [150.0, 0.5]"]
    assert [found.lines(index)[-1] for index in range(4)] == [f"rank {k} of 4 local {k} of 4" for k in range(4)]


def test_a_training_program_with_flags(launch: Launch) -> None:
    flags = ("--batch-size", "4", "--gradient-accumulation", "4", "--device-iterations", "2", "--samples", "256")
    found = launch(*FOUR_IN_TWO, *program("ddp_main.py", *flags, "--eight-bit-io", "--async-dataloader"))
    assert found.code == 0, found.err
    epochs = [line for line in found.lines(0) if line.startswith("[Epoch")]
    assert [line[:10] for line in epochs] == ["[Epoch 01]", "[Epoch 02]"]
    assert re.fullmatch(r"\[Epoch 02\] loss: \d\.\d{3}, acc: \d+\.\d", epochs[-1])
    (bar,) = [line for line in found.lines(0, "stderr") if "[Epoch 01]" in line and "100%" in line]
    assert "2/2" in bar
    assert "loss=" in bar
    assert all(found.lines(index)[0].startswith("Namespace(") for index in range(2))


def test_each_instance_gets_its_share_of_the_data(launch: Launch) -> None:
    found = launch(*FOUR_IN_TWO, *program("loaders.py"))
    assert found.code == 0, found.err
    for index in range(2):
        lines = [line.split(" first")[0] for line in found.lines(index)]
        assert lines == ["torch 1562 32", "plain 781 32", "popdist 390 64"]
    assert found.lines(0)[2] != found.lines(1)[2]


def test_strict_mode_rejects_what_an_ipu_rejects(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launch("--strict", *program("reads_a_value.py"))
    assert found.code == 1
    cause = r"instance 0 on host \S+ failed: exit code 1 \(\S*Error: aten::item.*\); its log: \S+$"
    assert re.search(cause, found.err.strip())
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    found = launch("--strict", "no", *program("reads_a_value.py"))
    assert (found.code, found.lines(0)) == (0, ["[1.0, 1.0]"])


# ---- environment and hosts -------------------------------------------------------------------------------------------


def test_a_shell_command_has_its_callers_folder(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "kept")
    script = "echo $PWD $MINE $GIVEN $ONE $OMP_NUM_THREADS"
    found = launch(*TWO, "-x", "GIVEN=here", '--instance-mpi-local-args=1:"-x ONE=1"', "sh", "-c", script)
    assert (found.lines(0), found.lines(1)) == ([f"{tmp_path} kept here 1"], [f"{tmp_path} kept here 1 1"])
    launch("-x", "API_KEY=s3cret-1", "--run-dir", "two", "sh", "-c", "true s3cret-1 $API_KEY")
    written = [(tmp_path / "two" / name).read_text() for name in ("launch.yaml", "launch.json")]
    assert not any("s3cret-1" in text for text in written)
    assert "true *** $API_KEY" in written[1]


def test_host_subnet_selects_the_network_of_the_instances(launch: Launch) -> None:
    script = "echo $GLOO_SOCKET_IFNAME $HOROVOD_GLOO_IFACE $HOROVOD_GLOO_RENDEZVOUS_ADDR"
    script += " $EMULATED_POD_RENDEZVOUS $EMULATED_POD_SECRET"
    found = launch(*TWO, "--host-subnet", "127.0.0.0/8", "sh", "-c", script)
    assert found.code == 0, found.err
    for index in range(2):
        assert re.fullmatch(r"lo lo 127\.0\.0\.1:\d+/\w+ 127\.0\.0\.1:\d+ [0-9a-f]{64}", found.lines(index)[0])
    wrong = launch(*TWO, "--host-subnet", "203.0.113.0/24", "true")
    assert wrong.code == 2
    assert "has no address in --host-subnet 203.0.113.0/24; it has" in wrong.err


def test_hosts_of_a_file(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"localhost slots=1\n{SECOND_HOST}\n")
    script = "echo $OMPI_COMM_WORLD_LOCAL_SIZE"
    found = launch(*TWO, "--hostfile", "hosts", "--print-topology", "sh", "-c", script)
    assert (found.lines(0), found.lines(1)) == (["1"], ["1"])
    assert f"| {SECOND_HOST}" in found.out


def test_the_interpreter_of_programs(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # the environment is not activated
    own, other = str(Path(sys.executable).parent), str(tmp_path / "bin")
    two = launch(*TWO, "-v", "-H", f"{HEAD},{SECOND_HOST}", *FIRST_OF_PATH)
    assert (two.lines(0), two.lines(1)) == ([own], [own])
    assert f"PATH on {HEAD}, {SECOND_HOST} begins with {own}\n" in two.err
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    hosts = f"provider: {{type: local, head_ip: {HEAD}, worker_ips: [{SECOND_HOST}]}}\n"
    (tmp_path / "pod.yaml").write_text(f"{hosts}metadata: {{raypod: {{python: {other}/python3}}}}")
    named = launch(*TWO, "-v", "--cluster", "pod.yaml", *FIRST_OF_PATH)
    assert (named.lines(0), named.lines(1)) == ([own], [other])
    assert f"PATH on {HEAD} begins with {own}; PATH on {SECOND_HOST} begins with {other}\n" in named.err
    (tmp_path / "pod.yaml").write_text(f"{hosts}metadata: {{raypod: {{python: /nowhere/python}}}}")
    missing = launch(*TWO, "--cluster", "pod.yaml", *FIRST_OF_PATH)
    assert missing.code == 2
    assert "has no interpreter /nowhere/python (metadata.raypod.python of the cluster file)" in missing.err
    for option, expected in (("PATH=/bin", "/bin"), ("PATH", "/usr/bin:/bin")):  # the user's own takes precedence
        assert launch("-x", option, "sh", "-c", "echo $PATH").lines(0) == [expected]


# ---- output and ends -------------------------------------------------------------------------------------------------


def test_only_one_instance_is_printed_and_all_are_logged(launch: Launch) -> None:
    found = launch(*TWO, "--only-output-from-instance", "1", "sh", "-c", "echo $OMPI_COMM_WORLD_RANK")
    assert (found.lines(0), found.lines(1)) == ([], ["1"])
    (log,) = Path("runs").glob("*-launch-sh/logs/instance-0.log")
    assert log.read_text() == "0\n"


def test_the_logs_of_another_launch_are_kept(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert launch("--run-dir", "empty", "echo", "first").code == 0
    again = launch("--run-dir", "empty", "echo", "second")
    assert again.code == 2
    (line,) = again.err.splitlines()
    assert line.startswith("raypod: error: --run-dir empty: the folder is not empty; choose another folder")
    assert (tmp_path / "empty" / "logs" / "instance-0.log").read_text() == "first\n"
    assert [each.name for each in tmp_path.iterdir()] == ["empty"]


THROW = "import ctypes; ctypes.CDLL('libstdc++.so.6')['_ZSt21__throw_runtime_errorPKc'](b'no device')"


@pytest.mark.parametrize(
    ("words", "code", "cause"),
    [
        (("sh", "-c", "[ $OMPI_COMM_WORLD_RANK = 1 ] && exit 7; sleep 60; touch completed"), 7, "1.*exit code 7; its"),
        (("sh", "-c", "[ $OMPI_COMM_WORLD_RANK = 1 ] && kill -9 $$; sleep 60"), 137, r"1.*signal 9 \(SIGKILL\);"),
        (python("raise ValueError('broken')"), 1, r"exit code 1 \(ValueError: broken\);"),
        (python(THROW), 134, r"killed by signal 6 \(SIGABRT\) \(what\(\): no device\);"),
        (("no-such-program",), 127, "cannot start no-such-program: No such file or directory;"),
        (("train.py",), 127, "cannot start train.py: it is not on the PATH; run `python train.py`;"),
    ],
)
def test_a_failure_ends_all(launch: Launch, tmp_path: Path, words: Tuple[str, ...], code: int, cause: str) -> None:
    (tmp_path / "train.py").write_text("print('here')")
    found = launch(*TWO, *words)
    assert found.code == code
    assert not Path("completed").exists()
    line = found.err.strip().splitlines()[-1]
    assert re.fullmatch(rf"raypod: error: instance \d on host localhost failed: .*; its log: {tmp_path}/\S+\.log", line)
    assert re.search(f"instance .*{cause}", line)


def test_a_closed_stdout_ends_the_programs(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError

    discarded: List[object] = []
    monkeypatch.setattr("raypod.runtime.launcher.output.Console.add", closed)
    monkeypatch.setattr("raypod.launch.discard", discarded.append)
    assert launch(*TWO, "sh", "-c", "echo a; sleep 60").code == 128 + 13
    assert discarded
