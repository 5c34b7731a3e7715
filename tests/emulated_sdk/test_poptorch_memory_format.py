"""The memory format of the emulated device: the rule, its requests, and what a program sees of it."""

from __future__ import annotations

import os
from typing import Any, Dict, Optional, Tuple

import poptorch
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional

VARIABLE = "EMULATED_POD_MEMORY_FORMAT"
MANY_WEIGHTS = {"channels": 256}


class Net(nn.Module):
    """A network with 4,608 weights in 2-D convolutions per channel; `flatten` says how the activations become rows."""

    def __init__(
        self, flatten: str = "flatten", dtype: torch.dtype = torch.float32, layers: bool = True, channels: int = 8
    ) -> None:
        super().__init__()
        self.flatten, self.dtype = flatten, dtype
        first = nn.Conv2d(3, channels, 3, padding=1)
        self.features = nn.Sequential(first, nn.BatchNorm2d(channels), nn.ReLU()) if layers else None
        self.deep = nn.Conv2d(channels, 512, 3, stride=2) if layers else nn.Identity()  # computed as a product
        self.head = nn.Linear(512 if layers else 3 * 16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        hidden = images.to(self.dtype)
        features = hidden if self.features is None else self.features(hidden)
        deep = self.deep(features)
        if self.flatten == "view":
            features.view(features.shape[0], -1)
        logits = self.head(deep.flatten(1))
        return features, functional.cross_entropy(logits.float(), labels)


def train(network: nn.Module, replicas: int = 1, updates: int = 3, rank: int = 0, size: int = 1) -> Any:
    """Train on the share of one of `size` processes of `replicas` replicas in all."""
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    options.replicationFactor(replicas // size)
    options.Distributed.configureProcessId(rank, size)
    optimizer = poptorch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(network, options, optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        images = torch.randn(2, replicas, 2, 3, 4, 4, generator=generator)  # step, replica, sample
        labels = torch.arange(10)[: 2 * replicas].expand(2, -1).reshape(2, replicas, 2)
        mine = slice(rank * replicas // size, (rank + 1) * replicas // size)
        outputs = training(*(each[:, mine].flatten(0, 2).contiguous() for each in (images, labels)))
        assert outputs[0].is_contiguous(), "a program may take a view of an output"
    return training


def trained_in_both(rank: int, size: int) -> Dict[str, torch.Tensor]:
    """Return the weights of a training of 2 replicas in each format, by format and name."""
    torch.set_num_threads(1)
    found = {}
    for name in ("contiguous", "channels_last"):
        os.environ[VARIABLE] = name
        training = train(network(), replicas=2, rank=rank, size=size)
        training.copyWeightsToHost()
        weights = {key: value.clone() for key, value in training.model.state_dict().items() if "running" not in key}
        found.update({f"{name}/{key}": value for key, value in weights.items()})
    return found


def network(**arguments: Any) -> Net:
    torch.manual_seed(0)
    return Net(**arguments)


@pytest.mark.parametrize(
    ("request_", "arguments", "chosen"),
    [
        (None, MANY_WEIGHTS, "channels_last"),
        ("", MANY_WEIGHTS, "channels_last"),
        ("auto", MANY_WEIGHTS, "channels_last"),
        ("auto", {}, "contiguous"),
        ("auto", {**MANY_WEIGHTS, "flatten": "view"}, "contiguous"),
        ("auto", {"layers": False}, "contiguous"),
        ("auto", {**MANY_WEIGHTS, "dtype": torch.half}, "contiguous"),
        ("channels_last", {}, "channels_last"),
        ("channels_last", {"layers": False}, "contiguous"),
        ("contiguous", {}, "contiguous"),
    ],
)
def test_the_format_depends_on_the_request_the_model_and_its_forward(
    monkeypatch: pytest.MonkeyPatch, request_: Optional[str], arguments: Dict[str, Any], chosen: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if request_ is not None:
        monkeypatch.setenv(VARIABLE, request_)
    training = train(network(**arguments), updates=1)
    assert training.emulatedMemoryFormat() == chosen


def test_an_unknown_format_and_a_view_in_a_requested_format_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nhwc")
    with pytest.raises(poptorch.Error, match="'nhwc' is no memory format; set it to auto, contiguous or channels_last"):
        train(network())
    monkeypatch.setenv(VARIABLE, "channels_last")
    with pytest.raises(poptorch.Error, match="forward takes a view that only contiguous activations have. Use reshape"):
        train(network(flatten="view"))


def test_weights_optimizer_state_and_checkpoints_are_contiguous_and_fit_both_formats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = {}
    for name in ("contiguous", "channels_last"):
        monkeypatch.setenv(VARIABLE, name)
        trained = network()
        training = train(trained)
        training.copyWeightsToHost()
        optimizer = training._optimizer.state_dict()["ipu_state"]
        states[name] = {**trained.state_dict(), **{f"optimizer/{key}": value for key, value in optimizer.items()}}
    for name, tensor in states["channels_last"].items():
        other = states["contiguous"][name]
        assert tensor.is_contiguous(), name
        assert tensor.stride() == other.stride()
        assert torch.allclose(tensor, other, atol=1e-5), name


def test_the_bits_depend_on_the_format_and_not_on_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # is restored after the test
    threads = torch.get_num_threads()
    try:
        expected = trained_in_both(0, 1)
    finally:
        torch.set_num_threads(threads)
    for found in run_ranks(__file__, ["trained_in_both"], 2)["trained_in_both"]:
        different = [key for key in expected if not torch.equal(found[key], expected[key])]
        assert not different
    weight = "deep.weight"
    assert not torch.equal(expected[f"contiguous/{weight}"], expected[f"channels_last/{weight}"])
