"""The device's optimizers equal torch's on the same gradients."""

from __future__ import annotations

import copy

import poptorch
import pytest
import torch
from poptorch_models import Line, options
from torch import nn

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


def groups_of(model, changed=None):
    changes = {"lr": 0.02, **({} if changed is None else changed)}
    return [{"params": model.first.parameters()}, {"params": model.second.parameters(), **changes}]


def inputs(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 2, 3, generator=generator)


def assert_same_weights(left, right):
    for a, b in zip(left.parameters(), right.parameters()):
        torch.testing.assert_close(a.detach(), b.detach())


@pytest.mark.parametrize(("algorithm", "arguments"), CASES)
@pytest.mark.parametrize("loss_scaling", [1.0, 1000.0])
def test_updates_equal_torch(algorithm, arguments, loss_scaling):
    device, host = Net(), Net()
    own = {"lr": 0.05, "loss_scaling": loss_scaling, **arguments}
    optimizer = getattr(poptorch.optim, algorithm)(groups_of(device, {"weight_decay": 0.01}), **own)
    training = poptorch.trainingModel(device, options(), optimizer)
    host_arguments = {name: value for name, value in arguments.items() if name not in OWN}
    reference = getattr(torch.optim, algorithm)(groups_of(host, {"weight_decay": 0.01}), lr=0.05, **host_arguments)
    for x in inputs(4):
        training(x)
        reference.zero_grad()
        host(x).backward()
        reference.step()
    assert_same_weights(device, host)


@pytest.mark.parametrize("arguments", [{}, {"bias_correction": False}, {"max_weight_norm": 0.1, "weight_decay": 0.0}])
def test_lamb_on_the_device_equals_the_host(arguments):
    device, host = Net(), Net()
    make = lambda model: poptorch.optim.LAMB(groups_of(model), lr=0.1, **arguments)  # noqa: E731
    training = poptorch.trainingModel(device, options(), make(device))
    reference = make(host)
    for x in inputs(3):
        training(x)
        reference.zero_grad()
        host(x).backward()
        reference.step()
    assert_same_weights(device, host)


def test_lamb_scales_the_step_to_the_norm_of_the_weights():
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = poptorch.optim.LAMB([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.tensor([1.0, -2.0])
    assert optimizer.step(lambda: "the loss") == "the loss"
    # Adam's first step is the sign of the gradient, of norm sqrt(2); the trust ratio scales it to norm 0.1 * 5.
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 4.0]) - 0.5 / 2**0.5 * torch.tensor([1.0, -1.0]))


def test_bias_correction_scales_lambs_first_step():
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for weight, corrects in zip(weights, (True, False)):
        weight.grad = torch.ones(1)
        poptorch.optim.LAMB([weight], lr=1.0, weight_decay=0.0, bias_correction=corrects).step()
    assert weights[0].item() == pytest.approx(-1)
    assert weights[1].item() == pytest.approx(-0.1 / 0.001**0.5, rel=1e-4)


class OwnSgd(torch.optim.SGD):
    """Inherits step()."""


class Lookahead(torch.optim.SGD):
    """Overrides step()."""

    def step(self, closure=None):
        raise AssertionError("the device does not call this")


def test_derived_class_uses_the_rule_of_its_base(caplog):
    for kind, warned in ((OwnSgd, False), (Lookahead, True)):
        caplog.clear()
        model = Line()
        poptorch.trainingModel(model, options(), kind(model.parameters(), lr=0.1))(torch.ones(1))
        assert model.weight.item() == pytest.approx(0.9)
        assert ("Lookahead.step() is not used" in caplog.text) == warned


@pytest.mark.skipif(
    "decoupled_weight_decay" not in torch.optim.Adam.__init__.__code__.co_varnames, reason="this torch has no such Adam"
)
def test_adam_with_decoupled_weight_decay_is_adamw():
    device, host = Net(), Net()
    optimizer = torch.optim.Adam(device.parameters(), lr=0.1, weight_decay=0.5, decoupled_weight_decay=True)
    training = poptorch.trainingModel(device, options(), optimizer)
    reference = torch.optim.AdamW(host.parameters(), lr=0.1, weight_decay=0.5)
    for x in inputs(2):
        training(x)
        reference.zero_grad()
        host(x).backward()
        reference.step()
    assert_same_weights(device, host)


@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"])
def test_unsupported_algorithms_raise_error_when_wrapping(name):
    model = Line()
    with pytest.raises(poptorch.Error, match=f"Unknown optimizer {name}: the device supports SGD, Adam"):
        poptorch.trainingModel(model, options(), getattr(torch.optim, name)(model.parameters()))
    poptorch.trainingModel(model, options())(torch.ones(1))


def test_maximize_is_ignored_with_a_warning():
    model = Line()
    with pytest.warns(UserWarning, match="maximize"):
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    poptorch.trainingModel(model, options(), optimizer)(torch.ones(1))
    assert model.weight.item() == pytest.approx(0.9)
    model = Line()
    with pytest.warns(UserWarning, match="maximize"):
        poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))


def test_rmsprop_momentum_may_change_from_zero():
    model = Line()
    optimizer = poptorch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.0)
    training = poptorch.trainingModel(model, options(), optimizer)
    training(torch.ones(1))
    optimizer.param_groups[0]["momentum"] = 0.5
    training.setOptimizer(optimizer)
    training(torch.ones(1))
    assert model.weight.item() == pytest.approx(1 - 0.1 / 0.01**0.5 - 0.1 / 0.0199**0.5, rel=1e-5)


def test_clipping_equals_torch():
    device, host = Net(), Net()
    training = poptorch.trainingModel(
        device, options(), poptorch.optim.AdamW(device.parameters(), lr=0.1, max_grad_norm=0.01, loss_scaling=64)
    )
    reference = torch.optim.AdamW(host.parameters(), lr=0.1)
    for x in inputs(3):
        training(x)
        reference.zero_grad()
        host(x).backward()
        nn.utils.clip_grad_norm_(host.parameters(), 0.01)
        reference.step()
    assert_same_weights(device, host)


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


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    ],
)
def test_torch_schedulers_set_the_devices_learning_rate(schedule):
    device, host = Net(), Net()
    optimizer = poptorch.optim.SGD(groups_of(device), lr=0.05, momentum=0.9)
    reference = torch.optim.SGD(groups_of(host), lr=0.05, momentum=0.9)
    on_device, on_host = schedule(optimizer), schedule(reference)
    training = poptorch.trainingModel(device, options(), optimizer)
    for x in inputs(4):
        training(x)
        on_device.step()
        training.setOptimizer(optimizer)
        reference.zero_grad()
        host(x).backward()
        reference.step()
        on_host.step()
    assert_same_weights(device, host)
