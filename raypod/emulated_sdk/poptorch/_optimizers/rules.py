"""What each of the device's optimizers knows: its attributes, their defaults, and its state (contract 4).

One table for the host's classes, for the check of compile-time constants and for the device.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, NamedTuple

import torch


class StateTensor(NamedTuple):
    """One quantity that an optimizer keeps for each parameter.

    Attributes:
        prefix: of its name in `ipu_state`, before the parameter's name.
        dtype_option: the attribute that says how it is stored; None for float32 always.
        is_always_there: whether a parameter that has any state has this.
    """

    prefix: str
    dtype_option: Any = None
    is_always_there: bool = True


class Rule(NamedTuple):
    """One algorithm.

    Attributes:
        host: torch's class, None where torch has none.
        group: attributes of each parameter group, with torch's defaults.
        scalars: attributes of the optimizer as a whole that may be variable.
        constants: attributes of the optimizer as a whole that compiling fixes.
        state: torch's names of the state.
    """

    host: Any
    group: Mapping[str, Any]
    scalars: Mapping[str, float]
    constants: Mapping[str, Any]
    state: Mapping[str, StateTensor]


_MOMENTS: Dict[str, Any] = dict.fromkeys(
    ("accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type"), torch.float32
)
_LOSS: Dict[str, float] = {"loss_scaling": 1.0}
_LOSS_AND_NORM: Dict[str, float] = {**_LOSS, "max_grad_norm": math.inf}
_ADAM: Dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}
# The prefixes are those of PopART's tensors [inferred: contract 4 names only ipu_state itself].
_ADAM_STATE = {
    "step": StateTensor("Step___"),
    "exp_avg": StateTensor("Accl1___", "first_order_momentum_accum_type"),
    "exp_avg_sq": StateTensor("Accl2___", "second_order_momentum_accum_type"),
}

RULES: Dict[str, Rule] = {
    "SGD": Rule(
        host=torch.optim.SGD,
        group={"lr": 1e-3, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "velocity_scaling": 1},
        scalars=_LOSS_AND_NORM,
        constants={"use_combined_accum": False, "accum_type": torch.float32, "velocity_accum_type": torch.float32},
        state={"momentum_buffer": StateTensor("Accl___", "velocity_accum_type")},
    ),
    "Adam": Rule(torch.optim.Adam, group=_ADAM, scalars=_LOSS_AND_NORM, constants=_MOMENTS, state=_ADAM_STATE),
    "AdamW": Rule(
        host=torch.optim.AdamW,
        group={**_ADAM, "weight_decay": 1e-2},
        scalars=_LOSS_AND_NORM,
        constants={**_MOMENTS, "bias_correction": True},
        state=_ADAM_STATE,
    ),
    "RMSprop": Rule(
        host=torch.optim.RMSprop,
        group={"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0, "centered": False},
        scalars=_LOSS,
        constants={**_MOMENTS, "use_tf_variant": False},
        state={
            "step": StateTensor("Step___", is_always_there=False),  # TensorFlow's rule counts no steps
            "square_avg": StateTensor("Accl1___", "second_order_momentum_accum_type"),
            "grad_avg": StateTensor("Accl2___", "first_order_momentum_accum_type", is_always_there=False),
            "momentum_buffer": StateTensor("Accl3___", "first_order_momentum_accum_type", is_always_there=False),
        },
    ),
    "LAMB": Rule(
        host=None,
        group={**_ADAM, "weight_decay": 1e-2, "max_weight_norm": 65500.0},
        scalars=_LOSS,
        constants={**_MOMENTS, "bias_correction": True},
        state=_ADAM_STATE,
    ),
}

# Attributes that torch's constructors have not.
OWN_GROUP_ATTRIBUTES = ("velocity_scaling", "max_weight_norm")
