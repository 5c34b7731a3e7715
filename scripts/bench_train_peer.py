"""The baselines of bench_train.py, one process each: DistributedDataParallel under torchrun, and the compute limit.

Both train the same network (raypod.model.networks) with the same optimizer and sizes, and print one line of JSON:
{"images_per_s": ...}. Started by bench_train.py.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from raypod import datasets
from raypod.model import networks
from raypod.plan.config import Config
from raypod.plan.resolve import from_values


def settings(args: argparse.Namespace) -> Config:
    return from_values(
        {
            "data": {"dataset": "synthetic", "samples": args.samples, "image": "3x32x32"},
            "training": {
                "model": args.model,
                "batch_size": args.micro_batch,
                "gradient_accumulation": args.accumulation,
            },
            "pod": {"replicas": 2, "num_instances": 2},
        }
    )


def network_and_optimizer(config: Config) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(config.training.seed)
    network = networks.build_model(config, 3, 32, 10)
    decayed = [parameter for parameter in network.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in network.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": others, "weight_decay": 0.0}]
    return network, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def limit(config: Config, updates: int, warm_up: int) -> float:
    """Train on a fixed batch without data loading or communication; return this process's images per second."""
    network, optimizer = network_and_optimizer(config)
    images = torch.randn(config.training.batch_size, 3, 32, 32)
    labels = torch.arange(config.training.batch_size) % 10
    began = 0.0
    for update in range(updates + warm_up):
        if update == warm_up:
            began = time.monotonic()
        optimizer.zero_grad()
        for _ in range(config.training.gradient_accumulation):
            loss = functional.cross_entropy(network(images), labels) / config.training.gradient_accumulation
            loss.backward()
        optimizer.step()
    samples = updates * config.training.gradient_accumulation * config.training.batch_size
    return samples / (time.monotonic() - began)


def ddp(config: Config, updates: int, warm_up: int) -> float:
    """Train with DataLoader, DistributedSampler and no_sync during accumulation; images per second of all processes."""
    dist.init_process_group("gloo")
    network, optimizer = network_and_optimizer(config)
    model = DistributedDataParallel(network)
    splits = datasets.load(config)
    images = (torch.from_numpy(splits.train.images).float() / 255 - splits.mean[0]) / splits.std[0]
    data = TensorDataset(images, torch.from_numpy(splits.train.labels))
    loader = DataLoader(data, config.training.batch_size, sampler=DistributedSampler(data), drop_last=True)
    accumulation = config.training.gradient_accumulation
    micro_batches, began = iter(loader), 0.0
    for update in range(updates + warm_up):
        if update == warm_up:
            began = time.monotonic()
        optimizer.zero_grad()
        for step in range(accumulation):
            batch = next(micro_batches, None)
            if batch is None:
                micro_batches = iter(loader)
                batch = next(micro_batches)
            if step < accumulation - 1:
                with model.no_sync():
                    (functional.cross_entropy(model(batch[0]), batch[1]) / accumulation).backward()
            else:
                (functional.cross_entropy(model(batch[0]), batch[1]) / accumulation).backward()
        optimizer.step()
    samples = updates * accumulation * config.training.batch_size * dist.get_world_size()
    rate = samples / (time.monotonic() - began)
    dist.destroy_process_group()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["ddp", "limit"])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure = {"ddp": ddp, "limit": limit}[args.peer]
    rate = measure(settings(args), args.updates, args.warm_up)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"images_per_s": rate}), flush=True)


if __name__ == "__main__":
    main()
