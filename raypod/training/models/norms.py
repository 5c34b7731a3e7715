"""Norms that `--log` adds to the lines of `metrics.jsonl`.

They are computed from the weights, and from gradients that are summed over all replicas: both have the same bits in
every instance and for every placement. The arithmetic is NumPy's, because the order of torch's sums depends on the
number of threads.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterable, List, Tuple

import numpy as np
import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.plan.plan import Plan

Norms = Tuple[Dict[str, float], ...]  # of each update of a call, by the name of the field of `UpdateDone`


class NormMeter:
    """Measures the norms of a plan: of gradients in every update, of the trained weights after every call."""

    def __init__(self, plan: Plan, network: nn.Module, training: Any) -> None:
        """ConfigError if the SDK of the training model cannot measure them."""
        logged = plan.config.run.log or ()
        self._iterations, self._network, self._training = plan.geometry.device_iterations, network, training
        self._has_gradients = "grad-norm" in logged
        self._names = [name.replace("-", "_") for name in logged if name != "grad-norm"]
        self._before: List[torch.Tensor] = []
        if self._has_gradients:
            if not hasattr(training, "emulatedMeasureGradients"):
                raise ConfigError(
                    "--log grad-norm: PopTorch gives no gradients to the host, only the emulated SDK does; on IPUs use "
                    "weight-norm,update-ratio"
                )
            training.emulatedMeasureGradients()

    @property
    def reads_weights(self) -> bool:
        """Whether the host must have the device's weights at `after_call`."""
        return bool(self._names)

    def begin(self, read_back: Callable[[], None]) -> None:
        """Note the weights before the first call of a segment, which `read_back` copies to the host."""
        if self._names:
            read_back()
        self._note_weights()

    def _note_weights(self) -> None:
        if "update_ratio" in self._names:
            self._before = [each.detach().clone() for each in self._parameters()]

    def after_call(self) -> Norms:
        """Return the norms of each update of a call, and note its weights. Those of weights are in the last update."""
        if not (self._names or self._has_gradients):
            return ()
        unknown = dict.fromkeys(self._names, math.nan)
        found: List[Dict[str, float]] = [dict(unknown) for _ in range(self._iterations)]
        if self._has_gradients:
            found = [{"grad_norm": each, **unknown} for each in self._training.emulatedGradientNorms()]
        weights = {"weight_norm": lambda: norm(self._parameters()), "update_ratio": self._update_ratio}
        found[-1].update({name: weights[name]() for name in self._names})
        self._note_weights()
        return tuple(found)

    def _update_ratio(self) -> float:
        """Return the norm of the change of the weights, divided by the norm of the weights before it."""
        changes = (after.detach().double() - before.double() for after, before in zip(self._parameters(), self._before))
        before = norm(self._before)
        return norm(changes) / before if before else math.nan

    def _parameters(self) -> List[torch.Tensor]:
        return [each for each in self._network.parameters() if each.requires_grad]


def norm(tensors: Iterable[torch.Tensor]) -> float:
    """Return the norm of all tensors together, in float64; NaN if it is not finite."""
    flat = (each.detach().reshape(-1).double().numpy() for each in tensors)
    try:
        return math.sqrt(math.fsum(float(np.add.reduce(np.square(values))) for values in flat))
    except (OverflowError, ValueError):
        return math.nan
