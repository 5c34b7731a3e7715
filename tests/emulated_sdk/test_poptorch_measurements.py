"""Measurements of a call: times, cycles, anchored tensors; synthetic data, named buffers, random state."""

from __future__ import annotations

import datetime

import poptorch
import pytest
import torch
from poptorch_models import Line, batch, options, seeded
from torch import nn


def trained_classifier(opts):
    model = seeded()
    return model, poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))


def test_latencies_are_those_of_the_last_call_and_zero_before():
    _, training = trained_classifier(options(2, 2))
    queries = [training.getHostIpuLatency, training.getComputeLatency, training.getIpuHostLatency, training.getLatency]
    training.compile(*batch(8))
    assert [query() for query in queries] == [(0.0, 0.0, 0.0)] * 4
    training(*batch(8))
    for low, high, average in (query() for query in queries):
        assert 0 < low <= average <= high < 60
    assert training.getLatency()[1] > training.getComputeLatency()[0]


def test_counters_have_a_list_for_every_tensor_and_a_time_for_every_micro_batch():
    _, training = trained_classifier(options(2, 2, 3))
    training(*batch(24))
    counters = training.getPerfCounters()
    assert sorted(counters) == ["input", "input_complete", "output", "output_complete"]
    assert all(len(tensors) == 2 and len(tensors[0]) == 6 for tensors in counters.values())
    for times in zip(*(counters[event][0] for event in ("input", "input_complete", "output", "output_complete"))):
        assert list(times) == sorted(times)


def test_compilation_time_and_cycle_count():
    _, training = trained_classifier(options().logCycleCount(True).showCompilationProgressBar(True))
    training.compile(*batch(4))
    assert datetime.timedelta() < training.compilationTime() < datetime.timedelta(seconds=60)
    with pytest.raises(poptorch.Error, match="run the model at least once"):
        training.cycleCount()
    training(*batch(4))
    assert training.cycleCount() > 1000
    not_logging = trained_classifier(options())[1]
    not_logging(*batch(4))
    with pytest.raises(poptorch.Error, match="logCycleCount"):
        not_logging.cycleCount()
    with pytest.raises(poptorch.Error, match="showCompilationProgressBar"):
        not_logging.compilationTime()


@pytest.mark.parametrize("query", ["compilationTime", "rng_state"])
def test_measurements_need_a_compiled_model(query):
    training = trained_classifier(options())[1]
    with pytest.raises(poptorch.Error, match="not been compiled|Please compile the model"):
        getattr(training, query)()


def test_times_before_compilation_are_empty():
    training = trained_classifier(options())[1]
    assert training._executable is None
    assert training.getPerfCounters() == dict.fromkeys(["input", "input_complete", "output", "output_complete"], [[]])
    assert training.getLatency() == training.getComputeLatency() == (0.0, 0.0, 0.0)
    training.compile(*batch(4))
    assert training._executable is not None


def test_the_batch_size_that_a_model_is_compiled_for():
    training = trained_classifier(options(1, 2))[1]
    assert training._executable_inputs is None
    images, labels = batch(4)
    training.compile(images, labels=labels)
    found = training._executable_inputs
    assert [(arg.shape, arg.dtype) for arg in found.args] == [(each.shape, each.dtype) for each in (images, labels)]
    assert found.kwargs == {}
    training.destroy()
    assert training._executable_inputs is None


def test_names_of_tensors():
    _, training = trained_classifier(options())
    training.compile(*batch(4))
    names = training.getTensorNames()
    gradients = ["Gradient___linear.bias", "Gradient___images", "Gradient___conv/Conv2d:0"]
    for name in ["images", "labels", "linear.weight", "conv/Conv2d:0", "Classifier:1", *gradients]:
        assert name in names
    assert "Gradient___labels" not in names
    assert len(set(names)) == len(names)


def test_anchored_gradients_equal_those_of_torch():
    opts = options(2, 2).anchorTensor("bias", "Gradient___linear.bias", poptorch.OutputMode.All)
    opts.anchorTensor("conv", "Gradient___conv/Conv2d:0", poptorch.OutputMode.All)
    opts.anchorTensor("out", "conv/Conv2d:0", poptorch.OutputMode.All).anchorTensor("in", "Gradient___images")
    _, training = trained_classifier(opts)
    images, labels = batch(8)
    training(images, labels)
    bias, conv, out = [], [], []
    for start in range(0, 8, 2):
        alone, x = seeded(), images[start : start + 2].clone().requires_grad_()
        seen = []
        alone.conv.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        loss = alone(x, labels[start : start + 2])[1]
        bias.append(torch.autograd.grad(loss, alone.linear.bias, retain_graph=True)[0])
        conv.append(torch.autograd.grad(loss, seen[0], retain_graph=True)[0])
        out.append(seen[0].detach())
        last_input = torch.autograd.grad(loss, x)[0]
    for short, expected in (("bias", bias), ("conv", conv), ("out", out)):
        torch.testing.assert_close(training.getAnchoredTensor(short), torch.cat(expected))
    torch.testing.assert_close(training.getAnchoredTensor("in")[2:], last_input)


@pytest.mark.parametrize(
    ("mode", "period", "expected"),
    [
        (poptorch.OutputMode.Final, 1, [4.0]),
        (poptorch.OutputMode.All, 1, [1.0, 2.0, 3.0, 4.0]),
        (poptorch.OutputMode.EveryN, 2, [2.0, 4.0]),
        (poptorch.OutputMode.Sum, 1, [10.0]),
        (None, 1, [4.0]),
    ],
)
def test_each_anchor_has_an_output_mode(mode, period, expected):
    opts = options(iterations=4).anchorTensor("x", "model.x", mode, period)
    training = poptorch.trainingModel(Line(), opts)
    training(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert training.getAnchoredTensor("x").tolist() == expected


@pytest.mark.parametrize("is_set_first", [True, False])
def test_an_anchor_has_the_output_mode_and_period_of_the_model(is_set_first):
    opts = options(iterations=4)
    if is_set_first:
        opts.anchorTensor("x", "model.x")
    opts.outputMode(poptorch.OutputMode.EveryN, 2)
    if not is_set_first:
        opts.anchorTensor("x", "model.x")
    training = poptorch.trainingModel(Line(), opts)
    training(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert training.getAnchoredTensor("x").tolist() == [2.0, 4.0]


def test_anchors_of_inference_and_unknown_names():
    inference = poptorch.inferenceModel(nn.Sequential(nn.ReLU()), options().anchorTensor("act", "0/ReLU:0"))
    with pytest.raises(AssertionError, match="before calling getTensorNames"):
        inference.getTensorNames()
    inference.compile(torch.ones(1))
    with pytest.raises(AssertionError, match="available after a call"):
        inference.getAnchoredTensor("act")
    inference(torch.ones(1))
    assert inference.getAnchoredTensor("act").tolist() == [1.0]
    with pytest.raises(AssertionError, match="No tensor with name 'other' found.*anchored are act"):
        inference.getAnchoredTensor("other")
    with pytest.raises(poptorch.Error, match="getTensorNames"):
        poptorch.inferenceModel(nn.ReLU(), options().anchorTensor("g", "Gradient___input"))(torch.ones(1))


def test_buffers_and_the_final_loss_scale_can_be_anchored():
    model = Line()
    model.register_buffer("offset", torch.tensor([3.0]))
    opts = options().anchorTensor("b", "offset").anchorTensor("scale", "finalLossScale")
    opts.Training.setAutomaticLossScaling(True)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=8.0)
    training = poptorch.trainingModel(model, opts, optimizer)
    training(torch.ones(1))
    assert training.getAnchoredTensor("b").tolist() == [3.0]
    assert training.getAnchoredTensor("scale") == 8.0
    assert optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"] == 1.0


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(1))
        self.register_buffer("index", torch.zeros(1, dtype=torch.long))
        self.register_buffer("fixed", torch.zeros(1))

    def forward(self, x):
        return x + self.shift + self.fixed + self.index


def test_only_the_named_buffers_are_uploaded():
    model = Shift()
    inference = poptorch.inferenceModel(model, options(2).updatableNamedBuffers(["shift", "index"]))
    inference(torch.zeros(2))
    for buffer in (model.shift, model.index, model.fixed):
        buffer.fill_(3)
    assert inference(torch.zeros(2)).tolist() == [0, 0]
    inference.copyNamedBuffersToDevice()
    assert [inference(torch.zeros(2)).tolist() for _ in range(2)] == [[6, 6], [6, 6]]


def test_uploading_buffers_needs_known_names():
    inference = poptorch.inferenceModel(Shift(), options())
    inference(torch.zeros(1))
    with pytest.raises(poptorch.Error, match="updatableNamedBuffers"):
        inference.copyNamedBuffersToDevice()
    unknown = poptorch.inferenceModel(Shift(), options().updatableNamedBuffers(["scale"]))
    with pytest.raises(poptorch.Error, match="no buffer 'scale'"):
        unknown(torch.zeros(1))


@pytest.mark.parametrize("is_set_before_compiling", [True, False])
def test_dropout_continues_exactly_from_an_rng_state(is_set_before_compiling):
    def dropout():
        return poptorch.inferenceModel(nn.Dropout(0.5), options(2, iterations=2).randomSeed(5))

    first = dropout()
    first(torch.ones(16))
    state, expected = first.rng_state, first(torch.ones(16))
    second = dropout()
    if is_set_before_compiling:
        second.rng_state = state
    else:
        second.compile(torch.ones(16))
        second.rng_state = state
    assert torch.equal(second(torch.ones(16)), expected)
    second.rng_state = [5]  # a seed alone restarts the random numbers
    assert second.rng_state == [5, 0]
    assert torch.equal(second(torch.ones(16)), dropout()(torch.ones(16)))


def test_synthetic_data_replaces_inputs_and_outputs():
    _, training = trained_classifier(options(2, 2).enableSyntheticData(True))
    images, labels = batch(8)
    logits, loss = training(images.fill_(float("nan")), labels.fill_(77))
    assert (logits.shape, loss.shape) == ((4, 5), (2,))
    assert training.getPerfCounters()["input"] == [[], []]
    assert training.getLatency() == (0, 0, 0)
    assert all(parameter.isfinite().all() for parameter in training.model.parameters())


def test_an_overflow_in_the_update_raises_with_floating_point_exceptions():
    opts = options()
    opts.Precision.enableFloatingPointExceptions(True)
    model = Line()
    training = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=1e38))
    with pytest.raises(poptorch.Error, match="parameter 'weight'"):
        training(torch.full((1,), 1e10))


def test_a_failed_compilation_closes_the_progress_bar(capsys):
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        poptorch.trainingModel(nn.Linear(1, 1), poptorch.Options())(torch.ones(1, 1))
    assert "Graph compilation: 100%" in capsys.readouterr().err


def test_updated_weights_are_anchored_after_each_update():
    every = poptorch.OutputMode.All
    opts = options(iterations=3).anchorTensor("weight", "UpdatedVar___model.weight", every)
    model = Line()
    training = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.25))
    training(torch.ones(3))
    assert training.getAnchoredTensor("weight").tolist() == [0.75, 0.5, 0.25]
