"""Parameters that are not trained (`--freeze`), and the norms whose statistics therefore stay as they are."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raypod.errors import ConfigError
from raypod.plan.patterns import check_all_match, matches


def freeze(network: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters whose names match from the training.

    Raises:
        ConfigError: a pattern matches no parameter, or all parameters match.
    """
    named = list(network.named_parameters(remove_duplicate=False))
    check_all_match("--freeze", patterns, [name for name, _ in named])
    for name, parameter in named:
        if matches(name, patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(f"--freeze {','.join(patterns)} matches all parameters: nothing is left to train")


def trained_groups(groups: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return the parameter groups of an optimizer without frozen parameters."""
    return [{**group, "params": [each for each in group["params"] if each.requires_grad]} for group in groups]


def train(network: nn.Module) -> None:
    """Set the training mode, but the evaluation mode in every BatchNorm whose parameters are all frozen.

    Such a norm uses its stored statistics and does not change them.
    """
    network.train()
    for module in network.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, _BatchNorm) and own and not any(parameter.requires_grad for parameter in own):
            module.eval()
