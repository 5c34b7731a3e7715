"""What a forward may do on the device: state of the host, gradients, buffers, tensors of other threads."""

from __future__ import annotations

import contextvars
import functools
import logging
import queue
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Tuple

import numpy
import poptorch
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.poptorch_models import Apply, Line, on_device, options, seeded, trained, wrapped
from tests.support.refused import rejects


def before(function):
    def forward(line, x):
        return function(line, x), poptorch.identity_loss(line.weight * x, "mean")

    return Apply(forward, weight=nn.Parameter(torch.ones(())))


REASSIGNED = "Parameter weight is reassigned within the model when calling the forward"


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: setattr(line, "weight", nn.Parameter(torch.zeros(()))), REASSIGNED),
        (lambda line: setattr(line.weight, "data", torch.zeros(())), REASSIGNED),
        (lambda line: torch.no_grad()(line.weight.clamp_)(max=0.5), "changes the parameter 'weight' in place"),
        (lambda line: line.weight.data.clamp_(max=0.5), "changes the parameter 'weight' in place"),
    ],
)
def test_changing_a_parameter_in_place_is_rejected(wrap, change, message):
    model = before(lambda line, x: change(line))
    rejects(poptorch.Error, message, wrap(model, options()), torch.ones(1))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_tensor_that_is_no_buffer_keeps_its_value_of_the_compilation(replicas):
    def count(model, x):
        model.calls += 1
        return model.calls + x

    model = Apply(count, calls=torch.tensor([0.0]))
    with torch.inference_mode(replicas == 1):
        inference = poptorch.inferenceModel(model, options(replicas=replicas))
        assert [inference(torch.zeros(replicas)).tolist() for _ in range(3)] == [[1] * replicas] * 3
    assert model.calls.tolist() == [1], "the forward that is traced changes the host's tensor"


@pytest.mark.parametrize(
    "normalize",
    [
        lambda m, x: torch.batch_norm(x, m.scale, None, m.mean, m.var, True, 0.1, 1e-5, False),
        lambda m, x: F.batch_norm(x, m.mean, m.var, m.scale, training=True),
        lambda m, x: F.batch_norm(x, running_var=m.var, running_mean=m.mean, weight=m.scale, training=True),
        lambda m, x: torch.native_batch_norm(x, m.scale, None, m.mean, m.var, True, 0.1, 1e-5)[0],
    ],
)
def test_running_statistics_may_change_with_several_replicas(normalize):
    model = Apply(lambda m, x: poptorch.identity_loss(normalize(m, x), "sum"), scale=nn.Parameter(torch.ones(3)))
    model.register_buffer("mean", torch.zeros(3))
    model.register_buffer("var", torch.ones(3))
    poptorch.trainingModel(model, options(2))(torch.arange(12.0).view(4, 3))
    assert model.mean.tolist() == pytest.approx([0.15, 0.25, 0.35])


def closure(model):
    return lambda x: poptorch.identity_loss(model.weight * x, "mean")


def in_a_list(model):
    model.listed = [closure(model)]
    return lambda x: model.listed[0](x)


def bound_method(model):
    inner = model.forward
    return types.MethodType(lambda self, x: inner(x), model)


@pytest.mark.parametrize(
    "made", [closure, in_a_list, bound_method, lambda model: functools.partial(Line.forward, model)]
)
def test_attributes_that_refer_to_the_module_refer_to_its_copy(made):
    model = Line()
    model.forward = made(model)
    trained(model, torch.ones(2), opts=options(2), lr=0.5)
    assert (model.weight.item(), model.forward(torch.ones(())).item()) == (0.5, 0.5)


def test_python_attributes_keep_their_traced_values_and_a_closure_changes_variables():
    def count(line, x):
        line.calls = getattr(line, "calls", 0) + 1
        line.kept = x * 2
        return x * line.calls

    model = before(count)
    training = wrapped(model, options(replicas=2))
    assert [training(torch.ones(2))[0].tolist() for _ in range(3)] == [[1, 1]] * 3
    assert not hasattr(model, "calls")
    assert not any("kept" in vars(replica.memory.module) for replica in training._program._replicas)
    calls = []
    model = Line()
    model.register_forward_hook(lambda module, args, output: calls.append(module))
    inference = poptorch.inferenceModel(model, options())
    inference(torch.ones(1))
    assert calls == [inference.model], "the copy that the SDK makes of the module itself, in its one trace"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_recomputes_with_the_same_random_numbers(use_reentrant):
    def weight_of(run):
        def forward(model, x):
            y = run(lambda x: F.dropout(model.linear(x), 0.5), x.requires_grad_())
            return poptorch.identity_loss(y * y, "sum")

        model = seeded(lambda: Apply(forward, linear=nn.Linear(32, 32)))
        trained(model, torch.ones(16, 32), opts=options(2, 2, 2).randomSeed(1), lr=1e-3)
        return model.linear.weight

    checkpointed = functools.partial(checkpoint, use_reentrant=use_reentrant)
    assert torch.equal(weight_of(checkpointed), weight_of(lambda part, x: part(x)))


@pytest.mark.filterwarnings("ignore:poptorch. inputs that require a gradient")
def test_inputs_that_require_gradients_change_in_the_callers_tensor():
    inputs = [torch.ones(2), nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 1]
    with torch.no_grad():
        inputs.append(torch.ones(4)[::2])
    with torch.inference_mode():
        inputs.append(torch.ones(2))
    model = poptorch.inferenceModel(Apply(lambda x: x.add_(1)), options(2))
    for x in inputs:
        model(x)
        assert x.detach().tolist() == [2, 2]


def test_inputs_change_in_the_callers_tensor_and_parameters_of_all_branches_are_reduced():
    x = torch.tensor([1.0, 2.0])
    trained(before(lambda line, x: x.add_(1)), x, opts=options(accumulation=2))
    assert x.tolist() == [2, 3]
    trained(before(lambda line, x: x + 1), x)
    assert x.tolist() == [2, 3]

    def forward(model, x):
        return poptorch.identity_loss((model.high if x.sum() > 0 else model.low) * x, "mean")

    low, high, unused = (nn.Parameter(torch.ones(())) for _ in range(3))
    model = Apply(forward, low=low, high=high, unused=unused)
    trained(model, torch.tensor([2.0, -2.0]), opts=options(2), lr=0.5, weight_decay=0.1)
    assert model.high.item() == pytest.approx(1 - 0.5 * (1 + 0.1))
    assert (model.low.item(), model.unused.item()) == (pytest.approx(1 - 0.5 * (-1 + 0.1)), 1)


_setting = contextvars.ContextVar("setting", default=1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_replica_threads_have_the_callers_thread_local_state(replicas):
    seen = []

    def record_state(x):
        seen.append((_setting.get(), torch.get_num_threads(), torch.empty(1).device.type, torch.is_grad_enabled()))
        return x

    token = _setting.set(5)
    try:
        with torch.device("meta"):
            on_device(record_state, torch.ones(2, device="cpu"), opts=options(replicas))
    finally:
        _setting.reset(token)
    assert set(seen) == {(5, 1, "meta", False)}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_context_variable_of_a_forward_reaches_neither_other_replicas_nor_the_next_call(replicas):
    seen = queue.SimpleQueue()  # objects of libraries are shared by the replicas

    class Counted(nn.Module):
        def forward(self, x):
            seen.put(_setting.get())
            _setting.set(_setting.get() + 1)
            return x

    def count():
        model = poptorch.inferenceModel(Counted(), options(replicas))
        model.compile(torch.ones(replicas))
        while not seen.empty():
            seen.get()
        for _ in range(20):  # the first ones in threads
            model(torch.ones(replicas))
        model.destroy()
        assert [seen.get() for _ in range(20 * replicas)] == [_setting.get()] * 20 * replicas

    contextvars.copy_context().run(count)  # the compilation sets it


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_wrapped_model_is_called_by_layers_on_the_host_but_not_in_a_forward(is_compiled):
    inner = poptorch.inferenceModel(Apply(lambda x: 2 * x), options())
    if is_compiled:
        inner(torch.ones(1))
    for call in (inner, inner.compile):
        rejects(poptorch.Error, "called in the forward of another one", on_device, call, torch.ones(1))
    layer = poptorch.CPU(Apply(inner), "inner")
    model = poptorch.inferenceModel(Apply(lambda x: layer(x + 0 * torch.rand(1)) + 1), options())
    assert [model(torch.ones(1)).tolist() for _ in range(2)] == [[3], [3]]


def through_a_closure():
    base = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    recurrent, scale = nn.LSTM(4, 3), nn.Parameter(torch.ones(3))
    model = Apply(lambda x, y: F.cross_entropy(recurrent(base(x)[None])[0][0] * scale, y))
    model.base, model.recurrent, model.scale = base, recurrent, scale
    return model


@pytest.mark.parametrize("replicas", [1, 2])
def test_modules_reached_through_a_closure_are_trained(replicas):
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
    on_ipu, expected = seeded(through_a_closure), seeded(through_a_closure)
    training = wrapped(on_ipu, options(replicas).broadcastBuffers(False), lr=0.5)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    for _ in range(3):
        training(x.repeat(replicas, 1), y.repeat(replicas))
        optimizer.zero_grad()
        expected(x, y).backward()
        optimizer.step()
    training.copyWeightsToHost()
    for (name, actual), wanted in zip(on_ipu.state_dict().items(), expected.state_dict().values()):
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(actual, wanted, msg=name)
    assert all(parameter.grad is None for parameter in on_ipu.parameters())


OUTSIDE = nn.Linear(1, 1)


class UsesOutside(Line):
    def forward(self, x):
        return super().forward(OUTSIDE(x))


def test_a_parameter_outside_of_the_model_is_named_or_described():
    inner, no_function = UsesOutside(), Line()
    inner.forward = types.MethodType(UsesOutside.forward, inner)
    no_function.forward = functools.partial(UsesOutside.forward, UsesOutside())
    named = r"'OUTSIDE\.(weight|bias)', which is not part of the model"
    described = r"forward uses a parameter of shape \[.*\], which is not part of the model"
    for model, message in ((UsesOutside(), named), (nn.Sequential(inner), named), (no_function, described)):
        rejects(poptorch.Error, message, poptorch.trainingModel(model, options()), torch.ones(1, 1))


def test_the_device_has_the_name_ipu_and_writes_indices_of_32_bits():
    def add(x):
        assert poptorch._impl.isDispatchTracing() != model.isCompiled()
        return x.to("ipu") + torch.ones(2, device="ipu") + torch.ones(2, device=torch.device("ipu", 0))

    model = poptorch.inferenceModel(Apply(add), options())
    assert [model(x).tolist() for x in (torch.ones(2), torch.zeros(2))] == [[3, 3], [2, 2]]
    assert not poptorch._impl.isDispatchTracing()
    x, edges, out = torch.tensor([[2, 5], [6, 9]]), torch.tensor([1, 5, 7]), torch.zeros(2, 2, dtype=torch.int32)
    for function in (torch.bucketize, lambda x, edges, **other: torch.searchsorted(edges, x, **other)):
        call = functools.partial(function, out_int32=True)
        found = on_device(lambda x, edges, out: call(x, edges, out=out), x, edges, out)  # noqa: B023
        assert (found.dtype, found.tolist()) == (torch.int32, [[1, 1], [2, 3]])


X = torch.arange(12.0).view(4, 3) / 12


def by_grad(energy, x):
    x.requires_grad_()
    return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


def by_attribute(energy, x):
    x.requires_grad = True
    return torch.autograd.grad([energy(x).sum()], [x])[0]


def by_backward(energy, x):
    x = x.clone().requires_grad_()
    torch.autograd.backward([energy(x).sum()], inputs=[x])
    return x.grad


def by_jacobian(energy, x):
    return torch.autograd.functional.jacobian(lambda y: energy(y).sum(), x)


def of_the_weight(energy, x):
    return torch.autograd.grad(energy(x).sum(), energy[0].weight)[0].sum() * x


class Energy(nn.Sequential):
    def __init__(self, gradient=by_grad):
        super().__init__(nn.Linear(3, 4), nn.SiLU())
        self.gradient = gradient

    def forward(self, x):
        energy = nn.Sequential(self[0], self[1], nn.Softplus())
        return self.gradient(energy, x[:, :3])


class Fit(Energy):
    def forward(self, x):
        force = super().forward(x)
        return force, poptorch.identity_loss((force**2).mean(), "none")


@pytest.mark.parametrize("gradient", [by_grad, by_attribute, by_backward, by_jacobian, of_the_weight])
def test_inference_computes_gradients_in_forward(monkeypatch, gradient):
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")  # PopTorch lowers the operators that autograd makes
    model = seeded(Energy, gradient=gradient).eval()
    expected = torch.cat([model(part.clone()) for part in X.split(2)]).detach()
    inference = poptorch.inferenceModel(model, options(2))
    for _ in range(2):
        forces = inference(X)
        assert torch.allclose(forces, expected, atol=1e-6)
        assert not forces.requires_grad


def test_training_on_gradients_equals_torch_and_both_traces_show_one(monkeypatch):
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    model, reference = seeded(Fit), seeded(Fit)
    training = wrapped(model, options(), lr=0.5)
    optimizer = torch.optim.SGD(reference.parameters(), 0.5)
    for _ in range(2):
        force, _ = training(X)
        optimizer.zero_grad()
        expected, loss = reference(X.clone())
        loss.backward()
        optimizer.step()
        assert torch.allclose(force, expected, atol=1e-6)
    assert torch.allclose(model[0].weight, reference[0].weight, atol=1e-6)
    calls, graphs = [], []

    def gradient(energy, x):
        calls.append(1)
        return by_grad(energy, x)

    poptorch.inferenceModel(Energy(gradient), options())(X)
    assert calls == [1]
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_forward_hook(lambda module, args, output: graphs.append(output.requires_grad))
    poptorch.inferenceModel(model, options())(X)
    assert graphs == [False]


UPDATES = {
    "copy_": lambda state, index, y: state.copy_(y),
    "index_put_": lambda state, index, y: state.index_put_((index,), y),
    "setitem": lambda state, index, y: state.__setitem__(index, y),
    "mul_add_": lambda state, index, y: state.mul_(0.5).add_(y),
    "scatter_": lambda state, index, y: state.scatter_(0, index[:, None].expand(3, 2), y),
}


class Memory(nn.Module):
    def __init__(self, update):
        super().__init__()
        self.layer, self.update = nn.Linear(2, 2), update
        self.register_buffer("state", torch.zeros(3, 2))

    def forward(self, x, index):
        y = torch.tanh(self.layer(x + self.state[index]))
        self.update(self.state, index, y)
        return poptorch.identity_loss((y**2).sum() + self.state.sum(), "none")


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_buffer_with_a_graph_is_a_leaf_in_each_micro_batch(update, accumulation):
    model, reference = seeded(Memory, update=update), seeded(Memory, update=update)
    index = torch.tensor([2, 0, 1] * accumulation)
    training = wrapped(model, options(accumulation=accumulation), lr=0.1)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(3):
        x = torch.full((3 * accumulation, 2), 0.25 * (step + 1))
        training(x, index)
        optimizer.zero_grad()
        for part, where in zip(x.chunk(accumulation), index.chunk(accumulation)):
            (reference(part, where) / accumulation).backward()
            reference.state.detach_()
        optimizer.step()
    assert torch.allclose(model.state, reference.state, atol=1e-6)
    assert torch.allclose(model.layer.weight, reference.layer.weight, atol=1e-6)


KINDS: Dict[str, Tuple[Callable[[], torch.Tensor], str]] = {
    "empty": (lambda: torch.empty(3), "meta"),
    "tensor": (lambda: torch.tensor([1.0]), "meta"),
    "zeros_like": (lambda: torch.zeros_like(torch.from_numpy(numpy.ones(3))), "meta"),
    "normal": (lambda: torch.normal(0.0, 1.0, (3,)), "meta"),
    "within torch": (lambda: torch.utils.data.default_collate([1.0, 2.0]), "meta"),
    "with a device": (lambda: torch.ones(3, device="cpu"), "cpu"),
    "normal of tensors": (lambda: torch.normal(torch.from_numpy(numpy.ones(3)), 1.0), "cpu"),
    "from_numpy": (lambda: torch.from_numpy(numpy.ones(3)), "cpu"),
    "new_empty": (lambda: torch.from_numpy(numpy.ones(3)).new_empty(3), "cpu"),
}


def made_while_compiling(function: Callable[[], Any]) -> Any:
    made: List[Any] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1, "feed") as pool:
            made.append(pool.submit(function).result())
        return x * torch.ones(2)

    executor = poptorch.inferenceModel(Apply(forward), options())
    before = torch.empty, torch.normal
    try:
        executor.compile(torch.zeros(1, 2))
    finally:
        assert (torch.empty, torch.normal) == before
    return made[0]


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_other_threads_are_on_no_host(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    function, device = KINDS[kind]
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        assert made_while_compiling(function).device.type == device
    assert (f"({__file__}:" in caplog.text) is (device == "meta")


def test_strict_mode_names_the_thread_and_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    function = KINDS["empty"][0]
    line = f"{__file__}:{function.__code__.co_firstlineno}"
    message = rf"the thread 'feed_0' \({line}\), while the thread 'MainThread' compiles"
    rejects(poptorch.Error, message, made_while_compiling, function)
    assert made_while_compiling(lambda: torch.from_numpy(numpy.ones(3))).device.type == "cpu"
