"""What command lines for poprun hand to mpirun, as far as it has a meaning without MPI: environment and network.

The rest is refused by name, with what to use instead.
"""

from __future__ import annotations

import dataclasses
import shlex
from typing import Dict, List, Optional, Tuple

from raypod.errors import ConfigError
from raypod.launcher.options import Request

_NETWORK = ("btl_tcp_if_include", "oob_tcp_if_include")
_ALREADY_SO = ("tag-output", "allow-run-as-root", "oversubscribe", "report-bindings", "display-map")
_INSTEAD = {
    "np": "--num-instances",
    "n": "--num-instances",
    "H": "-H",
    "host": "--host",
    "hostfile": "--hostfile",
    "bind-to": "--numa-aware",
    "map-by": "--numa-aware",
    "rank-by": "nothing: instances fill one host after the other",
    "output-filename": "--run-dir, whose logs folder has a file for each instance",
    "timestamp-output": "a program's own time stamps",
    "wdir": "cd",
    "prefix": "-x PATH=... and -x LD_LIBRARY_PATH=...",
    "timeout": "timeout(1)",
}


@dataclasses.dataclass(frozen=True)
class MpiArguments:
    """The part with a meaning: variables (None: as the caller has them) for all instances and for single ones."""

    for_all: Dict[str, Optional[str]]
    for_one: Dict[int, Dict[str, Optional[str]]]
    network: Optional[str]  # CIDR or interface

    def environment(self, instance: int, caller: Dict[str, str]) -> Dict[str, str]:
        """The variables of one instance; those that the caller does not have are left out, as mpirun does."""
        both = {**self.for_all, **self.for_one.get(instance, {})}
        values = {name: caller.get(name) if value is None else value for name, value in both.items()}
        return {name: value for name, value in values.items() if value is not None}


def understand(request: Request) -> MpiArguments:
    """Read `-x`, `--mpi-global-args`, `--mpi-local-args` and `--instance-mpi-local-args`.

    Raises:
        ConfigError: an argument that only makes sense with MPI, or an instance that is not there.
    """
    for_all = dict(_variable(text, "-x") for text in request.x)
    network: Optional[str] = None
    for option in ("mpi_global_args", "mpi_local_args"):
        for text in getattr(request, option):
            variables, found = _read(text, f"--{option.replace('_', '-')}")
            for_all.update(variables)
            network = found or network
    for_one: Dict[int, Dict[str, Optional[str]]] = {}
    for text in request.instance_mpi_local_args:
        index, colon, arguments = text.partition(":")
        if not colon or not index.strip().isdigit() or int(index) >= request.num_instances:
            raise ConfigError(
                f'--instance-mpi-local-args {text}: write INSTANCE:"-x VAR=VALUE" with an instance of '
                f"0 to {request.num_instances - 1}"
            )
        variables, _ = _read(arguments.strip().strip("\"'"), "--instance-mpi-local-args")
        for_one.setdefault(int(index), {}).update(variables)
    return MpiArguments(for_all, for_one, network)


def _read(text: str, option: str) -> Tuple[Dict[str, Optional[str]], Optional[str]]:
    variables: Dict[str, Optional[str]] = {}
    network: Optional[str] = None
    words = _split(text, option)
    while words:
        name, _, value = words.pop(0).lstrip("-").partition("=")
        if name == "x":
            variables.update([_variable(value or _next(words, option, "-x"), option)])
        elif name in ("mca", "gmca"):
            parameter, value = _next(words, option, "--mca"), _next(words, option, "--mca")
            if parameter not in _NETWORK:
                raise ConfigError(f"{option}: --mca {parameter}: there is no MPI here to tune")
            network = value
        elif name not in _ALREADY_SO:
            instead = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise ConfigError(f"{option}: {name!r} is for mpirun, and there is none here{instead}")
    return variables, network


def _split(text: str, option: str) -> List[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def _next(words: List[str], option: str, after: str) -> str:
    if not words:
        raise ConfigError(f"{option}: {after} needs a value")
    return words.pop(0)


def _variable(text: str, option: str) -> Tuple[str, Optional[str]]:
    name, equals, value = text.partition("=")
    if not name or " " in name:
        raise ConfigError(f"{option} {text}: write VAR or VAR=VALUE")
    return name, value if equals else None
