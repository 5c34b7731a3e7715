"""Weights as one number: the hash by which runs, instances and checkpoints are compared."""

from __future__ import annotations

import hashlib
from typing import Mapping

import torch


def weights_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor of a state_dict, in its order."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
