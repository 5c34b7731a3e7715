"""The combined batch of a call: how inputs are split into micro-batches, and how outputs are put together."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, Dict, List, NoReturn, Optional, Sequence

import torch

from poptorch.device_mode import API_DTYPE
from poptorch.enums import CommGroupType, OutputMode
from poptorch.errors import Error
from poptorch.options import Options


@dataclass(frozen=True)
class BatchLayout:
    """Dimension 0 of every input is [device iterations, accumulation steps, input groups, micro-batch].

    Without input groups there are as many micro-batches per step as replicas; the replica is the innermost index.
    """

    device_iterations: int
    accumulation_steps: int
    replicas: int
    group_size: int
    group_type: CommGroupType

    @classmethod
    def of(cls, options: Options) -> BatchLayout:
        """Return the layout for these options. Raises Error if the input groups do not fit."""
        layout = cls(
            device_iterations=options.device_iterations,
            accumulation_steps=options.Training.gradient_accumulation,
            replicas=options.replication_factor,
            group_size=options.input_group_size,
            group_type=options.input_group_type,
        )
        layout._check_groups()
        return layout

    @property
    def input_groups(self) -> int:
        """The number of groups of replicas that share an input."""
        return self.replicas // self.group_size

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in every input of a call."""
        return self.device_iterations * self.accumulation_steps * self.input_groups

    def index(self, iteration: int, step: int, replica: int) -> int:
        """Return the index of the micro-batch that a replica reads at an accumulation step of an iteration."""
        consecutive = self.group_type != CommGroupType.Orthogonal
        group = replica // self.group_size if consecutive else replica % self.input_groups
        return (iteration * self.accumulation_steps + step) * self.input_groups + group

    def select(self, tensors: Sequence[torch.Tensor], index: int) -> List[torch.Tensor]:
        """Return micro-batch number `index` of every tensor, as views; a 0-d tensor is returned as it is."""
        return [_select(tensor, index, self.micro_batches) for tensor in tensors]

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise AssertionError unless dimension 0 of every tensor is a multiple of the number of micro-batches."""
        for index, tensor in enumerate(tensors):
            size = tensor.shape[0] if tensor.dim() else 1
            fits = size > 0 and size % self.micro_batches == 0
            assert fits, (
                f"Invalid batch dimension: tensor {index} of the arguments has {size} samples, no positive multiple of "
                f"{self.micro_batches} = {self.device_iterations} device iterations x {self.accumulation_steps} "
                f"gradient accumulation x {self.input_groups} replicas or input groups"
            )

    def _check_groups(self) -> None:
        if self.replicas % self.group_size:
            raise Error(f"The input group size {self.group_size} does not divide the {self.replicas} replicas")
        if self.group_size > 1 and self.device_iterations * self.accumulation_steps > 1:
            # The SDK tests input groups without these loops only, and would interleave the micro-batches wrongly.
            raise Error(
                f"Input groups of {self.group_size} replicas need 1 device iteration and gradient accumulation 1, not "
                f"{self.device_iterations} and {self.accumulation_steps}"
            )


def _select(tensor: torch.Tensor, index: int, micro_batches: int) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    size = tensor.shape[0] // micro_batches
    return tensor.narrow(0, index * size, size)


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
    """Return one new tensor; a single scalar stays 0-d."""
    if pieces[0].dim():
        return torch.cat(pieces)
    return torch.stack(pieces) if len(pieces) > 1 else pieces[0].clone()


def api_dtypes(outputs: Sequence[torch.Tensor], is_half: Sequence[bool]) -> List[torch.dtype]:
    """Return the dtypes of the outputs at the API."""
    return [
        torch.half if half and output.dtype == torch.float32 else API_DTYPE.get(output.dtype, output.dtype)
        for output, half in zip(outputs, is_half)
    ]


def check_output_period(mode: OutputMode, period: int, device_iterations: int) -> None:
    """Raise Error if this mode would return nothing of a call."""
    if mode == OutputMode.EveryN and period > device_iterations:
        raise Error(
            f"OutputMode.EveryN returns every {period} device iterations, but a call runs only {device_iterations}"
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
