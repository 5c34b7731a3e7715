"""Weights as files and as one number: hash, save atomically, load without trusting the file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Dict, Mapping

import torch


def weights_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor of a state_dict, in its order."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save(path: Path, content: Dict[str, Any]) -> None:
    """Write beside `path`, flush to disk, rename into place: the file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path) -> Dict[str, Any]:
    """What `save` wrote; only tensors and plain values are unpickled."""
    content: Dict[str, Any] = torch.load(str(path), map_location="cpu", weights_only=True)
    return content
