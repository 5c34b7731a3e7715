"""`for_loop`, `cond`, `dynamic_slice` and `dynamic_update`: values, gradients and errors."""

from __future__ import annotations

import poptorch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.poptorch_models import Apply, on_device, options, wrapped

X = torch.tensor([1.0, 3.0])


def weighted(function):
    """Return a model that calls a function with itself, with a weight of 2, and its inputs."""
    return Apply(function, weight=nn.Parameter(torch.tensor(2.0)))


def repeated(model, x, count=3):
    return poptorch.for_loop(count, lambda y: y * model.weight, [x])[0]


def chosen(model, condition, x):
    return poptorch.cond(condition, lambda y: y * model.weight, [x], lambda y: y - 1, [x])[0]


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        *((lambda model, x, count=count: repeated(model, x, count), [X], X * 2**count) for count in (0, 1, 10)),
        (chosen, [torch.tensor([True]), torch.tensor([3.0])], torch.tensor([6.0])),
        (chosen, [torch.tensor([False]), torch.tensor([3.0])], torch.tensor([2.0])),
    ],
)
def test_a_loop_runs_its_body_count_times_and_cond_one_branch(function, inputs, expected):
    model = weighted(function)
    assert torch.equal(model(*inputs), expected)
    assert torch.equal(poptorch.inferenceModel(model, options())(*inputs), expected)


def test_for_loop_with_several_tensors_of_which_the_body_gets_copies():
    def forward(a, b):
        fibonacci = poptorch.for_loop(5, lambda x, y: (y, x + y), [a, b])
        return (*fibonacci, *poptorch.for_loop(2, lambda y, z: (y.add_(1), y), [a, a]), a)

    found = on_device(forward, torch.tensor([0]), torch.tensor([1]))
    assert [each.item() for each in found] == [5, 8, 2, 2, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: poptorch.for_loop(2, lambda y: y, (x,)), "Object is not list"),
        (lambda x: poptorch.for_loop(2, lambda y: y, x), "Object is not list"),
        (lambda x: poptorch.for_loop(2, lambda y, z: (y, z), [x, 1]), "index 1 is not torch.tensor"),
        (lambda x: poptorch.for_loop(-1, lambda y: y, [x]), "at least 0, not -1"),
        (lambda x: poptorch.for_loop(2.0, lambda y: y, [x]), "constant int"),
        (lambda x: poptorch.for_loop(2, None, [x]), "must be a function"),
        (lambda x: poptorch.for_loop(2, lambda y: (y, y), [x]), r"takes float32 \[2\] and in iteration 0"),
        (lambda x: poptorch.for_loop(2, lambda y: y[:1], [x]), r"returned float32 \[1\]"),
        (lambda x: poptorch.for_loop(2, lambda y: y.long(), [x]), r"returned int32 \[2\]"),
        (lambda x: poptorch.for_loop(2, lambda y: None, [x]), "must return tensors, not NoneType"),
        (lambda x: poptorch.cond(True, abs, [x], abs, [x]), "`condition` must be a tensor, not bool"),
        (lambda x: poptorch.cond(x > 0, abs, [x], abs, [x]), r"tensor of shape \[\] or \[1\], not \[2\]"),
        (
            lambda x: poptorch.cond(x.sum() > 0, abs, x, abs, [x]),
            r"input tensors \(then_inps\) to be a list of tensors. \(Object is not list\)",
        ),
        (lambda x: poptorch.cond(x.sum() > 0, abs, [x], abs, (x,)), r"\(else_inps\) to be a list of tensors"),
        (lambda x: poptorch.cond(x.sum() > 0, abs, [x], "abs", [x]), "`else_body` must be a function"),
    ],
)
def test_control_flow_rejects_invalid_arguments(call, message):
    for run in (call, lambda x: on_device(call, x)):
        with pytest.raises(poptorch.Error, match=message) as error:
            run(torch.ones(2))
        assert isinstance(error.value, ValueError)


def test_conditions_and_starts_are_evaluated_in_every_call_on_every_replica():
    model = poptorch.inferenceModel(weighted(chosen), options(replicas=2))
    x = torch.tensor([3.0, 5.0])
    assert model(torch.tensor([True, False]), x).tolist() == [6.0, 4.0]
    assert model(torch.tensor([False, True]), x).tolist() == [2.0, 10.0]
    model = Apply(lambda x, start: poptorch.dynamic_slice(x, 1, start, 3, 2))
    model, x = poptorch.inferenceModel(model, options(replicas=2)), torch.arange(12.0).reshape(2, 6)
    assert model(x, torch.tensor([0, 3])).tolist() == [[0.0, 2.0], [9.0, 11.0]]
    assert model(x, torch.tensor([2, 1])).tolist() == [[2.0, 4.0], [7.0, 9.0]]


def test_branches_may_have_different_or_no_inputs():
    found = on_device(lambda x: poptorch.cond(x.sum() > 0, lambda a, b: [a + b, a], [x, x], lambda: (x * 0, x), []), X)
    assert [each.tolist() for each in found] == [[2.0, 6.0], [1.0, 3.0]]


def test_a_branch_takes_constants():
    def scaled(x):
        return poptorch.cond(x.sum() > 0, lambda a, n: a * n, [x, 3], lambda a, n: a + n["n"], [x, {"n": 1}])[0]

    inference = poptorch.inferenceModel(Apply(scaled), options())
    assert [inference(torch.tensor([value])).item() for value in (1.0, -1.0)] == [3, 0]


@pytest.mark.parametrize("other", [lambda y: (y, y), lambda y: y[:0], lambda y: y.long()])
def test_branches_with_different_outputs_raise_error(other):
    with pytest.raises(poptorch.Error, match="both branches must return the same number, shapes and dtypes"):
        on_device(lambda x: poptorch.cond(x.sum() > 0, abs, [x], other, [x])[0], torch.ones(1))


@pytest.mark.parametrize("call", [repeated, lambda model, x: chosen(model, x.sum() > 0, x)], ids=["for_loop", "cond"])
def test_loops_and_branches_in_training_raise_error(call):
    training = wrapped(weighted(lambda model, x: poptorch.identity_loss(call(model, x), "sum")))
    with pytest.raises(poptorch.Error, match=r"poptorch\.(for_loop|cond)\(\) is only supported in inference"):
        training(torch.ones(1))


def test_dynamic_update_does_not_modify_its_input():
    x, src = torch.zeros(1, 4), torch.ones(1, 2)
    model = poptorch.inferenceModel(Apply(lambda *inputs: poptorch.dynamic_update(*inputs[:2], 1, inputs[2], 2)))
    assert model(x, src, torch.tensor([1])).tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert model(x, src, torch.tensor([2])).tolist() == [[0.0, 0.0, 1.0, 1.0]]
    assert not x.any()


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 3))
def test_dynamic_slice_equals_python_slice(data, length, step):
    start = data.draw(st.integers(0, length - 1))
    size = data.draw(st.integers(1, length - start))
    x = torch.arange(float(length))
    assert torch.equal(poptorch.dynamic_slice(x, 0, torch.tensor(start), size, step), x[start : start + size : step])


def test_dynamic_ops_are_differentiable():
    x, src = torch.ones(4, requires_grad=True), torch.ones(2, requires_grad=True)
    updated = poptorch.dynamic_update(x, src, -1, torch.tensor(1), 2)
    poptorch.dynamic_slice(updated, 0, torch.tensor(2), 2, 1).sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert src.grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: poptorch.dynamic_slice([1], 0, 0, 1, 1), "`tensor` must be a tensor"),
        (lambda x: poptorch.dynamic_slice(x, 1, torch.tensor(0), 1, 1), "the tensor has 1 dimensions"),
        (lambda x: poptorch.dynamic_slice(x, 0, 0, 1, 1), "`start` must be a tensor"),
        (
            lambda x: poptorch.dynamic_slice(x, 0, torch.tensor(3), 2, 1),
            r"slice \[3 : 5\] exceeds dimension 0, which has 4",
        ),
        (lambda x: poptorch.dynamic_slice(x, 0, torch.tensor(-1), 2, 1), r"slice \[-1 : 1\]"),
        (lambda x: poptorch.dynamic_slice(x, 0, torch.tensor(1.0), 2, 1), "`start` must be one integer, not float32"),
        (
            lambda x: poptorch.dynamic_slice(x, 0, torch.tensor([1, 2]), 2, 1),
            r"`start` must be one integer, not int32 \[2\]",
        ),
        (lambda x: poptorch.dynamic_slice(x, 0, 0, torch.tensor(2), 1), "`size` must be a constant int"),
        (lambda x: poptorch.dynamic_slice(x, 0, torch.tensor(0), 0, 1), "start and end of a slice must be different"),
        (lambda x: poptorch.dynamic_slice(x, 0, torch.tensor(0), -1, 1), "end less than the start is not supported"),
        (lambda x: poptorch.dynamic_slice(x, 0, torch.tensor(0), 2, 0), "`step` must be a constant int of at least 1"),
        (
            lambda x: poptorch.dynamic_update(x, x, 0, torch.tensor(0), 2),
            r"`src` is float32 \[4\], but the slice .* float32 \[2\]",
        ),
        (
            lambda x: poptorch.dynamic_update(x, x[:2].to(torch.int64), 0, torch.tensor(0), 2),
            r"must have same dtype. \(torch.float32 vs torch.int32\)",
        ),
        (lambda x: poptorch.dynamic_update(x, x[None], 0, torch.tensor(0), 2), r"same dimensionality. \(1\) vs \(2\)"),
        (lambda x: poptorch.dynamic_update(x, x, 0, torch.tensor(1), 4), r"slice \[1 : 5\]"),
    ],
)
def test_dynamic_ops_reject_invalid_arguments(call, message):
    with pytest.raises(poptorch.Error, match=message) as error:
        call(torch.ones(4))
    assert isinstance(error.value, ValueError)


def test_a_model_is_compiled_whatever_the_start_of_its_slices_is():
    model = poptorch.inferenceModel(Apply(lambda x, start: poptorch.dynamic_slice(x, 0, start, 2, 1)))
    model.compile(torch.zeros(4), torch.tensor([20]))
    assert model(torch.arange(4.0), torch.tensor([1])).tolist() == [1, 2]
    with pytest.raises(poptorch.Error, match="exceeds dimension 0"):
        model(torch.arange(4.0), torch.tensor([3]))
    uneven = poptorch.inferenceModel(Apply(lambda x, start: poptorch.dynamic_slice(x, 0, start, 3, 1)))
    with pytest.raises(poptorch.Error, match=r"slice \(3\) must be a factor of the slicing dimension \(4\)"):
        uneven.compile(torch.zeros(4), torch.tensor([0]))
