from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from raypod.system import torchvision_import
from raypod.training.data import ArrayDataset, Augmentation, transforms
from raypod.training.data.order import augmentation_integers

MEAN, STD = (0.1, 0.5, 0.3), (0.2, 0.25, 1.0)


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


def test_flip_and_resize_equal_torchvision() -> None:
    """The transforms of Graphcore's tutorial, applied sample by sample and to a whole batch."""
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


def test_resizing_differs_from_pillow_by_at_most_one_and_doubling_does_not() -> None:
    for shape in [(3, 32, 32), (1, 8, 8), (3, 4, 12), (2, 5, 16)]:
        small, target = images(9, *shape), (2 * shape[1], 2 * shape[2])
        assert np.array_equal(transforms.resize(small, target), [by_pillow(image, *target) for image in small])
    for shape, side in [((3, 32, 32), 224), ((3, 40, 32), 24), ((1, 28, 28), 32), ((3, 6, 6), 12)]:
        before = images(3, *shape)
        expected = np.stack([by_pillow(image, side, side) for image in before]).astype(int)
        assert np.abs(transforms.resize(before, (side, side)) - expected).max() <= 1


def test_augmentation_does_not_depend_on_the_batch() -> None:
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


def test_half_of_the_images_are_flipped_and_offsets_are_uniform() -> None:
    samples = np.arange(2000)
    one_pixel = np.zeros((2000, 1, 5, 5), dtype=np.uint8)
    one_pixel[:, 0, 2, 0] = 1
    flipped = transforms.augment(one_pixel.copy(), samples, Augmentation(flip=True), (1, 0))
    assert int(flipped[:, 0, 2, 4].sum()) == pytest.approx(1000, abs=100)
    one_pixel = np.roll(one_pixel, 2, axis=3)
    moved = transforms.augment(one_pixel, samples, Augmentation(padding=1), (1, 0)).sum(axis=0, dtype=int)[0, 1:4, 1:4]
    assert moved.ravel().tolist() == pytest.approx([2000 / 9] * 9, abs=70)


def test_each_channel_has_its_mean_and_std_with_the_same_bits_on_the_device() -> None:
    normalized = transforms.normalize(torch.from_numpy(images(4)), (0.1, 0.2, 0.3), (0.5, 0.25, 1.0))
    scaled = torch.from_numpy(images(4)).float() / 255
    for channel, (mean, std) in enumerate(((0.1, 0.5), (0.2, 0.25), (0.3, 1.0))):
        torch.testing.assert_close(normalized[:, channel], (scaled[:, channel] - mean) / std)
    pixels, floats = torch.from_numpy(images(5, 3, 8, 8)), torch.rand(2, 3, 8, 8)
    on_device = transforms.device_input(torch.float32, MEAN, STD, (8, 8), None)
    assert torch.equal(on_device(pixels), transforms.normalize(pixels, MEAN, STD))
    assert torch.equal(on_device(floats), floats)


@pytest.mark.parametrize(("height", "width", "size"), [(32, 32, 64), (8, 6, 20)])
def test_the_device_resizes_to_within_one_of_the_host(height: int, width: int, size: int) -> None:
    pixels = torch.from_numpy(images(5, 3, height, width))
    prepared = transforms.device_input(torch.float32, (0.0,), (1 / 255,), (height, width), size)(pixels)
    expected = torch.from_numpy(transforms.resize(pixels.numpy(), (size, size))).float()
    assert (prepared - expected).abs().max() <= 1.001  # Pillow rounds after the width and after the height
