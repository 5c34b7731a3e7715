"""Models that an IPU rejects: warnings, Errors in strict mode, and findings (EMULATED_POD_FINDINGS)."""

from __future__ import annotations

import ctypes
import json
import logging
import re
import threading
from pathlib import Path
from typing import Any, Callable, List

import numpy
import poptorch
import pytest
import torch
import torch.nn.functional as F
from poptorch.environment import logger
from poptorch.findings import Recorder
from torch import nn

from tests.support.poptorch_models import Apply, options, trained
from tests.support.refused import rejects


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any], inner: Any = None) -> None:
        super().__init__()
        self.function, self.inner = function, inner
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x), self.inner)


def train(function, inner=None):
    calls = Calls(lambda x, inner: poptorch.identity_loss(function(x, inner).float(), "mean"), inner)
    trained(calls, torch.randn(3, 4))


def compiled(model: nn.Module) -> poptorch.PoplarExecutor:
    executor = poptorch.inferenceModel(model, options())
    executor.compile(torch.ones(3, 4))
    return executor


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")


HOST = torch.ones(4)
RECURRENT = lambda x, layer: layer(x)[0]  # noqa: E731
REJECTED = [
    (lambda x, _: F.huber_loss(x, torch.zeros(3, 4)), None, r"\[aten::huber_loss\]"),
    (lambda x, _: x.tril(), None, r"\[aten::tril\]"),
    (lambda x, _: x.masked_select(x > 0), None, r"\[aten::masked_select\]"),
    (lambda x, _: x.nonzero(), None, "aten::nonzero are unsupported"),
    (lambda x, _: x[x > 0], None, "aten::nonzero are unsupported"),
    (RECURRENT, nn.LSTM(4, 4, 2, bidirectional=True), "Only LSTM with 1 layer"),
    (RECURRENT, nn.LSTM(4, 4, bidirectional=True), "bidirectional LSTM"),
    (RECURRENT, nn.GRU(4, 4, 2), "Only GRU with 1 layer"),
    (lambda x, _: F.one_hot(x.argmax(1)), None, "OneHot num classes"),
    (lambda x, _: x.argmax(1).bincount(), None, "Bincount `minlength` must be specified"),
    (lambda x, _: F.interpolate(x[None], scale_factor=2, mode="linear"), None, "only 'nearest'"),
    (lambda x, _: F.cross_entropy(x, torch.zeros(3).long(), torch.ones(4)), None, '"weight"'),
    (lambda x, _: F.cross_entropy(x, torch.zeros(3).long(), label_smoothing=0.1), None, "masked_select"),
    (lambda x, _: x * x.sum().item(), None, "aten::item is only supported in eager"),
    (lambda x, _: x if x.sum() > 0 else -x, None, "aten::item is only supported"),
    (lambda x, _: x * int(x.sum()), None, "aten::item is only supported"),
    (lambda x, _: x * float(x.view(-1).unsqueeze(1).sum()), None, "aten::item"),
    (lambda x, _: x * x.sum().tolist(), None, "Illegal move to CPU"),
    (lambda x, _: x + x.detach().numpy().size, None, "Illegal move to CPU"),
]


@pytest.mark.parametrize(("function", "inner", "message"), REJECTED)
def test_strict_mode_raises_what_the_sdk_raises(function, inner, message, strict):
    rejects(poptorch.Error, message, lambda: compiled(Calls(function, inner)))


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tril()


def test_warning_lists_every_operator_once_with_its_module(caplog):
    def twice(x, inner):
        return inner(x) + F.huber_loss(inner(x), x) + x.erfinv()

    with caplog.at_level(logging.WARNING, "poptorch"):
        executor = compiled(Calls(twice, Inner()))
        executor(torch.ones(3, 4))
    (text,) = [each.getMessage() for each in caplog.records if "Unsupported ops" in each.getMessage()]
    assert "[aten::erfinv, aten::huber_loss, aten::tril]" in text
    for called in ("aten::tril: Called by inner (Inner)", "aten::huber_loss: Called by Calls"):
        assert f"{called}, {Path(__file__).name}:" in text
    assert text.count("inner (Inner)") == 1


# Operators of PopTorch's documentation, among them those that torch decomposes differently on a CPU.
SUPPORTED: List[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: F.dropout(x),
    lambda x: F.gelu(x) + F.silu(x) + F.mish(x) + F.hardswish(x) + F.softplus(x) + F.celu(x) + F.selu(x),
    lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64), ignore_index=1),
    lambda x: sum(loss(x, torch.zeros(3, 4)) for loss in (F.smooth_l1_loss, F.mse_loss, F.l1_loss)),
    lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros(3, 4)),
    lambda x: F.one_hot(x.argmax(1), 4).sum().float(),
    lambda x: x + x.argmax(1).bincount(minlength=4),
    lambda x: F.embedding(x.argmax(1), x.t()),
    lambda x: F.layer_norm(x, (4,)),
    lambda x: x.std() + x.var(0).sum() + x.norm() + x.logsumexp(1).sum() + x.cumsum(0).sum() + torch.cdist(x, x).sum(),
    lambda x: x.topk(2)[0] + x.sort(1)[0][:, :2],
    lambda x: x.masked_fill(x > 0, 0.0) * torch.ones(3, 4).tril(),
    lambda x: torch.where(x > 0, x, x.neg()).roll(1, 0).flip(0).clamp(-1, 1),
    lambda x: torch.zeros(3, 4).scatter_add(1, x.argsort(1), x),
    lambda x: F.pad(x[None], (1, 1), "replicate").unfold(1, 2, 1),
    lambda x: torch.einsum("ij,kj->ik", x, x) @ x,
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    lambda x: F.max_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 2) + F.avg_pool1d(x, 2),
    lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
]


@pytest.mark.parametrize("function", SUPPORTED)
def test_supported_operators_are_accepted(function, strict):
    train(lambda x, _: function(x).sum())


@pytest.mark.parametrize(
    "inner",
    [nn.LSTM(4, 4), nn.GRU(4, 4), nn.RNN(4, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.MultiheadAttention(4, 2)],
)
def test_supported_modules_are_accepted(inner, strict):
    def call(x, inner):
        result = inner(x, x, x) if isinstance(inner, nn.MultiheadAttention) else inner(x)
        return result[0] if isinstance(result, tuple) else result

    compiled(Calls(call, inner).eval())
    inner.train()
    train(call, inner)


def test_own_ops_and_layers_on_the_host_are_accepted(strict):
    layer = poptorch.CPU(lambda y: y * y.sum().item(), "host")

    def call(x, _):
        sampled = poptorch.fps(x, [0, 3], 0.5)
        loop = poptorch.for_loop(2, lambda y: y * 2, [x])[0]
        return sampled, loop, poptorch.cond(x.sum() > 0, abs, [x], abs, [x])[0], layer(x)

    compiled(Calls(call))


ON_HOST = [
    lambda x: x + HOST,
    lambda x: torch.cat([x, HOST[None] * 2]),
    lambda x: x.index_select(0, torch.LongTensor([1, 0])),
    lambda x: x * torch.from_numpy(numpy.ones(4, "f")),
]


@pytest.mark.parametrize("function", ON_HOST)
def test_an_operand_on_the_host_is_rejected(function, monkeypatch, caplog):
    calls = Calls(lambda x, _: function(x))
    compiled(calls)
    assert "Expected an IPU tensor but got tensor(device=cpu, shape=[" in caplog.text
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    rejects(poptorch.Error, "Expected an IPU tensor", compiled, calls)


ON_DEVICE = [
    lambda x: x + HOST.to(x.device) + HOST.to("ipu") + HOST.to(x) + HOST.type_as(x),
    lambda x: x + torch.tensor([1.0, 2, 3, 4]) * torch.arange(4) + torch.zeros_like(HOST) + x.new_tensor([1.0]),
    lambda x: x[[1, 0, 2]] + x[:, numpy.arange(4)] * numpy.float32(2) + sum(row for row in x) + x.data.T.mT,
    lambda x: x.expand_as(HOST[None].repeat(3, 1)) + x.clone().copy_(HOST),
    lambda x: poptorch.CPU(lambda y: torch.from_numpy(y.numpy()), "host")(x) + x,
]


@pytest.mark.parametrize("function", ON_DEVICE)
def test_tensors_that_are_moved_or_constructed_are_on_the_device(function, strict):
    compiled(Calls(lambda x, _: function(x)))


def test_a_sparse_tensor_is_used_on_the_host_and_an_output_there_warns():
    model = Apply(lambda model, x: x * float(model.graph.coalesce().indices().shape[1]), graph=GRAPH)
    assert poptorch.inferenceModel(model, options())(torch.ones(2)).tolist() == [3, 3]
    model = poptorch.inferenceModel(Calls(lambda x, _: (x, HOST)), options(iterations=2))
    with pytest.warns(UserWarning, match="Output expected to be on the IPU but is on cpu"):
        assert model(torch.ones(2, 4))[1].shape == (8,)  # in the SDK (4,): the tensor itself


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.norm = nn.Linear(4, 4), nn.Conv1d(1, 1, 1), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, is_cast: bool = False) -> torch.Tensor:
        x = x.half()
        if is_cast:
            x = F.linear(x, self.linear.weight.half(), self.linear.bias.half())
            x = F.batch_norm(x, self.norm.running_mean, self.norm.running_var, self.norm.weight.half())
            x *= torch.tensor(2.0)
            return x.float() + self.linear.bias + x.to(self.linear.bias.dtype)
        x = self.linear(x) + self.linear(x * 2)
        x = self.conv(x[:, None])[:, 0]
        return torch.cat([x.half(), self.linear.weight]) * x.half().sum()


def _mixed(caplog: Any, model: nn.Module, *inputs: Any) -> List[str]:
    with caplog.at_level(logging.WARNING, "poptorch"):
        poptorch.inferenceModel(model, options()).compile(torch.ones(3, 4), *inputs)
    return [each.getMessage() for each in caplog.records if "in half and in float32" in each.getMessage()]


def test_strict_mode_names_each_operator_with_operands_in_half_and_float(monkeypatch, caplog):
    assert _mixed(caplog, Mixed()) == [], "only in strict mode"
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    assert _mixed(caplog, Mixed(), True) == [], "operands that are cast or keep their dtype"
    linear, conv, cat = _mixed(caplog, Mixed())
    place = rf"{Path(__file__).name}:\d+"
    assert re.search(rf"^linear has .* cast one of them. Called by linear \(Linear\), {place}.$", linear)
    assert re.search(rf"^conv1d has .* Called by conv \(Conv1d\), {place}.$", conv)
    assert re.search(rf"^cat has .* Called by Mixed, {place}.$", cat)


GRAPH = torch.eye(3).to_sparse()
ON_CPU = r"got tensor\(device=cpu, shape=\[3, 3\]"


def with_graph_as_buffer():
    model = Apply(lambda x: x)
    model.register_buffer("graph", GRAPH)
    return model


@pytest.mark.parametrize(
    ("model", "inputs", "is_strict", "words"),
    [
        (Apply(lambda m, x: torch.sparse.mm(m.graph, x), graph=GRAPH), torch.ones(3, 2), True, ON_CPU),
        (Apply(lambda x: x), GRAPH, False, "Tensor 0 of the arguments is sparse"),
        (Apply(lambda x: x.to_sparse()), torch.ones(3), False, "Output number 0 is a sparse"),
        (with_graph_as_buffer(), torch.ones(3), False, "buffer 'graph' is a sparse"),
    ],
)
def test_sparse_tensors_of_the_device_are_rejected(model, inputs, is_strict, words, monkeypatch):
    monkeypatch.setenv("EMULATED_POD_STRICT", str(int(is_strict)))
    rejects(poptorch.Error, words, lambda: poptorch.inferenceModel(model, options())(inputs))


PLACE = f"{Path(__file__).name}:"


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: torch.zeros(1), name="feed")
        thread.start()
        thread.join()
        x = self.fc(x).tril() + HOST
        if x.sum() > 0:
            x = x * 2
        x = (x.half() * torch.ones(4, device=x.device)).float()
        return poptorch.identity_loss(poptorch.custom_op([x], "Absent", "test.findings", 1, [x])[0], "mean")


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.setenv("EMULATED_POD_FINDINGS", str(tmp_path / "findings"))
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    recorder = Recorder()
    logger.addHandler(recorder)
    yield lambda: [json.loads(line) for line in (tmp_path / "findings").read_text().splitlines()]
    logger.removeHandler(recorder)


def test_each_kind_is_recorded_with_its_place_and_the_first_call_ends_the_program(lines):
    model = Refused()
    executor = poptorch.trainingModel(model, options(iterations=2), poptorch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SystemExit):
        executor(torch.ones(2, 4))
    found = {(line["level"], line["what"]): line for line in lines() if "level" in line}
    kinds = [("trouble", "thread"), ("trouble", "operator"), ("trouble", "forward"), ("warn", "precision")]
    assert set(found) == {*kinds, ("warn", "custom operator"), ("ok", "memory")}
    assert "aten::tril" in found["trouble", "operator"]["text"]
    places = [place for (_, what), line in found.items() if what != "memory" for place in line["places"]]
    assert all(PLACE in place for place in places)
    end = lines()[-1]
    assert (end["event"], end["micro_batches"]) == ("end", 2)
    assert {line["event"] for line in lines() if "event" in line} == {"call", "compilation", "end"}


def test_an_exception_and_a_warning_are_findings(lines, monkeypatch):
    monkeypatch.setenv("EMULATED_POD_CUSTOM_OPS", "")
    ctypes.cdll.LoadLibrary("build/absent_operators.so")
    rejects(RuntimeError, "shapes", lambda: poptorch.inferenceModel(nn.Linear(3, 3), options())(torch.ones(2, 4)))
    warning, error = (line for line in lines() if "level" in line)
    assert (warning["level"], "absent_operators.so was not loaded" in warning["text"]) == ("warn", True)
    assert (error["level"], error["what"]) == ("trouble", "compilation")
    assert [place.partition(":")[0] + ":" for place in warning["places"] + error["places"]] == [PLACE] * 2
