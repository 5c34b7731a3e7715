"""`ipu_param` of an optimizer's state_dict: the scalars that the host may change, by the names of PopART's tensors.

There is a tensor for each parameter and each scalar of which an attribute is variable, and one for the loss scaling.
Some scalars combine several attributes. The tensors are float64: a resumed training continues with equal values.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence

import torch

from poptorch.environment import logger
from poptorch.errors import Error
from poptorch.optimizers.hyperparameters import Hyperparameters

_LOSS_SCALING = "lossScaling_FLOAT"
_SPECIFIC = "___specific___"
_View = Dict[str, Any]
_Names = Sequence[Sequence[str]]  # of the parameters of each group


class _Scalar(NamedTuple):
    """A scalar of one parameter.

    Attributes:
        prefix: PopART's name.
        attributes: what it depends on; the first one is what `decode` returns.
        encode: returns its value, from the attributes.
        decode: returns the first attribute, from the other attributes and the value.
    """

    prefix: str
    attributes: Sequence[str]
    encode: Callable[[_View], float]
    decode: Callable[[_View, float], float]


def _plain(prefix: str, attribute: str) -> _Scalar:
    return _Scalar(prefix, [attribute], lambda view: view[attribute], lambda view, value: value)


def _quotient(value: float, divisor: float) -> float:
    return value / divisor if divisor else 0.0


_LR, _WEIGHT_DECAY = _plain("learningRate", "lr"), _plain("weightDecay", "weight_decay")
_SGD = [
    _Scalar(
        "scaledLearningRate0",
        ["lr", "loss_scaling", "dampening"],
        lambda view: _quotient(view["lr"] * (1 - view["dampening"]), view["loss_scaling"]),
        lambda view, value: _quotient(value * view["loss_scaling"], 1 - view["dampening"]),
    ),
    _Scalar(
        "weightDecayScaleFactor0",
        ["weight_decay", "lr", "dampening"],
        lambda view: 1 - view["lr"] * (1 - view["dampening"]) * view["weight_decay"],
        lambda view, value: _quotient(1 - value, view["lr"] * (1 - view["dampening"])),
    ),
]


def _sgd_with_momentum(number: int) -> List[_Scalar]:
    """Return the scalars of SGD with momentum: 1 for a combined accumulator, 2 for separate ones."""
    return [
        _Scalar(
            f"scaledLearningRate{number}",
            ["lr", "velocity_scaling"],
            lambda view: view["lr"] / view["velocity_scaling"],
            lambda view, value: value * view["velocity_scaling"],
        ),
        _plain(f"scaledMomentum{number}", "momentum"),
        _Scalar(
            f"dampeningScaleFactor{number}",
            ["dampening", "velocity_scaling", "loss_scaling"],
            lambda view: _quotient((1 - view["dampening"]) * view["velocity_scaling"], view["loss_scaling"]),
            lambda view, value: 1 - value * view["loss_scaling"] / view["velocity_scaling"],
        ),
        _Scalar(
            "scaledWeightDecay1",
            ["weight_decay", "dampening", "velocity_scaling"],
            lambda view: (1 - view["dampening"]) * view["weight_decay"] * view["velocity_scaling"],
            lambda view, value: _quotient(value, (1 - view["dampening"]) * view["velocity_scaling"]),
        ),
    ]


_ADAM = [_LR, _WEIGHT_DECAY, _plain("adamBeta1", "beta1"), _plain("adamBeta2", "beta2"), _plain("adamEps", "eps")]
_SCALARS: Dict[str, List[_Scalar]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "LAMB": [*_ADAM, _plain("maxWeightNorm", "max_weight_norm")],
    "RMSprop": [
        _LR,
        _WEIGHT_DECAY,
        _plain("adaptiveAlpha", "alpha"),
        _plain("adaptiveMomentum", "momentum"),
        _plain("adaptiveEps", "eps"),
    ],
}


def encode(values: Hyperparameters, names: _Names) -> Dict[str, torch.Tensor]:
    """Return the values as tensors by name; values that were loaded as they were loaded."""
    numbers: Dict[str, float] = {}
    if "loss_scaling" in values.variable:
        numbers[_LOSS_SCALING] = values.loss_scaling
    for group, members in zip(values.groups, names):
        view = _view(values, group)
        for scalar in _scalars(values):
            numbers.update({f"{scalar.prefix}{_SPECIFIC}{name}": scalar.encode(view) for name in members})
    tensors = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
    return {**tensors, **values.loaded}


def decode(
    values: Hyperparameters, loaded: Mapping[str, torch.Tensor], names: _Names, host: Hyperparameters
) -> Hyperparameters:
    """Return `values` changed by `ipu_param`; what is missing stays.

    A parameter group takes the values of its first parameter; a warning names groups in which they differ.

    Args:
        host: the values of the host's optimizer, which are preferred where they encode to the loaded number.

    Raises:
        Error: `loaded` belongs to another algorithm, other constants or other parameters.
    """
    present = encode(values, names)
    unknown = sorted(set(loaded) - set(present))
    if unknown:
        raise Error(f"The optimizer state does not match: {values.algorithm} as compiled has no {unknown[0]!r}")
    merged = {**present, **loaded}
    numbers = {name: float(tensor) for name, tensor in merged.items()}
    whole = {**values.whole, "loss_scaling": numbers.get(_LOSS_SCALING, values.loss_scaling)}
    changed = values._replace(whole=whole, loaded=merged)
    groups = [
        _decode_group(changed, group, members, numbers, candidate) if members else group
        for group, members, candidate in zip(values.groups, names, host.groups)
    ]
    return changed._replace(groups=groups)


def _decode_group(
    values: Hyperparameters,
    group: Dict[str, Any],
    members: Sequence[str],
    numbers: Dict[str, float],
    host_group: Dict[str, Any],
) -> Dict[str, Any]:
    view, host_view = _view(values, group), _view(values, host_group)
    for scalar in _scalars(values):
        given = [numbers[f"{scalar.prefix}{_SPECIFIC}{name}"] for name in members]
        attribute = scalar.attributes[0]
        if len(set(given)) > 1:
            logger.warning("ipu_param: a parameter group takes %s of %s for all", scalar.prefix, members[0])
        if scalar.encode(view) != given[0]:
            with_host = {**view, attribute: host_view[attribute]}
            is_host = scalar.encode(with_host) == given[0]
            view[attribute] = with_host[attribute] if is_host else scalar.decode(view, given[0])
    betas = {"betas": (view["beta1"], view["beta2"])} if "betas" in group else {}
    return {**{name: view.get(name, value) for name, value in group.items()}, **betas}


def _scalars(values: Hyperparameters) -> List[_Scalar]:
    """Return the scalars of which an attribute is variable."""
    if values.algorithm == "SGD":
        with_momentum = _sgd_with_momentum(1 if values.is_combined else 2)
        scalars = with_momentum if values.has_momentum else _SGD
    else:
        scalars = _SCALARS[values.algorithm]
    variable = set(values.variable) | ({"beta1", "beta2"} if "betas" in values.variable else set())
    return [scalar for scalar in scalars if variable.intersection(scalar.attributes)]


def _view(values: Hyperparameters, group: Dict[str, Any]) -> _View:
    """Return the attributes of a group and the loss scaling by name."""
    betas = dict(zip(("beta1", "beta2"), group.get("betas", ())))
    return {**group, **betas, "loss_scaling": values.loss_scaling}
