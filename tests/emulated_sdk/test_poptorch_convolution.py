"""Convolutions of the emulated device in channels_last: values, gradients, strides and the choice of the kernel."""

from __future__ import annotations

import copy
from typing import Any, List, Tuple

import pytest
import torch
from poptorch.device import convolution
from poptorch.device.gradient_accumulation import Accumulating
from torch import nn

# Inputs, outputs, kernel, stride, padding and the size of the image: each is computed as a matrix product.
SHAPES = [
    (96, 96, 3, 1, 1, (1, 1)),  # of the kernel, only the middle meets the image
    (96, 96, 3, 2, 1, (2, 2)),
    (64, 256, 3, 1, 1, (2, 3)),
    (64, 256, (3, 1), (2, 1), (1, 0), (3, 2)),
    (64, 256, 5, 3, 2, (4, 3)),
    (96, 96, 2, 2, 0, (3, 2)),  # the last row is not used
    (128, 128, 1, 1, 0, (2, 1)),
    (128, 128, 1, 2, 0, (3, 2)),
    (192, 256, 1, 1, 1, (2, 1)),
    (96, 96, (1, 3), 1, (0, 1), (2, 1)),
]


def layers(shape: Tuple[Any, ...], bias: bool) -> Tuple[nn.Conv2d, nn.Conv2d]:
    torch.manual_seed(0)
    plain = nn.Conv2d(*shape[:5], bias=bias)
    plain.weight.data = plain.weight.data.contiguous(memory_format=torch.channels_last)  # as in `DeviceMemory`
    special = copy.deepcopy(plain)
    convolution.specialize(special)
    return plain, special


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_has_the_values_and_gradients_of_the_convolution(
    shape: Tuple[Any, ...], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, special = layers(shape, bias)
    images = torch.randn(2, shape[0], *shape[5]).to(memory_format=torch.channels_last)
    inputs = [images.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2)]
    expected = plain(inputs[0])
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", None)  # the product does not use torch's
    found = special(inputs[1])
    assert found.stride() == expected.stride() or found.numel() == found.shape[0] * found.shape[1]
    assert torch.allclose(found, expected, atol=1e-5)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    found.backward(gradient)
    assert torch.allclose(inputs[1].grad, inputs[0].grad, atol=1e-5)
    for own, other in zip(special.parameters(), plain.parameters()):
        assert own.grad is not None
        assert other.grad is not None
        assert own.grad.stride() == own.stride(), "the reduction would copy it"
        assert torch.allclose(own.grad, other.grad, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_that_products_accumulate_are_those_of_autograd(shape: Tuple[Any, ...]) -> None:
    plain, special = layers(shape, bias=True)
    for _ in range(3):
        images = torch.randn(2, shape[0], *shape[5]).to(memory_format=torch.channels_last)
        plain(images).square().sum().backward()
        loss = special(images).square().sum()
        with Accumulating():
            loss.backward()
    for own, other in zip(special.parameters(), plain.parameters()):
        assert own.grad is not None
        assert other.grad is not None
        assert own.grad.stride() == own.stride(), "the reduction would copy it"
        assert torch.allclose(own.grad, other.grad, rtol=1e-4, atol=1e-3)


def test_a_contiguous_weight_has_the_gradient_of_autograd() -> None:
    images = torch.randn(2, 64, 2, 2).to(memory_format=torch.channels_last)
    found = []
    for is_special in (False, True):
        torch.manual_seed(0)
        layer = nn.Conv2d(64, 256, 3, padding=1)
        if is_special:
            convolution.specialize(layer)
        for _ in range(2):
            loss = layer(images).square().sum()
            with Accumulating():
                loss.backward()
        assert layer.weight.grad is not None
        found.append(layer.weight.grad)
    assert torch.allclose(found[1], found[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("kernel", "shape", "samples"),
    [("Product", (96, 96, 3, 1, 1, (1, 1)), 2), ("Winograd", (64, 64, 3, 1, 1, (4, 4)), 32)],
)
def test_a_hook_of_a_weight_and_autograd_grad_get_the_gradient(
    kernel: str, shape: Tuple[Any, ...], samples: int
) -> None:
    _, special = layers(shape, bias=False)
    result = special(torch.randn(samples, shape[0], *shape[5]).to(memory_format=torch.channels_last))
    assert kernel in type(result.grad_fn).__name__
    loss = result.sum()
    (expected,) = torch.autograd.grad(loss, special.weight, retain_graph=True)
    assert special.weight.grad is None
    seen: List[torch.Tensor] = []
    special.weight.register_hook(seen.append)
    with Accumulating():
        loss.backward()
    assert torch.equal(seen[0], expected)
    assert torch.equal(special.weight.grad, expected)


@pytest.mark.parametrize(
    ("layer", "images"),
    [
        (nn.Conv2d(8, 8, 3, padding=1), torch.randn(2, 8, 6, 6)),  # few weights
        (nn.Conv2d(96, 96, 3, padding=1, groups=2), torch.randn(2, 96, 1, 1)),
        (nn.Conv2d(96, 96, 3, padding=2, dilation=2), torch.randn(2, 96, 1, 1)),
        (nn.Conv2d(96, 96, 3, padding="same"), torch.randn(2, 96, 1, 1)),
        (nn.Conv2d(96, 96, 3, padding=1, padding_mode="replicate"), torch.randn(2, 96, 1, 1)),
        (nn.Conv2d(96, 96, 3, padding=1), torch.randn(96, 1, 1)),  # without samples
        (nn.Conv2d(8, 8, 1), torch.randn(2, 8, 5, 5)),  # torch returns a contiguous tensor
        (nn.Conv2d(8, 8, 1), torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)),
        (nn.Conv2d(96, 96, 3, padding=1).double(), torch.randn(2, 96, 1, 1, dtype=torch.float64)),
    ],
)
def test_other_convolutions_are_those_of_torch(layer: nn.Conv2d, images: torch.Tensor) -> None:
    layer.to(memory_format=torch.channels_last)
    expected = layer(images)
    convolution.specialize(layer)
    found = layer(images)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert type(found.grad_fn).__name__ == type(expected.grad_fn).__name__


def test_a_convolution_that_torch_rejects_raises_the_error_of_torch() -> None:
    _, special = layers((8, 8, 3, 1, 0, (2, 2)), bias=True)
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        special(torch.randn(2, 8, 2, 2))
    with pytest.raises(RuntimeError, match="to have 8 channels"):
        special(torch.randn(2, 6, 4, 4))
