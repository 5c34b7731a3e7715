"""What a forward may do on the device, and which state of the host it uses."""

from __future__ import annotations

import contextvars
import functools
import types

import poptorch
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.poptorch_models import Apply, Line, on_device, options, seeded, trained, wrapped


class Before(Line):
    """A `Line` whose forward first calls a function, and returns its result, too."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        result = self.function(self, x)
        return result, super().forward(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda line, x: setattr(line, "weight", nn.Parameter(torch.zeros(()))),
        lambda line, x: setattr(line.weight, "data", torch.zeros(())),
    ],
)
def test_reassigning_a_parameter_is_rejected(change):
    with pytest.raises(
        poptorch.Error, match="Parameter weight is reassigned within the model when calling the forward"
    ):
        trained(Before(change), torch.ones(1))


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
@pytest.mark.parametrize("target", [lambda line: line.weight, lambda line: line.weight.data])
def test_changing_a_parameter_in_place_is_rejected(wrap, target):
    clamped = Before(lambda line, x: torch.no_grad()(target(line).clamp_)(max=0.5))
    with pytest.raises(poptorch.Error, match="changes the parameter 'weight' in place"):
        wrap(clamped, options())(torch.ones(1))


def test_python_attributes_keep_their_traced_values():
    def count(line, x):
        line.calls = getattr(line, "calls", 0) + 1
        line.kept = x * 2
        return x * line.calls

    model = Before(count)
    training = wrapped(model, options(replicas=2))
    assert [training(torch.ones(2))[0].tolist() for _ in range(3)] == [[1, 1]] * 3
    assert not hasattr(model, "calls")
    assert not any("kept" in vars(replica.memory.module) for replica in training._program._replicas)


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


def test_inputs_changed_in_place_change_in_the_callers_tensor():
    x = torch.tensor([1.0, 2.0])
    trained(Before(lambda line, x: x.add_(1)), x, opts=options(accumulation=2))
    assert x.tolist() == [2, 3]
    trained(Before(lambda line, x: x + 1), x)
    assert x.tolist() == [2, 3]


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
    assert model.weight.item() == 0.5
    assert model.forward(torch.ones(())).item() == 0.5


def test_a_closure_changes_variables_of_the_program():
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


def test_parameters_of_a_branch_that_was_not_traced_are_reduced():
    def forward(model, x):
        return poptorch.identity_loss((model.high if x.sum() > 0 else model.low) * x, "mean")

    low, high, unused = (nn.Parameter(torch.ones(())) for _ in range(3))
    model = Apply(forward, low=low, high=high, unused=unused)
    trained(model, torch.tensor([2.0, -2.0]), opts=options(2), lr=0.5, weight_decay=0.1)
    assert model.high.item() == pytest.approx(1 - 0.5 * (1 + 0.1))
    assert model.low.item() == pytest.approx(1 - 0.5 * (-1 + 0.1))
    assert model.unused.item() == 1


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


def through_a_closure():
    """Return a model whose forward reaches its modules through the closure only."""
    base = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    recurrent = nn.LSTM(4, 3)
    scale = nn.Parameter(torch.ones(3))
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
    inner = UsesOutside()
    inner.forward = types.MethodType(UsesOutside.forward, inner)
    no_function = Line()
    no_function.forward = functools.partial(UsesOutside.forward, UsesOutside())
    named = r"'OUTSIDE\.(weight|bias)', which is not part of the model"
    described = r"forward uses a parameter of shape \[.*\], which is not part of the model"
    for model, message in ((UsesOutside(), named), (nn.Sequential(inner), named), (no_function, described)):
        with pytest.raises(poptorch.Error, match=message):
            poptorch.trainingModel(model, options())(torch.ones(1, 1))


def test_the_device_has_the_name_ipu():
    def add(x):
        assert poptorch._impl.isDispatchTracing() != model.isCompiled()
        return x.to("ipu") + torch.ones(2, device="ipu") + torch.ones(2, device=torch.device("ipu", 0))

    model = poptorch.inferenceModel(Apply(add), options())
    assert model(torch.ones(2)).tolist() == [3, 3]
    assert model(torch.zeros(2)).tolist() == [2, 2]
    assert not poptorch._impl.isDispatchTracing()


@pytest.mark.parametrize("function", [torch.bucketize, lambda x, edges, **other: torch.searchsorted(edges, x, **other)])
def test_indices_of_32_bits_are_written_into_an_output_of_the_device(function):
    x, edges, out = torch.tensor([[2, 5], [6, 9]]), torch.tensor([1, 5, 7]), torch.zeros(2, 2, dtype=torch.int32)
    found = on_device(lambda x, edges, out: function(x, edges, out_int32=True, out=out), x, edges, out)
    assert found.dtype == torch.int32
    assert found.tolist() == [[1, 1], [2, 3]]
