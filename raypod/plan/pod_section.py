"""The section `pod` of a configuration: replicas, instances, and the hosts on which they run."""

from __future__ import annotations

from typing import Optional

from pydantic import Field

from raypod.plan.section import MAX_TIMEOUT_S, Section


class PodSection(Section):
    """The placement. With equal replicas it does not change the results."""

    replicas: int = Field(4, ge=1, description="total number of model replicas over all instances")
    num_instances: int = Field(2, ge=1, description="host processes, which have equal numbers of replicas")
    ipus_per_replica: int = Field(1, ge=1, description="IPUs per replica")
    num_ipus: Optional[int] = Field(None, ge=1, description="total number of IPUs, in place of --replicas")
    threads_per_replica: int = Field(
        1, ge=0, le=4096, description="intra-op threads per replica; 0: the cores of the host divided by its replicas"
    )
    bind_cores: Optional[bool] = Field(
        None, description="bind each instance to its own cores, by NUMA node (default: `numa` of the cluster file)"
    )
    cluster: Optional[str] = Field(None, description="cluster YAML file of `raypod up` (default: this host)")
    wait_hosts: float = Field(
        0, ge=0, le=MAX_TIMEOUT_S, description="seconds to wait for hosts that have not joined the cluster yet"
    )
    elastic: bool = Field(False, description="continue with fewer replicas while hosts are lost, with equal updates")
    min_hosts: Optional[int] = Field(
        None, ge=1, description="elastic: the fewest hosts that continue, else the run ends"
    )
    executable_cache_path: Optional[str] = Field(
        None, description="cache folder of compiled executables (default on IPUs: one per user and host)"
    )

    @property
    def is_elastic(self) -> bool:
        """Whether the number of replicas may change; `min_hosts` implies it."""
        return self.elastic or self.min_hosts is not None
