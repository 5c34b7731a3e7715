"""The tensors of a model that can be read by name after a call (`anchorTensor`), and their recording in a forward.

PopTorch's names of tensors depend on its compiler; the emulation's are similar:

    x, batch/0               an argument of forward; if it holds several tensors, each with its position
    conv1/Conv2d:0           the output of a submodule: path, class, position; of the model itself: Net:0
    conv1.weight             a parameter, or a buffer as it is before the micro-batch
    Gradient___<name>        the gradient of a floating point tensor above (training only): the gradient of one
                             micro-batch's loss, multiplied by the loss scaling
    UpdatedVar___conv1.weight    a parameter after the weight update of a device iteration (training only)
    finalLossScale           the loss scaling (training with automatic loss scaling only)

If a name is unknown, a leading "model." is ignored: programs wrap their networks in a module `model`. If a module runs
several times in a forward, its last run counts.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import torch
from torch.utils.hooks import RemovableHandle

from poptorch.enums import OutputMode
from poptorch.errors import Error
from poptorch.findings import reject
from poptorch.options import Options

GRADIENT = "Gradient___"
UPDATED = "UpdatedVar___"
FINAL_LOSS_SCALE = "finalLossScale"


def check_output_period(mode: OutputMode, period: int, device_iterations: int) -> None:
    """Raise Error if this mode would return nothing of a call, and reject a period that does not divide the call."""
    if mode == OutputMode.EveryN and period > device_iterations:
        raise Error(
            f"OutputMode.EveryN returns every {period} device iterations, but a call runs only {device_iterations}"
        )
    if mode == OutputMode.EveryN and device_iterations % period:  # inferred: PopART's check of its data flow
        reject(
            f"The period {period} of OutputMode.EveryN is no factor of the {device_iterations} device iterations.",
            "options",
        )


class Anchor(NamedTuple):
    """One anchored tensor: its short name, its name in the model, and its output mode."""

    short_name: str
    name: str
    mode: OutputMode
    period: int


def anchors_of(options: Options, names: Sequence[str]) -> List[Anchor]:
    """Return the anchors of the options for a model with these tensor names. Raises Error for an unknown name."""
    known = frozenset(names)
    found = []
    for short_name, (long_name, is_default, mode, period) in options.anchored_tensors.items():
        name = next((name for name in _candidates(long_name) if name in known), None)
        if name is None:
            raise Error(
                f"There is no tensor {long_name!r} to anchor as {short_name!r}: PoplarExecutor.getTensorNames() lists "
                "the names once the model is compiled"
            )
        if is_default or mode == OutputMode.Default:
            mode, period = options.output_mode, options.output_return_period
        check_output_period(mode, period, options.device_iterations)
        found.append(Anchor(short_name, name, OutputMode(mode), period))
    return found


def _candidates(long_name: str) -> Tuple[str, ...]:
    prefix = next((prefix for prefix in (GRADIENT, UPDATED) if long_name.startswith(prefix)), "")
    bare = long_name[len(prefix) :]
    without = bare[len("model.") :] if bare.startswith("model.") else bare
    return long_name, prefix + without


class AnchorRecorder:
    """Records the names of all tensors in a module's forwards, and the values of the anchored ones."""

    def __init__(self, module: torch.nn.Module, anchored: Iterable[str] = ()) -> None:
        self._module = module
        self._anchored = frozenset(anchored)
        self._module_hooks = [
            submodule.register_forward_hook(self._output_hook(path)) for path, submodule in module.named_modules()
        ]
        self._gradient_hooks: List[RemovableHandle] = []
        self._names: Dict[str, None] = {}
        self._values: Dict[str, torch.Tensor] = {}

    @property
    def names(self) -> Tuple[str, ...]:
        """The names of all tensors of the last forward."""
        return tuple(self._names)

    def begin(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Begin a forward on these inputs, which are copies of the host's."""
        self.end()
        for name, tensor in zip(names, tensors):
            if GRADIENT + name in self._anchored and tensor.is_floating_point():
                tensor.requires_grad_()
            self._record(name, tensor)
        for name, parameter in self._module.named_parameters():
            self._record(name, parameter)
            if parameter.requires_grad and torch.is_grad_enabled():
                self._names[UPDATED + name] = None
        for name, buffer in self._module.named_buffers():
            self._record(name, buffer)

    def value(self, name: str) -> torch.Tensor:
        """Return this tensor of the last forward and backward pass. Raises Error if they did not compute it."""
        if name not in self._values:
            raise Error(f"The anchored tensor {name!r} was not computed in this call, though it was when compiled")
        return self._values[name]

    def end(self) -> None:
        """Release the tensors."""
        for handle in self._gradient_hooks:
            handle.remove()
        self._gradient_hooks, self._names, self._values = [], {}, {}

    def _output_hook(self, path: str) -> Any:
        prefix = f"{path.replace('.', '/')}/" if path else ""

        def record_outputs(module: torch.nn.Module, args: Any, output: Any) -> None:
            for index, tensor in enumerate(_tensors(output)):
                self._record(f"{prefix}{type(module).__name__}:{index}", tensor)

        return record_outputs

    def _record(self, name: str, tensor: torch.Tensor) -> None:
        gradient = GRADIENT + name
        is_differentiable = tensor.is_floating_point() and torch.is_grad_enabled()
        self._names.update(dict.fromkeys((name, gradient) if is_differentiable else (name,)))
        if name in self._anchored:
            self._values[name] = tensor.detach().clone()  # the tensor may change before the call ends
        if gradient in self._anchored:
            # The gradient is zero if the loss does not depend on the tensor.
            self._values[gradient] = torch.zeros_like(tensor, requires_grad=False)
            if tensor.requires_grad:
                self._gradient_hooks.append(self._hook(tensor, gradient))

    def _hook(self, tensor: torch.Tensor, gradient: str) -> RemovableHandle:
        record_gradient = functools.partial(self._record_gradient, gradient)
        handle: RemovableHandle = tensor.register_hook(record_gradient)  # type: ignore[no-untyped-call, unused-ignore]
        return handle

    def _record_gradient(self, name: str, value: torch.Tensor) -> None:
        self._values[name] = value.detach().clone()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
