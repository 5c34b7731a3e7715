"""Build the programs of every host, with their environment, from a request and a placement.

Later variables override earlier ones: the caller's (with the interpreter's folder first in PATH), those of the
placement, the partition and the host, `-x`.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Dict, List, Mapping, Sequence, Tuple

from raypod.plan.environment import (
    HOROVOD_FALLBACK,
    STARTUP_DIR,
    cache_environment,
    join_path,
    placement_environment,
)
from raypod.plan.placement import InstanceSpec, Placement
from raypod.runtime.launcher.options import MpiArguments, Request
from raypod.runtime.launcher.output import tag
from raypod.runtime.launcher.records import STDERR, HostFacts, Program
from raypod.system.emulated import activation

# Valid only on the host and in the session where they were set.
_HOST_SPECIFIC = (
    *("HOSTNAME", "HOST", "DISPLAY", "XAUTHORITY", "XDG_RUNTIME_DIR", "XDG_SESSION_ID", "DBUS_SESSION_BUS_ADDRESS"),
    *("SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY"),
)
_IDENTITY = ("POPDIST_", "OMPI_", "HOROVOD_")  # what makes a program an instance
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # the caller's values take precedence


@dataclasses.dataclass(frozen=True)
class Programs:
    """All programs of a launch, built from their common settings."""

    request: Request
    placement: Placement
    arguments: MpiArguments
    caller: Mapping[str, str]
    working_dir: str
    sdk_path: Tuple[str, ...]  # entries to prepend to PYTHONPATH: the emulated SDK; none for an installed one
    on_terminal: bool = False  # stderr of the launch is a terminal
    interpreters: Sequence[str] = ()  # the Python interpreter of each host
    partition: Dict[int, Dict[str, str]] = dataclasses.field(default_factory=dict)  # by instance

    def by_host(self, facts: Sequence[HostFacts], stdin_to: int = 0) -> List[List[Program]]:
        """Return the programs of every host; `facts` are those of each host."""
        return [
            [self._program(spec, facts[host], reads_stdin=spec.index == stdin_to) for spec in specs]
            for host, specs in enumerate(map(self.placement.instances_on, range(len(self.placement.hosts))))
        ]

    def environment(self, spec: InstanceSpec, facts: HostFacts) -> Dict[str, str]:
        """Return the full environment of an instance."""
        env = dict(self.caller)
        if spec.host_index:
            env = {name: value for name, value in env.items() if name not in _HOST_SPECIFIC}
        # As torchrun, start Python programs with the interpreter of the launcher; its environment may not be activated.
        folder, path = str(Path(self.interpreters[spec.host_index]).parent), env.get("PATH", os.defpath)
        env["PATH"] = path if path.partition(":")[0] == folder else f"{folder}:{path}"
        placed = placement_environment(self.placement, spec)
        if self.request.is_plain:
            placed = {name: value for name, value in placed.items() if not name.startswith(_IDENTITY)}
        env.update({name: value for name, value in placed.items() if name not in _THREADS or name not in env})
        env.update(cache_environment(self.request.executable_cache_path))
        env.update(activation.settings(strict=self.request.strict))
        env["PYTHONPATH"] = join_path(STARTUP_DIR, *self.sdk_path, env.get("PYTHONPATH", ""))
        if not self.sdk_path:
            env[HOROVOD_FALLBACK] = activation.FOLDER
        if self.on_terminal:  # for progress bars: a pipe has no width
            env.setdefault("COLUMNS", str(shutil.get_terminal_size().columns - len(tag((spec.index, STDERR)))))
        env.update(self.partition.get(spec.index, {}))
        env.update(facts.environment)
        env.update(self.arguments.environment(spec.index, dict(self.caller)))
        return env

    def paths(self) -> Dict[str, List[str]]:
        """Return the first folder of the programs' PATH, with the hosts that have it."""
        hosts: Dict[str, List[str]] = {}
        for index, host in enumerate(self.placement.hosts):
            path = self.environment(self.placement.instances_on(index)[0], HostFacts("", {})).get("PATH", "")
            hosts.setdefault(path.partition(":")[0], []).append(host.name)
        return hosts

    def changes(self, spec: InstanceSpec) -> Dict[str, str]:
        """Return the variables of an instance that differ from the caller's, without those that its host adds."""
        env = self.environment(spec, HostFacts("", {}))
        return {name: value for name, value in env.items() if self.caller.get(name) != value}

    def _program(self, spec: InstanceSpec, facts: HostFacts, reads_stdin: bool) -> Program:
        return Program(
            instance=spec.index,
            argv=self.request.program,
            environment=self.environment(spec, facts),
            working_dir=self.working_dir,
            reads_stdin=reads_stdin,
            numa_index=spec.local_index if self._binds else None,
        )

    @property
    def _binds(self) -> bool:
        placement = self.request.process_placement
        aware = self.request.numa_aware or self.placement.binds_numa
        return bool(aware and placement != "disabled") or placement == "spreadnuma"
