"""Prepare the V-IPU partition of a launch, and remove it afterwards if the launch created it."""

from __future__ import annotations

import contextlib
import getpass
from typing import Callable, Dict, Iterator, Mapping, Optional

from raypod.errors import ClusterError
from raypod.plan import environment
from raypod.plan.cluster import VipuPartition
from raypod.plan.placement import Placement, gcd_index
from raypod.runtime.launcher.options import VIPU_KEYS, Request
from raypod.runtime.launcher.supervision import Signals
from raypod.system import vipu
from raypod.system.signals import on_abort

Say = Callable[[str], None]


@contextlib.contextmanager
def partition(
    request: Request, placement: Placement, has_ipus: bool, caller: Mapping[str, str], say: Say
) -> Iterator[Dict[int, Dict[str, str]]]:
    """Yield the variables by which each instance finds the partition; empty if no partition is requested.

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
