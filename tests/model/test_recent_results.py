"""The results that the device keeps are those of the reports."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterator, Tuple

import poptorch
import pytest
import torch
from torch import nn

from raypod.events import CallReport
from raypod.model import program, recent_results
from raypod.plan.config import Config
from raypod.plan.metric import LOSS, Metric
from raypod.plan.plan import Geometry
from raypod.tasks.registry import task_of

CALLS = 70
METRICS = (LOSS, Metric("accuracy", "higher"))


@pytest.fixture(scope="module", params=[(1, 1), (2, 3)], ids=["one micro-batch per call", "six micro-batches per call"])
def trained(request: Any) -> Iterator[Tuple[Geometry, Dict[str, Any], Dict[Tuple[int, int], CallReport]]]:
    """Sizes, the replicas' state after `CALLS` calls, and the report of each call and instance."""
    iterations, accumulation = request.param
    geometry = Geometry(
        total_replicas=2,
        num_instances=1,
        ipus_per_replica=1,
        micro_batch_size=4,
        gradient_accumulation=accumulation,
        device_iterations=iterations,
    )
    options = poptorch.Options().replicationFactor(2).deviceIterations(iterations).broadcastBuffers(False)
    options.Training.gradientAccumulation(accumulation)
    options.outputMode(poptorch.OutputMode.All)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    step = program.TrainingStep(
        task_of(Config()), METRICS, network, nn.Identity(), recent_results.RecentResults(geometry, 4)
    )
    training = poptorch.trainingModel(step, options, poptorch.optim.SGD(network.parameters(), lr=0.1))
    reports = {}
    for call in range(CALLS):
        update, digest = call * iterations + (1 << 20), f"{call:04x}beef0000ffff"
        images = torch.randn(geometry.combined_batch_size, 3, 2, 2)
        labels = torch.arange(geometry.combined_batch_size) % 5
        outputs = training(images, labels, recent_results.call_words(geometry, update, digest))
        sums = recent_results.replica_sums(outputs[1], (iterations, accumulation, 2))
        reports[update, 0] = CallReport(0, update, sums, samples_digest=digest)
    yield geometry, training.emulatedReplicaState(), reports
    training.destroy()


def test_the_reports_of_the_last_calls_can_be_recovered(trained: Any) -> None:
    geometry, state, reports = trained
    found = list(recent_results.lost_reports(state, geometry, list(reports)))
    assert len(found) == 64
    assert found == list(reports.values())[-64:]


def test_each_instance_has_the_results_of_its_replicas(trained: Any) -> None:
    geometry, state, reports = trained
    last = list(reports)[-1][0]
    of_two = dataclasses.replace(geometry, num_instances=2)
    first, second = recent_results.lost_reports(state, of_two, [(last, 0), (last, 1)])
    assert (first.instance, second.instance) == (0, 1)
    both = zip(first.sums, second.sums)
    assert tuple(one + other for one, other in both) == reports[last, 0].sums


def test_a_state_without_results_has_no_reports(trained: Any) -> None:
    geometry, state, reports = trained
    saved = recent_results.without_rows(state)
    assert saved is not None
    assert set(state["buffers"]) - set(saved["buffers"]) == {"recent_results.rows"}
    loaded = recent_results.with_empty_rows(saved, geometry, 4)
    assert loaded is not None
    assert loaded["buffers"]["recent_results.rows"].shape == state["buffers"]["recent_results.rows"].shape
    for each in (None, saved, loaded):
        assert list(recent_results.lost_reports(each, geometry, list(reports))) == []


def test_the_results_are_not_saved() -> None:
    geometry = Geometry(2, 2, 1, micro_batch_size=1, gradient_accumulation=1, device_iterations=1)
    network = nn.Linear(2, 2)
    step = program.TrainingStep(
        task_of(Config()), METRICS, network, nn.Identity(), recent_results.RecentResults(geometry, 4)
    )
    assert set(step.state_dict()) == {"network.weight", "network.bias"}
