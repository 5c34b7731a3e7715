"""Which instance and which replicas are where, as a table (`--print-topology`)."""

from __future__ import annotations

from typing import List, Optional, Sequence

from raypod.errors import ConfigError
from raypod.host.devices import link_domain_of
from raypod.placement import Placement


def render(placement: Placement, num_ilds: Optional[int]) -> str:
    """Host, IPU-Link domain, instance, replicas and IPUs, one line per instance."""
    per_instance = placement.local_ipus
    rows: List[Sequence[str]] = [("host", "ILD", "instance", "replicas", "IPUs")]
    for spec in placement.instances:
        replicas = _span(spec.replica_offset, spec.local_replicas)
        ipus = _span(spec.index * per_instance, per_instance)
        rows.append((spec.host, str(link_domain_of(spec, placement, num_ilds or 1)), str(spec.index), replicas, ipus))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def check_ilds(placement: Placement, num_ilds: Optional[int]) -> None:
    """Raise ConfigError if instances cannot be divided equally between IPU-Link domains."""
    if num_ilds and len(placement.instances) % num_ilds:
        raise ConfigError(
            f"{len(placement.instances)} instances cannot be divided equally between {num_ilds} IPU-Link domains; "
            f"--num-instances can be a multiple of {num_ilds}"
        )


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}..{first + count - 1}"
