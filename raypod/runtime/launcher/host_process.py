"""The actor of one host: it starts the programs of its instances and handles output, signals and stdin.

Plain Python; `ray_hosts.py` makes it a Ray actor. The programs are children of the reaper (`reaper.py`), a separate
process that ends them when this process exits.

The buffer is bounded: while it is full, nothing more is read, and the programs block in their next write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pty
import selectors
import socket
import subprocess
import sys
import threading
import time
import tty
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from raypod.errors import ClusterError
from raypod.runtime.launcher import reaper
from raypod.runtime.launcher.records import STDERR, STDOUT, HostFacts, HostReport, Program, ProgramEnd, ProgramUsage
from raypod.runtime.worker.collectives import horovod_interface, horovod_proxy, uses_installed_horovod
from raypod.runtime.worker.horovod_proxy import HorovodProxy
from raypod.system import interfaces, sdk
from raypod.system.process import cpus_of_node, script_command
from raypod.system.usage import HostMeter, cpu_seconds_of

_MEASURE_INTERVAL_S = 1.0  # of the usage of the host and of its programs
_REAPER_S = 5.0  # bound of the reaper's end; longer than its own


class HostProcess:
    """Runs the programs of one host."""

    def __init__(self) -> None:
        self._pump: Optional[OutputPump] = None
        self._commands = self._stdin = -1
        self._rendezvous: Optional[sdk.rendezvous.StoreServer] = None
        self._horovod_proxy: Optional[HorovodProxy] = None
        self._meter, self._measured_s = HostMeter(), 0.0

    def interpreter(self, named: str) -> str:
        """Return the path of the Python interpreter of programs: `named` if that is a path, else this process's own.

        Raises:
            ClusterError: There is no such interpreter on this host.
        """
        if "/" not in named:
            return sys.executable
        path = str(Path(named).expanduser())
        if not os.access(path, os.X_OK):
            host = socket.gethostname()
            raise ClusterError(f"host {host} has no interpreter {named} (metadata.raypod.python of the cluster file)")
        return path

    def address_in(self, subnet: str) -> str:
        """Return this host's address in a subnet (CIDR) or of the interface of that name.

        Raises:
            ClusterError: The host has no such address.
        """
        return interfaces.address_in(subnet, "--host-subnet")

    def join_rendezvous(self, rendezvous: Dict[str, str], address: str = "") -> HostFacts:
        """Return the variables by which this host reaches the rendezvous; `address` is its own, if one was chosen."""
        self._horovod_proxy = horovod_proxy(rendezvous)
        rendezvous_host = str(sdk.rendezvous.host_of(rendezvous))
        environment = horovod_interface(rendezvous_host)
        if address:
            name = str(interfaces.interface_of(address))
            environment = {"HOROVOD_GLOO_IFACE": name, "GLOO_SOCKET_IFNAME": name}
        environment = {**environment, **rendezvous, **self._horovod_proxy.environment}
        problem = interfaces.own_horovod_problem() if uses_installed_horovod() else None
        return HostFacts(address or rendezvous_host, environment, problem)

    def open_rendezvous(self, address: str) -> Dict[str, str]:
        """Open the rendezvous of all instances at this host's `address`; return its variables."""
        self._rendezvous = sdk.rendezvous.serve(address, 0)
        return self._rendezvous.environment

    def start(self, programs: Sequence[Program], grace_s: float) -> None:
        """Start the programs; `read` returns their output and exits."""
        outputs: Dict[int, Tuple[int, int]] = {}
        described: List[Dict[str, Any]] = []
        inherited: List[int] = []
        bound = [cpus_of_node(each.numa_index) if each.numa_index is not None else None for each in programs]
        for program, cpus in zip(programs, bound):
            stdin, self._stdin = os.pipe() if program.reads_stdin else (os.open(os.devnull, os.O_RDONLY), self._stdin)
            stdout, program_stdout = _open_stdout()
            stderr, program_stderr = os.pipe()
            outputs[stdout], outputs[stderr] = (program.instance, STDOUT), (program.instance, STDERR)
            files = [stdin, program_stdout, program_stderr]
            described.append(_describe(program, files, cpus, sharing=bound.count(cpus)))
            inherited += files
        ends = self._start_reaper(inherited)
        self._pump = OutputPump(outputs, ends, [program.instance for program in programs])
        self._send(programs=described, grace_s=grace_s)

    def read(self, within_s: float) -> HostReport:
        """Return output and exits since the last call, and once a second the usage; wait at most `within_s`."""
        assert self._pump is not None, "call start first"
        report = self._pump.take(within_s)
        if time.monotonic() - self._measured_s < _MEASURE_INTERVAL_S:
            return report
        self._measured_s = time.monotonic()
        running = ((instance, pid, cpu_seconds_of(pid)) for instance, pid in sorted(self._pump.pids.items()))
        programs = tuple(ProgramUsage(instance, pid, cpu_s) for instance, pid, cpu_s in running if cpu_s is not None)
        return dataclasses.replace(report, programs=programs, usage=self._meter.measure())

    def signal(self, number: int) -> None:
        """Send a signal to the process group of every program."""
        self._send(signal=number)

    def end(self, grace_s: float) -> None:
        """Send SIGTERM to all processes of the programs, and SIGKILL after the grace period."""
        self._send(end=grace_s)

    def write_stdin(self, data: bytes) -> bool:
        """Write bytes (b"": end of file) to the program that reads stdin; return False if its stdin is closed."""
        if self._stdin < 0:
            return False
        try:
            while data:
                data = data[os.write(self._stdin, data) :]
                if not data:
                    return True
        except BrokenPipeError:
            pass  # the program exited, or closed its stdin
        os.close(self._stdin)
        self._stdin = -1
        return False

    def close(self) -> None:
        """Kill the programs and close everything. If the actor is killed instead, the reaper ends the programs."""
        if self._pump is not None:
            self.end(0.0)
            deadline = time.monotonic() + _REAPER_S
            while not self._pump.take(_REAPER_S).is_done and time.monotonic() < deadline:
                pass
            os.close(self._commands)
        if self._stdin >= 0:
            os.close(self._stdin)
        if self._horovod_proxy is not None:
            self._horovod_proxy.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _start_reaper(self, files: List[int]) -> int:
        """Start the reaper, which inherits `files` (closed here); return the descriptor of its output."""
        commands, self._commands = os.pipe()
        ends, reaper_output = os.pipe()
        script = script_command(str(reaper.__file__))
        starter = subprocess.Popen(
            script, stdin=commands, stdout=reaper_output, pass_fds=files, start_new_session=True, cwd="/"
        )
        starter.wait()  # it only forks the reaper
        for descriptor in (*files, commands, reaper_output):
            os.close(descriptor)
        return ends

    def _send(self, **command: Any) -> None:
        data = json.dumps(command).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the reaper exited, and with it all programs
            while data:
                data = data[os.write(self._commands, data) :]


def _describe(program: Program, files: List[int], cpus: Optional[List[int]], sharing: int) -> Dict[str, Any]:
    """Return what the reaper needs; `sharing` programs have the same CPUs, None for those of this process."""
    # The replicas of all emulated SDKs on this host together run no more threads than it has CPUs.
    at_a_time = max(1, len(os.sched_getaffinity(0) if cpus is None else cpus) // sharing)
    return {
        "index": program.instance,
        "argv": program.argv,
        "environment": {**sdk.activation.settings(replicas_at_a_time=at_a_time), **program.environment},
        "working_dir": program.working_dir,
        "files": files,
        "cpus": cpus,
    }


def _open_stdout() -> Tuple[int, int]:
    """Return two descriptors of a program's stdout: the one to read from, and the program's.

    It is a terminal in raw mode, as with mpirun: programs then flush each line, and bytes pass unchanged.
    """
    try:
        master, slave = pty.openpty()
    except OSError:  # none available, or a container without /dev/pts
        return os.pipe()
    tty.setraw(slave)
    return master, slave


_MAX_BYTES = 4 << 20
_READ_BYTES = 1 << 16
_KILLED = 128 + 9
_BATCH_S = 0.002  # output that arrives within this time is sent in one message: each message is expensive
_FULL_WAIT_S = 0.5  # longest wait of a full pump between two checks for space


class OutputPump:
    """A thread that reads all outputs until each is closed and the exit of every program has been read."""

    def __init__(self, outputs: Mapping[int, Tuple[int, int]], ends: int, instances: Iterable[int]) -> None:
        """Start the thread, which takes over all descriptors and closes them.

        Args:
            outputs: Descriptor -> (instance, stream).
            ends: Descriptor of the reaper's output.
            instances: The instances whose exits are expected.
        """
        self._outputs = dict(outputs)
        self._ends_from, self._running = ends, set(instances)
        self.pids: Dict[int, int] = {}  # by instance, of the programs that run
        self._chunks: List[Tuple[int, int, bytearray]] = []
        self._ends: List[ProgramEnd] = []
        self._bytes, self._is_output_closed, self._is_done = 0, False, False
        self._has_new_state = False  # one of the two flags changed since the last report
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="output pump", daemon=True).start()

    def take(self, within_s: float) -> HostReport:
        """Return what arrived since the last call; wait at most `within_s` for something to arrive."""
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self._ends or self._has_new_state or self._is_done, within_s)
            chunks = tuple((instance, stream, bytes(data)) for instance, stream, data in self._chunks)
            ends = tuple(self._ends)
            self._chunks, self._ends, self._bytes, self._has_new_state = [], [], 0, False
            self._changed.notify_all()
            return HostReport(chunks, ends, self._is_output_closed, self._is_done)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for descriptor in (*self._outputs, self._ends_from):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ)
            partial_line = b""
            while selector.get_map():
                largest = 0
                for key, _ in selector.select():
                    data, is_closed = _read(key.fd)
                    largest = max(largest, len(data))
                    if is_closed:
                        selector.unregister(key.fd)
                        os.close(key.fd)
                    if key.fd == self._ends_from:
                        *lines, partial_line = (partial_line + data).split(b"\n")
                        reports = [json.loads(line) for line in lines]
                        ends = [ProgramEnd(*each["end"]) for each in reports if "end" in each]
                        self.pids = {**self.pids, **dict(each["start"] for each in reports if "start" in each)}
                        self._add_ends(ends)
                        if is_closed:
                            self._add_ends([ProgramEnd(each, _KILLED, "its reaper died") for each in self._running])
                    elif data:
                        self._add(*self._outputs[key.fd], data)
                if not self._is_output_closed and not set(selector.get_map()) - {self._ends_from}:
                    self._set_state(is_done=False)
                if largest < _READ_BYTES:
                    time.sleep(_BATCH_S)
                self._wait_for_space()
        self._set_state(is_done=True)

    def _set_state(self, is_done: bool) -> None:
        """Report that all outputs are closed, and with `is_done` that no process is left."""
        with self._changed:
            self._is_output_closed = self._has_new_state = True
            self._is_done = is_done
            self._changed.notify_all()

    def _add(self, instance: int, stream: int, data: bytes) -> None:
        with self._changed:
            if self._chunks and self._chunks[-1][:2] == (instance, stream):
                self._chunks[-1][2].extend(data)
            else:
                self._chunks.append((instance, stream, bytearray(data)))
            self._bytes += len(data)
            self._changed.notify_all()

    def _add_ends(self, ends: List[ProgramEnd]) -> None:
        ended = {end.instance for end in ends}
        self.pids = {instance: pid for instance, pid in self.pids.items() if instance not in ended}
        with self._changed:
            self._ends += [end for end in ends if end.instance in self._running]
            self._running -= ended
            self._changed.notify_all()

    def _wait_for_space(self) -> None:
        with self._changed:
            while self._bytes > _MAX_BYTES:
                self._changed.wait(_FULL_WAIT_S)


def _read(descriptor: int) -> Tuple[bytes, bool]:
    """Return the available bytes, up to a limit, and whether the descriptor reached its end.

    The loop is for terminals, which return small pieces.
    """
    pieces: List[bytes] = []
    size = 0
    while size < _READ_BYTES:
        try:
            piece = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return b"".join(pieces), False
        except OSError as error:
            if error.errno != errno.EIO:  # EIO on a terminal's master side: the other side is closed
                raise
            piece = b""
        if not piece:
            return b"".join(pieces), True
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces), False
