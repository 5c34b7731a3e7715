"""The records of the doctor: a finding, and the requirements of a run on the hosts of the pod."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional, Tuple

from raypod.fleet import gcs
from raypod.plan.cluster import Cluster

OK, WARN, TROUBLE = "ok", "warn", "trouble"
RAY_CLUSTER = "Ray cluster"  # the subject of the finding that Ray does not run; `way_out` starts it

Facts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding: a line of the doctor's table. `host` is "" for a finding about the whole pod."""

    level: str
    host: str
    what: str
    text: str
    way_out: str = ""  # what to do


@dataclasses.dataclass(frozen=True)
class Expected:
    """The requirements of a run on the hosts, from the cluster file and the flags."""

    cluster: Cluster
    file: str = "FILE"  # the cluster file as the command names it
    python_setting: str = "metadata.raypod.python"  # where the file names the interpreter
    ports: Tuple[int, ...] = ()  # fixed by the start commands, without the ports of workers
    worker_ports: Tuple[int, int] = (0, 0)
    metrics_port: int = 0  # the one of `ports` that Prometheus scrapes
    data_dir: Optional[str] = None
    requires_ipus: Optional[bool] = None  # None: only on hosts that have IPUs
    may_use_horovod: bool = True  # an installed Horovod is used
    gcs: Optional[gcs.Answer] = None  # the answer to a request without a token; None if not requested
