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
from raypod.datasets.images import ImageSource
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
                pixels[..., 0] = 255 * number  # the red channel identifies the class
                image = Image.fromarray(pixels).convert(modes.get(name, "RGB"))
                image.save(str(tmp_path / split / kind / name))
            (tmp_path / split / kind / "notes.txt").write_text("no image")
    return tmp_path


def config(folder: Path, **data: object) -> Config:
    return from_values({"data": {"dataset": "imagefolder", "data_dir": str(folder), **data}})


def test_each_folder_is_a_class(folder: Path) -> None:
    splits = datasets.load(config(folder, image_size=32))
    assert (len(splits.train), len(splits.test), splits.classes) == (8, 2, 2)
    assert [splits.train[index][1] for index in range(8)] == [0] * 4 + [1] * 4
    image, label = splits.test[1]
    assert (tuple(image.shape), image.dtype, label) == ((3, 32, 32), torch.uint8, 1)
    assert image[0].float().mean() > 200


def test_planning_counts_samples_and_writes_nothing(folder: Path) -> None:
    assert datasets.dataset_size(config(folder)) == DatasetSize(8, 2)
    assert datasets.image_shape(config(folder)) == datasets.ImageShape(3, 224, 2)
    assert not list(folder.rglob("*.npy"))
    before = datasets.load(config(folder)).fingerprint
    assert list(folder.rglob("*.npy"))
    time.sleep(0.01)  # the modification times must differ
    (folder / "train" / "cat" / "b.jpeg").unlink()
    assert datasets.dataset_size(config(folder)) == DatasetSize(7, 2)
    assert datasets.load(config(folder)).fingerprint != before


def test_files_in_nested_folders_are_found(folder: Path) -> None:
    nested = folder / "train" / "cat" / "young" / "small"
    nested.mkdir(parents=True)
    datasets.load(config(folder))
    time.sleep(0.01)  # the modification times must differ
    (nested / "e.png").write_bytes((folder / "train" / "cat" / "d.png").read_bytes())
    assert len(datasets.load(config(folder)).train) == 9


def test_evaluation_uses_the_center_crop(folder: Path) -> None:
    with Image.open(str(folder / "val" / "cat" / "a.jpg")) as image:
        resized = image.resize((49, 37), Image.Resampling.BILINEAR)  # 37: 32 * 256 / 224 of the shorter side
        expected = np.asarray(resized)[2:34, 8:40].transpose(2, 0, 1)
    found = datasets.load(config(folder, image_size=32)).test[0][0].numpy()
    assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("data", [{}, {"num_workers": 2}, {"eight_bit_io": True}])
def test_training_crops_are_a_function_of_seed_epoch_and_sample(
    folder: Path, make: Callable[..., Plan], data: Any
) -> None:
    def fed(leg: int, instances: int, **section: object) -> torch.Tensor:
        own = {"dataset": "imagefolder", "data_dir": str(folder), "image_size": 16, **section}
        plan = make(data=own, training={"batch_size": 2, "epochs": 3}, pod={"replicas": 2, "num_instances": instances})
        source = ImageSource(plan.config, datasets.load(plan.config))
        calls = []
        for spec in plan.placement.instances:
            feed = Feed(plan, spec, source)
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


def test_a_truncated_image_is_named(folder: Path) -> None:
    (folder / "train" / "dog" / "a.JPEG").write_bytes((folder / "train" / "dog" / "b.jpeg").read_bytes()[:500])
    with pytest.raises(OSError, match=r"train/dog/a.JPEG: (?i:.*truncated.*); replace it"):
        datasets.load(config(folder)).train[4]


def test_the_image_is_named_for_any_exception_of_pillow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("train", r"has no class folders; expected .*/train/CLASS/\*\.jpg"),
        ("images", "contain no images"),
        ("unknown", r"val/bird is a class that .*train does not have"),
    ],
)
def test_missing_folders_and_images_are_errors(folder: Path, broken: str, words: str) -> None:
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


def test_the_test_split_may_be_missing_or_in_test(folder: Path, make: Callable[..., Plan]) -> None:
    (folder / "val").rename(folder / "other")
    plan = make(data=config(folder).data.model_dump(), training={"batch_size": 2})
    assert "imagefolder: 8 training, NO test images: nothing will be evaluated" in render(plan)
    assert datasets.dataset_size(config(folder)) == DatasetSize(8, 0)
    (folder / "other").rename(folder / "test")
    assert datasets.dataset_size(config(folder)) == DatasetSize(8, 2)
