"""The limits of a placement: the launched IPUs per replica, and overlapped host I/O."""

from __future__ import annotations

import popdist.poptorch
import poptorch
import pytest
import torch
from poptorch.parallel.placement import check_overlap
from poptorch_models import options
from torch import nn


def launched(monkeypatch, ipus_per_replica, local_replicas=2):
    """Return the options of one of two instances."""
    values = {"NUM_TOTAL_REPLICAS": 2 * local_replicas, "NUM_LOCAL_REPLICAS": local_replicas}
    values.update(REPLICA_INDEX_OFFSET=0, NUM_IPUS_PER_REPLICA=ipus_per_replica)
    for name, value in values.items():
        monkeypatch.setenv(f"POPDIST_{name}", str(value))
    return popdist.poptorch.Options().showCompilationProgressBar(False).autoRoundNumIPUs()


def infer_on(ipu, opts):
    model = nn.Sequential(nn.Linear(2, 2), poptorch.BeginBlock(nn.Linear(2, 2), ipu_id=ipu))
    model = poptorch.inferenceModel(model, opts.deviceIterations(2))
    model.compile(torch.ones(2 * opts.replication_factor, 2))


@pytest.mark.parametrize(("ipu", "ipus_per_replica"), [(0, 1), (1, 2), (2, 4)])
def test_model_with_the_launched_ipus_compiles(monkeypatch, ipu, ipus_per_replica):
    opts = launched(monkeypatch, ipus_per_replica)
    infer_on(ipu, opts.setExecutionStrategy(poptorch.ShardedExecution()))


def test_model_with_other_ipus_than_launched_raises_error(monkeypatch):
    with pytest.raises(poptorch.Error, match="uses 2 IPUs per replica, but the run was launched with 4"):
        infer_on(1, launched(monkeypatch, 4))


def test_without_a_launch_any_number_of_ipus_compiles(monkeypatch):
    monkeypatch.delenv("POPDIST_NUM_TOTAL_REPLICAS", raising=False)
    infer_on(1, popdist.poptorch.Options().showCompilationProgressBar(False))


def overlapping(tiles=32, mode=poptorch.OutputMode.All):
    opts = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution()).outputMode(mode)
    if tiles:
        opts.TensorLocations.numIOTiles(tiles)
    return opts


def test_overlap_excludes_pipelined_execution():
    check_overlap(overlapping(), ["outputs"])
    with pytest.raises(poptorch.Error, match="not supported with poptorch.PipelinedExecution"):
        check_overlap(overlapping().setExecutionStrategy(poptorch.PipelinedExecution()), ["outputs"])


def test_overlap_needs_io_tiles():
    with pytest.raises(poptorch.Error, match="allocate at least 32 IO tiles"):
        check_overlap(overlapping(tiles=0), ["inputs"])


def test_overlapped_outputs_need_output_mode_all_or_sum():
    check_overlap(overlapping(mode=poptorch.OutputMode.Sum), ["outputs"])
    check_overlap(overlapping(mode=poptorch.OutputMode.Final), ["inputs"])
    with pytest.raises(poptorch.Error, match="not Final"):
        check_overlap(overlapping(mode=poptorch.OutputMode.Final), ["outputs"])


def test_compilation_checks_overlap_options():
    class Overlapping(nn.Module):
        def forward(self, x):
            return poptorch.set_overlap_for_input(x, poptorch.OverlapMode.OverlapDeviceIterationLoop) + 1

    with pytest.raises(poptorch.Error, match="Overlapped IO"):
        poptorch.inferenceModel(Overlapping(), options()).compile(torch.ones(2, 2))
    poptorch.inferenceModel(Overlapping(), overlapping().showCompilationProgressBar(False)).compile(torch.ones(2, 2))
