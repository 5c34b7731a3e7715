"""The values that a host optimizer passes to the device, and which of them are compile-time constants."""

from __future__ import annotations

import inspect
import logging
import warnings
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Set

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
                    raise Error(_constant_changed(name, old_values[name], value))


def extract(optimizer: torch.optim.Optimizer) -> Hyperparameters:
    """Return the present values of an optimizer; Error if the device does not support its algorithm, or amsgrad."""
    algorithm = _algorithm(optimizer)
    rule = RULES[algorithm]
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise Error("The device does not support amsgrad: set it to False")
    groups = [
        {name: _number(group.get(name, default)) for name, default in rule.group.items()}
        for group in optimizer.param_groups
    ]
    whole = {name: float(getattr(optimizer, name, default)) for name, default in rule.scalars.items()}
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


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(map(_number, value)) if isinstance(value, (tuple, list)) else value


def _constant_changed(name: str, old: Any, new: Any) -> str:
    return (
        f"The optimizer's {name!r} was compiled as the constant {old} and cannot become {new}. Pass it explicitly to "
        f"the optimizer's constructor, or call variable_attrs.markAsVariable({name!r}) before the first call"
    )


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
