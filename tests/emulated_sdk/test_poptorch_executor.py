"""`PoplarExecutor`: wrapping, weights, attaching, buffers, saved executables and models."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import io
import json
import os
import subprocess
import sys
import time
import types
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import poptorch
import pytest
import torch
from poptorch.executor import saving
from torch import nn

from tests.support.poptorch_models import Apply, Classifier, Line, batch, options, seeded, wrapped
from tests.support.refused import rejects

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


def test_wrapping_replaces_classes_keeps_objects_freezes_the_options_and_rejects_scripted_modules():
    model, opts = Line(), options()
    weight = model.weight
    training = poptorch.trainingModel(model, opts)
    assert type(model).__name__ == "PoptorchLine"
    assert isinstance(model, Line)
    assert model.weight is training.weight is weight
    assert isinstance(weight, nn.Parameter)
    with pytest.raises(AttributeError, match="no_such_name"):
        training.no_such_name  # noqa: B018
    rejects(AttributeError, "frozen", opts.deviceIterations, 2)
    assert opts.defaultOutputMode()
    assert training.options.output_mode == poptorch.OutputMode.Final
    for wrap in (poptorch.trainingModel, poptorch.inferenceModel):
        with pytest.raises(poptorch.Error, match="options must be a poptorch.Options, not dict"):
            wrap(Line(), {"device_iterations": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = nn.Sequential(torch.jit.script(nn.ReLU()))
    rejects(poptorch.Error, "'0' is a torch.jit.ScriptModule", poptorch.inferenceModel, scripted, options())


def test_a_model_is_wrapped_until_it_is_destroyed_and_can_be_called_again():
    model, training = train_line()
    for again in (model, nn.Sequential(model)):
        rejects(RuntimeError, "already been wrapped", poptorch.trainingModel, again, options())
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
    rejects(RuntimeError, "already been wrapped", training, ONE)


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
        assert (type(ordinary), type(ordinary.weight), ordinary.weight.item()) == (Line, nn.Parameter, 0.5)
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
        rejects(poptorch.Error, "not been compiled", action)
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
    rejects(poptorch.Error, "not been compiled", training.attachToDevice)
    for _ in range(2):
        training.compile(ONE)
    assert "compiled already" in caplog.text
    rejects(poptorch.Error, "already attached", training.attachToDevice)
    for is_attached_by_the_call in (True, False):
        training(ONE)
        training.detachFromDevice()
        rejects(poptorch.Error, "not attached", training.detachFromDevice)
        assert not training.isAttachedToDevice()
        if not is_attached_by_the_call:
            training.attachToDevice()
    training(ONE)
    assert training.isAttachedToDevice()
    assert model.weight.item() == pytest.approx(1 - 0.1 * (1 + 1.9 + 2.71))


@pytest.mark.parametrize("connection", list(poptorch.ConnectionType))
def test_compiling_attaches_except_with_connection_type_never(connection):
    training, other = (poptorch.trainingModel(Line(), options().connectionType(connection)) for _ in range(2))
    for each in (other, training):
        each.compile(ONE)
    assert training.isCompiled()
    for each in (other, training):  # at the same time
        assert each.isAttachedToDevice() is (connection != poptorch.ConnectionType.Never)
    if connection == poptorch.ConnectionType.Never:
        for action in (lambda: training(ONE), training.attachToDevice):
            rejects(AssertionError, r"ConnectionType\.Never", action)


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


@pytest.mark.parametrize("replicas", [1, 2])
def test_threads_that_call_a_model_wait_for_each_other(replicas):
    def twice(model, x):
        model.last = x
        time.sleep(0.001)  # other threads run
        return x + model.last

    model = poptorch.inferenceModel(Apply(twice, last=None), options(replicas))
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(model, [torch.full((replicas,), float(number)) for number in range(16)]))
    assert [result.tolist() for result in results] == [[2.0 * number] * replicas for number in range(16)]


def test_a_thread_that_evaluates_a_model_in_training_gets_the_weights_after_a_whole_call():
    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(20)])

        def forward(self, x):
            return torch.cat(list(self.weights)), poptorch.identity_loss(sum(self.weights) * x, "sum")

    model = Weights()
    training, inference = wrapped(model, options(iterations=200)), poptorch.inferenceModel(model, options())
    x = torch.ones(200)
    training(x)
    with ThreadPoolExecutor(1) as threads:
        calls = threads.submit(lambda: [training(x) for _ in range(3)])
        while not calls.done():
            weights = inference(torch.ones(1))[0]
            updates = {round(weight / -0.1) for weight in weights.tolist()}
            assert [count % 200 for count in updates] == [0]
        calls.result()


def test_hooks_run_and_the_progress_bar_is_optional_and_closed_by_a_failure(capsys):
    seen = []
    before = poptorch.registerPreCompileHook(lambda: seen.append("before"))
    after = poptorch.registerPostCompileHook(lambda: seen.append("after"))
    train_line()[1].compile(ONE)
    before.remove()
    after.remove()
    train_line()[1].compile(ONE)
    assert seen == ["before", "after"]
    rejects(RuntimeError, "must be callable", poptorch.registerPreCompileHook, 3)
    poptorch.inferenceModel(nn.ReLU(), poptorch.Options())(ONE)
    assert "Graph compilation" in capsys.readouterr().err
    poptorch.inferenceModel(nn.ReLU(), options())(ONE)
    assert not capsys.readouterr().err
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        poptorch.trainingModel(nn.Linear(1, 1), poptorch.Options())(torch.ones(1, 1))
    assert "Graph compilation: 100%" in capsys.readouterr().err


class Counting(Line):
    def __init__(self, dtype=torch.float):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=dtype))

    def forward(self, x):
        self.count += 1
        return self.count, super().forward(x)


def test_float_buffers_change_in_every_micro_batch_with_replicas_without_broadcast_and_none_is_reassigned():
    model = Counting()
    training = poptorch.trainingModel(model, options(accumulation=3, iterations=2).outputMode(poptorch.OutputMode.All))
    assert (training(torch.ones(6))[0].tolist(), model.count.item()) == ([1, 2, 3, 4, 5, 6], 6)
    model = Counting(torch.long)
    training = poptorch.trainingModel(model, options(replicas=2, accumulation=2))
    for _ in range(2):
        assert training(torch.ones(4))[0].tolist() == [1, 1]
    assert model.count.item() == 0

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


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_failed_inference_changes_neither_random_numbers_nor_buffers_nor_its_inputs(replicas):
    def forward(model, x):
        model.count += 1
        if x.sum() > 5:
            raise ValueError("sample is bad")
        x += 1
        return model.norm(nn.functional.dropout(x, training=True)) + model.count

    model = Apply(forward, norm=nn.BatchNorm1d(2))
    model.register_buffer("count", torch.zeros(()))
    inference = poptorch.inferenceModel(model, options(replicas, iterations=2).randomSeed(3).broadcastBuffers(False))
    rows = torch.zeros(4 * replicas, 2)
    first, state = inference(rows), inference.rng_state
    assert torch.equal(rows, torch.ones_like(rows)), "forward changes its input in place"
    bad = torch.cat([rows[1:], torch.full((1, 2), 9.0)])
    before = bad.clone()
    rejects(ValueError, "sample is bad", inference, bad)
    assert inference.rng_state == state
    assert torch.equal(bad, before)
    second = inference(rows.zero_())
    again = poptorch.inferenceModel(model, inference.options)
    assert torch.equal(again(rows.zero_()), first)
    assert torch.equal(again(rows.zero_()), second)


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


def test_training_mode_is_fixed_and_attributes_that_cannot_be_copied_are_shared():
    model = Apply(lambda self, x: (x, self.training, self.inner.training), inner=nn.Dropout(0.5))
    inference = poptorch.inferenceModel(model, options())
    for mode in (False, True):
        model.train(mode)
        assert inference(ONE)[1:] == (True, False)

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


def test_a_model_that_is_no_longer_used_is_collected_and_executable_caching_writes_nothing(tmp_path):
    model, training = train_line()
    training(ONE)
    references = [weakref.ref(model), weakref.ref(training)]
    del model, training
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    poptorch.inferenceModel(Line(), options().enableExecutableCaching(str(tmp_path / "cache")))(ONE)
    assert not list(tmp_path.iterdir())


def classifier(opts=None, dropout=0.5):
    return wrapped(seeded(Classifier, dropout=dropout), opts, momentum=0.9)


@pytest.fixture
def saved(tmp_path):
    classifier().compileAndExport(tmp_path / "model", *batch(4))
    return tmp_path / "model"


def losses(training, calls=1, dtype=torch.float32):
    found = []
    for seed in range(calls):
        images, labels = batch(4, seed)
        found.append(training(images.to(dtype), labels)[1].item())
    return found


IN_HALF = {"accum_type": torch.half, "first_order_momentum_accum_type": torch.half, "loss_scaling": 64.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.half])
def test_a_loaded_model_continues_exactly(tmp_path, dtype):
    path = tmp_path / "new" / "folder" / "model.poptorch"
    training = classifier(options().randomSeed(3))
    if dtype == torch.half:
        model = seeded(Classifier, dropout=0.5).half()
        training = wrapped(model, options().randomSeed(3), "AdamW", lr=0.01, **IN_HALF)
    losses(training, 2, dtype)
    training.save(path)
    loaded = poptorch.load(path)
    assert loaded.isCompiled()
    assert losses(loaded, 3, dtype) == losses(training, 3, dtype)
    for found, weight in zip(loaded.model.parameters(), training.model.parameters()):
        assert found.dtype == dtype
        assert torch.equal(found, weight)
    training.save(path, save_rng_state=False)
    assert poptorch.load(path).rng_state == [3, 0]


def test_executables_keep_the_hosts_weights_and_models_can_be_saved_and_compiled_offline(tmp_path):
    classifier().compileAndExport(tmp_path / "model", *batch(4), export_model=False)
    rejects(poptorch.Error, "export_model=False", poptorch.load, tmp_path / "model")
    other = classifier()
    with torch.no_grad():
        other.model.linear.bias.fill_(0.25)
    other.loadExecutable(tmp_path / "model")
    assert other.isCompiled()
    assert other.isAttachedToDevice()
    assert other.model.linear.bias.tolist() == [0.25] * 5
    losses(other)
    rejects(poptorch.Error, "before the model is compiled", other.loadExecutable, tmp_path / "model")
    rejects(poptorch.Error, "Shape mismatch for images", other, *batch(8))
    images = batch(4)[0]
    inference = poptorch.inferenceModel(seeded().eval(), options())
    expected = inference(images)
    inference.save(tmp_path / "saved")
    poptorch.inferenceModel(seeded().eval(), options().useOfflineIpuTarget()).compileAndExport(tmp_path / "off", images)
    for name in ("saved", "off"):
        loaded = poptorch.load(str(tmp_path / name))
        assert loaded.options.connection_type == poptorch.ConnectionType.Always
        assert torch.equal(loaded(images), expected)


@pytest.mark.parametrize("is_training", [True, False])
def test_an_executable_keeps_the_modes_it_was_compiled_for(tmp_path, is_training):
    compiled, other = (nn.Sequential(nn.Dropout(0.5)).train(mode) for mode in (is_training, not is_training))
    inference = poptorch.inferenceModel(compiled, options())
    inference.compileAndExport(tmp_path / "model", torch.ones(64), export_model=False)
    loaded = poptorch.inferenceModel(other, options())
    loaded.loadExecutable(tmp_path / "model")
    assert (set(loaded(torch.ones(64)).tolist()) == {0.0, 2.0}) is is_training
    assert other.training is not is_training


def test_save_needs_a_compiled_model_and_load_can_edit_some_options(tmp_path, caplog):
    rejects(poptorch.Error, "not been compiled", lambda: classifier().save(tmp_path / "model"))
    assert not list(tmp_path.iterdir())
    classifier().compileAndExport(tmp_path, *batch(4))
    assert [path.name for path in tmp_path.iterdir()] == ["model.poptorch"]
    assert "is a directory" in caplog.text
    assert poptorch.load(tmp_path).isCompiled()
    training = classifier(options().connectionType(poptorch.ConnectionType.Never))
    training.compileAndExport(tmp_path / "model", *batch(4))
    loaded = poptorch.load(tmp_path / "model", lambda o: o.connectionType(poptorch.ConnectionType.OnDemand))
    assert loaded.options.connection_type == poptorch.ConnectionType.OnDemand
    losses(loaded)
    with pytest.raises(poptorch.Error, match="device iterations was 1 and is 2"):
        poptorch.load(tmp_path / "model", lambda o: o.deviceIterations(2))


class Wider(Classifier):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: poptorch.inferenceModel(seeded(), options()), "kind was 'training'"),
        (lambda: poptorch.trainingModel(seeded(Wider), options()), "module '' was"),
        (lambda: classifier(options(2)), "replication factor was 1 and is 2"),
        (lambda: poptorch.trainingModel(Line(), options()), "compiled for another model"),
    ],
)
def test_an_executable_of_another_model_or_options_is_rejected(saved, other, what):
    rejects(poptorch.Error, what, lambda: other().loadExecutable(saved))


DAMAGES = [
    (lambda data: b"", "is not a valid PopTorch file"),
    (lambda data: b"PK\x03\x04" + data, "is not a valid PopTorch file"),
    (lambda data: data[:30], "truncated"),
    (lambda data: data[:100], "truncated"),
    (lambda data: data[:-1], "truncated"),
    (lambda data: data + b"more", "instead of"),
    (lambda data: data[:60] + b"?" + data[61:], "checksum of its header"),
    (lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "checksum of its section"),
    (lambda data: data.replace(b"popef\x03", b"popef\x01", 1), "another version of the emulated SDK: compile and save"),
]


def test_damaged_files_and_those_of_another_version_are_rejected(saved, tmp_path, monkeypatch):
    content, other = saved.read_bytes(), classifier()
    for damage, message in DAMAGES:
        saved.write_bytes(damage(content))
        for load in (poptorch.load, other.loadExecutable):
            rejects(poptorch.Error, message, load, saved)
    rejects(poptorch.Error, "cannot be read", poptorch.load, saved.parent / "none")
    header = saved.read_bytes()[52:].split(b"]}", 1)[0] + b"]}"
    assert json.loads(header)["poptorch"] == poptorch.__version__
    with monkeypatch.context() as earlier:
        earlier.setattr(saving, "VERSION", "3.3.0")
        classifier().compileAndExport(saved, *batch(4))
    rejects(poptorch.Error, r"saved by poptorch 3\.3\.0", poptorch.load, saved)


class LargestIndex(Line):
    def forward(self, x):
        return super().forward(nn.functional.one_hot(x)[:, 2].float())  # needs the index 2 in every micro-batch


def test_a_model_that_cannot_be_pickled_is_rejected_and_loading_traces_inputs_of_the_compiling_call(tmp_path):
    class Local(Line):
        pass

    training = poptorch.trainingModel(Local(), options())
    rejects(poptorch.Error, "export_model=False", training.compileAndExport, tmp_path / "model", torch.ones(1))
    assert not list(tmp_path.iterdir())
    training.save(tmp_path / "model", export_model=False)
    poptorch.trainingModel(Local(), options()).loadExecutable(tmp_path / "model")
    indices = torch.tensor([0, 2, 1, 2])
    poptorch.trainingModel(LargestIndex(), options(2)).compileAndExport(tmp_path / "other", indices)
    training = poptorch.trainingModel(LargestIndex(), options(2))
    training.loadExecutable(tmp_path / "other")
    assert training(indices).tolist() == [0.5, 0.5]
