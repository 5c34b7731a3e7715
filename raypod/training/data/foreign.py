"""What people bring in place of a map-style data set, and how each is used: a line of an error message."""

from __future__ import annotations

from typing import Any, Optional

from torch.utils.data import DataLoader, IterableDataset


def way_to_use(split: Any) -> Optional[str]:
    """Return how a split of another kind becomes one that can be used; None for a map-style data set."""
    if isinstance(split, DataLoader):
        return "a DataLoader, and raypod combines the batches itself: return its data set, `loader.dataset`"
    if is_of_hf(split, "IterableDatasetDict") or is_of_hf(split, "IterableDataset"):
        return (
            "a streamed Hugging Face data set, which has no order to seed: load it without `streaming=True`, and "
            "return `raypod.from_hf(dataset)`"
        )
    if isinstance(split, IterableDataset):
        return (
            "an IterableDataset, whose samples have no numbers, so neither shuffling nor a resume is exact: return "
            "`list(dataset)`, or a data set with __len__ and __getitem__; if it does not fit into memory, save it with "
            "save_to_disk of Hugging Face's datasets, whose files are memory-mapped, for `raypod pack FOLDER OUT`"
        )
    if type(split).__module__.startswith("ray.data"):
        return "of Ray Data: return `raypod.from_ray_data(dataset)`"
    if is_of_hf(split, "DatasetDict"):
        return 'a DatasetDict: return one of its data sets, as in `raypod.from_hf(data["train"])`'
    if is_of_hf(split, "Dataset") and getattr(split, "format", {"type": "torch"}).get("type") is None:
        return "a Hugging Face data set whose samples are lists: return `raypod.from_hf(dataset)`"
    if type(split).__module__.partition(".")[0] == "pandas" and type(split).__name__ == "DataFrame":
        return (
            "a DataFrame of pandas: return arrays of its columns, as in "
            '`raypod.Arrays(x=frame[["a", "b"]].to_numpy(), y=frame["c"].to_numpy())`'
        )
    if not (hasattr(split, "__len__") and hasattr(split, "__getitem__")):
        return "not a map-style data set (no __len__ or __getitem__)"
    return None


def is_of_hf(split: Any, name: str) -> bool:
    """Return whether a split is of a class of Hugging Face's package datasets, which may not be installed."""
    return type(split).__module__.startswith("datasets.") and type(split).__name__ == name
