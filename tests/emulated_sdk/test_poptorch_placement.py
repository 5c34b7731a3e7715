"""The limits of a placement: the launched IPUs per replica, and overlapped host I/O."""

from __future__ import annotations

import contextlib

import popdist.poptorch
import poptorch
import pytest
import torch
from poptorch.parallel.placement import check_overlap
from torch import nn

from tests.support.poptorch_models import Apply, options


@pytest.mark.parametrize(
    ("ipu", "launched", "error"),
    [
        (0, 1, None),
        (1, 2, None),
        (2, 4, None),
        (1, None, None),
        (1, 4, "uses 2 IPUs per replica, but the run was launched with 4"),
    ],
)
def test_a_model_needs_the_launched_ipus(monkeypatch, ipu, launched, error):
    monkeypatch.delenv("POPDIST_NUM_TOTAL_REPLICAS", raising=False)
    if launched:
        values = {"NUM_TOTAL_REPLICAS": "4", "NUM_LOCAL_REPLICAS": "2", "REPLICA_INDEX_OFFSET": "0"}
        for name, value in {**values, "NUM_IPUS_PER_REPLICA": str(launched)}.items():
            monkeypatch.setenv(f"POPDIST_{name}", value)
    opts = popdist.poptorch.Options().showCompilationProgressBar(False).autoRoundNumIPUs().deviceIterations(2)
    opts.setExecutionStrategy(poptorch.ShardedExecution())
    model = nn.Sequential(nn.Linear(2, 2), poptorch.BeginBlock(nn.Linear(2, 2), ipu_id=ipu))
    inference = poptorch.inferenceModel(model, opts)
    with pytest.raises(poptorch.Error, match=error) if error else contextlib.nullcontext():
        inference.compile(torch.ones(2 * opts.replication_factor, 2))


def overlapping(tiles=32, mode=poptorch.OutputMode.All):
    opts = options().setExecutionStrategy(poptorch.ShardedExecution()).outputMode(mode)
    if tiles:
        opts.TensorLocations.numIOTiles(tiles)
    return opts


def test_overlap_excludes_pipelined_execution_and_needs_io_tiles():
    check_overlap(overlapping(), ["outputs"])
    with pytest.raises(poptorch.Error, match="not supported with poptorch.PipelinedExecution"):
        check_overlap(overlapping().setExecutionStrategy(poptorch.PipelinedExecution()), ["outputs"])
    with pytest.raises(poptorch.Error, match="allocate at least 32 IO tiles"):
        check_overlap(overlapping(tiles=0), ["inputs"])


def test_overlapped_outputs_need_output_mode_all_or_sum():
    check_overlap(overlapping(mode=poptorch.OutputMode.Sum), ["outputs"])
    check_overlap(overlapping(mode=poptorch.OutputMode.Final), ["inputs"])
    with pytest.raises(poptorch.Error, match="not Final"):
        check_overlap(overlapping(mode=poptorch.OutputMode.Final), ["outputs"])


def test_compilation_checks_overlap_options():
    overlaps = Apply(lambda x: poptorch.set_overlap_for_input(x, poptorch.OverlapMode.OverlapDeviceIterationLoop) + 1)
    with pytest.raises(poptorch.Error, match="Overlapped IO"):
        poptorch.inferenceModel(overlaps, options()).compile(torch.ones(2, 2))
    poptorch.inferenceModel(overlaps, overlapping()).compile(torch.ones(2, 2))
