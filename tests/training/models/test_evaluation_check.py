"""The check of the evaluation's metrics before the first update changes nothing."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, Callable, Dict, Tuple

import numpy as np
import pytest
import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.runtime.worker import replica_model

LOSS: Any = SimpleNamespace(
    task=SimpleNamespace(metrics=[SimpleNamespace(name="loss")], predictions=()),
    geometry=SimpleNamespace(micro_batch_size=3),
)
BATCH = (torch.ones(1, 4),)


def network_of() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))


def check(network: nn.Module, outputs: Callable[[Any, torch.Tensor], Dict[str, Any]]) -> None:
    training = SimpleNamespace(precision="32.32")
    task: Any = SimpleNamespace(
        config=SimpleNamespace(training=training),
        names=None,
        predictions=(),
        evaluation_outputs=outputs,
        training_outputs=None,
    )
    replica_model.check(LOSS, task, network, nn.Identity(), BATCH)


def states(network: nn.Module) -> Tuple[Any, ...]:
    weights = [tensor.tolist() for tensor in network.state_dict().values()]
    generators = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return weights, [each.training for each in network.modules()], generators


def test_weights_buffers_modes_and_generators_stay() -> None:
    network, seen = network_of(), []
    network[0].eval()

    def outputs(run: Any, x: torch.Tensor) -> Dict[str, Any]:
        network.train()
        network(x + torch.rand(4) + np.random.rand() + random.random())  # the task holds its network
        seen.append(x.shape)
        return {"loss": (run(x).squeeze(1), 1)}

    before = states(network)
    check(network, outputs)
    assert seen == [(3, 4)]
    assert states(network) == before
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (lambda run, x: {"losses": (run(x), 1)}, "returned the metrics 'losses'; they are 'loss'"),
        (lambda run, x: {"loss": run(x).squeeze(1)[0]}, "'loss' must be a pair"),
        (lambda run, x: {"loss": (run(x).mean(0), 1)}, r"a tensor of shape \[1\] for 'loss'; sums are tensors with"),
    ],
)
def test_wrong_metrics_are_an_error(outputs: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(network_of(), outputs)


def test_a_name_that_is_not_defined_is_an_error_and_what_the_host_cannot_compute_is_none() -> None:
    with pytest.raises(NameError, match="undefined"):
        check(network_of(), lambda run, x: {"loss": (undefined(run, x), 1)})  # type: ignore[name-defined]  # noqa: F821

    def outputs(run: Any, x: torch.Tensor) -> Dict[str, Any]:
        raise NotImplementedError("not implemented for 'Half'")

    check(network_of(), outputs)
