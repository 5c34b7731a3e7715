"""Error of half precision on the emulated SDK: `python scripts/bench_half.py [--models transformer resnet18]`.

One training step in 16.32 and in 16.16 runs on the emulated SDK and, with half weights, in torch: by torch's CPU
kernels for half for matrix products and convolutions; other operators run in float64 and their results are rounded.
Outputs, loss and gradients are compared in units of the last place of half (ULP) at the magnitude of the largest value
of each tensor. Both are also compared with float64: two correct computations in half differ by as much as each of them
differs from it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple, Type, Union

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "raypod" / "emulated_sdk")]

import poptorch  # noqa: E402 - needs sys.path
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

_SMALLEST_STEP = 2.0**-24
_KERNELS = ("aten::addmm", "aten::mm", "aten::convolution", "aten::convolution_backward")
Compared = Dict[str, List[torch.Tensor]]


class ResNet18(nn.Module):
    """ResNet-18 for small images, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        from raypod.plan.resolve import from_values
        from raypod.training.models import networks

        config = from_values({"data": {"dataset": "synthetic"}, "training": {"model": "resnet18"}})
        self.network = networks.build_model(config, 3, 32, 10)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        logits = self.network(inputs)
        return logits, functional.cross_entropy(logits, labels)

    def batch(self, size: int) -> torch.Tensor:
        return torch.randn(size, 3, 32, 32)


class Transformer(nn.Module):
    """Two layers of attention over 16 tokens of 64 numbers, with their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0) for _ in range(2))
        self.head = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            inputs = layer(inputs)
        logits = self.head(inputs.mean(0))
        return logits, functional.cross_entropy(logits, labels)

    def batch(self, size: int) -> torch.Tensor:
        return torch.randn(16, size, 64)


class HalfReference(TorchDispatchMode):
    """Runs torch's kernels for half where `_KERNELS` names them, other operators in float64 with rounded results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        half = [value for value in _tensors((args, tuple(kwargs.values()))) if value.dtype == torch.half]
        is_native = schema.name in _KERNELS or any(result.alias_info is not None for result in schema.returns)
        if not half or is_native or schema.name in ("aten::_to_copy", "aten::clone", "aten::_unsafe_view"):
            return func(*args, **kwargs)
        wide = func(*_cast(args, torch.half, torch.float64), **_cast(kwargs, torch.half, torch.float64))
        saves_results = schema.name in ("aten::native_layer_norm", "aten::native_batch_norm", "aten::nll_loss_forward")
        if saves_results:
            return (wide[0].half(), *wide[1:])
        return _cast(wide, torch.float64, torch.half)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for item in value:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)


def _cast(value: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(new) if value.dtype == old else value
    if value is old:
        return new
    if isinstance(value, dict):
        return {name: _cast(item, old, new) for name, item in value.items()}
    return type(value)(_cast(item, old, new) for item in value) if isinstance(value, (list, tuple)) else value


def emulated(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, loss_scaling: float) -> Compared:
    """Return the results of one step on the emulated SDK."""
    names = [name for name, _ in model.named_parameters()]
    options = poptorch.Options()
    for name in names:
        options.anchorTensor(name, f"Gradient___{name}")
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0, loss_scaling=loss_scaling)
    training = poptorch.trainingModel(model, options, optimizer)
    logits, loss = training(inputs, labels)
    return {"outputs": [logits], "loss": [loss], "gradients": [training.getAnchoredTensor(name) for name in names]}


def reference(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, loss_scaling: float) -> Compared:
    """Return the results of the same step in torch."""
    with HalfReference():  # type: ignore[no-untyped-call]
        return _step(model.half(), inputs, labels, loss_scaling)


def exact(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, loss_scaling: float) -> Compared:
    """Return the results of the same step from the same half weights and inputs, computed in float64."""
    return _step(model.half().double(), inputs.double(), labels, loss_scaling)


def _step(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, loss_scaling: float) -> Compared:
    logits, loss = model(inputs, labels)
    loss.backward(torch.full_like(loss, loss_scaling))
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return {"outputs": [logits.detach()], "loss": [loss.detach()], "gradients": gradients}


def errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the absolute differences in units of the last place of the largest expected value."""
    largest = expected.double().abs().max()
    step = torch.exp2(torch.floor(torch.log2(largest)) - 10).clamp(min=_SMALLEST_STEP)
    return ((found.double() - expected.double()).abs() / step).flatten()


def summary(found: List[torch.Tensor], expected: List[torch.Tensor]) -> str:
    """Return the median, the 99th percentile and the maximum of the errors of all tensors."""
    error = torch.cat([errors(one, other) for one, other in zip(found, expected)]).sort().values
    chosen = (error.median(), error[int(0.99 * (len(error) - 1))], error[-1])
    return " / ".join(f"{float(f'{value.item():.2g}'):g}" for value in chosen)


MODELS: Dict[str, Type[Union[ResNet18, Transformer]]] = {"transformer": Transformer, "resnet18": ResNet18}


def main(argv: Optional[List[str]] = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batch", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--loss-scaling", type=float, default=128.0)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    args = parser.parse_args(argv)
    print(
        f"torch {torch.__version__}, micro-batch {args.micro_batch}, loss scaling {args.loss_scaling:g}; errors in ULP"
    )
    print("each: median / 99 % / maximum")
    print("| model | precision | quantity | emulated and torch | emulated and float64 | torch and float64 |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        for precision in ("16.32", "16.16"):
            models = []
            for _ in range(3):
                torch.manual_seed(0)
                models.append(MODELS[name]().train())
            inputs = models[0].batch(args.micro_batch).half()
            labels = torch.arange(args.micro_batch) % 10
            device = models[0].half() if precision == "16.16" else models[0]
            found = emulated(device, inputs, labels, args.loss_scaling)
            expected = reference(models[1], inputs, labels, args.loss_scaling)
            true = exact(models[2], inputs, labels, args.loss_scaling)
            for quantity in found:
                pairs = ((found, expected), (found, true), (expected, true))
                cells = [summary(one[quantity], other[quantity]) for one, other in pairs]
                print("| " + " | ".join([name, precision, quantity, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
