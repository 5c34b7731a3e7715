from __future__ import annotations

from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from sklearn.datasets import load_digits

from raypod import datasets
from raypod.config import from_values
from raypod.errors import ConfigError


def test_digits_are_the_images_of_scikit_learn() -> None:
    splits, ours = datasets.load(from_values({})), load_digits()
    is_test = np.arange(1797) % 5 == 0
    assert np.array_equal(splits.test.images[:, 0], np.rint(ours.images[is_test] * 255 / 16))
    assert np.array_equal(splits.train.labels, ours.target[~is_test])
    assert (len(splits.train), len(splits.test)) == (datasets.DIGITS_TRAIN, datasets.DIGITS_TEST)


def test_normalisation_constants_are_those_of_the_training_images() -> None:
    splits = datasets.load(from_values({}))
    scaled = splits.train.images / 255
    assert (scaled.mean(), scaled.std()) == pytest.approx((splits.mean, splits.std), abs=1e-3)


def test_the_planned_size_is_the_loaded_one() -> None:
    config = from_values({"data": {"dataset": "synthetic", "samples": 100, "image": "1x4x5"}})
    splits, size = datasets.load(config), datasets.dataset_size(config)
    assert (len(splits.train), len(splits.test)) == (size.train_samples, size.test_samples)
    assert splits.train.images.shape == (100, 1, 4, 5)


def test_synthetic_images_are_a_function_of_the_seed() -> None:
    def images(seed: int) -> np.ndarray:
        config = from_values({"data": {"dataset": "synthetic", "samples": 50}, "training": {"seed": seed}})
        return datasets.load(config).train.images

    assert np.array_equal(images(1), images(1))
    assert not np.array_equal(images(1), images(2))


def test_a_shift_moves_every_image_by_its_own_offset() -> None:
    images = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    shifted = datasets._shift(images, np.array([[1, 1], [2, 0]]), largest=1)
    assert np.array_equal(shifted[0], images[0])  # offset 1 of 0..2 is the middle
    expected = np.zeros((3, 4, 4), dtype=np.uint8)
    expected[:, :3, 1:] = images[1, :, 1:, :3]  # one row up, one column right
    assert np.array_equal(shifted[1], expected)


def test_a_batch_is_augmented_as_its_samples_are_one_by_one() -> None:
    train = datasets.load(from_values({})).train
    together = train.gather(np.arange(20), (1, 2))[0]
    assert all(np.array_equal(together[i], train.gather(np.array([i]), (1, 2))[0][0]) for i in range(20))
    assert not np.array_equal(together, train.gather(np.arange(20), (1, 3))[0])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digitz", "known: digits, synthetic"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("math:no_such_function", "math has no 'no_such_function'"),
        ("own_data:wrong", "must return"),
        ("own_data:no_length", "test split is no map-style data set"),
    ],
)
def test_a_data_set_that_cannot_be_used_says_why(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_data.py").write_text(
        "def wrong(folder): return 3\ndef no_length(folder): return [(1, 2)], iter([])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=words):
        datasets.load(from_values({"data": {"dataset": name}}))


def test_digits_need_no_import_of_scikit_learn(run_python: Callable[[str], str]) -> None:
    run_python(
        "import sys\nfrom raypod import config, datasets\n"
        "datasets.load(config.Config())\nassert not {'sklearn', 'torch'} & set(sys.modules)"
    )
