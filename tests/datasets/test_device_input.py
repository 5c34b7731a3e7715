from __future__ import annotations

import pytest
import torch

from raypod.datasets.transforms import device_input, normalize, resize

MEAN, STD = (0.1, 0.5, 0.3), (0.2, 0.25, 1.0)


def random_images(height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (5, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_the_device_normalizes_to_the_same_bits_as_the_host() -> None:
    images = random_images(8, 8)
    assert torch.equal(device_input(torch.float32, MEAN, STD, (8, 8), None)(images), normalize(images, MEAN, STD))


@pytest.mark.parametrize(("height", "width", "size"), [(32, 32, 64), (8, 6, 20)])
def test_the_device_resizes_to_within_one_of_the_host(height: int, width: int, size: int) -> None:
    images = random_images(height, width)
    prepared = device_input(torch.float32, (0.0,), (1 / 255,), (height, width), size)(images)
    expected = torch.from_numpy(resize(images.numpy(), (size, size))).float()
    assert (prepared - expected).abs().max() <= 1.001  # Pillow rounds after the width and after the height


def test_floating_images_pass_unchanged() -> None:
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(device_input(torch.float32, MEAN, STD, (8, 8), 8)(images), images)
