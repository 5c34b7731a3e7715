"""The programs of one host, without Ray, and their output on the console: tags, lines, bars, byte for byte."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Tuple

import psutil
import pytest

from raypod.runtime.launcher import host_process
from raypod.runtime.launcher import output as module
from raypod.runtime.launcher.host_process import HostProcess
from raypod.runtime.launcher.output import Console, Output
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
        folder = str(Path.cwd())
        made = [Program(index, tuple(argv), env, folder, index == 0) for index, argv in enumerate(programs)]
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
    text = "import time\ntry:\n print('up')\n for _ in range(600): time.sleep(0.1)\n"  # handled only after a sleep
    try:
        found = host(python(f"{text}except KeyboardInterrupt: print('interrupted')"))
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
    pids = [int(owner.stdout.readline()) for _ in range(3)]
    owner.kill()
    owner.wait(10)
    owner.stdout.close()
    assert wait_until(lambda: are_gone(pids))


def test_programs_block_while_their_output_is_not_read(host: Callable[..., Host]) -> None:
    found = host(python("import sys\nfor _ in range(40): sys.stderr.write('x' * 1_000_000)"))
    pump = found.process._pump
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
    assert (cpus_of_node(3, tmp_path), parse_cpu_list("0-3,8\n")) == ([allowed[-1]], [0, 1, 2, 3, 8])
    (tmp_path / "node1" / "cpulist").unlink()
    assert cpus_of_node(0, tmp_path) is None  # a single node: no binding


class Screen:
    """A console, and the reading ends of its two descriptors."""

    def __init__(self, terminal: bool) -> None:
        self.ends: List[Tuple[int, int]] = [pty.openpty() if terminal else os.pipe() for _ in range(2)]
        self.wait_s = 0.05 if terminal else 0.0  # a terminal's bytes arrive with a delay
        self.console = Console(self.ends[0][1], self.ends[1][1])

    def __call__(self, *pieces: Tuple[int, int, bytes]) -> bytes:
        for piece in pieces:
            self.console.add(*piece)
        self.console.flush()
        return self.read()

    def read(self) -> bytes:
        found = b""
        for end, _ in self.ends:
            while select.select([end], [], [], self.wait_s)[0]:
                found += os.read(end, 1 << 16)
        return found.replace(b"\r\n", b"\n")  # line endings of a terminal

    def close(self) -> bytes:
        self.console.close()
        return self.read()


def screen(terminal: bool) -> Iterator[Screen]:
    made = Screen(terminal)
    yield made
    for pair in made.ends:
        for end in pair:
            os.close(end)


@pytest.fixture
def file() -> Iterator[Screen]:
    yield from screen(terminal=False)


@pytest.fixture
def terminal() -> Iterator[Screen]:
    yield from screen(terminal=True)


def test_every_line_has_a_tag_sources_never_mix_and_bytes_are_unchanged(file: Screen) -> None:
    assert file((0, STDOUT, b"a\nb\n")) == b"[1,0]<stdout>:a\n[1,0]<stdout>:b\n"
    assert file((3, STDERR, b"\n")) == b"[1,3]<stderr>:\n"
    assert file((0, STDOUT, b"one "), (1, STDOUT, b"two\n"), (0, STDERR, b"x")) == b"[1,1]<stdout>:two\n"
    assert file((0, STDOUT, b"line\nrest")) == b"[1,0]<stdout>:one line\n"
    data = bytes(range(256)) * 3 + b"\r\n"
    shown = file((4, STDOUT, data + b"end\n")).replace(b"[1,4]<stdout>:", b"")
    assert shown == data.replace(b"\r\n", b"\n") + b"end\n"
    file.console.add(5, STDOUT, b"a\r")
    file.console.add(5, STDOUT, b"\nb\r\n")
    file.console.flush()
    assert os.read(file.ends[0][0], 100) == b"[1,5]<stdout>:a\r\n[1,5]<stdout>:b\r\n"  # CRLF is kept
    assert file.close() == b"[1,0]<stdout>:rest\n[1,0]<stderr>:x\n"


def test_a_progress_bar_becomes_one_plain_line_in_a_file(file: Screen) -> None:
    states = [b"\r 0% |   ", b"\r 50% | #  ", b"\r100% |## "]
    assert all(file((0, STDERR, state)) == b"" for state in states)
    assert file((0, STDERR, b"\n")) == b"[1,0]<stderr>:100% |##\n"
    nested = b"\repochs 0%\n\rsteps 0%\x1b[A\n\rsteps 1%\x1b[A"  # leaves no escape sequences
    assert file((0, STDERR, nested)) == b"[1,0]<stderr>:epochs 0%\n"
    assert file((0, STDERR, b"\rsteps 2%\n")) == b"[1,0]<stderr>:steps 2%\n"


def test_long_lines_and_bars_are_printed_in_parts_in_a_file(file: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_LINE_BYTES", 10)
    assert file((0, STDOUT, b"0123456789ab")) == b"[1,0]<stdout>:0123456789ab\n"
    assert file((0, STDOUT, b"c\n")) == b"[1,0]<stdout>:c\n"
    monkeypatch.setattr(module, "_BAR_STATE_S", 0.0)
    assert (file((0, STDERR, b"\r10%")), file((0, STDERR, b"\r20%"))) == (b"", b"[1,0]<stderr>:20%\n")
    assert file((1, STDERR, b"\r30%")) == b"[1,0]<stderr>:20%\n"


def test_bars_are_drawn_in_place(terminal: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REDRAW_S", 0.0)
    erase, up = b"\r\x1b[K", b"\x1b[A"
    assert terminal((0, STDERR, b"\r 1%")) == erase + b"[1,0]<stderr>: 1%"
    assert terminal((1, STDERR, b"\r 7%")) == b""  # only the bar of instance 0 is drawn
    assert terminal((1, STDOUT, b"hello\n")) == b"[1,1]<stdout>:hello\n" + 2 * erase + b"[1,0]<stderr>: 1%"
    assert terminal((0, STDERR, b"\r100%\n")) == erase + b"[1,0]<stderr>:100%\n"
    terminal((0, STDERR, b"\repochs 0%"))
    assert terminal((0, STDERR, b"\n\rsteps 0%" + up)).endswith(b"epochs 0%\n" + erase + b"[1,0]<stderr>:steps 0%")
    assert terminal((0, STDERR, b"\n\rsteps 1%" + up)) == erase + b"[1,0]<stderr>:steps 1%"
    assert terminal((0, STDERR, b"\n\r        " + up + b"\repochs 9%")) == erase + b"[1,0]<stderr>:epochs 9%"


def test_a_prompt_without_newline_is_shown_on_a_terminal(terminal: Screen) -> None:
    assert terminal((0, STDOUT, b"Name? ")).endswith(b"[1,0]<stdout>:Name? ")


def test_flushed_lines_of_a_program_are_on_the_console_and_in_its_log(file: Screen, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    output = Output(str(tmp_path), 1, file.console)
    output.add(0, STDOUT, b"loss 0.5\nnot yet")
    output.flush()
    assert b"loss 0.5" in file.read()
    assert Path(output.log_file(0)).read_bytes() == b"loss 0.5\nnot yet"
    output.close()


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
