"""The values that a host optimizer has for the device, and the rule of compile-time constants (contract 4)."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, NamedTuple, Tuple

import torch

from poptorch._errors import Error
from poptorch.optim import Optimizer

# The attributes of each parameter group that the device knows.
_GROUP_ATTRIBUTES: Dict[type, Tuple[str, ...]] = {
    torch.optim.SGD: ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    torch.optim.AdamW: ("lr", "betas", "eps", "weight_decay"),
    torch.optim.Adam: ("lr", "betas", "eps", "weight_decay"),
    torch.optim.RMSprop: ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
}
_TORCH_DEFAULTS: Dict[str, Any] = {
    "momentum": 0,
    "dampening": 0,
    "nesterov": False,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "alpha": 0.99,
    "centered": False,
}


class Hyperparameters(NamedTuple):
    """The values of all groups, those of the optimizer as a whole, and the names of the variable ones."""

    algorithm: type
    groups: List[Dict[str, Any]]
    whole: Dict[str, Any]
    variable: FrozenSet[str]

    @property
    def loss_scaling(self) -> float:
        """Factor of the loss, divided out of the gradients again."""
        return float(self.whole["loss_scaling"])

    @property
    def max_grad_norm(self) -> float:
        """Bound of the global norm of the gradients; infinite for none."""
        return float(self.whole["max_grad_norm"])

    @property
    def uses_tf_variant(self) -> bool:
        """Whether RMSprop follows TensorFlow's rule."""
        return bool(self.whole["use_tf_variant"])

    def as_ipu_param(self) -> Dict[str, Any]:
        """As plain Python, for `state_dict()["ipu_param"]`."""
        return {"groups": [dict(group) for group in self.groups], **self.whole}

    def with_ipu_param(self, ipu_param: Dict[str, Any]) -> Hyperparameters:
        """With the values of an `as_ipu_param()`. Error when that has another number of groups."""
        groups = [dict(group) for group in ipu_param["groups"]]
        _check_groups(self.groups, groups)
        whole = {name: ipu_param.get(name, value) for name, value in self.whole.items()}
        return self._replace(groups=groups, whole=whole)

    def check_change(self, new: Hyperparameters) -> None:
        """Error when the new values change a compile-time constant, the algorithm or the number of groups."""
        if self.algorithm is not new.algorithm:
            raise Error(f"The model was compiled for {self.algorithm.__name__}, not {new.algorithm.__name__}")
        _check_groups(self.groups, new.groups)
        for old_values, values in zip([*self.groups, self.whole], [*new.groups, new.whole]):
            for name, value in values.items():
                if value != old_values[name] and name not in self.variable:
                    raise Error(_constant_changed(name, old_values[name], value))


def extract(optimizer: torch.optim.Optimizer) -> Hyperparameters:
    """The values that an optimizer has now. Error when the device does not know its algorithm."""
    algorithm = _algorithm(optimizer)
    names = _GROUP_ATTRIBUTES[algorithm]
    groups = [{name: _number(group[name]) for name in names} for group in optimizer.param_groups]
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise Error("amsgrad is not available on the device: leave it False")
    return Hyperparameters(
        algorithm=algorithm,
        groups=groups,
        whole={
            "loss_scaling": float(getattr(optimizer, "loss_scaling", 1.0)),
            "max_grad_norm": float(getattr(optimizer, "max_grad_norm", float("inf"))),
            "use_tf_variant": bool(getattr(optimizer, "use_tf_variant", False)),
        },
        variable=_variable(optimizer, groups),
    )


def _algorithm(optimizer: torch.optim.Optimizer) -> type:
    # In this order, as torch's AdamW derives from Adam in some versions.
    for known in _GROUP_ATTRIBUTES:
        if isinstance(optimizer, known):
            return known
    names = ", ".join(known.__name__ for known in _GROUP_ATTRIBUTES)
    raise Error(f"Unknown optimizer {type(optimizer).__name__}: the device knows {names}")


def _variable(optimizer: torch.optim.Optimizer, groups: List[Dict[str, Any]]) -> FrozenSet[str]:
    """What may change after compilation: lr, and what was passed explicitly.

    A torch optimizer does not tell what was passed; there the values that are not torch's defaults are variable
    [inferred: contract 4 is silent].
    """
    if isinstance(optimizer, Optimizer):
        names = (*groups[0], "loss_scaling", "max_grad_norm")
        return frozenset(name for name in names if not optimizer.variable_attrs.isConstant(name))
    defaults = dict(_TORCH_DEFAULTS, weight_decay=1e-2 if isinstance(optimizer, torch.optim.AdamW) else 0)
    changed = (name for group in groups for name, value in group.items() if value != defaults.get(name))
    return frozenset(("lr", *changed))


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return tuple(value) if isinstance(value, (tuple, list)) else value


def _check_groups(old: List[Dict[str, Any]], new: List[Dict[str, Any]]) -> None:
    if len(old) != len(new):
        raise Error(f"The model was compiled for {len(old)} parameter groups, not {len(new)}")


def _constant_changed(name: str, old: Any, new: Any) -> str:
    return (
        f"The optimizer's {name!r} was compiled as the constant {old} and cannot become {new}. Pass it explicitly to "
        f"the optimizer's constructor, or call variable_attrs.markAsVariable({name!r}) before the first call"
    )
