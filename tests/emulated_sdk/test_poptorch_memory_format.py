"""The memory format of the emulated device: the rule, its requests, and what a program sees of it."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import poptorch
import pytest
import torch
from torch import nn
from torch.nn import functional

VARIABLE = "EMULATED_POD_MEMORY_FORMAT"


class Net(nn.Module):
    """A small network; `flatten` says how the activations become rows."""

    def __init__(self, flatten: str = "flatten", dtype: torch.dtype = torch.float32, layers: bool = True) -> None:
        super().__init__()
        self.flatten, self.dtype = flatten, dtype
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) if layers else None
        self.deep = nn.Conv2d(8, 512, 3, stride=2) if layers else nn.Identity()  # computed as a product
        self.head = nn.Linear(512 if layers else 3 * 16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        hidden = images.to(self.dtype)
        features = hidden if self.features is None else self.features(hidden)
        deep = self.deep(features)
        if self.flatten == "view":
            features.view(features.shape[0], -1)
        logits = self.head(deep.flatten(1))
        return features, functional.cross_entropy(logits.float(), labels)


def train(network: nn.Module, replicas: int = 1, updates: int = 3) -> Any:
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    options.replicationFactor(replicas)
    optimizer = poptorch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(network, options, optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        images = torch.randn(4 * replicas, 3, 4, 4, generator=generator)
        outputs = training(images, torch.arange(4 * replicas))
        assert outputs[0].is_contiguous(), "a program may take a view of an output"
    return training


def network(**arguments: Any) -> Net:
    torch.manual_seed(0)
    return Net(**arguments)


@pytest.mark.parametrize(
    ("request_", "arguments", "chosen"),
    [
        (None, {}, "channels_last"),
        ("", {}, "channels_last"),
        ("auto", {}, "channels_last"),
        ("auto", {"flatten": "view"}, "contiguous"),
        ("auto", {"layers": False}, "contiguous"),
        ("auto", {"dtype": torch.half}, "contiguous"),
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


@pytest.mark.parametrize("name", ["contiguous", "channels_last"])
def test_the_bits_depend_on_the_format_only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(VARIABLE, name)
    found = []
    for _ in range(2):
        trained = network()
        train(trained, replicas=2).copyWeightsToHost()
        found.append(trained.state_dict())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
