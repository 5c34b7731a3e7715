"""Ray Train's TorchTrainer with the work of `bench_recovery.py`: DDP over gloo, a checkpoint every few updates.

Each worker appends a line per update to `--file`. Needs pyarrow and pandas.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Sequence, Tuple

import torch

SAMPLES = 2**19  # of the data order: more than are trained


class Part:
    """A process's part of the data order: the indices of samples, in batches."""

    def __init__(self, order: Sequence[int], batch: int) -> None:
        self._order, self._batch = torch.tensor(order), batch
        self._images, self._labels = torch.randn(512, 1, 8, 8), torch.arange(512) % 10

    def at(self, position: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return images and labels of a batch."""
        samples = self._order[position * self._batch :][: self._batch] % len(self._images)
        return self._images[samples], self._labels[samples]


def line(rank: int, update: int, position: int, processes: int) -> str:
    """Return the line of an update that `processes` have contributed to, this one with the batch at `position`."""
    return f"{rank} {update} {os.getpid()} {time.monotonic()} {position} {processes}\n"


def train(config: Dict[str, Any]) -> None:
    """Run a worker, from the last checkpoint on."""
    from ray import train as ray_train
    from ray.train import torch as ray_torch
    from torch.utils.data import DistributedSampler

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
    part = Part(list(DistributedSampler(range(SAMPLES), 2, rank)), config["batch"])
    with Path(config["file"]).open("a", buffering=1) as file:
        for update in range(first + 1, config["updates"] + 1):
            images, labels = part.at(update - 1)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            file.write(line(rank, update, update - 1, processes=2))
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
