"""A replica group of torchft with the work of `bench_recovery.py`, as torchft's README and its train_ddp.py have it.

A group of one process needs no torchrun: its store is in this process. Each committed update to which the group has
contributed is a line in `--file`. As torchft recommends, the position in the data is stored every step: a group that is
started again goes on after its last line. Needs torchft (`pip install torchft-nightly`).
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict

import torch
from bench_recovery_peer import SAMPLES, Part, line
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

from raypod.training.models.networks import SmallResNet


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pg = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=pg,
        min_replica_size=1,
        load_state_dict=lambda state: load(state),
        state_dict=lambda: {"model": model.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"group_{args.group}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(pg, timeout=timedelta(seconds=10), device=torch.device("cpu")),
        rank=0,
        world_size=1,
        lighthouse_addr=args.lighthouse,
        store_addr="localhost",
        store_port=store.port,
    )
    model = DistributedDataParallel(manager, SmallResNet(1, 1, 10))
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    def load(state: Dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    sampler = DistributedSampler(range(SAMPLES), args.group, 2, group_rank=0, num_replicas=1)
    part = Part(list(sampler), args.batch)
    lines = [text.split() for text in args.file.read_text().splitlines()] if args.file.exists() else []
    position = max((int(fields[4]) for fields in lines if fields[0] == str(args.group)), default=-1)
    with args.file.open("a", buffering=1) as file:
        while True:
            position += 1
            images, labels = part.at(position)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            update = manager.current_step()
            optimizer.step()
            if manager.current_step() > update and manager.is_participating():
                file.write(line(args.group, update + 1, position, manager.num_participants()))


if __name__ == "__main__":
    main()
