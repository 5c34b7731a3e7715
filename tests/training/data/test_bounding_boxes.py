"""Bounding boxes: which crops are drawn, placements, resumed runs, and files that cannot be used."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypod.api.inference import settings
from raypod.errors import ConfigError
from raypod.plan.compatibility import check_compatible
from raypod.plan.resolve import from_values
from raypod.training import data as datasets
from raypod.training.checkpoint import resume
from raypod.training.checkpoint.format import Checkpoint
from raypod.training.data import image_decoders, packing
from raypod.training.data.bounding_boxes import WHOLE, boxes_of, is_covered
from raypod.training.data.loading import SeededSamples
from tests.support import image_folders
from tests.support.image_folders import config

CORNER = (0.7, 0.0, 1.0, 0.25)  # at the right of a wide image, at its top
NAMES = ("a.JPEG", "b.jpg", "c.jpg", "d.jpg", "e.png", "f.jpeg")
FILE = "".join(f"{kind}/{name},{','.join(map(str, CORNER))}\n" for kind in ("cat", "dog") for name in NAMES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (image_folders.write(tmp_path) / "boxes.csv").write_text(FILE)
    return tmp_path


def drawn(count: int, box: Any) -> Any:
    """The crops of a number of seeds of an image that is 300 wide and 200 high."""
    image = torch.empty(3, 200, 300, device="meta")
    for seed in range(count):
        torch.manual_seed(seed)
        yield image_decoders._drawn_crop(image, 200, 300, box)


def test_crops_are_drawn_until_one_has_a_tenth_of_the_box() -> None:
    box = (0.6, 0.0, 1.0, 0.4)
    first, with_box = list(drawn(300, WHOLE)), list(drawn(300, box))
    covered, covered_now = ([is_covered(crop, 200, 300, box) for crop in crops] for crops in (first, with_box))
    assert sum(covered) < 200 < 299 <= sum(covered_now)
    assert all(one == other for one, other, is_first in zip(first, with_box, covered) if is_first)
    for (top, left, rows, columns), expected in (
        ((0, 200, 100, 100), True),  # 90 x 50 of 10,000 pixels
        ((150, 0, 50, 300), False),
        ((150, 0, 50, 100), False),  # both distances are negative, and their product is not
        ((0, 119, 50, 100), False),  # 9 x 50 of 5,000
        ((0, 120, 50, 100), True),
    ):
        assert is_covered((top, left, rows, columns), 200, 300, CORNER) == expected


def test_the_last_of_ten_crops_remains_if_the_box_is_too_small() -> None:
    from torchvision import transforms  # after the import hook of image_decoders

    for seed, crop in enumerate(drawn(3, (0.999, 0.0, 1.0, 0.001))):
        torch.manual_seed(seed)
        image = torch.empty(3, 200, 300, device="meta")
        get = transforms.RandomResizedCrop.get_params
        assert [get(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(10)][-1] == crop


@pytest.mark.parametrize("given", [{}, {"policy": "rand-augment", "random_erasing": 0.5}])
@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
def test_only_images_with_a_box_have_other_crops(folder: Path, decoder: str, given: Any) -> None:
    if decoder == "simplejpeg":
        pytest.importorskip("simplejpeg")

    def images(name: str, **more: Any) -> torch.Tensor:
        (folder / "boxes.csv").write_text(f"{name},0.0,0.0,1.0,1.0\ncat/d.jpg,0.99,0.99,1,1\n")
        data = config(folder, image_size=16, jpeg_decoder=decoder, **given, **more)
        samples = SeededSamples(datasets.load(data).train, seed=1)
        return torch.stack([samples[epoch, index][1][0] for epoch in range(4) for index in range(12)])

    ordinary, with_boxes = images("x.jpg"), images("x.jpg", bounding_boxes=str(folder / "boxes.csv"))
    differs = (ordinary != with_boxes).flatten(1).any(dim=1).reshape(4, 12)
    assert differs.any(dim=0).tolist() == [index == 3 for index in range(12)]


def test_crops_by_boxes_are_a_function_of_seed_epoch_and_sample(folder: Path, make: Any) -> None:
    fed = functools.partial(image_folders.fed, make, folder, {"bounding_boxes": str(folder / "boxes.csv")})
    assert torch.equal(fed(1, 1), fed(1, 2))
    assert not torch.equal(fed(0, 1), fed(1, 1))


def test_boxes_belong_to_the_names_of_files(tmp_path: Path) -> None:
    images = np.array([b"train/cat/young/a.jpg", b"train/cat/b.jpg", b"train/dog/b.jpg", b"train/dog/\xe9.jpg"])
    file = tmp_path / "boxes.csv"
    file.write_bytes(b"a.jpg,0,0,1,0.5\r\na.jpg,0.25,0,1,0.5\r\ndog/b.jpg,0,0,0.5,0.5\r\n\xe9.jpg,0.5,0.5,1,1\r\n")
    found = boxes_of(str(file), images)
    assert found.tolist() == [[0.25, 0, 1, 0.5], [0, 0, 1, 1], [0, 0, 0.5, 0.5], [0.5, 0.5, 1, 1]]


def test_a_resumed_run_needs_the_same_boxes(folder: Path, make: Any) -> None:
    file = folder / "boxes.csv"

    def fingerprint(**data: Any) -> str:
        return datasets.load(config(folder, **data)).fingerprint

    without, given = fingerprint(), fingerprint(bounding_boxes=str(file))
    moved = file.with_name("moved.csv")
    moved.write_text(FILE.replace("\n", "\r\n"))
    assert fingerprint(bounding_boxes=str(moved)) == given
    moved.write_text(FILE.replace("0.7", "0.6"))
    changed = fingerprint(bounding_boxes=str(moved))
    assert len({without, given, changed}) == 3
    assert len({each.partition("-")[0] for each in (without, given, changed)}) == 1, "the names are the same"

    plans = [
        make(data=config(folder, bounding_boxes=name).data.model_dump(), training={"batch_size": 2})
        for name in (None, str(file), str(moved))
    ]
    manifest = resume.manifest_of(plans[1], 1, 0, given, {})
    with pytest.raises(ConfigError, match=f"--bounding-boxes {moved} has other boxes than those of the run"):
        resume.check_data(plans[2], Checkpoint(folder, manifest), changed)
    assert resume.difference_to(plans[2], manifest, []) is None
    assert "its data.bounding_boxes is a file and this run's is None" in str(
        resume.difference_to(plans[0], manifest, [])
    )


def test_an_evaluation_does_not_read_the_boxes() -> None:
    own = from_values({"data": {"dataset": "imagefolder", "bounding_boxes": "none.csv"}})
    assert settings.changed(own, {}, settings.EVALUATION)["data"].get("bounding_boxes") is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a.JPEG,0,0,1\n", "line 1 is no NAME,x1,y1,x2,y2"),
        ("cat/a.JPEG,0,0,1,1\n\n", "line 2 is no NAME"),
        ("cat/a.JPEG,0,0,1,1\nb.jpg,0,0,1,right\n", "line 2 is no NAME"),
        ("b.jpg,0,0,1,1,1\n", "line 1 is no NAME"),
        ("b.jpg,0,0,1," + "1" * 200_000, "line 1 is no NAME"),  # more than csv reads
        ("b.jpg,0,0,1,1.01\n", r"line 1: the box 0,0,1,1.01 is empty or outside of the image: x1 < x2 and y1 < y2"),
        ("b.jpg,-0.1,0,1,1\n", "line 1: the box -0.1,0,1,1 is empty or"),
        ("b.jpg,0.5,0,0.5,1\n", "line 1: the box 0.5,0,0.5,1 is empty or"),
        ("b.jpg,0,nan,1,1\n", "line 1: the box 0,nan,1,1 is empty or"),
        ("a.JPEG,0,0,1,1\n", "several training images are named a.JPEG, as dog/a.JPEG: write CLASS/NAME in the file"),
        ("n01440764_10026.JPEG,0,0,1,1\n", "has a box of none of the 12 training images"),
        ("", "has a box of none of the 12 training images"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(folder: Path, content: str, words: str) -> None:
    (folder / "boxes.csv").write_text(content)
    data = config(folder, bounding_boxes=str(folder / "boxes.csv"))
    for read in (datasets.load, datasets.dataset_size):
        with pytest.raises(ConfigError, match=f"^--bounding-boxes {folder}/boxes.csv:? {words}"):
            read(data)


def test_a_missing_file_is_named_with_where_it_was_looked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name, words in (
        ("none.csv", f"No such file or directory in {folder}$"),
        (f"{folder}/none.csv", "No such file or directory$"),
        ("train", "Is a directory"),
    ):
        with pytest.raises(ConfigError, match=f"^--bounding-boxes {name}: {words}"):
            datasets.dataset_size(config(folder, bounding_boxes=name))


def test_packed_images_have_no_boxes(folder: Path) -> None:
    packing.pack(folder, folder / "packed", 10**9, lambda written, total: None)
    data = config(folder / "packed", bounding_boxes=str(folder / "boxes.csv"))
    for read in (datasets.load, datasets.dataset_size):
        with pytest.raises(ConfigError, match=r"boxes.csv has no effect on shards, which .*packed has: omit it"):
            read(data)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dataset": "digits"}, "--bounding-boxes b.csv has no effect without --dataset imagefolder or imagenet: omit"),
        ({"dataset": "shards"}, "--bounding-boxes b.csv has no effect without --dataset imagefolder or imagenet: omit"),
        ({"dataset": "imagenet", "augment": False}, "--bounding-boxes b.csv has no effect with --no-augment"),
    ],
)
def test_boxes_of_other_images_are_a_mistake(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_compatible(from_values({"data": {**given, "bounding_boxes": "b.csv"}}))
