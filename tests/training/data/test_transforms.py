"""Crops, flips and sizes of images, and mixup and cutmix on the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

from raypod import train
from raypod.plan.plan import Plan
from raypod.plan.resolve import from_values
from raypod.system import torchvision_import
from raypod.training import data as datasets
from raypod.training.data import ArrayDataset, Augmentation, transforms
from raypod.training.data.feed import Feed
from raypod.training.data.images import ImageSource, Mixed, Mixing, pair_words, weighted_labels
from raypod.training.data.order import augmentation_integers
from raypod.training.tasks.image_classification import ImageClassification

MEAN, STD = (0.1, 0.5, 0.3), (0.2, 0.25, 1.0)
CUTMIX = {"cutmix_lambda_low": 0.25, "cutmix_lambda_high": 0.75, "cutmix_disable_prob": 0.3}
KINDS: List[Dict[str, Any]] = [{"mixup_alpha": 0.4}, CUTMIX, {"mixup_alpha": 0.4, **CUTMIX}]
SIZE = (20, 30)


def images(count: int = 20, channels: int = 3, height: int = 32, width: int = 32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, channels, height, width), dtype=np.uint8)


def by_pillow(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize one image [channels, height, width] with Pillow, as torchvision does."""
    planes = [Image.fromarray(plane).resize((width, height), Image.Resampling.BILINEAR) for plane in image]
    return np.stack([np.asarray(plane) for plane in planes])


def test_images_are_cropped_at_their_offsets_and_only_selected_ones_flipped() -> None:
    pixels = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    cropped = transforms.crop(pixels, np.array([[1, 1], [2, 0]]), padding=1)
    assert np.array_equal(cropped[0], pixels[0])  # offset 1 of 0..2 is the center
    expected = np.zeros((3, 4, 4), dtype=np.uint8)
    expected[:, :3, 1:] = pixels[1, :, 1:, :3]  # one row up, one column right
    assert np.array_equal(cropped[1], expected)
    before = images(3)
    after = transforms.flip(before.copy(), np.array([False, True, False]))
    assert np.array_equal(after[1], before[1, :, :, ::-1])
    assert np.array_equal(after[[0, 2]], before[[0, 2]])


def test_flip_and_resize_equal_torchvision_and_pillow() -> None:
    torchvision_import.install()
    from torchvision.transforms import functional

    data, samples = ArrayDataset(images(40), np.arange(40)), np.arange(39, -1, -1)
    ours, _ = transforms.gather(data, samples, Augmentation(flip=True), (1, 0), size=64)
    flips = augmentation_integers(1, 0, samples, 2, 3)[:, 2]
    assert 0 < flips.sum() < 40
    for mine, sample, flipped in zip(ours, samples, flips):
        image = Image.fromarray(data.images[sample].transpose(1, 2, 0))
        image = functional.hflip(image) if flipped else image
        assert np.array_equal(mine, functional.pil_to_tensor(functional.resize(image, [64])))
    for shape in [(3, 32, 32), (1, 8, 8), (3, 4, 12), (2, 5, 16)]:
        small, target = images(9, *shape), (2 * shape[1], 2 * shape[2])
        assert np.array_equal(transforms.resize(small, target), [by_pillow(image, *target) for image in small])
    for shape, side in [((3, 32, 32), 224), ((3, 40, 32), 24), ((1, 28, 28), 32), ((3, 6, 6), 12)]:
        before = images(3, *shape)
        expected = np.stack([by_pillow(image, side, side) for image in before]).astype(int)
        assert np.abs(transforms.resize(before, (side, side)) - expected).max() <= 1


def test_augmentation_does_not_depend_on_the_batch_flips_half_of_the_images_and_moves_them_evenly() -> None:
    data, augmentation = ArrayDataset(images(200), np.arange(200)), Augmentation(padding=4, flip=True)

    def of(samples: np.ndarray, epoch: int = 2) -> np.ndarray:
        return transforms.gather(data, samples, augmentation, (1, epoch), size=64)[0]

    together = of(np.arange(150))
    assert all(np.array_equal(together[i], of(np.array([i]))[0]) for i in range(0, 150, 7))
    assert np.array_equal(together[[9, 3]], of(np.array([9, 3])))
    assert not np.array_equal(together, of(np.arange(150), epoch=3))
    unchanged, labels = transforms.gather(data, np.array([4, 0]), augmentation, None)  # without a seed
    assert np.array_equal(unchanged, data.images[[4, 0]])
    assert labels.tolist() == [4, 0]
    samples = np.arange(2000)
    one_pixel = np.zeros((2000, 1, 5, 5), dtype=np.uint8)
    one_pixel[:, 0, 2, 0] = 1
    flipped = transforms.augment(one_pixel.copy(), samples, Augmentation(flip=True), (1, 0))
    assert int(flipped[:, 0, 2, 4].sum()) == pytest.approx(1000, abs=100)
    one_pixel = np.roll(one_pixel, 2, axis=3)
    moved = transforms.augment(one_pixel, samples, Augmentation(padding=1), (1, 0)).sum(axis=0, dtype=int)[0, 1:4, 1:4]
    assert moved.ravel().tolist() == pytest.approx([2000 / 9] * 9, abs=70)


def test_each_channel_has_its_mean_and_std_on_the_device_which_resizes_to_within_one_of_the_host() -> None:
    normalized = transforms.normalize(torch.from_numpy(images(4)), (0.1, 0.2, 0.3), (0.5, 0.25, 1.0))
    scaled = torch.from_numpy(images(4)).float() / 255
    for channel, (mean, std) in enumerate(((0.1, 0.5), (0.2, 0.25), (0.3, 1.0))):
        torch.testing.assert_close(normalized[:, channel], (scaled[:, channel] - mean) / std)
    pixels, floats = torch.from_numpy(images(5, 3, 8, 8)), torch.rand(2, 3, 8, 8)
    on_device = transforms.device_input(torch.float32, MEAN, STD, (8, 8), None)
    assert torch.equal(on_device(pixels), transforms.normalize(pixels, MEAN, STD))
    assert torch.equal(on_device(floats), floats)
    for height, width, size in ((32, 32, 64), (8, 6, 20)):
        pixels = torch.from_numpy(images(5, 3, height, width))
        prepared = transforms.device_input(torch.float32, (0.0,), (1 / 255,), (height, width), size)(pixels)
        expected = torch.from_numpy(transforms.resize(pixels.numpy(), (size, size))).float()
        assert (prepared - expected).abs().max() <= 1.001  # Pillow rounds after the width and after the height


def words_of(given: Dict[str, Any], samples: np.ndarray, micro_batch: int = 4, epoch: int = 0) -> Any:
    return pair_words(from_values({"data": given}).data, samples, micro_batch, (1, epoch), SIZE)


def test_coefficients_of_mixup_and_boxes_of_cutmix_have_their_distributions() -> None:
    for alpha in (0.01, 0.2, 1.0):
        found = words_of({"mixup_alpha": alpha}, np.arange(40_000))[:, 0]
        peer = np.random.default_rng(0).beta(alpha, alpha, 40_000)
        peer = np.maximum(peer, 1 - peer)
        shares = [0.1, 0.3, 0.5, 0.7, 0.9]
        np.testing.assert_allclose(np.quantile(found, shares), np.quantile(peer, shares), atol=0.012)
        assert (found.astype(np.float16) == found).all()
        assert (found >= 0.5).all()
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
    without: Any = ({}, {"cutmix_lambda_low": 1, "cutmix_lambda_high": 1})  # mixing, nothing is sent
    assert [words_of(given, np.arange(8)) for given in without] == [None, None]


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
        data = {"dataset": "synthetic", "samples": 64, "image": "1x8x8", "mixup_alpha": 0.2, **CUTMIX}
        pod = {"replicas": 4, "num_instances": instances}
        found.append(batches_of(make(data=data, training={"batch_size": 4, "updates": 3}, pod=pod)))
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
