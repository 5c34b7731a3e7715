"""Ops on the host (`CPU`, `ipu_print_tensor`), and `ctc_beam_search_decoder`, `fps`, `nearest` by slow references."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Dict, Tuple

import poptorch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from poptorch.ops.host import PrintFormat
from torch import nn

from tests.support.poptorch_models import Apply, on_device, options, wrapped
from tests.support.refused import rejects

DEFAULT_FORMAT = PrintFormat(1000, 3, 80, 4, "auto", ", ", "(", ")")
SUMMARY = {"summarise_threshold": 10}
ONE = torch.ones(1)


class Hosted(nn.Module):
    def __init__(self):
        super().__init__()
        self.host = poptorch.CPU(self.on_host, "host")
        self.calls, self.seen = 0, None

    def on_host(self, x, scale=1.0):
        self.calls += 1
        self.seen = (x.dtype, poptorch.isRunningOnIpu(), x.cpu().numpy().tolist())
        return x.cpu() * scale

    def forward(self, x):
        return self.host(x + 1, scale=3.0) * 2


def test_a_layer_runs_in_every_call_of_every_replica_and_gets_the_dtypes_of_the_api():
    model = Hosted()
    inference = poptorch.inferenceModel(model, options())
    assert (inference(torch.tensor([1.0])).tolist(), model.seen) == ([12.0], (torch.float32, False, [2.0]))
    before = model.calls
    assert (inference(torch.tensor([2.0])).tolist(), model.calls) == ([18.0], before + 1)
    assert copy.deepcopy(model).host is model.host
    inference = poptorch.inferenceModel(Hosted(), options(replicas=4))
    for _ in range(3):
        assert inference(torch.arange(4.0)).tolist() == [6.0, 12.0, 18.0, 24.0]
    model = Hosted()
    poptorch.inferenceModel(model, options())(torch.tensor([1, 2]))
    assert model.seen[0] == torch.int32
    half, full = (poptorch.inferenceModel(model, options()) for _ in range(2))
    for _ in range(2):
        output = half(ONE.half())
        assert (model.seen[0], output.dtype, output.item()) == (torch.half, torch.half, 12.0)
        full(ONE)
        assert model.seen[0] == torch.float32


@pytest.mark.parametrize("kind", [tuple, list])
def test_nested_arguments_and_results(kind):
    host = poptorch.CPU(lambda pair, scale: {"found": kind(((pair[0] + pair[1]) * scale, pair[0].argmax()))}, "nested")

    def forward(x):
        found = host([x, x + 1], scale=2)["found"]
        assert type(found) is kind
        return found[0] + found[1]

    assert on_device(forward, torch.tensor([1.0, 5.0])).tolist() == [7.0, 23.0]


def test_execute_reads_inputs_and_a_layer_uses_the_weights_of_the_host():
    host = poptorch.CPU(lambda x: x + 1, "increment")
    on_device(lambda x: host(x), ONE)
    host.registerPersistentData()
    place = host.outputs[0]
    host.inputs[0].fill_(5.0)
    host.execute()
    assert place.item() == 6.0
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    model = Apply(lambda self, x: self.host(x), layer=layer, host=poptorch.CPU(layer, "linear"))
    inference = poptorch.inferenceModel(model, options())
    for _ in range(2):
        assert torch.equal(inference(x), layer(x))
        layer.weight.data.zero_()


def test_a_layer_is_differentiable_on_the_host_and_raises_error_for_a_gradient_on_the_device():
    x = torch.ones(2, requires_grad=True)
    poptorch.CPU(lambda y: (y * 3).sum(), "sum")(x).backward()
    assert x.grad.tolist() == [3.0, 3.0]
    host = poptorch.CPU(lambda x: x * 2, "double")

    def training_of(product):
        def forward(self, x):
            return poptorch.identity_loss(product(x, self.weight), "sum")

        return wrapped(Apply(forward, weight=nn.Parameter(ONE.clone())), lr=0.25)

    rejects(poptorch.Error, "'double': no gradient flows", lambda: training_of(lambda x, weight: host(x * weight))(ONE))
    training = training_of(lambda x, weight: host(x) * weight)
    assert (training(ONE), training.model.weight.item()) == (2.0, 0.5)


def printing(print_gradient=True):
    def forward(line, x):
        x = poptorch.ipu_print_tensor(x * line.weight, "x", print_gradient)
        return poptorch.identity_loss(line.weight * x, "mean")

    return Apply(forward, weight=nn.Parameter(torch.ones(())))


@pytest.mark.parametrize(("print_gradient", "second"), [(True, "x_gradient: (0.5000, 0.5000)\n"), (False, "")])
def test_every_run_prints_value_and_gradient_but_compilation_and_the_host_print_nothing(capsys, print_gradient, second):
    training = poptorch.trainingModel(printing(print_gradient), options())
    training.compile(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    poptorch.ipu_print_tensor(x).sum().backward()
    assert (x.grad.tolist(), capsys.readouterr().err) == ([1.0, 1.0], "")
    training(torch.ones(2))
    assert capsys.readouterr().err == "x: (1.0000, 1.0000)\n" + second
    poptorch.inferenceModel(printing(), options(replicas=2, iterations=2))(torch.arange(4.0))
    assert sorted(capsys.readouterr().err.splitlines()) == [f"x: ({value}.0000)" for value in range(4)]


@pytest.mark.parametrize(
    ("tensor", "settings", "text"),
    [
        (torch.tensor(1.5), {}, "1.5000"),
        (torch.tensor([[1, -20], [3, 4]]), {}, "((  1, -20),\n (  3,   4))"),
        (torch.tensor([True, False]), {}, "(1, 0)"),
        (torch.zeros(0), {}, "()"),
        (torch.tensor([0.5, float("nan"), float("inf")]), {"digits": 1}, "(0.5, nan, inf)"),
        (torch.tensor([1e-6, 1.0]), {"digits": 1}, "(1.0e-06, 1.0e+00)"),
        (torch.tensor([1e-6, 1.0]), {"digits": 1, "float_format": "fixed"}, "(0.0, 1.0)"),
        (torch.tensor([2.0]), {"digits": 2, "float_format": "scientific"}, "(2.00e+00)"),
        (torch.tensor([0.5]), {"float_format": "none"}, "(0.5)"),
        (torch.arange(9), {"summarise_threshold": 8, "edge_items": 2}, "(0, 1, ..., 7, 8)"),
        (torch.arange(5), {"max_line_width": 8}, "(0, 1,\n 2, 3,\n 4)"),
        (torch.arange(50), {"max_line_width": 0}, f"({', '.join(f'{number:2}' for number in range(50))})"),
        (torch.arange(3), {"summarise_threshold": 0, "edge_items": 1}, "(0, 1, 2)"),
        (torch.arange(2), {"separator": " ", "open_bracket": "[", "close_bracket": "]"}, "[0 1]"),
        (torch.arange(16).reshape(4, 4), {**SUMMARY, "edge_items": 1}, "(( 0, ...,  3),\n ...,\n (12, ..., 15))"),
    ],
)
def test_print_format(tensor, settings, text):
    assert DEFAULT_FORMAT._replace(**settings).text(tensor) == text


def test_a_layer_is_callable_and_returns_tensors_and_its_error_restores_the_host_mode():
    def fail(x):
        raise RuntimeError("no such host")

    nothing = "'none': the layer returned None, but no tensor"
    rejects(poptorch.Error, nothing, on_device, poptorch.CPU(lambda x: None, "none"), ONE)
    rejects(ValueError, "`layer_to_call` must be a function, not int", poptorch.CPU, 3, "three")
    rejects(RuntimeError, "no such host", on_device, poptorch.CPU(fail, "fail"), ONE)
    assert not poptorch.isRunningOnIpu()
    assert torch.ones(1, dtype=torch.float64).dtype == torch.float64
    wrong = {"float_format": "hex", "digits": -1, "edge_items": 1.5, "separator": 1, "max_line_width": "a"}
    for name, value in wrong.items():
        rejects(ValueError, name, poptorch.ipu_print_tensor, ONE, **{name: value})


BLANK = 1


def log_probs(steps: int, batch: int, classes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, batch, classes, generator=generator).log_softmax(-1)


def all_sequences(sample: torch.Tensor, blank: int) -> Dict[Tuple[int, ...], float]:
    """Return the log-probability of every label sequence: the sum over the alignments that collapse to it."""
    found: Dict[Tuple[int, ...], float] = {}
    for alignment in itertools.product(range(sample.shape[1]), repeat=sample.shape[0]):
        labels = tuple(label for label, _ in itertools.groupby(alignment) if label != blank)
        score = sum(float(sample[step, label]) for step, label in enumerate(alignment))
        found[labels] = math.log(math.exp(found.get(labels, -math.inf)) + math.exp(score))
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(2, 3), st.integers(0, 1000), st.integers(0, 1))
def test_wide_beam_finds_the_best_sequences(steps, classes, seed, blank):
    probs, top = log_probs(steps, 1, classes, seed), 3
    scores, lengths, labels = poptorch.ctc_beam_search_decoder(probs, torch.tensor([steps]), blank, 200, top)
    reference = all_sequences(probs[:, 0], blank)
    best = sorted(reference.values(), reverse=True)[:top]
    for rank, expected in enumerate(best):
        path = tuple(labels[0, rank, : lengths[0, rank]].tolist())
        assert scores[0, rank].item() == pytest.approx(expected, abs=1e-4)
        assert reference[path] == pytest.approx(expected, abs=1e-4)


def decoded(probs: torch.Tensor, lengths: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    # The inputs of a model have the batch in dimension 0.
    return poptorch.ctc_beam_search_decoder(probs.transpose(0, 1), lengths, BLANK, 8, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_model_returns_the_same_as_the_host(dtype):
    probs, lengths = log_probs(6, 4, 3).to(dtype), torch.tensor([6, 0, 3, 1])
    model = poptorch.inferenceModel(Apply(decoded), options(replicas=2))
    scores, sizes, labels = model(probs.transpose(0, 1).contiguous(), lengths)
    on_host = poptorch.ctc_beam_search_decoder(probs, lengths, BLANK, 8, 2)
    assert [tensor.dtype for tensor in on_host] == [dtype, torch.int32, torch.int32]
    assert (scores.shape, sizes.shape, labels.shape) == ((4, 2), (4, 2), (4, 2, 6))
    for got, expected in zip((scores, sizes, labels), on_host):
        assert torch.equal(got, expected)


def test_the_length_and_blanks_bound_the_sequences():
    scores, sizes, labels = poptorch.ctc_beam_search_decoder(log_probs(3, 1, 3), torch.tensor([0]), BLANK, 4, 2)
    assert scores.tolist() == [[0.0, -math.inf]]
    assert not sizes.any()
    assert (labels == BLANK).all()
    probs, three = log_probs(5, 1, 3), torch.tensor([3])
    full, padded = (poptorch.ctc_beam_search_decoder(each, three, BLANK, 8, 1) for each in (probs[:3], probs))
    assert torch.equal(full[0], padded[0]), "steps beyond the length are ignored"
    assert torch.equal(full[2], padded[2][:, :, :3])
    steps = torch.full((3, 1, 3), -50.0)
    steps[0, 0, 2] = steps[1, 0, BLANK] = steps[2, 0, 2] = 0.0
    _, sizes, labels = poptorch.ctc_beam_search_decoder(steps, three, BLANK)
    assert (sizes.tolist(), labels.tolist()) == ([[2]], [[[2, 2, BLANK]]]), "a repeated label needs a blank between"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probs": torch.ones(3, 2)}, r"\[input length, batch, classes\], not float32 \[3, 2\]"),
        ({"probs": torch.ones(3, 2, 3).long()}, "floating point"),
        ({"lengths": torch.tensor([3])}, r"`lengths` must be \[2\] integers"),
        ({"lengths": torch.tensor([3, 4])}, r"`lengths` must be in 0...3, the input length, not \[3, 4\]"),
        ({"lengths": [3, 3]}, "`lengths` must be a tensor"),
        ({"blank": 3}, "`blank` is 3, but there are 3 classes"),
        ({"beam_width": 0}, "`beam_width` must be a constant int of at least 1"),
        ({"beam_width": 2, "top_paths": 3}, "top_paths=3 is more than beam_width=2"),
    ],
)
def test_the_decoder_rejects_invalid_arguments(change, message):
    arguments = {"probs": log_probs(3, 2, 3), "lengths": torch.tensor([3, 3]), **change}
    rejects(poptorch.Error, message, poptorch.ctc_beam_search_decoder, **arguments)


def points(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.floats(0.05, 1.0), st.integers(0, 100))
def test_fps_samples_each_cloud_independently(first, second, ratio, seed):
    src = points(first + second, seed)
    taken = poptorch.fps(src, [0, first, first + second], ratio)
    other = first + poptorch.fps(src[first:], [0, second], ratio)
    alone = torch.cat([poptorch.fps(src[:first], [0, first], ratio), other])
    assert torch.equal(taken, alone)
    assert len(set(taken.tolist())) == len(taken)


def test_fps_takes_the_farthest_points_from_a_start_that_torch_draws():
    corners = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
    assert poptorch.fps(corners, [0, 4], ratio=0.5).tolist() == [0, 3]
    src, starts = points(16), set()
    for seed in range(20):
        torch.manual_seed(seed)
        starts.add(poptorch.fps(src, [0, 16], 0.1, random_start=True)[0].item())
    assert len(starts) > 5


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 100))
def test_nearest_minimizes_the_distance(of_x, of_y, seed):
    x, y = points(of_x, seed), points(of_y, seed + 1)
    expected = [min(range(of_y), key=lambda j: float((each - y[j]).square().sum())) for each in x]
    assert poptorch.nearest(x, y).tolist() == expected


def test_points_are_of_the_same_cloud_and_of_any_floating_point_dtype_also_in_a_model():
    for dtype in (torch.half, torch.bfloat16, torch.float64):
        x, y = torch.tensor([[0.0], [2.0]], dtype=dtype), torch.tensor([[2.5], [-1.0]], dtype=dtype)
        assert (poptorch.nearest(x, y).tolist(), poptorch.fps(x, [0, 2], 1.0).tolist()) == ([1, 0], [0, 1])
    x, y = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 5.0, 6.0])
    assert poptorch.nearest(x, y, torch.tensor([0, 0, 1]), [0, 1, 1]).tolist() == [0, 0, 1]

    def sample(src: torch.Tensor) -> torch.Tensor:
        return poptorch.nearest(src, src[poptorch.fps(src, [0, len(src)], 0.5)])

    x = points(8)
    found = on_device(sample, x, opts=options(replicas=2))
    assert (found.dtype, found[:4].tolist()) == (torch.int32, sample(x[:4]).tolist())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poptorch.fps(points(3), [0, 2]), r"must increase from 0 to the number of points, 3; got \[0, 2\]"),
        (lambda: poptorch.fps(points(3), []), "must increase from 0"),
        (lambda: poptorch.fps(points(3), [0, 3], ratio=0.0), r"`ratio` must be in \(0, 1\]"),
        (lambda: poptorch.fps(torch.ones(1, 1, 1), [0, 1]), r"`src` must be floating point \[points, features\]"),
        (lambda: poptorch.nearest(points(2), torch.ones(2, 3)), "`x` has 2 features, but `y` has 3"),
        (lambda: poptorch.nearest(points(2), points(2), [1, 0], [0, 1]), "'batch_x' is not sorted"),
        (lambda: poptorch.nearest(points(2), points(2), [0, 1], [0, 0]), "cloud 1 of `batch_x` has no point"),
        (lambda: poptorch.nearest(points(2), points(2), [0], [0, 0]), r"`batch_x` must be \[2\] integers"),
        (lambda: poptorch.nearest(points(2).long(), points(2)), "`x` must be floating point"),
    ],
)
def test_points_reject_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert isinstance(error.value, poptorch.Error)
