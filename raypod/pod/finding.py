"""One finding of the doctor, and what a run requires of the pod's hosts."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional, Tuple

from raypod.fleet import gcs
from raypod.plan.cluster import Cluster

OK, WARN, TROUBLE = "ok", "warn", "trouble"

Facts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the table. `host` is "" for what concerns the pod."""

    level: str
    host: str
    what: str
    text: str
    way_out: str = ""


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a run will need of the hosts."""

    cluster: Cluster
    ports: Tuple[int, ...] = ()  # that the start commands fix, apart from those of workers
    worker_ports: Tuple[int, int] = (0, 0)
    metrics_port: int = 0  # of `ports`, where Prometheus reads
    data_dir: Optional[str] = None
    wants_ipus: Optional[bool] = None  # None: where there are any
    gcs: Optional[gcs.Answer] = None  # of one who shows no token; None: nobody asked
