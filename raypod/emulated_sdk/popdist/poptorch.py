"""`popdist.poptorch.Options`: PopTorch options that know their place in the distributed run (contract section 6.2)."""

from __future__ import annotations

from typing import Any, Dict, NoReturn

import poptorch
from poptorch._options.sections import _DistributedOptions

from popdist import _environment

__all__ = ["Options"]


class Options(poptorch.Options):
    """`poptorch.Options` with replication factor, process id and number of processes out of the environment.

    ipus_per_replica: IPUs of the model. 1, the default, leaves it to the launcher; any other number must be the
        launcher's (RuntimeError). [I] PopDist's own check is not public; programs that were launched with two IPUs
        per replica are known to pass nothing, so that the default cannot be a claim.

    What the launcher decides cannot be set: RuntimeError. So are garbage and non-uniform replicas in the environment.
    """

    def __init__(self, ipus_per_replica: int = 1) -> None:
        launched = _environment.getNumIpusPerReplica()
        if ipus_per_replica not in (1, launched):
            raise RuntimeError(
                f"popdist.poptorch.Options(ipus_per_replica={ipus_per_replica}), but the run was launched with"
                f" {launched} IPUs per replica (POPDIST_NUM_IPUS_PER_REPLICA)"
            )
        super().__init__()
        self._distributed = _PopdistDistributedOptions()
        super().replicationFactor(_environment.getNumLocalReplicas())
        # Compiling holds the model's IPUs against it.
        self._launched_ipus_per_replica = launched if _environment.isPopdistEnvSet() else None

    def toDict(self) -> Dict[str, Any]:
        """All values, with the launcher's device as `ipu_id`. RuntimeError where it gives none (`popdist.getDeviceId`).

        Only here the device is chosen, as in PopDist.
        """
        return {**super().toDict(), "ipu_id": _environment.getDeviceId()}

    def useIpuId(self, ipu_id: int) -> NoReturn:
        """Refused: the launcher chooses the devices."""
        _refuse("useIpuId")

    def replicationFactor(self, replication_factor: int) -> NoReturn:
        """Refused: the launcher shares out the replicas."""
        _refuse("replicationFactor")


class _PopdistDistributedOptions(_DistributedOptions):
    """The group `Distributed`, filled from POPDIST_* and closed."""

    def __init__(self) -> None:
        super().__init__()
        self._configure(_environment.getInstanceIndex(), _environment.getNumInstances())

    def disable(self) -> NoReturn:
        """Refused: the run is distributed."""
        _refuse("Distributed.disable")

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> NoReturn:
        """Refused: the variables are POPDIST_*."""
        _refuse("Distributed.setEnvVarNames")

    def configureProcessId(self, process_id: int, num_processes: int) -> NoReturn:
        """Refused: the launcher numbers the instances."""
        _refuse("Distributed.configureProcessId")


def _refuse(call: str) -> NoReturn:
    raise RuntimeError(f"Cannot call `{call}` with popdist.poptorch.Options")
