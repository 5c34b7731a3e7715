"""Weights as one number, by which runs, instances and checkpoints are compared; and saved ones into a network."""

from __future__ import annotations

import hashlib
from typing import Mapping

import torch
from torch import nn

from raypod.errors import ConfigError


def weights_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor of a state_dict, in its order."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load(network: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Put saved weights into a network.

    Raises:
        ConfigError: they are those of another network; the first tensor that tells.
    """
    own = network.state_dict()
    for name in (*own, *saved):
        ours, theirs = (str(list(state[name].shape)) if name in state else "missing" for state in (own, saved))
        if ours != theirs:
            raise ConfigError(
                f"the model is not the one that was saved: {name} is {ours} in the model and {theirs} in the "
                "checkpoint; go on with the model as it was, or begin a run without --resume"
            )
    network.load_state_dict(saved)
