"""`popart`: the enums have the integers that `options._Popart.set` takes."""

from __future__ import annotations

import popart
import poptorch


def test_enums_are_integers() -> None:
    assert int(popart.SyntheticDataMode.RandomNormal) == 2
    assert int(popart.RecomputationType.Pipeline) == 3
    assert int(popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized) == 3
    assert int(popart.SubgraphCopyingStrategy.JustInTime) == 1


def test_popart_options_take_enums() -> None:
    options = poptorch.Options()
    options._Popart.set("autoRecomputation", int(popart.RecomputationType.Pipeline))
    options._Popart.set("syntheticDataMode", popart.SyntheticDataMode.Zeros)
