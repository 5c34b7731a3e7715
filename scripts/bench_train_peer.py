"""The baselines of bench_train.py, one process each: DistributedDataParallel under torchrun, and the compute limit.

Both train the network of a work of bench_train_works.py with torch's optimizer and the same sizes, and print one line
of JSON: {"per_s": ...}, images or tokens. Started by bench_train.py.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any, Tuple

import numpy as np
import torch
import torch.distributed as dist
from bench_train_works import WORKS
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from raypod import train
from raypod.api.planning import plan_of
from raypod.plan.config import Config
from raypod.system import sdk
from raypod.training.data.source import Source
from raypod.training.tasks.registry import task_of_plan
from raypod.training.tasks.task import Task

_SAMPLES = 1024
_OPTIMIZERS: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Peer:
    """The task of a work, its network and torch's optimizer."""

    def __init__(self, name: str) -> None:
        words = [*WORKS[name].flags, "--device", "emulated"]
        plan = plan_of(train.parser(words).parse_args(words))
        self.config: Config = plan.config
        self.parts_per_sample = plan.task.parts[1] if plan.task.parts else 1
        self.task: Task = task_of_plan(plan)
        self.source: Source = self.task.load()
        training = self.config.training
        torch.manual_seed(training.seed)
        self.network = self.task.network(self.source.first_batch(training.seed))
        groups = self.task.parameter_groups(self.network, training.weight_decay)
        momentum = {"momentum": training.momentum} if training.optimizer == "sgd" else {}
        self.optimizer = _OPTIMIZERS[training.optimizer](groups, lr=training.learning_rate, **momentum)

    @property
    def data(self) -> TensorDataset:
        """The first samples of the training split, as tensors in memory."""
        samples = np.arange(min(_SAMPLES, len(self.source.train)))
        return TensorDataset(*self.source.gather(self.source.train, samples, None))

    def backward(self, network: Any, batch: Tuple[torch.Tensor, ...]) -> None:
        """Run forward and backward of a micro-batch."""
        loss, _ = self.task.training_outputs(network, *batch)
        (loss / self.config.training.gradient_accumulation).backward()

    def rate(self, updates: int, seconds: float) -> float:
        """Return the images or tokens per second of this process."""
        training = self.config.training
        return updates * training.gradient_accumulation * training.batch_size * self.parts_per_sample / seconds


def limit(peer: Peer, updates: int, warm_up: int) -> float:
    """Train on a fixed batch without data loading or communication; return this process's rate."""
    batch = peer.data[: peer.config.training.batch_size]
    began = 0.0
    for update in range(updates + warm_up):
        if update == warm_up:
            began = time.monotonic()
        peer.optimizer.zero_grad()
        for _ in range(peer.config.training.gradient_accumulation):
            peer.backward(peer.network, batch)
        peer.optimizer.step()
    return peer.rate(updates, time.monotonic() - began)


def ddp(peer: Peer, updates: int, warm_up: int) -> float:
    """Train with DataLoader, DistributedSampler and no_sync during accumulation; return the rate of all processes."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(peer.network)
    data = peer.data
    loader = DataLoader(data, peer.config.training.batch_size, sampler=DistributedSampler(data), drop_last=True)
    accumulation = peer.config.training.gradient_accumulation
    micro_batches, began = iter(loader), 0.0
    for update in range(updates + warm_up):
        if update == warm_up:
            began = time.monotonic()
        peer.optimizer.zero_grad()
        for step in range(accumulation):
            batch = next(micro_batches, None)
            if batch is None:
                micro_batches = iter(loader)
                batch = next(micro_batches)
            if step < accumulation - 1:
                with model.no_sync():
                    peer.backward(model, batch)
            else:
                peer.backward(model, batch)
        peer.optimizer.step()
    rate = peer.rate(updates, time.monotonic() - began) * dist.get_world_size()
    del model  # freed after the process group, it sometimes never returns
    dist.destroy_process_group()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["ddp", "limit"])
    parser.add_argument("--work", choices=list(WORKS), required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--warm-up", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sdk.select("emulated")  # the loss of a language model imports it
    measure = {"ddp": ddp, "limit": limit}[args.peer]
    rate = measure(Peer(args.work), args.updates, args.warm_up)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"per_s": rate}), flush=True)


if __name__ == "__main__":
    main()
