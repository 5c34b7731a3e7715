"""Tensors inside a model that a program asks for by name (contract 1.2: `anchorTensor`, `getTensorNames`).

The names are our own, as PopTorch's depend on its compiler, but alike:

    x, batch/0               an argument of forward; with several tensors, each by its position
    conv1/Conv2d:0           the output of a submodule: path, class, position; of the model itself: Net:0
    conv1.weight             a parameter
    Gradient___<name>        the gradient of any of these that is floating point (training only): that of one
                             micro-batch's loss, times the loss scaling
    UpdatedVar___conv1.weight    a parameter after the weight update of a device iteration (training only)

A leading "model." is looked over in names that are not found with it: programs wrap their networks in a module `model`.
Of a module that runs several times in a forward, the last run counts.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

import torch
from torch.utils.hooks import RemovableHandle

from poptorch._errors import Error
from poptorch._executor.layout import BatchLayout
from poptorch._executor.outputs import OutputCollector, check_period
from poptorch.enums import OutputMode
from poptorch.options import Options

_GRADIENT = "Gradient___"
_UPDATED = "UpdatedVar___"


class Anchor(NamedTuple):
    """A tensor that was asked for."""

    short_name: str
    name: str
    mode: OutputMode
    period: int


def anchors_of(options: Options, names: Sequence[str]) -> List[Anchor]:
    """The anchors of the options, with names of `names`. Error for one that is not there."""
    known = frozenset(names)
    found = []
    for short_name, (long_name, mode, period) in options.anchored_tensors.items():
        name = next((name for name in _spellings(long_name) if name in known), None)
        if name is None:
            raise Error(
                f"There is no tensor {long_name!r} to anchor as {short_name!r}: PoplarExecutor.getTensorNames() lists "
                "them once the model is compiled"
            )
        chosen = options.output_mode if mode == OutputMode.Default else mode
        check_period(chosen, period, options.device_iterations)
        found.append(Anchor(short_name, name, OutputMode(chosen), period))
    return found


def _spellings(long_name: str) -> Tuple[str, ...]:
    prefix = next((prefix for prefix in (_GRADIENT, _UPDATED) if long_name.startswith(prefix)), "")
    bare = long_name[len(prefix) :]
    without = bare[len("model.") :] if bare.startswith("model.") else bare
    return long_name, prefix + without


class Watch:
    """Sees the tensors of a module's forwards by name: all names while compiling, those anchored later."""

    def __init__(self, module: torch.nn.Module, wanted: Iterable[str] = ()) -> None:
        self._module = module
        self._wanted = frozenset(wanted)
        self._module_hooks = [part.register_forward_hook(self._see_output(at)) for at, part in module.named_modules()]
        self._gradient_hooks: List[RemovableHandle] = []
        self._names: Dict[str, None] = {}
        self._values: Dict[str, torch.Tensor] = {}

    @property
    def names(self) -> Tuple[str, ...]:
        """The names of all tensors of the last forward."""
        return tuple(self._names)

    def begin(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """A forward begins on these inputs, fresh copies of the host's."""
        self.end()
        for name, tensor in zip(names, tensors):
            if _GRADIENT + name in self._wanted and tensor.is_floating_point():
                tensor.requires_grad_()
            self._see(name, tensor)
        for name, parameter in self._module.named_parameters():
            self._see(name, parameter)
            if parameter.requires_grad and torch.is_grad_enabled():
                self._names[_UPDATED + name] = None

    def take(self, name: str) -> torch.Tensor:
        """The tensor of this name, of the last forward and backward pass. Error when they did not make it."""
        if name not in self._values:
            raise Error(f"The anchored tensor {name!r} was not computed in this call, though it was when compiled")
        return self._values[name]

    def end(self) -> None:
        """Let go of the tensors."""
        for handle in self._gradient_hooks:
            handle.remove()
        self._gradient_hooks, self._names, self._values = [], {}, {}

    def _see_output(self, path: str) -> Any:
        place = f"{path.replace('.', '/')}/" if path else ""

        def see(module: torch.nn.Module, args: Any, output: Any) -> None:
            for index, tensor in enumerate(_tensors(output)):
                self._see(f"{place}{type(module).__name__}:{index}", tensor)

        return see

    def _see(self, name: str, tensor: torch.Tensor) -> None:
        gradient = _GRADIENT + name
        is_differentiable = tensor.is_floating_point() and torch.is_grad_enabled()
        self._names.update(dict.fromkeys((name, gradient) if is_differentiable else (name,)))
        if name in self._wanted:
            self._values[name] = tensor.detach().clone()  # it may change before the call ends
        if gradient in self._wanted:
            # Where nothing depends on the tensor no gradient comes.
            self._values[gradient] = torch.zeros_like(tensor, requires_grad=False)
            if tensor.requires_grad:
                self._gradient_hooks.append(self._hook(tensor, gradient))

    def _hook(self, tensor: torch.Tensor, gradient: str) -> RemovableHandle:
        keep = functools.partial(self._keep, gradient)
        handle: RemovableHandle = tensor.register_hook(keep)  # type: ignore[no-untyped-call, unused-ignore]
        return handle

    def _keep(self, name: str, value: torch.Tensor) -> None:
        self._values[name] = value.detach().clone()


class AnchorOutputs:
    """The anchored tensors of one call, each by the output mode of its anchor."""

    def __init__(self, anchors: Sequence[Anchor], layout: BatchLayout) -> None:
        self._collectors = [(anchor, OutputCollector(anchor.mode, anchor.period, layout, None)) for anchor in anchors]
        self._layout = layout

    def add(self, iteration: int, step: int, replica: int, watch: Watch, gradient_scale: float) -> None:
        """Offer one micro-batch's tensors."""
        for anchor, collector in self._collectors:
            if anchor.name.startswith(_UPDATED):
                continue
            tensor = watch.take(anchor.name)
            is_gradient = anchor.name.startswith(_GRADIENT) and gradient_scale != 1.0
            collector.add(iteration, step, replica, [tensor * gradient_scale if is_gradient else tensor])
        watch.end()

    def add_updated(self, iteration: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Offer the parameters after the update of an iteration: the same for all its micro-batches."""
        for anchor, collector in self._collectors:
            if anchor.name.startswith(_UPDATED):
                value = parameters[anchor.name[len(_UPDATED) :]].detach().clone()
                for replica in range(self._layout.replicas):
                    for step in range(self._layout.accumulation_steps):
                        collector.add(iteration, step, replica, [value])

    def assemble(self) -> Dict[str, torch.Tensor]:
        """One tensor for every short name."""
        return {anchor.short_name: collector.assemble()[0] for anchor, collector in self._collectors}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
