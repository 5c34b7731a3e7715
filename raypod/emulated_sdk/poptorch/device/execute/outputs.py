"""What a call returns by output mode: the outputs, and anchored tensors."""

from __future__ import annotations

import collections
from typing import Any, Dict, List, Mapping, NamedTuple, NoReturn, Optional, Sequence

import torch

from poptorch.device.compile.arguments import FINAL_LOSS_SCALE, GRADIENT, UPDATED, Anchor, AnchorRecorder, BatchLayout
from poptorch.device_mode import API_DTYPE
from poptorch.enums import OutputMode
from poptorch.errors import Error


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
            if anchor.name.startswith(UPDATED):
                continue
            is_scale = anchor.name == FINAL_LOSS_SCALE
            tensor = torch.tensor(scales.loss) if is_scale else recorder.value(anchor.name)
            is_scaled = anchor.name.startswith(GRADIENT) and scales.gradient != 1.0
            collector.add(iteration, step, replica, [tensor * scales.gradient if is_scaled else tensor])
        recorder.end()

    def add_updated(self, iteration: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add the parameters after the update of an iteration, the same for all its micro-batches."""
        for anchor, collector in self._collectors:
            if anchor.name.startswith(UPDATED):
                value = parameters[anchor.name[len(UPDATED) :]].detach().clone()
                for replica in range(self._layout.replicas):
                    for step in range(self._layout.accumulation_steps):
                        collector.add(iteration, step, replica, [value])

    def assemble(self) -> Dict[str, torch.Tensor]:
        """Return one tensor for every short name."""
        return {anchor.short_name: collector.assemble()[0] for anchor, collector in self._collectors}
