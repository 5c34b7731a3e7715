"""The partition of a launch: made ready before any instance starts, removed afterwards if the launch made it."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
from typing import Callable, Dict, Iterator, Mapping

from raypod.errors import ClusterError
from raypod.host import vipu
from raypod.host.vipu import Wish
from raypod.launcher.options import OF_VIPU, Request
from raypod.plan import environment
from raypod.plan.placement import Placement, gcd_of

Say = Callable[[str], None]


@contextlib.contextmanager
def partition(
    request: Request, placement: Placement, has_ipus: bool, caller: Mapping[str, str], say: Say
) -> Iterator[Dict[int, Dict[str, str]]]:
    """The variables of every instance that lead to the partition; none where nobody asked for one.

    Raises:
        ClusterError: it cannot be had.
    """
    asked = [f"--{key.replace('_', '-')}" for key in OF_VIPU if key in request.given]
    of_file = placement.cluster.vipu
    name = request.vipu_partition or caller.get("IPUOF_VIPU_API_PARTITION_ID") or (of_file and of_file.partition)
    if not has_ipus or request.offline_mode:
        if asked:
            why = "--offline-mode" if request.offline_mode else "the programs run on the emulated SDK"
            say(f"no partition is touched ({why}): without effect: {', '.join(asked)}")
        yield {}
        return
    if not asked and not name:
        yield {}
        return
    tool = vipu.Vipu(_controller(request, placement))
    wish = _wish(request, placement, name or f"raypod-{getpass.getuser()}")
    ready = tool.prepare(wish)
    try:
        yield _environment(wish.name, ready.gcds, request, placement, caller)
    finally:
        if ready.is_ours and request.remove_partition:
            try:
                tool.remove(wish.name)
            except ClusterError as error:  # the programs have ended as they have
                say(f"the partition stays: {error}")


def _controller(request: Request, placement: Placement) -> vipu.Controller:
    chosen = bool({"vipu_server_host", "vipu_server_port"} & set(request.given))
    of_file = placement.cluster.vipu
    if of_file is not None and not chosen:
        return vipu.Controller(of_file.server, of_file.port, of_file.timeout_s, is_chosen=True)
    return vipu.Controller(request.vipu_server_host, request.vipu_server_port, request.vipu_server_timeout, chosen)


def _wish(request: Request, placement: Placement, name: str) -> vipu.Wish:
    of_file = placement.cluster.vipu
    return dataclasses.replace(
        wish_for(placement, name),
        allocation=request.vipu_allocation or request.vipu_cluster or (of_file.allocation if of_file else None),
        sync_type=request.sync_type,
        may_resize=request.update_partition,
        reset=request.reset_partition,
        attempts=request.vipu_partition_attempts,
    )


def _environment(
    name: str, gcds: int, request: Request, placement: Placement, caller: Mapping[str, str]
) -> Dict[int, Dict[str, str]]:
    """By instance; target options that the caller chose stand."""
    own = {key: caller[key] for key in ("POPLAR_TARGET_OPTIONS", "IPUOF_LOG_LEVEL") if key in caller}
    controller = _controller(request, placement)
    where = (controller.host, controller.port, controller.timeout_s)
    domains = request.num_ilds or (placement.cluster.vipu.link_domains if placement.cluster.vipu else 1)
    return {
        spec.index: {**environment.vipu_environment(name, gcd_of(spec, gcds), where, placement, domains), **own}
        for spec in placement.instances
    }


def wish_for(placement: Placement, name: str) -> Wish:
    """What a placement needs: its IPUs rounded up to a power of two, and a GCD per instance."""
    return Wish(name, 1 << (placement.total_ipus - 1).bit_length(), len(placement.instances))
