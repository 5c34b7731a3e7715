"""The device's kernels: convolutions in channels_last, and programs compiled by torch (EMULATED_POD_COMPILE=1)."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
from typing import Any, Dict, Sequence

import poptorch
import pytest
import torch
from poptorch.device.compile import compilation
from poptorch.device.kernels import Accumulating, convolution
from poptorch.errors import Error
from torch import nn

from tests.support.poptorch_models import options, seeded, wrapped
from tests.support.ranks import run_ranks
from tests.support.refused import rejects

CHANNELS_LAST = torch.channels_last
# Inputs, outputs, kernel, stride, padding, and the samples, height and width of the images.
PRODUCTS = [
    ((96, 96, 3, 1, 1), (2, 1, 1)),  # of the kernel, only the middle meets the image
    ((96, 96, 3, 2, 1), (2, 2, 2)),
    ((64, 256, 3, 1, 1), (2, 2, 3)),
    ((64, 256, (3, 1), (2, 1), (1, 0)), (2, 3, 2)),
    ((64, 256, 5, 3, 2), (2, 4, 3)),
    ((96, 96, 2, 2, 0), (2, 3, 2)),  # the last row is not used
    ((128, 128, 1, 1, 0), (2, 2, 1)),
    ((128, 128, 1, 2, 0), (2, 3, 2)),
    ((192, 256, 1, 1, 1), (2, 2, 1)),
    ((96, 96, (1, 3), 1, (0, 1)), (2, 2, 1)),
]
WINOGRAD = [
    ((64, 64, 3, 1, 1), (32, 4, 4)),
    ((64, 96, 3, 1, 1), (16, 8, 4)),
    ((80, 64, 3, 1, 1), (8, 7, 7)),  # does not fill its tiles
    ((64, 64, 3, 1, 1), (4, 11, 14)),
    ((64, 64, 3, 1, 1), (9, 32, 32)),  # more than one group of images, the last one smaller
    ((64, 64, 3, 1, 1), (70, 3, 4)),
]
KERNELS = [*(("Product", *shape) for shape in PRODUCTS), *(("Winograd", *shape) for shape in WINOGRAD)]
SMALL = [case for case in KERNELS if case[2][1] < 11]


def images_of(arguments, shape, dtype=torch.float32):
    images = torch.randn(shape[0], arguments[0], *shape[1:], generator=torch.Generator().manual_seed(1))
    return images.to(dtype, memory_format=CHANNELS_LAST)


def layers(arguments, bias=True):
    torch.manual_seed(0)
    plain = nn.Conv2d(*arguments, bias=bias)
    plain.weight.data = plain.weight.data.contiguous(memory_format=CHANNELS_LAST)  # as in `DeviceMemory`
    special = copy.deepcopy(plain)
    convolution.specialize(special)
    return plain, special


def assert_close(found, expected):
    with torch.no_grad():
        assert (found.double() - expected).norm() < 5e-6 * expected.norm()


def assert_same_gradients(special, plain, assert_equal):
    for own, other in zip(special.parameters(), plain.parameters()):
        assert own.grad.stride() == own.stride(), "the reduction would copy it"
        assert_equal(own.grad, other.grad)


@pytest.mark.parametrize(("kernel", "arguments", "shape"), KERNELS)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_convolution(kernel, arguments, shape, bias):
    plain, special = layers(arguments, bias)
    plain.double()
    images, exact_images = (images_of(arguments, shape, dtype) for dtype in (torch.float32, torch.double))
    found, expected = special(images.requires_grad_()), plain(exact_images.requires_grad_())
    assert kernel in type(found.grad_fn).__name__
    assert found.is_contiguous(memory_format=CHANNELS_LAST)
    assert_close(found, expected)
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient.double())
    assert kernel == "Product" or images.grad.is_contiguous(memory_format=CHANNELS_LAST)
    assert_close(images.grad, exact_images.grad)
    assert_same_gradients(special, plain, assert_close)


@pytest.mark.parametrize(("kernel", "arguments", "shape"), SMALL)
def test_gradients_are_accumulated_as_by_autograd(kernel, arguments, shape):
    by_autograd, special = layers(arguments)
    convolution.specialize(by_autograd)
    for scale in (1.0, 0.5, 2.0):
        for layer, context in ((by_autograd, contextlib.nullcontext()), (special, Accumulating())):
            loss = layer(images_of(arguments, shape) * scale).square().sum()
            with context:
                loss.backward()
    bounds = {"rtol": 1e-4, "atol": 1e-3} if kernel == "Product" else {"rtol": 0, "atol": 0}
    assert_same_gradients(special, by_autograd, functools.partial(torch.testing.assert_close, **bounds))


@pytest.mark.parametrize(("kernel", "arguments", "shape"), [KERNELS[0], KERNELS[10]])
def test_hooks_autograd_grad_and_frozen_weights(kernel, arguments, shape):
    _, special = layers(arguments, bias=False)
    images = images_of(arguments, shape).requires_grad_()
    loss = special(images).sum()
    expected, expected_images = torch.autograd.grad(loss, (special.weight, images), retain_graph=True)
    assert special.weight.grad is None
    seen = []
    special.weight.register_hook(seen.append)
    with Accumulating():
        loss.backward()
    assert torch.equal(seen[0], expected)
    assert torch.equal(special.weight.grad, expected)
    special.weight.grad = images.grad = None
    special(images.detach()).sum().backward()
    assert torch.equal(special.weight.grad, expected)
    special.weight.grad = None
    special.weight.requires_grad_(False)
    special(images).sum().backward()
    assert special.weight.grad is None
    assert torch.equal(images.grad, expected_images)


def test_a_contiguous_weight_has_the_gradient_of_autograd_and_a_sample_its_values_in_any_group():
    plain = nn.Conv2d(64, 256, 3, padding=1)
    special = copy.deepcopy(plain)
    convolution.specialize(special)
    for layer in (plain, special) * 2:
        loss = layer(images_of((64,), (2, 2, 2))).square().sum()
        with Accumulating():
            loss.backward()
    torch.testing.assert_close(special.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-3)
    result = layers(WINOGRAD[0][0])[1].to(memory_format=torch.contiguous_format)(images_of(*WINOGRAD[0]).contiguous())
    assert "Winograd" not in type(result.grad_fn).__name__
    arguments, shape = WINOGRAD[4]
    _, layer = layers(arguments)
    images = images_of(arguments, shape)
    expected = layer(images)
    with torch.no_grad():
        assert torch.equal(layer(images), expected)
        other = torch.cat([images[:1], images[1:] * 2]).to(memory_format=CHANNELS_LAST)
        assert torch.equal(layer(other)[:1], expected[:1])


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(8, 8, 3, padding=1), (2, 8, 6, 6)),  # few weights
        (nn.Conv2d(96, 96, 3, padding=1, groups=2), (2, 96, 1, 1)),
        (nn.Conv2d(96, 96, 3, padding=2, dilation=2), (2, 96, 1, 1)),
        (nn.Conv2d(96, 96, 3, padding="same"), (2, 96, 1, 1)),
        (nn.Conv2d(96, 96, 3, padding=1, padding_mode="replicate"), (2, 96, 1, 1)),
        (nn.Conv2d(96, 96, 3, padding=1), (96, 1, 1)),  # without samples
        (nn.Conv2d(8, 8, 1), (2, 8, 5, 5)),  # torch returns a contiguous tensor
        (nn.Conv2d(96, 96, 3, padding=1).double(), (2, 96, 1, 1)),
        # These are no work for Winograd's algorithm.
        (nn.Conv2d(64, 64, 3, padding=1), (15, 64, 8, 4)),  # 30 tiles
        (nn.Conv2d(63, 64, 3, padding=1), (32, 63, 4, 4)),
        (nn.Conv2d(64, 63, 3, padding=1), (32, 64, 4, 4)),
        (nn.Conv2d(64, 64, 3, padding=1), (32, 64, 5, 5)),  # fills 25 of 64 positions
        (nn.Conv2d(64, 64, 3, padding=1, stride=2), (32, 64, 8, 8)),
        (nn.Conv2d(64, 64, 3), (32, 64, 6, 6)),
        (nn.Conv2d(64, 64, 5, padding=2), (32, 64, 4, 4)),
        (nn.Conv2d(64, 64, (3, 1), padding=(1, 0)), (32, 64, 4, 4)),
        (nn.Conv2d(64, 64, 3, padding=1).double(), (32, 64, 4, 4)),
    ],
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, CHANNELS_LAST])
def test_other_convolutions_are_those_of_torch(layer, shape, memory_format):
    layer = copy.deepcopy(layer).to(memory_format=CHANNELS_LAST)
    images = torch.randn(shape, dtype=layer.weight.dtype)
    images = images.to(memory_format=memory_format) if len(shape) == 4 else images
    expected = layer(images)
    convolution.specialize(layer)
    found = layer(images)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert type(found.grad_fn).__name__ == type(expected.grad_fn).__name__


def test_errors_are_those_of_torch_and_the_kernels_can_be_switched_off(monkeypatch):
    _, special = layers((8, 8, 3, 1, 0))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        special(torch.randn(2, 8, 2, 2))
    rejects(RuntimeError, "to have 8 channels", lambda: special(torch.randn(2, 6, 4, 4)))
    arguments, shape = WINOGRAD[0]
    images = images_of(arguments, shape)
    plain, special = layers(arguments)
    assert not torch.equal(special(images), plain(images))
    monkeypatch.setenv("EMULATED_POD_KERNELS", "torch")
    plain, special = layers(arguments)
    assert torch.equal(special(images), plain(images))
    monkeypatch.setenv("EMULATED_POD_KERNELS", "off")
    rejects(Error, "EMULATED_POD_KERNELS='off': must be own or torch", layers, arguments)


VARIABLE = "EMULATED_POD_COMPILE"
IS_OLD = not hasattr(torch, "export")  # 2.0
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch._inductor
needs_compiler = pytest.mark.skipif(IS_OLD or shutil.which("g++") is None, reason="torch 2.1 and a C++ compiler")


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, half: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.dropout, self.half_ = nn.Dropout(dropout), half

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> Dict[str, Any]:
        hidden = self.dropout(nn.functional.gelu(self.norm(self.first(rows))))
        logits = self.second(hidden).softmax(-1)
        logits = logits.half().float() if self.half_ else logits
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


def train(rank: int, size: int, arguments: Any = None, anchored: Sequence[str] = ()) -> Dict[str, torch.Tensor]:
    """Train on the share of one of `size` processes of 2 replicas in all; return the state and the outputs."""
    opts = options(2 // size, accumulation=2)
    opts.Distributed.configureProcessId(rank, size)
    for name in anchored:
        opts.anchorTensor("anchor", name)
    training = wrapped(seeded(Net, **(arguments or {})), opts, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        rows = torch.randn(2, 2, 4, 16, generator=generator)  # step, replica, sample
        mine = slice(rank * 2 // size, (rank + 1) * 2 // size)
        outputs = training(rows[:, mine].flatten(0, 2).contiguous(), torch.arange(4).repeat(4 // size))
    training.copyWeightsToHost()
    found = {f"host {key}": value.clone() for key, value in training.model.state_dict().items()}
    return {**found, **{key: value for key, value in outputs.items() if size == 1}}


def compiled(rank: int, size: int) -> Dict[str, torch.Tensor]:
    os.environ[VARIABLE] = "1"
    return train(rank, size)


@needs_compiler
def test_a_compiled_program_trains_as_the_operators_with_other_bits_for_every_placement(monkeypatch, processes):
    monkeypatch.setenv(VARIABLE, "0")
    expected = train(0, 1)
    monkeypatch.setenv(VARIABLE, "1")
    found = train(0, 1)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value.double(), atol=1e-5), name
    assert any(not torch.equal(found[name], value) for name, value in expected.items()), "compiled kernels ran"
    for of_process in run_ranks(__file__, ["compiled"], 2)["compiled"]:
        different = {key for key, value in of_process.items() if not torch.equal(found[key], value)}
        assert not {key for key in different if "running" not in key}, "only statistics are those of a replica"


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "anchored", "words"),
    [
        ({"dropout": 0.1}, (), "draws random numbers"),
        ({"half": True}, (), "computes in half"),
        ({}, ("first.weight",), "has anchored tensors"),
    ],
)
def test_a_forward_that_cannot_be_compiled_is_an_error(monkeypatch, arguments, anchored, words):
    monkeypatch.setenv(VARIABLE, "1")
    rejects(poptorch.Error, f"{VARIABLE}=1: forward {words}", train, 0, 1, arguments, anchored)


def test_a_host_that_cannot_compile_an_unknown_value_and_a_folder_open_to_others_are_errors(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "yes")
    rejects(poptorch.Error, f"{VARIABLE}='yes': must be 0 or 1", train, 0, 1)
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv("CXX", "no-such-compiler")
    words = "needs torch 2.1 or later" if IS_OLD else "needs a C\\+\\+ compiler, and there is no no-such-compiler"
    rejects(poptorch.Error, words, train, 0, 1)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "raypod" / "inductor"
    compilation._use_own_inductor_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder.chmod(0o777)
    rejects(poptorch.Error, "writable by other users", compilation._use_own_inductor_cache)
