from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Callable, Dict

import numpy as np
import pytest

from raypod import datasets
from raypod.errors import ConfigError
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize
from raypod.plan.resolve import from_values


def batch(seed: int, samples: int, classes: int, key: str) -> Dict[str, object]:
    random = np.random.default_rng(seed)
    return {
        "batch_label": f"batch {seed}",
        key: random.integers(0, classes, samples).tolist(),
        "data": random.integers(0, 256, (samples, 3072), dtype=np.uint8),
        "filenames": [f"{number}.png" for number in range(samples)],
    }


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


def test_cifar_10_has_the_content_of_its_files(cifar10: Path) -> None:
    splits = datasets.load(config(cifar10))
    first = batch(0, 8, 10, "labels")
    assert np.array_equal(splits.train.images[:8].reshape(8, -1), first["data"])
    assert splits.train.labels[:8].tolist() == first["labels"]
    assert (splits.train.images.shape, splits.test.images.shape) == ((40, 3, 32, 32), (8, 3, 32, 32))
    assert (splits.classes, len(splits.mean), splits.augmentation.flip) == (10, 3, True)


def test_torchvision_reads_the_same_images_and_labels(cifar10: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raypod.host import torchvision_import

    torchvision_import.install()
    from torchvision.datasets import CIFAR10

    monkeypatch.setattr(
        CIFAR10, "_check_integrity", lambda self: True
    )  # checks the MD5 checksums of the published files
    monkeypatch.setattr(CIFAR10, "_load_meta", lambda self: None)
    theirs, ours = CIFAR10(str(cifar10)), datasets.load(config(cifar10)).train
    assert np.array_equal(theirs.data.transpose(0, 3, 1, 2), ours.images)
    assert theirs.targets == ours.labels.tolist()


def test_cifar_100_is_found_in_its_folder_or_the_parent(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for seed, name in enumerate(("train", "test")):
        (folder / name).write_bytes(pickle.dumps(batch(seed, 6, 100, "fine_labels")))
    for data_dir in (tmp_path, folder):
        splits = datasets.load(from_values({"data": {"dataset": "cifar100", "data_dir": str(data_dir)}}))
        assert (len(splits.train), len(splits.test), splits.classes) == (6, 6, 100)


def test_planning_counts_samples_and_writes_nothing(cifar10: Path) -> None:
    def size() -> DatasetSize:
        return datasets.dataset_size(config(cifar10))

    assert size() == DatasetSize(40, 8)
    assert not list(cifar10.rglob("*.npy"))
    datasets.load(config(cifar10))
    assert size() == DatasetSize(40, 8)


def test_arrays_are_mapped_and_decoded_again_when_the_files_change(cifar10: Path) -> None:
    before = datasets.load(config(cifar10))
    assert not before.train.images.flags.writeable
    (made,) = cifar10.rglob("train_images.npy")
    file = cifar10 / "cifar-10-batches-py" / "data_batch_1"
    file.write_bytes(pickle.dumps(batch(77, 9, 10, "labels")))
    after = datasets.load(config(cifar10))
    assert len(after.train) == 41
    assert after.fingerprint != before.fingerprint
    assert not made.exists()
    assert before.train.images[0].any()  # existing mappings stay valid


def test_cache_dir_sets_the_cache_folder(cifar10: Path, tmp_path: Path) -> None:
    datasets.load(config(cifar10, cache_dir=str(tmp_path / "cache")))
    assert list((tmp_path / "cache").rglob("train_images.npy"))
    assert not (cifar10 / "cifar-10-batches-py" / ".raypod-cache").exists()


def test_the_user_cache_is_used_for_read_only_data(
    cifar10: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # the test may run as root
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    datasets.load(config(cifar10))
    assert list((tmp_path / "home" / "raypod").rglob("train_images.npy"))
    assert not list(cifar10.rglob("*.npy"))


def test_an_unwritable_cache_is_an_error_that_suggests_cache_dir(cifar10: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--cache-dir"):
        datasets.load(config(cifar10, cache_dir=str(tmp_path / "file")))


def test_a_damaged_cache_entry_is_named(cifar10: Path) -> None:
    datasets.load(config(cifar10))
    (made,) = cifar10.rglob("train_images.npy")
    made.write_bytes(made.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=f"{made.parent} is damaged.*remove that folder"):
        datasets.load(config(cifar10))


def test_concurrent_processes_decode_the_files_once(cifar10: Path) -> None:
    program = (
        "import sys\nfrom raypod import datasets\nfrom raypod.plan.resolve import from_values\n"
        "from raypod.datasets.cifar import Cifar\n"
        "read = Cifar._read\n"
        "Cifar._read = lambda *all: print('read') or read(*all)\n"
        "splits = datasets.load(from_values({'data': {'dataset': 'cifar10', 'data_dir': sys.argv[1]}}))\n"
        "print(splits.fingerprint)\n"
    )
    line = [sys.executable, "-c", program, str(cifar10)]
    started = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    words = " ".join(process.communicate(timeout=60)[0] for process in started).split()
    assert words.count("read") == 1
    assert len(set(words)) == 2


def test_processes_of_a_host_share_the_memory_of_the_arrays(cifar10: Path) -> None:
    pixels = batch(0, 2000, 10, "labels")
    (cifar10 / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(pixels))
    program = (
        "import sys\nfrom raypod import datasets\nfrom raypod.plan.resolve import from_values\n"
        "splits = datasets.load(from_values({'data': {'dataset': 'cifar10', 'data_dir': sys.argv[1]}}))\n"
        "splits.train.images.sum()\nprint('ready', flush=True)\ninput()\n"
        "lines, counts, kib = open('/proc/self/smaps'), False, 0\n"
        "for first, *rest in map(str.split, lines):\n"
        "    counts = ('images.npy' in rest[-1]) if not first.endswith(':') else counts\n"
        "    kib += int(rest[0]) if counts and first == 'Pss:' else 0\n"
        "print(kib, flush=True)\ninput()\n"
    )
    line = [sys.executable, "-c", program, str(cifar10)]
    pipe = subprocess.PIPE
    members = [subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    try:
        assert [member.stdout.readline() for member in members] == ["ready\n"] * 3  # type: ignore[union-attr]
        kib = 0
        for member in members:
            member.stdin.write("\n")  # type: ignore[union-attr]
            member.stdin.flush()  # type: ignore[union-attr]
            kib += int(member.stdout.readline())  # type: ignore[union-attr]
    finally:
        for member in members:
            member.communicate("\n", timeout=30)
    size_kib = sum(file.stat().st_size for file in cifar10.rglob("*_images.npy")) / 1024
    assert 0.9 * size_kib < kib < 1.1 * size_kib


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
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


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data_batch_1 does not exist; unpack cifar-10.* in .*--download"):
        datasets.load(config(tmp_path))
    with pytest.raises(ConfigError, match="needs --data-dir"):
        datasets.load(from_values({"data": {"dataset": "cifar10"}}))


def test_image_shapes_are_known_without_files(tmp_path: Path) -> None:
    assert datasets.image_shape(config(tmp_path)) == datasets.ImageShape(3, 32, 10)
    assert datasets.image_shape(config(tmp_path, image_size=64)).side == 64
