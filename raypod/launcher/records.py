"""The frozen records between the launch and the hosts: what to start there, and what comes back."""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional, Tuple

STDOUT, STDERR = 1, 2


@dataclasses.dataclass(frozen=True)
class Program:
    """One instance as its host starts it."""

    instance: int
    argv: Tuple[str, ...]
    environment: Dict[str, str]
    working_dir: str
    reads_stdin: bool
    numa_index: Optional[int] = None  # bind to the NUMA node of this index (modulo their number)


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """What only a host itself knows, once its address on the network of the run is settled."""

    address: str
    environment: Dict[str, str]  # variables of every instance on this host


@dataclasses.dataclass(frozen=True)
class ProgramEnd:
    """How the program of an instance ended."""

    instance: int
    exit_code: int  # as a shell counts: 128 + n for signal n
    cause: str


@dataclasses.dataclass(frozen=True)
class HostReport:
    """What happened on a host since its last report; also the sign that it lives."""

    chunks: Tuple[Tuple[int, int, bytes], ...]  # instance, STDOUT or STDERR, bytes
    ends: Tuple[ProgramEnd, ...]
    is_silent: bool  # no output can come any more
    is_done: bool  # besides, nothing is left of the programs
