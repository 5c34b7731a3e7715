"""The records that the launcher and its hosts exchange: programs to start, output, and ends of programs."""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional, Tuple

from raypod.events import HostUsage

STDOUT, STDERR = 1, 2


@dataclasses.dataclass(frozen=True)
class Program:
    """The program of one instance, as its host starts it."""

    instance: int
    argv: Tuple[str, ...]
    environment: Dict[str, str]
    working_dir: str
    reads_stdin: bool
    numa_index: Optional[int] = None  # bind to this NUMA node (modulo the number of nodes)


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """The address of a host in the network of the launch, and the variables that its instances need."""

    address: str
    environment: Dict[str, str]  # of every instance on this host
    horovod_problem: Optional[str] = None  # why other hosts cannot connect to the Horovod that is installed here


@dataclasses.dataclass(frozen=True)
class ProgramEnd:
    """The exit of the program of an instance."""

    instance: int
    exit_code: int  # as in a shell: 128 + n for signal n
    cause: str


@dataclasses.dataclass(frozen=True)
class ProgramUsage:
    """The process of a program that runs."""

    instance: int
    pid: int
    cpu_s: float  # of the process and of its children that have ended


@dataclasses.dataclass(frozen=True)
class HostReport:
    """Output and exits on a host since its last report; every report also shows that the host is alive."""

    chunks: Tuple[Tuple[int, int, bytes], ...]  # (instance, STDOUT or STDERR, bytes)
    ends: Tuple[ProgramEnd, ...]
    is_output_closed: bool  # all pipes are closed: no more output
    is_done: bool  # also no process of the programs is left
    programs: Tuple[ProgramUsage, ...] = ()  # those that run; measured now and then, else empty
    usage: Optional[HostUsage] = None  # of the host, likewise
