"""The works that bench_train.py and its peers train, as flags of raypod, which the peers parse, too. No torch."""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple


class Work(NamedTuple):
    """One training.

    Attributes:
        title: what is trained.
        unit: what is counted per second.
        flags: of `raypod.train`, without the number of updates.
        updates: the updates that are measured by default.
    """

    title: str
    unit: str
    flags: Tuple[str, ...]
    updates: int


_POD = ("--gradient-accumulation", "2", "--replicas", "2", "--num-instances", "2", "--epochs", "1000")
_IMAGES = ("--dataset", "synthetic", "--samples", "1024", "--image", "3x32x32", "--batch-size", "16", *_POD)
_TEXT = ("--task", "language-model", "--max-mb", "1", "--batch-size", "8", "--optimizer", "adamw", *_POD)

WORKS: Dict[str, Work] = {
    "resnet18-7x7": Work(
        "ResNet-18, 7x7 stem", "images", (*_IMAGES, "--model", "resnet18", "--stem", "imagenet"), updates=24
    ),
    "resnet18": Work("ResNet-18, 3x3 stem", "images", (*_IMAGES, "--model", "resnet18"), updates=8),
    "resnet50": Work("ResNet-50, 3x3 stem", "images", (*_IMAGES, "--model", "resnet50"), updates=4),
    "decoder": Work("decoder `small`, 128 tokens", "tokens", (*_TEXT, "--size", "small"), updates=8),
    "decoder-tiny": Work("decoder `tiny`, 128 tokens", "tokens", (*_TEXT, "--size", "tiny"), updates=48),
}
