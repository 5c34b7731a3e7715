"""Measurements of a call: times, cycles, anchored tensors, spans; synthetic data, named buffers, random state."""

from __future__ import annotations

import datetime
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import Apply, Line, batch, options, seeded, wrapped
from tests.support.refused import rejects

All, EveryN = poptorch.OutputMode.All, poptorch.OutputMode.EveryN
EVENTS = ("input", "input_complete", "output", "output_complete")


def classifier(opts=None):
    return wrapped(seeded(), opts)


def test_latencies_counters_times_and_cycles_are_those_of_the_last_call_and_zero_before():
    training = classifier(options(2, 2, 3))
    queries = [training.getHostIpuLatency, training.getComputeLatency, training.getIpuHostLatency, training.getLatency]
    assert training.getPerfCounters() == dict.fromkeys(EVENTS, [[]])
    for is_compiled in (False, True):
        if is_compiled:
            training.compile(*batch(24))
        assert [query() for query in queries] == [(0.0, 0.0, 0.0)] * 4
    training(*batch(24))
    for low, high, average in (query() for query in queries):
        assert 0 < low <= average <= high
    assert training.getLatency()[1] > training.getComputeLatency()[0]
    counters = training.getPerfCounters()
    assert sorted(counters) == sorted(EVENTS)
    assert all(len(tensors) == 2 and len(tensors[0]) == 6 for tensors in counters.values())
    for times in zip(*(counters[event][0] for event in EVENTS)):
        assert list(times) == sorted(times)
    images, labels = batch(24)
    rejects(IndexError, "out of bounds", training, images, labels + 99)
    assert training.getPerfCounters() == counters, "a failed call does not change them"
    training = classifier(options().logCycleCount(True).showCompilationProgressBar(True))
    for query in ("compilationTime", "rng_state"):
        with pytest.raises(poptorch.Error, match="not been compiled|Please compile the model"):
            getattr(training, query)()
    training.compile(*batch(4))
    assert training.compilationTime() > datetime.timedelta()
    rejects(poptorch.Error, "run the model at least once", training.cycleCount)
    training(*batch(4))
    assert training.cycleCount() > 1000
    not_logging = classifier()
    not_logging(*batch(4))
    rejects(poptorch.Error, "logCycleCount", not_logging.cycleCount)
    rejects(poptorch.Error, "showCompilationProgressBar", not_logging.compilationTime)


def anchored(opts, *anchors):
    for anchor in anchors:
        opts.anchorTensor(*anchor)
    return opts


def test_names_of_tensors_and_the_inputs_that_a_model_is_compiled_for():
    training = classifier(options(1, 2))
    assert training._executable is training._executable_inputs is None
    images, labels = batch(4)
    training.compile(images, labels=labels)
    assert training._executable is not None
    found = training._executable_inputs
    assert [(arg.shape, arg.dtype) for arg in found.args] == [(each.shape, each.dtype) for each in (images, labels)]
    assert found.kwargs == {}
    names = training.getTensorNames()
    gradients = {"Gradient___linear.bias", "Gradient___images", "Gradient___conv/Conv2d:0"}
    assert {"images", "labels", "linear.weight", "conv/Conv2d:0", "Classifier:1"} | gradients <= set(names)
    assert "Gradient___labels" not in names
    assert len(set(names)) == len(names)
    training.destroy()
    assert training._executable_inputs is None


def test_anchored_gradients_equal_those_of_torch():
    opts = anchored(options(2, 2), ("bias", "Gradient___linear.bias", All), ("in", "Gradient___images"))
    anchored(opts, ("conv", "Gradient___conv/Conv2d:0", All), ("out", "conv/Conv2d:0", All))
    training = classifier(opts)
    images, labels = batch(8)
    training(images, labels)
    expected = []
    for start in range(0, 8, 2):
        alone, x, out = seeded(), images[start : start + 2].clone().requires_grad_(), []
        alone.conv.register_forward_hook(lambda module, args, output, out=out: out.append(output))
        loss = alone(x, labels[start : start + 2])[1]
        expected.append([*torch.autograd.grad(loss, (alone.linear.bias, out[0], x)), out[0].detach()])
    bias, conv, into, out = (torch.cat(each) for each in zip(*expected))
    for short, values in (("bias", bias), ("conv", conv), ("out", out)):
        torch.testing.assert_close(training.getAnchoredTensor(short), values)
    torch.testing.assert_close(training.getAnchoredTensor("in")[2:], into[-2:])


@pytest.mark.parametrize(
    ("of_the_model", "of_the_anchor", "expected"),
    [
        ((), (poptorch.OutputMode.Final,), [4.0]),
        ((), (All,), [1.0, 2.0, 3.0, 4.0]),
        ((), (EveryN, 2), [2.0, 4.0]),
        ((), (poptorch.OutputMode.Sum,), [10.0]),
        ((), (), [4.0]),
        ((EveryN, 2), (), [2.0, 4.0]),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_an_anchor_has_its_own_output_mode_or_that_of_the_model(of_the_model, of_the_anchor, expected, order):
    opts = options(iterations=4)
    setters = [lambda: opts.anchorTensor("x", "model.x", *of_the_anchor)]
    if of_the_model:
        setters.append(lambda: opts.outputMode(*of_the_model))
    for each in setters[::order]:
        each()
    training = poptorch.trainingModel(Line(), opts)
    training(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert training.getAnchoredTensor("x").tolist() == expected


def test_anchors_of_inference_and_unknown_names():
    inference = poptorch.inferenceModel(nn.Sequential(nn.ReLU()), anchored(options(), ("act", "0/ReLU:0")))
    rejects(AssertionError, "before calling getTensorNames", inference.getTensorNames)
    inference.compile(torch.ones(1))
    rejects(AssertionError, "available after a call", inference.getAnchoredTensor, "act")
    inference(torch.ones(1))
    assert inference.getAnchoredTensor("act").tolist() == [1.0]
    rejects(AssertionError, "No tensor with name 'other' found.*anchored are act", inference.getAnchoredTensor, "other")
    with pytest.raises(poptorch.Error, match="getTensorNames"):
        poptorch.inferenceModel(nn.ReLU(), anchored(options(), ("g", "Gradient___input")))(torch.ones(1))


def test_an_anchored_tensor_whose_shape_differs_between_micro_batches_is_an_error_and_changes_nothing():
    class Growing(Line):
        def __init__(self):
            super().__init__()
            self.identity = nn.Identity()

        def forward(self, x):
            self.identity(torch.ones(sizes.pop() if sizes else (1, 1)))
            return super().forward(x)

    sizes = []
    training = wrapped(Growing(), anchored(options(accumulation=2), ("a", "identity/Identity:0", All)))
    training(torch.ones(2))
    weight, before = training.model.weight.item(), training.getAnchoredTensor("a")
    sizes = [(1, 1), (1, 2)]
    rejects(poptorch.Error, "The anchored tensor 'a' has micro-batches of different shapes", training, torch.ones(2))
    assert training.model.weight.item() == weight
    assert torch.equal(training.getAnchoredTensor("a"), before)


def test_buffers_updated_weights_and_the_final_loss_scale_can_be_anchored():
    model = Line()
    model.register_buffer("offset", torch.tensor([3.0]))
    opts = anchored(options(), ("b", "offset"), ("scale", "finalLossScale"))
    opts.Training.setAutomaticLossScaling(True)
    training = wrapped(model, opts, loss_scaling=8.0)
    training(torch.ones(1))
    assert (training.getAnchoredTensor("b").tolist(), training.getAnchoredTensor("scale")) == ([3.0], 8.0)
    assert training._optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"] == 1.0
    training = wrapped(Line(), anchored(options(iterations=3), ("weight", "UpdatedVar___model.weight", All)), lr=0.25)
    training(torch.ones(3))
    assert training.getAnchoredTensor("weight").tolist() == [0.75, 0.5, 0.25]


def shifting(opts):
    model = Apply(lambda model, x: x + sum(model.buffers()), is_model=True)
    for name, dtype in (("shift", torch.float), ("index", torch.long), ("fixed", torch.float)):
        model.register_buffer(name, torch.zeros(1, dtype=dtype))
    return model, poptorch.inferenceModel(model, opts)


def test_only_the_named_buffers_are_uploaded():
    model, inference = shifting(options(2).updatableNamedBuffers(["shift", "index"]))
    inference(torch.zeros(2))
    for buffer in (model.shift, model.index, model.fixed):
        buffer.fill_(3)
    assert inference(torch.zeros(2)).tolist() == [0, 0]
    inference.copyNamedBuffersToDevice()
    assert [inference(torch.zeros(2)).tolist() for _ in range(2)] == [[6, 6], [6, 6]]
    _, inference = shifting(options())
    inference(torch.zeros(1))
    rejects(poptorch.Error, "updatableNamedBuffers", inference.copyNamedBuffersToDevice)
    with pytest.raises(poptorch.Error, match="no buffer 'scale'"):
        shifting(options().updatableNamedBuffers(["scale"]))[1](torch.zeros(1))


@pytest.mark.parametrize("is_set_before_compiling", [True, False])
def test_dropout_continues_exactly_from_an_rng_state(is_set_before_compiling):
    x, opts = torch.ones(16), options(2, iterations=2).randomSeed(5)
    first, second = (poptorch.inferenceModel(nn.Dropout(0.5), opts.clone()) for _ in range(2))
    start = first(x)
    state, expected = first.rng_state, first(x)
    if not is_set_before_compiling:
        second.compile(x)
    second.rng_state = state
    assert torch.equal(second(x), expected)
    second.rng_state = [5]  # a seed alone restarts the random numbers
    assert second.rng_state == [5, 0]
    assert torch.equal(second(x), start)
    for invalid in (3, "ab", [], [1, 2, 3], [1.5, 2], None):
        with pytest.raises(poptorch.Error, match=r"\[seed\] or \[seed, micro-batches\]"):
            second.rng_state = invalid


def test_synthetic_data_replaces_inputs_and_outputs_and_an_overflow_raises_with_floating_point_exceptions():
    training = classifier(options(2, 2).enableSyntheticData(True))
    images, labels = batch(8)
    logits, loss = training(images.fill_(float("nan")), labels.fill_(77))
    assert (logits.shape, loss.shape, training.getPerfCounters()["input"]) == ((4, 5), (2,), [[], []])
    assert training.getLatency() == (0, 0, 0)
    assert all(parameter.isfinite().all() for parameter in training.model.parameters())
    opts = options()
    opts.Precision.enableFloatingPointExceptions(True)
    rejects(poptorch.Error, "parameter 'weight'", wrapped(Line(), opts, lr=1e38), torch.full((1,), 1e10))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    reports = tmp_path / "reports"
    monkeypatch.setenv("PVTI_OPTIONS", json.dumps({"enable": "true", "directory": str(reports)}))
    return reports


def spans(folder: Path) -> List[Dict[str, Any]]:
    return json.loads((folder / f"poptorch-{os.getpid()}.trace.json").read_text() + "]")


class Program:
    def step(self, number: int) -> int:
        return number + 1


def test_tracepoints_and_instrumented_methods_record_spans(folder):
    with poptorch.profiling.Channel("app").tracepoint("load"):
        time.sleep(0.01)
    with pytest.raises(KeyError), poptorch.profiling.Channel("app").tracepoint("fails"):
        raise KeyError
    span, failed = spans(folder)
    assert failed["name"] == "fails"
    assert (span["name"], span["cat"], span["ph"], span["pid"]) == ("load", "app", "X", os.getpid())
    assert span["dur"] >= 1e4  # microseconds
    program = Program()
    poptorch.profiling.Channel("app").instrument(program, "step")
    assert [program.step(number) for number in range(3)] == [1, 2, 3]
    assert [span["name"] for span in spans(folder)[2:]] == ["step"] * 3


def test_threads_write_concurrently(folder):
    def work(name: str) -> None:
        channel = poptorch.profiling.Channel(name)
        for _ in range(20):
            with channel.tracepoint("span"):
                pass

    names = [f"channel {index}" for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, names))
    assert sorted(span["cat"] for span in spans(folder)) == sorted(names * 20)


def test_nothing_is_recorded_by_default_and_pvti_options_must_be_a_json_object(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for text in ("", "{}", '{"enable": "false"}'):
        monkeypatch.setenv("PVTI_OPTIONS", text)
        program, channel = Program(), poptorch.profiling.Channel("app")
        assert channel.instrument(program, "step") is program
        with channel.tracepoint("block"):
            assert program.step(1) == 2
        assert not list(tmp_path.iterdir())
        assert "step" not in vars(program)
        rejects(AttributeError, "walk", channel.instrument, program, "walk")
    for text in ("enable", "[]"):
        monkeypatch.setenv("PVTI_OPTIONS", text)
        rejects(poptorch.Error, "PVTI_OPTIONS", poptorch.profiling.Channel, "app")


def test_an_executor_records_its_compilation_and_execution(folder):
    model = poptorch.inferenceModel(torch.nn.Linear(1, 1), options())
    model(torch.ones(1, 1))
    model.destroy()
    assert {span["cat"] for span in spans(folder)} == {"poptorch.inferenceModel"}
    assert [span["name"] for span in spans(folder)] == ["compile", "modelExecution", "destroy"]
