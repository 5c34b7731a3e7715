from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict

import documented
import numpy as np
import pytest
from sklearn.datasets import load_digits

from raypod import datasets
from raypod.datasets import digits, registry
from raypod.datasets.arrays import fingerprint_of
from raypod.errors import ConfigError
from raypod.plan.resolve import from_values


def test_digits_are_the_images_of_scikit_learn() -> None:
    splits, ours = datasets.load(from_values({})), load_digits()
    is_test = np.arange(1797) % 5 == 0
    assert np.array_equal(splits.test.images[:, 0], np.rint(ours.images[is_test] * 255 / 16))
    assert np.array_equal(splits.train.labels, ours.target[~is_test])
    assert (len(splits.train), len(splits.test)) == (digits.TRAIN_SAMPLES, digits.TEST_SAMPLES)


def test_mean_and_std_are_those_of_the_training_images() -> None:
    splits = datasets.load(from_values({}))
    scaled = splits.train.images / 255
    assert (scaled.mean(), scaled.std()) == pytest.approx((*splits.mean, *splits.std), abs=1e-3)


@pytest.mark.parametrize("data", [{}, {"dataset": "synthetic", "samples": 100, "image": "1x4x5"}])
def test_the_planned_size_is_the_loaded_size(data: Dict[str, Any]) -> None:
    config = from_values({"data": data})
    splits, size = datasets.load(config), datasets.dataset_size(config)
    assert (len(splits.train), len(splits.test)) == (size.train_samples, size.test_samples)
    if data:
        assert splits.train.images.shape == (100, 1, 4, 5)


def test_synthetic_images_are_a_function_of_the_seed() -> None:
    def images(seed: int) -> np.ndarray:
        config = from_values({"data": {"dataset": "synthetic", "samples": 50}, "training": {"seed": seed}})
        return datasets.load(config).train.images

    assert np.array_equal(images(1), images(1))
    assert not np.array_equal(images(1), images(2))


def test_the_fingerprint_identifies_the_data() -> None:
    def of(**data: object) -> str:
        return datasets.load(from_values({"data": {"dataset": "synthetic", "samples": 50, **data}})).fingerprint

    found = [of(), of(samples=51), of(classes=9), of(image="3x32x16"), datasets.load(from_values({})).fingerprint]
    assert of() == found[0]
    assert len(set(found)) == len(found)


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


def test_the_crop_padding_is_smaller_than_the_images() -> None:
    with pytest.raises(ConfigError, match="--crop-padding 8 is too large for images of 8x8 pixels: use less"):
        datasets.load(from_values({"data": {"crop_padding": 8}}))
    assert datasets.load(from_values({"data": {"crop_padding": 8, "augment": False}})).augmentation.padding == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digitz", "known: digits, synthetic"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("math:no_such_function", "math has no 'no_such_function'"),
        (":make", "':make': write module:function"),
        ("own_data:", "'own_data:': write module:function"),
        (".own_data:make", "'.own_data:make': write module:function"),
        ("math:pi", "float is not callable"),
        ("own_data:takes_nothing", r"is called with \(None\), and takes \(\): too many positional"),
        ("own_data:classes", "returned 'ten' as the number of classes"),
        ("broken_data:make", "broken_data.py, line 1"),
        ("own_data:wrong", "must return"),
        ("own_data:no_length", "test split is not a map-style data set"),
        ("own_data:exits", r"'own_data:exits' raised SystemExit\(3\)"),
        ("exiting_data:make", "importing exiting_data raised SystemExit: 3"),
    ],
)
def test_the_error_explains_why_a_data_set_cannot_be_used(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_data.py").write_text(
        "def wrong(folder): return 3\ndef no_length(folder): return [(1, 2)], iter([])\n"
        "def takes_nothing(): return 3\ndef classes(folder): return [], [], 'ten'\n"
        "def exits(folder): raise SystemExit(3)\n"
    )
    (tmp_path / "exiting_data.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "broken_data.py").write_text("def make(folder:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=words):
        datasets.load(from_values({"data": {"dataset": name}}))


def test_an_exception_of_the_users_function_is_one_line_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising_data.py").write_text(
        "import os\ndef make(folder):\n    return os.path.join(folder, 'x'), [], 2\n"
        "def flat(folder):\n    return [([1, 2], 0)], [], 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = from_values({"data": {"dataset": "raising_data:make"}})
    expected = r"^raising_data:make: TypeError: expected str.* \(raising_data.py:3, in make\)"
    for plan in (datasets.dataset_size, datasets.image_shape):
        with pytest.raises(ConfigError, match=f"{expected}; its data_dir was None, as --data-dir is not given$"):
            plan(config)
    with pytest.raises(TypeError):  # in an instance, whose error names its host
        datasets.load(config)
    with pytest.raises(ConfigError, match=r"images must be \[channels, height, width\], not \[2\]"):
        datasets.image_shape(from_values({"data": {"dataset": "raising_data:flat"}}))


def test_digits_load_without_importing_torch_or_scikit_learn(run_python: Callable[[str], str]) -> None:
    run_python(
        "import sys\nfrom raypod import datasets\nfrom raypod.plan import config\n"
        "datasets.load(config.Config())\nassert not {'sklearn', 'torch'} & set(sys.modules)"
    )


def test_the_fingerprint_of_user_arrays_covers_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_arrays.py").write_text(
        "import numpy as np\nfrom raypod.datasets import ArrayDataset\n"
        "def make(folder):\n"
        "    images = np.full((6, 1, 4, 4), int(folder), dtype=np.uint8)\n"
        "    return ArrayDataset(images, np.arange(6)), ArrayDataset(images[:2], np.arange(2)), 6\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    configs = [from_values({"data": {"dataset": "own_arrays:make", "data_dir": str(level)}}) for level in (1, 2)]
    assert datasets.image_shape(configs[0]) == datasets.ImageShape(1, 4, 6)
    assert datasets.load(configs[1]).train[3][1] == 3
    assert len({datasets.load(config).fingerprint for config in configs}) == 2


def test_the_documented_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in documented.modules("reference/data.md").items():
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = from_values({"data": {"dataset": "my_data:load"}})
    splits = datasets.load(config)
    assert datasets.image_shape(config) == datasets.ImageShape(1, 8, 2)
    assert (len(splits.train), len(splits.test)) == (1500, 297)
    assert splits.train.images.dtype == np.uint8
    assert splits.train.images.max() == 240
    assert set(splits.test.labels) == {0, 1}


def test_an_unknown_data_set_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'digit'; did you mean digits\?; known: digits, "):
        registry.dataset_size(from_values({"data": {"dataset": "digit"}}))
