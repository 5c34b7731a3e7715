"""The data sets by name; CIFAR: its files, the cache of their arrays, and the download of the published archive."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import pickle
import shutil
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import pytest

from raypod.errors import ConfigError, DataMissing, WaitTimedOut
from raypod.plan.compatibility import check_compatible
from raypod.plan.config import Config
from raypod.plan.plan import DatasetSize
from raypod.plan.resolve import from_values
from raypod.system.files import file_lock
from raypod.system.torchvision_import import install
from raypod.training import data as datasets
from raypod.training.data import cache, cifar, digits
from raypod.training.data.arrays import fingerprint_of
from raypod.training.data.cache import Archive, download
from tests.support import documented
from tests.support.faulty_disks import FlushedFiles
from tests.support.refused import refused


def test_digits_are_the_images_of_scikit_learn() -> None:
    levels, labels = digits.load_digits()
    content = levels.astype(np.uint8).tobytes() + labels.astype(np.uint8).tobytes()
    # The hash of what scikit-learn's own load_digits() returns.
    assert hashlib.sha256(content).hexdigest() == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
    splits, is_test = datasets.load(from_values({})), np.arange(1797) % 5 == 0
    assert np.array_equal(splits.test.images[:, 0], np.rint(levels[is_test] * 255 / 16))
    assert np.array_equal(splits.train.labels, labels[~is_test])
    assert (len(splits.train), len(splits.test)) == (digits.TRAIN_SAMPLES, digits.TEST_SAMPLES)
    # The shapes, labels and images that scikit-learn has, times 255/16 and rounded; every fifth one is a test image.
    assert splits.fingerprint == "72f599b273bfbd7ab7b5f4f114da730c9190d3d414f0428bdfcd9975b14e46b1"
    scaled = splits.train.images / 255
    assert (scaled.mean(), scaled.std()) == pytest.approx((*splits.mean, *splits.std), abs=1e-3)


@pytest.mark.parametrize(
    "damage", [None, b"", gzip.compress(b"1,2\n"), b"text"], ids=["missing", "empty", "short", "text"]
)
def test_a_damaged_file_of_digits(damage: Optional[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "digits.csv.gz"
    if damage is not None:
        file.write_bytes(damage)
    monkeypatch.setattr(digits, "_FILE", file)
    with pytest.raises(DataMissing, match=r"digits.csv.gz, .* is missing or damaged: install raypod again"):
        datasets.load(from_values({}))


def test_the_fingerprint_identifies_the_data_to_one_label_or_pixel() -> None:
    def of(seed: int = 1, **data: object) -> datasets.Splits:
        values = {"data": {"dataset": "synthetic", "samples": 50, **data}, "training": {"seed": seed}}
        return datasets.load(from_values(values))

    found = [of(), of(2), of(samples=51), of(classes=9), of(image="3x32x16"), datasets.load(from_values({}))]
    assert np.array_equal(of().train.images, found[0].train.images)
    assert not np.array_equal(of(2).train.images, found[0].train.images)
    assert of().fingerprint == found[0].fingerprint
    assert len({splits.fingerprint for splits in found}) == len(found)
    train = datasets.load(from_values({})).train
    labels, images = train.labels.copy(), train.images.copy()
    labels[-1] += 1
    images[0, 0, 0, 0] += 1
    changed = [datasets.ArrayDataset(train.images, labels), datasets.ArrayDataset(images, train.labels)]
    assert len({fingerprint_of(each) for each in (train, *changed)}) == 3


def test_the_config_overrides_the_default_augmentation_and_the_planned_size_is_the_loaded_one() -> None:
    def of(**data: object) -> datasets.Augmentation:
        return datasets.load(from_values({"data": data})).augmentation

    assert of() == datasets.Augmentation(padding=1, flip=False)
    assert of(crop_padding=2, flip=True) == datasets.Augmentation(padding=2, flip=True)
    assert of(augment=False, flip=True) == datasets.Augmentation()
    refused("--crop-padding 8 is too large for images of 8x8 pixels: use less", of, crop_padding=8)
    assert of(crop_padding=8, augment=False).padding == 0
    for data in ({}, {"dataset": "synthetic", "samples": 100, "image": "1x4x5"}):  # the planned size is the loaded one
        config = from_values({"data": data})
        splits, size = datasets.load(config), datasets.dataset_size(config)
        assert (len(splits.train), len(splits.test)) == (size.train_samples, size.test_samples)
    assert splits.train.images.shape == (100, 1, 4, 5)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`write(name=code)`: write modules of the user, which can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda **modules: [(tmp_path / f"{name}.py").write_text(code) for name, code in modules.items()]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digit", r"unknown data set 'digit'; did you mean digits\?; known: digits, synthetic"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("numpy:no_such_function", "numpy has no 'no_such_function'"),
        (":make", "':make': write module:function"),
        ("own_data:", "'own_data:': write module:function"),
        (".own_data:make", "'.own_data:make': write module:function"),
        ("numpy:pi", "float is not callable"),
        ("os:system", "os is a module of Python itself"),
        ("own_data:takes_nothing", r"is called with \(None\), and takes \(\): too many positional"),
        ("own_data:classes", "returned 'ten' as the number of classes"),
        ("broken_data:make", "broken_data.py, line 1"),
        ("own_data:wrong", "must return"),
        ("own_data:no_length", "test split is not a map-style data set"),
        ("own_data:exits", r"'own_data:exits' raised SystemExit\(3\)"),
        ("exiting_data:make", "importing exiting_data raised SystemExit: 3"),
    ],
)
def test_the_error_explains_why_a_data_set_cannot_be_used(write: Any, name: str, words: str) -> None:
    write(
        own_data="def wrong(folder): return 3\ndef no_length(folder): return [(1, 2)], iter([])\n"
        "def takes_nothing(): return 3\ndef classes(folder): return [], [], 'ten'\n"
        "def exits(folder): raise SystemExit(3)\n",
        exiting_data="raise SystemExit(3)\n",
        broken_data="def make(folder:\n",
    )
    refused(words, datasets.load, from_values({"data": {"dataset": name}}))


def test_an_exception_of_the_users_function_is_one_line_of_the_plan(write: Any) -> None:
    write(
        raising_data="import os\ndef make(folder):\n    return os.path.join(folder, 'x'), [], 2\n"
        "def flat(folder):\n    return [([1, 2], 0)], [], 2\n"
    )
    config = from_values({"data": {"dataset": "raising_data:make"}})
    expected = r"^raising_data:make: TypeError: expected str.* \(raising_data.py:3, in make\)"
    for plan in (datasets.dataset_size, datasets.image_shape):
        refused(f"{expected}; its data_dir was None, as --data-dir is not given$", plan, config)
    with pytest.raises(TypeError):  # in an instance, whose error names its host
        datasets.load(config)
    with pytest.raises(ConfigError, match=r"images must be \[channels, height, width\], not \[2\]"):
        datasets.image_shape(from_values({"data": {"dataset": "raising_data:flat"}}))


def test_digits_load_without_importing_torch(run_python: Callable[[str], str]) -> None:
    run_python(
        "import sys\nfrom raypod import datasets\nfrom raypod.plan import config\n"
        "datasets.load(config.Config())\nassert 'torch' not in sys.modules"
    )


def test_the_fingerprint_of_user_arrays_covers_their_content(write: Any) -> None:
    write(
        own_arrays="import numpy as np\nfrom raypod.training.data import ArrayDataset\n"
        "def make(folder):\n"
        "    arrays = ArrayDataset(np.full((6, 1, 4, 4), int(folder), dtype=np.uint8), np.arange(6))\n"
        "    return arrays, arrays, 6\n"
    )
    configs = [from_values({"data": {"dataset": "own_arrays:make", "data_dir": str(level)}}) for level in (1, 2)]
    assert datasets.image_shape(configs[0]) == datasets.ImageShape(1, 4, 6)
    assert datasets.load(configs[1]).train[3][1] == 3
    assert len({datasets.load(config).fingerprint for config in configs}) == 2


def test_the_documented_data_set(write: Any) -> None:
    write(**{name[: -len(".py")]: code for name, code in documented.modules("reference/data.md").items()})
    config = from_values({"data": {"dataset": "my_data:load"}})
    splits = datasets.load(config)
    assert datasets.image_shape(config) == datasets.ImageShape(1, 8, 2)
    assert (len(splits.train), len(splits.test), splits.train.images.dtype) == (1500, 297, np.uint8)
    assert (splits.train.images.max(), set(splits.test.labels)) == (240, {0, 1})


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


def test_cifar_has_the_content_of_its_files_and_is_found_in_its_folder_or_the_parent(
    cifar10: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_arrays_are_mapped_decoded_again_when_the_files_change_and_named_when_damaged(cifar10: Path) -> None:
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
    (made,) = cifar10.rglob("train_images.npy")
    made.write_bytes(made.read_bytes()[:1000])
    refused(f"{made.parent} is damaged.*remove that folder", datasets.load, config(cifar10))


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
    refused("--cache-dir", datasets.load, config(cifar10, cache_dir=str(tmp_path / "file")))


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
    assert "\n" not in refused(f"data_batch_3 is damaged.*{words}.*again", datasets.load, config(cifar10))
    assert not list(cifar10.rglob("*.npy"))


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(r"data_batch_1 does not exist; unpack cifar-10.* in .*--download", datasets.load, config(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f" data/cifar-10-batches-py/data_batch_1 does not exist in {tmp_path}; unp"):
        datasets.load(config(Path("data")))
    refused("needs --data-dir", datasets.load, from_values({"data": {"dataset": "cifar10"}}))


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
    assert (requests, (root / "cifar-10-batches-py" / "data_batch_1").read_bytes()) == ([archive.url], b"bytes")
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
    assert "\n" not in refused(words, download, dataclasses.replace(archive, **wrong), tmp_path / "new", 30)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".small.tar.gz.lock"]


def test_only_the_flag_downloads_and_the_wait_for_another_download_is_bounded(
    archive: Archive, requests: List[str], tmp_path: Path
) -> None:
    with file_lock(tmp_path / ".small.tar.gz.lock", 1, "test"), pytest.raises(WaitTimedOut, match="start_timeout_s"):
        download(archive, tmp_path, 0.2)
    assert requests == []
    ours = dataclasses.replace(cifar.CIFAR10, archive=archive)
    for flag in (False, True, True):
        ours.download(config(tmp_path / "new", download=flag))
        assert (tmp_path / "new" / "cifar-10-batches-py").is_dir() == flag
    assert len(requests) == 1
    with pytest.raises(ConfigError, match="^--download has no effect without --dataset cifar10 or cifar100: omit it$"):
        check_compatible(from_values({"data": {"download": True}}))
