"""`popdist.poptorch.Options`: PopTorch options set from the POPDIST_* environment variables."""

from __future__ import annotations

from typing import Any, Dict, NoReturn

import poptorch
from poptorch.options.groups import _DistributedOptions

import popdist

__all__ = ["Options"]


class Options(poptorch.Options):
    """`poptorch.Options` with replication factor, process id and number of processes from the environment.

    The methods that would change what the launcher decides raise RuntimeError.

    Args:
        ipus_per_replica: IPUs of the model. The default, 1, means the launched number; any other value must equal it
            (inferred: PopDist's own check is not public; programs launched with two IPUs per replica pass nothing).
            Without a launcher it may have any value.

    Raises:
        RuntimeError: `ipus_per_replica` differs from the launched number, or the variables are invalid or describe
            replicas that are not uniform.
    """

    def __init__(self, ipus_per_replica: int = 1) -> None:
        if not isinstance(ipus_per_replica, int):
            raise TypeError(f"popdist.poptorch.Options: ipus_per_replica must be an int, got {ipus_per_replica!r}")
        launched = popdist.getNumIpusPerReplica()
        if popdist.isPopdistEnvSet() and ipus_per_replica not in (1, launched):
            raise RuntimeError(
                f"popdist.poptorch.Options(ipus_per_replica={ipus_per_replica}), but the run was launched with"
                f" {launched} IPUs per replica (POPDIST_NUM_IPUS_PER_REPLICA)"
            )
        super().__init__()
        self._distributed = _PopdistDistributedOptions()
        super().replicationFactor(popdist.getNumLocalReplicas())
        # Compilation checks that the model uses this number of IPUs.
        self._launched_ipus_per_replica = launched if popdist.isPopdistEnvSet() else None

    def toDict(self) -> Dict[str, Any]:
        """Return all values, with the launcher's device as `ipu_id`, which PopDist selects here and not before.

        Raises:
            RuntimeError: the launcher's device cannot be determined (see `popdist.getDeviceId`).
        """
        return {**super().toDict(), "ipu_id": popdist.getDeviceId()}

    def useIpuId(self, ipu_id: int) -> NoReturn:
        """Raise RuntimeError: the launcher selects the devices."""
        _reject("useIpuId")

    def replicationFactor(self, replication_factor: int) -> NoReturn:
        """Raise RuntimeError: the launcher distributes the replicas."""
        _reject("replicationFactor")


class _PopdistDistributedOptions(_DistributedOptions):
    """The options group `Distributed`, set from POPDIST_*."""

    def __init__(self) -> None:
        super().__init__()
        self._configure(popdist.getInstanceIndex(), popdist.getNumInstances())

    def disable(self) -> NoReturn:
        """Raise RuntimeError: the run is distributed."""
        _reject("Distributed.disable")

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> NoReturn:
        """Raise RuntimeError: the variables are POPDIST_*."""
        _reject("Distributed.setEnvVarNames")

    def configureProcessId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError: the launcher numbers the instances."""
        _reject("Distributed.configureProcessId")


def _reject(call: str) -> NoReturn:
    raise RuntimeError(f"Cannot call `{call}` with popdist.poptorch.Options")
