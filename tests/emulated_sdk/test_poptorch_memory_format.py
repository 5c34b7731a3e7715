"""The memory format of the emulated device: the rule, its requests, and what a program sees of it."""

from __future__ import annotations

import os
from typing import Dict

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import options, seeded, wrapped
from tests.support.ranks import run_ranks

VARIABLE = "EMULATED_POD_MEMORY_FORMAT"
MANY_WEIGHTS = {"channels": 256}


class Net(nn.Module):
    """A network with 4,608 weights in 2-D convolutions per channel; `flatten` says how the activations become rows."""

    def __init__(self, flatten="flatten", dtype=torch.float32, layers=True, channels=8):
        super().__init__()
        self.flatten, self.dtype = flatten, dtype
        first = nn.Conv2d(3, channels, 3, padding=1)
        self.features = nn.Sequential(first, nn.BatchNorm2d(channels), nn.ReLU()) if layers else nn.Identity()
        self.deep = nn.Conv2d(channels, 512, 3, stride=2) if layers else nn.Identity()  # computed as a product
        self.head = nn.Linear(512 if layers else 3 * 16, 10)

    def forward(self, images, labels):
        features = self.features(images.to(self.dtype))
        if self.flatten == "view":
            features.view(features.shape[0], -1)
        logits = self.head(self.deep(features).flatten(1))
        return features, nn.functional.cross_entropy(logits.float(), labels)


def train(arguments, replicas=1, updates=3, rank=0, size=1):
    """Train on the share of one of `size` processes of `replicas` replicas in all."""
    opts = options(replicas // size, accumulation=2)
    opts.Distributed.configureProcessId(rank, size)
    training = wrapped(seeded(Net, **arguments), opts, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        images = torch.randn(2, replicas, 2, 3, 4, 4, generator=generator)  # step, replica, sample
        labels = torch.arange(10)[: 2 * replicas].expand(2, -1).reshape(2, replicas, 2)
        mine = slice(rank * replicas // size, (rank + 1) * replicas // size)
        outputs = training(*(each[:, mine].flatten(0, 2).contiguous() for each in (images, labels)))
        assert outputs[0].is_contiguous(), "a program may take a view of an output"
    return training


def trained_in_both(rank: int, size: int) -> Dict[str, Dict[str, torch.Tensor]]:
    """Return the state of the model and the optimizer of a training of 2 replicas, by format and name."""
    found = {}
    for name in ("contiguous", "channels_last"):
        os.environ[VARIABLE] = name
        training = train({}, replicas=2, rank=rank, size=size)
        training.copyWeightsToHost()
        model = {key: value.clone() for key, value in training.model.state_dict().items()}
        found[name] = {**model, **training._optimizer.state_dict()["ipu_state"]}
    return found


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
def test_the_format_depends_on_the_request_the_model_and_its_forward(monkeypatch, request_, arguments, chosen):
    monkeypatch.delenv(VARIABLE, raising=False)
    if request_ is not None:
        monkeypatch.setenv(VARIABLE, request_)
    assert train(arguments, updates=1).emulatedMemoryFormat() == chosen


def test_an_unknown_format_and_a_view_in_a_requested_format_are_errors(monkeypatch):
    monkeypatch.setenv(VARIABLE, "nhwc")
    with pytest.raises(poptorch.Error, match="'nhwc' is no memory format; set it to auto, contiguous or channels_last"):
        train({})
    monkeypatch.setenv(VARIABLE, "channels_last")
    with pytest.raises(poptorch.Error, match="forward takes a view that only contiguous activations have. Use reshape"):
        train({"flatten": "view"})


def test_weights_optimizer_state_and_checkpoints_are_contiguous_and_fit_both_formats(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # is restored after the test
    states = trained_in_both(0, 1)
    for name, tensor in states["channels_last"].items():
        other = states["contiguous"][name]
        assert tensor.is_contiguous(), name
        assert tensor.stride() == other.stride()
        assert torch.allclose(tensor, other, atol=1e-5), name
    assert not torch.equal(*(states[name]["deep.weight"] for name in states))


def test_the_bits_do_not_depend_on_the_placement(monkeypatch, processes):
    monkeypatch.setenv(VARIABLE, "")
    expected = trained_in_both(0, 1)
    for found in run_ranks(__file__, ["trained_in_both"], 2)["trained_in_both"]:
        for name, values in expected.items():
            different = {key for key, value in values.items() if not torch.equal(found[name][key], value)}
            assert not {key for key in different if "running" not in key}, "only statistics are those of a replica"
