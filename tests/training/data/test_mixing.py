"""Mixup and cutmix: their random numbers, the mixture on the device, its loss, and equal batches for any placement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from raypod import train
from raypod.errors import ConfigError
from raypod.plan.compatibility import check_compatible
from raypod.plan.plan import Plan
from raypod.plan.resolve import from_values
from raypod.training import data as datasets
from raypod.training.data.feed import Feed
from raypod.training.data.images import ImageSource, Mixed, Mixing, pair_words, weighted_labels
from raypod.training.tasks.image_classification import ImageClassification

CUTMIX = {"cutmix_lambda_low": 0.25, "cutmix_lambda_high": 0.75, "cutmix_disable_prob": 0.3}
KINDS: List[Dict[str, Any]] = [{"mixup_alpha": 0.4}, CUTMIX, {"mixup_alpha": 0.4, **CUTMIX}]
SIZE = (20, 30)


def words_of(given: Dict[str, Any], samples: np.ndarray, micro_batch: int = 4, epoch: int = 0) -> Any:
    return pair_words(from_values({"data": given}).data, samples, micro_batch, (1, epoch), SIZE)


def test_without_mixing_nothing_is_sent() -> None:
    bounds = ({}, {"cutmix_lambda_low": 1, "cutmix_lambda_high": 1})
    assert [words_of(given, np.arange(8)) for given in bounds] == [None, None]


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0])
def test_coefficients_of_mixup_have_the_beta_distribution(alpha: float) -> None:
    found = words_of({"mixup_alpha": alpha}, np.arange(40_000))[:, 0]
    peer = np.random.default_rng(0).beta(alpha, alpha, 40_000)
    peer = np.maximum(peer, 1 - peer)
    shares = [0.1, 0.3, 0.5, 0.7, 0.9]
    np.testing.assert_allclose(np.quantile(found, shares), np.quantile(peer, shares), atol=0.012)
    assert (found.astype(np.float16) == found).all()
    assert (found >= 0.5).all()


def test_boxes_of_cutmix_have_the_drawn_share_and_are_inside_the_image() -> None:
    box = words_of(CUTMIX, np.arange(8000))
    first_row, end_row, first_column, end_column, share = box.T
    cut = share > 0
    assert abs(cut.mean() - 0.7) < 0.02
    assert not box[~cut].any()
    rows, columns = (end_row - first_row)[cut], (end_column - first_column)[cut]
    np.testing.assert_allclose(share[cut], rows * columns / 600, rtol=1e-6)
    assert (share[cut].min() > 0.2, share[cut].max() < 0.8) == (True, True)
    assert abs(share[cut].mean() - 0.5) < 0.01
    assert [first_row.min(), end_row.max(), first_column.min(), end_column.max()] == [0, 20, 0, 30]


def test_the_words_depend_on_the_pair_the_epoch_and_the_seed_only() -> None:
    data = KINDS[2]
    words = words_of(data, np.arange(16))
    np.testing.assert_array_equal(words_of(data, np.arange(8, 16)), words[8:])
    swapped = words_of(data, np.array([1, 0, 2, 3]))
    assert (swapped[:, 0] != words[:4, 0]).any()
    assert (words_of(data, np.arange(16), epoch=1) != words).any()


def directly(values: torch.Tensor, words: np.ndarray, given: Dict[str, Any], is_label: bool) -> torch.Tensor:
    """Return the mixture of one micro-batch, one sample after the other."""
    mixed, count = values, len(values)
    if "mixup_alpha" in given:
        kept = words[:, 0]
        mixed = torch.stack([mixed[i] * float(kept[i]) + mixed[i - 1] * float(1 - kept[i]) for i in range(count)])
    if "cutmix_lambda_low" not in given:
        return mixed
    shift, pasted = (2 if "mixup_alpha" in given else 1), mixed.clone()
    for i, (*box, share) in enumerate(words[:, -5:].tolist()):
        top, bottom, left, right = map(int, box)
        if is_label:
            pasted[i] = mixed[i] * (1 - share) + mixed[i - shift] * share
        else:
            pasted[i, :, top:bottom, left:right] = mixed[i - shift, :, top:bottom, left:right]
    return pasted


@pytest.mark.parametrize("given", KINDS)
def test_the_mixture_and_its_loss_are_those_of_a_direct_computation(given: Dict[str, Any]) -> None:
    config = from_values({"data": given, "training": {"label_smoothing": 0.1}})
    words, images = words_of(given, np.array([3, 7, 5, 1])), torch.rand(4, 3, *SIZE)
    labels = torch.tensor([0, 2, 1, 2])
    mixing, network = Mixing(config.data, nn.Identity()), nn.Sequential(nn.Flatten(), nn.Linear(1800, 10))
    torch.testing.assert_close(mixing(Mixed((images, torch.from_numpy(words)))), directly(images, words, given, False))
    assert mixing(images) is images
    shares = torch.stack([share for _, share in weighted_labels(config.data, labels, torch.from_numpy(words))])
    torch.testing.assert_close(shares.sum(dim=0), torch.ones(4))
    task = ImageClassification(config)
    loss, _ = task.training_outputs(lambda inputs: network(mixing(inputs)), images, labels, torch.from_numpy(words))
    targets = directly(functional.one_hot(labels, 10).float(), words, given, True)
    expected = functional.cross_entropy(network(directly(images, words, given, False)), targets, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)


def batches_of(plan: Plan) -> List[List[torch.Tensor]]:
    """Return the tensors of each update, ordered by replica."""
    source, updates = ImageSource(plan.config, datasets.load(plan.config)), []
    feeds = [Feed(plan, spec, source) for spec in plan.placement.instances]
    try:
        for tensors in zip(*[feed.calls(plan.segments()[0]) for feed in feeds]):
            updates.append([torch.cat(each) for each in zip(*tensors)])
    finally:
        for feed in feeds:
            feed.close()
    return updates


def test_batches_are_equal_for_any_placement_of_four_replicas(make: Callable[..., Plan]) -> None:
    found = []
    for instances in (1, 2, 4):
        plan = make(
            data={"dataset": "synthetic", "samples": 64, "image": "1x8x8", "mixup_alpha": 0.2, **CUTMIX},
            training={"batch_size": 4, "updates": 3},
            pod={"replicas": 4, "num_instances": instances},
        )
        found.append(batches_of(plan))
    assert [len(updates) for updates in found] == [3] * 3
    for updates in found[1:]:
        for tensors, expected in zip(updates, found[0]):
            assert [each.shape for each in tensors] == [(16, 1, 8, 8), (16,), (16, 6)]
            assert all(map(torch.equal, tensors, expected))


def test_a_run_mixes_on_the_device_in_strict_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    digests = []
    for given in (KINDS[2], {}):
        words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        words += ["--fleet", "inline", "--num-instances", "1", "--updates", "2", "--precision", "16.16"]
        words += ["--eight-bit-io", "--image-size", "16", "--run-dir", str(tmp_path / str(len(digests)))]
        assert train.main(words) == 0
        digests.append(json.loads((tmp_path / str(len(digests)) / "summary.json").read_text())["weights_sha256"])
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("data", "batch", "words"),
    [
        ({"cutmix_lambda_low": 0.5}, 8, "--cutmix-lambda-low 0.5 is greater than --cutmix-lambda-high 0"),
        ({"cutmix_disable_prob": 0.5}, 8, "no effect without --cutmix-lambda-low and"),
        ({"mixup_alpha": 0.1, "augment": False}, 8, "--mixup-alpha has no effect with --no-augment"),
        ({"mixup_alpha": 0.1}, 1, "--batch-size 1: mixup combines the images of a micro-batch, and needs at least 2"),
        ({"mixup_alpha": 0.1, **CUTMIX}, 2, "--batch-size 2: mixup with cutmix .* at least 3"),
    ],
)
def test_settings_that_mix_nothing_are_a_mistake(data: Dict[str, Any], batch: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_compatible(from_values({"data": data, "training": {"batch_size": batch}}))
