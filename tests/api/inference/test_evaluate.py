"""`raypod evaluate`, the evaluation of the training, bit for bit; `raypod average`, `predict` and `export`."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
from PIL import Image

from raypod import train
from raypod.__main__ import main
from raypod.api.inference import evaluate as evaluate_module
from raypod.api.inference import export as export_module
from raypod.api.inference import settings
from raypod.api.inference.average import mean
from raypod.api.inference.evaluate import evaluate
from raypod.api.inference.export import export
from raypod.api.inference.formats import METADATA_FILE
from raypod.api.inference.predict import generate, predict
from raypod.errors import ConfigError, RunError
from raypod.plan import layout
from raypod.plan.compatibility import check_compatible
from raypod.plan.plan import Plan
from raypod.plan.resolve import from_values
from raypod.runs import run_state
from raypod.training.checkpoint import storage, tensors
from tests.support import image_folders
from tests.support.refused import refused
from tests.support.trained_runs import check_export, digits, logits, normalized, train_inline, weights_of

OF_FOLDERS = {"policy": "rand-augment", "rand_augment_ops": 3, "random_erasing": 0.5, "shuffle_window": 3}
Fails = Callable[[List[str]], str]
OTHERS_WARN = pytest.mark.filterwarnings("ignore")  # torch.jit and the ONNX packages


def evaluations(run: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


def summary(run: Path) -> Dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_other_data_are_without_the_settings_of_the_data_of_the_run() -> None:
    for data in (
        {"dataset": "imagefolder", "jpeg_decoder": "simplejpeg", "cache_size": "2GB", **OF_FOLDERS},
        {"dataset": "synthetic", "samples": 64, "image": "1x8x8", "classes": 3},
    ):
        values = settings.changed(from_values({"data": data}), {"data.dataset": "digits"}, settings.EVALUATION)
        check_compatible(settings.config_of(values, "the test"))


def test_the_result_is_that_of_the_training_and_several_instances_are_those_of_ray(
    digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {str(path): path.stat().st_mtime_ns for path in digits_run.rglob("*")}
    last = evaluations(digits_run)[-1]
    # The same checkpoint by its default, name, update and path, on another placement.
    for checkpoint, changes in ((None, {}), ("22", {"replicas": 4}), ("update-00000022", {"replicas": 1})):
        found = evaluate(digits_run, checkpoint, **changes)
        assert {**found, **{name: last[name] for name in ("samples", "loss", "accuracy", "update")}} == found
    assert found["weights_sha256"] == summary(digits_run)["weights_sha256"]
    assert {str(path): path.stat().st_mtime_ns for path in digits_run.rglob("*")} == before

    def fleet_for(plan: Plan, report: Any) -> Any:
        raise ConfigError(f"{plan.is_inline} {plan.geometry.num_instances}")

    monkeypatch.setattr(evaluate_module, "fleet_for", fleet_for)
    refused("False 2", evaluate, digits_run, num_instances=2)


def test_the_best_checkpoint_a_half_precision_and_an_average(digits_run: Path, half_run: Path, tmp_path: Path) -> None:
    kept = {each.update: each.manifest.tested for each in storage.list_checkpoints(digits_run / "checkpoints")[0]}
    tested = {update: metrics for update, metrics in kept.items() if metrics}
    assert len(tested) == 2
    best = max(tested, key=lambda update: tested[update]["accuracy"])
    found = evaluate(digits_run, "best")
    assert (found["update"], found["loss"]) == (best, tested[best]["loss"])
    (last,) = evaluations(half_run)
    found = evaluate(half_run / "checkpoints" / "update-00000002")
    assert (found["loss"], found["accuracy"]) == (last["loss"], last["accuracy"])
    run = train_inline(tmp_path / "run", "--replicas", "1", "--updates", "6", "--ema", "0.5")
    (last,) = evaluations(run)
    found, trained = evaluate(run), evaluate(run, ema=False)
    assert (found["loss"], found["weights_sha256"]) == (last["loss"], summary(run)["ema_sha256"])
    assert trained["loss"] != last["loss"]
    assert trained["weights_sha256"] == summary(run)["weights_sha256"]


def test_output_is_a_line_json_or_a_file(digits_run: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "result.json"
    assert main(["evaluate", str(digits_run), "--json", "--output", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads(file.read_text()) == found
    assert main(["evaluate", str(digits_run), "training.batch_size=16"]) == 0
    line = f"accuracy {found['accuracy']:.2f} %, top5_accuracy {found['top5_accuracy']:.2f} %, calibration_error"
    assert line in capsys.readouterr().out
    found = evaluate(digits_run, dataset="synthetic", image="1x8x8", samples=256)
    assert (found["dataset"], found["samples"] != 360) == ("synthetic", True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluate RUN --dataset synthetic", "features.0.weight is [16, 3, 3, 3] in the model and [16, 1, 3, 3]"),
        ("evaluate RUN --dataset synthetic --image 1x8x8 --classes 5", "head.weight is [5, 64] in the model and [10, "),
        ("evaluate RUN --dataset cifar10", "--data-dir"),
        ("evaluate RUN --data-dir /images", "--data-dir has no effect on --dataset digits"),
        ("evaluate RUN --checkpoint update-1", "there is no such checkpoint or file"),
        ("evaluate RUN --checkpoint 7", "update-00000022"),
        ("evaluate RUN --learning-rate 1", "unknown flag --learning-rate"),
        ("evaluate RUN training.learning_rate=1", "training.learning_rate cannot be changed here"),
        ("evaluate RUN --batch-size 0", "training.batch_size"),
        ("evaluate RUN --output /no/such/folder/x.json", "does not exist"),
        ("evaluate RUN --ema", "no moving average"),
        ("evaluate RUN/no", "there is no such run folder"),
        ("evaluate EMPTY", "is not a run folder"),
        ("evaluate", "the following arguments are required: RUN ("),
        ("predict", "the following arguments are required: RUN ("),
        ("average RUN --last 9", "--keep-checkpoints 9"),
        ("average RUN --last 0", "--last 0 must be at least 1"),
        ("average RUN --last x", "invalid int value"),
        ("average RUN --output /no/such/x.safetensors", "does not exist"),
        ("predict RUN no.png", "no.png: there is no such image"),
        ("predict RUN empty", "empty contains no images"),
        ("predict RUN images/notes.txt", "cannot read the image images/notes.txt"),
        ("predict RUN images/grey.png --top 0", "--top 0 must be at least 1"),
        ("predict RUN images/grey.png --prompt x", "one of the two"),
        ("predict RUN", "one of the two"),
        ("predict RUN images/grey.png --seed 0", "--seed has no effect without --prompt"),
        ("predict RUN --prompt x --top 2", "--top has no effect with --prompt"),
        ("predict RUN --prompt x", "the task image-classification generates no text"),
        ("predict RUN images/grey.png --json --csv", "not allowed with"),
        ("export RUN --format tflite", "known are safetensors, torchscript, onnx"),
        ("export RUN", "the following arguments are required: --format {safetensors,torchscript,onnx,hf} ("),
        ("export RUN --format safetensors --pixels", "--pixels has no effect on safetensors"),
        ("export RUN --format torchscript --tolerance 0", "--tolerance 0 must be positive"),
        ("export RUN --format torchscript --output /no/such/x.pt", "does not exist"),
        ("export RUN --format torchscript --dataset synthetic", "use the data set on which the model was trained"),
    ],
)
def test_wrong_requests(
    digits_run: Path, images: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.chdir(images.parent)
    Path("empty").mkdir()
    assert message in fails(words.replace("RUN", str(digits_run)).replace("EMPTY", str(images.parent)).split())
    assert not [*digits_run.glob("average-*"), *digits_run.glob("resnet8-*")]


@pytest.fixture
def copy(digits_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(str(digits_run), str(tmp_path / "copy")))


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_damaged_checkpoint(copy: Path, fails: Fails, name: str) -> None:
    file = copy / "checkpoints" / "update-00000022" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    assert f"{file.parent} is damaged: the SHA-256 of {name} does not match" in fails(["evaluate", str(copy)])


def test_a_run_that_trains_or_has_no_checkpoints(copy: Path, fails: Fails) -> None:
    state = run_state.read(copy)
    assert state is not None
    parent = os.getppid()
    ticks = run_state.process_start_ticks(parent) or 0
    running = dataclasses.replace(state, state="running", exit_code=None, pid=parent, started_ticks=ticks)
    (copy / layout.STATE).write_text(json.dumps(dataclasses.asdict(running)))
    refused("is still training .*--checkpoint last", evaluate, copy)
    (copy / layout.STATE).write_text(json.dumps(dataclasses.asdict(dataclasses.replace(running, host="elsewhere"))))
    assert evaluate(copy)["update"] == 22, "its coordinator died there: it has no lease"
    assert evaluate(copy, "last")["update"] == 22
    (copy / layout.STATE).write_text(json.dumps(dataclasses.asdict(state)))
    shutil.rmtree(str(copy / "checkpoints"))
    assert "contains no checkpoint" in fails(["evaluate", str(copy)])
    assert "contains no checkpoint" in fails(["evaluate", str(copy), "--checkpoint", "best"])


def test_the_average_is_written_evaluated_and_a_start_and_computed_in_float64(
    digits_run: Path, tmp_path: Path, capsys: Any
) -> None:
    values = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    states = [{"w": value, "n": torch.tensor(index)} for index, value in enumerate(values)]
    found = mean(states)
    assert found["w"].dtype == torch.float32
    assert found["w"].item() == torch.tensor(1 / 3).item()  # float32 would lose the 1
    assert found["n"].item() == 0
    refused("the checkpoints are of different models: w differs", mean, [*states, {**states[0], "w": torch.zeros(2)}])
    file = tmp_path / "mean.safetensors"
    assert main(["average", str(digits_run), "--last", "3", "--output", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["update"] == 22
    newest = storage.list_checkpoints(digits_run / "checkpoints")[0][:3]
    assert found["checkpoints"] == [each.path.name for each in newest]
    states = [tensors.read_tensors(each.path / "weights.safetensors")[0] for each in newest]
    written, metadata = tensors.read_tensors(file)
    for name, value in states[0].items():
        expected = value if not value.is_floating_point() else torch.stack([s[name].double() for s in states]).mean(0)
        torch.testing.assert_close(written[name].double(), expected.double(), rtol=1e-6, atol=1e-12)
    assert metadata["raypod.averaged"] == ",".join(found["checkpoints"])
    assert found["newest"]["loss"] == evaluate(digits_run)["loss"]
    assert found["average"]["loss"] != found["newest"]["loss"]
    alone = evaluate(digits_run, str(file))
    assert (alone["loss"], alone["weights_sha256"]) == (found["average"]["loss"], found["weights_sha256"])
    flags = ["--fleet", "inline", "--replicas", "1", "--updates", "1", "--device", "emulated"]
    assert train.main([*flags, "--init-weights", str(file), "--run-dir", str(tmp_path / "run")]) == 0


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Test digits as files: greyscale, RGB, 16 bits, enlarged JPEG."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    pixels = digits()[:2, 0].numpy()
    Image.fromarray(pixels[0]).save(str(folder / "grey.png"))
    Image.fromarray(np.stack([pixels[0]] * 3, axis=-1)).save(str(folder / "rgb.png"))
    Image.fromarray(pixels[0].astype(np.uint16) << 8).save(str(folder / "sixteen.png"))
    Image.fromarray(pixels[1]).resize((64, 40)).save(str(folder / "more" / "large.JPG"), "JPEG")
    (folder / "notes.txt").write_text("no image")
    return folder


def test_predictions_are_those_of_the_network(digits_run: Path, half_run: Path, images: Path) -> None:
    found = predict(digits_run, [images], top=10)
    assert [Path(each["image"]).name for each in found] == ["grey.png", "large.JPG", "rgb.png", "sixteen.png"]
    expected = torch.softmax(logits(digits_run, normalized(digits()[:1])), dim=1)[0]
    for record in (found[0], found[2], found[3]):
        values = {each["class"]: each["probability"] for each in record["predictions"]}
        assert values == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-6)
        assert record["predictions"][0]["class"] == int(expected.argmax())
    assert sum(each["probability"] for each in found[1]["predictions"]) == pytest.approx(1, abs=1e-5)
    (found_half,) = predict(half_run, [images / "grey.png"], top=20)
    assert len(found_half["predictions"]) == 10


def test_output_is_a_table_json_or_csv(digits_run: Path, images: Path, capsys: Any) -> None:
    command = ["predict", str(digits_run), str(images / "grey.png"), "--top", "2"]
    assert main([*command, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert main([*command, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["class"] for row in rows] == [str(each["class"]) for each in record["predictions"]]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["image", "rank", "class", "name", "probability"]
    assert lines[1].split()[2] == rows[0]["class"]


def test_class_names_and_transform_of_image_folders_and_a_sample_that_cannot_be_read(
    tmp_path: Path, fails: Any
) -> None:
    folder = image_folders.write(tmp_path / "data")
    flags = ["--dataset", "imagefolder", "--data-dir", str(folder), "--image-size", "16", "--replicas", "1"]
    run = train_inline(tmp_path / "run", *flags, "--batch-size", "4", "--updates", "1", "--model", "tiny")
    (found,) = predict(run, [folder / "val" / "dog" / "a.JPEG"])
    assert {each["name"] for each in found["predictions"]} == {"cat", "dog"}
    words = ["predict", str(run), str(folder / "val" / "dog" / "a.JPEG")]
    for split, name in (("val", "test"), ("train", "training")):
        path = folder / split / "cat" / "a.JPEG"
        path.write_bytes(path.read_bytes()[:99])
        message = fails(words)
        assert f"{name} sample 0" in message
        assert str(path) in message


def test_a_language_model_continues_a_text(tmp_path: Path, fails: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcd" * 2000)
    flags = ["--task", "language-model", "--text", str(text), "--sequence-length", "16", "--batch-size", "16"]
    run = train_inline(tmp_path / "run", *flags, "--replicas", "1", "--epochs", "2", "--warmup-updates", "2")
    assert generate(run, "abcdabcd", length=8, temperature=0) == "abcdabcd"
    assert generate(run, "abcdabcd", length=20, seed=1) == generate(run, "abcdabcd", length=20, seed=1)
    assert "has no predictions of files" in fails(["predict", str(run), str(text)])
    assert "must not be empty" in fails(["predict", str(run), "--prompt", ""])
    message = fails(["evaluate", str(run), "task.sequence_length=8"])
    assert "embedding.places.weight is [8, 128] in the model and [16, 128]" in message
    assert "classes" not in message  # a language model has none


def run_file(path: Path, images: torch.Tensor) -> torch.Tensor:
    """Return the output of a file, loaded without raypod."""
    with torch.no_grad():
        output: torch.Tensor = torch.jit.load(str(path))(images)
    return output


@OTHERS_WARN
@pytest.mark.parametrize("pixels", [False, True])
def test_a_file_has_the_outputs_of_the_network(digits_run: Path, tmp_path: Path, pixels: bool) -> None:
    check_export(digits_run, "torchscript", tmp_path / "model.pt", pixels, run_file)


@OTHERS_WARN
def test_safetensors_has_the_weights_and_describes_them(digits_run: Path, tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors", reason="an independent reader of the format").safe_open
    file = tmp_path / "model.safetensors"
    assert main(["export", str(digits_run), "--format", "safetensors", "--output", str(file)]) == 0
    with safe_open(str(file), "pt") as opened:
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        metadata = opened.metadata()
    summary = json.loads((digits_run / "summary.json").read_text())
    sha256 = tensors.weights_sha256({name: found[name] for name in weights_of(digits_run, 22)})
    assert (sha256, metadata["raypod.update"]) == (summary["weights_sha256"], "22")
    assert json.loads(metadata["raypod.description"])["classes"] == [str(digit) for digit in range(10)]
    assert "resnet8" in metadata["raypod.config"]


@OTHERS_WARN
def test_a_pipeline_in_half_precision_is_exported_in_float32(half_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    found = export(half_run, "torchscript", file, pixels=True)
    assert found["inputs"] == [{"name": "input_0", "dtype": "uint8", "shape": ["batch", 1, 8, 8]}]
    extra = {METADATA_FILE: ""}
    loaded = torch.jit.load(str(file), _extra_files=extra)
    assert json.loads(extra[METADATA_FILE])["raypod.update"] == "2"
    assert {value.dtype for value in loaded.parameters()} == {torch.float32}
    assert run_file(file, digits()).shape == (20, 10)


@OTHERS_WARN
def test_a_file_of_other_outputs_is_removed(digits_run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    suffix, write = export_module._FORMATS["torchscript"]

    def wrong(path: Path, exported: Any, metadata: Dict[str, str]) -> Any:
        loaded = write(path, exported, metadata)
        return lambda *inputs: [each + 1 for each in loaded(*inputs)]

    monkeypatch.setitem(export_module._FORMATS, "torchscript", (suffix, wrong))
    file = tmp_path / "model.pt"
    assert main(["export", str(digits_run), "--format", "torchscript", "--output", str(file)]) == 1
    assert "differ by 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@OTHERS_WARN
def test_a_network_that_cannot_be_traced_and_packages_that_are_missing(
    tmp_path: Path, digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "tests.support.trained_runs:Untraceable"
    run = train_inline(tmp_path / "run", "--replicas", "1", "--updates", "1", "--model", model)
    with pytest.raises(RunError, match="cannot be exported as torchscript: ValueError: no tracing"):
        export(run, "torchscript", tmp_path / "model.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(ConfigError, match=r"needs onnx and onnxruntime: pip install 'raypod\[onnx\]'"):
        export(digits_run, "onnx")
