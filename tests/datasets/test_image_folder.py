from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from PIL import Image

from raypod import datasets
from raypod.datasets.feed import Feed
from raypod.errors import ConfigError
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize, Plan
from raypod.plan.resolve import from_values
from raypod.plan.tables import render


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes: 8 training images of 80x60, JPEG and PNG, one grey and one with an alpha channel; 2 test images."""
    random = np.random.default_rng(0)
    modes = {"c.jpg": "L", "d.png": "RGBA"}
    for split, names in (("train", ("a.JPEG", "b.jpeg", "c.jpg", "d.png")), ("val", ("a.jpg",))):
        for number, kind in enumerate(("cat", "dog")):
            (tmp_path / split / kind).mkdir(parents=True)
            for name in names:
                pixels = random.integers(0, 256, (60, 80, 3), dtype=np.uint8)
                pixels[..., 0] = 255 * number  # a class can be told by its red
                image = Image.fromarray(pixels).convert(modes.get(name, "RGB"))
                image.save(str(tmp_path / split / kind / name))
            (tmp_path / split / kind / "notes.txt").write_text("no image")
    return tmp_path


def config(folder: Path, **data: object) -> Config:
    return from_values({"data": {"dataset": "imagefolder", "data_dir": str(folder), **data}})


def test_a_folder_is_a_class(folder: Path) -> None:
    splits = datasets.load(config(folder, image_size=32))
    assert (len(splits.train), len(splits.test), splits.classes) == (8, 2, 2)
    assert [splits.train[index][1] for index in range(8)] == [0] * 4 + [1] * 4
    image, label = splits.test[1]
    assert (tuple(image.shape), image.dtype, label) == ((3, 32, 32), torch.uint8, 1)
    assert image[0].float().mean() > 200


def test_the_plan_counts_and_writes_nothing(folder: Path) -> None:
    assert datasets.dataset_size(config(folder)) == DatasetSize(8, 2)
    assert datasets.image_shape(config(folder)) == datasets.ImageShape(3, 224, 2)
    assert not list(folder.rglob("*.npy"))
    before = datasets.load(config(folder)).fingerprint
    assert list(folder.rglob("*.npy"))
    time.sleep(0.01)  # the folder's time must differ
    (folder / "train" / "cat" / "b.jpeg").unlink()
    assert datasets.dataset_size(config(folder)) == DatasetSize(7, 2)
    assert datasets.load(config(folder)).fingerprint != before


def test_a_file_in_a_nested_folder_counts(folder: Path) -> None:
    nested = folder / "train" / "cat" / "young" / "small"
    nested.mkdir(parents=True)
    datasets.load(config(folder))
    time.sleep(0.01)  # the folder's time must differ
    (nested / "e.png").write_bytes((folder / "train" / "cat" / "d.png").read_bytes())
    assert len(datasets.load(config(folder)).train) == 9


def test_evaluation_takes_the_centre(folder: Path) -> None:
    with Image.open(str(folder / "val" / "cat" / "a.jpg")) as image:
        resized = image.resize((49, 37), Image.Resampling.BILINEAR)  # 37: 32 * 256 / 224 of the shorter side
        expected = np.asarray(resized)[2:34, 8:40].transpose(2, 0, 1)
    found = datasets.load(config(folder, image_size=32)).test[0][0].numpy()
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("data", [{}, {"num_workers": 2}, {"eight_bit_io": True}])
def test_training_pieces_are_a_function_of_seed_epoch_and_sample(
    folder: Path, make: Callable[..., Plan], data: Any
) -> None:
    def fed(leg: int, instances: int, **section: object) -> torch.Tensor:
        own = {"dataset": "imagefolder", "data_dir": str(folder), "image_size": 16, **section}
        plan = make(data=own, training={"batch_size": 2, "epochs": 3}, pod={"replicas": 2, "num_instances": instances})
        splits = datasets.load(plan.config)
        calls = []
        for spec in plan.instances:
            feed = Feed(plan, spec, splits)
            calls.append([images for images, _ in feed.calls(plan.legs()[leg])])
            feed.close()
        return torch.cat([torch.cat(call) for call in zip(*calls)])

    assert torch.equal(fed(1, 1, **data), fed(1, 2, **data))
    assert not torch.equal(fed(0, 1, **data), fed(1, 1, **data))


def test_without_augmentation_training_images_are_the_centre_too(folder: Path) -> None:
    target = folder / "val" / "cat" / "a.jpg"
    target.write_bytes((folder / "train" / "cat" / "a.JPEG").read_bytes())
    plain, random = (datasets.load(config(folder, image_size=16, augment=on)) for on in (False, True))
    assert torch.equal(plain.train[0][0], plain.test[0][0])
    assert not torch.equal(random.train[0][0], plain.test[0][0])


def test_an_image_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "train" / "dog" / "a.JPEG").write_bytes((folder / "train" / "dog" / "b.jpeg").read_bytes()[:500])
    with pytest.raises(OSError, match=r"train/dog/a.JPEG: (?i:.*truncated.*); replace it"):
        datasets.load(config(folder)).train[4]


def test_whatever_pillow_raises_the_image_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "train" / "dog" / "d.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)).save(str(path))
    written = path.read_bytes()
    at = written.rindex(b"IDAT")
    path.write_bytes(written[:at] + b"\0\0\0\0" + written[at + 4 :])  # SyntaxError: broken PNG file
    with pytest.raises(OSError, match=r"train/dog/d.png: .*; replace it"):
        datasets.load(config(folder)).train[7]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # DecompressionBombError
    with pytest.raises(OSError, match=r"train/dog/b.jpeg: .*; replace it"):
        datasets.load(config(folder)).train[5]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("train", r"has no folders of classes; expected are .*/train/CLASS/\*\.jpg"),
        ("images", "hold no images"),
        ("unknown", r"val/bird is a class that .*train does not have"),
    ],
)
def test_what_is_missing_is_told(folder: Path, broken: str, words: str) -> None:
    if broken == "train":
        (folder / "train").rename(folder / "training")
    elif broken == "images":
        for file in (folder / "train").rglob("*.*"):
            file.unlink()
    else:
        (folder / "val" / "bird").mkdir()
    with pytest.raises(ConfigError, match=words):
        datasets.load(config(folder))
    with pytest.raises(ConfigError, match=words):
        datasets.dataset_size(config(folder))


def test_without_a_test_folder_there_is_nothing_to_evaluate(folder: Path, make: Callable[..., Plan]) -> None:
    (folder / "val").rename(folder / "other")
    plan = make(data=config(folder).data.model_dump(), training={"batch_size": 2})
    assert "imagefolder: 8 training, NO test images: nothing will be evaluated" in render(plan)
    assert datasets.dataset_size(config(folder)) == DatasetSize(8, 0)
    (folder / "other").rename(folder / "test")
    assert datasets.dataset_size(config(folder)) == DatasetSize(8, 2)
