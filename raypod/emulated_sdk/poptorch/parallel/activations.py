"""Records the activations of a compilation's forward that each stage keeps for its backward pass.

The tensors are those that torch's autograd saves, which is inferred to be what the SDK's compiler stores.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Set, Tuple

import torch

from poptorch.parallel.tracing import StageRecorder, is_view, tensors_in

_INPUT = -1  # the stage that makes the inputs of the model


class StageActivations(NamedTuple):
    """The activations of one stage for one micro-batch, in bytes.

    Attributes:
        segments: what the backward pass needs, in parts that end at the program's recomputation checkpoints.
        entering: tensors from earlier stages, and inputs of the model.
        checkpoints: tensors marked by `recomputationCheckpoint`, of which the stage itself computes something.
        passed: the other ones, which only later stages use: they are stored there.
        tensors: number of tensors in the segments.
        operands: operands and results of the largest operator.
        casts: what the backward pass needs of the results of weights only, as their copies in half precision. The
            micro-batches share them (inferred).
    """

    segments: Tuple[int, ...] = (0,)
    entering: int = 0
    checkpoints: int = 0
    tensors: int = 0
    operands: int = 0
    passed: int = 0
    casts: int = 0

    @property
    def saved(self) -> int:
        """What the backward pass needs without recomputation."""
        return sum(self.segments)

    @property
    def automatic_checkpoints(self) -> int:
        """The least memory with evenly spaced checkpoints, and recomputation from one to the next."""
        mean = self.saved / max(1, self.tensors)
        return min(self.saved, round(2 * math.sqrt(self.saved * mean)))

    def scaled(self, factor: float) -> StageActivations:
        """Return the activations of a micro-batch that is `factor` times as large."""
        segments = tuple(round(factor * segment) for segment in self.segments)
        entering, checkpoints, operands, passed = (
            round(factor * size) for size in (self.entering, self.checkpoints, self.operands, self.passed)
        )
        return StageActivations(segments, entering, checkpoints, self.tensors, operands, passed, self.casts)


class _OpenStage:
    def __init__(self) -> None:
        self.segments = [0]
        self.entering: Dict[int, int] = {}
        self.unused: Dict[int, int] = {}  # the checkpoints of which nothing has been computed
        self.checkpoints = self.tensors = self.operands = self.casts = 0

    def activations(self) -> StageActivations:
        sizes = (sum(self.entering.values()), self.checkpoints, self.tensors, self.operands)
        return StageActivations(tuple(self.segments), *sizes, sum(self.unused.values()), self.casts)


class ActivationRecorder:
    """Observes the operators of one forward; enter `saving()` for it.

    Args:
        recorder: determines the stage of each operator.
        weights: parameters and buffers, which are not activations.
        inputs: the inputs of the model.
    """

    def __init__(
        self,
        recorder: StageRecorder,
        weights: Iterable[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self._recorder = recorder
        # Weights, what is computed from weights only, and random numbers.
        self._not_stored: Set[int] = set(map(_address, weights))
        self._weights, self._of_weights = set(self._not_stored), set(self._not_stored)
        self._made = {_address(tensor): _INPUT for tensor in inputs}  # the stage that made each tensor
        self._stages: Dict[int, _OpenStage] = {}
        self._saved: Set[int] = set()
        recorder.observers.append(self._observe)
        recorder.checkpoint_observers.append(self._end_segment)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context that records what autograd saves.

        Autograd's graph holds the hooks, so these neither refer to this recorder afterwards, which refers to the model,
        nor return tensors with a graph: the garbage collector does not see such cycles.
        """
        saved: List[Callable[[torch.Tensor], None]] = [self._save]

        def save(tensor: torch.Tensor) -> torch.Tensor:
            saved[0](tensor)
            return tensor.detach()

        try:
            with torch.autograd.graph.saved_tensors_hooks(save, _unchanged):
                yield
        finally:
            saved.clear()

    def stages(self, count: int) -> Tuple[StageActivations, ...]:
        """Return the activations of all stages, in the order of execution."""
        return tuple(self._stages.get(index, _OpenStage()).activations() for index in range(count))

    def _stage(self) -> _OpenStage:
        return self._stages.setdefault(self._recorder.stage_index, _OpenStage())

    def _observe(self, operator: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], result: Any) -> None:
        index, stage = self._recorder.stage_index, self._stage()
        operands = {_address(tensor): tensor for tensor in tensors_in((args, kwargs))}
        results = {_address(tensor): tensor for tensor in tensors_in(result)}
        if operands and self._not_stored.issuperset(operands):
            self._not_stored.update(results)
            if self._of_weights.issuperset(operands):
                self._of_weights.update(results)
            return
        for address, tensor in operands.items():
            if self._made.get(address, index) < index:
                stage.entering[address] = self._size(tensor)
        made = results.keys() - operands.keys()
        self._not_stored.difference_update(made)  # memory that was used before
        self._of_weights.difference_update(made)
        if torch.Tag.nondeterministic_seeded in operator.tags:
            # The SDK draws the numbers of a dropout again; the last result is the mask.
            self._not_stored.update(list(results)[-1:])
        self._made.update(dict.fromkeys(results, index))
        if not is_view(operator):
            stage.checkpoints += sum(stage.unused.pop(address, 0) for address in operands)
            together = {**operands, **results}
            sizes = (
                self._part_size(address, tensor, address in results)
                for address, tensor in together.items()
                if address not in self._not_stored
            )
            stage.operands = max(stage.operands, sum(sizes))

    def _part_size(self, address: int, tensor: torch.Tensor, is_result: bool) -> int:
        """Return the bytes of an operand or a result that one part of the operator needs."""
        factor, whole = self._recorder.parts
        is_whole = is_result if whole is None else address == _address(whole)
        return self._size(tensor) if is_whole else self._size(tensor) // factor

    def _save(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address in self._saved or address in self._weights:
            return
        if address in self._of_weights:
            self._saved.add(address)
            self._stage().casts += self._size(tensor)
        elif address not in self._not_stored:
            self._saved.add(address)
            stage = self._stage()
            stage.segments[-1] += self._size(tensor)
            stage.tensors += 1

    def _end_segment(self, tensor: torch.Tensor) -> None:
        stage, address = self._stage(), _address(tensor)
        stage.segments.append(0)
        if address in self._saved:
            stage.checkpoints += self._size(tensor)
        else:
            stage.unused[address] = self._size(tensor)

    def _size(self, tensor: torch.Tensor) -> int:
        if tensor.layout != torch.strided:
            return 0  # the device has no sparse tensors
        elements = min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.element_size())
        return elements * min(4, tensor.element_size())  # the device has no integers of 64 bits


def _address(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:  # a sparse tensor of the host: it has no storage of its own
        return id(tensor)
    return int(tensor.untyped_storage().data_ptr())


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
