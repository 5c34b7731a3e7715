"""Print the results of all query functions of popdist, one line per instance."""

import popdist
import popdist.poptorch
import poptorch

if __name__ == "__main__":
    opts = popdist.poptorch.Options()
    plain = poptorch.Options()
    found = {
        "instance": (popdist.getInstanceIndex(), "of", popdist.getNumInstances()),
        "local": (popdist.getLocalInstanceIndex(),),
        "replicas": (popdist.getNumLocalReplicas(), "of", popdist.getNumTotalReplicas()),
        "from": (popdist.getReplicaIndexOffset(),),
        "ipus": (popdist.getNumIpusPerReplica(),),
        "device": (popdist.getDeviceId(),),
        "set": (popdist.isPopdistEnvSet(),),
        "check": (popdist.checkNumIpusPerReplica(2),),
        "options": (opts.replication_factor, opts.Distributed.processId, opts.Distributed.numProcesses),
        "plain": (plain.Distributed.processId, plain.Distributed.numProcesses),
    }
    print(*(word for name, values in found.items() for word in (name, *values)))
