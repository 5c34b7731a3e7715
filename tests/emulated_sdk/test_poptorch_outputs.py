"""Inputs and outputs of a call: layout of the combined batch, modes, dtypes, structures, `registerCustomArgParser`."""

from __future__ import annotations

import collections
import io
import warnings

import numpy
import poptorch
import pytest
import torch
from poptorch import pytree
from torch import nn

from tests.support.poptorch_models import Apply, Echo, Line, on_device, options, wrapped
from tests.support.refused import rejects

Pair = collections.namedtuple("Pair", ["first", "second"])
ONE = torch.ones(1)
EveryN = poptorch.OutputMode.EveryN


def with_signature(forward):
    model = torch.nn.Module()
    model.forward = forward
    return poptorch.inferenceModel(model, options())


def same(x):
    return x


def test_outputs_are_the_final_all_or_every_nth_and_a_period_divides_the_call_in_strict_mode(monkeypatch, caplog):
    training = poptorch.trainingModel(Echo(), options(iterations=3))
    assert training(torch.arange(3.0))[0].tolist() == [2]
    for arguments, expected in (((), [*range(10)]), ((EveryN, 5), [4, 9])):
        opts = options(iterations=10)
        opts = opts.outputMode(*arguments) if arguments else opts
        assert on_device(same, torch.arange(10.0), opts=opts).tolist() == expected
    with pytest.raises(poptorch.Error, match="every 3 device iterations"):
        on_device(same, torch.zeros(2), opts=options(iterations=2).outputMode(EveryN, 3))
    call = lambda: on_device(same, torch.arange(3.0), opts=options(iterations=3).outputMode(EveryN, 2))  # noqa: E731
    assert call().tolist() == [1.0]
    assert "The period 2 of OutputMode.EveryN is no factor of the 3 device iterations" in caplog.text
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    rejects(poptorch.Error, "no factor", call)


@pytest.mark.parametrize(("accumulation", "iterations"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(("mode", "later"), [("Sum", (3, 1)), ("Sum", (1,)), ("All", (1, 3))])
def test_outputs_whose_shapes_differ_between_micro_batches_are_an_error_and_change_nothing(
    accumulation, iterations, mode, later
):
    shapes = []
    model = Line()
    model.forward = lambda x: (torch.ones(shapes.pop(0) if shapes else (1, 1)), Line.forward(model, x))
    opts = options(accumulation=accumulation, iterations=iterations).outputMode(poptorch.OutputMode[mode])
    training = wrapped(model, opts)
    training(torch.ones(2))
    weight, state = model.weight.item(), training.rng_state
    shapes += [(1, 1), later]
    rejects(poptorch.Error, "^Output number 0 has micro-batches of different shapes", training, torch.ones(2))
    assert (model.weight.item(), training.rng_state) == (weight, state)


@pytest.mark.parametrize("given", ["int64", "int32", "float64", "bfloat16", "float16", "uint8", "bool"])
def test_dtypes_at_the_api(given):
    narrowed = {"int64": "int32", "float64": "float32", "bfloat16": "float32"}
    result = on_device(same, torch.ones(4).to(getattr(torch, given)))
    assert (result.dtype, result.tolist()) == (getattr(torch, narrowed.get(given, given)), [1, 1, 1, 1])


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
    assert (constant, list(mapping), mapping["a"][1][0].tolist()) == (3, ["a", "b"], [2, 2])
    assert isinstance(mapping["b"], Pair)
    assert mapping["b"].first.tolist() == [3, 3]
    assert mapping["b"].second is None
    assert type(record) is Record
    assert record["x"].tolist() == [1, 1]


@pytest.mark.parametrize("other", [numpy.ones(3), numpy.ones((2, 2)), None])
def test_an_array_of_another_shape_is_another_constant(other):
    model = with_signature(lambda x, constant: x + float(numpy.sum(constant)))
    for _ in range(2):
        assert model(torch.zeros(2), numpy.ones(2)).tolist() == [2, 2]
    rejects(poptorch.Error, "mismatch for constant", model, torch.zeros(2), other)


def test_keyword_and_dictionary_arguments_may_be_in_any_order_and_must_be_complete():
    model = poptorch.inferenceModel(Apply(lambda x, y=None, *, factor=2: x * y * factor), options())
    assert model(torch.ones(2), y=torch.full((2,), 3.0), factor=5).tolist() == [15, 15]
    rejects(poptorch.Error, "Missing arguments: factor, y", model, torch.ones(2))
    function = Apply(lambda d, **named: (d["x"] - d["inner"][0]["y"]) * named["a"] - named["b"])
    model = poptorch.inferenceModel(function, options())
    x, y, a, b = (torch.tensor([value]) for value in (7.0, 4.0, 2.0, 1.0))
    for _ in range(2):
        assert model({"x": x, "inner": [{"y": y, "z": x}]}, a=a, b=b).item() == 5
        assert model({"inner": [{"z": x, "y": y}], "x": x}, b=b, a=a).item() == 5
    model = with_signature(lambda a, *more: a + sum(more))
    rejects(poptorch.Error, "Mandatory parameter a missing", model)
    rejects(AssertionError, "unexpected keyword argument 'other'", model, ONE, other=ONE)
    assert model(*[ONE] * 3).item() == 3
    rejects(poptorch.Error, "positional arguments mismatch: expected 3 arguments but got 2", model, *[ONE] * 2)


TWO, FOUR = {"x": ONE, "y": ONE}, torch.ones(4)


@pytest.mark.parametrize(
    ("compiled", "other", "message"),
    [
        (TWO, {"x": ONE}, "Keys mismatch for x: Missing arguments: y"),
        (TWO, {**TWO, "z": ONE}, "Keys mismatch for x: Unexpected arguments: z"),
        (TWO, {"x": ONE, "y": torch.ones(2)}, r"Shape mismatch for x\[y\]: expected torch.Size\(\[1\]\)"),
        (TWO, {"x": ONE, "y": (ONE,)}, r"Type mismatch for x\[y\]: expected"),
        (FOUR, torch.ones(3), "Shape mismatch for x: expected torch"),
        (FOUR, torch.ones(4, 1), "Shape mismatch for x: expected torch"),
        (FOUR, FOUR.int(), "Data type mismatch for x: expected torch"),
        (FOUR, [FOUR], "Type mismatch for x: expected"),
        (FOUR, None, "Type mismatch for x: expected"),
        (FOUR, FOUR.to_sparse(), "Tensor 0 of the arguments is sparse"),
        (FOUR.long(), FOUR.int(), "type mismatch for x: expected torch.int64 but got torch.int32"),
    ],
)
def test_shapes_dtypes_and_keys_are_fixed_by_compiling(compiled, other, message):
    model = with_signature(lambda x: x["x"] + x["y"] if isinstance(x, dict) else x)
    result = model(compiled)
    rejects(poptorch.Error, message, model, other)
    assert torch.equal(model(compiled), result)


def test_inputs_must_divide_into_micro_batches_and_input_groups_need_one_device_iteration():
    rejects(AssertionError, "Invalid batch dimension", on_device, same, torch.ones(3), opts=options(replicas=2))
    assert on_device(lambda x: x + 1, torch.tensor(1.0)).item() == 2
    rejects(AssertionError, "1 samples", on_device, same, torch.tensor(1.0), opts=options(iterations=2))
    with pytest.raises(poptorch.Error, match=r"Zero-sized tensors are unsupported \(Got shape \[2, 0\]\)"):
        on_device(same, torch.zeros(2, 0))
    with pytest.raises(poptorch.Error, match="tensor 0 of the arguments is complex"):
        on_device(same, torch.zeros(2, dtype=torch.complex64))
    opts = options(4, iterations=2).inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    rejects(poptorch.Error, "1 device iteration", on_device, same, torch.zeros(4), opts=opts)


def test_outputs_have_no_gradient_share_no_memory_and_can_be_saved():
    x = torch.ones(2)
    first, second = on_device(lambda x: (x, x), x)
    rejects(poptorch.Error, "backward", first.backward)
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
    rejects(poptorch.Error, "CPU inside forward", on_device, leave, ONE)
    assert on_device(lambda x: (x, poptorch.isRunningOnIpu()), ONE)[1] is True
    assert not poptorch.isRunningOnIpu()


def test_labels_may_be_int32_and_floating_point_exceptions_are_raised_when_enabled():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    losses = [on_device(torch.nn.functional.cross_entropy, logits, each) for each in (labels, labels.int())]
    assert torch.equal(*losses)
    opts = options()
    opts.Precision.enableFloatingPointExceptions(True)
    rejects(poptorch.Error, "NaN or infinity", on_device, lambda x: x / 0, ONE, opts=opts)


class Couple:
    def __init__(self, first, second, name="pair"):
        self.first, self.second, self.name = first, second, name


class NamedCouple(Couple):
    pass


class CoupleParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.first
        yield struct.second

    def reconstruct(self, original_structure, tensor_iterator):
        return type(original_structure)(next(tensor_iterator), next(tensor_iterator), original_structure.name)


@pytest.fixture
def _register_couples(monkeypatch):
    monkeypatch.setattr(pytree, "_parsers", {})
    poptorch.registerCustomArgParser(Couple, CoupleParser())


class Swap(nn.Module):
    def forward(self, pair, scale=1):
        return type(pair)(pair.second * scale, pair.first * scale, pair.name)


@pytest.mark.usefixtures("_register_couples")
@pytest.mark.parametrize("kind", [Couple, NamedCouple])
def test_a_registered_type_can_be_argument_and_output(kind):
    swapped = poptorch.inferenceModel(Swap(), options(2))(kind(torch.arange(4.0), torch.ones(2), "mine"), scale=2)
    assert type(swapped) is kind
    assert (swapped.first.tolist(), swapped.second.tolist(), swapped.name) == ([2, 2], [0, 2, 4, 6], "mine")


@pytest.mark.usefixtures("_register_couples")
def test_registered_types_can_be_nested_and_later_calls_use_their_own_tensors():
    def nest(nested):
        return {"sum": nested["pairs"][0].first + nested["pairs"][1].second}, nested["pairs"][0]

    one = {"pairs": [Couple(torch.ones(1), torch.zeros(1)), Couple(torch.zeros(1), torch.ones(1))]}
    total, pair = on_device(nest, one)
    assert (total["sum"].item(), pair.second.item()) == (2, 0)
    model = poptorch.inferenceModel(Swap(), options())
    model(Couple(torch.ones(1), torch.ones(1)))
    assert model(Couple(torch.ones(1), 5 * torch.ones(1))).first.item() == 5
    rejects(poptorch.Error, r"Shape mismatch for pair\[1\]", lambda: model(Couple(torch.ones(1), torch.ones(2))))


def test_registering_needs_a_type_and_a_parser_which_an_object_with_tensors_needs():
    for wrong in ((3, CoupleParser()), (Couple, CoupleParser)):
        rejects(poptorch.Error, "registerCustomArgParser|ICustomArgParser", poptorch.registerCustomArgParser, *wrong)
    with pytest.raises(poptorch.Error, match=r"registerCustomArgParser\(Couple"):
        poptorch.inferenceModel(Swap(), options())(Couple(torch.ones(1), torch.ones(1)))


class Weighted(nn.Module):
    def forward(self, x, weights, bias=None):
        return x * float(weights[0]) if bias is None else x + bias


class _Incomparable:
    def __init__(self, items):
        self.items = items

    def __getitem__(self, index):
        return self.items[index]

    def __eq__(self, other):
        raise TypeError("not comparable")

    __hash__ = None


def test_array_constants_are_compared_item_by_item_and_one_that_cannot_be_compared_equals_itself():
    first, same, other = (torch.tensor(items).numpy() for items in ([2.0, 3.0], [2.0, 3.0], [4.0, 3.0]))
    incomparable = _Incomparable([2.0])
    for given, equal, unequal in ((first, same, other), (incomparable, incomparable, _Incomparable([2.0]))):
        model = poptorch.inferenceModel(Weighted(), options())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [model(torch.ones(1), each).item() for each in (given, equal)] == [2, 2]
        rejects(poptorch.Error, "Value mismatch for weights", model, torch.ones(1), unequal)


def test_constant_arguments_and_none_are_fixed_by_compiling():
    model = with_signature(lambda x, factor: x * factor)
    assert model(ONE, 2).tolist() == [2]
    for other, what in ((3, "Value"), (2.0, "Type"), (None, "Type")):
        rejects(poptorch.Error, f"{what} mismatch for factor: expected .* but got .*", model, ONE, other)
    model.destroy()
    assert model(ONE, 3).tolist() == [3]
    model = poptorch.inferenceModel(Weighted(), options())
    assert model(torch.ones(1), (3,), bias=None).item() == 3
    assert model(x=torch.ones(1), weights=(3,)).item() == 3
    message = "Type mismatch for bias: expected <class 'NoneType'> but got <class 'torch.Tensor'>"
    rejects(poptorch.Error, message, model, torch.ones(1), (3,), torch.ones(1))
