"""`Stage` and `Phase`: blocks that run together, as a program declares them to a strategy (contract 3)."""

from __future__ import annotations

import operator
from typing import Any, Optional, Sequence, Tuple


class Stage:
    """One or more blocks, by their ids, that run on one IPU. AssertionError unless they are strings."""

    def __init__(self, *block_ids: str) -> None:
        assert block_ids, "A stage consists of at least one block: poptorch.Stage('block id', ...)"
        for block_id in block_ids:
            assert isinstance(block_id, str), f"A block's id is a string, got {block_id!r}"
        self._blocks = block_ids
        self._ipu_id: Optional[int] = None

    @property
    def blocks(self) -> Tuple[str, ...]:
        """The ids of the blocks."""
        return self._blocks

    def ipu(self, ipu: int) -> Stage:
        """Run on this IPU of the replica, from 0, whatever the blocks ask for. AssertionError for another value."""
        self._ipu_id = ipu_number(ipu)
        return self

    def __repr__(self) -> str:
        return f"Stage{self._blocks}" + ("" if self._ipu_id is None else f".ipu({self._ipu_id})")


class Phase:
    """Stages that run at the same time.

    `Phase(Stage("A"), Stage("B"))` has two stages; ids of blocks alone, `Phase("A", "B")`, are one stage. Both may be
    given as one list. AssertionError for anything else.
    """

    def __init__(self, *arg: Any) -> None:
        items = _spread(arg)
        assert items, "A phase consists of at least one stage or block"
        if all(isinstance(item, Stage) for item in items):
            self.stages: Tuple[Stage, ...] = tuple(items)
        else:
            assert all(isinstance(item, str) for item in items), f"A phase takes stages or ids of blocks, got {items!r}"
            self.stages = (Stage(*items),)

    def stage(self, idx: int) -> Stage:
        """The stage with this index; IndexError beyond the last."""
        return self.stages[idx]

    def ipus(self, *ipus: int) -> Phase:
        """Give each stage its IPU, in order. AssertionError unless there are as many IPUs as stages."""
        fits = len(ipus) == len(self.stages)
        assert fits, f"A phase of {len(self.stages)} stages needs as many IPUs, got {len(ipus)}"
        for stage, ipu in zip(self.stages, ipus):
            stage.ipu(ipu)
        return self

    def __repr__(self) -> str:
        return f"Phase{self.stages}"


def ipu_number(ipu: Any) -> int:
    """`ipu` as an int; AssertionError unless it is a whole number of at least 0."""
    is_number = hasattr(ipu, "__index__") and not isinstance(ipu, bool) and operator.index(ipu) >= 0
    assert is_number, f"An IPU is numbered from 0, got {ipu!r}"
    return operator.index(ipu)


def _spread(arg: Sequence[Any]) -> Sequence[Any]:
    return arg[0] if len(arg) == 1 and isinstance(arg[0], (list, tuple)) else arg
