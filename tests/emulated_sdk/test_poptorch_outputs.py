"""Inputs and outputs of a call: layout of the combined batch, output modes, dtypes and structures."""

from __future__ import annotations

import collections
import io

import numpy
import poptorch
import pytest
import torch

from tests.support.poptorch_models import Apply, Echo, on_device, options

Pair = collections.namedtuple("Pair", ["first", "second"])
ONE = torch.ones(1)
EveryN = poptorch.OutputMode.EveryN


def with_signature(forward):
    """Return an executor of a module whose `forward` is this function."""
    model = torch.nn.Module()
    model.forward = forward
    return poptorch.inferenceModel(model, options())


def same(x):
    return x


def test_training_returns_the_final_micro_batch_and_inference_all_or_every_nth():
    training = poptorch.trainingModel(Echo(), options(iterations=3))
    assert training(torch.arange(3.0))[0].tolist() == [2]
    for arguments, expected in (((), [*range(10)]), ((EveryN, 5), [4, 9])):
        opts = options(iterations=10)
        opts = opts.outputMode(*arguments) if arguments else opts
        assert on_device(same, torch.arange(10.0), opts=opts).tolist() == expected
    with pytest.raises(poptorch.Error, match="every 3 device iterations"):
        on_device(same, torch.zeros(2), opts=options(iterations=2).outputMode(EveryN, 3))


def test_a_period_that_does_not_divide_the_call_is_rejected_in_strict_mode(monkeypatch, caplog):
    call = lambda: on_device(same, torch.arange(3.0), opts=options(iterations=3).outputMode(EveryN, 2))  # noqa: E731
    assert call().tolist() == [1.0]
    assert "The period 2 of OutputMode.EveryN is no factor of the 3 device iterations" in caplog.text
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    with pytest.raises(poptorch.Error, match="no factor"):
        call()


@pytest.mark.parametrize("given", ["int64", "int32", "float64", "bfloat16", "float16", "uint8", "bool"])
def test_dtypes_at_the_api(given):
    narrowed = {"int64": "int32", "float64": "float32", "bfloat16": "float32"}
    result = on_device(same, torch.ones(4).to(getattr(torch, given)))
    assert result.dtype == getattr(torch, narrowed.get(given, given))
    assert result.tolist() == [1, 1, 1, 1]


def test_int32_and_int64_labels_give_the_same_loss():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    losses = [on_device(torch.nn.functional.cross_entropy, logits, each) for each in (labels, labels.int())]
    assert torch.equal(*losses)


class Record(dict):
    def update(self, *args, **kwargs):
        raise TypeError("not this way")


def test_nested_structures_are_returned_as_they_were():
    def nest(x, pair, mapping):
        record = Record()
        record["x"] = x
        return {"a": (x, [pair.second]), "b": Pair(mapping["k"], None)}, 3, record

    x = torch.ones(2)
    mapping, constant, record = on_device(nest, x, Pair(x, x * 2), collections.OrderedDict(k=x * 3))
    assert constant == 3
    assert list(mapping) == ["a", "b"]
    assert mapping["a"][1][0].tolist() == [2, 2]
    assert isinstance(mapping["b"], Pair)
    assert mapping["b"].first.tolist() == [3, 3]
    assert mapping["b"].second is None
    assert type(record) is Record
    assert record["x"].tolist() == [1, 1]


def test_keyword_and_default_arguments():
    model = poptorch.inferenceModel(Apply(lambda x, y=None, *, factor=2: x * y * factor), options())
    assert model(torch.ones(2), y=torch.full((2,), 3.0), factor=5).tolist() == [15, 15]
    with pytest.raises(poptorch.Error, match="Missing arguments: factor, y"):
        model(torch.ones(2))


@pytest.mark.parametrize("other", [numpy.ones(3), numpy.ones((2, 2)), None])
def test_an_array_of_another_shape_is_another_constant(other):
    model = with_signature(lambda x, constant: x + float(numpy.sum(constant)))
    for _ in range(2):
        assert model(torch.zeros(2), numpy.ones(2)).tolist() == [2, 2]
    with pytest.raises(poptorch.Error, match="mismatch for constant"):
        model(torch.zeros(2), other)


def test_constant_arguments_are_fixed_by_compiling():
    model = with_signature(lambda x, factor: x * factor)
    assert model(ONE, 2).tolist() == [2]
    for other, what in ((3, "Value"), (2.0, "Type"), (None, "Type")):
        with pytest.raises(poptorch.Error, match=f"{what} mismatch for factor: expected .* but got .*"):
            model(ONE, other)
    model.destroy()
    assert model(ONE, 3).tolist() == [3]


def test_a_dictionary_argument_may_have_its_keys_in_any_order():
    function = Apply(lambda d, **named: (d["x"] - d["inner"][0]["y"]) * named["a"] - named["b"])
    model = poptorch.inferenceModel(function, options())
    x, y, a, b = (torch.tensor([value]) for value in (7.0, 4.0, 2.0, 1.0))
    for _ in range(2):
        assert model({"x": x, "inner": [{"y": y, "z": x}]}, a=a, b=b).item() == 5
        assert model({"inner": [{"z": x, "y": y}], "x": x}, b=b, a=a).item() == 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": ONE}, "Keys mismatch for d: Missing arguments: y"),
        ({"x": ONE, "y": ONE, "z": ONE}, "Keys mismatch for d: Unexpected arguments: z"),
        ({"x": ONE, "y": torch.ones(2)}, r"Shape mismatch for d\[y\]: expected torch.Size\(\[1\]\)"),
        ({"x": ONE, "y": (ONE,)}, r"Type mismatch for d\[y\]: expected"),
    ],
)
def test_another_dictionary_than_the_compiled_one_is_named(changed, message):
    model = with_signature(lambda d: d["x"] + d["y"])
    model({"x": ONE, "y": ONE})
    with pytest.raises(poptorch.Error, match=message):
        model(changed)


def test_wrong_numbers_of_arguments():
    model = with_signature(lambda a, *more: a + sum(more))
    with pytest.raises(poptorch.Error, match="Mandatory parameter a missing"):
        model()
    with pytest.raises(AssertionError, match="unexpected keyword argument 'other'"):
        model(ONE, other=ONE)
    assert model(*[ONE] * 3).item() == 3
    with pytest.raises(poptorch.Error, match="positional arguments mismatch: expected 3 arguments but got 2"):
        model(*[ONE] * 2)


@pytest.mark.parametrize(
    ("compiled", "other", "message"),
    [
        (torch.ones(4), torch.ones(3), "Shape mismatch for x: expected torch"),
        (torch.ones(4), torch.ones(4, 1), "Shape mismatch for x: expected torch"),
        (torch.ones(4), torch.ones(4).int(), "Data type mismatch for x: expected torch"),
        (torch.ones(4), [torch.ones(4)], "Type mismatch for x: expected"),
        (torch.ones(4), None, "Type mismatch for x: expected"),
        (torch.ones(4).long(), torch.ones(4).int(), "type mismatch for x: expected torch.int64 but got torch.int32"),
    ],
)
def test_shapes_and_dtypes_are_fixed_by_compiling(compiled, other, message):
    model = with_signature(lambda x: x)
    model(compiled)
    with pytest.raises(poptorch.Error, match=message):
        model(other)
    assert model(compiled).tolist() == compiled.tolist()


def test_inputs_must_divide_into_micro_batches_and_have_elements():
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        on_device(same, torch.ones(3), opts=options(replicas=2))
    assert on_device(lambda x: x + 1, torch.tensor(1.0)).item() == 2
    with pytest.raises(AssertionError, match="1 samples"):
        on_device(same, torch.tensor(1.0), opts=options(iterations=2))
    with pytest.raises(poptorch.Error, match=r"Zero-sized tensors are unsupported \(Got shape \[2, 0\]\)"):
        on_device(same, torch.zeros(2, 0))


def test_input_groups_need_one_device_iteration():
    opts = options(4, iterations=2).inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    with pytest.raises(poptorch.Error, match="1 device iteration"):
        on_device(same, torch.zeros(4), opts=opts)


def test_outputs_have_no_gradient_share_no_memory_and_can_be_saved():
    x = torch.ones(2)
    first, second = on_device(lambda x: (x, x), x)
    with pytest.raises(poptorch.Error, match="backward"):
        first.backward()
    file = io.BytesIO()
    torch.save(first, file)
    file.seek(0)
    assert torch.equal(torch.load(file), first)
    first.zero_()
    assert x.tolist() == second.tolist() == [1, 1]
    with pytest.warns(UserWarning, match="detached"):
        assert not on_device(same, x.requires_grad_()).requires_grad


@pytest.mark.parametrize("leave", [lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: x.to(device="cpu")])
def test_a_tensor_cannot_be_moved_to_the_cpu_inside_forward(leave):
    with pytest.raises(poptorch.Error, match="CPU inside forward"):
        on_device(leave, ONE)
    assert on_device(lambda x: (x, poptorch.isRunningOnIpu()), ONE)[1] is True
    assert not poptorch.isRunningOnIpu()


def test_floating_point_exceptions_are_raised_when_enabled():
    opts = options()
    opts.Precision.enableFloatingPointExceptions(True)
    with pytest.raises(poptorch.Error, match="NaN or infinity"):
        on_device(lambda x: x / 0, ONE, opts=opts)
