"""Half and mixed precision: dtypes at the API, rounding, convergence of training."""

from __future__ import annotations

from typing import Any

import poptorch
import pytest
import torch
import torch.nn.functional as F
from poptorch_models import Classifier, Line, batch, options, seeded
from sklearn.datasets import load_digits
from torch import nn

HALF = torch.half


class Function(nn.Module):
    """A module that calls a function with its input and a parameter of one element."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.weight)


def on_device(function, x=None, is_half_model=True):
    model = Function(function)
    model = model.half() if is_half_model else model
    return poptorch.inferenceModel(model, options())(torch.ones(2, 4, dtype=HALF) if x is None else x)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x, w: x * w, HALF),
        (lambda x, w: x * 2.0 + 1, HALF),
        (lambda x, w: x + w.float(), torch.float32),
        (lambda x, w: x + torch.ones(4), torch.float32),
        (lambda x, w: x + torch.ones(4, dtype=HALF), HALF),
        (lambda x, w: torch.zeros_like(x), HALF),
        (lambda x, w: x.softmax(-1), HALF),
        (lambda x, w: F.softmax(x, -1, dtype=torch.float32), torch.float32),
        (lambda x, w: F.log_softmax(x, -1), HALF),
        (lambda x, w: F.layer_norm(x, (4,), w, w), HALF),
        (lambda x, w: F.nll_loss(x, torch.tensor([0, 1])), HALF),
        (lambda x, w: F.cross_entropy(x, torch.tensor([0, 1])), HALF),
        (lambda x, w: torch.cat([x, x]), HALF),
        (lambda x, w: torch.where(x > 0, x, x), HALF),
        (lambda x, w: x.argmax(-1), torch.int32),
        (lambda x, w: x > 0, torch.bool),
        (lambda x, w: x.to(torch.bfloat16), torch.float32),
        (lambda x, w: x.double(), torch.float32),
    ],
)
def test_half_with_half_is_half_and_half_with_float_is_float(function, dtype):
    assert on_device(function).dtype == dtype


def test_half_inputs_with_float_weights_compute_in_float():
    assert on_device(lambda x, w: x * w, is_half_model=False).dtype == torch.float32
    assert on_device(lambda x, w: x + x, is_half_model=False).dtype == HALF


@pytest.mark.parametrize("cast", [lambda x: x.half(), lambda x: x.to(HALF), lambda x: x.to(dtype=HALF)])
def test_a_cast_to_half_rounds(cast):
    x = torch.tensor([[1.0003, 1e-9, 70000.0, 0.5]])
    found = on_device(lambda x, w: cast(x).float(), x, is_half_model=False)
    assert torch.equal(found, x.half().float())
    assert on_device(lambda x, w: cast(x), x, is_half_model=False).dtype == HALF


def test_every_forward_reads_the_same_dtype():
    def smallest(x, w):
        assert x.element_size() == 2
        return x + torch.finfo(x.dtype).min if x.dtype == HALF else x

    model = poptorch.inferenceModel(Function(smallest), options(iterations=2))
    for _ in range(2):
        assert torch.equal(model(torch.zeros(2, 4, dtype=HALF)), torch.full((2, 4), -65504, dtype=HALF))


def test_a_half_model_has_half_weights_and_float_optimizer_state():
    model = seeded().half()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options(2), optimizer)
    images, labels = batch(4)
    logits, loss = training(images.half(), labels)
    assert (logits.dtype, loss.dtype) == (HALF, HALF)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {HALF, torch.int64}
    assert torch.isfinite(model.norm.running_var).all()
    assert {tensor.dtype for tensor in optimizer.state_dict()["ipu_state"].values()} == {torch.float32}


def test_half_and_float_models_agree_up_to_rounding():
    images, labels = batch(8)
    results = []
    for dtype in (torch.float32, HALF):
        model = seeded().to(dtype)
        training = poptorch.trainingModel(model, options(1, 2, 2), poptorch.optim.SGD(model.parameters(), lr=0.1))
        training(images.to(dtype), labels)
        results.append(model.conv.weight.detach().float())
    torch.testing.assert_close(results[0], results[1], atol=2e-3, rtol=2e-3)


def test_loss_scaling_does_not_change_half_models():
    weights = []
    for scaling in (1.0, 128.0):
        model = Line().half()
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=scaling)
        poptorch.trainingModel(model, options(), optimizer)(torch.full((2,), 0.3, dtype=HALF))
        weights.append(model.weight.item())
    assert weights[0] == weights[1]


def test_the_partials_type_has_no_effect():
    found = []
    for partials in (torch.float, HALF):
        opts = options()
        opts.Precision.setPartialsType(partials)
        found.append(poptorch.inferenceModel(seeded(Classifier).half().eval(), opts)(batch(2)[0].half()))
    assert torch.equal(found[0], found[1])


class Digits(nn.Module):
    """A small convolutional network for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.linear = nn.Linear(16 * 16, 10)

    def forward(self, images: torch.Tensor, labels: Any = None) -> Any:
        features = F.max_pool2d(F.relu(self.norm(self.conv(images))), 2)
        logits = self.linear(features.flatten(1))
        return logits if labels is None else (logits, F.cross_entropy(logits, labels))


@pytest.mark.parametrize("precision", ["16.16", "16.32", "32.32"])
def test_every_precision_converges_on_digits(precision):
    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    images = images.half() if precision.startswith("16") else images
    labels = torch.tensor(data.target)
    model = seeded(Digits)
    model = model.half() if precision.endswith("16") else model
    scaling = {"loss_scaling": 128.0, "velocity_scaling": 128.0, "use_combined_accum": True}
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **scaling)
    training = poptorch.trainingModel(model, options(2, 2, 11), optimizer)
    for _ in range(6):
        training(images[:1408], labels[:1408])
    model.eval()
    test = poptorch.inferenceModel(model, options())
    accuracy = (test(images[1408:]).argmax(1) == labels[1408:]).float().mean().item()
    assert accuracy > 0.9
