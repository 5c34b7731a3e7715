"""Hints to the compiler, which change no values; `for_loop`, `cond`, `dynamic_slice` and `dynamic_update`."""

from __future__ import annotations

from typing import Any

import poptorch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.poptorch_models import Apply, on_device, options, seeded, wrapped
from tests.support.refused import rejects

Mode = poptorch.MatMulSerializationMode
NONE, LOOP = poptorch.OverlapMode.NoOverlap, poptorch.OverlapMode.OverlapDeviceIterationLoop
ONE, TWO_ONES = torch.ones(1), torch.ones(2)
overlap_input, overlap_output = poptorch.set_overlap_for_input, poptorch.set_overlap_for_output


def hinted(x):
    with poptorch.NameScope("hinted"):
        x = poptorch.set_available_memory(poptorch.recomputationCheckpoint(x), 0.2)
        return poptorch.nop(poptorch.set_available_memory(x, 1))


def test_hints_are_differentiable_identities_and_keep_the_container_type():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = hinted(x)
    assert torch.equal(x, y)
    y.sum().backward()
    assert (x.grad.tolist(), on_device(hinted, x.detach()).tolist()) == ([1.0, 1.0], [1.0, 2.0])
    a, b = torch.zeros(1), torch.ones(1)
    poptorch.nop(a).add_(1)
    assert not a.any(), "nop returns a copy"
    assert [each.item() for each in poptorch.recomputationCheckpoint(a, b)] == [0.0, 1.0]
    for arguments, kind in (((a, b), tuple), (([a, b],), list), (((a,),), tuple)):
        assert isinstance(poptorch.recomputationCheckpoint(*arguments), kind)


SERIALIZED = [(Mode.InputChannels, 2), (Mode.ReducingDim, 3), (Mode.OutputChannels, 5), (Mode.Disabled, 0)]


@pytest.mark.parametrize(("mode", "factor"), SERIALIZED)
def test_serialized_matmul_equals_matmul(mode, factor):
    lhs, rhs = torch.randn(1, 4, 6), torch.randn(1, 6, 5)
    found = on_device(lambda *both: poptorch.serializedMatMul(*both, mode, factor, keep_precision=True), lhs, rhs)
    assert torch.equal(found, lhs @ rhs)


def product(*arguments):
    return poptorch.serializedMatMul(torch.ones(4, 6), torch.ones(6, 5), *arguments)


def multi_conv(setter, value):
    return getattr(poptorch.MultiConv(), setter)(value)


available = poptorch.set_available_memory
PARTIALS = "Invalid partials types. Expected torch.float32 or torch.float16, got"
OVERLAP = "`mode` must be a poptorch.OverlapMode, not 'no_overlap'"


@pytest.mark.parametrize(
    ("call", "arguments", "error", "message"),
    [
        *(
            (product, (mode, factor), poptorch.Error, f"factor {factor} .* divide the dimension of size {size}")
            for mode, factor, size in (
                (Mode.InputChannels, 3, 4),
                (Mode.ReducingDim, 4, 6),
                (Mode.OutputChannels, 2, 5),
            )
        ),
        (product, (Mode.ReducingDim, 0), poptorch.Error, "factor 0 .* divide the dimension of size 6"),
        (product, ("reducing_dim", 2, False), AssertionError, "serializedMatMul"),
        (product, (Mode.ReducingDim, 2.0, False), AssertionError, "serializedMatMul"),
        (product, (Mode.ReducingDim, 2, 1), AssertionError, "serializedMatMul"),
        *((available, (ONE, share), ValueError, r"in \[0, 1\]") for share in (-0.1, 1.1, "half", None, True)),
        (poptorch.nop, ("x",), poptorch.Error, "must be a tensor, not str"),
        (poptorch.recomputationCheckpoint, ("x",), poptorch.Error, "must be a tensor, not str"),
        (poptorch.NameScope, (3,), AssertionError, "must be a string, not int"),
        *((overlap, (ONE, "no_overlap"), AssertionError, OVERLAP) for overlap in (overlap_input, overlap_output)),
        *((multi_conv, ("availableMemoryProportions", wrong), AssertionError, "Invalid") for wrong in (2.0, ["a"], ())),
        (multi_conv, ("partialsTypes", []), AssertionError, "Invalid"),
        (multi_conv, ("enableConvDithering", 1), AssertionError, "Invalid"),
        (multi_conv, ("planType", "parallel"), AssertionError, "Invalid"),
        (multi_conv, ("perConvReservedTiles", 0.5), AssertionError, "Invalid"),
        (multi_conv, ("cycleBackOff", "much"), AssertionError, "Invalid"),
        *(
            (multi_conv, ("partialsTypes", wrong), ValueError, PARTIALS)
            for wrong in ([torch.half, torch.int32], torch.int32, "half", ["half"])
        ),
    ],
)
def test_invalid_arguments_raise_error(call, arguments, error, message):
    rejects(error, message, call, *arguments)


def overlapping_transfers() -> poptorch.Options:
    chosen = options(iterations=2)
    chosen.TensorLocations.numIOTiles(32)
    return chosen.outputMode(poptorch.OutputMode.All).setExecutionStrategy(poptorch.ShardedExecution())


def test_overlap_does_not_change_values():
    def forward(x):
        return overlap_output(overlap_input(x, LOOP) + 1, LOOP), x * 2  # an overlapped input may have other uses

    x, opts = torch.arange(2.0), overlapping_transfers()
    for found in (forward(x), on_device(forward, x, opts=opts.clone())):
        assert [each.tolist() for each in found] == [[1, 2], [0, 2]]
    assert on_device(lambda x: overlap_input(x + 1, NONE), ONE).item() == 2, "other tensors may have no overlap"
    nested = {"a": TWO_ONES, "b": (TWO_ONES, [TWO_ONES])}
    assert overlap_input(nested, LOOP) is nested
    assert on_device(lambda x: overlap_input(x, LOOP)["b"][0] + 1, nested, opts=opts.clone()).tolist() == [2, 2]
    applied = "set_overlap_for_{0} applied on a node which is not a tensor {0}"
    for function, message in (
        (lambda x: overlap_input(x + 1, LOOP), applied.format("input") + " to"),
        (lambda x: overlap_output(x, LOOP) + 1, applied.format("output")),
        (lambda x: [overlap_output(x + 1, LOOP)] * 2, "returned twice"),
    ):
        rejects(poptorch.Error, message, on_device, function, TWO_ONES, opts=opts.clone())


def convolutions(multi):
    def forward(self, x):
        with self.multi:
            one, other = self.first(x), self.second(x)
        return poptorch.identity_loss(one * other, "mean") if self.training else one + other

    return Apply(forward, multi=multi, first=nn.Conv2d(1, 2, 3), second=nn.Conv2d(1, 2, 3))


def test_multi_conv_does_not_change_values_and_needs_a_value_for_each_convolution():
    multi, image = poptorch.MultiConv().availableMemoryProportions((0.1, 0.2)), torch.ones(1, 1, 4, 4)
    multi.partialsTypes(torch.half).enableConvDithering([True, False]).planType(poptorch.MultiConvPlanType.Parallel)
    model = convolutions(multi.perConvReservedTiles(100).cycleBackOff(0.3)).eval()
    expected = model.first(image) + model.second(image)
    assert torch.equal(model(image), expected)
    assert torch.equal(poptorch.inferenceModel(model, options())(image), expected)
    multi = poptorch.MultiConv().availableMemoryProportions([0.1, 0.2, 0.3]).partialsTypes(torch.half)
    with pytest.raises(poptorch.Error, match="has 3 values, but there are 2 convolutions"):
        poptorch.trainingModel(convolutions(multi), options())(image)
    multi = multi.availableMemoryProportions(None).partialsTypes(torch.float).enableConvDithering(None)
    assert poptorch.trainingModel(convolutions(multi), options())(image).dim() == 0


def test_a_multi_conv_is_not_empty_and_not_nested_and_an_error_leaves_no_context():
    def empty(x):
        with poptorch.MultiConv():
            return x + 1

    rejects(poptorch.Error, "has no convolution", on_device, empty, ONE)
    with pytest.raises(poptorch.Error, match="Nested poptorch.MultiConv"), poptorch.MultiConv(), poptorch.MultiConv():
        pass
    with poptorch.MultiConv():
        pass


X = torch.tensor([1.0, 3.0])


def weighted(function):
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


NO_LIST = r"input tensors \(then_inps\) to be a list of tensors. \(Object is not list\)"


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
        (lambda x: poptorch.cond(x.sum() > 0, abs, x, abs, [x]), NO_LIST),
        (lambda x: poptorch.cond(x.sum() > 0, abs, [x], abs, (x,)), r"\(else_inps\) to be a list of tensors"),
        (lambda x: poptorch.cond(x.sum() > 0, abs, [x], "abs", [x]), "`else_body` must be a function"),
    ],
)
def test_control_flow_rejects_invalid_arguments(call, message):
    for run in (call, lambda x: on_device(call, x)):
        with pytest.raises(poptorch.Error, match=message) as error:
            run(torch.ones(2))
        assert isinstance(error.value, ValueError)


def test_loops_and_branches_have_several_tensors_constants_and_captured_ones():
    def forward(a, b):
        fibonacci = poptorch.for_loop(5, lambda x, y: (y, x + y), [a, b])
        return (*fibonacci, *poptorch.for_loop(2, lambda y, z: (y.add_(1), y), [a, a]), a)

    found = on_device(forward, torch.tensor([0]), torch.tensor([1]))
    assert [each.item() for each in found] == [5, 8, 2, 2, 0]
    found = on_device(lambda x: poptorch.cond(x.sum() > 0, lambda a, b: [a + b, a], [x, x], lambda: (x * 0, x), []), X)
    assert [each.tolist() for each in found] == [[2.0, 6.0], [1.0, 3.0]]

    def scaled(x):
        return poptorch.cond(x.sum() > 0, lambda a, n: a * n, [x, 3], lambda a, n: a + n["n"], [x, {"n": 1}])[0]

    inference = poptorch.inferenceModel(Apply(scaled), options())
    assert [inference(torch.tensor([value])).item() for value in (1.0, -1.0)] == [3, 0]

    def counted(x):
        count = torch.zeros(1)
        poptorch.cond(x.sum() > 0, lambda value: value + count.add_(1), [x], lambda value: value + count.add_(1), [x])
        return count

    assert on_device(counted, torch.ones(1)).item() == 1


def test_branches_with_different_outputs_and_loops_and_branches_in_training_raise_error():
    for other in (lambda y: (y, y), lambda y: y[:0], lambda y: y.long()):
        branches = lambda x: poptorch.cond(x.sum() > 0, abs, [x], other, [x])[0]  # noqa: B023, E731
        message = "both branches must return the same number, shapes and dtypes"
        rejects(poptorch.Error, message, on_device, branches, torch.ones(1))
    for call in (repeated, lambda model, x: chosen(model, x.sum() > 0, x)):
        forward = lambda model, x: poptorch.identity_loss(call(model, x), "sum")  # noqa: B023, E731
        message = r"poptorch\.(for_loop|cond)\(\) is only supported in inference"
        rejects(poptorch.Error, message, wrapped(weighted(forward)), torch.ones(1))


def test_dynamic_ops_are_differentiable_and_an_update_does_not_modify_its_input():
    x, src = torch.zeros(1, 4), torch.ones(1, 2)
    model = poptorch.inferenceModel(Apply(lambda *inputs: poptorch.dynamic_update(*inputs[:2], 1, inputs[2], 2)))
    assert model(x, src, torch.tensor([1])).tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert model(x, src, torch.tensor([2])).tolist() == [[0.0, 0.0, 1.0, 1.0]]
    assert not x.any()
    x, src = torch.ones(4, requires_grad=True), torch.ones(2, requires_grad=True)
    updated = poptorch.dynamic_update(x, src, -1, torch.tensor(1), 2)
    poptorch.dynamic_slice(updated, 0, torch.tensor(2), 2, 1).sum().backward()
    assert (x.grad.tolist(), src.grad.tolist()) == ([0.0, 0.0, 0.0, 1.0], [0.0, 1.0])


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 3))
def test_dynamic_slice_equals_python_slice(data, length, step):
    start = data.draw(st.integers(0, length - 1))
    size = data.draw(st.integers(1, length - start))
    x = torch.arange(float(length))
    assert torch.equal(poptorch.dynamic_slice(x, 0, torch.tensor(start), size, step), x[start : start + size : step])


def sliced(start, size=2, step=1):
    return lambda x: poptorch.dynamic_slice(x, 0, start, size, step)


def updated(change, start=0, size=2):
    return lambda x: poptorch.dynamic_update(x, change(x), 0, torch.tensor(start), size)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: poptorch.dynamic_slice([1], 0, 0, 1, 1), "`tensor` must be a tensor"),
        (lambda x: poptorch.dynamic_slice(x, 1, torch.tensor(0), 1, 1), "the tensor has 1 dimensions"),
        (sliced(0, 1), "`start` must be a tensor"),
        (sliced(torch.tensor(3)), r"slice \[3 : 5\] exceeds dimension 0, which has 4"),
        (sliced(torch.tensor(-1)), r"slice \[-1 : 1\]"),
        (sliced(torch.tensor(1.0)), "`start` must be one integer, not float32"),
        (sliced(torch.tensor([1, 2])), r"`start` must be one integer, not int32 \[2\]"),
        (sliced(0, torch.tensor(2)), "`size` must be a constant int"),
        (sliced(torch.tensor(0), 0), "start and end of a slice must be different"),
        (sliced(torch.tensor(0), -1), "end less than the start is not supported"),
        (sliced(torch.tensor(0), 2, 0), "`step` must be a constant int of at least 1"),
        (updated(lambda x: x), r"`src` is float32 \[4\], but the slice .* float32 \[2\]"),
        (updated(lambda x: x[:2].to(torch.int64)), r"must have same dtype. \(torch.float32 vs torch.int32\)"),
        (updated(lambda x: x[None]), r"same dimensionality. \(1\) vs \(2\)"),
        (updated(lambda x: x, 1, 4), r"slice \[1 : 5\]"),
    ],
)
def test_dynamic_ops_reject_invalid_arguments(call, message):
    with pytest.raises(poptorch.Error, match=message) as error:
        call(torch.ones(4))
    assert isinstance(error.value, ValueError)


def test_a_slice_is_evaluated_in_every_call_whatever_its_start_is_at_the_compilation():
    model = poptorch.inferenceModel(weighted(chosen), options(replicas=2))
    x = torch.tensor([3.0, 5.0])
    assert model(torch.tensor([True, False]), x).tolist() == [6.0, 4.0]
    assert model(torch.tensor([False, True]), x).tolist() == [2.0, 10.0]
    model = Apply(lambda x, start: poptorch.dynamic_slice(x, 1, start, 3, 2))
    model, x = poptorch.inferenceModel(model, options(replicas=2)), torch.arange(12.0).reshape(2, 6)
    assert model(x, torch.tensor([0, 3])).tolist() == [[0.0, 2.0], [9.0, 11.0]]
    assert model(x, torch.tensor([2, 1])).tolist() == [[2.0, 4.0], [7.0, 9.0]]
    model = poptorch.inferenceModel(Apply(lambda x, start: poptorch.dynamic_slice(x, 0, start, 2, 1)))
    model.compile(torch.zeros(4), torch.tensor([20]))
    assert model(torch.arange(4.0), torch.tensor([1])).tolist() == [1, 2]
    rejects(poptorch.Error, "exceeds dimension 0", lambda: model(torch.arange(4.0), torch.tensor([3])))
    uneven = poptorch.inferenceModel(Apply(lambda x, start: poptorch.dynamic_slice(x, 0, start, 3, 1)))
    with pytest.raises(poptorch.Error, match=r"slice \(3\) must be a factor of the slicing dimension \(4\)"):
        uneven.compile(torch.zeros(4), torch.tensor([0]))


def plain(model: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(model.linear(model.left(x) + model.right(x))) * model.scales[0]
    y = torch.cat([y[:, :, :2], y[:, :, 2:6] * 2, y[:, :, 6:]], 2)
    return poptorch.identity_loss((y @ model.head).square(), "mean")


def with_ops(model: Any, x: torch.Tensor) -> torch.Tensor:
    with poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Serial):
        y = poptorch.nop(model.left(x)) + model.right(x)
    with poptorch.NameScope("linear"):
        y = poptorch.recomputationCheckpoint(torch.tanh(model.linear(y))) * model.scales[0]
    start = torch.tensor(2)
    y = poptorch.dynamic_update(y, poptorch.dynamic_slice(y, 2, start, 4, 1) * 2, 2, start, 4)
    product = poptorch.serializedMatMul(y, model.head, poptorch.MatMulSerializationMode.ReducingDim, 4)
    return poptorch.identity_loss(poptorch.set_available_memory(product, 0.3).square(), "mean")


def layered(forward: Any) -> Any:
    left, right = (nn.Conv1d(1, 2, 3, padding=1) for _ in range(2))
    scales, head = nn.Parameter(torch.tensor([1.5, 0.5])), nn.Parameter(torch.randn(8, 4))
    return Apply(forward, left=left, right=right, linear=nn.Linear(8, 8), scales=scales, head=head)


@pytest.mark.parametrize(("replicas", "accumulation", "iterations"), [(1, 1, 1), (2, 2, 2), (4, 1, 1)])
def test_training_with_several_ops_has_the_bits_of_plain_torch(replicas, accumulation, iterations):
    samples = 2 * replicas * accumulation * iterations
    x = torch.randn(samples, 1, 8, generator=torch.Generator().manual_seed(1))
    results = []
    for forward in (plain, with_ops):
        model = seeded(layered, forward=forward)
        training = wrapped(model, options(replicas, accumulation, iterations), momentum=0.9)
        results.append([*(training(x) for _ in range(3)), *(each.detach().clone() for each in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results))
