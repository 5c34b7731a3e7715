"""The values that a host optimizer passes to the device, those that are compile-time constants, and `ipu_param`.

`ipu_param` of an optimizer's state_dict has the scalars that the host may change, by the names of PopART's tensors.
There is a tensor for each parameter and each scalar of which an attribute is variable, and one for the loss scaling.
Some scalars combine several attributes. The tensors are float64: a resumed training continues with equal values.
"""

from __future__ import annotations

import inspect
import logging
import numbers
import warnings
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set

import torch

from poptorch.environment import logger
from poptorch.errors import Error
from poptorch.optim import LAMB, Optimizer
from poptorch.optimizers.rules import RULES, Rule

# Values of torch's optimizers that are always compile-time constants.
_CONSTANT = frozenset(("betas", "alpha", "nesterov", "centered"))


class Hyperparameters(NamedTuple):
    """The values of an optimizer.

    Attributes:
        algorithm: a key of `RULES`.
        groups: values of each parameter group.
        whole: values of the optimizer as a whole.
        variable: names of the values that may change after compilation.
        loaded: `ipu_param` that these values were loaded from.
    """

    algorithm: str
    groups: List[Dict[str, Any]]
    whole: Dict[str, Any]
    variable: FrozenSet[str]
    loaded: Mapping[str, torch.Tensor] = {}

    @property
    def rule(self) -> Rule:
        """The rule of the algorithm."""
        return RULES[self.algorithm]

    @property
    def loss_scaling(self) -> float:
        """Factor of the loss; the gradients are divided by it."""
        return float(self.whole["loss_scaling"])

    @property
    def max_grad_norm(self) -> float:
        """Maximum global norm of the gradients; infinity for no limit."""
        return float(self.whole.get("max_grad_norm", float("inf")))

    @property
    def accumulates_in_half(self) -> bool:
        """Whether the gradients of an update accumulate in half."""
        return bool(self.whole["accum_type"] == torch.half)

    @property
    def is_combined(self) -> bool:
        """Whether gradients accumulate in the tensor of the velocity."""
        return bool(self.whole.get("use_combined_accum", False))

    @property
    def needs_running_mean(self) -> bool:
        """Whether a mean must divide before it adds, as sums in half may overflow."""
        return self.accumulates_in_half and not self.is_combined

    @property
    def has_momentum(self) -> bool:
        """Whether a momentum is not 0, or may change."""
        return "momentum" in self.variable or any(group.get("momentum") for group in self.groups)

    def check_change(self, new: Hyperparameters) -> None:
        """Raise Error if the new values change a compile-time constant, the algorithm or the number of groups."""
        if self.algorithm != new.algorithm:
            raise Error(f"The model was compiled for {self.algorithm}, not {new.algorithm}")
        if len(self.groups) != len(new.groups):
            raise Error(f"The model was compiled for {len(self.groups)} parameter groups, not {len(new.groups)}")
        for old_values, values in zip([*self.groups, self.whole], [*new.groups, new.whole]):
            for name, value in values.items():
                if value != old_values[name] and name not in self.variable:
                    raise Error(
                        f"The optimizer's {name!r} was compiled as the constant {old_values[name]} and cannot become "
                        f"{value}. Pass it explicitly to the optimizer's constructor, or call "
                        f"variable_attrs.markAsVariable({name!r}) before the first call"
                    )


def extract(optimizer: torch.optim.Optimizer) -> Hyperparameters:
    """Return the present values of an optimizer.

    Raises:
        AssertionError: a value is no number.
        Error: the device does not support its algorithm, or amsgrad.
    """
    algorithm = _algorithm(optimizer)
    rule = RULES[algorithm]
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise Error("The device does not support amsgrad: set it to False")
    groups = [
        {name: _number(name, group.get(name, default), default) for name, default in rule.group.items()}
        for group in optimizer.param_groups
    ]
    whole = {
        name: float(_number(name, getattr(optimizer, name, default), default)) for name, default in rule.scalars.items()
    }
    whole.update({name: getattr(optimizer, name, default) for name, default in rule.constants.items()})
    if not whole["loss_scaling"] > 0:
        raise Error(f"loss_scaling must be positive, not {whole['loss_scaling']}")
    return Hyperparameters(algorithm, groups, whole, _variable(optimizer, groups, rule))


def warn_ignored(optimizer: torch.optim.Optimizer) -> None:
    """Warn about options and overridden methods of an optimizer that the device ignores."""
    if not isinstance(optimizer, Optimizer) and any(group.get("maximize") for group in optimizer.param_groups):
        warnings.warn("poptorch ignores maximize=True: the device minimizes", stacklevel=3)
    kind: Any = type(optimizer)
    known: List[Any] = [LAMB, *(rule.host for rule in RULES.values() if rule.host is not None)]
    base = next(base for base in kind.__mro__ if base in known)
    # torch wraps the step of every class when its first object is created.
    if inspect.unwrap(kind.step) is not inspect.unwrap(base.step):
        logger.warning(
            f"{kind.__name__}.step() is not used: the device updates its weights by the rule of {_algorithm(optimizer)}"
        )


def _algorithm(optimizer: torch.optim.Optimizer) -> str:
    if isinstance(optimizer, LAMB):
        return "LAMB"
    # In newer torch AdamW is an Adam whose groups have decoupled_weight_decay.
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        is_w = isinstance(optimizer, torch.optim.AdamW)
        decoupled = {bool(group.get("decoupled_weight_decay", is_w)) for group in optimizer.param_groups}
        if len(decoupled) > 1:
            raise Error(
                "decoupled_weight_decay must be the same in all parameter groups: the device has one rule for all"
            )
        return "AdamW" if True in decoupled else "Adam"
    for name, rule in RULES.items():
        if rule.host is not None and isinstance(optimizer, rule.host):
            return name
    raise Error(f"Unknown optimizer {type(optimizer).__name__}: the device supports {', '.join(RULES)}")


def _variable(optimizer: torch.optim.Optimizer, groups: List[Dict[str, Any]], rule: Rule) -> FrozenSet[str]:
    """Return the names of the values that may change after compilation: lr, and the arguments passed explicitly.

    A torch optimizer does not record its arguments; there the values that are not torch's defaults are variable, except
    for those of `_CONSTANT`.
    """
    if isinstance(optimizer, Optimizer):
        names = (*rule.group, *rule.scalars)
        return frozenset(name for name in names if not optimizer.variable_attrs.isConstant(name))
    changed = {name for group in groups for name, value in group.items() if value != rule.group[name]} - _CONSTANT
    return frozenset(("lr", *changed))


def _number(name: str, value: Any, default: Any) -> Any:
    """Return a value as number, or as tuple of numbers if that is the default; AssertionError if it is none."""
    if isinstance(default, tuple):
        is_tuple = isinstance(value, (tuple, list)) and len(value) == len(default)
        assert is_tuple, f"Expected {len(default)} numbers for the optimizer's {name!r}, not {value!r}"
        return tuple(_number(f"{name}[{index}]", each, 0.0) for index, each in enumerate(value))
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    assert isinstance(number, (float, int, numbers.Number)), (  # the last alone is slow: this runs in every call
        f"Expected a number for the optimizer's {name!r}, not {value!r}"
    )
    return number


# Attributes that torch's schedulers add.
_EXPECTED = frozenset(("step", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "total_steps"))


class AttributeChecks:
    """Warns once about each attribute that the program adds to an optimizer and that the device ignores.

    Args:
        is_relaxed: log a debug message instead (`Options.relaxOptimizerAttributesChecks`).
    """

    def __init__(self, is_relaxed: bool) -> None:
        self._level = logging.DEBUG if is_relaxed else logging.WARNING
        self._kind: Optional[type] = None
        self._of_whole: Set[str] = set()
        self._of_groups: Set[str] = set()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn about new attributes; the first optimizer of each class defines the expected ones."""
        if type(optimizer) is not self._kind:
            self._kind, self._of_whole = type(optimizer), _public(vars(optimizer))
            self._of_groups = {name for group in optimizer.param_groups for name in group}
        self._warn("optimizer attribute", _public(vars(optimizer)), self._of_whole)
        for index, group in enumerate(optimizer.param_groups):
            self._warn(f"group {index} attribute", _public(group), self._of_groups)

    def _warn(self, what: str, found: Set[str], known: Set[str]) -> None:
        extra = sorted(found - known)
        known.update(extra)
        if extra:
            logger.log(
                self._level, f"Ignoring unexpected {what} in {getattr(self._kind, '__name__', '')} optimizer: {extra}"
            )


def _public(names: Iterable[str]) -> Set[str]:
    return {name for name in names if not name.startswith("_")} - _EXPECTED


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
