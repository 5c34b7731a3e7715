"""Build the programs of every host, with their environment and, on IPUs, the V-IPU partition that they use.

Later variables override earlier ones: the caller's (with the interpreter's folder first in PATH), those of the
placement, the partition and the host, `-x`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import shutil
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from raypod.errors import ClusterError
from raypod.plan import environment
from raypod.plan.cluster import VipuPartition
from raypod.plan.environment import (
    HOROVOD_FALLBACK,
    STARTUP_DIR,
    cache_environment,
    join_path,
    placement_environment,
)
from raypod.plan.placement import InstanceSpec, Placement, gcd_index
from raypod.runtime.launcher.options import VIPU_KEYS, MpiArguments, Request
from raypod.runtime.launcher.output import tag
from raypod.runtime.launcher.records import STDERR, HostFacts, Program
from raypod.runtime.launcher.supervision import Signals
from raypod.system import vipu
from raypod.system.sdk import activation
from raypod.system.signals import on_abort

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


Say = Callable[[str], None]


@contextlib.contextmanager
def partition(
    request: Request, placement: Placement, has_ipus: bool, caller: Mapping[str, str], say: Say
) -> Iterator[Dict[int, Dict[str, str]]]:
    """Prepare the partition; yield the variables by which each instance finds it, empty if none is requested.

    At the end it is removed if the launch has created it.

    Raises:
        ClusterError: The partition does not exist, does not fit, or cannot be created.
    """
    flags = [f"--{key.replace('_', '-')}" for key in VIPU_KEYS if key in request.given]
    in_file = placement.cluster.vipu
    name = request.vipu_partition or caller.get("IPUOF_VIPU_API_PARTITION_ID") or (in_file and in_file.partition)
    if not has_ipus or request.offline_mode:
        if flags:
            why = "--offline-mode" if request.offline_mode else "the programs run on the emulated SDK"
            say(f"partition options have no effect ({why}): {', '.join(flags)}")
        yield {}
        return
    if request.is_plain or not (flags or name):  # a plain program finds the partition of the caller's variables
        yield {}
        return
    tool = vipu.Vipu(_controller(request, placement))
    wanted = _partition_request(request, placement, name or f"raypod-{getpass.getuser()}")
    ready = tool.prepare(wanted)
    removed = wanted.name if ready.is_new and request.remove_partition else None
    with on_abort(lambda error: _remove(tool, removed, say)):
        try:
            yield _environment(wanted.name, ready.gcds, request, placement, caller)
        finally:
            with Signals().handled(record=True):  # ignore signals: an impatient Ctrl-C must not leave the partition
                _remove(tool, removed, say)


def _remove(tool: vipu.Vipu, name: Optional[str], say: Say) -> None:
    """Remove a partition; None: there is nothing to remove."""
    try:
        if name is not None:
            tool.remove(name)
    except ClusterError as error:  # the exit code of the programs takes precedence
        say(f"cannot remove the partition: {error}")


def _controller(request: Request, placement: Placement) -> vipu.Controller:
    is_chosen = bool({"vipu_server_host", "vipu_server_port"} & set(request.given))
    in_file = placement.cluster.vipu
    if in_file is not None and not is_chosen:
        return vipu.Controller(in_file.server, in_file.port, in_file.timeout_s, is_chosen=True)
    return vipu.Controller(request.vipu_server_host, request.vipu_server_port, request.vipu_server_timeout, is_chosen)


def _partition_request(request: Request, placement: Placement, name: str) -> vipu.PartitionRequest:
    """Return the partition that the placement needs: its IPUs rounded up to a power of two, and a GCD per instance."""
    in_file = placement.cluster.vipu
    return vipu.PartitionRequest(
        name,
        size=1 << (placement.sizes.total_ipus - 1).bit_length(),
        gcds=placement.sizes.num_instances,
        allocation=request.vipu_allocation or request.vipu_cluster or (in_file.allocation if in_file else None),
        sync_type=request.sync_type,
        may_resize=request.update_partition,
        reset=request.reset_partition,
        attempts=request.vipu_partition_attempts,
    )


def _environment(
    name: str, gcds: int, request: Request, placement: Placement, caller: Mapping[str, str]
) -> Dict[int, Dict[str, str]]:
    """Return the variables of each instance; the caller's target options take precedence."""
    own = {key: caller[key] for key in ("POPLAR_TARGET_OPTIONS", "IPUOF_LOG_LEVEL") if key in caller}
    controller = _controller(request, placement)
    domains = request.num_ilds or (placement.cluster.vipu.link_domains if placement.cluster.vipu else 1)
    found = VipuPartition(name, controller.host, controller.port, controller.timeout_s, link_domains=domains)
    return {
        spec.index: {**environment.vipu_environment(found, gcd_index(spec, gcds), placement), **own}
        for spec in placement.instances
    }
