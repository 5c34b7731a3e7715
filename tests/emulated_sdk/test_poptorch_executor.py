"""`PoplarExecutor`: wrapping, weights, attaching, buffers."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import io
import os
import subprocess
import sys
import types
import warnings
import weakref

import poptorch
import pytest
import torch
from torch import nn

from tests.support.poptorch_models import Apply, Line, batch, options, seeded, wrapped

ONE = torch.ones(1)


def train_line(opts=None):
    """Return a `Line` of weight 1, from which each update takes 0.5, and its executor."""
    model = Line()
    return model, wrapped(model, opts, lr=0.5)


def saved_and_loaded(value, **arguments):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **arguments)


def test_wrapping_replaces_classes_keeps_objects_and_freezes_the_options():
    model, opts = Line(), options()
    weight = model.weight
    training = poptorch.trainingModel(model, opts)
    assert type(model).__name__ == "PoptorchLine"
    assert isinstance(model, Line)
    assert model.weight is training.weight is weight
    assert isinstance(weight, nn.Parameter)
    with pytest.raises(AttributeError, match="no_such_name"):
        training.no_such_name  # noqa: B018
    with pytest.raises(AttributeError, match="frozen"):
        opts.deviceIterations(2)
    assert opts.defaultOutputMode()
    assert training.options.output_mode == poptorch.OutputMode.Final
    for wrap in (poptorch.trainingModel, poptorch.inferenceModel):
        with pytest.raises(poptorch.Error, match="options must be a poptorch.Options, not dict"):
            wrap(Line(), {"device_iterations": 1})


def test_a_scripted_module_is_rejected():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = nn.Sequential(torch.jit.script(nn.ReLU()))
    with pytest.raises(poptorch.Error, match="'0' is a torch.jit.ScriptModule"):
        poptorch.inferenceModel(scripted, options())


def test_a_model_is_wrapped_until_it_is_destroyed_and_can_be_called_again():
    model, training = train_line()
    for again in (model, nn.Sequential(model)):
        with pytest.raises(RuntimeError, match="already been wrapped"):
            poptorch.trainingModel(again, options())
    training.destroy()
    assert type(model) is not Line, "only a compiled model is destroyed"
    training(ONE)
    assert model.copyWeightsToHostIfNeeded()
    model.destroy()
    assert not training.isCompiled()
    assert (type(model), type(model.weight)) == (Line, nn.Parameter)
    training(ONE)
    assert model.weight.item() == 0.0
    training.destroy()
    poptorch.trainingModel(model, options())
    with pytest.raises(RuntimeError, match="already been wrapped"):
        training(ONE)


@pytest.mark.parametrize(
    "read",
    [
        lambda model: torch.tensor(model.weight.item()),
        lambda model: model.weight + 0,
        lambda model: torch.add(model.weight, 0),
        lambda model: model.weight.data,
        lambda model: model.state_dict()["weight"],
        lambda model: next(model.parameters()).detach(),
        lambda model: copy.deepcopy(model).weight,
        lambda model: dict(model.named_parameters())["weight"].clone(),
    ],
)
def test_reading_a_parameter_fetches_trained_weights_once_per_change(read, monkeypatch):
    model, training = train_line()
    downloads = []
    download = training.copyWeightsToHost
    monkeypatch.setattr(training, "copyWeightsToHost", lambda: (downloads.append(1), download()))
    for _ in range(2):
        training(ONE)
    assert model.weight.requires_grad
    assert model.weight.shape == ()
    assert not downloads
    assert read(model).item() == 0
    model.state_dict()
    assert len(downloads) == 1
    assert not training.copyWeightsToHostIfNeeded()


def test_pickled_and_copied_models_and_states_are_plain():
    model, training = train_line()
    training(ONE)
    all_classes = {"weights_only": False} if "weights_only" in inspect.signature(torch.load).parameters else {}
    for ordinary in (saved_and_loaded(model, **all_classes), copy.deepcopy(model)):
        assert (type(ordinary), type(ordinary.weight)) == (Line, nn.Parameter)
        assert ordinary.weight.item() == 0.5
    weight = saved_and_loaded(training.state_dict())["weight"]
    assert type(weight) is torch.Tensor
    assert weight.item() == 0.5


def test_the_host_s_weights_are_uploaded_by_compiling_by_copying_and_by_loading_a_state():
    model, training = train_line()

    def write(value):
        with torch.no_grad():
            model.weight.fill_(value)

    def after_an_update():
        training(ONE)
        return model.weight.item()

    for action in (training.copyWeightsToHost, training.copyWeightsToDevice):
        with pytest.raises(poptorch.Error, match="not been compiled"):
            action()
    write(3.0)
    assert after_an_update() == 2.5
    write(8.0)
    assert after_an_update() == 2.0
    write(8.0)
    training.copyWeightsToDevice()
    assert after_an_update() == 7.5
    training.load_state_dict({"weight": torch.tensor(4.0)})
    assert after_an_update() == 3.5


def test_attaching_and_detaching_keep_weights_and_momentum(caplog):
    model = Line()
    training = wrapped(model, momentum=0.9)
    with pytest.raises(poptorch.Error, match="not been compiled"):
        training.attachToDevice()
    for _ in range(2):
        training.compile(ONE)
    assert "compiled already" in caplog.text
    with pytest.raises(poptorch.Error, match="already attached"):
        training.attachToDevice()
    for is_attached_by_the_call in (True, False):
        training(ONE)
        training.detachFromDevice()
        with pytest.raises(poptorch.Error, match="not attached"):
            training.detachFromDevice()
        assert not training.isAttachedToDevice()
        if not is_attached_by_the_call:
            training.attachToDevice()
    training(ONE)
    assert training.isAttachedToDevice()
    assert model.weight.item() == pytest.approx(1 - 0.1 * (1 + 1.9 + 2.71))


@pytest.mark.parametrize("connection", list(poptorch.ConnectionType))
def test_compiling_attaches_except_with_connection_type_never(connection):
    training = poptorch.trainingModel(Line(), options().connectionType(connection))
    training.compile(ONE)
    assert training.isCompiled()
    assert training.isAttachedToDevice() is (connection != poptorch.ConnectionType.Never)
    if connection == poptorch.ConnectionType.Never:
        for action in (lambda: training(ONE), training.attachToDevice):
            with pytest.raises(AssertionError, match=r"ConnectionType\.Never"):
                action()


def test_inference_uses_weights_trained_on_the_same_module_or_executor():
    class Scale(Line):
        def forward(self, x):
            return super().forward(x) if self.training else self.weight * x

    model = Scale()
    training = wrapped(model, lr=0.5)
    model.eval()
    inference = poptorch.inferenceModel(model, options())
    assert [(training(ONE).item(), inference(ONE).item()) for _ in range(2)] == [(1.0, 0.5), (0.5, 0.0)]
    model.train()
    inference = poptorch.inferenceModel(training, options())
    assert inference.model.weight is model.weight
    inference.model.eval()  # a shallow copy: the mode of the module itself is its own
    assert (inference.training, model.training) == (False, True)
    with pytest.raises(poptorch.Error, match="leave it as its default value"):
        poptorch.inferenceModel(Line(), options(accumulation=2))


def test_training_mode_is_fixed_by_wrapping_and_compiling():
    model = Apply(lambda self, x: (x, self.training, self.inner.training), inner=nn.Dropout(0.5))
    inference = poptorch.inferenceModel(model, options())
    for mode in (False, True):
        model.train(mode)
        assert inference(ONE)[1:] == (True, False)


def test_hooks_run_before_and_after_a_compilation():
    seen = []
    before = poptorch.registerPreCompileHook(lambda: seen.append("before"))
    after = poptorch.registerPostCompileHook(lambda: seen.append("after"))
    train_line()[1].compile(ONE)
    before.remove()
    after.remove()
    train_line()[1].compile(ONE)
    assert seen == ["before", "after"]
    with pytest.raises(RuntimeError, match="must be callable"):
        poptorch.registerPreCompileHook(3)


def test_the_progress_bar_is_optional_and_closed_by_a_failure(capsys):
    poptorch.inferenceModel(nn.ReLU(), poptorch.Options())(ONE)
    assert "Graph compilation" in capsys.readouterr().err
    poptorch.inferenceModel(nn.ReLU(), options())(ONE)
    assert not capsys.readouterr().err
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        poptorch.trainingModel(nn.Linear(1, 1), poptorch.Options())(torch.ones(1, 1))
    assert "Graph compilation: 100%" in capsys.readouterr().err


class Counting(Line):
    """Counts its forwards in a buffer."""

    def __init__(self, dtype=torch.float):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=dtype))

    def forward(self, x):
        self.count += 1
        return self.count, super().forward(x)


def test_float_buffers_change_in_every_micro_batch_and_integers_are_constants():
    model = Counting()
    training = poptorch.trainingModel(model, options(accumulation=3, iterations=2).outputMode(poptorch.OutputMode.All))
    assert training(torch.ones(6))[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert model.count.item() == 6
    model = Counting(torch.long)
    training = poptorch.trainingModel(model, options(replicas=2, accumulation=2))
    for _ in range(2):
        assert training(torch.ones(4))[0].tolist() == [1, 1]
    assert model.count.item() == 0


def test_changed_buffers_with_replicas_need_broadcast_buffers_false_and_none_may_be_reassigned():
    class Reassigning(Counting):
        def forward(self, x):
            self.count = self.count + 1
            return Line.forward(self, x)

    with pytest.raises(poptorch.Error, match="broadcastBuffers"):
        poptorch.trainingModel(Counting(), options(replicas=2))(torch.ones(2))
    opts = options(replicas=2).broadcastBuffers(False)
    poptorch.trainingModel(Counting(), opts)(torch.ones(2))
    with pytest.raises(poptorch.Error, match="Buffer count is reassigned within the model when calling the forward"):
        poptorch.trainingModel(Reassigning(), options())(ONE)
    removing = Apply(lambda model, x: model._buffers.pop("count") + x, is_model=True)
    removing.register_buffer("count", torch.ones(1))
    with pytest.raises(poptorch.Error, match="Buffer count is removed from the model when calling the forward method"):
        poptorch.inferenceModel(removing, options())(ONE)


def test_statistics_are_per_replica_and_the_host_gets_those_of_replica_0():
    images, labels = batch(8)
    model, alone = seeded(), seeded()
    training = wrapped(model, options(replicas=2))
    training.compile(images, labels)
    training.copyWeightsToHost()
    for name, tensor in alone.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), "compiling changes no weights and buffers"
    training(images, labels)
    alone(images[:4], labels[:4])
    assert torch.equal(model.norm.running_mean, alone.norm.running_mean)
    assert model.norm.num_batches_tracked.item() == 0


def test_attributes_that_cannot_be_copied_are_shared():
    def forward(line, x):
        assert line.layers[0] is line.inner
        return line.inner(x)

    inner = Line()
    gone = weakref.proxy(Line())
    nested = [gone, types.SimpleNamespace(gone=gone)]
    model = Apply(forward, inner=inner, handle=(item for item in [1]), layers=[inner], nested=nested)
    poptorch.trainingModel(model, options(2))(torch.ones(2))


@pytest.mark.usefixtures("processes")
def test_a_saved_model_loads_without_poptorch(tmp_path, monkeypatch):
    (tmp_path / "plain_model.py").write_text("import torch\nclass Plain(torch.nn.Linear):\n    pass\n")
    program = (
        "import sys, torch\n"
        "assert not any('emulated_sdk' in path for path in sys.path)\n"
        "model = torch.load('model.pt', weights_only=False)\n"
        "assert type(model).__name__ == 'Plain' and type(model.weight) is torch.nn.Parameter\n"
        "assert 'poptorch' not in sys.modules\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("plain_model").Plain(2, 2)
    training = poptorch.trainingModel(model, options())
    torch.save(training.model, tmp_path / "model.pt")
    del sys.modules["plain_model"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, timeout=60, check=True)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_without_parameters_returns_its_loss(replicas):
    images, labels = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    loss = poptorch.trainingModel(Apply(nn.functional.cross_entropy), options(replicas))(images, labels)
    torch.testing.assert_close(loss.mean(), torch.tensor(3.0).log())


def test_a_model_that_is_no_longer_used_is_collected():
    model, training = train_line()
    training(ONE)
    references = [weakref.ref(model), weakref.ref(training)]
    del model, training
    gc.collect()
    assert [reference() for reference in references] == [None, None]
