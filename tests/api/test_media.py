"""`raypod.log_image` and `raypod.log_text` from callbacks: files of the run, TensorBoard, and trackers."""

from __future__ import annotations

import importlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
from PIL import Image

import raypod
from raypod.api.media import logging_to
from raypod.errors import ConfigError
from raypod.events import EvaluationDone, RunEnded, RunStarted, UpdateDone
from raypod.plan.layout import MEDIA
from raypod.runs.media import LIST, Media, MediaFolder
from tests.support import ROOT

FLAGS = {"model": "tiny", "fleet": "inline", "device": "emulated", "replicas": 2, "lr_schedule": "constant"}


def fit(folder: Path, callbacks: Any, **flags: Any) -> raypod.Result:
    return raypod.fit(run_dir=folder, callbacks=callbacks, progress=False, **{**FLAGS, "updates": 6, **flags})


def listed(folder: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in (folder / MEDIA / LIST).read_text().splitlines()]


def log_all(event: Any) -> None:
    if isinstance(event, UpdateDone) and event.update % 2 == 0:
        raypod.log_image("samples/first", torch.full((3, 4, 5), event.update / 10))
        raypod.log_text("note", f"update **{event.update}**")
    if isinstance(event, (RunStarted, EvaluationDone, RunEnded)):
        raypod.log_text("note", type(event).__name__)


def pixels_of(image: Any) -> np.ndarray:
    found: List[bytes] = []
    with logging_to(lambda kind, name, content: found.append(content)):
        raypod.log_image("x", image)
    return np.asarray(Image.open(io.BytesIO(found[0])))


def test_files_and_tensorboard_have_what_callbacks_log(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    fit(run, log_all, tracker="tensorboard", checkpoint_every="4 updates")
    text = [
        (line["update"], (run / MEDIA / line["file"]).read_text()) for line in listed(run) if line["kind"] == "text"
    ]
    own = [(update, f"update **{update}**") for update in (2, 4, 6)]
    assert text == [(0, "RunStarted"), *own, (6, "EvaluationDone"), (6, "RunEnded")]
    images = {line["update"]: run / MEDIA / line["file"] for line in listed(run) if line["kind"] == "image"}
    assert sorted(images) == [2, 4, 6]
    assert (np.asarray(Image.open(images[4])) == 102).all()
    fit(run, log_all, resume=str(run / "checkpoints/update-00000004"), updates=8)
    assert [line["update"] for line in listed(run) if line["kind"] == "image"] == [2, 4, 6, 8]
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    assert [(each.step, each.width, each.height) for each in events.Images("samples/first")] == [
        (update, 5, 4) for update in (2, 4, 6, 8)
    ]
    texts = events.Tensors("note/text_summary")
    assert texts[1].tensor_proto.string_val == [b"update **2**"]


def test_tensorboard_has_the_hyperparameters(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    fit(tmp_path / "run", (), tensorboard=True, learning_rate=0.25)
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    kind = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    found = {
        name: kind.FromString(metadata.plugin_data.content)
        for name, metadata in events.summary_metadata.items()
        if metadata.plugin_data.plugin_name == "hparams"
    }
    assert sorted(found) == ["_hparams_/experiment", "_hparams_/session_end_info", "_hparams_/session_start_info"]
    hparams = found["_hparams_/session_start_info"].session_start_info.hparams
    assert hparams["training.learning_rate"].number_value == 0.25
    assert hparams["training.model"].string_value == "tiny"
    assert "training.betas" not in hparams, "without an effect"
    metrics = {each.name.tag for each in found["_hparams_/experiment"].experiment.metric_infos}
    assert {"training/loss", "test/accuracy", "test/top5_accuracy"} <= metrics <= set(events.Tags()["scalars"])


def test_trackers_get_media_once_in_the_order_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: None
) -> None:
    monkeypatch.setenv("FAKE_TRACKER", str(tmp_path / "fake.jsonl"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = {"tracker": ["tests.support.fake_tracker:Fake", "tests.support.fake_tracker:WithMedia"]}
    run = tmp_path / "run"
    fit(run, log_all, checkpoint_every="4 updates", **flags)
    fit(run, log_all, resume=str(run / "checkpoints/update-00000004"), updates=8, **flags)
    lines = [json.loads(line) for line in (tmp_path / "fake.jsonl").read_text().splitlines()]
    media = [line for line in lines if "media" in line]
    assert [line["step"] for line in media if line["media"] == "samples/first"] == [2, 4, 6, 8]
    assert [line["text"] for line in media if line["media"] == "note" and line["step"] == 6] == [
        "update **6**",
        "EvaluationDone",
        "RunEnded",
    ]
    assert {line["size"] for line in media if "size" in line} == {(run / MEDIA / listed(run)[1]["file"]).stat().st_size}
    of_one = [line["step"] for line in lines if line.get("of") == "WithMedia" and "step" in line]
    assert of_one == sorted(of_one), "W&B accepts no earlier step"
    assert not [line for line in lines if line.get("values") == {}]


def test_what_a_callback_logs_wrongly_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"raypod.log_text is for the callbacks of raypod.fit and raypod.stream"):
        raypod.log_text("a", "b")
    wrong: List[Any] = [
        (lambda: raypod.log_image("x", "a.png"), "a str is no image"),
        (lambda: raypod.log_image("x", np.zeros((2, 3, 4, 5))), r"with 1, 3 or 4 channels, not \[2, 3, 4, 5\]"),
        (lambda: raypod.log_image("x", np.zeros((5, 4, 2))), r"not \[5, 4, 2\]"),
        (lambda: raypod.log_image("x", np.full((4, 4), 256)), "not int64 from 256 to 256"),
        (lambda: raypod.log_image("x", np.zeros((1, 5000))), "1 to 4096 pixels per side, not 5000 x 1"),
        (lambda: raypod.log_image(" ", np.zeros((4, 4))), "the name is a text that is not empty, not ' '"),
        (lambda: raypod.log_text("x", 3), "a text is a str, not a int"),  # type: ignore[arg-type]
        (lambda: raypod.log_text("x", "y" * (1 << 21)), "the text has 2097152 bytes; at most 1048576 are kept"),
    ]
    for call, words in wrong:
        with logging_to(lambda *media: None), pytest.raises(ConfigError, match=words):
            call()
    with pytest.raises(ConfigError, match="a text is a str"):
        fit(tmp_path / "run", lambda event: wrong[6][0](), updates=2)
    assert (tmp_path / "run" / "summary.json").exists(), "the run has ended with a checkpoint"
    assert not (tmp_path / "run" / MEDIA).exists()


@pytest.mark.parametrize(
    ("make", "shape", "value"),
    [
        (lambda: np.full((4, 5), 7, dtype=np.uint8), (4, 5), 7),
        (lambda: np.full((4, 5), 7), (4, 5), 7),
        (lambda: np.full((1, 4, 5), 1.0), (4, 5), 255),
        (lambda: np.full((4, 5, 3), 0.2), (4, 5, 3), 51),
        (lambda: torch.full((4, 6, 5), 0.2, dtype=torch.bfloat16, requires_grad=True), (6, 5, 4), 51),
        (lambda: torch.ones(3, 4, 3, dtype=torch.bool), (4, 3, 3), 255),
        (lambda: Image.new("P", (5, 4)), (4, 5, 3), 0),
        (lambda: SimpleNamespace(savefig=lambda file, format: Image.new("L", (2, 2), 9).save(file, format)), (2, 2), 9),
    ],
)
def test_images_of_every_form(make: Callable[[], Any], shape: Any, value: int) -> None:
    pixels = pixels_of(make())
    assert pixels.shape == shape
    assert (pixels == value).all()


def test_floating_point_pixels_are_clipped_with_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="clipped to 0..1, and NaN is 0"):
        assert pixels_of(np.array([[-1.0, np.nan], [0.2, 3.0]])).tolist() == [[0, 0], [51, 255]]


def test_a_disk_that_fails_is_one_warning(tmp_path: Path) -> None:
    warnings: List[str] = []
    (tmp_path / MEDIA).write_text("no folder")
    folder = MediaFolder(tmp_path, 0, warnings.append)
    for update in (1, 2):
        folder.add(Media("text", "a/b", update, b"x"))
    folder.close()
    (warning,) = warnings
    assert warning.startswith(f"cannot write {tmp_path / MEDIA}/00000001-a_b-")
