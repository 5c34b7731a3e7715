"""Image folders: classes, crops, damaged files and missing folders."""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from raypod.errors import ConfigError
from raypod.plan.compatibility import check_compatible
from raypod.plan.plan import DatasetSize
from raypod.plan.resolve import from_values
from raypod.plan.tables import render, render_brief
from raypod.training import data as datasets
from raypod.training.data import packing
from raypod.training.data.image_files import SUFFIXES
from raypod.training.data.loading import SeededSamples
from raypod.training.tasks.image_classification import image_files
from tests.support import image_folders
from tests.support.image_folders import config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (image_folders.write(tmp_path) / "train" / "cat" / "notes.txt").write_text("no image")
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


def test_planning_counts_samples_and_writes_nothing(folder: Path) -> None:
    assert datasets.dataset_size(config(folder)) == DatasetSize(12, 2)
    assert datasets.image_shape(config(folder)) == datasets.ImageShape(3, 224, 2)
    assert not list(folder.rglob("*.npy"))
    before = datasets.load(config(folder)).fingerprint
    assert list(folder.rglob("*.npy"))
    (folder / "train" / "cat" / "b.jpg").unlink()
    image_folders.touch(folder / "train" / "cat")
    assert datasets.dataset_size(config(folder)) == DatasetSize(11, 2)
    assert datasets.load(config(folder)).fingerprint != before


def test_files_in_nested_folders_are_found(folder: Path) -> None:
    nested = folder / "train" / "cat" / "young" / "small"
    nested.mkdir(parents=True)
    datasets.load(config(folder))
    (nested / "e.png").write_bytes((folder / "train" / "cat" / "e.png").read_bytes())
    image_folders.touch(nested)
    assert len(datasets.load(config(folder)).train) == 13


CHANGES = [{"policy": "rand-augment", "random_erasing": 0.5}, {"policy": "auto-augment"}]


@pytest.mark.parametrize("data", [{}, {"eight_bit_io": True}, *CHANGES])
def test_training_crops_are_a_function_of_seed_epoch_and_sample(folder: Path, make: Any, data: Any) -> None:
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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"dataset": "digits", "policy": "auto-augment"},
            "--policy auto-augment has no effect without --dataset image",
        ),
        ({"dataset": "digits", "random_erasing": 0.5}, "--random-erasing 0.5 has no effect without --dataset imagef"),
        ({"dataset": "imagenet", "random_erasing": 0.5, "augment": False}, "no effect with --no-augment"),
        ({"dataset": "imagenet", "rand_augment_ops": 3}, "--rand-augment-ops 3 has no effect without --policy rand"),
        (
            {"policy": "auto-augment", "rand_augment_magnitude": 3, "dataset": "imagenet"},
            "--rand-augment-magnitude 3 has",
        ),
    ],
)
def test_changes_of_other_images_are_a_mistake(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_compatible(from_values({"data": given}))


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


def test_a_folder_that_does_not_exist_is_named_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, place in ((f"{tmp_path}/none", ""), ("none", f" in {tmp_path}")):
        message = f"^--data-dir {name} does not exist{place}: --dataset imagefolder reads it"
        with pytest.raises(ConfigError, match=message):
            datasets.load(config(name))


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
        with pytest.raises(ConfigError, match=words):
            read(config(folder))


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
    with pytest.raises(ConfigError, match="val/bird is a class which has no images in .*/train"):
        datasets.load(config(folder))


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
    assert len(train) == 14
    assert train[13][1] == 1
    assert len(image_files([str(folder / "train" / "dog")])) == 8


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
    assert splits.names == ("cat", "d\\xe9g")
    assert splits.train[6][1] == 1
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


def test_a_folder_that_cannot_be_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(where: str) -> Any:
        if where.endswith("dog"):
            raise PermissionError(errno.EACCES, "Permission denied", where)
        return scanned(where)

    scanned = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    for read in (datasets.load, datasets.dataset_size):
        with pytest.raises(ConfigError, match="cannot read the folder .*train/dog: Permission denied"):
            read(config(folder))
