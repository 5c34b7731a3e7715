"""Load the weights with which a run starts from a safetensors file or a state dict of torch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

import torch
from torch import nn

from raypod.errors import CheckpointDamaged, ConfigError
from raypod.plan.user_code import reported
from raypod.plan.values import check_all_match, matches
from raypod.training.checkpoint import tensors, torch_file

_NESTED = ("state_dict", "model")  # under which training scripts keep the state dict
_COUNTER = "num_batches_tracked"  # of BatchNorm; without effect, and absent from some files


def load(network: nn.Module, path: Path, ignored: Sequence[str]) -> None:
    """Load a file into a network, converted to the dtypes of the network.

    Args:
        network: the network.
        path: a safetensors file, or a state dict that `torch_file.read` reads, also one in a dict under
            `state_dict` or `model`.
        ignored: patterns of names that keep their initialization, or that are left out of the file.

    Raises:
        ConfigError: the file cannot be read, or names or shapes differ; the message lists all of them.
    """
    flag = f"--init-weights {path}"
    content, state = _read(path, flag), network.state_dict()
    check_all_match("--init-ignore", ignored, [*state, *content])
    saved = {name: value for name, value in content.items() if not matches(name, ignored)}
    own = {name: value for name, value in state.items() if not matches(name, ignored)}
    differences = _differences(own, saved)
    if differences:
        raise ConfigError(
            f"{flag} does not fit the network: {'; '.join(differences)}; "
            "--init-ignore leaves names that match a pattern at their initialization"
        )
    with torch.no_grad():
        for name, value in own.items():
            if name in saved:
                value.copy_(saved[name])


def _read(path: Path, flag: str) -> Dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return tensors.read_tensors(path)[0]
    except CheckpointDamaged as error:
        raise ConfigError(f"{flag}: {error.cause}") from None
    with reported(flag):  # a damaged file can raise anything
        try:
            content: Any = torch_file.read(path)
        except pickle.UnpicklingError as error:
            raise ConfigError(
                f"{flag}: it contains more than tensors, or is damaged ({error}); "
                "write the state dict alone: torch.save(network.state_dict(), FILE)"
            ) from None
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ConfigError(f"{flag}: it contains a {type(content).__name__}, not a state dict")
    others = [str(name) for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigError(f"{flag}: it is not a state dict: {', '.join(others)} are no tensors")
    return {str(name): value for name, value in content.items()}


def _differences(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> List[str]:
    """Return what differs, in groups; empty if the weights fit."""
    different = tensors.different_shapes(own, saved)
    missing = [name for name in different if name not in saved and not name.endswith(_COUNTER)]
    unexpected = [name for name in different if name not in own and not name.endswith(_COUNTER)]
    shapes = [
        f"{name} is {theirs} there and {ours} in the network"
        for name, (ours, theirs) in different.items()
        if tensors.MISSING not in (ours, theirs)
    ]
    kinds = [
        f"{name} is {saved[name].dtype} there and {value.dtype} in the network"
        for name, value in own.items()
        if name in saved and saved[name].is_floating_point() != value.is_floating_point()
    ]
    groups = (("it lacks ", missing), ("the network has no ", unexpected), ("", shapes), ("", kinds))
    return [label + ", ".join(names) for label, names in groups if names]
