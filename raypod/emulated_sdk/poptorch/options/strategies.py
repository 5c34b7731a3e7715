"""Execution strategies: which blocks form a stage or phase, and on which IPU each stage runs.

Phased execution is experimental in the SDK, and its documentation is incomplete; what is inferred is marked.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

from poptorch.enums import AutoStage, Liveness
from poptorch.errors import Error

BlockId = Union[str, int]


class Attribute:
    """Context manager that marks its operations for the compiler: `with Attribute(__outline={"layer": "embedding"}):`.

    The attributes select the operations that the compiler may outline together. They change no result; the emulation
    validates and stores them only.

    Args:
        kwargs: dictionaries of strings, by name of the attribute (AssertionError for other values).
    """

    def __init__(self, **kwargs: Dict[str, str]) -> None:
        for name, values in kwargs.items():
            is_valid = isinstance(values, dict) and all(
                isinstance(text, str) for pair in values.items() for text in pair
            )
            assert is_valid, f"Attribute {name} must be a dictionary of strings, got {values!r}"
        self._attributes = kwargs

    def __enter__(self) -> None:
        """Do nothing: attributes have no effect here."""

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        """Do nothing: attributes have no effect here."""


class Stage:
    """One or more blocks that run on one IPU.

    Args:
        block_ids: ids of the blocks; AssertionError if there is none, or one is not a string.
    """

    def __init__(self, *block_ids: str) -> None:
        assert block_ids, "A stage needs at least one block: poptorch.Stage('block id', ...)"
        for block_id in block_ids:
            assert isinstance(block_id, str), f"A block id must be a string, got {block_id!r}"
        self._blocks = block_ids
        self._ipu_id: Optional[int] = None

    @property
    def blocks(self) -> Tuple[str, ...]:
        """The ids of the blocks."""
        return self._blocks

    def ipu(self, ipu: int) -> Stage:
        """Run on this IPU of the replica, from 0; overrides the blocks' own `ipu_id`. AssertionError if invalid."""
        self._ipu_id = ipu_number(ipu)
        return self

    def __repr__(self) -> str:
        return f"Stage{self._blocks}" + ("" if self._ipu_id is None else f".ipu({self._ipu_id})")


class Phase:
    """Stages that run at the same time.

    Args:
        arg: stages, or block ids that form one stage: `Phase(Stage("A"), Stage("B"))` has two stages and
            `Phase("A", "B")` one. AssertionError for anything else, also a list.
    """

    def __init__(self, *arg: Any) -> None:
        assert arg, "A phase needs at least one stage or block"
        if all(isinstance(item, Stage) for item in arg):
            self.stages: Tuple[Stage, ...] = arg
        else:
            assert all(isinstance(item, str) for item in arg), f"A phase takes stages or block ids, got {arg!r}"
            self.stages = (Stage(*arg),)

    def stage(self, idx: int) -> Stage:
        """Return the stage with this index; IndexError if there is none."""
        return self.stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Assign one IPU to each stage, in order; AssertionError for another number of IPUs."""
        fits = len(ipus) == len(self.stages)
        assert fits, f"A phase of {len(self.stages)} stages needs as many IPUs, got {len(ipus)}"
        for stage, ipu in zip(self.stages, ipus):
            stage.ipu(ipu)

    def __repr__(self) -> str:
        return f"Phase{self.stages}"


class Slot(NamedTuple):
    """A declared stage, its phase, and its IPU if neither the stage nor its block names one."""

    stage: Stage
    phase: int
    ipu: int


class _IExecutionStrategy:
    """Base class of the strategies.

    `_slots` has the blocks that the program declared. If it is empty, `_auto_stage` assigns blocks as they appear.
    """

    name = ""
    _mode = 0

    def __init__(self) -> None:
        self._auto_stage = AutoStage.SameAsIpu
        self._slots: Dict[BlockId, Slot] = {}

    def stage(self, block_id: str) -> Stage:
        """Return the declared stage of a block, e.g. to set its IPU: `strategy.stage("B1").ipu(0)`.

        Raises:
            AssertionError: no declared stage has the block.
        """
        return self._slot(block_id).stage

    def _locate(self, block_id: BlockId, ipu_id: Optional[int], number: int) -> Tuple[int, int]:
        """Return phase and IPU of a block.

        Args:
            ipu_id: the block's own IPU, if it has one.
            number: the block is the `number`-th of the forward, from 0.
        """
        if self._slots:
            slot = self._slot(block_id)
            return slot.phase, _first_given(slot.stage._ipu_id, ipu_id, slot.ipu)
        is_known = ipu_id is not None or self._auto_stage == AutoStage.AutoIncrement
        assert is_known, f"AutoStage.SameAsIpu was selected, but no IPU was specified for block {block_id!r}"
        return 0, _first_given(ipu_id, number)

    def backendOptions(self) -> Dict[str, Any]:
        """Return the strategy's part of `Options.toDict`."""
        return {"execution_mode": self._mode}

    def _to_dict(self) -> Dict[str, Any]:
        """Return mode and stages as plain Python objects, which identify the strategy."""
        slots = {slot.stage: slot for slot in self._slots.values()}
        return {
            **self.backendOptions(),
            "auto_stage": self._auto_stage.value,
            "execution_stages": [[list(stage.blocks), slot.phase, stage._ipu_id] for stage, slot in slots.items()],
        }

    def _slot(self, block_id: BlockId) -> Slot:
        known = ", ".join(map(repr, self._slots))
        assert block_id in self._slots, f"Unknown block {block_id!r}: the blocks of {type(self).__name__} are {known}"
        return self._slots[block_id]

    def _declare(self, stage: Stage, phase: int, ipu: int) -> None:
        for block_id in stage.blocks:
            is_new = block_id not in self._slots
            assert is_new, f"Block {block_id!r} is in more than one stage of {type(self).__name__}"
            self._slots[block_id] = Slot(stage, phase, ipu)


class PipelinedExecution(_IExecutionStrategy):
    """Stages process successive micro-batches at the same time; the default strategy.

    Args:
        args: in order, a stage, or the id of its block, or a list of them. Without any, or with one `AutoStage`,
            blocks are assigned to stages as they appear. AssertionError for anything else.
    """

    name = "pipelined"
    _mode = 0

    def __init__(self, *args: Any) -> None:
        super().__init__()
        if len(args) == 1 and isinstance(args[0], AutoStage):
            self._auto_stage = args[0]
            return
        for index, arg in enumerate(args):
            is_stage = isinstance(arg, (Stage, str, list, tuple))
            assert is_stage, f"{type(self).__name__} takes stages, block ids, or one AutoStage; got {arg!r}"
            blocks = [arg] if isinstance(arg, str) else arg
            self._declare(blocks if isinstance(blocks, Stage) else Stage(*blocks), 0, index)


class ShardedExecution(PipelinedExecution):
    """Stages run one after the other on one micro-batch; takes the arguments of `PipelinedExecution`."""

    name = "sharded"
    _mode = 1


class _IPhasedExecution(_IExecutionStrategy):
    """Phases run one after the other; weights and activations of the other phases may be off chip.

    Args:
        phases: at least one `Phase`, or list of stages or of block ids, each list a phase; AssertionError for anything
            else.
    """

    _mode = 2
    _serial = True

    def __init__(self, *phases: Any) -> None:
        super().__init__()
        assert phases, "There is no AutoStage for phased execution: specify the phases"
        self._separate_backward_phase = False
        self._tensors_liveness = Liveness.AlwaysLive
        if len(phases) == 1 and isinstance(phases[0], (list, tuple)) and not _is_phase(phases[0]):
            phases = tuple(phases[0])
        self._phases: List[Phase] = [_phase_of(item) for item in phases]
        for number, phase in enumerate(self._phases):
            for index, stage in enumerate(phase.stages):
                self._declare(stage, number, self._default_ipu(number, index))

    def phase(self, phase: int) -> Phase:
        """Return the phase with this number; IndexError if there is none, AssertionError for anything else."""
        assert isinstance(phase, int), f"A phase has a number of at least 0, got {phase!r}"
        assert phase >= 0, f"A phase has a number of at least 0, got {phase}"
        return self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> _IPhasedExecution:
        """Run the end of the forward and the start of the backward pass as separate phases."""
        assert isinstance(use, bool), f"useSeparateBackwardPhase takes a bool, got {use!r}"
        self._separate_backward_phase = use
        return self

    def _default_ipu(self, phase: int, index: int) -> int:
        return index

    def backendOptions(self) -> Dict[str, Any]:
        return {
            **super().backendOptions(),
            "separate_backward_phase": self._separate_backward_phase,
            "serial_phases_execution": self._serial,
            "tensors_liveness": self._tensors_liveness.value,
        }


class SerialPhasedExecution(_IPhasedExecution):
    """All phases run on the same IPUs, one after the other."""

    name = "serial phased"

    def setTensorsLiveness(self, liveness: Liveness) -> SerialPhasedExecution:
        """Set where tensors are stored between the passes; no effect on results. AssertionError if not a `Liveness`."""
        assert isinstance(liveness, Liveness), f"Expected a poptorch.Liveness, got {liveness!r}"
        self._tensors_liveness = liveness
        return self


class ParallelPhasedExecution(_IPhasedExecution):
    """Phases alternate between two groups of IPUs: even phases run on even IPUs, odd phases on odd IPUs."""

    name = "parallel phased"
    _serial = False

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> ParallelPhasedExecution:
        """Store tensors off chip after the forward pass; no effect on results."""
        assert isinstance(off_chip, bool), f"sendTensorsOffChipAfterFwd takes a bool, got {off_chip!r}"
        self._tensors_liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        return self

    def _default_ipu(self, phase: int, index: int) -> int:
        return phase % 2 + 2 * index

    def _locate(self, block_id: BlockId, ipu_id: Optional[int], number: int) -> Tuple[int, int]:
        phase, ipu = super()._locate(block_id, ipu_id, number)
        if phase % 2 != ipu % 2:
            raise Error(
                f"ParallelPhasedExecution runs even phases on even IPUs and odd phases on odd IPUs; block {block_id!r} "
                f"is in phase {phase} and on IPU {ipu}"
            )
        return phase, ipu


def ipu_number(ipu: Any) -> int:
    """Return `ipu` as an int; AssertionError unless it is an integer of at least 0."""
    is_number = isinstance(ipu, int) and not isinstance(ipu, bool) and ipu >= 0
    assert is_number, f"An IPU number must be an integer of at least 0, got {ipu!r}"
    return int(ipu)


def _phase_of(item: Any) -> Phase:
    """Return a phase, or that of a list of stages or block ids, or of a single one."""
    if isinstance(item, Phase):
        return item
    return Phase(*item) if isinstance(item, (list, tuple)) else Phase(item)


def _is_phase(items: Any) -> bool:
    """Return whether a list is one phase: all stages or block ids."""
    return all(isinstance(item, (str, Stage)) for item in items)


def _first_given(*ipus: Optional[int]) -> int:
    return next(ipu_number(ipu) for ipu in ipus if ipu is not None)
