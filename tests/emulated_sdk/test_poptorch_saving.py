"""Saved executables and models: `save`, `compileAndExport`, `loadExecutable`, `poptorch.load`."""

from __future__ import annotations

import json

import poptorch
import pytest
import torch
from poptorch.executor import saving
from poptorch_models import Classifier, Line, batch, options, seeded
from torch import nn


def train_classifier(opts=None, dropout=0.5):
    model = seeded(Classifier, dropout=dropout)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, poptorch.trainingModel(model, options() if opts is None else opts, optimizer)


def losses(training, calls):
    return [training(*batch(4, seed=index))[1].item() for index in range(calls)]


def test_a_loaded_model_continues_exactly(tmp_path):
    _, training = train_classifier(options().randomSeed(3))
    losses(training, 2)
    training.save(tmp_path / "new" / "folder" / "model.poptorch")
    loaded = poptorch.load(tmp_path / "new" / "folder" / "model.poptorch")
    assert loaded.isCompiled()
    assert losses(loaded, 3) == losses(training, 3)
    assert torch.equal(loaded.model.linear.weight, training.model.linear.weight)


def test_a_model_in_half_continues_exactly_after_it_is_loaded_and_from_a_checkpoint(tmp_path):
    def make():
        model = seeded(Classifier, dropout=0.5).half()
        chosen = {"accum_type": torch.half, "first_order_momentum_accum_type": torch.half, "loss_scaling": 64.0}
        optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01, **chosen)
        return model, optimizer, poptorch.trainingModel(model, options().randomSeed(3), optimizer)

    def half_losses(training):
        found = []
        for index in range(3):
            images, labels = batch(4, seed=index)
            found.append(training(images.half(), labels)[1].item())
        return found

    model, optimizer, training = make()
    half_losses(training)
    training.save(tmp_path / "model")
    saved = {"optimizer": optimizer.state_dict(), "model": model.state_dict(), "rng_state": training.rng_state}
    torch.save(saved, tmp_path / "checkpoint")
    expected = half_losses(training)
    loaded = poptorch.load(tmp_path / "model")
    checkpoint = torch.load(tmp_path / "checkpoint")
    other, its_optimizer, its_training = make()
    other.load_state_dict(checkpoint["model"])
    its_optimizer.load_state_dict(checkpoint["optimizer"])
    images, labels = batch(4)
    its_training.compile(images.half(), labels)
    its_training.rng_state = checkpoint["rng_state"]
    for continued, its_model in ((loaded, loaded.model), (its_training, other)):
        assert half_losses(continued) == expected
        for found, weight in zip(its_model.parameters(), model.parameters()):
            assert found.dtype == torch.half
            assert torch.equal(found, weight)


def test_save_without_rng_state(tmp_path):
    _, training = train_classifier(options().randomSeed(3))
    losses(training, 2)
    training.save(tmp_path / "model", save_rng_state=False)
    assert poptorch.load(tmp_path / "model").rng_state == [3, 0]


def test_a_loaded_executable_keeps_the_hosts_weights(tmp_path):
    model, training = train_classifier()
    training.compileAndExport(tmp_path / "model", *batch(4), export_model=False)
    fresh, other = train_classifier()
    with torch.no_grad():
        fresh.linear.bias.fill_(0.25)
    other.loadExecutable(tmp_path / "model")
    assert other.isCompiled()
    assert other.isAttachedToDevice()
    assert fresh.linear.bias.tolist() == [0.25] * 5
    assert len(losses(other, 1)) == 1
    with pytest.raises(poptorch.Error, match="before the model is compiled"):
        other.loadExecutable(tmp_path / "model")
    with pytest.raises(poptorch.Error, match="Shape mismatch for images"):
        other(*batch(8))


def test_a_model_that_was_compiled_offline_runs_after_it_is_loaded(tmp_path):
    model = poptorch.inferenceModel(seeded(), options().useOfflineIpuTarget())
    images = batch(4)[0]
    model.compileAndExport(tmp_path / "model", images)
    loaded = poptorch.load(tmp_path / "model")
    assert loaded.options.connection_type == poptorch.ConnectionType.Always
    assert torch.equal(loaded(images), poptorch.inferenceModel(seeded(), options())(images))


@pytest.mark.parametrize("is_training", [True, False])
def test_an_executable_keeps_the_modes_it_was_compiled_for(tmp_path, is_training):
    def dropout():
        return nn.Sequential(nn.Dropout(0.5)).train(is_training)

    poptorch.inferenceModel(dropout(), options()).compileAndExport(
        tmp_path / "model", torch.ones(64), export_model=False
    )
    other = dropout().train(not is_training)
    loaded = poptorch.inferenceModel(other, options())
    loaded.loadExecutable(tmp_path / "model")
    assert (set(loaded(torch.ones(64)).tolist()) == {0.0, 2.0}) is is_training
    assert other.training is not is_training


def test_load_rejects_a_file_without_a_model(tmp_path):
    _, training = train_classifier()
    training.compileAndExport(tmp_path / "model", *batch(4), export_model=False)
    with pytest.raises(poptorch.Error, match="export_model=False"):
        poptorch.load(tmp_path / "model")


def test_inference_models_can_be_saved(tmp_path):
    inference = poptorch.inferenceModel(seeded().eval(), options())
    expected = inference(batch(4)[0])
    inference.save(tmp_path / "model")
    assert torch.equal(poptorch.load(str(tmp_path / "model"))(batch(4)[0]), expected)


def test_load_can_edit_options_that_the_executable_does_not_depend_on(tmp_path):
    _, training = train_classifier(options().connectionType(poptorch.ConnectionType.Never))
    training.compileAndExport(tmp_path / "model", *batch(4))
    loaded = poptorch.load(tmp_path / "model", lambda o: o.connectionType(poptorch.ConnectionType.OnDemand))
    assert loaded.options.connection_type == poptorch.ConnectionType.OnDemand
    losses(loaded, 1)
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
        (lambda: train_classifier(options(2))[1], "replication factor was 1 and is 2"),
        (lambda: poptorch.trainingModel(Line(), options()), "compiled for another model"),
    ],
)
def test_an_executable_of_another_model_or_options_is_rejected(tmp_path, other, what):
    train_classifier(dropout=0.0)[1].compileAndExport(tmp_path / "model", *batch(4))
    with pytest.raises(poptorch.Error, match=what):
        other().loadExecutable(tmp_path / "model")


def test_save_needs_a_compiled_model(tmp_path):
    with pytest.raises(poptorch.Error, match="not been compiled"):
        train_classifier()[1].save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_directory_gets_a_file_with_the_default_name(tmp_path, caplog):
    _, training = train_classifier()
    training.compileAndExport(tmp_path, *batch(4))
    assert [path.name for path in tmp_path.iterdir()] == ["model.poptorch"]
    assert "is a directory" in caplog.text
    assert poptorch.load(tmp_path).isCompiled()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "is not a valid PopTorch file"),
        (lambda data: b"PK\x03\x04" + data, "is not a valid PopTorch file"),
        (lambda data: data[:30], "truncated"),
        (lambda data: data[:100], "truncated"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"more", "instead of"),
        (lambda data: data[:60] + b"?" + data[61:], "checksum of its header"),
        (lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "checksum of its section"),
    ],
)
def test_foreign_and_damaged_files_are_rejected(tmp_path, damage, message):
    _, training = train_classifier()
    training.compileAndExport(tmp_path / "model", *batch(4))
    (tmp_path / "damaged").write_bytes(damage((tmp_path / "model").read_bytes()))
    for load in (poptorch.load, train_classifier()[1].loadExecutable):
        with pytest.raises(poptorch.Error, match=message):
            load(tmp_path / "damaged")


def test_a_missing_file_is_rejected(tmp_path):
    with pytest.raises(poptorch.Error, match="cannot be read"):
        poptorch.load(tmp_path / "none")


def test_files_of_another_version_are_rejected(tmp_path, monkeypatch):
    _, training = train_classifier()
    with monkeypatch.context() as earlier:
        earlier.setattr(saving, "VERSION", "3.3.0")
        training.compileAndExport(tmp_path / "model", *batch(4))
    with pytest.raises(poptorch.Error, match=r"saved by poptorch 3\.3\.0"):
        poptorch.load(tmp_path / "model")


def test_files_of_another_format_are_rejected(tmp_path):
    _, training = train_classifier()
    training.compileAndExport(tmp_path / "model", *batch(4))
    content = (tmp_path / "model").read_bytes()
    (tmp_path / "model").write_bytes(content.replace(b"popef\x03", b"popef\x01", 1))
    with pytest.raises(poptorch.Error, match="saved by another version of the emulated SDK: compile and save"):
        train_classifier()[1].loadExecutable(tmp_path / "model")


class LargestIndex(Line):
    """Needs the index 2 in every micro-batch."""

    def forward(self, x):
        return super().forward(nn.functional.one_hot(x)[:, 2].float())


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


def test_the_header_has_the_version_in_plain_text(tmp_path):
    _, training = train_classifier()
    training.compileAndExport(tmp_path / "model", *batch(4))
    header = (tmp_path / "model").read_bytes()[52:].split(b"]}", 1)[0] + b"]}"
    assert json.loads(header)["poptorch"] == poptorch.__version__
