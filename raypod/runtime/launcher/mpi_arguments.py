"""The mpirun arguments of a poprun command line that have a meaning without MPI: environment and network.

Every other mpirun argument is a ConfigError that names the replacement.
"""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any, Dict, List, Optional, Tuple

from raypod.errors import ConfigError
from raypod.runtime.launcher.options import Request

_QUOTES = "\"'"
_NETWORK = ("btl_tcp_if_include", "oob_tcp_if_include")
_IMPLIED = ("tag-output", "allow-run-as-root", "oversubscribe", "report-bindings", "display-map")
_REPLACEMENTS = {
    "np": "--num-instances",
    "n": "--num-instances",
    "H": "-H",
    "host": "--host",
    "hostfile": "--hostfile",
    "bind-to": "--numa-aware",
    "map-by": "--numa-aware",
    "rank-by": "no option: instances fill the hosts in order",
    "output-filename": "--run-dir, which has a log file per instance",
    "timestamp-output": "timestamps in the program itself",
    "wdir": "cd",
    "prefix": "-x PATH=... and -x LD_LIBRARY_PATH=...",
    "timeout": "timeout(1)",
}


@dataclasses.dataclass(frozen=True)
class MpiArguments:
    """Environment variables for all instances and for single ones, and the network between instances.

    A value of None stands for the caller's value.
    """

    for_all: Dict[str, Optional[str]]
    for_one: Dict[int, Dict[str, Optional[str]]]
    network: Optional[str]  # CIDR or interface name

    def missing(self, caller: Dict[str, str]) -> List[str]:
        """Return the variables that take the caller's value, which has none."""
        all_variables = [pair for each in (self.for_all, *self.for_one.values()) for pair in each.items()]
        return sorted({name for name, value in all_variables if value is None and name not in caller})

    def environment(self, instance: int, caller: Dict[str, str]) -> Dict[str, str]:
        """Return the variables of one instance, without those that the caller does not have (as mpirun does)."""
        both = {**self.for_all, **self.for_one.get(instance, {})}
        values = {name: caller.get(name) if value is None else value for name, value in both.items()}
        return {name: value for name, value in values.items() if value is not None}


def parse_mpi_arguments(request: Request) -> MpiArguments:
    """Parse `-x`, `--mpi-global-args`, `--mpi-local-args` and `--instance-mpi-local-args`.

    Raises:
        ConfigError: An argument requires MPI, or an instance does not exist.
    """
    for_all = dict(_variable(text, "-x") for text in request.x)
    network: Optional[str] = None
    for option in ("mpi_global_args", "mpi_local_args"):
        for text in getattr(request, option):
            variables, found = _parse(text, f"--{option.replace('_', '-')}")
            for_all.update(variables)
            network = found or network
    for_one: Dict[int, Dict[str, Optional[str]]] = {}
    for text in request.instance_mpi_local_args:
        index, colon, arguments = text.partition(":")
        if not colon or not index.strip().isdecimal() or int(index) >= request.num_instances:
            raise ConfigError(
                f'--instance-mpi-local-args {text}: must be INSTANCE:"-x VAR=VALUE" with an instance '
                f"from 0 to {request.num_instances - 1}"
            )
        variables, own_network = _parse(arguments.strip().strip(_QUOTES), "--instance-mpi-local-args")
        if own_network:
            raise ConfigError(f"--instance-mpi-local-args {text}: all instances use one network; use --host-subnet")
        for_one.setdefault(int(index), {}).update(variables)
    return MpiArguments(for_all, for_one, network)


def without_values(request: Request) -> Request:
    """Return the request without the values of variables, which can be secrets: each takes the caller's value."""
    changed: Dict[str, Any] = {"x": tuple(each.partition("=")[0] for each in request.x)}
    for option in ("mpi_global_args", "mpi_local_args"):
        changed[option] = tuple(_names_only(text, option) for text in getattr(request, option))
    pairs = (text.partition(":") for text in request.instance_mpi_local_args)
    option = "instance_mpi_local_args"
    changed[option] = tuple(f"{index}:{_names_only(text.strip().strip(_QUOTES), option)}" for index, _, text in pairs)
    return dataclasses.replace(request, values={**request.values, **changed})


def _names_only(text: str, option: str) -> str:
    words = _split(text, option)
    for at, word in enumerate(words):
        name, _, value = word.lstrip("-").partition("=")
        if name == "x" and value:
            words[at] = f"-x={value.partition('=')[0]}"
        elif name == "x" and at + 1 < len(words):
            words[at + 1] = words[at + 1].partition("=")[0]
    return shlex.join(words)


def _parse(text: str, option: str) -> Tuple[Dict[str, Optional[str]], Optional[str]]:
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
                raise ConfigError(f"{option}: --mca {parameter}: not supported without MPI")
            network = value
        elif name not in _IMPLIED:
            instead = f"; use {_REPLACEMENTS[name]}" if name in _REPLACEMENTS else ""
            raise ConfigError(f"{option}: {name!r} is not supported without mpirun{instead}")
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
        raise ConfigError(f"{option} {text}: must be VAR or VAR=VALUE")
    return name, value if equals else None
