"""The pixels of images of unusual modes: one function for training, evaluation and prediction, and its warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch
from PIL import Image

from raypod.plan.config import Config
from raypod.plan.tables import render
from raypod.training import data as datasets
from raypod.training.tasks.image_classification import ImageReader
from tests.support import image_folders

SIDE = 28  # Resize to 32 and a crop of 28: images of 32 pixels are cropped only
GREY = (np.arange(32 * 32).reshape(32, 32) // 4).astype(np.uint8)
COLOR = np.stack([GREY, GREY.T, 255 - GREY], axis=-1)
TURNED = Image.Exif()
TURNED[0x0112] = 6
SIXTEEN = (GREY.astype(np.uint16) << 8) + 77
SEE_THROUGH = bytes([0] * 128 + [255] * 128)


COLORED, PALETTE = Image.fromarray(COLOR), Image.fromarray(GREY).quantize(256)
FRAMES = {"save_all": True, "append_images": [Image.fromarray(255 - COLOR)]}
DEEP, CLEAR = "with more than 8 bits per channel (reduced to 8)", "with transparency (dropped)"
CMYK, FIRST = "in CMYK (converted without a color profile)", "with several frames (only the first is used)"
ORIENTED = "with an EXIF orientation (not applied)"

# What is written, with which options; the expected pixels; the warning of the plan.
TABLE: Dict[str, Tuple[Image.Image, Dict[str, Any], np.ndarray, str]] = {
    "grey.png": (Image.fromarray(GREY), {}, GREY, ""),
    "color.png": (COLORED, {}, COLOR, ""),
    "one.png": (Image.fromarray(GREY > 99), {}, 255 * (GREY > 99).astype(np.uint8), ""),
    "sixteen.png": (Image.fromarray(SIXTEEN), {}, GREY, DEEP),
    "sixteen.tif": (Image.fromarray(SIXTEEN), {}, GREY, DEEP),
    "integers.tif": (Image.fromarray(SIXTEEN.astype(np.int32)), {}, GREY, DEEP),
    "alpha.png": (Image.fromarray(np.dstack([COLOR, GREY])), {}, COLOR, CLEAR),
    "grey-alpha.png": (Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(GREY.T)]), {}, GREY, CLEAR),
    "palette.png": (PALETTE, {}, GREY, ""),
    "holes.png": (PALETTE, {"transparency": SEE_THROUGH}, GREY, CLEAR),
    "hole.png": (PALETTE, {"transparency": 3}, GREY, CLEAR),
    "cmyk.tif": (COLORED.convert("CMYK"), {}, COLOR, CMYK),
    "turned.png": (COLORED, {"exif": TURNED}, COLOR, ORIENTED),
    "turned.tif": (COLORED, {"exif": TURNED}, np.rot90(COLOR, -1), ""),  # by Pillow
    "moving.png": (COLORED, FRAMES, COLOR, FIRST),
    "pages.tif": (COLORED, FRAMES, COLOR, FIRST),
}


def folder_of(tmp_path: Path, name: str, image: Image.Image, **options: Any) -> Path:
    for where in (tmp_path / "train" / "a", tmp_path / "val" / "a"):
        where.mkdir(parents=True)
        image.save(str(where / name), **options)
    return tmp_path


def config(folder: Path, **data: object) -> Config:
    return image_folders.config(folder, image_size=SIDE, **data)


@pytest.mark.parametrize("name", list(TABLE))
@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
def test_training_evaluation_and_prediction_see_the_same_pixels(tmp_path: Path, name: str, decoder: str) -> None:
    if decoder == "simplejpeg":
        pytest.importorskip("simplejpeg", reason="the extra raypod[jpeg] is not installed")
    image, options, pixels, warning = TABLE[name]
    settings = config(folder_of(tmp_path, name, image, **options), jpeg_decoder=decoder, augment=False)
    splits = datasets.load(settings)
    expected = np.broadcast_to(pixels.reshape(32, 32, -1), (32, 32, 3))[2:30, 2:30].transpose(2, 0, 1)
    predicted = ImageReader("imagefolder", splits).read(tmp_path / "val" / "a" / name)
    for found in (splits.train[0][0], splits.test[0][0], predicted):
        assert np.array_equal(found.numpy(), expected)
    notes = datasets.dataset_size(settings).notes
    assert notes == (() if not warning else (f"WARNING: 2 of 2 images {warning}, as {tmp_path}/train/a/{name}",))


def test_a_jpeg_with_an_orientation_and_images_for_a_grey_model(tmp_path: Path) -> None:
    settings = config(image_folders.write(tmp_path))
    kinds = [each.partition(" images ")[2].partition(",")[0] for each in datasets.dataset_size(settings).notes]
    assert kinds == [CMYK, ORIENTED, CLEAR]
    array = datasets.ArrayDataset(np.zeros((1, 1, 32, 32), dtype=np.uint8), np.zeros(1, dtype=np.int64))
    reader = ImageReader("grey", datasets.Splits(array, array, 1, ""))
    for name in ("grey.png", "sixteen.png", "grey-alpha.png", "holes.png"):
        image, options, pixels, _ = TABLE[name]
        image.save(str(tmp_path / name), **options)
        assert torch.equal(reader.read(tmp_path / name)[0], torch.from_numpy(pixels))


@pytest.mark.parametrize(
    ("pixels", "words"),
    [
        (GREY.astype(np.float32) / 255, "floating-point numbers of an unknown range"),
        (GREY.astype(np.int32) * 4096, "integers of more than 16 bits"),
        (GREY.astype(np.int32) - 9, "integers of more than 16 bits"),
    ],
)
def test_pixels_of_an_unknown_range_are_an_error(tmp_path: Path, pixels: np.ndarray, words: str) -> None:
    splits = datasets.load(config(folder_of(tmp_path, "wide.tif", Image.fromarray(pixels))))
    with pytest.raises(OSError, match=f"train/a/wide.tif: its pixels are {words}: convert it to 8 or 16 bits"):
        splits.train[0]


def test_the_plan_shows_what_is_lost_and_what_cannot_be_opened(tmp_path: Path, make: Any) -> None:
    folder = image_folders.write(tmp_path)
    (folder / "train" / "cat" / "a.JPEG").write_bytes(b"no image")
    plan = make(data=config(folder).data.model_dump(), training={"batch_size": 2})
    shown: List[str] = render(plan).splitlines()
    assert any(f"WARNING: 1 of 14 images that cannot be opened, as {folder}/train/cat/a.JPEG" in line for line in shown)
    assert any(f"WARNING: 2 of 14 images with transparency (dropped), as {folder}" in line for line in shown)
