"""CIFAR: its files, the cache of their arrays, and the download of the published archive."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import shutil
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import pytest

from raypod.errors import ConfigError, WaitTimedOut
from raypod.plan.compatibility import check_compatible
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize
from raypod.plan.resolve import from_values
from raypod.system.files import file_lock
from raypod.system.torchvision_import import install
from raypod.training import data as datasets
from raypod.training.data import cache, cifar
from raypod.training.data.cache import Archive, download
from tests.support.faulty_disks import FlushedFiles


def batch(seed: int, samples: int, classes: int, key: str) -> Dict[str, object]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, samples).tolist()
    data = random.integers(0, 256, (samples, 3072), dtype=np.uint8)
    return {"batch_label": f"batch {seed}", key: labels, "data": data, "filenames": ["0.png"] * samples}


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number in range(6):
        name = f"data_batch_{number + 1}" if number < 5 else "test_batch"
        # Protocol 2 as in the published files: it refers to numpy's globals and to Python 2's codec.
        (folder / name).write_bytes(pickle.dumps(batch(number, 8, 10, "labels"), protocol=2))
    return folder.parent


def config(data_dir: Path, **data: object) -> Config:
    return from_values({"data": {"dataset": "cifar10", "data_dir": str(data_dir), **data}})


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], List[Any]]:
    """Call a function in 3 threads, none of which gets the lock of the folder before all have asked for it."""
    barrier = threading.Barrier(3)

    def lock(*arguments: Any) -> Any:
        barrier.wait(60)
        return file_lock(*arguments)

    def run(function: Callable[[], Any]) -> List[Any]:
        monkeypatch.setattr(cache, "file_lock", lock)
        with ThreadPoolExecutor(3) as pool:
            return [call.result() for call in [pool.submit(function) for _ in range(3)]]

    return run


def test_cifar_10_has_the_content_of_its_files(cifar10: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = datasets.load(config(cifar10))
    first = batch(0, 8, 10, "labels")
    assert np.array_equal(splits.train.images[:8].reshape(8, -1), first["data"])
    assert splits.train.labels[:8].tolist() == first["labels"]
    assert (splits.train.images.shape, splits.test.images.shape) == ((40, 3, 32, 32), (8, 3, 32, 32))
    assert (splits.classes, len(splits.mean), splits.augmentation) == (10, 3, datasets.Augmentation(4, True))
    install()
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)  # of the published files
    monkeypatch.setattr(CIFAR10, "_load_meta", lambda self: None)
    theirs = CIFAR10(str(cifar10))
    assert np.array_equal(theirs.data.transpose(0, 3, 1, 2), splits.train.images)
    assert theirs.targets == splits.train.labels.tolist()


def test_cifar_100_is_found_in_its_folder_or_the_parent(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for seed, name in enumerate(("train", "test")):
        (folder / name).write_bytes(pickle.dumps(batch(seed, 6, 100, "fine_labels")))
    for data_dir in (tmp_path, folder):
        splits = datasets.load(from_values({"data": {"dataset": "cifar100", "data_dir": str(data_dir)}}))
        assert (len(splits.train), len(splits.test), splits.classes) == (6, 6, 100)


def test_planning_counts_samples_and_writes_nothing(cifar10: Path) -> None:
    assert datasets.image_shape(config(cifar10 / "none")) == datasets.ImageShape(3, 32, 10)
    assert datasets.image_shape(config(cifar10, image_size=64)).side == 64
    assert datasets.dataset_size(config(cifar10)) == DatasetSize(40, 8)
    assert not list(cifar10.rglob("*.npy"))
    datasets.load(config(cifar10))
    assert datasets.dataset_size(config(cifar10)) == DatasetSize(40, 8)


def test_arrays_are_mapped_and_decoded_again_when_the_files_change(cifar10: Path) -> None:
    before = datasets.load(config(cifar10))
    assert isinstance(before.train.images.base, np.memmap)  # shared by the processes of a host
    assert not before.train.images.flags.writeable
    (made,) = cifar10.rglob("train_images.npy")
    (cifar10 / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(batch(77, 9, 10, "labels")))
    after = datasets.load(config(cifar10))
    assert len(after.train) == 41
    assert after.fingerprint != before.fingerprint
    assert not made.exists()
    assert before.train.images[0].any()  # existing mappings stay valid


def test_a_loss_of_power_keeps_an_entry_of_the_cache(cifar10: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = FlushedFiles(monkeypatch)
    datasets.load(config(cifar10))
    made = list(cifar10.rglob("*.npy"))
    assert len(made) == 4
    assert all(map(flushed.survive, made))
    assert flushed.size_of(made[0].parent.parent) is not None


def test_the_cache_is_in_cache_dir_or_that_of_the_user(cifar10: Path, tmp_path: Path, monkeypatch: Any) -> None:
    datasets.load(config(cifar10, cache_dir=str(tmp_path / "cache")))
    assert list((tmp_path / "cache").rglob("train_images.npy"))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # the test may run as root
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    datasets.load(config(cifar10))
    assert list((tmp_path / "home" / "raypod").rglob("train_images.npy"))
    assert not list(cifar10.rglob("*.npy"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--cache-dir"):
        datasets.load(config(cifar10, cache_dir=str(tmp_path / "file")))


def test_a_damaged_cache_entry_is_named(cifar10: Path) -> None:
    datasets.load(config(cifar10))
    (made,) = cifar10.rglob("train_images.npy")
    made.write_bytes(made.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=f"{made.parent} is damaged.*remove that folder"):
        datasets.load(config(cifar10))


def test_concurrent_callers_decode_the_files_once(cifar10: Path, at_once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = cifar.Cifar._read, []
    monkeypatch.setattr(cifar.Cifar, "_read", lambda *all: reads.append(1) or read(*all))
    fingerprints = {splits.fingerprint for splits in at_once(lambda: datasets.load(config(cifar10)))}
    assert (len(reads), len(fingerprints)) == (1, 1)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "EOFError"),
        (b"\x80\x02garbage", "UnpicklingError"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}), "KeyError: 'labels'"),
        (pickle.dumps({"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]}), r"\(2, 3071\) for 2 labels"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]}), "labels from 1 to 10"),
        (pickle.dumps({"data": Evil(), "labels": []}), "it refers to (posix|nt).system"),
    ],
)
def test_a_damaged_file_is_named(cifar10: Path, content: bytes, words: str) -> None:
    (cifar10 / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    with pytest.raises(ConfigError, match=f"data_batch_3 is damaged.*{words}.*again") as caught:
        datasets.load(config(cifar10))
    assert "\n" not in str(caught.value)
    assert not list(cifar10.rglob("*.npy"))


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"data_batch_1 does not exist; unpack cifar-10.* in .*--download"):
        datasets.load(config(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f" data/cifar-10-batches-py/data_batch_1 does not exist in {tmp_path}; unp"):
        datasets.load(config(Path("data")))
    with pytest.raises(ConfigError, match="needs --data-dir"):
        datasets.load(from_values({"data": {"dataset": "cifar10"}}))


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    (tmp_path / "content" / "cifar-10-batches-py").mkdir(parents=True)
    (tmp_path / "content" / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"bytes")
    file = Path(shutil.make_archive(str(tmp_path / "small"), "gztar", str(tmp_path / "content")))
    return Archive(file.as_uri(), hashlib.md5(file.read_bytes()).hexdigest(), "cifar-10-batches-py")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> List[str]:
    found: List[str] = []
    urlopen: Any = urllib.request.urlopen
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, **all: found.append(url) or urlopen(url, **all))
    return found


def test_concurrent_callers_download_once(
    archive: Archive, requests: List[str], tmp_path: Path, at_once: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, flushed = tmp_path / "new", FlushedFiles(monkeypatch)
    at_once(lambda: download(archive, root, 30))
    assert requests == [archive.url]
    assert (root / "cifar-10-batches-py" / "data_batch_1").read_bytes() == b"bytes"
    assert flushed.survive(root / "cifar-10-batches-py" / "data_batch_1")
    assert not list(root.glob(".partial*"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"md5": "0" * 32}, "MD5 checksum is .*, expected 000"),
        ({"url": "http://127.0.0.1:9/small.tar.gz"}, "get http://127.0.0.1:9/.*refused.*copy the file to this host"),
    ],
)
def test_a_failed_download_leaves_nothing(archive: Archive, tmp_path: Path, wrong: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        download(dataclasses.replace(archive, **wrong), tmp_path / "new", 30)
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".small.tar.gz.lock"]


def test_the_wait_for_another_download_is_bounded(archive: Archive, requests: List[str], tmp_path: Path) -> None:
    with file_lock(tmp_path / ".small.tar.gz.lock", 1, "test"), pytest.raises(WaitTimedOut, match="start_timeout_s"):
        download(archive, tmp_path, 0.2)
    assert requests == []


def test_only_the_flag_downloads(archive: Archive, requests: List[str], tmp_path: Path) -> None:
    ours = dataclasses.replace(cifar.CIFAR10, archive=archive)
    for flag in (False, True, True):
        ours.download(config(tmp_path / "new", download=flag))
        assert (tmp_path / "new" / "cifar-10-batches-py").is_dir() == flag
    assert len(requests) == 1
    with pytest.raises(ConfigError, match="^--download has no effect without --dataset cifar10 or cifar100: omit it$"):
        check_compatible(from_values({"data": {"download": True}}))
