"""Tests of `raypod launch` on a Ray cluster: programs of poprun run unchanged; output, signals and ends."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from pathlib import Path
from typing import Any, Callable, Iterator, List, NamedTuple, Tuple

import psutil
import pytest
from bounded import COMMAND_S, GONE_WITHIN_S, wait_until
from ray_cluster import SECOND_HOST, SIZES, THIRD_HOST, ray_cluster

from raypod.launch import main

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PROGRAMS = Path(__file__).resolve().parent / "programs"
MARK = "RAYPOD_TEST_LAUNCH"
STOPPED_S = 14.0  # longer than a host may take to answer
EIGHT_IN_FOUR = ("--num-replicas", "8", "--num-instances", "4", "--ipus-per-replica", "2")
FOUR = ("--num-replicas", "4", "--num-instances", "4")
TWO = ("--num-replicas", "2", "--num-instances", "2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of two hosts on this machine, to which this process is connected."""
    # All processes of the cluster inherit the variable.
    with ray_cluster(variables={MARK: str(os.getpid())}, num_cpus=2) as made:
        yield made.cluster


class Launched(NamedTuple):
    """The result of a launch."""

    code: int
    out: str
    err: str

    def lines(self, instance: int, stream: str = "stdout") -> List[str]:
        tag = f"[1,{instance}]<{stream}>:"
        text = self.out if stream == "stdout" else self.err
        return [line[len(tag) :] for line in text.splitlines() if line.startswith(tag)]


Launch = Callable[..., Launched]


@pytest.fixture
def head(cluster: Any) -> str:
    """The address of the first host."""
    return str(cluster.head_node.node_ip_address)


@pytest.fixture
def launch(
    cluster: Any, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Launch]:
    """Run the command in this process, which is already connected to Ray, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def run(*words: str) -> Launched:
        capfdbinary.readouterr()
        code = main(list(words))
        out, err = capfdbinary.readouterr()
        return Launched(code, out.decode(), err.decode())

    yield run
    assert wait_until(all_is_cleaned_up)


def all_is_cleaned_up() -> bool:
    """Return whether no actor, placement group and reaper of this test is left."""
    ray = importlib.import_module("ray")
    groups = ray.util.placement_group_table().values()
    return not any(map(_is_ours, psutil.process_iter())) and all(group["state"] == "REMOVED" for group in groups)


def _is_ours(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline() or [""]
        if "HostProcess" in words[0] or any("launcher/" in word for word in words[:5]):
            return process.environ().get(MARK) == str(os.getpid())  # not of a parallel run of these tests
    return False


def python(program: str) -> Tuple[str, ...]:
    return (sys.executable, "-c", program)


def program(name: str, *arguments: str) -> Tuple[str, ...]:
    return (sys.executable, str(PROGRAMS / name), *arguments)


# ---- programs --------------------------------------------------------------------------------------------------------


def test_every_query_of_popdist(launch: Launch) -> None:
    found = launch(*EIGHT_IN_FOUR, *program("queries.py"))
    assert found.code == 0, found.err
    for index in range(4):
        (line,) = found.lines(index)
        assert line == (
            f"instance {index} of 4 local {index} replicas 2 of 8 from {2 * index} ipus 2 device {24 + index} "
            f"set True check True options 2 {index} 4 plain {index} 4"
        )


def test_horovod_allreduce_in_both_precisions(launch: Launch) -> None:
    found = launch(*FOUR, *program("reductions.py"))
    assert found.code == 0, found.err
    assert found.lines(0)[:2] == ["torch.float32 1.5 [150.0, 0.5]", "torch.float16 1.5 [150.0, 0.5]"]
    assert [found.lines(index)[-1] for index in range(4)] == [f"rank {k} of 4 local {k} of 4" for k in range(4)]


def test_each_instance_gets_its_share_of_the_data(launch: Launch) -> None:
    found = launch(*EIGHT_IN_FOUR, *program("loaders.py"))
    assert found.code == 0, found.err
    for index in range(4):
        lines = [line.split(" first")[0] for line in found.lines(index)]
        assert lines == ["torch 1562 32", "plain 390 32", "popdist 195 64"]
    firsts = {found.lines(index)[2].split()[-1] for index in range(4)}
    assert len(firsts) == 4


def test_a_training_program_with_flags(launch: Launch) -> None:
    flags = ("--batch-size", "4", "--gradient-accumulation", "4", "--device-iterations", "2", "--eight-bit-io")
    found = launch(*EIGHT_IN_FOUR, *program("ddp_main.py", *flags, "--async-dataloader"))
    assert found.code == 0, found.err
    epochs = [line for line in found.lines(0) if line.startswith("[Epoch")]
    assert [line[:10] for line in epochs] == ["[Epoch 01]", "[Epoch 02]"]
    assert re.fullmatch(r"\[Epoch 02\] loss: \d\.\d{3}, acc: \d+\.\d", epochs[-1])
    (bar,) = [line for line in found.lines(0, "stderr") if "[Epoch 01]" in line and "100%" in line]
    assert "2/2" in bar
    assert "loss=" in bar
    assert all(found.lines(index)[0].startswith("Namespace(") for index in range(4))


def test_a_shell_command_runs_in_the_callers_folder_and_environment(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "kept")
    script = "echo $PWD $MINE $GIVEN $ONE $OMP_NUM_THREADS"
    found = launch(*TWO, "-x", "GIVEN=here", '--instance-mpi-local-args=1:"-x ONE=1"', "sh", "-c", script)
    assert found.lines(0) == [f"{tmp_path} kept here 1"]
    assert found.lines(1) == [f"{tmp_path} kept here 1 1"]


def test_instances_are_divided_between_two_hosts(launch: Launch, head: str) -> None:
    found = launch(*TWO, "--print-topology", "-H", f"{head},{SECOND_HOST}", *program("reductions.py"))
    assert found.code == 0, found.err
    assert [found.lines(index)[-1] for index in range(2)] == [f"rank {k} of 2 local 0 of 1" for k in range(2)]
    assert f"| {SECOND_HOST}" in found.out


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
    found = launch(*TWO, "--hostfile", "hosts", "sh", "-c", "echo $OMPI_COMM_WORLD_LOCAL_SIZE")
    assert (found.lines(0), found.lines(1)) == (["1"], ["1"])
    (tmp_path / "hosts").write_text(f"{SECOND_HOST}\n# two\n{SECOND_HOST}\n")
    twice = launch(*TWO, "--hostfile", "hosts", "true")
    assert twice.code == 2
    assert f"error: hosts, line 3: host {SECOND_HOST} is listed twice in hosts, line 1" in twice.err


SAY_FOLDER = ("-c", "import os, sys; print(os.path.dirname(sys.executable))")


@pytest.fixture
def other_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(packages, "same.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_programs_run_with_the_interpreter_of_the_launch_and_of_the_cluster_file(
    launch: Launch, head: str, other_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    own, other = str(Path(sys.executable).parent), str(other_environment / "bin")
    two = launch(*TWO, "-v", "-H", f"{head},{SECOND_HOST}", "python3", *SAY_FOLDER)
    assert (two.lines(0), two.lines(1)) == ([own], [own])
    assert f"PATH on {head}, {SECOND_HOST} begins with {own}\n" in two.err
    file = tmp_path / "pod.yaml"
    text = (
        f"provider: {{type: local, head_ip: {head}, worker_ips: [{SECOND_HOST}]}}\nmetadata: {{raypod: {{python: %s}}}}"
    )
    file.write_text(text % f"{other}/python3")
    named = launch(*TWO, "-v", "--cluster", str(file), "python3", *SAY_FOLDER)
    assert (named.lines(0), named.lines(1)) == ([own], [other])
    assert f"PATH on {head} begins with {own}; PATH on {SECOND_HOST} begins with {other}\n" in named.err
    file.write_text(text % "/nowhere/python")
    missing = launch(*TWO, "--cluster", str(file), "python3", *SAY_FOLDER)
    assert missing.code == 2
    assert "has no interpreter /nowhere/python (metadata.raypod.python of the cluster file)" in missing.err


@pytest.mark.parametrize(("option", "expected"), [("PATH=/bin", "/bin"), ("PATH", "/usr/bin:/bin")])
def test_the_users_path_takes_precedence(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, option: str, expected: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert launch("-x", option, "sh", "-c", "echo $PATH").lines(0) == [expected]


# ---- as a separate process -------------------------------------------------------------------------------------------


@pytest.fixture
def command(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the command as a process that joins the cluster, in an empty folder."""
    started: List[subprocess.Popen[bytes]] = []

    def start(*words: str, python: str = sys.executable, **variables: str) -> subprocess.Popen[bytes]:
        root = str(PROGRAMS.parent.parent)
        env = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": root, **variables}
        line = [python, "-m", "raypod.launch", *words]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(line, cwd=tmp_path, env=env, stdin=pipe, stdout=pipe, start_new_session=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate(timeout=GONE_WITHIN_S)
    assert wait_until(all_is_cleaned_up)


def test_stdin_goes_to_instance_0(command: Callable[..., subprocess.Popen[bytes]]) -> None:
    launched = command(*TWO, "sh", "-c", "cat; echo end")
    out, _ = launched.communicate(b"a\nb\n", timeout=COMMAND_S)
    assert sorted(out.splitlines()) == [
        *(b"[1,0]<stdout>:a", b"[1,0]<stdout>:b", b"[1,0]<stdout>:end"),
        b"[1,1]<stdout>:end",
    ]


def test_programs_run_in_the_environment_of_the_launch_even_if_it_is_not_activated(
    command: Callable[..., subprocess.Popen[bytes]], other_environment: Path
) -> None:
    own = f"{other_environment}/bin"
    out, _ = command("python", *SAY_FOLDER, python=f"{own}/python", PATH="/usr/bin:/bin").communicate(timeout=COMMAND_S)
    assert out.decode() == f"[1,0]<stdout>:{own}\n"


def test_killing_the_launch_ends_all_programs(command: Callable[..., subprocess.Popen[bytes]]) -> None:
    launched = command("sh", "-c", "setsid sleep 61 & echo $!; sleep 61 & echo $!; echo $$; wait")
    assert launched.stdout is not None
    pids = [int(launched.stdout.readline().rpartition(b":")[2]) for _ in range(3)]
    launched.kill()
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


# ---- output ----------------------------------------------------------------------------------------------------------


def test_every_line_is_printed_once_and_complete(launch: Launch, tmp_path: Path) -> None:
    found = launch(*TWO, "--run-dir", "run", *python("for i in range(50_000): print('line', i)"))
    for index in range(2):
        assert found.lines(index) == [f"line {i}" for i in range(50_000)]
        assert (tmp_path / "run" / "logs" / f"instance-{index}.log").read_text().count("\n") == 50_000
    assert found.out.count("\n") == 100_000


def test_only_one_instance_is_printed_and_all_are_logged(launch: Launch) -> None:
    found = launch(*TWO, "--only-output-from-instance", "1", "sh", "-c", "echo $OMPI_COMM_WORLD_RANK")
    assert (found.lines(0), found.lines(1)) == ([], ["1"])
    (log,) = Path("runs").glob("*-launch-sh/logs/instance-0.log")
    assert log.read_text() == "0\n"


def test_equal_lines_are_all_printed(launch: Launch) -> None:
    found = launch(*FOUR, "sh", "-c", "for i in 1 2 3; do echo same; done")
    assert all(found.lines(index) == ["same"] * 3 for index in range(4))


def test_the_logs_of_another_launch_are_kept(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert launch("--run-dir", "empty", "echo", "first").code == 0
    again = launch("--run-dir", "empty", "echo", "second")
    assert again.code == 2
    (line,) = again.err.splitlines()
    assert line.startswith("raypod: error: --run-dir empty: the folder is not empty; choose another folder")
    assert (tmp_path / "empty" / "logs" / "instance-0.log").read_text() == "first\n"
    assert [each.name for each in tmp_path.iterdir()] == ["empty"]


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_a_failed_program_ends_the_others_and_sets_the_exit_code(launch: Launch, tmp_path: Path) -> None:
    found = launch(*FOUR, "sh", "-c", "[ $OMPI_COMM_WORLD_RANK = 2 ] && exit 7; sleep 60; touch completed")
    assert found.code == 7
    assert not Path("completed").exists()
    line = found.err.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"raypod: error: instance 2 on host localhost failed: exit code 7; its log: {tmp_path}/\S+/instance-2\.log",
        line,
    )


def test_an_uncaught_exception_is_reported_as_the_cause(launch: Launch) -> None:
    found = launch(*TWO, sys.executable, "-c", "raise ValueError('broken')")
    assert re.search(r"failed: exit code 1 \(ValueError: broken\); its log: \S+$", found.err.strip())


def test_strict_mode_rejects_what_an_ipu_rejects(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launch("--strict", *program("reads_a_value.py"))
    assert found.code == 1
    assert re.search(
        r"instance 0 on host \S+ failed: exit code 1 \(\S*Error: aten::item.*\); its log: \S+$", found.err.strip()
    )
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    found = launch("--strict", "no", *program("reads_a_value.py"))
    assert (found.code, found.lines(0)) == (0, ["[1.0, 1.0]"])


def test_an_uncaught_cpp_exception_is_reported_as_the_cause(launch: Launch) -> None:
    throw = "import ctypes; ctypes.CDLL('libstdc++.so.6')['_ZSt21__throw_runtime_errorPKc'](b'no device')"
    found = launch(*TWO, sys.executable, "-c", throw)
    assert found.code == 134
    assert re.search(
        r"failed: killed by signal 6 \(SIGABRT\) \(what\(\): no device\); its log: \S+$", found.err.strip()
    )


def test_a_killed_program_is_reported_with_its_signal(launch: Launch) -> None:
    found = launch(*TWO, "sh", "-c", "[ $OMPI_COMM_WORLD_RANK = 1 ] && kill -9 $$; sleep 60")
    assert found.code == 137
    assert "instance 1 on host localhost failed: killed by signal 9 (SIGKILL);" in found.err


def test_a_missing_program_is_reported(launch: Launch) -> None:
    found = launch("no-such-program")
    assert found.code == 127
    assert "cannot start no-such-program: No such file or directory" in found.err


def test_a_script_of_this_folder_is_not_found_on_the_path(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('here')")
    found = launch("train.py")
    assert found.code == 127
    assert "cannot start train.py: it is not on the PATH; run `python train.py`" in found.err


@contextlib.contextmanager
def interrupted(*numbers: int) -> Iterator[None]:
    """Send signals to this process, 1 s apart, as soon as both programs have printed that they are ready.

    None is sent after the context: a signal that arrives late would interrupt the next test.
    """
    over = threading.Event()

    def ready() -> bool:
        logs = [Path(path).read_bytes() for path in Path("runs").glob("*/logs/instance-*.log")]
        return over.is_set() or sum(b"ready" in log for log in logs) == 2

    def interrupt() -> None:
        wait_until(ready, COMMAND_S)
        for number in numbers:
            if over.is_set():
                return
            os.kill(os.getpid(), number)
            over.wait(1.0)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


TRAPS = (
    "import signal, sys, time\nsignal.signal(signal.{0}, lambda *_: (print('stopped'), sys.exit(0)))\n"
    "print('ready', flush=True)\ntime.sleep(60)"
)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_is_forwarded(launch: Launch, name: str) -> None:
    number = int(signal.Signals[name])
    with interrupted(number):
        found = launch(*TWO, *python(TRAPS.format(name)))
    assert found.code == 128 + number
    assert (found.lines(0), found.lines(1)) == (["ready", "stopped"], ["ready", "stopped"])


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_a_signal_for_the_programs_is_passed_on_and_ends_no_launch(launch: Launch, name: str) -> None:
    with interrupted(int(signal.Signals[name])):
        found = launch(*TWO, *python(TRAPS.format(name)))
    assert found.code == 0
    assert (found.lines(0), found.lines(1)) == (["ready", "stopped"], ["ready", "stopped"])


def test_a_second_sigint_kills_the_programs(launch: Launch) -> None:
    with interrupted(signal.SIGINT, signal.SIGINT):
        found = launch(*TWO, "sh", "-c", "trap 'echo no' INT TERM; echo ready; for i in $(seq 600); do sleep 0.1; done")
    assert found.code == 130


def remove_host(cluster: Any, node: Any, address: str) -> None:
    """Kill a Ray node. Until Ray has noticed it, another node with the same address is confused with it."""
    cluster.remove_node(node, allow_graceful=False)
    nodes = importlib.import_module("ray").nodes
    assert wait_until(lambda: not any(row["Alive"] and row["NodeManagerAddress"] == address for row in nodes()))


def test_a_lost_host_is_reported_in_time(launch: Launch, cluster: Any) -> None:
    third = cluster.add_node(node_ip_address=THIRD_HOST, **SIZES)
    lost_at_s: List[float] = []

    def lose() -> None:
        wait_until(lambda: bool(list(Path("runs").glob("*/logs/instance-1.log"))))
        time.sleep(1.0)
        lost_at_s.append(time.monotonic())
        remove_host(cluster, third, THIRD_HOST)

    thread = threading.Thread(target=lose)
    thread.start()
    found = launch(*TWO, "-H", f"{SECOND_HOST},{THIRD_HOST}", "sleep", "60")
    reported_s = time.monotonic()
    thread.join()
    assert found.code == 1
    assert f"host {THIRD_HOST} is lost, with instance 1: " in found.err
    assert reported_s - lost_at_s[0] < GONE_WITHIN_S


def test_a_launch_that_was_stopped_for_long_continues(
    command: Callable[..., subprocess.Popen[bytes]], cluster: Any, tmp_path: Path
) -> None:
    third = cluster.add_node(node_ip_address=THIRD_HOST, **SIZES)
    try:
        wait = "while [ ! -e continue ]; do sleep 0.1; done; echo done"
        three = ("--num-replicas", "3", "--num-instances", "3")
        hosts = f"{cluster.head_node.node_ip_address},{SECOND_HOST},{THIRD_HOST}"
        launched = command(*three, "-H", hosts, "sh", "-c", f"echo ready; {wait}")
        assert launched.stdout is not None
        ready = [launched.stdout.readline() for _ in range(3)]
        launched.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        launched.send_signal(signal.SIGCONT)
        (tmp_path / "continue").touch()
        out, _ = launched.communicate(timeout=COMMAND_S)
        assert launched.returncode == 0
        assert sorted([*ready, *out.splitlines(keepends=True)]) == sorted(
            f"[1,{index}]<stdout>:{word}\n".encode() for index in range(3) for word in ("ready", "done")
        )
    finally:
        remove_host(cluster, third, THIRD_HOST)
