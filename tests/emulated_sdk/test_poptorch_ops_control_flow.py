"""`for_loop` and `cond`: values, gradients, and what they refuse."""

from __future__ import annotations

from typing import Any, Callable

import poptorch
import pytest
import torch
from poptorch_models import options
from torch import nn


class Calls(nn.Module):
    """Calls a function of the inputs; it has one weight."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def inferred(function: Callable[..., Any], *inputs: torch.Tensor, replicas: int = 1) -> Any:
    return poptorch.inferenceModel(Calls(function), options(replicas))(*inputs)


def doubled(count: int) -> Callable[..., Any]:
    return lambda model, x: poptorch.for_loop(count, lambda y: y * model.weight, [x])[0]


@pytest.mark.parametrize("count", [0, 1, 10])
def test_a_loop_runs_its_body_count_times(count):
    x = torch.tensor([1.0, 3.0])
    assert torch.equal(doubled(count)(Calls(None), x), x * 2**count)
    assert torch.equal(inferred(doubled(count), x), x * 2**count)


def test_a_loop_carries_several_tensors():
    def fibonacci(model, a, b):
        return poptorch.for_loop(5, lambda x, y: (y, x + y), [a, b])

    one, other = inferred(fibonacci, torch.tensor([0]), torch.tensor([1]))
    assert (one.tolist(), other.tolist()) == ([5], [8])


def test_a_loop_changes_neither_its_inputs_nor_what_its_body_returns():
    def forward(model, x):
        return (*poptorch.for_loop(2, lambda y, z: (y.add_(1), y), [x, x]), x)

    first, second, x = inferred(forward, torch.zeros(1))
    assert (first.item(), second.item(), x.item()) == (2.0, 2.0, 0.0)


def test_gradients_flow_through_a_loop():
    def forward(model, x):
        return poptorch.identity_loss(doubled(3)(model, x), "sum")

    model = Calls(forward)
    training = poptorch.trainingModel(model, options(), poptorch.optim.SGD(model.parameters(), lr=1.0))
    assert training(torch.ones(1)) == 8.0
    assert model.weight.item() == 2.0 - 3 * 2.0**2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: poptorch.for_loop(2, lambda y: y, (x,)), "Object is not list"),
        (lambda x: poptorch.for_loop(2, lambda y: y, x), "Object is not list"),
        (lambda x: poptorch.for_loop(2, lambda y, z: (y, z), [x, 1]), "index 1 is not torch.tensor"),
        (lambda x: poptorch.for_loop(-1, lambda y: y, [x]), "at least 0, not -1"),
        (lambda x: poptorch.for_loop(2.0, lambda y: y, [x]), "constant int"),
        (lambda x: poptorch.for_loop(2, None, [x]), "is a function"),
        (lambda x: poptorch.for_loop(2, lambda y: (y, y), [x]), r"takes float32 \[2\] and in iteration 0"),
        (lambda x: poptorch.for_loop(2, lambda y: y[:1], [x]), r"returned float32 \[1\]"),
        (lambda x: poptorch.for_loop(2, lambda y: y.long(), [x]), r"returned int32 \[2\]"),
        (lambda x: poptorch.for_loop(2, lambda y: None, [x]), "returned NoneType"),
        (lambda x: poptorch.cond(True, abs, [x], abs, [x]), "`condition` is a tensor, not bool"),
        (lambda x: poptorch.cond(x > 0, abs, [x], abs, [x]), r"tensor of shape \[\] or \[1\], not \[2\]"),
        (
            lambda x: poptorch.cond(x.sum() > 0, abs, x, abs, [x]),
            r"input tensors \(then_inps\) to be a list of tensors. \(Object is not list\)",
        ),
        (lambda x: poptorch.cond(x.sum() > 0, abs, [x], abs, [x, 3]), "index 1 is not torch.tensor"),
        (lambda x: poptorch.cond(x.sum() > 0, abs, [x], "abs", [x]), "`else_body` is a function"),
    ],
)
@pytest.mark.parametrize("kind", [ValueError, poptorch.Error])
def test_wrong_arguments_are_refused(call, message, kind):
    with pytest.raises(kind, match=message):
        call(torch.ones(2))
    with pytest.raises(kind, match=message):
        inferred(lambda model, x: call(x), torch.ones(2))


def chosen(model: Any, condition: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return poptorch.cond(condition, lambda y: y * model.weight, [x], lambda y: y - 1, [x])[0]


@pytest.mark.parametrize(("condition", "expected"), [(True, 6.0), (False, 2.0)])
def test_cond_takes_one_branch(condition, expected):
    condition, x = torch.tensor([condition]), torch.tensor([3.0])
    assert chosen(Calls(None), condition, x).item() == expected
    assert inferred(chosen, condition, x).item() == expected


def test_the_condition_is_read_at_every_call_on_every_replica():
    model = poptorch.inferenceModel(Calls(chosen), options(replicas=2))
    x = torch.tensor([3.0, 5.0])
    assert model(torch.tensor([True, False]), x).tolist() == [6.0, 4.0]
    assert model(torch.tensor([False, True]), x).tolist() == [2.0, 10.0]


def test_branches_may_have_different_inputs_and_none():
    def forward(model, x):
        return poptorch.cond(x.sum() > 0, lambda a, b: [a + b, a], [x, x], lambda: (x * 0, x), [])

    assert [each.item() for each in inferred(forward, torch.tensor([2.0]))] == [4.0, 2.0]


@pytest.mark.parametrize("other", [lambda y: (y, y), lambda y: y[:0], lambda y: y.long()])
def test_branches_that_do_not_agree_are_refused(other):
    with pytest.raises(poptorch.Error, match="both branches must return the same number, shapes and dtypes"):
        inferred(lambda model, x: poptorch.cond(x.sum() > 0, abs, [x], other, [x])[0], torch.ones(1))


@pytest.mark.parametrize("replicas", [1, 2])
def test_weights_of_the_branch_not_taken_are_trained_on_a_gradient_of_zero(replicas):
    def forward(model, condition, x):
        return poptorch.identity_loss(chosen(model, condition, x), "mean")

    model = Calls(forward)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    training = poptorch.trainingModel(model, options(replicas), optimizer)
    x = torch.ones(replicas)
    training(torch.full((replicas,), True), x)
    assert model.weight.item() == 1.0
    training(torch.full((replicas,), False), x)
    assert model.weight.item() == 0.5  # momentum alone


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_weight_of_one_branch_decays_whichever_is_taken(replicas, taken):
    def forward(model, condition, x):
        with_weight, without = (lambda: x * model.weight), (lambda: x * 3)
        branches = (without, with_weight) if taken else (with_weight, without)
        return poptorch.identity_loss(poptorch.cond(condition, branches[0], [], branches[1], [])[0], "mean")

    model = Calls(forward)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.25)
    poptorch.trainingModel(model, options(replicas), optimizer)(torch.full((replicas,), taken), torch.ones(replicas))
    assert model.weight.item() == 1.5
