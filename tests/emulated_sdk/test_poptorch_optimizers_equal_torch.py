"""The device's optimizers equal torch's on the same gradients, and run without torch's compiler and wrappers."""

from __future__ import annotations

import copy
import subprocess
import sys

import poptorch
import pytest
import torch
from poptorch.optimizers.device_optimizer import plain_step
from torch import nn

from tests.support.poptorch_models import Line, options, trained, wrapped

CASES = [
    ("SGD", {}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "use_combined_accum": True}),
    ("Adam", {"betas": (0.8, 0.95), "eps": 1e-5}),
    ("Adam", {"weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.1, "bias_correction": True}),
    ("RMSprop", {"alpha": 0.8, "momentum": 0.9}),
    ("RMSprop", {"centered": True, "weight_decay": 0.1}),
]
OWN = ("use_combined_accum", "bias_correction")


class Net(nn.Module):
    """Two layers with one parameter group each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.second(torch.tanh(self.first(x))).pow(2), "mean")


def groups_of(model):
    return [
        {"params": model.first.parameters()},
        {"params": model.second.parameters(), "lr": 0.02, "weight_decay": 0.01},
    ]


def inputs(count):
    return torch.randn(count, 2, 3, generator=torch.Generator().manual_seed(0))


def assert_same_training(ours, theirs, own=None, schedule=None, clipped_to=None, **arguments):
    """Train a `Net` with the optimizer `ours` on the device, which alone has the arguments `own`, and on the host."""
    device, host = Net(), Net()
    optimizer, reference = ours(groups_of(device), **arguments, **(own or {})), theirs(groups_of(host), **arguments)
    schedulers = [schedule(each) for each in (optimizer, reference)] if schedule else []
    training = poptorch.trainingModel(device, options(), optimizer)
    for x in inputs(4):
        training(x)
        reference.zero_grad()
        host(x).backward()
        if clipped_to is not None:
            nn.utils.clip_grad_norm_(host.parameters(), clipped_to)
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
        if schedulers:
            training.setOptimizer(optimizer)
    for a, b in zip(device.parameters(), host.parameters()):
        torch.testing.assert_close(a.detach(), b.detach())


def of_both(algorithm):
    return getattr(poptorch.optim, algorithm), getattr(torch.optim, algorithm)


@pytest.mark.parametrize(("algorithm", "arguments"), CASES)
@pytest.mark.parametrize("loss_scaling", [1.0, 1000.0])
def test_updates_equal_torch(algorithm, arguments, loss_scaling):
    own = {name: value for name, value in arguments.items() if name in OWN}
    shared = {name: value for name, value in arguments.items() if name not in OWN}
    assert_same_training(*of_both(algorithm), own={"loss_scaling": loss_scaling, **own}, lr=0.05, **shared)


@pytest.mark.parametrize("algorithm", ["SGD", "AdamW"])
def test_clipping_equals_torch(algorithm):
    own = {"max_grad_norm": 0.01, "loss_scaling": 64}
    assert_same_training(*of_both(algorithm), own=own, clipped_to=0.01, lr=0.1)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    ],
)
def test_torch_schedulers_set_the_devices_learning_rate(schedule):
    assert_same_training(*of_both("SGD"), schedule=schedule, lr=0.05, momentum=0.9)


@pytest.mark.skipif(
    "decoupled_weight_decay" not in torch.optim.Adam.__init__.__code__.co_varnames, reason="this torch has no such Adam"
)
def test_adam_with_decoupled_weight_decay_is_adamw():
    own = {"decoupled_weight_decay": True}
    assert_same_training(torch.optim.Adam, torch.optim.AdamW, own=own, lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"bias_correction": False}, {"max_weight_norm": 0.1, "weight_decay": 0.0}, {"max_weight_norm": 0.0}],
)
def test_lamb_on_the_device_equals_the_host(arguments):
    assert_same_training(poptorch.optim.LAMB, poptorch.optim.LAMB, lr=0.1, **arguments)


def test_lamb_scales_the_step_to_the_norm_of_the_weights():
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = poptorch.optim.LAMB([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.tensor([1.0, -2.0])
    assert optimizer.step(lambda: "the loss") == "the loss"
    # Adam's first step is the sign of the gradient, of norm sqrt(2); the trust ratio scales it to norm 0.1 * 5.
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 4.0]) - 0.5 / 2**0.5 * torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize(("corrects", "expected"), [(True, -1), (False, -0.1 / 0.001**0.5)])
def test_bias_correction_scales_lambs_first_step(corrects, expected):
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    poptorch.optim.LAMB([weight], lr=1.0, weight_decay=0.0, bias_correction=corrects).step()
    assert weight.item() == pytest.approx(expected, rel=1e-4)


class OwnSgd(torch.optim.SGD):
    """Inherits step()."""


class Lookahead(torch.optim.SGD):
    """Overrides step()."""

    def step(self, closure=None):
        raise AssertionError("the device does not call this")


@pytest.mark.parametrize(("kind", "warned"), [(OwnSgd, False), (Lookahead, True)])
def test_derived_class_uses_the_rule_of_its_base(caplog, kind, warned):
    model = Line()
    poptorch.trainingModel(model, options(), kind(model.parameters(), lr=0.1))(torch.ones(1))
    assert model.weight.item() == pytest.approx(0.9)
    assert ("Lookahead.step() is not used" in caplog.text) == warned


@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"])
def test_unsupported_algorithms_raise_error_when_wrapping(name):
    model = Line()
    with pytest.raises(poptorch.Error, match=f"Unknown optimizer {name}: the device supports SGD, Adam"):
        poptorch.trainingModel(model, options(), getattr(torch.optim, name)(model.parameters()))
    poptorch.trainingModel(model, options())(torch.ones(1))


def test_maximize_is_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="maximize"):
        assert trained(Line(), torch.ones(1), maximize=True).weight.item() == pytest.approx(0.9)
    model = Line()
    with pytest.warns(UserWarning, match="maximize"):
        poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))


def test_rmsprop_momentum_may_change_from_zero():
    model = Line()
    training = wrapped(model, None, "RMSprop", momentum=0.0)
    training(torch.ones(1))
    training._optimizer.param_groups[0]["momentum"] = 0.5
    training.setOptimizer(training._optimizer)
    training(torch.ones(1))
    assert model.weight.item() == pytest.approx(1 - 0.1 / 0.01**0.5 - 0.1 / 0.0199**0.5, rel=1e-5)


@pytest.mark.parametrize("algorithm", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_deep_copy_of_model_and_optimizer(algorithm):
    model = Net()
    optimizer = getattr(poptorch.optim, algorithm)(groups_of(model), lr=0.1, loss_scaling=8.0)
    training = poptorch.trainingModel(model, options(), optimizer)
    training(inputs(1)[0])
    training.detachFromDevice()
    training.destroy()
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    for net, of_net in ((model, optimizer), (twin, twin_optimizer)):
        poptorch.trainingModel(net, options(), of_net)(inputs(2)[1])
    assert twin_optimizer.loss_scaling == 8.0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


PROGRAM = """
import sys
from tests.support.poptorch_models import batch, seeded, wrapped
training = wrapped(seeded(dropout=0.5), momentum=0.9)
for _ in range(3):
    training(*batch(4))
training._optimizer.state_dict()
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.usefixtures("processes")
def test_training_does_not_import_torch_dynamo():
    """The import takes more than a second per process."""
    command = [sys.executable, "-c", PROGRAM]
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("algorithm", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_plain_step_equals_step(algorithm):
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2)]
    optimizers = [algorithm([weight], lr=0.1) for weight in weights]
    for number in range(3):
        for weight in weights:
            weight.grad = torch.linspace(0, number, 7)
        optimizers[0].step()
        plain_step(optimizers[1])
    assert torch.equal(weights[0], weights[1])
    assert optimizers[1].state[weights[1]].keys() == optimizers[0].state[weights[0]].keys()
