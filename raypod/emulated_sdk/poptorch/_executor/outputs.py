"""What a call returns: the output modes (contract 2.3)."""

from __future__ import annotations

import collections
from typing import Any, Dict, List, NoReturn, Optional, Sequence

import torch

from poptorch._device.dtypes import API_DTYPE
from poptorch._errors import Error
from poptorch._executor.layout import BatchLayout
from poptorch.enums import OutputMode
from poptorch.options import Options


class OutputCollector:
    """Keeps the outputs that one call's output mode asks for, replica by replica.

    They leave in the given dtypes, or else in those that the API has for the device's.
    Each replica's thread touches its own list only.
    """

    def __init__(
        self, mode: OutputMode, period: int, layout: BatchLayout, dtypes: Optional[Sequence[torch.dtype]]
    ) -> None:
        self._mode = mode
        self._period = period
        self._layout = layout
        self._dtypes = dtypes
        self._kept: List[List[List[torch.Tensor]]] = [[] for _ in range(layout.replicas)]

    def add(self, iteration: int, step: int, replica: int, outputs: List[torch.Tensor]) -> None:
        """Offer one micro-batch's outputs, detached; a replica's micro-batches come in order."""
        kept = self._kept[replica]
        if self._mode == OutputMode.Sum and kept:
            kept[0] = [total + output for total, output in zip(kept[0], outputs)]
        elif self._is_wanted(iteration, step):
            kept.append(outputs)

    def assemble(self) -> List[torch.Tensor]:
        """One tensor per output: what was kept, in the order [iteration, step, replica], in the dtypes of the API."""
        dtypes = self._dtypes
        if dtypes is None:
            dtypes = [API_DTYPE.get(output.dtype, output.dtype) for output in self._kept[0][0]]
        return [self._join(index, dtype) for index, dtype in enumerate(dtypes)]

    def _is_wanted(self, iteration: int, step: int) -> bool:
        if self._mode == OutputMode.Final:
            is_last_step = step == self._layout.accumulation_steps - 1
            return is_last_step and iteration == self._layout.device_iterations - 1
        if self._mode == OutputMode.EveryN:
            return bool((iteration + 1) % self._period == 0)
        return True

    def _join(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        pieces = [outputs[index] for micro_batches in zip(*self._kept) for outputs in micro_batches]
        # A call's outputs end here: there is nothing to back-propagate through on the host.
        result = _joined(pieces).to(dtype)
        result.backward = _NO_BACKWARD  # type: ignore[method-assign]
        return result


def _joined(pieces: List[torch.Tensor]) -> torch.Tensor:
    """One fresh tensor; a single scalar stays a scalar."""
    if pieces[0].dim():
        return torch.cat(pieces)
    return torch.stack(pieces) if len(pieces) > 1 else pieces[0].clone()


def api_dtypes(outputs: Sequence[torch.Tensor], is_half: Sequence[bool]) -> List[torch.dtype]:
    """The dtypes in which outputs leave the device."""
    return [
        torch.half if half and output.dtype == torch.float32 else API_DTYPE.get(output.dtype, output.dtype)
        for output, half in zip(outputs, is_half)
    ]


def check_output_mode(options: Options) -> None:
    """Error when the mode would return nothing."""
    check_period(options.output_mode, options.output_return_period, options.device_iterations)


def check_period(mode: OutputMode, period: int, device_iterations: int) -> None:
    """Error when this mode would return nothing of a call."""
    if mode == OutputMode.EveryN and period > device_iterations:
        raise Error(
            f"OutputMode.EveryN returns every {period} device iterations, but a call runs only {device_iterations}"
        )


class _NoBackward:
    """Stands at `backward` of every output."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Error(
            "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
            "trainingModel, the backwards pass is performed automatically when invoking the model. If you're using an "
            "inferenceModel, you should use a trainingModel instead."
        )

    def __deepcopy__(self, memo: Dict[int, Any]) -> _NoBackward:
        return self

    def __reduce__(self) -> Any:
        # A saved output must load anywhere, also without poptorch and with `torch.load(weights_only=True)`; this is
        # the most harmless of the globals that the latter admits.
        return collections.OrderedDict, ()


_NO_BACKWARD = _NoBackward()
