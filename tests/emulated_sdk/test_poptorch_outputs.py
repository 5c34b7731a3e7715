"""Inputs and outputs of a call: layout of the combined batch, output modes, dtypes and structures."""

from __future__ import annotations

import collections
import io

import numpy
import poptorch
import pytest
import torch
from poptorch_models import Echo, options
from torch import nn

Pair = collections.namedtuple("Pair", ["first", "second"])
All, Final, Sum, EveryN = (
    poptorch.OutputMode.All,
    poptorch.OutputMode.Final,
    poptorch.OutputMode.Sum,
    poptorch.OutputMode.EveryN,
)


class Apply(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def on_device(function, *args, opts=None, **kwargs):
    return poptorch.inferenceModel(Apply(function), opts or options())(*args, **kwargs)


@pytest.mark.parametrize(
    ("mode", "period", "expected"),
    [
        (All, None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Final, None, [6, 7]),
        (Sum, None, [0 + 2 + 4 + 6, 1 + 3 + 5 + 7]),
        (EveryN, 2, [4, 5, 6, 7]),
    ],
)
def test_the_order_of_outputs_in_each_mode(mode, period, expected):
    opts = options(replicas=2, accumulation=2, iterations=2).outputMode(mode, period)
    values, _ = poptorch.trainingModel(Echo(), opts)(torch.arange(8.0))
    assert values.tolist() == expected


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("iterations", [1, 4])
@pytest.mark.parametrize("mode", [All, Final, Sum, EveryN])
def test_the_size_of_dimension_0_in_each_mode(mode, iterations, accumulation, replicas):
    count = replicas * accumulation * iterations
    period = 2 if mode == EveryN and iterations > 1 else 1
    multiplier = {All: count, Final: replicas, Sum: replicas, EveryN: count // period}[mode]
    opts = options(replicas, accumulation, iterations).outputMode(mode, period)
    values, loss = poptorch.trainingModel(Echo(), opts)(torch.ones(count * 3, 2))
    assert values.shape == (3 * multiplier, 2)
    assert loss.shape == (() if multiplier == 1 else (multiplier,))


def test_training_returns_the_final_micro_batch_and_inference_all_by_default():
    training = poptorch.trainingModel(Echo(), options(iterations=3))
    inference = poptorch.inferenceModel(Echo(), options(iterations=3))
    assert training(torch.arange(3.0))[0].tolist() == [2]
    assert inference(torch.arange(3.0))[0].tolist() == [0, 1, 2]


def test_every_n_returns_every_fifth_of_ten_iterations():
    opts = options(iterations=10).outputMode(EveryN, 5)
    assert on_device(lambda x: x, torch.arange(10.0), opts=opts).tolist() == [4, 9]


def test_a_period_longer_than_the_call_is_rejected():
    with pytest.raises(poptorch.Error, match="every 3 device iterations"):
        on_device(lambda x: x, torch.zeros(2), opts=options(iterations=2).outputMode(EveryN, 3))


def test_a_period_that_does_not_divide_the_call_is_rejected_in_strict_mode(monkeypatch, caplog):
    call = lambda: on_device(lambda x: x, torch.arange(3.0), opts=options(iterations=3).outputMode(EveryN, 2))  # noqa: E731
    assert call().tolist() == [1.0]
    assert "The period 2 of OutputMode.EveryN is no factor of the 3 device iterations" in caplog.text
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    with pytest.raises(poptorch.Error, match="no factor"):
        call()


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (torch.int64, torch.int32),
        (torch.int32, torch.int32),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.uint8, torch.uint8),
        (torch.bool, torch.bool),
    ],
)
def test_dtypes_at_the_api(given, returned):
    result = on_device(lambda x: x, torch.ones(4).to(given))
    assert result.dtype == returned
    assert result.tolist() == [1, 1, 1, 1]


def test_int32_and_int64_labels_give_the_same_loss():
    def loss(logits, labels):
        return torch.nn.functional.cross_entropy(logits, labels)

    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    assert torch.equal(on_device(loss, logits, labels), on_device(loss, logits, labels.int()))


def test_nested_structures_are_returned_as_they_were():
    def nest(x, pair, mapping):
        return {"a": (x, [pair.second]), "b": Pair(mapping["k"], None)}, 3

    x = torch.ones(2)
    result = on_device(nest, x, Pair(x, x * 2), collections.OrderedDict(k=x * 3))
    mapping, constant = result
    assert constant == 3
    assert list(mapping) == ["a", "b"]
    assert mapping["a"][1][0].tolist() == [2, 2]
    assert isinstance(mapping["b"], Pair)
    assert mapping["b"].first.tolist() == [3, 3]
    assert mapping["b"].second is None


def test_a_subclass_of_dict_is_returned():
    class Record(dict):
        def update(self, *args, **kwargs):
            raise TypeError("not this way")

    def record(x):
        result = Record()
        result["x"] = x
        return result

    result = on_device(record, torch.ones(1))
    assert type(result) is Record
    assert result["x"].item() == 1


def with_signature(forward):
    """Return an executor of a module whose `forward` is this function."""
    model = Apply(forward)
    model.forward = forward
    return poptorch.inferenceModel(model, options())


def test_keyword_and_default_arguments():
    def forward(x, y=None, *, factor=2):
        return x * factor if y is None else x * y * factor

    model = poptorch.inferenceModel(Apply(forward), options())
    assert model(torch.ones(2), y=torch.full((2,), 3.0), factor=5).tolist() == [15, 15]
    with pytest.raises(poptorch.Error, match="Missing arguments: factor, y"):
        model(torch.ones(2))


@pytest.mark.parametrize("other", [numpy.ones(3), numpy.ones((2, 2)), None])
def test_an_array_of_another_shape_is_another_constant(other):
    class Sum(nn.Module):
        def forward(self, x, constant):
            return x + float(numpy.sum(constant))

    model = poptorch.inferenceModel(Sum(), options())
    assert model(torch.zeros(2), numpy.ones(2)).tolist() == [2, 2]
    assert model(torch.zeros(2), numpy.ones(2)).tolist() == [2, 2]
    with pytest.raises(poptorch.Error, match="mismatch for constant"):
        model(torch.zeros(2), other)


def test_constant_arguments_are_fixed_by_compiling():
    model = with_signature(lambda x, factor: x * factor)
    assert model(torch.ones(1), 2).tolist() == [2]
    for other, what in ((3, "Value"), (2.0, "Type"), (None, "Type")):
        with pytest.raises(poptorch.Error, match=f"{what} mismatch for factor: expected .* but got .*"):
            model(torch.ones(1), other)
    model.destroy()
    assert model(torch.ones(1), 3).tolist() == [3]


def test_a_dictionary_argument_may_have_its_keys_in_any_order():
    model = poptorch.inferenceModel(
        Apply(lambda d, **named: (d["x"] - d["inner"][0]["y"]) * named["a"] - named["b"]), options()
    )
    x, y, a, b = (torch.tensor([value]) for value in (7.0, 4.0, 2.0, 1.0))
    for _ in range(2):
        assert model({"x": x, "inner": [{"y": y, "z": x}]}, a=a, b=b).item() == 5
        assert model({"inner": [{"z": x, "y": y}], "x": x}, b=b, a=a).item() == 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.ones(1)}, "Keys mismatch for d: Missing arguments: y"),
        ({"x": torch.ones(1), "y": torch.ones(1), "z": torch.ones(1)}, "Keys mismatch for d: Unexpected arguments: z"),
        ({"x": torch.ones(1), "y": torch.ones(2)}, r"Shape mismatch for d\[y\]: expected torch.Size\(\[1\]\)"),
        ({"x": torch.ones(1), "y": (torch.ones(1),)}, r"Type mismatch for d\[y\]: expected"),
    ],
)
def test_another_dictionary_than_the_compiled_one_is_named(changed, message):
    model = with_signature(lambda d: d["x"] + d["y"])
    model({"x": torch.ones(1), "y": torch.ones(1)})
    with pytest.raises(poptorch.Error, match=message):
        model(changed)


def test_wrong_numbers_of_arguments():
    model = with_signature(lambda a, *more: a + sum(more))
    with pytest.raises(poptorch.Error, match="Mandatory parameter a missing"):
        model()
    with pytest.raises(AssertionError, match="unexpected keyword argument 'other'"):
        model(torch.ones(1), other=torch.ones(1))
    assert model(*[torch.ones(1)] * 3).item() == 3
    with pytest.raises(poptorch.Error, match="positional arguments mismatch: expected 3 arguments but got 2"):
        model(*[torch.ones(1)] * 2)


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(4, 1), torch.ones(4, dtype=torch.int32)])
def test_shapes_and_dtypes_are_fixed_by_compiling(other):
    model = with_signature(lambda x: x)
    model(torch.ones(4))
    with pytest.raises(poptorch.Error, match="(Shape|Data type) mismatch for x: expected torch"):
        model(other)


def test_a_batch_dimension_that_does_not_divide_is_rejected():
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        on_device(lambda x: x, torch.ones(3), opts=options(replicas=2))


def test_a_scalar_input_needs_a_single_micro_batch():
    assert on_device(lambda x: x + 1, torch.tensor(1.0)).item() == 2
    with pytest.raises(AssertionError, match="1 samples"):
        on_device(lambda x: x, torch.tensor(1.0), opts=options(iterations=2))


@pytest.mark.parametrize(("kind", "expected"), [("Consecutive", [0, 0, 1, 1]), ("Orthogonal", [0, 1, 0, 1])])
def test_input_groups_share_their_input(kind, expected):
    opts = options(replicas=4).inputReplicaGrouping(2, poptorch.CommGroupType[kind])
    assert on_device(lambda x: x, torch.arange(2.0), opts=opts).tolist() == expected


def test_input_groups_with_several_iterations_are_rejected():
    opts = options(replicas=2, iterations=2).inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    with pytest.raises(poptorch.Error, match="1 device iteration"):
        on_device(lambda x: x, torch.zeros(4), opts=opts)


def test_outputs_reject_backward_and_can_be_saved():
    result = on_device(lambda x: x, torch.ones(2))
    with pytest.raises(poptorch.Error, match="backward"):
        result.backward()
    file = io.BytesIO()
    torch.save(result, file)
    file.seek(0)
    assert torch.equal(torch.load(file), result)


def test_inputs_that_require_a_gradient_are_detached_with_a_warning():
    model = poptorch.inferenceModel(Apply(lambda x: x * 2), options())
    with pytest.warns(UserWarning, match="detached"):
        assert not model(torch.ones(2, requires_grad=True)).requires_grad


def test_an_output_shares_no_memory_with_inputs_and_other_outputs():
    x = torch.ones(2)
    first, second = on_device(lambda x: (x, x), x)
    first.zero_()
    assert x.tolist() == second.tolist() == [1, 1]


def test_is_running_on_ipu_inside_forward():
    assert on_device(lambda x: (x, poptorch.isRunningOnIpu()), torch.ones(1))[1] is True
    assert not poptorch.isRunningOnIpu()


@pytest.mark.parametrize("leave", [lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: x.to(device="cpu")])
def test_a_tensor_cannot_be_moved_to_the_cpu_inside_forward(leave):
    with pytest.raises(poptorch.Error, match="CPU inside forward"):
        on_device(leave, torch.ones(1))


def test_floating_point_exceptions_are_raised_when_enabled():
    opts = options()
    opts.Precision.enableFloatingPointExceptions(True)
    with pytest.raises(poptorch.Error, match="NaN or infinity"):
        on_device(lambda x: x / 0, torch.ones(1), opts=opts)


def test_int64_and_int32_are_two_data_types_of_an_argument():
    model = with_signature(lambda x: x)
    model(torch.ones(2, dtype=torch.int64))
    with pytest.raises(poptorch.Error, match="Data type mismatch for x: expected torch.int64 but got torch.int32"):
        model(torch.ones(2, dtype=torch.int32))


def test_a_tensor_without_elements_is_an_error():
    with pytest.raises(poptorch.Error, match=r"Zero-sized tensors are unsupported \(Got shape \[2, 0\]\)"):
        on_device(lambda x: x, torch.zeros(2, 0))
