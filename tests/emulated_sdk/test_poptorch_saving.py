"""Saved executables and models: `save`, `compileAndExport`, `loadExecutable`, `poptorch.load`."""

from __future__ import annotations

import json

import poptorch
import pytest
import torch
from poptorch.executor import saving
from torch import nn

from tests.support.poptorch_models import Classifier, Line, batch, options, seeded, wrapped


def classifier(opts=None, dropout=0.5):
    return wrapped(seeded(Classifier, dropout=dropout), opts, momentum=0.9)


@pytest.fixture
def saved(tmp_path):
    """The file of a compiled model."""
    classifier().compileAndExport(tmp_path / "model", *batch(4))
    return tmp_path / "model"


def losses(training, calls=1, dtype=torch.float32):
    found = []
    for seed in range(calls):
        images, labels = batch(4, seed)
        found.append(training(images.to(dtype), labels)[1].item())
    return found


def test_a_loaded_model_continues_exactly(tmp_path):
    path = tmp_path / "new" / "folder" / "model.poptorch"
    training = classifier(options().randomSeed(3))
    losses(training, 2)
    training.save(path)
    loaded = poptorch.load(path)
    assert loaded.isCompiled()
    assert losses(loaded, 3) == losses(training, 3)
    assert torch.equal(loaded.model.linear.weight, training.model.linear.weight)
    training.save(path, save_rng_state=False)
    assert poptorch.load(path).rng_state == [3, 0]


def test_a_model_in_half_continues_exactly_after_it_is_loaded_and_from_a_checkpoint(tmp_path):
    chosen = {"accum_type": torch.half, "first_order_momentum_accum_type": torch.half, "loss_scaling": 64.0}
    training, other = (
        wrapped(seeded(Classifier, dropout=0.5).half(), options().randomSeed(3), "AdamW", lr=0.01, **chosen)
        for _ in range(2)
    )
    losses(training, 3, torch.half)
    training.save(tmp_path / "model")
    optimizer, model = training._optimizer.state_dict(), training.model.state_dict()
    torch.save({"optimizer": optimizer, "model": model, "rng_state": training.rng_state}, tmp_path / "checkpoint")
    expected = losses(training, 3, torch.half)
    checkpoint = torch.load(tmp_path / "checkpoint")
    other.model.load_state_dict(checkpoint["model"])
    other._optimizer.load_state_dict(checkpoint["optimizer"])
    images, labels = batch(4)
    other.compile(images.half(), labels)
    other.rng_state = checkpoint["rng_state"]
    for continued in (poptorch.load(tmp_path / "model"), other):
        assert losses(continued, 3, torch.half) == expected
        for found, weight in zip(continued.model.parameters(), training.model.parameters()):
            assert found.dtype == torch.half
            assert torch.equal(found, weight)


def test_a_loaded_executable_keeps_the_hosts_weights(tmp_path):
    classifier().compileAndExport(tmp_path / "model", *batch(4), export_model=False)
    with pytest.raises(poptorch.Error, match="export_model=False"):
        poptorch.load(tmp_path / "model")
    other = classifier()
    with torch.no_grad():
        other.model.linear.bias.fill_(0.25)
    other.loadExecutable(tmp_path / "model")
    assert other.isCompiled()
    assert other.isAttachedToDevice()
    assert other.model.linear.bias.tolist() == [0.25] * 5
    losses(other)
    with pytest.raises(poptorch.Error, match="before the model is compiled"):
        other.loadExecutable(tmp_path / "model")
    with pytest.raises(poptorch.Error, match="Shape mismatch for images"):
        other(*batch(8))


def test_inference_models_can_be_saved_and_compiled_offline(tmp_path):
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


def test_load_can_edit_options_that_the_executable_does_not_depend_on(tmp_path):
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
    with pytest.raises(poptorch.Error, match=what):
        other().loadExecutable(saved)


def test_save_needs_a_compiled_model_and_writes_into_a_directory(tmp_path, caplog):
    with pytest.raises(poptorch.Error, match="not been compiled"):
        classifier().save(tmp_path / "model")
    assert not list(tmp_path.iterdir())
    classifier().compileAndExport(tmp_path, *batch(4))
    assert [path.name for path in tmp_path.iterdir()] == ["model.poptorch"]
    assert "is a directory" in caplog.text
    assert poptorch.load(tmp_path).isCompiled()


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


def test_foreign_and_damaged_files_are_rejected(saved):
    content, other = saved.read_bytes(), classifier()
    for damage, message in DAMAGES:
        saved.write_bytes(damage(content))
        for load in (poptorch.load, other.loadExecutable):
            with pytest.raises(poptorch.Error, match=message):
                load(saved)
    with pytest.raises(poptorch.Error, match="cannot be read"):
        poptorch.load(saved.parent / "none")


def test_the_header_has_the_version_in_plain_text(tmp_path, monkeypatch, saved):
    header = saved.read_bytes()[52:].split(b"]}", 1)[0] + b"]}"
    assert json.loads(header)["poptorch"] == poptorch.__version__
    with monkeypatch.context() as earlier:
        earlier.setattr(saving, "VERSION", "3.3.0")
        classifier().compileAndExport(saved, *batch(4))
    with pytest.raises(poptorch.Error, match=r"saved by poptorch 3\.3\.0"):
        poptorch.load(saved)


class LargestIndex(Line):
    def forward(self, x):
        return super().forward(nn.functional.one_hot(x)[:, 2].float())  # needs the index 2 in every micro-batch


def test_loading_an_executable_traces_inputs_of_the_compiling_call(tmp_path):
    indices = torch.tensor([0, 2, 1, 2])
    poptorch.trainingModel(LargestIndex(), options(2)).compileAndExport(tmp_path / "model", indices)
    training = poptorch.trainingModel(LargestIndex(), options(2))
    training.loadExecutable(tmp_path / "model")
    assert training(indices).tolist() == [0.5, 0.5]


def test_a_model_that_cannot_be_pickled_is_rejected_and_leaves_no_file(tmp_path):
    class Local(Line):
        pass

    training = poptorch.trainingModel(Local(), options())
    with pytest.raises(poptorch.Error, match="export_model=False"):
        training.compileAndExport(tmp_path / "model", torch.ones(1))
    assert not list(tmp_path.iterdir())
    training.save(tmp_path / "model", export_model=False)
    poptorch.trainingModel(Local(), options()).loadExecutable(tmp_path / "model")
