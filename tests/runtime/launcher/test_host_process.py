"""Tests of runtime/launcher/host_process, reaper and output_pump: the programs of one host, without Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Tuple

import psutil
import pytest

from raypod.runtime.launcher import host_process
from raypod.runtime.launcher.host_process import HostProcess
from raypod.runtime.launcher.reaper import Reaper
from raypod.runtime.launcher.records import STDERR, STDOUT, HostReport, Program, ProgramEnd
from raypod.system.process import cpus_of_node, parse_cpu_list
from tests.support.bounded import wait_until

GRACE_S = 1.0


class Host:
    """A host process with programs, and everything that it reported."""

    def __init__(self, *programs: Tuple[str, ...]) -> None:
        self.process = HostProcess()
        self.output: Dict[Tuple[int, int], bytes] = {}
        self.ends: List[ProgramEnd] = []
        self.is_done = False
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        made = [
            Program(index, tuple(argv), env, str(Path.cwd()), reads_stdin=index == 0)
            for index, argv in enumerate(programs)
        ]
        self.process.start(made, GRACE_S)

    def read(self, until: Callable[[], bool]) -> None:
        def is_reached() -> bool:
            report = self.process.read(0.1)
            for instance, stream, data in report.chunks:
                self.output[instance, stream] = self.output.get((instance, stream), b"") + data
            self.ends += report.ends
            self.is_done = report.is_done
            return until()

        assert until() or wait_until(is_reached), (self.output, self.ends)

    def finish(self, grace_s: float = GRACE_S) -> None:
        self.process.end(grace_s)
        self.read(lambda: self.is_done)
        self.process.close()

    def text(self, instance: int = 0, stream: int = STDOUT) -> str:
        return self.output.get((instance, stream), b"").decode()


@pytest.fixture
def host(processes: None) -> Iterator[Callable[..., Host]]:
    made: List[Host] = []

    def start(*programs: Tuple[str, ...]) -> Host:
        made.append(Host(*programs))
        return made[-1]

    yield start
    for each in made:
        if not each.is_done:
            each.finish(0.0)


def python(program: str) -> Tuple[str, ...]:
    return (sys.executable, "-c", program)


def shell(program: str) -> Tuple[str, ...]:
    return ("sh", "-c", program)


def test_output_and_exit_of_every_program(host: Callable[..., Host], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a program")
    found = host(
        shell("echo a; echo b >&2; exit 3"),
        shell("printf 'no end'; kill -9 $$"),
        python("import sys; sys.stdout.buffer.write(bytes(range(256)) * 2000)"),
        ("no-such-program",),
        (str(tmp_path / "text"),),
    )
    found.read(lambda: len(found.ends) == 5)
    found.finish()
    assert (found.text(0), found.text(0, STDERR), found.text(1)) == ("a\n", "b\n", "no end")
    assert found.output[2, STDOUT] == bytes(range(256)) * 2000
    assert {end.instance: (end.exit_code, end.cause) for end in found.ends} == {
        0: (3, "exit code 3"),
        1: (137, "killed by signal 9 (SIGKILL)"),
        2: (0, "exit code 0"),
        3: (127, "cannot start no-such-program: No such file or directory"),
        4: (126, f"cannot start {tmp_path}/text: Permission denied"),
    }


def test_a_line_arrives_as_it_is_printed_and_reports_have_what_runs(host: Callable[..., Host]) -> None:
    found = host(python("import os; print(os.getpid()); import time; time.sleep(60)"), ("true",))
    found.read(lambda: found.text() != "" and len(found.ends) == 1)
    reports: List[HostReport] = []

    def is_measured() -> bool:
        reports.append(found.process.read(0.1))
        return len(reports[-1].programs) > 0

    assert wait_until(is_measured)
    (running,) = reports[-1].programs
    assert (running.instance, running.pid) == (0, int(found.text()))
    assert running.cpu_s >= 0
    assert reports[-1].usage is not None


def test_instance_0_gets_stdin_and_the_others_get_end_of_file(host: Callable[..., Host]) -> None:
    found = host(("cat",), ("cat",))
    assert found.process.write_stdin(b"hello\n")
    found.read(lambda: found.text() == "hello\n" and [end.instance for end in found.ends] == [1])
    assert not found.process.write_stdin(b"")
    found.read(lambda: len(found.ends) == 2)
    assert not found.process.write_stdin(b"more")
    assert {end.exit_code for end in found.ends} == {0}


def test_a_signal_reaches_the_process_group_with_its_default_handler(host: Callable[..., Host]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in Ray's workers; children inherit it
    try:
        found = host(
            # Short sleeps: a signal just before a sleep is handled only at its end.
            python(
                "import time\ntry:\n print('up')\n for _ in range(600): time.sleep(0.1)\n"
                "except KeyboardInterrupt: print('interrupted')"
            )
        )
    finally:
        signal.signal(signal.SIGINT, before)
    found.read(lambda: found.text() == "up\n")
    found.process.signal(signal.SIGINT)
    found.read(lambda: bool(found.ends))
    assert found.text() == "up\ninterrupted\n"


DESCENDANTS = "(setsid sleep 61 & echo $!; exec >&- 2>&-; sleep 61) & echo $!; sleep 62 & echo $!; wait"


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def are_gone(pids: List[int]) -> bool:
    return not any(map(is_alive, pids))


def test_ending_kills_what_remains_after_the_grace_period_with_all_descendants(host: Callable[..., Host]) -> None:
    ignores, ends = "trap '' TERM; echo up; while :; do sleep 0.1; done", "trap 'sleep 0.2; exit 5' TERM; echo up"
    found = host(shell(ignores), shell(f"{ends}; while :; do sleep 0.1; done"), shell(DESCENDANTS))
    found.read(lambda: [found.text(index).count("\n") for index in range(3)] == [1, 1, 3])
    found.finish()
    assert are_gone([int(line) for line in found.text(2).split()])
    assert {end.instance: end.exit_code for end in found.ends} == {0: 137, 1: 5, 2: 143}


@pytest.mark.usefixtures("processes")
def test_killing_the_host_process_ends_all_programs() -> None:
    program = (
        "import os, time\nfrom raypod.runtime.launcher.host_process import HostProcess\n"
        "from raypod.runtime.launcher.records import Program\nhost = HostProcess()\n"
        f"host.start([Program(0, ('sh', '-c', {DESCENDANTS!r}), dict(os.environ), '/', reads_stdin=False)], 0.5)\n"
        "while True:\n  for _, _, data in host.read(1).chunks: os.write(1, data)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pids = [int(owner.stdout.readline()) for _ in range(3)]
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    assert wait_until(lambda: are_gone(pids))


def test_programs_block_while_their_output_is_not_read(host: Callable[..., Host]) -> None:
    found = host(python("import sys\nfor _ in range(40): sys.stderr.write('x' * 1_000_000)"))
    pump = found.process._pump
    assert pump is not None
    assert wait_until(lambda: pump._bytes >= host_process._MAX_BYTES)
    report = found.process.read(5)
    assert sum(len(data) for _, _, data in report.chunks) < 10_000_000
    assert not report.ends


def test_programs_share_the_cpus_of_their_host(host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    program = python("import os; print(os.environ['EMULATED_POD_REPLICAS_AT_A_TIME'])")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    found = host(program, program, program)
    found.read(lambda: len(found.ends) == 3)
    found.finish()  # an end can be reported before the output
    assert [found.text(index).strip() for index in range(3)] == ["2", "2", "2"]
    monkeypatch.setenv("EMULATED_POD_REPLICAS_AT_A_TIME", "5")  # the caller's own choice
    own = host(program)
    own.read(lambda: len(own.ends) == 1)
    own.finish()
    assert own.text().strip() == "5"


def test_cores_of_numa_nodes(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    for node, cpu in enumerate((allowed[0], allowed[-1])):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpu}\n")
    assert cpus_of_node(3, tmp_path) == [allowed[-1]]
    assert parse_cpu_list("0-3,8\n") == [0, 1, 2, 3, 8]
    (tmp_path / "node1" / "cpulist").unlink()
    assert cpus_of_node(0, tmp_path) is None  # a single node: no binding


def test_the_exit_code_of_a_program_is_reported_when_nothing_of_it_is_left(
    processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: List[Tuple[int, int, str]] = []
    reaper = object.__new__(Reaper)
    monkeypatch.setattr(reaper, "_report_end", lambda *end: ends.append(end))
    ended = subprocess.Popen(shell("exit 3"))
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    reaper._running = {ended.pid: 0}
    reaper._descendants()
    assert ends == [(0, 3, "exit code 3")]
    ended.wait()
