"""What a forward may do on the device, and which state of the host it uses."""

from __future__ import annotations

import contextvars
import functools
import types

import poptorch
import pytest
import torch
import torch.nn.functional as F
from poptorch_models import Line, options, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint


def line_with(forward, **kwargs):
    """Return a `Line` whose forward first calls `forward(self, x)`, and its training executor."""

    class Changed(Line):
        def forward(self, x):
            result = forward(self, x)
            loss = super().forward(x)
            return loss if result is None else (result, loss)

    model = Changed()
    training = poptorch.trainingModel(model, options(**kwargs), poptorch.optim.SGD(model.parameters(), lr=0.5))
    return model, training


def reassign(line, x):
    line.weight = nn.Parameter(torch.zeros(()))


def reassign_data(line, x):
    line.weight.data = torch.zeros(())


@pytest.mark.parametrize("change", [reassign, reassign_data])
def test_reassigning_a_parameter_is_rejected(change):
    with pytest.raises(poptorch.Error, match="parameter 'weight' was reassigned"):
        line_with(change)[1](torch.ones(1))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("target", [lambda line: line.weight, lambda line: line.weight.data])
def test_changing_a_parameter_in_place_is_rejected(is_training, target):
    class Clamped(Line):
        def forward(self, x):
            with torch.no_grad():
                target(self).clamp_(max=0.5)
            return super().forward(x)

    wrap = poptorch.trainingModel if is_training else poptorch.inferenceModel
    with pytest.raises(poptorch.Error, match="changes the parameter 'weight' in place"):
        wrap(Clamped(), options())(torch.ones(1))


def test_python_attributes_keep_their_traced_values():
    def count(line, x):
        line.calls = getattr(line, "calls", 0) + 1
        return x * line.calls

    model, training = line_with(count, replicas=2)
    assert [training(torch.ones(2))[0].tolist() for _ in range(3)] == [[1, 1]] * 3
    assert not hasattr(model, "calls")


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_tensor_that_is_no_buffer_keeps_its_value_of_the_compilation(replicas):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = torch.tensor([0.0])

        def forward(self, x):
            self.calls += 1
            return self.calls + x

    model = Counter()
    with torch.inference_mode(replicas == 1):
        inference = poptorch.inferenceModel(model, options(replicas=replicas))
        assert [inference(torch.zeros(replicas)).tolist() for _ in range(3)] == [[1] * replicas] * 3
    assert model.calls.tolist() == [1], "the forward that is traced changes the host's tensor"


def test_tensors_that_forward_assigns_to_attributes_are_released():
    seen = []

    def keep(line, x):
        line.kept = x * 2
        seen.append("kept" in vars(line))

    _, training = line_with(keep)
    training(torch.ones(1))
    assert not any("kept" in vars(replica.memory.module) for replica in training._program._replicas)


def test_inputs_changed_in_place_change_in_the_callers_tensor():
    x = torch.tensor([1.0, 2.0])
    line_with(lambda line, x: x.add_(1), accumulation=2)[1](x)
    assert x.tolist() == [2, 3]
    line_with(lambda line, x: x + 1)[1](x)
    assert x.tolist() == [2, 3]


class Norm(nn.Module):
    def __init__(self, normalize):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.scale = nn.Parameter(torch.ones(3))
        self.normalize = normalize

    def forward(self, x):
        return poptorch.identity_loss(self.normalize(self, x), "sum")


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
    model = Norm(normalize)
    poptorch.trainingModel(model, options(2))(torch.arange(12.0).view(4, 3))
    assert model.mean.tolist() == pytest.approx([0.15, 0.25, 0.35])


def closure(model):
    return lambda x: poptorch.identity_loss(model.weight * x, "mean")


def bound_method(model):
    inner = model.forward
    return types.MethodType(lambda self, x: inner(x), model)


def partial(model):
    return functools.partial(Line.forward, model)


def in_a_list(model):
    model.listed = [closure(model)]
    return lambda x: model.listed[0](x)


@pytest.mark.parametrize("made", [closure, bound_method, partial, in_a_list])
def test_attributes_that_refer_to_the_module_refer_to_its_copy(made):
    model = Line()
    model.forward = made(model)
    training = poptorch.trainingModel(model, options(2), poptorch.optim.SGD([model.weight], lr=0.5))
    training(torch.ones(2))
    assert model.weight.item() == 0.5
    assert model.forward(torch.ones(())).item() == 0.5


def test_a_closure_changes_variables_of_the_program():
    calls = []
    model = Line()
    model.register_forward_hook(lambda module, args, output: calls.append(module))
    poptorch.inferenceModel(model, options())(torch.ones(1))
    assert len(calls) == 2
    assert model not in calls


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_recomputes_with_the_same_random_numbers(use_reentrant):
    class Dropped(nn.Module):
        def __init__(self, is_checkpointed):
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.is_checkpointed = is_checkpointed

        def part(self, x):
            return F.dropout(self.linear(x), 0.5)

        def forward(self, x):
            x = x.requires_grad_() if self.is_checkpointed else x
            y = checkpoint(self.part, x, use_reentrant=use_reentrant) if self.is_checkpointed else self.part(x)
            return poptorch.identity_loss(y * y, "sum")

    weights = []
    for is_checkpointed in (True, False):
        model = seeded(lambda is_checkpointed=is_checkpointed: Dropped(is_checkpointed))
        opts = options(4, 2, 3).randomSeed(1)
        poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=1e-3))(torch.ones(48, 32))
        weights.append(model.linear.weight.detach().clone())
    assert torch.equal(*weights)


class Branching(nn.Module):
    """Uses one of two weights, depending on its input."""

    def __init__(self):
        super().__init__()
        self.low = nn.Parameter(torch.ones(()))
        self.high = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return poptorch.identity_loss((self.high if x.sum() > 0 else self.low) * x, "mean")


def test_parameters_of_a_branch_that_was_not_traced_are_reduced():
    model = Branching()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    training = poptorch.trainingModel(model, options(2), optimizer)
    training(torch.tensor([2.0, -2.0]))
    assert model.high.item() == pytest.approx(1 - 0.5 * (1 + 0.1))
    assert model.low.item() == pytest.approx(1 - 0.5 * (-1 + 0.1))
    assert model.unused.item() == 1


_setting = contextvars.ContextVar("setting", default=1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_replica_threads_have_the_callers_thread_local_state(replicas):
    seen = []

    class RecordState(nn.Module):
        def forward(self, x):
            seen.append((_setting.get(), torch.get_num_threads(), torch.empty(1).device.type, torch.is_grad_enabled()))
            return x

    model = poptorch.inferenceModel(RecordState(), options(replicas))
    token, threads = _setting.set(5), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with torch.device("meta"):
            model(torch.ones(2, device="cpu"))
    finally:
        torch.set_num_threads(threads)
        _setting.reset(token)
    assert set(seen) == {(5, 1, "meta", False)}


def through_a_closure(seed):
    """Return a model whose forward reaches its modules through the closure only."""
    torch.manual_seed(seed)
    base = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    recurrent = nn.LSTM(4, 3)
    scale = nn.Parameter(torch.ones(3))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.recurrent, self.scale = base, recurrent, scale

        def forward(self, x, y):
            return F.cross_entropy(recurrent(base(x)[None])[0][0] * scale, y)

    return Model()


@pytest.mark.parametrize("replicas", [1, 2])
def test_modules_reached_through_a_closure_are_trained(replicas):
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
    trained, expected = through_a_closure(0), through_a_closure(0)
    opts = options(replicas).broadcastBuffers(False)
    training = poptorch.trainingModel(trained, opts, poptorch.optim.SGD(trained.parameters(), lr=0.5))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    for _ in range(3):
        training(x.repeat(replicas, 1), y.repeat(replicas))
        optimizer.zero_grad()
        expected(x, y).backward()
        optimizer.step()
    training.copyWeightsToHost()
    for (name, actual), wanted in zip(trained.state_dict().items(), expected.state_dict().values()):
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(actual, wanted, msg=name)
    assert all(parameter.grad is None for parameter in trained.parameters())


OUTSIDE = nn.Linear(1, 1)


def test_a_parameter_outside_of_the_model_is_named():
    with pytest.raises(poptorch.Error, match=r"'OUTSIDE\.(weight|bias)', which is not part of the model"):
        poptorch.trainingModel(UsesOutside(), options())(torch.ones(1, 1))


class UsesOutside(Line):
    def forward(self, x):
        return super().forward(OUTSIDE(x))


def test_a_parameter_outside_of_the_model_is_named_if_a_submodule_uses_it():
    inner = UsesOutside()
    inner.forward, outer = types.MethodType(UsesOutside.forward, inner), nn.Sequential(inner)
    with pytest.raises(poptorch.Error, match=r"'OUTSIDE\.(weight|bias)'"):
        poptorch.trainingModel(outer, options())(torch.ones(1, 1))


def test_a_parameter_outside_of_the_model_is_described_if_forward_is_no_function():
    model = Line()
    model.forward = functools.partial(UsesOutside.forward, UsesOutside())
    with pytest.raises(
        poptorch.Error, match=r"forward uses a parameter of shape \[.*\], which is not part of the model"
    ):
        poptorch.trainingModel(model, options())(torch.ones(1, 1))


def test_the_device_has_the_name_ipu():
    class Model(nn.Module):
        def forward(self, x):
            assert poptorch._impl.isDispatchTracing() != model.isCompiled()
            return x.to("ipu") + torch.ones(2, device="ipu") + torch.ones(2, device=torch.device("ipu", 0))

    model = poptorch.inferenceModel(Model(), options())
    assert model(torch.ones(2)).tolist() == [3, 3]
    assert model(torch.zeros(2)).tolist() == [2, 2]
    assert not poptorch._impl.isDispatchTracing()
