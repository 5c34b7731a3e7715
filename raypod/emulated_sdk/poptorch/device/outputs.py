"""What a call returns by output mode: the outputs, and anchored tensors, which are read by name (`anchorTensor`).

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

import collections
import functools
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple

import torch
from torch.utils.hooks import RemovableHandle

from poptorch.device.arguments import BatchLayout
from poptorch.device_mode import API_DTYPE
from poptorch.enums import OutputMode
from poptorch.errors import Error
from poptorch.options import Options
from poptorch.strict import reject

_GRADIENT = "Gradient___"
_UPDATED = "UpdatedVar___"
FINAL_LOSS_SCALE = "finalLossScale"


class OutputCollector:
    """Collects the outputs that the output mode of a call returns.

    Each replica's thread accesses its own list only.

    Args:
        mode: the output mode.
        period: the device iterations between two outputs, for `OutputMode.EveryN`.
        layout: the layout of the batch.
        dtypes: the dtypes of the outputs at the API; None derives them from the dtypes on the device.
    """

    def __init__(
        self, mode: OutputMode, period: int, layout: BatchLayout, dtypes: Optional[Sequence[torch.dtype]]
    ) -> None:
        self._mode = mode
        self._period = period
        self._layout = layout
        self._dtypes = dtypes
        self._collected: List[List[List[torch.Tensor]]] = [[] for _ in range(layout.replicas)]

    def add(self, iteration: int, step: int, replica: int, outputs: List[torch.Tensor]) -> None:
        """Add one micro-batch's detached outputs; the micro-batches of a replica come in order."""
        collected = self._collected[replica]
        if self._mode == OutputMode.Sum and collected:
            collected[0] = [total + output for total, output in zip(collected[0], outputs)]
        elif self._is_returned(iteration, step):
            collected.append(outputs)

    def assemble(self) -> List[torch.Tensor]:
        """Return one tensor per output: the collected micro-batches in the order [iteration, step, replica]."""
        dtypes = self._dtypes
        if dtypes is None:
            dtypes = [API_DTYPE.get(output.dtype, output.dtype) for output in self._collected[0][0]]
        return [self._join(index, dtype) for index, dtype in enumerate(dtypes)]

    def _is_returned(self, iteration: int, step: int) -> bool:
        if self._mode == OutputMode.Final:
            is_last_step = step == self._layout.accumulation_steps - 1
            return is_last_step and iteration == self._layout.device_iterations - 1
        if self._mode == OutputMode.EveryN:
            return bool((iteration + 1) % self._period == 0)
        return True

    def _join(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        pieces = [outputs[index] for micro_batches in zip(*self._collected) for outputs in micro_batches]
        result = _joined(pieces).to(dtype)
        result.backward = _NO_BACKWARD  # type: ignore[method-assign]
        return result


def _joined(pieces: List[torch.Tensor]) -> torch.Tensor:
    """Return one new contiguous tensor; a single scalar stays 0-d."""
    if pieces[0].dim():
        return torch.cat(pieces).contiguous()  # the pieces may be in another memory format
    return torch.stack(pieces) if len(pieces) > 1 else pieces[0].clone()


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


class _NoBackward:
    """The `backward` of every output: raises Error."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Error(
            "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
            "trainingModel, the backwards pass is performed automatically when invoking the model. If you're using an "
            "inferenceModel, you should use a trainingModel instead."
        )

    def __deepcopy__(self, memo: Dict[int, Any]) -> _NoBackward:
        return self

    def __reduce__(self) -> Any:
        # A saved output must load without poptorch and with `torch.load(weights_only=True)`, which allows this global.
        return collections.OrderedDict, ()


_NO_BACKWARD = _NoBackward()


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
    prefix = next((prefix for prefix in (_GRADIENT, _UPDATED) if long_name.startswith(prefix)), "")
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
            if _GRADIENT + name in self._anchored and tensor.is_floating_point():
                tensor.requires_grad_()
            self._record(name, tensor)
        for name, parameter in self._module.named_parameters():
            self._record(name, parameter)
            if parameter.requires_grad and torch.is_grad_enabled():
                self._names[_UPDATED + name] = None
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
        gradient = _GRADIENT + name
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


class Scales(NamedTuple):
    """The loss scaling, and the factor from the gradients of the emulation to those of a micro-batch's loss."""

    loss: float
    gradient: float


class AnchorOutputs:
    """Collects the anchored tensors of one call, each by the output mode of its anchor."""

    def __init__(self, anchors: Sequence[Anchor], layout: BatchLayout) -> None:
        self._collectors = [(anchor, OutputCollector(anchor.mode, anchor.period, layout, None)) for anchor in anchors]
        self._layout = layout

    def add(self, iteration: int, step: int, replica: int, recorder: AnchorRecorder, scales: Scales) -> None:
        """Add one micro-batch's tensors."""
        for anchor, collector in self._collectors:
            if anchor.name.startswith(_UPDATED):
                continue
            is_scale = anchor.name == FINAL_LOSS_SCALE
            tensor = torch.tensor(scales.loss) if is_scale else recorder.value(anchor.name)
            is_scaled = anchor.name.startswith(_GRADIENT) and scales.gradient != 1.0
            collector.add(iteration, step, replica, [tensor * scales.gradient if is_scaled else tensor])
        recorder.end()

    def add_updated(self, iteration: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add the parameters after the update of an iteration, the same for all its micro-batches."""
        for anchor, collector in self._collectors:
            if anchor.name.startswith(_UPDATED):
                value = parameters[anchor.name[len(_UPDATED) :]].detach().clone()
                for replica in range(self._layout.replicas):
                    for step in range(self._layout.accumulation_steps):
                        collector.add(iteration, step, replica, [value])

    def assemble(self) -> Dict[str, torch.Tensor]:
        """Return one tensor for every short name."""
        return {anchor.short_name: collector.assemble()[0] for anchor, collector in self._collectors}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
