"""Ray Train's TorchTrainer with the work of `bench_recovery.py`: DDP over gloo, a checkpoint every few updates.

Each worker appends a line "rank update pid seconds" per update to `--file`. Needs pyarrow and pandas.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Dict


def train(config: Dict[str, Any]) -> None:
    """Run a worker, from the last checkpoint on."""
    import torch
    from ray import train as ray_train
    from ray.train import torch as ray_torch

    from raypod.training.models.networks import SmallResNet

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = ray_torch.prepare_model(SmallResNet(1, 1, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    rank, first = ray_train.get_context().get_world_rank(), 0
    checkpoint = ray_train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["update"]
    images = torch.randn(config["batch"], 1, 8, 8)
    labels = torch.arange(config["batch"]) % 10
    with Path(config["file"]).open("a", buffering=1) as file:
        for update in range(first + 1, config["updates"] + 1):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            file.write(f"{rank} {update} {os.getpid()} {time.monotonic()}\n")
            if update % config["save_every"]:
                continue
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "update": update}
                    torch.save(state, Path(folder, "state.pt"))
                    saved = ray_train.Checkpoint.from_directory(folder)
                ray_train.report({}, checkpoint=saved)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=50)
    args = parser.parse_args()

    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=args.folder, failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
