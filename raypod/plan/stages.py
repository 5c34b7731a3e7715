"""The forward stages of a pipeline, as `--pipeline-splits` writes them.

A split is MODULE or MODULE=IPU: the next stage begins with that module, on the next IPU or on that one. The first stage
begins with the input, on IPU 0. Several stages may be on one IPU, as the embedding and the output layer that shares its
weights.
"""

from __future__ import annotations

import re
from typing import List, NamedTuple, Sequence, Tuple

_SPLIT = re.compile(r"([^=]+)(?:=(\d{1,2}))?")


class Stage(NamedTuple):
    """A stage after the first: the module with which it begins, and its IPU within the replica."""

    module: str
    ipu: int


def stages_of(splits: Sequence[str]) -> Tuple[Stage, ...]:
    """Return the stages after the first one. ValueError for a split that is no MODULE and no MODULE=IPU."""
    stages: List[Stage] = []
    for split in splits:
        found = _SPLIT.fullmatch(split)
        if found is None:
            raise ValueError(f"{split}: write MODULE, or MODULE=IPU as in head=0")
        before = stages[-1].ipu if stages else 0
        stages.append(Stage(found.group(1), before + 1 if found.group(2) is None else int(found.group(2))))
    return tuple(stages)


def splits_of(stages: Sequence[Stage]) -> Tuple[str, ...]:
    """Return the splits that `stages_of` reads; a stage on the next IPU has no number."""
    before = [0, *(stage.ipu for stage in stages)]
    return tuple(
        stage.module if stage.ipu == last + 1 else f"{stage.module}={stage.ipu}" for last, stage in zip(before, stages)
    )


def ipus_of(splits: Sequence[str]) -> Tuple[int, ...]:
    """Return the IPU of each stage, the first one included."""
    return (0, *(stage.ipu for stage in stages_of(splits)))


def returns(splits: Sequence[str]) -> bool:
    """Return whether the IPUs of the stages are in another order than that of their numbers."""
    ipus = ipus_of(splits)
    return list(ipus) != sorted(ipus)


def check(splits: Sequence[str]) -> None:
    """Raise ValueError for a module that begins two stages, or a stage on the IPU of the one before."""
    stages = stages_of(splits)
    modules = [stage.module for stage in stages]
    for before, (module, ipu) in zip(ipus_of(splits), stages):
        if modules.count(module) > 1:
            raise ValueError(f"{module} is listed twice")
        if ipu == before:
            raise ValueError(f"{module}={ipu} is on the IPU of the stage before it; omit it")
