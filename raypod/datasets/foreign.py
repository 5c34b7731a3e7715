"""What people bring in place of a map-style data set, and how each is used: a line of an error message."""

from __future__ import annotations

from typing import Any, Optional

from torch.utils.data import DataLoader, IterableDataset


def way_to_use(split: Any) -> Optional[str]:
    """Return how a split of another kind becomes one that can be used; None for a map-style data set.

    Packages are recognized by the names of their modules, as they may not be installed.
    """
    module, name = type(split).__module__, type(split).__name__
    if isinstance(split, DataLoader):
        return "a DataLoader, and raypod combines the batches itself: return its data set, `loader.dataset`"
    if module.startswith("datasets.") and name.startswith("Iterable"):
        return "a streamed Hugging Face data set, which has no order to seed: load it without `streaming=True`"
    if isinstance(split, IterableDataset):
        return (
            "an IterableDataset, whose samples have no numbers, so neither shuffling nor a resume is exact: return "
            "`list(dataset)` if it fits into memory, or a data set with __len__ and __getitem__"
        )
    if module.startswith("ray.data"):
        return "of Ray Data: return `raypod.Arrays(**dataset.take_batch(dataset.count()))`"
    if module.startswith("datasets.") and name.endswith("Dict"):
        return 'a DatasetDict: return one of its data sets, as in `data["train"].with_format("torch")`'
    if module.startswith("datasets.") and getattr(split, "format", {"type": "torch"}).get("type") is None:
        return 'a Hugging Face data set whose samples are lists: return `dataset.with_format("torch")`'
    if not (hasattr(split, "__len__") and hasattr(split, "__getitem__")):
        return "not a map-style data set (no __len__ or __getitem__)"
    return None
