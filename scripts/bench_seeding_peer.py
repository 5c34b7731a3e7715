"""The process of one host in `bench_seeding.py`.

    python bench_seeding_peer.py RANK SIZE STATE ROUNDS NETWORK FOLDER WAYS

WAYS are names of `Methods`, separated by commas. Rank 0 prints the seconds of every round as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as dist

from raypod.plan.environment import horovod_identity
from raypod.runtime.worker import collectives
from raypod.runtime.worker.seeding import SeedingPeer, new_seeding
from raypod.system import sdk, torchvision_import
from raypod.system.sdk import rendezvous as door
from raypod.training.checkpoint import tensors

WAIT_S = 120.0


def resnet50() -> Dict[str, torch.Tensor]:
    """Return the state dict of a ResNet-50: 320 tensors, 102 MB."""
    torchvision_import.install()
    from torchvision.models import resnet50 as network

    return dict(network().state_dict())


def gigabyte() -> Dict[str, torch.Tensor]:
    """Return 40 tensors of 25 MB."""
    return {f"layer{number}": torch.rand(2500, 2500) for number in range(40)}


STATES = {"ResNet-50": resnet50, "1 GB": gigabyte}


def join(rank: int, hosts: List[str], folder: Path) -> Any:
    """Join Horovod's and torch.distributed's process groups; return the objects that must stay alive."""
    sdk.select("emulated")
    note, rendezvous = folder / "rendezvous.json", None
    if rank == 0:
        rendezvous = door.serve(hosts[0], 0)
        partial = folder / "partial"
        partial.write_text(json.dumps(rendezvous.environment))
        partial.replace(note)
    deadline = time.monotonic() + WAIT_S
    while not note.is_file():
        assert time.monotonic() < deadline, "no rendezvous"
        time.sleep(0.05)
    os.environ.update(json.loads(note.read_text()))
    proxy = collectives.horovod_proxy(dict(os.environ)) if collectives.uses_installed_horovod() else None
    os.environ.update(proxy.environment if proxy is not None else {})
    os.environ.update(horovod_identity([(host, 1) for host in hosts], rank))
    os.environ.update(collectives.horovod_interface(hosts[0]))
    os.environ.update(GLOO_SOCKET_IFNAME="eth0", OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE=str(len(hosts)))
    import horovod.torch as hvd

    hvd.init()
    import _pod.wires

    store, _ = _pod.wires.connection_to_store(len(hosts))
    dist.init_process_group("gloo", store=dist.PrefixStore("bench", store), rank=rank, world_size=len(hosts))
    return rendezvous, proxy, store


class Methods:
    """The broadcasts to compare. Each returns its seconds and the state that this host has afterwards."""

    def __init__(self, rank: int, hosts: List[str], state: Dict[str, torch.Tensor]) -> None:
        self._rank, self._hosts, self._state = rank, hosts, state

    def seeding(self) -> Any:
        """Run raypod's seeding."""
        peer = SeedingPeer(self._rank, self._hosts[self._rank], self._hosts[self._rank], WAIT_S)
        endpoints: List[Any] = [None] * len(self._hosts)
        dist.all_gather_object(endpoints, peer.endpoint)
        seeding = [new_seeding(endpoints)] if self._rank == 0 else [None]
        dist.broadcast_object_list(seeding)
        received: List[Any] = [self._state]

        def transfer() -> None:
            if self._rank == 0:
                peer.send(seeding[0], tensors.pack_flat(self._state))
            else:
                received[0] = tensors.unpack_flat(peer.receive(seeding[0]))

        seconds = self._timed(transfer)
        peer.close()
        return seconds, received[0]

    def horovod(self) -> Any:
        """Run `hvd.broadcast_parameters`, as PopTorch programs do."""
        import horovod.torch as hvd

        return self._timed(lambda: hvd.broadcast_parameters(self._state, root_rank=0)), self._state

    def per_tensor(self) -> Any:
        """Run torch.distributed's broadcast for each tensor."""

        def broadcast() -> None:
            for tensor in self._state.values():
                dist.broadcast(tensor, 0)

        return self._timed(broadcast), self._state

    def exchange(self) -> Any:
        """Run the emulated SDK's gradient exchange on tensors of the size of the state."""
        from _pod import reduce

        total = torch.ones(sum(tensor.numel() for tensor in self._state.values()))
        sizes = {"replica_offset": self._rank, "total_replicas": len(self._hosts)}
        processes = {"process_id": self._rank, "num_processes": len(self._hosts)}
        seconds = self._timed(lambda: reduce.tree_sum_([total], **sizes, **processes))
        assert bool((total == len(self._hosts)).all())
        return seconds, {"sum": total}

    def _timed(self, work: Callable[[], None]) -> float:
        dist.barrier()
        began = time.monotonic()
        work()
        dist.barrier()
        return time.monotonic() - began


def check(received: Dict[str, torch.Tensor], name: str) -> None:
    """Check that all hosts have the same state."""
    sums: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sums, [float(tensor.double().sum()) for tensor in received.values()])
    assert all(each == sums[0] for each in sums), name
    assert any(sums[0]), name


def main() -> None:
    rank, size, state_name, rounds, network, folder, chosen = sys.argv[1:]
    hosts = [f"{network}.{11 + each}" for each in range(int(size))]
    kept = join(int(rank), hosts, Path(folder))
    torch.set_num_threads(1)
    state = STATES[state_name]()
    methods = Methods(int(rank), hosts, state)
    known = {"seeding": methods.seeding, "horovod": methods.horovod, "per tensor": methods.per_tensor}
    known["exchange"] = methods.exchange
    ways = {name: known[name] for name in chosen.split(",")}
    seconds: Dict[str, List[float]] = {name: [] for name in ways}
    for round_ in range(int(rounds) + 1):
        for name, way in ways.items():
            if rank != "0":
                for tensor in state.values():
                    tensor.zero_()
            took, received = way()
            if round_ == 0:  # a warm-up that opens connections; its result is checked
                check(received, name)
            else:
                seconds[name].append(took)
            del received
    if rank == "0":
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        installed = "installed" if collectives.uses_installed_horovod() else "emulated"
        print(json.dumps({"bytes": size_bytes, "horovod": installed, "seconds": seconds}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    import horovod.torch as hvd

    hvd.shutdown()
    del kept


if __name__ == "__main__":
    main()
