"""Short trainings in this process, and what their networks compute."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Dict

import numpy as np
import torch

from raypod import train
from raypod.api.inference.export import export
from raypod.plan.config import Config
from raypod.training import data as datasets
from raypod.training.checkpoint import tensors
from raypod.training.data.transforms import normalize
from raypod.training.models.networks import build_model


def train_inline(run_dir: Path, *flags: str) -> Path:
    assert train.main(["--fleet", "inline", "--run-dir", str(run_dir), "--device", "emulated", *flags]) == 0
    return run_dir


def weights_of(run: Path, update: int) -> Dict[str, torch.Tensor]:
    return tensors.read_tensors(run / "checkpoints" / f"update-{update:08d}" / "weights.safetensors")[0]


def digits() -> torch.Tensor:
    return torch.from_numpy(np.array(datasets.load(Config()).test.images[:20]))


def logits(run: Path, images: torch.Tensor) -> torch.Tensor:
    network = build_model(Config(), 1, 8, 10)
    network.load_state_dict(weights_of(run, 22))
    with torch.no_grad():
        output: torch.Tensor = network.eval()(images)
    return output


def normalized(images: torch.Tensor) -> torch.Tensor:
    splits = datasets.load(Config())
    return normalize(images, splits.mean, splits.std)


def check_export(run: Path, kind: str, file: Path, pixels: bool, compute: Callable[..., torch.Tensor]) -> None:
    """Export a run; `compute(file, images)` must return the outputs of its network."""
    found = export(run, kind, file, pixels=pixels)
    assert found["max_difference"] <= 1e-4
    assert found["inputs"][0]["dtype"] == ("uint8" if pixels else "float32")
    images = normalized(digits())
    output = compute(file, digits() if pixels else images)
    torch.testing.assert_close(output, logits(run, images), rtol=1e-4, atol=1e-4)


class Untraceable(torch.nn.Linear):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(64, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if torch._C._get_tracing_state() is not None:
            raise ValueError("no tracing")
        return super().forward(images.flatten(1))
