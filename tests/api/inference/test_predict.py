"""`raypod predict`: image files and folders, other modes and sizes, class names; text of a language model."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from raypod.__main__ import main
from raypod.api.inference.predict import generate, predict
from tests.support import image_folders
from tests.support.trained_runs import digits, logits, normalized, train_inline


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


def test_class_names_and_the_transform_of_image_folders(tmp_path: Path) -> None:
    folder = image_folders.write(tmp_path / "data")
    flags = ["--dataset", "imagefolder", "--data-dir", str(folder), "--image-size", "16", "--replicas", "1"]
    run = train_inline(tmp_path / "run", *flags, "--batch-size", "4", "--updates", "1", "--model", "tiny")
    (found,) = predict(run, [folder / "val" / "dog" / "a.JPEG"])
    assert {each["name"] for each in found["predictions"]} == {"cat", "dog"}


def test_a_sample_that_cannot_be_read_is_one_line(tmp_path: Path, fails: Any) -> None:
    folder = image_folders.write(tmp_path / "data")
    flags = ["--dataset", "imagefolder", "--data-dir", str(folder), "--image-size", "16", "--replicas", "1"]
    run = train_inline(tmp_path / "run", *flags, "--batch-size", "4", "--updates", "1", "--model", "tiny")
    words = ["predict", str(run), str(folder / "val" / "dog" / "a.JPEG")]
    for split, name in (("val", "test"), ("train", "training")):
        path = folder / split / "cat" / "a.JPEG"
        path.write_bytes(path.read_bytes()[:99])
        message = fails(words)
        assert f"{name} sample 0" in message
        assert str(path) in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.png"], "no.png: there is no such image"),
        (["empty"], "empty contains no images"),
        (["images/notes.txt"], "cannot read the image images/notes.txt"),
        (["images/grey.png", "--top", "0"], "--top 0 must be at least 1"),
        (["images/grey.png", "--prompt", "x"], "one of the two"),
        ([], "one of the two"),
        (["images/grey.png", "--seed", "0"], "--seed has no effect without --prompt"),
        (["--prompt", "x", "--top", "2"], "--top has no effect with --prompt"),
        (["--prompt", "x"], "the task image-classification generates no text"),
        (["images/grey.png", "--json", "--csv"], "not allowed with"),
    ],
)
def test_wrong_requests(digits_run: Path, images: Path, fails: Any, monkeypatch: Any, words: Any, message: str) -> None:
    monkeypatch.chdir(images.parent)
    Path("empty").mkdir()
    assert message in fails(["predict", str(digits_run), *words])


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
