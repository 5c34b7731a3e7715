"""Winograd's algorithm for 3x3 convolutions of the emulated device: values, gradients and when it is chosen."""

from __future__ import annotations

import copy
from typing import Tuple

import pytest
import torch
from poptorch.device import convolution
from poptorch.device.gradient_accumulation import Accumulating
from torch import nn

CHANNELS_LAST = torch.channels_last
# Samples, channels, output channels and the size of the images.
SHAPES = [
    (32, 64, 64, (4, 4)),
    (16, 64, 96, (8, 4)),
    (8, 80, 64, (7, 7)),  # does not fill its tiles
    (4, 64, 64, (11, 14)),
    (9, 64, 128, (32, 32)),  # more than one group of images, the last one smaller
    (70, 64, 64, (3, 4)),
]


def images_of(shape: Tuple[int, int, int, Tuple[int, int]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape[0], shape[1], *shape[3]).to(dtype, memory_format=CHANNELS_LAST)


def layer_of(shape: Tuple[int, int, int, Tuple[int, int]], bias: bool = False) -> nn.Conv2d:
    torch.manual_seed(0)
    layer = nn.Conv2d(shape[1], shape[2], 3, padding=1, bias=bias)
    layer.weight.data = layer.weight.data.contiguous(memory_format=CHANNELS_LAST)  # as in `DeviceMemory`
    convolution.specialize(layer)
    return layer


def exact(layer: nn.Conv2d) -> nn.Conv2d:
    """Return torch's convolution with the same weights in double precision."""
    double = nn.Conv2d(layer.in_channels, layer.out_channels, 3, padding=1, bias=layer.bias is not None).double()
    double.load_state_dict(layer.state_dict())
    return double


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    with torch.no_grad():
        return float((found.double() - expected).norm() / expected.norm())


def is_winograd(result: torch.Tensor) -> bool:
    return "Winograd" in type(result.grad_fn).__name__


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_convolution(
    shape: Tuple[int, int, int, Tuple[int, int]], bias: bool
) -> None:
    layer, inputs = layer_of(shape, bias), images_of(shape).requires_grad_()
    double, exact_inputs = exact(layer), images_of(shape, torch.float64).requires_grad_()
    found, expected = layer(inputs), double(exact_inputs)
    assert is_winograd(found)
    assert found.is_contiguous(memory_format=CHANNELS_LAST)
    assert error(found, expected) < 5e-6
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient.double())
    assert inputs.grad is not None
    assert exact_inputs.grad is not None
    assert inputs.grad.is_contiguous(memory_format=CHANNELS_LAST)
    assert error(inputs.grad, exact_inputs.grad) < 5e-6
    for own, other in zip(layer.parameters(), double.parameters()):
        assert own.grad is not None
        assert other.grad is not None
        assert own.grad.stride() == own.stride(), "the reduction would copy it"
        assert error(own.grad, other.grad) < 5e-6


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_gradients_are_accumulated_as_by_autograd(shape: Tuple[int, int, int, Tuple[int, int]]) -> None:
    layers = [layer_of(shape, bias=True) for _ in range(2)]
    for scale in (1.0, 0.5, 2.0):
        layers[0](images_of(shape) * scale).square().sum().backward()
        loss = layers[1](images_of(shape) * scale).square().sum()
        with Accumulating():
            loss.backward()
    for own, other in zip(layers[1].parameters(), layers[0].parameters()):
        assert own.grad is not None
        assert other.grad is not None
        assert own.grad.stride() == own.stride(), "the reduction would copy it"
        assert torch.equal(own.grad, other.grad)


def test_frozen_weights_and_inputs_without_gradient() -> None:
    shape = SHAPES[0]
    layer, inputs = layer_of(shape), images_of(shape)
    expected_inputs = inputs.clone(memory_format=torch.preserve_format).requires_grad_()
    layer(expected_inputs).sum().backward()
    expected_weight = layer.weight.grad
    layer.weight.grad = None
    layer(inputs).sum().backward()  # only the weights
    assert torch.equal(layer.weight.grad, expected_weight)
    layer.weight.grad = None
    layer.weight.requires_grad_(False)
    layer(inputs.requires_grad_()).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(inputs.grad, expected_inputs.grad)


def test_a_sample_has_the_same_values_in_evaluation_and_with_other_images_in_its_group() -> None:
    shape = (9, 64, 64, (32, 32))
    layer, images = layer_of(shape), images_of(shape)
    expected = layer(images)
    with torch.no_grad():
        assert torch.equal(layer(images), expected)
        other = torch.cat([images[:1], images_of(shape)[1:] * 2]).to(memory_format=CHANNELS_LAST)
        assert torch.equal(layer(other)[:1], expected[:1])


@pytest.mark.parametrize(
    ("layer", "images"),
    [
        (nn.Conv2d(64, 64, 3, padding=1), torch.randn(15, 64, 8, 4)),  # 30 tiles
        (nn.Conv2d(63, 64, 3, padding=1), torch.randn(32, 63, 4, 4)),
        (nn.Conv2d(64, 63, 3, padding=1), torch.randn(32, 64, 4, 4)),
        (nn.Conv2d(64, 64, 3, padding=1), torch.randn(32, 64, 5, 5)),  # fills 25 of 64 positions
        (nn.Conv2d(64, 64, 3, padding=1, stride=2), torch.randn(32, 64, 8, 8)),
        (nn.Conv2d(64, 64, 3), torch.randn(32, 64, 6, 6)),
        (nn.Conv2d(64, 64, 5, padding=2), torch.randn(32, 64, 4, 4)),
        (nn.Conv2d(64, 64, (3, 1), padding=(1, 0)), torch.randn(32, 64, 4, 4)),
        (nn.Conv2d(64, 64, 3, padding=1).double(), torch.randn(32, 64, 4, 4, dtype=torch.float64)),
    ],
)
def test_other_convolutions_are_those_of_torch(layer: nn.Conv2d, images: torch.Tensor) -> None:
    layer = copy.deepcopy(layer).to(memory_format=CHANNELS_LAST)
    images = images.to(memory_format=CHANNELS_LAST)
    expected = layer(images)
    convolution.specialize(layer)
    assert torch.equal(layer(images), expected)


def test_contiguous_tensors_are_those_of_torch() -> None:
    layer = layer_of(SHAPES[0])
    layer.weight.data = layer.weight.data.contiguous()
    result = layer(images_of(SHAPES[0]).contiguous())
    assert not is_winograd(result)
