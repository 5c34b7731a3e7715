from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
import torch
from PIL import Image

from raypod.errors import ConfigError
from raypod.events import InstanceStarted
from raypod.plan.plan import Plan
from raypod.plan.resolve import from_values
from raypod.plan.tables import describe, render
from raypod.runtime.coordinator.same_data import check_same_data
from raypod.training import data as datasets
from raypod.training.checkpoint import resume
from raypod.training.data import image_decoders
from raypod.training.data.image_decoders import preparation
from raypod.training.data.loading import SeededSamples
from raypod.training.tasks.image_classification import ImageReader
from tests.support import image_folders

simplejpeg: Any = pytest.importorskip("simplejpeg", reason="the extra raypod[jpeg] is not installed")
FAST = {"dataset": "imagefolder", "data_dir": "none", "jpeg_decoder": "simplejpeg"}


def jpeg(width: int, height: int, mode: str = "RGB", **options: object) -> bytes:
    encoded = io.BytesIO()
    image_folders.photograph(1, width, height).convert(mode).save(encoded, "JPEG", **{"quality": 90, **options})
    return encoded.getvalue()


def samples(data: bytes, decoder: str, side: int, is_random: bool, count: int) -> List[torch.Tensor]:
    made = preparation(decoder, side, is_random, flips=is_random)
    found = []
    for seed in range(count):
        torch.manual_seed(seed)
        found.append(made.decode(data).to(torch.int16))
    return found


@pytest.mark.parametrize("is_random", [True, False])
@pytest.mark.parametrize(
    ("size", "side", "largest", "mean"),  # the last two are reduced while they are decoded
    [((131, 97), 64, 2, 0.4), ((90, 160), 60, 2, 0.4), ((90, 160), 32, 12, 1.5), ((900, 1301), 48, 12, 1.5)],
)
def test_both_decoders_cut_and_flip_alike(size: Any, side: int, largest: int, mean: float, is_random: bool) -> None:
    data = jpeg(*size)
    ours, theirs = (samples(data, decoder, side, is_random, 12) for decoder in ("simplejpeg", "pillow"))
    differences = torch.stack(ours) - torch.stack(theirs)
    assert tuple(ours[0].shape) == (3, side, side)
    assert int(differences.abs().max()) <= largest
    assert float(differences.abs().float().mean()) <= mean
    if is_random:
        assert not torch.equal(ours[0], ours[1])


@pytest.mark.parametrize(
    "options",
    [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"restart_marker_rows": 1}, {"optimize": True}],
)
@pytest.mark.parametrize("factor", [1, 2, 4])
def test_the_rows_of_a_shortened_file_are_those_of_the_file(options: Any, factor: int) -> None:
    width, height = 150, 203
    for data in (jpeg(width, height, **options), jpeg(width, height, mode="L")):
        whole = simplejpeg.decode_jpeg(data, "RGB", min_height=-(-height // factor), min_width=-(-width // factor))
        for rows in (32, 64, 192):
            shortened = image_decoders._shortened(data, rows)
            assert shortened is not None
            least = {"min_height": rows // factor, "min_width": -(-width // factor)}
            found = simplejpeg.decode_jpeg(shortened, "RGB", strict=False, **least)
            assert len(found) == rows // factor
            used = (rows - image_decoders._NEIGHBORS) // factor
            assert np.array_equal(found[:used], whole[:used])


def test_files_that_cannot_be_shortened_and_pixels_are_those_of_pillow_also_if_other_decoders_warn() -> None:
    progressive, plain = jpeg(130, 200, progressive=True), jpeg(130, 200)
    for data in (progressive, plain[:-2], plain + b"0", plain[:300], b"\xff\xd8"):
        assert image_decoders._shortened(data, 64) is None
    ours, theirs = (samples(progressive, decoder, 64, True, 6) for decoder in ("simplejpeg", "pillow"))
    assert int((torch.stack(ours) - torch.stack(theirs)).abs().max()) <= 2
    data = jpeg(120, 120)
    ours = samples(data, "simplejpeg", 105, is_random=False, count=1)[0]  # resized to 120: the decoded pixels
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(ours.numpy(), np.asarray(image).transpose(2, 0, 1)[:, 8:113, 8:113])
    data = jpeg(130, 100)
    dirty = data[:-2] + b"\x11\x22\x33" + data[-2:]  # bytes before the end marker
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(dirty)
    found, expected = (samples(each, "simplejpeg", 90, is_random=True, count=1)[0] for each in (dirty, data))
    assert torch.equal(found, expected)


def test_files_that_simplejpeg_does_not_decode_are_left_to_pillow_and_predictions_are_alike(tmp_path: Path) -> None:
    folder = image_folders.write(tmp_path)
    config = from_values({"data": {**FAST, "data_dir": str(folder), "image_size": 24}})
    splits = datasets.load(config)
    file = folder / "val" / "dog" / "a.JPEG"
    assert torch.equal(ImageReader("imagefolder", splits).read(file), splits.test[1][0])
    png = folder / "train" / "dog" / "e.png"
    unaugmented = datasets.load(config.model_copy(update={"data": config.data.model_copy(update={"augment": False})}))
    assert torch.equal(ImageReader("imagefolder", splits).read(png), unaugmented.train[10][0])
    loaded = []
    for decoder in ("simplejpeg", "pillow"):
        config = from_values({"data": {**FAST, "data_dir": str(folder), "image_size": 96, "jpeg_decoder": decoder}})
        split = SeededSamples(datasets.load(config).train, seed=3)
        loaded.append(torch.stack([split[1, index][1][0].to(torch.int16) for index in range(12)]))
    assert int((loaded[0] - loaded[1]).abs().max()) <= 3
    (folder / "train" / "cat" / "a.JPEG").write_bytes(b"no image")
    (folder / "train" / "cat" / "b.jpg").write_bytes(jpeg(300, 200)[:2000])
    data = datasets.load(from_values({"data": {**FAST, "data_dir": str(folder)}}))
    with pytest.raises(OSError, match=r"train/cat/a.JPEG: Pillow does not recognize its format; replace it"):
        data.train[0]
    with pytest.raises(OSError, match=r"train/cat/b.jpg: (?i:.*truncated.*); replace it"):
        data.train[1]


def test_a_missing_package_or_a_decoder_without_effect_is_an_error(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(ConfigError, match=r"needs the package simplejpeg on every host .* 'raypod\[jpeg\]'"):
        preparation("simplejpeg", 32, is_random=True, flips=True)
    with pytest.raises(ConfigError, match="--jpeg-decoder simplejpeg has no effect without --dataset imagefolder or"):
        make(data={"jpeg_decoder": "simplejpeg"})


@pytest.fixture
def plan(make: Any, tmp_path: Path) -> Plan:
    folder = image_folders.write(tmp_path)
    return make(data={**FAST, "data_dir": str(folder)}, training={"batch_size": 1}, run={"run_dir": str(tmp_path)})


def started(instance: int, **versions: str) -> InstanceStarted:
    return InstanceStarted(instance, f"host-{instance}", 1, "emulated", "", 1, (), "data", tuple(versions.items()))


def test_decoders_that_differ_between_hosts_or_from_the_checkpoint_are_an_error(plan: Plan, make: Any) -> None:
    assert "imagefolder: 12 training, 2 test, 224x224 pixels, decoded by simplejpeg" in render(plan)
    assert describe(plan)["dataset"]["jpeg_decoder"] == "simplejpeg"
    check_same_data(plan, [started(0, simplejpeg="1.7.3"), started(1, simplejpeg="1.9.0")])
    with pytest.raises(ConfigError, match="instance 1 on host host-1 decodes images with simplejpeg 2, and instance"):
        check_same_data(plan, [started(0, simplejpeg="1.9.0"), started(1, simplejpeg="2.0.0")])
    check_same_data(make(), [started(0, pillow="10.4.0"), started(1, pillow="13.0.0")])
    manifest = resume.manifest_of(plan, 1, 0, "data", {"simplejpeg": "1.9.0"})
    with_pillow = {**resume.settings_of(plan), "data.jpeg_decoder": "pillow"}
    words = "its data.jpeg_decoder is simplejpeg and this run's is pillow"
    found = resume.first_difference(manifest, with_pillow, [])
    assert found == f"{words}; --resume-anyway jpeg_decoder resumes with pillow"
    checkpoint: Any = type("Saved", (), {"path": "update-1", "manifest": manifest})
    check_same_data(plan, [started(0, simplejpeg="1.7.3")], checkpoint)
    with pytest.raises(ConfigError, match="update-1: its images were decoded with simplejpeg 1, and this run's are"):
        check_same_data(plan, [started(0, simplejpeg="2.0.0")], checkpoint)
    values = {**plan.config.model_dump(), "run": {**plan.config.run.model_dump(), "resume_anyway": "jpeg_decoder"}}
    check_same_data(make(**values), [started(0, simplejpeg="2.0.0")], checkpoint)
