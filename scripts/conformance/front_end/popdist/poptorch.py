"""`popdist.poptorch.Options`."""

from __future__ import annotations

from typing import Any, Dict

import popdist
import poptorch
from poptorch.options import _DistributedOptions


def _rejected(name: str) -> Any:
    def call(*_args: Any, **_named: Any) -> None:
        raise RuntimeError(f"Cannot call `{name}` with popdist.poptorch.Options")

    return call


class _Distributed(_DistributedOptions):  # type: ignore[misc]
    """The position of the process, which the launcher has chosen."""

    disable = _rejected("Distributed.disable")
    setEnvVarNames = _rejected("Distributed.setEnvVarNames")
    configureProcessId = _rejected("Distributed.configureProcessId")

    def __init__(self) -> None:
        self._gcd_mappings: Dict[Any, Any] = {}
        super(_DistributedOptions, self).__init__(
            num_distributed_processes=popdist.getNumInstances(),
            distributed_process_id=popdist.getInstanceIndex(),
            ipuof_configs={},
        )


class Options(poptorch.Options):
    """`poptorch.Options` with the replicas, the process and the device that the launcher has chosen."""

    replicationFactor, useIpuId = _rejected("replicationFactor"), _rejected("useIpuId")

    def __init__(self, ipus_per_replica: int = 1) -> None:
        if ipus_per_replica > 1 and popdist.isPopdistEnvSet() and not popdist.checkNumIpusPerReplica(ipus_per_replica):
            raise RuntimeError(f"the launcher has started {popdist.getNumIpusPerReplica()} IPUs per replica")
        super().__init__()
        super().replicationFactor(popdist.getNumLocalReplicas())
        self._distributed = _Distributed()

    def toDict(self) -> Dict[str, Any]:
        """All options, with the device of this instance."""
        return {**super().toDict(), "ipu_id": popdist.getDeviceId()}
