"""The execution strategies: which block runs in which stage, on which IPU (contract 1.2, 3).

Phased execution is experimental in the SDK and the contract says little of it. What is chosen here is marked [I].
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from poptorch._errors import Error
from poptorch._parallel.stages import Phase, Stage, ipu_number
from poptorch.enums import AutoStage, Liveness


class Slot(NamedTuple):
    """A declared stage, and where it runs if nobody says another IPU."""

    stage: Stage
    phase: int
    ipu: int


class _IExecutionStrategy:
    """What all strategies share.

    With `_slots` the program has declared which blocks there are. Without, `_auto_stage` numbers them as they come.
    """

    name = ""
    _mode = 0

    def __init__(self) -> None:
        self._auto_stage = AutoStage.SameAsIpu
        self._slots: Dict[str, Slot] = {}
        self._hints: Dict[str, Stage] = {}

    def stage(self, block_id: str) -> Stage:
        """The stage of a block, e.g. to choose its IPU: `strategy.stage("B1").ipu(0)`.

        AssertionError when stages were declared and none has the block. Without declared stages the block gets one.
        """
        if self.is_explicit:
            return self._slot(block_id).stage
        return self._hints.setdefault(block_id, Stage(block_id))

    @property
    def is_explicit(self) -> bool:
        """Whether the program has declared the stages."""
        return bool(self._slots)

    def _locate(self, block_id: str, ipu_id: Optional[int], number: int, present_ipu: int) -> Tuple[int, int]:
        """Phase and IPU of a block that asks for `ipu_id`, is number `number` and follows work on `present_ipu`."""
        if self.is_explicit:
            slot = self._slot(block_id)
            return slot.phase, _first_given(slot.stage._ipu_id, ipu_id, slot.ipu)
        hint = self._hints[block_id]._ipu_id if block_id in self._hints else None
        default = number if self._auto_stage == AutoStage.AutoIncrement else present_ipu
        return 0, _first_given(hint, ipu_id, default)

    def _to_dict(self) -> Dict[str, Any]:
        """Mode and stages as plain Python, for `Options.toDict`."""
        slots = {slot.stage: slot for slot in self._slots.values()}
        declared = [[list(stage.blocks), slot.phase, stage._ipu_id] for stage, slot in slots.items()]
        hints = [[list(stage.blocks), 0, stage._ipu_id] for stage in self._hints.values()]
        return {
            "execution_mode": self._mode,
            "execution_strategy": type(self).__name__,
            "auto_stage": self._auto_stage.value,
            "execution_stages": declared + hints,
        }

    def _slot(self, block_id: str) -> Slot:
        known = ", ".join(map(repr, self._slots))
        assert block_id in self._slots, f"Unknown block {block_id!r}: the stages of {type(self).__name__} have {known}"
        return self._slots[block_id]

    def _declare(self, stage: Stage, phase: int, ipu: int) -> None:
        for block_id in stage.blocks:
            is_new = block_id not in self._slots
            assert is_new, f"Block {block_id!r} is in more than one stage of {type(self).__name__}"
            self._slots[block_id] = Slot(stage, phase, ipu)


class PipelinedExecution(_IExecutionStrategy):
    """Stages work on successive micro-batches at the same time; the default strategy.

    `args` are stages, or ids of blocks, in order; a block's id alone is a stage. Without any, or with an
    `AutoStage`, blocks are staged as they come. AssertionError for anything else.
    """

    name = "pipelined"
    _mode = 0

    def __init__(self, *args: Any) -> None:
        super().__init__()
        if len(args) == 1 and isinstance(args[0], AutoStage):
            self._auto_stage = args[0]
            return
        for index, arg in enumerate(args):
            is_stage = isinstance(arg, (Stage, str))
            assert is_stage, f"{type(self).__name__} takes stages, ids of blocks, or one AutoStage; got {arg!r}"
            self._declare(Stage(arg) if isinstance(arg, str) else arg, 0, index)


class ShardedExecution(PipelinedExecution):
    """Stages work one after the other on one micro-batch; arguments as for `PipelinedExecution`."""

    name = "sharded"
    _mode = 1


class _IPhasedExecution(_IExecutionStrategy):
    """Phases run one after the other; weights and activations of the others may lie off chip.

    `phases` are `Phase`s, or lists of stages or of ids of blocks, each list a phase. AssertionError for anything
    else. Without any, every block is a phase of its own, in the order of execution [I].
    """

    _mode = 2
    _serial = True

    def __init__(self, *phases: Any) -> None:
        super().__init__()
        self._auto_stage = AutoStage.AutoIncrement
        self._separate_backward_phase = False
        self._tensors_liveness = Liveness.AlwaysLive
        if len(phases) == 1 and isinstance(phases[0], (list, tuple)) and not _is_phase(phases[0]):
            phases = tuple(phases[0])
        self._phases: List[Phase] = [item if isinstance(item, Phase) else Phase(item) for item in phases]
        for number, phase in enumerate(self._phases):
            for index, stage in enumerate(phase.stages):
                self._declare(stage, number, self._default_ipu(number, index))

    def phase(self, phase: Any) -> Phase:
        """The phase with this number; IndexError beyond the last. A `Phase` is returned as it is."""
        return phase if isinstance(phase, Phase) else self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> _IPhasedExecution:
        """Whether the end of the forward and the start of the backward pass are phases of their own."""
        self._separate_backward_phase = bool(use)
        return self

    def _default_ipu(self, phase: int, index: int) -> int:
        return index

    def _locate(self, block_id: str, ipu_id: Optional[int], number: int, present_ipu: int) -> Tuple[int, int]:
        if self.is_explicit:
            return super()._locate(block_id, ipu_id, number, present_ipu)
        hint = self._hints[block_id]._ipu_id if block_id in self._hints else None
        return number, _first_given(hint, ipu_id, self._default_ipu(number, 0))

    def _to_dict(self) -> Dict[str, Any]:
        return {
            **super()._to_dict(),
            "separate_backward_phase": self._separate_backward_phase,
            "serial_phases_execution": self._serial,
            "tensors_liveness": self._tensors_liveness.value,
        }


class SerialPhasedExecution(_IPhasedExecution):
    """All phases on the same IPUs, one after the other."""

    name = "serial phased"

    def setTensorsLiveness(self, liveness: Liveness) -> SerialPhasedExecution:
        """Where tensors lie between the passes; AssertionError unless a `Liveness`. Kept, as it changes no result."""
        assert isinstance(liveness, Liveness), f"Expected a poptorch.Liveness, got {liveness!r}"
        self._tensors_liveness = liveness
        return self


class ParallelPhasedExecution(_IPhasedExecution):
    """Phases alternate between two groups of IPUs: even phases on even IPUs, odd ones on odd ones."""

    name = "parallel phased"
    _serial = False

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> ParallelPhasedExecution:
        """Whether tensors leave the chip after the forward pass. Kept, as it changes no result."""
        self._tensors_liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        return self

    def _default_ipu(self, phase: int, index: int) -> int:
        return phase % 2 + 2 * index

    def _locate(self, block_id: str, ipu_id: Optional[int], number: int, present_ipu: int) -> Tuple[int, int]:
        phase, ipu = super()._locate(block_id, ipu_id, number, present_ipu)
        if phase % 2 != ipu % 2:
            raise Error(
                f"ParallelPhasedExecution runs even phases on even IPUs and odd phases on odd IPUs; block {block_id!r} "
                f"is in phase {phase} and on IPU {ipu}"
            )
        return phase, ipu


def _is_phase(items: Any) -> bool:
    """Whether a list is one phase: of stages or of ids of blocks."""
    return all(isinstance(item, (str, Stage)) for item in items)


def _first_given(*ipus: Optional[int]) -> int:
    return next(ipu_number(ipu) for ipu in ipus if ipu is not None)
