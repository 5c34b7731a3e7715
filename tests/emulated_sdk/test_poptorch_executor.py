"""`PoplarExecutor`: wrapping, weights, attaching, buffers."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import os
import subprocess
import sys
import warnings
import weakref

import poptorch
import pytest
import torch
from poptorch_models import Classifier, Line, batch, options, seeded
from torch import nn


def train_line(lr=0.5, **kwargs):
    model = Line()
    return model, poptorch.trainingModel(model, options(**kwargs), poptorch.optim.SGD(model.parameters(), lr=lr))


class Downloads:
    """Counts how often an executor's weights are fetched."""

    def __init__(self, training, monkeypatch):
        self.count = 0
        download = training.copyWeightsToHost

        def counted_download():
            self.count += 1
            download()

        monkeypatch.setattr(training, "copyWeightsToHost", counted_download)


def test_wrapping_replaces_classes_and_keeps_objects():
    model = Line()
    weight = model.weight
    poptorch.trainingModel(model, options())
    assert type(model).__name__ == "PoptorchLine"
    assert isinstance(model, Line)
    assert model.weight is weight
    assert isinstance(weight, nn.Parameter)


def test_a_model_cannot_be_wrapped_twice():
    model, training = train_line()
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(model, options())
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(nn.Sequential(model), options())
    training(torch.ones(1))
    training.destroy()
    assert type(model) is Line
    assert type(model.weight) is nn.Parameter
    poptorch.trainingModel(model, options())


def test_the_wrapped_module_has_destroy_and_copy_weights_to_host():
    model, training = train_line()
    training(torch.ones(1))
    assert model.copyWeightsToHostIfNeeded()
    model.destroy()
    assert type(model) is Line
    assert not training.isCompiled()


def test_destroying_before_compiling_does_not_unwrap():
    model, training = train_line()
    training.destroy()
    assert type(model) is not Line


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
def test_reading_a_parameter_fetches_trained_weights(read):
    model, training = train_line()
    training(torch.ones(1))
    assert read(model).item() == 0.5


def test_weights_are_fetched_when_read_and_once_per_change(monkeypatch):
    model, training = train_line()
    downloads = Downloads(training, monkeypatch)
    for _ in range(3):
        training(torch.ones(1))
    assert downloads.count == 0
    assert model.weight.requires_grad
    assert model.weight.shape == ()
    assert downloads.count == 0
    model.weight.item()
    model.state_dict()
    assert downloads.count == 1
    assert not training.copyWeightsToHostIfNeeded()


def test_a_pickled_or_copied_model_has_its_own_class():
    model, training = train_line()
    training(torch.ones(1))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, **({"weights_only": False} if "weights_only" in torch.load.__code__.co_varnames else {}))
    for ordinary in (loaded, copy.deepcopy(model)):
        assert type(ordinary) is Line
        assert type(ordinary.weight) is nn.Parameter
        assert ordinary.weight.item() == 0.5


def test_a_saved_state_dict_has_plain_tensors():
    model, training = train_line()
    training(torch.ones(1))
    file = io.BytesIO()
    torch.save(training.state_dict(), file)
    file.seek(0)
    weight = torch.load(file)["weight"]
    assert type(weight) is torch.Tensor
    assert weight.item() == 0.5


def test_copy_weights_to_device_uploads_the_present_weights():
    model, training = train_line()
    training(torch.ones(1))
    with torch.no_grad():
        model.weight.fill_(8.0)
    training.copyWeightsToDevice()
    training(torch.ones(1))
    assert model.weight.item() == 7.5


def test_a_host_write_without_upload_does_not_reach_the_device():
    model, training = train_line()
    training(torch.ones(1))
    with torch.no_grad():
        model.weight.fill_(8.0)
    training(torch.ones(1))
    assert model.weight.item() == 0


def test_compiling_uploads_the_present_weights():
    model, training = train_line()
    with torch.no_grad():
        model.weight.fill_(3.0)
    training(torch.ones(1))
    assert model.weight.item() == 2.5


def test_load_state_dict_uploads():
    model, training = train_line()
    training(torch.ones(1))
    training.load_state_dict({"weight": torch.tensor(4.0)})
    training(torch.ones(1))
    assert model.weight.item() == 3.5


def test_attaching_and_detaching_keep_weights_and_momentum():
    steady, interrupted = Line(), Line()
    for model in (steady, interrupted):
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        training = poptorch.trainingModel(model, options(), optimizer)
        for _ in range(3):
            training(torch.ones(1))
            if model is interrupted:
                training.detachFromDevice()
                assert not training.isAttachedToDevice()
                training.attachToDevice()
    assert steady.weight.item() == interrupted.weight.item()


def test_a_call_attaches():
    _, training = train_line()
    training(torch.ones(1))
    training.detachFromDevice()
    training(torch.ones(1))
    assert training.isAttachedToDevice()


def test_attaching_or_detaching_twice_is_rejected():
    _, training = train_line()
    with pytest.raises(poptorch.Error, match="not been compiled"):
        training.attachToDevice()
    training.compile(torch.ones(1))
    assert training.isCompiled()
    with pytest.raises(poptorch.Error, match="already attached"):
        training.attachToDevice()
    training.detachFromDevice()
    with pytest.raises(poptorch.Error, match="not attached"):
        training.detachFromDevice()


def test_copying_weights_needs_a_compiled_model():
    _, training = train_line()
    with pytest.raises(poptorch.Error, match="not been compiled"):
        training.copyWeightsToHost()
    with pytest.raises(poptorch.Error, match="not been compiled"):
        training.copyWeightsToDevice()


def test_compiling_does_not_change_weights_and_buffers():
    model = seeded()
    before = copy.deepcopy(model.state_dict())
    training = poptorch.trainingModel(model, options())
    training.compile(*batch(4))
    training.copyWeightsToHost()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_compiling_twice_only_warns(caplog):
    _, training = train_line()
    training.compile(torch.ones(1))
    training.compile(torch.ones(1))
    assert "compiled already" in caplog.text


def test_inference_uses_weights_trained_on_the_same_module():
    class Scale(Line):
        def forward(self, x):
            return super().forward(x) if self.training else self.weight * x

    model = Scale()
    training = poptorch.trainingModel(model, options(), poptorch.optim.SGD(model.parameters(), lr=0.5))
    model.eval()
    inference = poptorch.inferenceModel(model, options())
    outputs = []
    for _ in range(2):
        training(torch.ones(1))
        outputs.append(inference(torch.ones(1)).item())
    assert outputs == [0.5, 0.0]


def test_an_executor_can_be_wrapped_for_inference():
    model, training = train_line()
    inference = poptorch.inferenceModel(training, options())
    assert inference.model.weight is model.weight
    inference.model.eval()  # a shallow copy: the mode of the module itself is its own
    assert (inference.training, model.training) == (False, True)


def test_training_mode_is_fixed_by_wrapping_and_compiling():
    class Mode(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Dropout(0.5)

        def forward(self, x):
            return x, self.training, self.inner.training

    model = Mode()
    inference = poptorch.inferenceModel(model, options())
    model.eval()
    assert inference(torch.ones(1))[1:] == (True, False)
    model.train()
    assert inference(torch.ones(1))[1:] == (True, False)


def test_inference_rejects_gradient_accumulation():
    with pytest.raises(poptorch.Error, match="leave it as its default value"):
        poptorch.inferenceModel(Line(), options(accumulation=2))


def test_unknown_attributes_are_those_of_the_model():
    model, training = train_line()
    assert training.weight is model.weight
    assert training.options.device_iterations == 1
    with pytest.raises(AttributeError, match="no_such_name"):
        training.no_such_name  # noqa: B018


def test_wrapping_freezes_the_options_and_uses_a_clone():
    opts = options()
    training = poptorch.trainingModel(Line(), opts)
    with pytest.raises(AttributeError, match="frozen"):
        opts.deviceIterations(2)
    assert opts.defaultOutputMode()
    assert training.options.output_mode == poptorch.OutputMode.Final


def test_hooks_run_before_and_after_a_compilation():
    seen = []
    before = poptorch.registerPreCompileHook(lambda: seen.append("before"))
    after = poptorch.registerPostCompileHook(lambda: seen.append("after"))
    train_line()[1].compile(torch.ones(1))
    before.remove()
    after.remove()
    train_line()[1].compile(torch.ones(1))
    assert seen == ["before", "after"]
    with pytest.raises(RuntimeError, match="not callable"):
        poptorch.registerPreCompileHook(3)


def test_the_progress_bar_is_optional(capsys):
    poptorch.inferenceModel(nn.ReLU(), poptorch.Options())(torch.ones(1))
    assert "Graph compilation" in capsys.readouterr().err
    poptorch.inferenceModel(nn.ReLU(), options())(torch.ones(1))
    assert not capsys.readouterr().err


class Counting(Line):
    """Counts its forwards in a buffer of any type."""

    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=dtype))

    def forward(self, x):
        self.count += 1
        return self.count, super().forward(x)


def test_float_buffers_change_in_every_micro_batch():
    model = Counting(torch.float)
    training = poptorch.trainingModel(model, options(accumulation=3, iterations=2).outputMode(poptorch.OutputMode.All))
    assert training(torch.ones(6))[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert model.count.item() == 6


def test_integer_buffers_are_constants():
    model = Counting(torch.long)
    training = poptorch.trainingModel(model, options(replicas=2, accumulation=2))
    for _ in range(2):
        assert training(torch.ones(4))[0].tolist() == [1, 1]
    assert model.count.item() == 0


def test_changed_buffers_with_replicas_need_broadcast_buffers_false():
    with pytest.raises(poptorch.Error, match="broadcastBuffers"):
        poptorch.trainingModel(Counting(torch.float), options(replicas=2))(torch.ones(2))
    opts = options(replicas=2).broadcastBuffers(False)
    poptorch.trainingModel(Counting(torch.float), opts)(torch.ones(2))


def test_reassigning_a_buffer_is_rejected():
    class Reassigning(Counting):
        def forward(self, x):
            self.count = self.count + 1
            return Line.forward(self, x)

    with pytest.raises(poptorch.Error, match="buffer .count. was reassigned"):
        poptorch.trainingModel(Reassigning(torch.float), options())(torch.ones(1))


def test_statistics_are_per_replica_and_the_host_gets_those_of_replica_0():
    model, alone = seeded(), seeded()
    training = poptorch.trainingModel(model, options(replicas=2))
    images, labels = batch(8)
    training(images, labels)
    alone(images[:4], labels[:4])
    assert torch.equal(model.norm.running_mean, alone.norm.running_mean)
    assert model.norm.num_batches_tracked.item() == 0


def test_attributes_that_cannot_be_copied_are_shared():
    class WithHandle(Classifier):
        def __init__(self):
            super().__init__()
            self.handle = (item for item in [1])
            self.layers = [self.conv]

        def forward(self, images, labels=None):
            assert self.layers[0] is self.conv
            return super().forward(images, labels)

    poptorch.trainingModel(WithHandle(), options(2))(*batch(4))


@pytest.mark.parametrize("connection", list(poptorch.ConnectionType))
def test_compiling_attaches_except_with_connection_type_never(connection):
    training = poptorch.trainingModel(Line(), options().connectionType(connection))
    training.compile(torch.ones(1))
    assert training.isCompiled()
    assert training.isAttachedToDevice() is (connection != poptorch.ConnectionType.Never)
    if connection == poptorch.ConnectionType.Never:
        for action in (lambda: training(torch.ones(1)), training.attachToDevice):
            with pytest.raises(AssertionError, match=r"ConnectionType\.Never"):
                action()


def test_a_saved_model_loads_without_poptorch(tmp_path, monkeypatch):
    (tmp_path / "plain_model.py").write_text(
        "import torch\n"
        "class Plain(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.mse_loss(super().forward(x), x)\n"
    )
    program = (
        "import sys, torch\n"
        "assert not any('emulated_sdk' in path for path in sys.path)\n"
        "model = torch.load('model.pt', weights_only=False)\n"
        "assert type(model).__name__ == 'Plain' and type(model.weight) is torch.nn.Parameter\n"
        "assert 'poptorch' not in sys.modules\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("plain_model").Plain(2, 2)
    poptorch.trainingModel(model, options())(torch.ones(1, 2))
    torch.save(model, tmp_path / "model.pt")
    del sys.modules["plain_model"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == 0


class Softmax(nn.Module):
    def forward(self, x, labels):
        return nn.functional.cross_entropy(x, labels)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_without_parameters_returns_its_loss(replicas):
    images, labels = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
    loss = poptorch.trainingModel(Softmax(), options(replicas))(images, labels)
    torch.testing.assert_close(loss.mean(), torch.tensor(3.0).log())


def test_a_scripted_module_is_rejected():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = nn.Sequential(torch.jit.script(nn.ReLU()))
    with pytest.raises(poptorch.Error, match="'0' is a torch.jit.ScriptModule"):
        poptorch.inferenceModel(scripted, options())


@pytest.mark.parametrize("state", [3, "ab", [], [1, 2, 3], [1.5, 2], None])
def test_rng_state_must_be_one_or_two_integers(state):
    inference = poptorch.inferenceModel(nn.ReLU(), options())
    with pytest.raises(poptorch.Error, match=r"\[seed\] or \[seed, micro-batches\]"):
        inference.rng_state = state


def test_a_destroyed_model_can_be_called_again():
    model, training = train_line()
    training(torch.ones(1))
    training.destroy()
    training(torch.ones(1))
    assert model.weight.item() == 0.0
    training.destroy()
    poptorch.trainingModel(model, options())
    with pytest.raises(RuntimeError, match="already been wrapped"):
        training(torch.ones(1))


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_options_of_another_type_are_rejected(wrap):
    with pytest.raises(poptorch.Error, match="options must be a poptorch.Options, not dict"):
        wrap(Line(), {"device_iterations": 1})


def test_a_model_that_is_no_longer_used_is_collected():
    model, training = train_line()
    training(torch.ones(1))
    references = [weakref.ref(model), weakref.ref(training)]
    del model, training
    gc.collect()
    assert [reference() for reference in references] == [None, None]
