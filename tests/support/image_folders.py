"""Small image folders for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, Tuple, Union

import numpy as np
import torch
from PIL import Image

from raypod.plan.config import Config
from raypod.plan.resolve import from_values
from raypod.training import data as datasets
from raypod.training.data.feed import Feed
from raypod.training.data.images import ImageSource


def photograph(seed: int, width: int, height: int) -> Image.Image:
    """An image with large structures, in which every crop looks different."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def write(folder: Path) -> Path:
    """Two classes with 6 training images each, of all kinds that ImageNet has, and 1 test image."""
    exif = Image.Exif()
    exif[0x0112] = 6  # the orientation
    kinds: Dict[str, Tuple[str, Dict[str, object]]] = {
        "a.JPEG": ("RGB", {"quality": 92}),
        "b.jpg": ("RGB", {"quality": 92, "subsampling": 0, "exif": exif}),
        "c.jpg": ("L", {"quality": 92}),
        "d.jpg": ("CMYK", {"quality": 92}),
        "e.png": ("RGBA", {}),
        "f.jpeg": ("RGB", {"quality": 92, "progressive": True}),
    }
    for number, name in enumerate(("cat", "dog")):
        for split, files in (("train", list(kinds)), ("val", ["a.JPEG"])):
            (folder / split / name).mkdir(parents=True)
            for position, file in enumerate(files):
                mode, options = kinds[file]
                image = photograph(100 * number + position + 50 * (split == "val"), 130 + 7 * position, 100)
                image.convert(mode).save(str(folder / split / name / file), **options)
    return folder


def config(folder: Union[str, Path], **data: object) -> Config:
    """Return the settings of a run with the images of a folder."""
    return from_values({"data": {"dataset": "imagefolder", "data_dir": str(folder), **data}})


def fed(make: Any, folder: Path, data: Dict[str, Any], segment: int, instances: int) -> torch.Tensor:
    """Return the images of a segment of a run with 2 replicas and settings of `data`; `make` makes its plan."""
    own = config(folder, image_size=16, **data).data.model_dump()
    plan = make(data=own, training={"batch_size": 2, "epochs": 3}, pod={"replicas": 2, "num_instances": instances})
    source = ImageSource(plan.config, datasets.load(plan.config))
    calls = []
    for spec in plan.placement.instances:
        feed = Feed(plan, spec, source)
        calls.append([images for images, _ in feed.calls(plan.segments()[segment])])
        feed.close()
    return torch.cat([torch.cat(call) for call in zip(*calls)])


def touch(folder: Path) -> None:
    """Let a folder be changed a second later than it was, whatever the resolution of the clock."""
    changed = folder.stat().st_mtime + 1
    os.utime(str(folder), (changed, changed))
