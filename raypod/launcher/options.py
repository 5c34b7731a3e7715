"""The options of the launcher: poprun's names and meanings (contract section 7), their values, and a file of them.

The table below is all there is to know of an option; parser.py reads command lines by it. Options come before the
program; everything from the program on is the program's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple

INT, NUMBER, TEXT, YES_NO, WORDS = "N", "S", "TEXT", "yes|no", "ARGS"


@dataclasses.dataclass(frozen=True)
class Option:
    """One option: its long name, what it takes, its default, and what it is for."""

    name: str
    kind: str
    default: Any
    help: str
    letter: str = ""
    least: Optional[float] = None
    is_repeated: bool = False

    @property
    def key(self) -> str:
        """Its name in Python."""
        return self.name.replace("-", "_")


OPTIONS: Tuple[Option, ...] = (
    Option("num-replicas", INT, 1, "model replicas, TOTAL over all instances", least=1),
    Option("num-instances", INT, 1, "host processes; the replicas are divided equally between them", least=1),
    Option("ipus-per-replica", INT, 1, "IPUs of one replica", least=1),
    Option("host", TEXT, None, "hosts, as in a,b or host[0-2,4], or a file of them; default: this host", letter="H"),
    Option("hostfile", TEXT, None, "file with a host per line"),
    Option("cluster", TEXT, None, "take the hosts from a cluster YAML, the one of `ray up`"),
    Option("host-subnet", TEXT, None, "CIDR (or interface) of the network by which instances reach each other"),
    Option("num-ilds", INT, None, "IPU-Link domains of the partition", least=1),
    Option("numa-aware", YES_NO, False, "bind each instance to a NUMA node of its host, in turn"),
    Option("process-placement", TEXT, None, "disabled: bind nothing; spreadnuma: as --numa-aware"),
    Option("only-output-from-instance", INT, None, "show the output of this instance alone; logs keep all", least=0),
    Option("print-topology", YES_NO, False, "print which instance and replica is where, then go on"),
    Option("offline-mode", YES_NO, False, "no IPUs are attached: test the launch, or the host's input pipeline"),
    Option("executable-cache-path", TEXT, None, "folder of compiled executables"),
    Option("vipu-server-host", TEXT, "localhost", "V-IPU controller"),
    Option("vipu-server-port", INT, 8090, "its port", least=1),
    Option("vipu-server-timeout", INT, 120, "seconds that every request to it may take", least=1),
    Option("vipu-partition", TEXT, None, "partition to use; made if it is not there"),
    Option("vipu-allocation", TEXT, None, "allocation in which to make it"),
    Option("vipu-cluster", TEXT, None, "deprecated name of --vipu-allocation"),
    Option("update-partition", YES_NO, False, "resize the partition if it does not fit"),
    Option("reset-partition", YES_NO, None, "reset it before the start; default: if it is not reconfigurable"),
    Option("remove-partition", YES_NO, True, "remove it at the end, if this launch made it"),
    Option("vipu-partition-attempts", INT, 1, "how often to try to make it", least=1),
    Option("sync-type", TEXT, None, "sync type of a partition that is made, as in ST_POD_NATIVE_DEFAULT"),
    Option("x", TEXT, (), "VAR[=VALUE]: environment of every instance", letter="x", is_repeated=True),
    Option("mpi-global-args", WORDS, (), "arguments for mpirun; what has a meaning here is kept", is_repeated=True),
    Option("mpi-local-args", WORDS, (), "the same", is_repeated=True),
    Option("instance-mpi-local-args", WORDS, (), 'INSTANCE:"-x VAR=VALUE ...": environment of one', is_repeated=True),
    Option("import-config", TEXT, None, "YAML of options; those of the command line win"),
    Option("export-config", TEXT, None, "write the options to a YAML file, then go on"),
    Option("overwrite-config", YES_NO, False, "let --export-config replace a file"),
    Option("device", TEXT, "auto", "auto, ipu or emulated: which SDK the programs find"),
    Option("run-dir", TEXT, None, "folder of the log files; default: runs/<time>-launch-<program>"),
    Option(
        "grace",
        NUMBER,
        2.0,
        "seconds from SIGTERM to SIGKILL when a launch ends early; 10 times that after a passed-on signal",
        least=0,
    ),
    Option("start-timeout", NUMBER, 120.0, "seconds that every step of the start may take", least=0.1),
    Option("allow-run-as-root", YES_NO, False, "accepted: nothing here minds"),
    Option("synchronise-python-venv", YES_NO, False, "refused: see below"),
    Option("synchronise-poplar-sdk", YES_NO, False, "refused: see below"),
    Option("distribute-ssh-key", YES_NO, False, "refused: see below"),
)
BY_KEY: Dict[str, Option] = {option.key: option for option in OPTIONS}
OF_VIPU = tuple(option.key for option in OPTIONS if "vipu" in option.name or option.name.endswith("-partition"))
NOT_EXPORTED = ("import_config", "export_config", "overwrite_config")


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for: the value of every option by its key, and the program with its arguments."""

    values: Dict[str, Any]
    given: Tuple[str, ...]  # keys that somebody set, in a file or on the command line
    verbosity: int
    program: Tuple[str, ...]

    def __getattr__(self, key: str) -> Any:
        if key in BY_KEY:
            return self.values[key]
        raise AttributeError(key)
