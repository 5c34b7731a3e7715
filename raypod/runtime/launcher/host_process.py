"""The actor of one host: it starts the programs of its instances and handles their output, signals and stdin.

Plain Python; `ray_hosts.py` makes it a Ray actor. The programs are children of the reaper (`reaper.py`), a separate
process that ends them when this process exits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import socket
import subprocess
import sys
import time
import tty
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from raypod.errors import ClusterError
from raypod.runtime.launcher import reaper
from raypod.runtime.launcher.output_pump import OutputPump
from raypod.runtime.launcher.records import STDERR, STDOUT, HostFacts, HostReport, Program, ProgramUsage
from raypod.runtime.worker.collectives import horovod_interface, horovod_proxy, uses_installed_horovod
from raypod.runtime.worker.horovod_proxy import HorovodProxy
from raypod.system import emulated, horovod_address, interfaces
from raypod.system.process import cpus_of_node, script_command
from raypod.system.usage import HostMeter, cpu_seconds_of

_MEASURE_INTERVAL_S = 1.0  # of the usage of the host and of its programs
_REAPER_S = 5.0  # bound of the reaper's end; longer than its own


class HostProcess:
    """Runs the programs of one host."""

    def __init__(self) -> None:
        self._pump: Optional[OutputPump] = None
        self._commands = self._stdin = -1
        self._rendezvous: Optional[emulated.rendezvous.StoreServer] = None
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
        rendezvous_host = str(emulated.rendezvous.host_of(rendezvous))
        environment = horovod_interface(rendezvous_host)
        if address:
            name = str(interfaces.interface_of(address))
            environment = {"HOROVOD_GLOO_IFACE": name, "GLOO_SOCKET_IFNAME": name}
        environment = {**environment, **rendezvous, **self._horovod_proxy.environment}
        problem = horovod_address.own_problem() if uses_installed_horovod() else None
        return HostFacts(address or rendezvous_host, environment, problem)

    def open_rendezvous(self, address: str) -> Dict[str, str]:
        """Open the rendezvous of all instances at this host's `address`; return its variables."""
        self._rendezvous = emulated.rendezvous.serve(address, 0)
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
        "environment": {**emulated.activation.settings(replicas_at_a_time=at_a_time), **program.environment},
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
