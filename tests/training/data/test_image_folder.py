"""Image folders: classes, crops, damaged files, missing folders, bounding boxes, and pixels of unusual modes."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch
from PIL import Image

from raypod.api.inference import settings
from raypod.errors import ConfigError
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize
from raypod.plan.resolve import from_values
from raypod.plan.tables import render, render_brief
from raypod.training import data as datasets
from raypod.training.checkpoint import resume
from raypod.training.checkpoint.format import Checkpoint
from raypod.training.data import image_decoders, packing
from raypod.training.data.bounding_boxes import WHOLE, boxes_of, is_covered
from raypod.training.data.image_files import SUFFIXES
from raypod.training.data.loading import SeededSamples
from raypod.training.data.pixels import open_image
from raypod.training.tasks.image_classification import ImageReader, image_files
from tests.support import image_folders
from tests.support.image_folders import config
from tests.support.refused import refused

CHANGES = [{"policy": "rand-augment", "random_erasing": 0.5}, {"policy": "auto-augment"}]
CORNER = (0.7, 0.0, 1.0, 0.25)  # at the right of a wide image, at its top
NAMES = ("a.JPEG", "b.jpg", "c.jpg", "d.jpg", "e.png", "f.jpeg")
FILE = "".join(f"{kind}/{name},{','.join(map(str, CORNER))}\n" for kind in ("cat", "dog") for name in NAMES)
SIDE = 28  # Resize to 32 and a crop of 28: images of 32 pixels are cropped only
GREY = (np.arange(32 * 32).reshape(32, 32) // 4).astype(np.uint8)
COLOR = np.stack([GREY, GREY.T, 255 - GREY], axis=-1)
TURNED = Image.Exif()
SIXTEEN = (GREY.astype(np.uint16) << 8) + 77
SEE_THROUGH = bytes([0] * 128 + [255] * 128)
COLORED, PALETTE = Image.fromarray(COLOR), Image.fromarray(GREY).quantize(256)
FRAMES = {"save_all": True, "append_images": [Image.fromarray(255 - COLOR)]}
DEEP, CLEAR = "with more than 8 bits per channel (reduced to 8)", "with transparency (dropped)"
CMYK, FIRST = "in CMYK (converted without a color profile)", "with several frames (only the first is used)"
ORIENTED = "with an EXIF orientation (not applied)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (image_folders.write(tmp_path) / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "boxes.csv").write_text(FILE)
    return tmp_path


def test_each_folder_is_a_class_and_evaluation_uses_the_center_crop(folder: Path) -> None:
    splits = datasets.load(config(folder, image_size=32))
    assert (len(splits.train), len(splits.test), splits.classes) == (12, 2, 2)
    assert [splits.train[index][1] for index in range(12)] == [0] * 6 + [1] * 6
    image, label = splits.test[1]
    assert (tuple(image.shape), image.dtype, label) == ((3, 32, 32), torch.uint8, 1)
    with Image.open(str(folder / "val" / "cat" / "a.JPEG")) as image:
        resized = image.resize((48, 37), Image.Resampling.BILINEAR)  # 37: 32 * 256 / 224 of the shorter side
        expected = np.asarray(resized)[2:34, 8:40].transpose(2, 0, 1)
    assert np.abs(splits.test[0][0].numpy().astype(int) - expected.astype(int)).max() <= 1


def test_planning_counts_samples_and_writes_nothing_and_nested_folders_are_found(folder: Path) -> None:
    assert datasets.dataset_size(config(folder)) == DatasetSize(12, 2)
    assert datasets.image_shape(config(folder)) == datasets.ImageShape(3, 224, 2)
    assert not list(folder.rglob("*.npy"))
    before = datasets.load(config(folder)).fingerprint
    assert list(folder.rglob("*.npy"))
    (folder / "train" / "cat" / "b.jpg").unlink()
    image_folders.touch(folder / "train" / "cat")
    assert datasets.dataset_size(config(folder)) == DatasetSize(11, 2)
    assert datasets.load(config(folder)).fingerprint != before
    nested = folder / "train" / "cat" / "young" / "small"
    nested.mkdir(parents=True)
    datasets.load(config(folder))
    (nested / "e.png").write_bytes((folder / "train" / "cat" / "e.png").read_bytes())
    image_folders.touch(nested)
    assert len(datasets.load(config(folder)).train) == 12


@pytest.mark.parametrize("data", [{}, {"eight_bit_io": True}, {"bounding_boxes": "FOLDER/boxes.csv"}, *CHANGES])
def test_training_crops_are_a_function_of_seed_epoch_and_sample(folder: Path, make: Any, data: Any) -> None:
    data = {
        name: value.replace("FOLDER", str(folder)) if isinstance(value, str) else value for name, value in data.items()
    }
    fed = functools.partial(image_folders.fed, make, folder, data)
    assert torch.equal(fed(1, 1), fed(1, 2))
    assert not torch.equal(fed(0, 1), fed(1, 1))


def test_policies_and_erasing_change_the_same_crops(folder: Path) -> None:
    def training_images(**given: Any) -> torch.Tensor:
        samples = SeededSamples(datasets.load(config(folder, image_size=16, **given)).train, seed=1)
        return torch.stack([samples[0, index][1][0] for index in range(12)])

    ordinary = training_images()
    for given in (
        {"policy": "auto-augment"},
        {"policy": "rand-augment"},
        {"policy": "rand-augment", "rand_augment_ops": 4},
        {"policy": "rand-augment", "rand_augment_magnitude": 30},
    ):
        assert (training_images(**given) != ordinary).any()
    erased, mean = training_images(random_erasing=1.0), torch.tensor([124, 116, 104], dtype=torch.uint8)
    is_erased = (erased == mean[:, None, None]).all(dim=1)
    assert is_erased.flatten(1).any(dim=1).all()
    assert torch.equal(erased.permute(0, 2, 3, 1)[~is_erased], ordinary.permute(0, 2, 3, 1)[~is_erased])


def test_without_augmentation_training_images_are_the_centre_too(folder: Path) -> None:
    (folder / "val" / "cat" / "a.JPEG").write_bytes((folder / "train" / "cat" / "a.JPEG").read_bytes())
    plain, random = (datasets.load(config(folder, image_size=16, augment=on)) for on in (False, True))
    assert torch.equal(plain.train[0][0], plain.test[0][0])
    assert not torch.equal(random.train[0][0], plain.test[0][0])


def test_a_damaged_image_is_named(folder: Path) -> None:
    cut, broken = folder / "train" / "dog" / "a.JPEG", folder / "train" / "dog" / "e.png"
    cut.write_bytes(cut.read_bytes()[:500])
    image_folders.photograph(1, 300, 300).save(str(broken))
    at = broken.read_bytes().rindex(b"IDAT")
    broken.write_bytes(broken.read_bytes()[:at] + b"\0\0\0\0" + broken.read_bytes()[at + 4 :])  # a SyntaxError
    train = datasets.load(config(folder)).train
    with pytest.raises(OSError, match=r"train/dog/a.JPEG: (?i:.*truncated.*); replace it"):
        train[6]
    with pytest.raises(OSError, match=r"train/dog/e.png: .*; replace it"):
        train[10]


def test_folders_that_do_not_exist_or_cannot_be_read_are_named(tmp_path: Path, monkeypatch: Any, folder: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, place in ((f"{tmp_path}/none", ""), ("none", f" in {tmp_path}")):
        message = f"^--data-dir {name} does not exist{place}: --dataset imagefolder reads it"
        refused(message, datasets.load, config(name))

    def scandir(where: str) -> Any:
        if where.endswith("dog"):
            raise PermissionError(errno.EACCES, "Permission denied", where)
        return scanned(where)

    scanned = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    for read in (datasets.load, datasets.dataset_size):
        refused("cannot read the folder .*train/dog: Permission denied", read, config(folder))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda at: (at / "train").rename(at / "other"), r"has no class folders; expected .*/train/CLASS/\*\.jpg"),
        (lambda at: [file.unlink() for file in (at / "train").rglob("*.*")], "contain no images"),
        (lambda at: (at / "val" / "bird").mkdir(), r"val/bird is a class that .*train does not have"),
    ],
)
def test_missing_folders_and_images_are_errors(folder: Path, damage: Any, words: str) -> None:
    damage(folder)
    for read in (datasets.load, datasets.dataset_size):
        refused(words, read, config(folder))


def test_the_test_split_may_be_missing_or_in_test(folder: Path, make: Any) -> None:
    (folder / "val").rename(folder / "other")
    plan = make(data=config(folder).data.model_dump(), training={"batch_size": 2})
    assert "imagefolder: 12 training, NO test images: nothing will be evaluated" in render(plan)
    assert datasets.dataset_size(config(folder)) == DatasetSize(12, 0)
    (folder / "other").rename(folder / "test")
    assert datasets.dataset_size(config(folder)) == DatasetSize(12, 2)


def test_hidden_and_other_files_are_no_samples_and_are_counted(folder: Path, make: Any) -> None:
    ordinary = datasets.load(config(folder)).fingerprint
    train, picture = folder / "train", (folder / "train" / "cat" / "e.png").read_bytes()
    for hidden in (train / ".ipynb_checkpoints", train / "cat" / ".cache", train / "dog"):
        hidden.mkdir(exist_ok=True)
        (hidden / "._x.png").write_bytes(picture)
    (train / ".ipynb_checkpoints" / "x.png").write_bytes(picture)
    (train / "cat" / ".cache" / "x.png").write_bytes(picture)
    (train / "x.png").write_bytes(picture)
    (train / "bird").mkdir()
    (train / "dog" / "README").write_text("")
    splits = datasets.load(config(folder))
    assert (splits.names, splits.classes, splits.fingerprint) == (("cat", "dog"), 2, ordinary)
    assert datasets.image_shape(config(folder)).classes == 2
    notes = datasets.dataset_size(config(folder)).notes[:2]
    assert notes == (
        f"WARNING: 1 class folder without images, as {train}/bird",
        "skipped: 3 hidden, 1 .txt, 1 without a suffix, 1 outside of the class folders",
    )
    plan = make(data=config(folder).data.model_dump(), training={"batch_size": 2})
    assert all(note in render(plan) and note in render_brief(plan) for note in notes)
    assert packing.pack(folder, folder / "packed", 10**9, lambda written, total: None).skipped == list(notes)
    (folder / "val" / "bird").mkdir()
    assert len(datasets.load(config(folder)).test) == 2
    (folder / "val" / "bird" / "x.png").write_bytes(picture)
    image_folders.touch(folder / "val" / "bird")
    refused("val/bird is a class which has no images in .*/train", datasets.load, config(folder))


@pytest.mark.parametrize("above", [".", "train", ".."])
def test_a_link_to_a_folder_above_the_classes_adds_no_images_of_others(folder: Path, above: str) -> None:
    before = len(datasets.load(config(folder)).train)
    (folder / "train" / "dog" / "back").symlink_to(folder / above, target_is_directory=True)
    image_folders.touch(folder / "train" / "dog")
    assert len(datasets.load(config(folder)).train) == before
    assert "1 linked to a folder above" in datasets.dataset_size(config(folder)).notes[0]


def test_links_are_followed_and_loops_end(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    picture = (folder / "train" / "cat" / "e.png").read_bytes()
    (elsewhere / "x.png").write_bytes(picture)
    (elsewhere / "back").symlink_to(folder / "train" / "dog", target_is_directory=True)
    (folder / "train" / "dog" / "more").symlink_to(elsewhere, target_is_directory=True)
    assert len(datasets.load(config(folder)).train) == 13
    assert "skipped: 1 .txt, 1 linked to a folder above" in datasets.dataset_size(config(folder)).notes[0]
    (elsewhere / "y.png").write_bytes(picture)  # only the time of a linked folder changes
    image_folders.touch(elsewhere)
    train = datasets.load(config(folder)).train
    assert (len(train), train[13][1], len(image_files([str(folder / "train" / "dog")]))) == (14, 1, 8)


def test_the_fingerprint_covers_the_contents_of_the_files(folder: Path) -> None:
    before = datasets.load(config(folder)).fingerprint
    one, other = (folder / split / "dog" / "a.JPEG" for split in ("train", "val"))
    original, moved = one.read_bytes(), one.stat()
    os.utime(str(one), ns=(0, 0))
    assert datasets.load(config(folder)).fingerprint == before, "copies on other hosts have other times"
    one.write_bytes(original[:-9] + bytes([original[-9] ^ 1]) + original[-8:])  # of the same size
    os.utime(str(one), ns=(moved.st_atime_ns, moved.st_mtime_ns))
    changed = datasets.load(config(folder)).fingerprint
    assert (changed != before, changed.partition("-")[0]) == (True, before.partition("-")[0])
    one.write_bytes(original)
    other.write_bytes(original)
    assert datasets.load(config(folder)).fingerprint not in (before, changed)
    other.unlink()
    other.symlink_to("nothing")  # an error when it is evaluated
    image_folders.touch(other.parent)
    assert len(datasets.load(config(folder)).test) == 2


def test_names_need_not_be_utf8(folder: Path, make: Any) -> None:
    root = folder.with_name("caf\udce9")
    folder.rename(root)
    for split in ("train", "val"):
        (root / split / "dog").rename(root / split / "d\udce9g")
    for where in (root, root / "train" / "d\udce9g"):
        (where / "x.\udce9").write_bytes(b"")
    (root / "train" / "d\udce9g" / "b.jpg").write_bytes(b"no image")
    splits = datasets.load(config(root))
    assert (splits.names, splits.train[6][1]) == (("cat", "d\\xe9g"), 1)
    with pytest.raises(OSError, match=r"caf\\xe9/train/d\\xe9g/b.jpg: ") as caught:
        splits.train[7]
    assert str(caught.value).encode()
    assert render(make(data=config(root).data.model_dump(), training={"batch_size": 2})).encode()
    packing.pack(root, root / "packed", 10**9, lambda written, total: None)
    packed = datasets.load(config(root / "packed"))
    assert (packed.names, packed.fingerprint) == (splits.names, splits.fingerprint)
    with pytest.raises(OSError, match=r"train/d\\xe9g/b.jpg \(.*caf\\xe9/packed/train"):
        packed.train[7]


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_every_format_is_read(tmp_path: Path, suffix: str) -> None:
    where = tmp_path / "train" / "a" / f"x{suffix.upper()}"
    where.parent.mkdir(parents=True)
    image = image_folders.photograph(1, 64, 64)
    Image.init()
    kind = Image.registered_extensions().get(suffix)
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow does not write {suffix}")
    image.convert("1" if suffix == ".xbm" else "RGB").save(str(where), "JPEG" if kind == "MPO" else kind)
    image, label = datasets.load(config(tmp_path, image_size=32)).train[0]
    assert (tuple(image.shape), label) == ((3, 32, 32), 0)


def of_torchvision(seed: int, height: int, width: int, count: int) -> List[Any]:
    from torchvision.transforms import RandomResizedCrop  # after the import hook of image_decoders

    torch.manual_seed(seed)
    image = torch.empty(3, height, width, device="meta")
    return [RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(count)]


def drawn(count: int, box: Any) -> Any:
    """The crops of a number of seeds of an image that is 300 wide and 200 high."""
    for seed in range(count):
        torch.manual_seed(seed)
        yield image_decoders._drawn_crop(200, 300, box)


def test_crops_are_drawn_until_one_has_a_tenth_of_the_box_and_the_last_of_ten_remains() -> None:
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
    assert list(drawn(3, (0.999, 0.0, 1.0, 0.001))) == [of_torchvision(seed, 200, 300, 10)[-1] for seed in range(3)]


@pytest.mark.parametrize(("height", "width"), [(200, 300), (375, 500), (1, 1), (3, 400), (400, 3)])
def test_crops_are_those_of_torchvision(height: int, width: int) -> None:
    for seed in range(50):
        expected, state = of_torchvision(seed, height, width, 3), torch.get_rng_state()
        torch.manual_seed(seed)
        assert [image_decoders._random_crop(height, width) for _ in range(3)] == expected
        assert torch.equal(torch.get_rng_state(), state)


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
    words = "its data.bounding_boxes is a file and this run's is None"
    assert words in str(resume.difference_to(plans[0], manifest, []))


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
        refused(f"^--bounding-boxes {folder}/boxes.csv:? {words}", read, data)


def test_boxes_that_are_missing_or_of_packed_images_are_named_and_an_evaluation_reads_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for name, words in (
        ("none.csv", f"No such file or directory in {folder}$"),
        (f"{folder}/none.csv", "No such file or directory$"),
        ("train", "Is a directory"),
    ):
        refused(f"^--bounding-boxes {name}: {words}", datasets.dataset_size, config(folder, bounding_boxes=name))
    packing.pack(folder, folder / "packed", 10**9, lambda written, total: None)
    data = config(folder / "packed", bounding_boxes=str(folder / "boxes.csv"))
    for read in (datasets.load, datasets.dataset_size):
        refused(r"boxes.csv has no effect on shards, which .*packed has: omit it", read, data)
    own = from_values({"data": {"dataset": "imagefolder", "bounding_boxes": "none.csv"}})
    assert settings.changed(own, {}, settings.EVALUATION)["data"].get("bounding_boxes") is None


TURNED[0x0112] = 6
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


def config_of_side(folder: Path, **data: object) -> Config:
    return config(folder, image_size=SIDE, **data)


@pytest.mark.parametrize("name", list(TABLE))
@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
def test_training_evaluation_and_prediction_see_the_same_pixels(tmp_path: Path, name: str, decoder: str) -> None:
    if decoder == "simplejpeg":
        pytest.importorskip("simplejpeg", reason="the extra raypod[jpeg] is not installed")
    image, options, pixels, warning = TABLE[name]
    settings = config_of_side(folder_of(tmp_path, name, image, **options), jpeg_decoder=decoder, augment=False)
    splits = datasets.load(settings)
    expected = np.broadcast_to(pixels.reshape(32, 32, -1), (32, 32, 3))[2:30, 2:30].transpose(2, 0, 1)
    predicted = ImageReader("imagefolder", splits).read(tmp_path / "val" / "a" / name)
    for found in (splits.train[0][0], splits.test[0][0], predicted):
        assert np.array_equal(found.numpy(), expected)
    notes = datasets.dataset_size(settings).notes
    assert notes == (() if not warning else (f"WARNING: 2 of 2 images {warning}, as {tmp_path}/train/a/{name}",))


def test_a_jpeg_with_an_orientation_and_images_for_a_grey_model(tmp_path: Path) -> None:
    settings = config_of_side(image_folders.write(tmp_path))
    kinds = [each.partition(" images ")[2].partition(",")[0] for each in datasets.dataset_size(settings).notes]
    assert kinds == [CMYK, ORIENTED, CLEAR]
    array = datasets.ArrayDataset(np.zeros((1, 1, 32, 32), dtype=np.uint8), np.zeros(1, dtype=np.int64))
    reader = ImageReader("grey", datasets.Splits(array, array, 1, ""))
    for name in ("grey.png", "sixteen.png", "grey-alpha.png", "holes.png"):
        image, options, pixels, _ = TABLE[name]
        image.save(str(tmp_path / name), **options)
        assert torch.equal(reader.read(tmp_path / name)[0], torch.from_numpy(pixels))


def test_pixels_of_an_unknown_range_are_an_error(tmp_path: Path) -> None:
    for number, (pixels, words) in enumerate(
        (
            (GREY.astype(np.float32) / 255, "floating-point numbers of an unknown range"),
            (GREY.astype(np.int32) * 4096, "integers of more than 16 bits"),
            (GREY.astype(np.int32) - 9, "integers of more than 16 bits"),
        )
    ):
        splits = datasets.load(config_of_side(folder_of(tmp_path / str(number), "wide.tif", Image.fromarray(pixels))))
        with pytest.raises(OSError, match=f"train/a/wide.tif: its pixels are {words}: convert it to 8 or 16 bits"):
            splits.train[0]


def test_the_plan_shows_what_is_lost_and_what_cannot_be_opened(tmp_path: Path, make: Any) -> None:
    folder = image_folders.write(tmp_path)
    (folder / "train" / "cat" / "a.JPEG").write_bytes(b"no image")
    plan = make(data=config_of_side(folder).data.model_dump(), training={"batch_size": 2})
    shown: List[str] = render(plan).splitlines()
    assert any(f"WARNING: 1 of 14 images that cannot be opened, as {folder}/train/cat/a.JPEG" in line for line in shown)
    assert any(f"WARNING: 2 of 14 images with transparency (dropped), as {folder}" in line for line in shown)


@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
def test_training_and_prediction_refuse_an_image_with_more_pixels(decoder: str, tmp_path: Path) -> None:
    pytest.importorskip(decoder.replace("pillow", "PIL"))
    folder = image_folders.write(tmp_path)
    file, pixels = folder / "train" / "cat" / "b.jpg", 500 * 400
    image_folders.photograph(1, 500, 400).save(file, "JPEG")
    accepted, rejected = (
        datasets.load(config(folder, image_size=24, jpeg_decoder=decoder, max_image_pixels=limit))
        for limit in (pixels, pixels - 1)
    )
    assert accepted.train[1][0].shape == ImageReader("imagefolder", accepted).read(file).shape
    message = f"{re.escape(str(file))}: it has .* pixels, more than --max-image-pixels {pixels - 1}"
    with pytest.raises(OSError, match=f"{message}.* accept more with --max-image-pixels, or .* with --leave-out 1"):
        rejected.train[1]
    refused(message, ImageReader("imagefolder", rejected).read, file)


def test_the_limit_replaces_that_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    size = 30_000
    with pytest.raises(OSError, match="it has more than [0-9]+ pixels, and --max-image-pixels is 1000"):
        open_image(io.BytesIO(_png(size)), 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with pytest.raises(OSError, match="more than 89478485 pixels, and --max-image-pixels is"):
            open_image(io.BytesIO(_png(10_000)), 1000)
    with open_image(io.BytesIO(_png(size)), size * size) as image:
        assert image.size == (size, size)


@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
@pytest.mark.parametrize("side", [101, 142])  # of more than 100 x 100 pixels, and of more than twice as many
def test_the_plan_warns_of_an_image_that_training_refuses_and_pillow_does_not(
    decoder: str, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    pytest.importorskip(decoder.replace("pillow", "PIL"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    folder = folder_of(tmp_path, "a.png", Image.new("L", (32, 32)))
    (folder / "train" / "a" / "a.png").write_bytes(_png(side))
    large = config(folder, image_size=16, jpeg_decoder=decoder, max_image_pixels=10_000)
    found = "with more pixels than --max-image-pixels 10000 (cannot be used)"
    assert datasets.dataset_size(large).notes == (f"WARNING: 1 of 2 images {found}, as {folder}/train/a/a.png",)
    with pytest.raises(OSError, match=r"/a.png: it has .* pixels, .*--max-image-pixels (is )?10000; .* accept more"):
        datasets.load(large).train[0]
    assert not recwarn.list


def _png(side: int) -> bytes:
    """Return a PNG file without pixels."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT")


def _chunk(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
