"""Gradients that a forward computes itself, as of the forces of an energy: PopTorch never disables autograd."""

from __future__ import annotations

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import options, seeded, wrapped

X = torch.arange(12.0).view(4, 3) / 12


def by_grad(energy, x):
    x.requires_grad_()
    return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


def by_attribute(energy, x):
    x.requires_grad = True
    return torch.autograd.grad([energy(x).sum()], [x])[0]


def by_backward(energy, x):
    x = x.clone().requires_grad_()
    torch.autograd.backward([energy(x).sum()], inputs=[x])
    return x.grad


def by_jacobian(energy, x):
    return torch.autograd.functional.jacobian(lambda y: energy(y).sum(), x)


def of_the_weight(energy, x):
    return torch.autograd.grad(energy(x).sum(), energy[0].weight)[0].sum() * x


class Energy(nn.Sequential):
    def __init__(self, gradient=by_grad):
        super().__init__(nn.Linear(3, 4), nn.SiLU())
        self.gradient = gradient

    def forward(self, x):
        energy = nn.Sequential(self[0], self[1], nn.Softplus())
        return self.gradient(energy, x[:, :3])


class Fit(Energy):
    def forward(self, x):
        force = super().forward(x)
        return force, poptorch.identity_loss((force**2).mean(), "none")


@pytest.mark.parametrize("gradient", [by_grad, by_attribute, by_backward, by_jacobian, of_the_weight])
def test_inference_computes_gradients_in_forward(monkeypatch, gradient):
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")  # PopTorch lowers the operators that autograd makes
    model = seeded(Energy, gradient=gradient).eval()
    expected = torch.cat([model(part.clone()) for part in X.split(2)]).detach()
    inference = poptorch.inferenceModel(model, options(2))
    for _ in range(2):
        forces = inference(X)
        assert torch.allclose(forces, expected, atol=1e-6)
        assert not forces.requires_grad


def test_training_on_gradients_equals_torch(monkeypatch):
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    model, reference = seeded(Fit), seeded(Fit)
    training = wrapped(model, options(), lr=0.5)
    optimizer = torch.optim.SGD(reference.parameters(), 0.5)
    for _ in range(2):
        force, _ = training(X)
        optimizer.zero_grad()
        expected, loss = reference(X.clone())
        loss.backward()
        optimizer.step()
        assert torch.allclose(force, expected, atol=1e-6)
    assert torch.allclose(model[0].weight, reference[0].weight, atol=1e-6)


def test_the_objects_that_both_traces_change_show_one():
    calls = []

    def gradient(energy, x):
        calls.append(1)
        return by_grad(energy, x)

    poptorch.inferenceModel(Energy(gradient), options())(X)
    assert calls == [1]


def test_inference_without_such_gradients_has_no_graph():
    graphs = []
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_forward_hook(lambda module, args, output: graphs.append(output.requires_grad))
    poptorch.inferenceModel(model, options())(X)
    assert graphs == [False]
