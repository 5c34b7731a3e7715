"""A task in which a linear layer learns `y` from `x`; its subclasses have the data."""

from __future__ import annotations

from typing import Any

from torch import nn

import raypod


class Regression(raypod.Task):
    defaults = {"training.batch_size": 2}

    def network(self, first_batch: Any) -> nn.Module:
        return nn.Linear(first_batch["x"].shape[1], 1)

    def training_outputs(self, network: Any, *batch: Any, **named: Any) -> Any:
        return nn.functional.mse_loss(network(named["x"]).squeeze(1), named["y"]), {}

    def evaluation_outputs(self, network: Any, *batch: Any, **named: Any) -> Any:
        return {"loss": ((network(named["x"]).squeeze(1) - named["y"]) ** 2, 1)}
