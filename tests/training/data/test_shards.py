from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch

from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.plan.plan import DatasetSize
from raypod.plan.values import parse_size
from raypod.system.files import file_lock
from raypod.training import data as datasets
from raypod.training.data import packing, shards
from raypod.training.data.loading import SeededSamples
from tests.support import image_folders
from tests.support.image_folders import config
from tests.support.refused import one_line, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folders.write(tmp_path_factory.mktemp("images"))


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    """The folder in shards of few images."""
    return pack(folder, tmp_path / "packed")


def pack(folder: Path, out: Path) -> Path:
    packing.pack(folder, out, 60_000, lambda written, total: None)
    return out


def load(folder: Path) -> Any:
    return datasets.load(config(folder, image_size=32))


def bytes_in(folder: Path) -> List[bytes]:
    return [file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()]


def test_the_samples_are_those_of_the_folder(folder: Path, packed: Path) -> None:
    ours, theirs = load(packed), load(folder)
    assert (ours.fingerprint, ours.names, ours.classes) == (theirs.fingerprint, ("cat", "dog"), 2)
    assert datasets.dataset_size(config(packed)) == DatasetSize(12, 2)
    assert datasets.image_shape(config(packed, image_size=32)) == datasets.ImageShape(3, 32, 2)
    for split in ("train", "test"):
        both = [SeededSamples(getattr(each, split), seed=1) for each in (ours, theirs)]
        for index in range(len(getattr(ours, split))):
            (_, (image, label)), (_, (expected, right)) = (each[2, index] for each in both)
            assert torch.equal(image, expected)
            assert label == right
    assert not list(packed.rglob(".raypod-cache"))


def test_the_shards_are_those_of_webdataset(folder: Path, packed: Path) -> None:
    found: Dict[str, bytes] = {}
    for shard in sorted((packed / "train").iterdir()):
        assert shard.stat().st_size <= 60_000
        with tarfile.open(str(shard)) as tar:
            found.update({member.name: tar.extractfile(member).read() for member in tar.getmembers()})
    keys = [name[:9] for name in found]
    assert keys[::2] == keys[1::2], "a sample is not split over shards"
    assert keys[::2] != sorted(keys[::2]), "programs that read one after the other get mixed classes"
    for index, file in enumerate(sorted((folder / "train").rglob("*.*"))):
        extension = "png" if file.suffix == ".png" else "jpg"
        assert found[f"{index:09d}.{extension}"] == file.read_bytes()
        assert found[f"{index:09d}.cls"] == str(int(file.parent.name == "dog")).encode()
    assert len(found) == 24
    assert len(list((packed / "train").iterdir())) > 1


def test_packing_again_after_a_killed_process_and_another_process_opens_the_shards_again(
    folder: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bytes_in(pack(folder, packed.with_name("again"))) == bytes_in(packed)
    left = tmp_path / "new.partial"
    (left / "train").mkdir(parents=True)
    (left / "train" / "00000.tar").write_bytes(b"half")
    with pytest.raises(ConfigError, match="has no class folders"):
        load(left)
    assert bytes_in(pack(folder, tmp_path / "new")) == bytes_in(packed)
    assert not left.exists()
    monkeypatch.setattr(shards, "_MAX_OPEN", 1)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    files = load(packed).train.files
    content = [files.read(index) for index in range(12)]
    copy = pickle.loads(pickle.dumps(files))
    assert [copy.read(index) for index in range(12)] == content
    del files, copy
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_the_test_split_may_be_missing_and_sizes_are_parsed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(str(folder / "train"), str(tmp_path / "images" / "train"))
    found = packing.pack(tmp_path / "images", tmp_path / "packed", 10**9, lambda written, total: None)
    assert (found.train, found.test, found.shards) == (12, 0, 1)
    assert datasets.dataset_size(config(tmp_path / "packed")) == DatasetSize(12, 0)
    assert len(load(tmp_path / "packed").test) == 0
    for text, size in {"256MB": 256_000_000, "1gb": 10**9, "64 kB": 64_000, "2TB": 2 * 10**12}.items():
        assert parse_size(text) == size
    for text in ("0MB", "-1GB", "1.5GB", "GB", "256"):
        with pytest.raises(ValueError, match="such as 256MB"):
            parse_size(text)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-512])


def edited(**changed: object) -> Callable[[Path], object]:
    def edit(file: Path) -> None:
        content = {**json.loads(file.read_text()), **changed}
        file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return edit


def leads_out(file: Path) -> None:
    file.write_text(file.read_text().replace("val/00000.tar", "../00000.tar"))


def zero(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8] + bytes(8))


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("train/00001.tar", Path.unlink, r"shard \S+train/00001.tar cannot be read: No such file or .*; copy it again"),
        ("train/00001.tar", cut, r"shard \S+train/00001.tar has \d+ bytes, expected \d+; copy it again"),
        ("index.json", edited(version=2), "index.json has version 2, and .* version 1: pack the data"),
        ("index.json", lambda file: file.write_text("{}"), r"index.json is not the index of `.*`: its format is None"),
        ("index.json", cut, r"cannot read the index \S+index.json \(.*\); copy it again, or pack again"),
        ("index.json", edited(classes=None), r"\S+index.json \(.*classes.*\); copy it again, or pack"),
        ("index.json", edited(arrays={"train_files": "../../x"}), r"index.json \(.*arrays.train_files.*\); copy it"),
        ("index.json", leads_out, r"index.json \(.*test.shards.0.file.*\); copy it again"),
        ("index.json", Path.unlink, r"packed has shards, but no index.json: it is incomplete; copy it again"),
        ("index/train_offsets.npy", zero, r"offsets.npy \(its checksum is \w+, expected \w+\); copy it again"),
        ("index/test_files.npy", Path.unlink, r"test_files.npy \(No such file or directory\); copy it again"),
    ],
)
def test_a_damaged_folder_is_an_error(packed: Path, file: str, damage: Any, words: str) -> None:
    damage(packed / file)
    assert "\n" not in refused(words, load, packed)
    assert main(["pack", "--verify", str(packed)]) == 2


def test_changed_bytes_are_found_when_they_are_read(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "--verify", str(packed)]) == 0
    assert "all checksums are right" in capsys.readouterr().out
    shard = packed / "val" / "00000.tar"
    content = bytearray(shard.read_bytes())
    content[512 + 300] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(OSError, match=r"val/cat/a.JPEG \(\S+val/00000.tar, sample 0\): its bytes in the shard have"):
        load(packed).test[0]
    assert main(["pack", "--verify", str(packed)]) == 2
    assert "val/00000.tar is damaged: its checksum is" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_packing_leaves_nothing(folder: Path, tmp_path: Path, error: BaseException) -> None:
    def fail(written: int, total: int) -> None:
        assert total == 14
        assert (tmp_path / "packed.partial").is_dir()
        if written == 5:
            raise error

    with pytest.raises((KeyboardInterrupt, ConfigError)) as caught:
        packing.pack(folder, tmp_path / "packed", 60_000, fail)
    assert not list(tmp_path.iterdir())
    if isinstance(caught.value, ConfigError):
        assert "No space left on device" in str(caught.value)


def test_two_processes_do_not_pack_into_one_folder_and_an_empty_image_is_named(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(packing, "_LOCK_TIMEOUT_S", 0.1)
    (tmp_path / "new.partial").mkdir()
    with file_lock(tmp_path / "new.partial" / "lock", 1, ""), pytest.raises(ConfigError, match="another process is p"):
        pack(folder, tmp_path / "new")
    assert (tmp_path / "new.partial" / "lock").exists()
    shutil.copytree(str(folder), str(tmp_path / "images"))
    (tmp_path / "images" / "train" / "dog" / "f.jpeg").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"dog/f.jpeg is empty"):
        pack(tmp_path / "images", tmp_path / "other")
    assert not (tmp_path / "other.partial").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{folder}"], "the folder of the shards is missing: raypod pack FOLDER OUT"),
        (["--data-dir", "images", "{new}"], "--data-dir images has no effect .* itself: raypod pack images OUT"),
        (["{folder}/none", "{new}"], "none: there is no such folder"),
        (["{folder}/train", "{new}"], "has no class folders"),
        (["{packed}", "{new}"], "is packed already"),
        (["{folder}", "{packed}"], "exists; choose another folder"),
        (["{folder}", "{new}/none/new"], "cannot pack .* No such file or directory"),
        (["{folder}", "{new}", "--shard-size", "1"], "--shard-size 1: expected a size such as 256MB or 1GB"),
        (["--verify", "{folder}"], "has no index.json: `raypod pack` has not written it"),
        (["--verify", "{packed}", "{new}"], "--verify takes one folder"),
    ],
)
def test_wrong_input_is_one_line(folder: Path, packed: Path, words: Any, message: str, capsys: Any) -> None:
    before = sorted(packed.parent.rglob("*"))
    places = {"folder": folder, "packed": packed, "new": packed.with_name("new")}
    line = one_line(capsys, main, ["pack", *(word.format(**places) for word in words)])
    assert re.match(f"raypod: error: .*{message}", line)
    assert sorted(packed.parent.rglob("*")) == before
