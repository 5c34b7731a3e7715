"""The optimizers of PopTorch with the settings of a config, their size, and which parameters are frozen."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import poptorch
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raypod.errors import ConfigError
from raypod.plan.config import Config, TrainingSection
from raypod.plan.learning_rate import loss_scaling
from raypod.plan.values import check_all_match, matches


class _Optimizer(NamedTuple):
    create: Any  # the class
    states: Tuple[str, ...]  # per parameter; the option STATE_accum_type sets the dtype of each
    settings: Mapping[str, str] = {}  # the class's options by further keys of the section `training`; None is no value


_ADAM = {"betas": "betas", "eps": "eps"}
_MOMENTS = ("first_order_momentum", "second_order_momentum")
_OPTIMIZERS = {
    "sgd": _Optimizer(poptorch.optim.SGD, ("velocity",), {"momentum": "momentum"}),
    "adam": _Optimizer(poptorch.optim.Adam, _MOMENTS, _ADAM),
    "adamw": _Optimizer(poptorch.optim.AdamW, _MOMENTS, {**_ADAM, "bias_correction": "bias_correction"}),
    "lamb": _Optimizer(
        poptorch.optim.LAMB,
        _MOMENTS,
        {**_ADAM, "bias_correction": "bias_correction", "max_weight_norm": "max_weight_norm"},
    ),
    "rmsprop": _Optimizer(
        poptorch.optim.RMSprop, _MOMENTS, {"momentum": "momentum", "eps": "eps", "rmsprop_alpha": "alpha"}
    ),
}
_FLOAT32_STATES = {"second_order_momentum"}  # half precision would underflow


def build_optimizer(config: Config, groups: Sequence[Dict[str, Any]]) -> Any:
    """Return the poptorch optimizer of a config, as of update 0, for a task's parameter groups.

    Raises:
        ConfigError: there are optimizers in place of groups, or a group has a key that the optimizer does not have.
    """
    groups = _checked_groups(groups)
    training = config.training
    chosen = _OPTIMIZERS[training.optimizer]
    accumulator, states = _optimizer_dtypes(training)
    options: Dict[str, Any] = {f"{state}_accum_type": dtype for state, dtype in states.items()}
    given = {option: getattr(training, key) for key, option in chosen.settings.items()}
    options.update({option: value for option, value in given.items() if value is not None})
    scaling = loss_scaling(training, epoch=0)
    if training.combined_accumulator:
        options.update(use_combined_accum=True, velocity_scaling=training.velocity_scaling or scaling)
    if training.rmsprop_tf:
        options["use_tf_variant"] = True
    if training.max_grad_norm is not None:
        options["max_grad_norm"] = training.max_grad_norm
    common: Dict[str, Any] = {"lr": training.learning_rate, "loss_scaling": scaling}
    trained = [{**group, "params": [each for each in group["params"] if each.requires_grad]} for group in groups]
    trained = _with_bias_norm(trained, training.max_bias_norm)
    keys = {key for group in trained for key in group}
    optimizer = chosen.create(trained, accum_type=accumulator, **common, **options)
    added = {key for group in optimizer.param_groups for key in group} - keys
    known = {"params", *optimizer.defaults, *added}
    unknown = sorted(keys - known - {"name"})
    if unknown:  # torch ignores them
        raise ConfigError(
            f"parameter_groups of the task: {training.optimizer} has no {', '.join(map(repr, unknown))}; the keys of a "
            f"group are {', '.join(sorted(known))}"
        )
    return optimizer


def _checked_groups(groups: Any) -> List[Dict[str, Any]]:
    """Return the groups that a task returned. ConfigError if it returned something else, as optimizers."""
    is_one = isinstance(groups, (Mapping, torch.optim.Optimizer)) or not isinstance(groups, Iterable)
    listed: List[Any] = [groups] if is_one else list(groups)
    if isinstance(groups, Mapping):
        raise ConfigError("parameter_groups of the task returned one dict; it returns a list of groups: [{...}]")
    wrong = [each for each in listed if not isinstance(each, Mapping) or "params" not in each]
    if wrong or not listed:
        is_optimizer = any(isinstance(each, torch.optim.Optimizer) for each in wrong)
        one = "; a model has one optimizer, --optimizer: parameters with a rate of their own are a group with `lr`"
        shown = f"a {type(wrong[0]).__name__}" if wrong else "no group"
        raise ConfigError(
            f"parameter_groups of the task returned {shown}; it returns a list of groups, as in "
            f'[{{"params": list(network.parameters())}}]{one if is_optimizer else ""}'
        )
    return listed


def _with_bias_norm(groups: List[Dict[str, Any]], bound: Optional[float]) -> List[Dict[str, Any]]:
    """Return the groups with `max_bias_norm` in groups for parameters of one dimension.

    A group of the task with a `max_weight_norm` of its own keeps it.
    """
    found = []
    for group in groups:
        biases = [each for each in group["params"] if each.dim() <= 1]
        if bound is None or "max_weight_norm" in group or not biases:
            found.append(group)
            continue
        if len(biases) < len(group["params"]):
            found.append({**group, "params": [each for each in group["params"] if each.dim() > 1]})
        found.append({**group, "params": biases, "max_weight_norm": bound})
    return found


def optimizer_bytes(training: TrainingSection) -> int:
    """Return the bytes per parameter of the accumulated gradient and the states of `build_optimizer`."""
    accumulator, states = _optimizer_dtypes(training)
    if not training.momentum or training.combined_accumulator:
        states.pop("velocity", None)
    if not training.momentum and training.optimizer == "rmsprop":
        states.pop("first_order_momentum")
    return sum(torch.finfo(dtype).bits // 8 for dtype in (accumulator, *states.values()))


def optimizer_state_bytes(training: TrainingSection) -> int:
    """Return the bytes per parameter of the states of `build_optimizer` alone, which checkpoints contain."""
    accumulator, _ = _optimizer_dtypes(training)
    accumulator_bytes = torch.finfo(accumulator).bits // 8
    # A combined accumulator holds the velocity, too.
    return accumulator_bytes if training.combined_accumulator else optimizer_bytes(training) - accumulator_bytes


def _optimizer_dtypes(training: TrainingSection) -> Tuple[torch.dtype, Dict[str, torch.dtype]]:
    """Return the dtype of the accumulated gradient, and of each optimizer state: that of the weights, mostly."""
    dtype = torch.float16 if training.precision == "16.16" else torch.float32
    states = _OPTIMIZERS[training.optimizer].states
    return dtype, {state: torch.float32 if state in _FLOAT32_STATES else dtype for state in states}


def load_optimizer_state(optimizer: Any, state: Dict[str, Any]) -> None:
    """Load a `state_dict()` but keep the optimizer's own hyperparameters, which a resumed run may change."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings):
        group.update(own)


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


def train(network: nn.Module) -> None:
    """Set the training mode, but the evaluation mode in every BatchNorm whose parameters are all frozen.

    Such a norm uses its stored statistics and does not change them.
    """
    network.train()
    for module in network.modules():
        own = list(module.parameters(recurse=False))
        if isinstance(module, _BatchNorm) and own and not any(parameter.requires_grad for parameter in own):
            module.eval()
