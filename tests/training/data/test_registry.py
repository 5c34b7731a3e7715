from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any, Callable, Dict, Optional

import numpy as np
import pytest

from raypod.errors import ConfigError, DataMissing
from raypod.plan.resolve import from_values
from raypod.training import data as datasets
from raypod.training.data import digits
from raypod.training.data.arrays import fingerprint_of
from tests.support import documented


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


@pytest.mark.parametrize("data", [{}, {"dataset": "synthetic", "samples": 100, "image": "1x4x5"}])
def test_the_planned_size_is_the_loaded_size(data: Dict[str, Any]) -> None:
    config = from_values({"data": data})
    splits, size = datasets.load(config), datasets.dataset_size(config)
    assert (len(splits.train), len(splits.test)) == (size.train_samples, size.test_samples)
    if data:
        assert splits.train.images.shape == (100, 1, 4, 5)


def test_the_fingerprint_identifies_the_data() -> None:
    def of(seed: int = 1, **data: object) -> datasets.Splits:
        values = {"data": {"dataset": "synthetic", "samples": 50, **data}, "training": {"seed": seed}}
        return datasets.load(from_values(values))

    found = [of(), of(2), of(samples=51), of(classes=9), of(image="3x32x16"), datasets.load(from_values({}))]
    assert np.array_equal(of().train.images, found[0].train.images)
    assert not np.array_equal(of(2).train.images, found[0].train.images)
    assert of().fingerprint == found[0].fingerprint
    assert len({splits.fingerprint for splits in found}) == len(found)


def test_the_fingerprint_changes_with_one_label_or_pixel() -> None:
    train = datasets.load(from_values({})).train
    labels, images = train.labels.copy(), train.images.copy()
    labels[-1] += 1
    images[0, 0, 0, 0] += 1
    changed = [datasets.ArrayDataset(train.images, labels), datasets.ArrayDataset(images, train.labels)]
    assert len({fingerprint_of(each) for each in (train, *changed)}) == 3


def test_the_config_overrides_the_default_augmentation() -> None:
    def of(**data: object) -> datasets.Augmentation:
        return datasets.load(from_values({"data": data})).augmentation

    assert of() == datasets.Augmentation(padding=1, flip=False)
    assert of(crop_padding=2, flip=True) == datasets.Augmentation(padding=2, flip=True)
    assert of(augment=False, flip=True) == datasets.Augmentation()
    with pytest.raises(ConfigError, match="--crop-padding 8 is too large for images of 8x8 pixels: use less"):
        of(crop_padding=8)
    assert of(crop_padding=8, augment=False).padding == 0


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
    with pytest.raises(ConfigError, match=words):
        datasets.load(from_values({"data": {"dataset": name}}))


def test_an_exception_of_the_users_function_is_one_line_of_the_plan(write: Any) -> None:
    write(
        raising_data="import os\ndef make(folder):\n    return os.path.join(folder, 'x'), [], 2\n"
        "def flat(folder):\n    return [([1, 2], 0)], [], 2\n"
    )
    config = from_values({"data": {"dataset": "raising_data:make"}})
    expected = r"^raising_data:make: TypeError: expected str.* \(raising_data.py:3, in make\)"
    for plan in (datasets.dataset_size, datasets.image_shape):
        with pytest.raises(ConfigError, match=f"{expected}; its data_dir was None, as --data-dir is not given$"):
            plan(config)
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
    assert (len(splits.train), len(splits.test)) == (1500, 297)
    assert splits.train.images.dtype == np.uint8
    assert splits.train.images.max() == 240
    assert set(splits.test.labels) == {0, 1}
