"""Processes: their memory, start times and signals, the cores and the usage of a host, and the record of activity."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator, List, Optional, Sequence

import psutil
import pytest

from raypod.runs import run_state
from raypod.runtime.coordinator.stop import Stop
from raypod.system import activity_record, companion, signals
from raypod.system.activity_record import Activity, ActivityRecord, Identity
from raypod.system.companion import end_session
from raypod.system.cores import Core, cpus_of, divide, replica_cpus, usable_cores
from raypod.system.process import StepTimer, cpu_seconds, digest_of_modules, log_stream, process_start_ticks
from raypod.system.signals import SignalDeadline
from raypod.system.usage import HostMeter
from tests.support import ROOT
from tests.support.bounded import GONE_WITHIN_S, wait_until

PROGRAM = """
import resource, threading
from raypod.system import process

supported = process.keep_freed_memory() if {keep} else None
import torch  # noqa: E402


def step():
    activations = [torch.empty(2 << 20).fill_(1.0) for _ in range(12)]


def steps():
    for _ in range(16):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step()
    print(supported, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def test_repeated_allocations_cause_fewer_page_faults(run_python: Callable[[str], str]) -> None:
    supported, kept = run_python(PROGRAM.format(keep=True)).split()
    if supported != "False":  # another C library
        assert 2 * int(kept) < int(run_python(PROGRAM.format(keep=False)).split()[1])


RELEASED = """
import psutil
from raypod.system import process

supported, blocks = process.keep_freed_memory(), bytearray(200_000_000)
del blocks
before = psutil.Process().memory_info().rss
process.release_freed_memory()
print(supported, before - psutil.Process().memory_info().rss)
"""


def test_kept_memory_can_be_released(run_python: Callable[[str], str]) -> None:
    supported, released = run_python(RELEASED).split()
    assert supported == "False" or int(released) > 150_000_000


LARGE_PAGES = """
import re, threading
from pathlib import Path
from raypod.system import process

supported = process.keep_freed_memory()
ended = threading.Event()
for _ in range(3):
    threading.Thread(target=ended.wait).start()
import torch  # noqa: E402

kept = process.single_thread("instance").submit(torch.ones, 16 << 20).result()
address = kept.data_ptr()
for line in Path("/proc/self/smaps").read_text().splitlines():
    span = re.match(r"([0-9a-f]+)-([0-9a-f]+) .*?(\\S*)$", line)
    if span:
        is_there = int(span[1], 16) <= address < int(span[2], 16)
        name = span[3]
    elif is_there and line.startswith("VmFlags"):
        print(supported, name, "hg" in line.split())
ended.set()
"""


def test_a_thread_beside_others_allocates_large_pages_of_the_heap(run_python: Callable[[str], str]) -> None:
    supported, name, is_advised = run_python(LARGE_PAGES).split()
    if supported != "False":  # another C library
        assert name == "[heap]"
        assert is_advised == str(Path("/sys/kernel/mm/transparent_hugepage").exists())


def test_a_process_has_start_ticks_until_it_is_reaped(processes: None) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = process_start_ticks(child.pid)
    assert ticks is not None
    assert ticks >= (process_start_ticks(os.getpid()) or 0)
    child.communicate(b"\n", timeout=30)
    assert process_start_ticks(child.pid) is None


@pytest.mark.parametrize("log", ["storage.log", None])
def test_a_companion_starts_in_a_session_of_its_own_with_the_package_of_its_parent(
    log: Optional[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: List[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: started.append((command, options)))
    monkeypatch.setenv("PYTHONPATH", "/own/code")
    path = log and tmp_path / log
    companion.start_module("raypod.runs.upload.process", ["--keep=2"], path)
    ((command, options),) = started
    assert command == [sys.executable, "-m", "raypod.runs.upload.process", "--keep=2"]
    assert options["env"] == {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}/own/code"}
    assert (options["stdin"], options["start_new_session"]) == (subprocess.PIPE, True)
    if path:
        assert (path.exists(), options["stdout"].closed, options["stderr"]) == (True, True, subprocess.STDOUT)
    else:
        assert (options["stdout"], options["stderr"]) == (subprocess.PIPE, None)


def test_the_end_of_a_session_does_not_reach_a_process_that_has_its_number_by_now(processes: None) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        awaited = subprocess.Popen(["true"], start_new_session=True)
        awaited.wait(timeout=30)
        awaited.pid = other.pid
        end_session(awaited)
        assert other.poll() is None
        end_session(other)
        assert other.returncode == -signal.SIGKILL


def test_a_process_that_cannot_be_killed_is_awaited_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: List[int] = []
    monkeypatch.setattr(os, "killpg", lambda number, how: killed.append(number))

    def wait(timeout: Optional[float] = None) -> None:
        assert timeout is not None
        raise subprocess.TimeoutExpired("mirror", timeout)

    process: Any = SimpleNamespace(stdin=None, returncode=None, pid=12345, wait=wait)  # in uninterruptible sleep
    end_session(process)
    assert killed == [12345]


def test_the_age_of_a_process_does_not_include_what_a_shell_did_before_exec(processes: None) -> None:
    code = "import time; from raypod.system.process import process_age_s; print(process_age_s(), time.time())"
    script = f"date +%s.%N; sleep 1; exec '{sys.executable}' -c '{code}'"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    begun_s, age_s, now_s = map(float, done.stdout.split())
    assert 0 < age_s < now_s - begun_s - 0.9


def test_consecutive_steps_are_measured_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [10.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    timer = StepTimer()
    for step, seconds in (("first", 1.0), ("second", 2.0)):
        now_s[0] += seconds
        timer.end(step)
    now_s[0] += 60.0
    timer.begin()
    now_s[0] += 3.0
    timer.end("after a break")
    assert timer.steps == [("first", 1.0), ("second", 2.0), ("after a break", 3.0)]


def test_the_cpu_time_of_threads_includes_their_child_processes(processes: None) -> None:
    assert cpu_seconds([2**22]) == 0.0  # no such thread
    this = threading.get_native_id()
    before_s = cpu_seconds([this])
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        assert cpu_seconds([this]) - before_s > 0.25
        child.communicate(b"\n", timeout=30)


def test_a_log_on_a_full_disk_raises_nothing(tmp_path: Path) -> None:
    for path, content in ((Path("/dev/full"), ""), (tmp_path / "log", "a line\n\xe9")):
        descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT)
        stream = log_stream(descriptor)
        print("a line", file=stream)
        stream.write("\xe9" + "x" * (1 << 16) * (not content))
        stream.flush()
        os.close(descriptor)
        assert not content or path.read_text() == content


def test_the_digest_of_modules_is_that_of_their_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = digest_of_modules(tmp_path)
    (tmp_path / ".#a.py").symlink_to("user@host.1")  # of an editor, for a file that is not saved
    (tmp_path / "lost.py").symlink_to("removed.py")
    (tmp_path / "a.txt").touch()
    assert digest_of_modules(tmp_path) == first
    (tmp_path / "b.py").touch()
    (tmp_path / "a.py").write_text("2")
    assert len({first, digest_of_modules(tmp_path)}) == 2


_GARBAGE_AT_A_FORK = """
import gc, os, sys
from raypod.runtime.worker import process
class Handle:
    def __del__(self):
        print("deleted by the", "parent" if os.getpid() == parent else "child", flush=True)
gc.disable()
parent, handle = os.getpid(), Handle()
handle.cycle = handle
del handle
child = os.fork()
if child == 0:
    gc.collect()
    os._exit(0)
os.waitpid(child, 0)
gc.collect()
"""


def test_a_forked_child_does_not_delete_the_garbage_of_its_parent(run_python: Callable[[str], str]) -> None:
    """Handles of Ray in it would write to the connections of the parent."""
    assert run_python(_GARBAGE_AT_A_FORK).split("\n")[0] == "deleted by the parent"


def system(folder: Path, nodes: int, cores: int, threads: int) -> Path:
    """Write a host as Linux describes it: the CPUs of a node are consecutive, second hardware threads come last."""
    for node in range(nodes):
        first = [[node * cores + core + thread * nodes * cores for thread in range(threads)] for core in range(cores)]
        path = folder / "node" / f"node{node}" / "cpulist"
        path.parent.mkdir(parents=True)
        path.write_text(",".join(str(cpu) for siblings in first for cpu in siblings) + "\n")
        for siblings in first:
            for cpu in siblings:
                topology = folder / "cpu" / f"cpu{cpu}" / "topology"
                topology.mkdir(parents=True)
                (topology / "thread_siblings_list").write_text(",".join(map(str, siblings)) + "\n")
    return folder


def parts(cores: Sequence[Core], instances: int) -> List[List[int]]:
    return [cpus_of(part) for part in divide(cores, instances)]


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    return system(tmp_path, nodes=2, cores=16, threads=2)


def test_cores_of_two_nodes_are_divided_between_instances_and_replicas(two_nodes: Path) -> None:
    cores = usable_cores(two_nodes, range(64))
    assert [core.node for core in cores] == [0] * 16 + [1] * 16
    assert (cores[1], parts(cores, 1)) == (Core(0, (1, 33)), [list(range(64))])
    assert parts(cores, 2) == [[*range(16), *range(32, 48)], [*range(16, 32), *range(48, 64)]]
    # Instances alternate between the nodes, and share no core.
    four = parts(cores, 4)
    assert four[:2] == [[*range(8), *range(32, 40)], [*range(16, 24), *range(48, 56)]]
    assert sorted(cpu for part in four for cpu in part) == list(range(64))
    first, second, third = parts(cores, 3)
    assert (first, third) == ([*range(8), *range(32, 40)], [*range(8, 16), *range(40, 48)])
    assert second == [*range(16, 32), *range(48, 64)]
    shared = parts(cores, 64)  # more instances than cores
    assert all((len(part), shared.count(part)) == (2, 2) for part in shared)
    cores = usable_cores(two_nodes, [0, 1, 2, 32, 33, 16])  # three cores of node 0, one without its second thread
    assert cores == [Core(0, (0, 32)), Core(0, (1, 33)), Core(0, (2,)), Core(1, (16,))]
    # One core in four is on node 1, and so is one instance in four.
    assert parts(cores, 4) == [[0, 32], [1, 33], [2], [16]]
    assert parts(cores, 2) == [[0, 32], [1, 2, 33]]
    assert parts(usable_cores(two_nodes, [5]), 3) == [[5], [5], [5]]
    cores = usable_cores(two_nodes, range(64))
    assert replica_cpus(cores, 2, 1) == [[*range(16), *range(32, 48)], [*range(16, 32), *range(48, 64)]]
    eight = replica_cpus(cores, 8, 4)
    assert [len(cpus) for cpus in eight] == [8] * 8
    assert sorted(cpu for cpus in eight for cpu in cpus) == list(range(64))
    # More replicas than cores compute on hardware threads, and not more at a time than their threads have CPUs.
    assert sorted(replica_cpus(cores, 100, 1)) == [[cpu] for cpu in range(64)]
    assert len(replica_cpus(cores, 100, 4)) == 16
    assert replica_cpus(cores, 3, 128) == [list(range(64))]


def test_one_core_and_an_undescribed_host(tmp_path: Path) -> None:
    cores = usable_cores(tmp_path, [3])
    assert (cores, parts(cores, 1), parts(cores, 2)) == ([Core(0, (3,))], [[3]], [[3], [3]])
    assert replica_cpus(cores, 4, 2) == [[3]]
    assert usable_cores(tmp_path, [1, 0]) == [Core(0, (0,)), Core(0, (1,))]


_ZERO = dict.fromkeys(("nice", "system", "idle", "iowait", "irq", "softirq", "steal"), 0.0)
CpuTimes = namedtuple("CpuTimes", ("user", *_ZERO, "guest", "guest_nice"), defaults=(*_ZERO.values(), 5.0, 5.0))


def test_usage_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, times = [10.0], [CpuTimes(user=100, idle=90, iowait=10)]
    interfaces = {"lo": SimpleNamespace(bytes_recv=900, bytes_sent=900)}
    interfaces["eth0"] = SimpleNamespace(bytes_recv=5, bytes_sent=7)
    interfaces["ib0"] = SimpleNamespace(bytes_recv=10, bytes_sent=20)
    monkeypatch.setattr("raypod.system.usage.time.monotonic", lambda: now[0])
    monkeypatch.setattr("psutil.cpu_times", lambda: times[0])
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=1000, available=400))
    monkeypatch.setattr("psutil.net_io_counters", lambda **_: interfaces)
    meter = HostMeter(tmp_path)
    first = meter.measure()
    assert first.cpu_share is None
    assert (first.memory_used_bytes, first.memory_total_bytes) == (600, 1000)
    assert (first.network_received_bytes, first.network_sent_bytes) == (15, 27)
    assert 0 < first.disk_used_bytes <= first.disk_total_bytes
    times[0] = CpuTimes(user=130, idle=100, iowait=10)
    assert meter.measure() is first  # too soon
    now[0] += 1
    assert meter.measure().cpu_share == 0.75


def test_this_host_has_a_usage_but_none_without_proc_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = HostMeter().measure()
    assert 0 < usage.memory_used_bytes < usage.memory_total_bytes
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path / "none"))
    assert HostMeter(tmp_path).measure() is None
    assert cpus_of(usable_cores()) == sorted(os.sched_getaffinity(0))


HOLDS = """
import ctypes, threading, time
from raypod.system.activity_record import ActivityRecord

def hold_the_lock():
    print(*record.identity, flush=True)
    while True:  # a signal ends the sleep
        ctypes.PyDLL(None).sleep(60)

record = ActivityRecord()
record.write("in call 3", time.monotonic() - 5, 2, 0.5, threading.get_native_id())
hold_the_lock()
"""


def test_a_process_that_holds_its_interpreter_lock_is_observed_until_it_is_stopped(processes: None) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            identity = Identity(*map(int, process.stdout.readline().split()))
            found = activity_record.read(identity)
            assert (found.name, found.calls, found.slowest_call_s) == ("in call 3", 2, 0.5)
            assert found.duration_s > 5
            assert found.cpu_s > 0
            first, second = activity_record.stacks(identity), activity_record.stacks(identity)
            assert first.count("in hold_the_lock") == second.count("in hold_the_lock") == 1
            process.send_signal(signal.SIGSTOP)
            assert wait_until(lambda: activity_record.read(identity) is None)
            other = identity._replace(start_ticks=identity.start_ticks - 1)
            assert (activity_record.read(other), activity_record.stacks(other)) == (None, "")
        finally:
            process.kill()
    assert (activity_record.read(identity), activity_record.stacks(identity)) == (None, "")


def test_a_record_that_is_being_written_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ActivityRecord()
    faulthandler.unregister(signal.SIGUSR2)
    assert activity_record.read(record.identity) is None  # nothing is written yet
    record.write("saving", time.monotonic(), 0, None, 1)
    whole = bytes(record._map)
    record._map[0:1] = bytes([whole[0] ^ 1])
    reads = []

    def path(*arguments: Any) -> Any:
        reads.append(arguments)
        if len(reads) == 3:
            record._map[:] = whole
        return original(*arguments)

    original = activity_record.path_of
    monkeypatch.setattr(activity_record, "path_of", path)
    found = activity_record.read(record.identity)
    assert isinstance(found, Activity)
    assert (found.name, found.calls, found.slowest_call_s, found.cpu_s, len(reads)) == ("saving", 0, None, 0.0, 3)
    for each in (record._map, record._file, record._stacks):
        each.close()


WITHIN_S = 0.3


def test_copies_of_a_signal_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [7.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    requests = signals.SignalFilter()
    found = []
    for elapsed_s in (0.0, 0.001, 0.1, 0.5, 0.001):
        now_s[0] += elapsed_s
        found.append(requests.is_copy())
    assert found == [False, True, True, False, True]


def test_a_postponed_signal_is_delivered_at_the_end_of_the_context() -> None:
    done = []

    def work() -> None:
        with signals.postponed_signals():
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_sighup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signals.stop_signals() == [signal.SIGINT, signal.SIGTERM]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in signals.stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_ends_a_run_with_a_checkpoint(processes: None, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    line = [sys.executable, "-m", "raypod.train", "--device", "emulated", "--fleet", "inline", "--epochs", "400"]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
        os.execv(sys.executable, [*line, "--num-instances", "1", "--run-dir", str(folder)])
    process, metrics = psutil.Process(pid), folder / "metrics.jsonl"
    try:
        is_training = wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 3, 120)
        os.close(terminal)
        assert process.wait(60) == 130
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert is_training
    assert run_state.read(folder).state == run_state.INTERRUPTED
    assert (folder / "checkpoints" / "LATEST").is_file()


@pytest.mark.parametrize(("seconds", "is_left"), [(0, False), (3, False), (1000, True)])
def test_only_the_alarm_of_ray_is_cancelled_by_a_stop(seconds: int, is_left: bool) -> None:
    stop = Stop()
    signal.alarm(seconds)
    try:
        with stop.deferred():
            stop.on_signal(signal.SIGTERM, None)
        assert (signal.alarm(0) > 0) == is_left
    finally:
        signal.alarm(0)
    assert stop.requested


@pytest.fixture
def handled() -> Iterator[List[str]]:
    """The steps that were made; SIGUSR1 and SIGUSR2 are handled."""
    steps: List[str] = []
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, lambda *_: steps.append("handled")) for number in numbers]
    yield steps
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


def test_the_steps_of_a_deadline_follow_its_signal_in_order(handled: List[str]) -> None:
    began_s = time.monotonic()
    steps = (lambda: handled.append("interrupt"), lambda: handled.append("end"))
    made = SignalDeadline([signal.SIGUSR1], WITHIN_S, *steps)
    signal.raise_signal(signal.SIGUSR2)  # not of the deadline
    time.sleep(1.5 * WITHIN_S)
    assert handled == ["handled"]
    signal.raise_signal(signal.SIGUSR1)
    assert wait_until(lambda: len(handled) == 4)
    assert handled == ["handled", "handled", "interrupt", "end"]
    assert time.monotonic() - began_s >= 2.3 * WITHIN_S
    made.close()


def test_a_signal_reaches_the_reader_before_it(handled: List[str]) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    first = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    made = SignalDeadline([signal.SIGUSR2], WITHIN_S, lambda: None, lambda: None)
    try:
        signal.raise_signal(signal.SIGUSR1)
        received: List[bytes] = []
        thread = threading.Thread(target=lambda: received.append(os.read(reader, 1)), daemon=True)
        thread.start()
        thread.join(GONE_WITHIN_S)
        assert received == [bytes([signal.SIGUSR1])]
    finally:
        made.close()
        assert signal.set_wakeup_fd(first) == writer
        os.close(reader)
        os.close(writer)
