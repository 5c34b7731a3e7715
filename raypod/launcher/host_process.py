"""What lives in the actor of a host: the programs of its instances, their output, their signals and their stdin.

Plain Python; `fleet/ray_hosts.py` wraps it where it starts actors. The programs themselves belong to the keeper
(keeper.py), a process of its own that ends them when this one is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import time
import tty
from typing import Any, Dict, List, Optional, Sequence, Tuple

from raypod.host import interfaces, sdk
from raypod.host.process import cpus_of_node
from raypod.instance.collectives import Rendezvous, horovod_door, horovod_interface
from raypod.instance.horovod_rendezvous import HorovodDoor
from raypod.launcher import reaper
from raypod.launcher.output_pump import Pump
from raypod.launcher.records import STDERR, STDOUT, HostFacts, HostReport, Program

_KEEPER_S = 5.0  # more than it allows itself


class HostProcess:
    """Owns the programs of one host."""

    def __init__(self) -> None:
        self._pump: Optional[Pump] = None
        self._commands = self._stdin = -1
        self._rendezvous: Optional[Rendezvous] = None
        self._horovod_door: Optional[HorovodDoor] = None

    def ready(self) -> bool:
        """An answer, once the actor lives."""
        return True

    def address_in(self, subnet: str) -> str:
        """This host's address in a subnet (CIDR), or of an interface of that name.

        Raises:
            ClusterError: it has none.
        """
        return interfaces.address_in(subnet, "--host-subnet")

    def facts(self, rendezvous: Dict[str, str], address: str = "") -> HostFacts:
        """What leads from this host to the meeting point; `address` is its own, where that was chosen."""
        sdk.offer_store()
        self._horovod_door = horovod_door(rendezvous)
        meeting_point = rendezvous["EMULATED_POD_RENDEZVOUS"].rpartition(":")[0]
        environment = horovod_interface(meeting_point)
        if address:
            name = str(interfaces.interface_of(address))
            environment = {"HOROVOD_GLOO_IFACE": name, "GLOO_SOCKET_IFNAME": name}
        return HostFacts(address or meeting_point, {**environment, **rendezvous, **self._horovod_door.environment})

    def open_rendezvous(self, address: str) -> Dict[str, str]:
        """Where all instances of the run meet: at this host's `address`. The variables that lead there."""
        sdk.offer_store()
        self._rendezvous = Rendezvous(address)
        return self._rendezvous.environment

    def start(self, programs: Sequence[Program], grace_s: float) -> None:
        """Start the programs; their output and ends come with `read`."""
        outputs: Dict[int, Tuple[int, int]] = {}
        described: List[Dict[str, Any]] = []
        theirs: List[int] = []
        for program in programs:
            stdin, self._stdin = self._open_stdin() if program.reads_stdin else (_null(), self._stdin)
            stdout, their_stdout = _open_stdout()
            stderr, their_stderr = os.pipe()
            outputs[stdout], outputs[stderr] = (program.instance, STDOUT), (program.instance, STDERR)
            files = [stdin, their_stdout, their_stderr]
            described.append(_describe(program, files))
            theirs += files
        ends = self._start_keeper(theirs)
        self._pump = Pump(outputs, ends, [program.instance for program in programs])
        self._tell(programs=described, grace_s=grace_s)

    def read(self, within_s: float) -> HostReport:
        """What happened since the last call, at most `within_s` from now."""
        assert self._pump is not None, "start first"
        return self._pump.take(within_s)

    def signal(self, number: int) -> None:
        """Pass a signal on to the process group of every program."""
        self._tell(signal=number)

    def end(self, grace_s: float) -> None:
        """SIGTERM to what is left of the programs, SIGKILL after the grace."""
        self._tell(end=grace_s)

    def write_stdin(self, data: bytes) -> bool:
        """Hand bytes to the program that reads stdin, b"" for its end; False when it listens no more."""
        if self._stdin < 0:
            return False
        try:
            while data:
                data = data[os.write(self._stdin, data) :]
                if not data:
                    return True
        except BrokenPipeError:
            pass  # it has ended, or closed its stdin
        os.close(self._stdin)
        self._stdin = -1
        return False

    def close(self) -> None:
        """End everything, without a grace. An actor that is killed leaves the same to its keeper."""
        if self._pump is not None:
            self.end(0.0)
            deadline = time.monotonic() + _KEEPER_S
            while not self._pump.take(_KEEPER_S).is_done and time.monotonic() < deadline:
                pass
            os.close(self._commands)
        if self._stdin >= 0:
            os.close(self._stdin)
        if self._horovod_door is not None:
            self._horovod_door.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _open_stdin(self) -> Tuple[int, int]:
        theirs, ours = os.pipe()
        return theirs, ours

    def _start_keeper(self, files: List[int]) -> int:
        """The keeper, which inherits `files` (closed here); the descriptor that it tells ends on."""
        commands, self._commands = os.pipe()
        ends, its_ends = os.pipe()
        script = [sys.executable, "-I", "-S", str(reaper.__file__)]
        starter = subprocess.Popen(
            script, stdin=commands, stdout=its_ends, pass_fds=files, start_new_session=True, cwd="/"
        )
        starter.wait()  # it only forks the keeper
        for descriptor in (*files, commands, its_ends):
            os.close(descriptor)
        return ends

    def _tell(self, **command: Any) -> None:
        data = json.dumps(command).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has ended, and with it all programs
            while data:
                data = data[os.write(self._commands, data) :]


def _describe(program: Program, files: List[int]) -> Dict[str, Any]:
    return {
        "index": program.instance,
        "argv": program.argv,
        "environment": program.environment,
        "working_dir": program.working_dir,
        "files": files,
        "cpus": cpus_of_node(program.numa_index) if program.numa_index is not None else None,
    }


def _null() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def _open_stdout() -> Tuple[int, int]:
    """Our end and the program's end of its stdout.

    A terminal, as mpirun gives: programs then write line by line, instead of in blocks that come late. Bytes pass
    through it unchanged.
    """
    try:
        ours, theirs = pty.openpty()
    except OSError:  # none left, or a container without /dev/pts
        return os.pipe()
    tty.setraw(theirs)
    return ours, theirs
