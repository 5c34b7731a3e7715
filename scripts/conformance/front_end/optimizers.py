"""The optimizers of PopART on the CPU, in float32; the state is stored in its own types."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Tuple

import torch

_SGD, _ADAM, _ADAMW, _LAMB = ("SGD1", "SGD2"), ("ADAM",), ("ADAMW", "ADAMW_NO_BIAS"), ("LAMB", "LAMB_NO_BIAS")
_RMSPROP = ("RMSPROP", "RMSPROP_CENTERED")
_TYPES = ("SGD1", "SGD2", "ADAM", "ADAMW", "ADAMW_NO_BIAS", "RMSPROP", "RMSPROP_CENTERED", "LAMB", "LAMB_NO_BIAS")


class DeviceOptimizer:
    """The state of the optimizer of an executable.

    Attributes:
        state: the tensors by PopART's names.
    """

    def __init__(self, values: Dict[str, Any], groups: Dict[int, List[str]], shapes: Dict[str, torch.Tensor]) -> None:
        """`groups`: the names of the parameters of each group. `shapes`: the parameters by name."""
        self._values, self._groups = values, groups
        self._type = _TYPES[int(values["optimizer_type"])]
        self.state: Dict[str, torch.Tensor] = {}
        kinds = self._state_kinds()
        for name in (name for names in groups.values() for name in names):
            for prefix, dtype in kinds:
                shape = () if prefix == "Step___" else shapes[name].shape
                begins_at = float(prefix == "Accl1___" and bool(values.get("useTfVariant")))
                self.state[prefix + name] = torch.full(shape, begins_at, dtype=dtype, device="cpu")

    def _state_kinds(self) -> List[Tuple[str, torch.dtype]]:
        half = lambda name: torch.float16 if self._values.get(name) else torch.float32  # noqa: E731
        has_momentum = any(group.get("momentum", (0.0,))[0] for group in self._values["groups"])
        if self._type in _SGD:
            return [("Accl1___", half("velocityAccumType"))] if has_momentum else []
        first, second = half("firstOrderMomentumAccumType"), half("secondOrderMomentumAccumType")
        if self._type in _RMSPROP:
            mean = [("Accl2___", first)] if self._type == "RMSPROP_CENTERED" else []
            return [("Accl1___", second), *mean, *([("Accl3___", first)] if has_momentum else [])]
        return [("Step___", torch.float32), ("Accl1___", first), ("Accl2___", second)]

    @property
    def loss_scaling(self) -> float:
        """The factor of the loss."""
        return float(self._values["defaults"]["lossScaling"][0])

    @property
    def accumulator(self) -> torch.dtype:
        """The type in which gradients are accumulated."""
        return torch.float16 if self._values.get("accumType") else torch.float32

    def parameters(self) -> Dict[str, torch.Tensor]:
        """The values of the optimizer that the host sets, by names."""
        groups = enumerate(self._values["groups"])
        return {f"{key}___{index}": torch.tensor(float(group[key][0])) for index, group in groups for key in group}

    def set_values(self, values: Dict[str, Any]) -> None:
        """Takes new values. ValueError if a constant of the graph changes."""
        for before, after in zip(self._values["groups"], values["groups"]):
            for name, (value, is_constant) in after.items():
                if is_constant and before[name][0] != value:
                    raise ValueError(f"optimizer attribute {name} is a constant of the graph")
        self._values = values

    @torch.no_grad()
    def step(self, weights: Dict[str, torch.Tensor], gradients: Dict[str, torch.Tensor]) -> None:
        """Updates the weights in place."""
        limit = float(self._values.get("maxGradNorm", math.inf))
        if math.isfinite(limit):
            norm = torch.stack([each.norm() for each in gradients.values()]).norm()
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)
            gradients = {name: each * factor for name, each in gradients.items()}
        for index, names in self._groups.items():
            values = {name: value for name, (value, _) in self._values["groups"][index].items()}
            for name in names:
                if name in gradients:
                    weight = weights[name].float()
                    rule = self._sgd if self._type in _SGD else self._adam
                    rule = self._rmsprop if self._type in _RMSPROP else rule
                    weights[name].copy_(weight - rule(name, weight, gradients[name], values))

    def _sgd(self, name: str, weight: torch.Tensor, gradient: torch.Tensor, values: Dict[str, float]) -> torch.Tensor:
        gradient = gradient + values["weightDecay"] * weight
        velocity = self.state.get(f"Accl1___{name}")
        if velocity is None:
            return values["learningRate"] * gradient
        new = values["momentum"] * velocity.float() + (1 - values["dampening"]) * gradient
        velocity.copy_(new)
        return values["learningRate"] * (gradient + values["momentum"] * new if values["nesterov"] else new)

    def _rmsprop(
        self, name: str, weight: torch.Tensor, gradient: torch.Tensor, values: Dict[str, float]
    ) -> torch.Tensor:
        gradient = gradient + values["weightDecay"] * weight
        alpha, is_tf = values["alpha"], self._values["useTfVariant"]
        square, mean = self.state[f"Accl1___{name}"], self.state.get(f"Accl2___{name}")
        square.copy_(alpha * square.float() + (1 - alpha) * gradient * gradient)
        variance = square.float()
        if mean is not None:
            mean.copy_(alpha * mean.float() + (1 - alpha) * gradient)
            variance = variance - mean.float().square()
        rate = values["learningRate"]
        change = gradient / ((variance + values["eps"]).sqrt() if is_tf else variance.sqrt() + values["eps"])
        change = rate * change if is_tf else change
        momentum = self.state.get(f"Accl3___{name}")
        if momentum is not None:
            momentum.copy_(values["momentum"] * momentum.float() + change)
            change = momentum.float()
        return change if is_tf else rate * change

    def _adam(self, name: str, weight: torch.Tensor, gradient: torch.Tensor, values: Dict[str, float]) -> torch.Tensor:
        step, first, second = (self.state[prefix + name] for prefix in ("Step___", "Accl1___", "Accl2___"))
        if self._type in _ADAM:
            gradient = gradient + values["weightDecay"] * weight
        step += 1
        beta1, beta2 = values["beta1"], values["beta2"]
        mean = beta1 * first.float() + (1 - beta1) * gradient
        square = beta2 * second.float() + (1 - beta2) * gradient * gradient
        first.copy_(mean)
        second.copy_(square)
        if not self._type.endswith("NO_BIAS"):
            mean = mean / (1 - beta1 ** float(step))
            square = square / (1 - beta2 ** float(step))
        change = mean / (square.sqrt() + values["eps"])
        if self._type not in _ADAM:
            change = change + values["weightDecay"] * weight
        if self._type not in _LAMB:
            return values["learningRate"] * change
        norm, change_norm = weight.norm().clamp(max=values["maxWeightNorm"]), change.norm()
        trust = norm / change_norm if norm > 0 and change_norm > 0 else 1.0
        return values["learningRate"] * trust * change
