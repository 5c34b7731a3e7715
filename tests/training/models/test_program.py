"""The training step, its optimizers, and the results of the last calls that the device keeps."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterator, Tuple

import poptorch
import pytest
import torch
from torch import nn
from torch.nn import functional

from raypod.errors import ConfigError
from raypod.events import CallReport
from raypod.plan.compatibility import check_compatible
from raypod.plan.config import Config
from raypod.plan.metric import LOSS, Metric
from raypod.plan.plan import Geometry
from raypod.plan.resolve import from_values
from raypod.training.models import optimizers, program, recent_results
from raypod.training.tasks.registry import facts_of, task_of

CALLS = 70
METRICS = (LOSS, Metric("accuracy", "higher"))


def config(**training: object) -> Config:
    return from_values({"training": training})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_training_step_has_the_loss_and_gradients_of_torch(smoothing: float) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    images, labels = torch.randn(4, 3, 2, 2), torch.tensor([0, 4, 2, 2])
    expected = functional.cross_entropy(network(images), labels, label_smoothing=smoothing)
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    configured = config(label_smoothing=smoothing)
    step = program.TrainingStep(task_of(configured), facts_of(configured).metrics, network, nn.Identity())
    trained = poptorch.trainingModel(step, optimizer=poptorch.optim.SGD(network.parameters(), lr=1.0))
    loss, _ = trained(images, labels)
    torch.testing.assert_close(loss, expected.detach())
    after = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    trained.destroy()
    for name, gradient in wanted.items():
        torch.testing.assert_close(before[name] - after[name], gradient)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lamb", "rmsprop"])
@pytest.mark.parametrize(("precision", "dtype"), [("16.16", torch.float16), ("16.32", torch.float32)])
def test_optimizer_states_have_the_precision_of_the_weights(name: str, precision: str, dtype: Any) -> None:
    parameters = [{"params": nn.Linear(2, 2).parameters()}]
    optimizer: Any = optimizers.build_optimizer(config(optimizer=name, precision=precision), parameters)
    assert type(optimizer).__name__.lower() == name
    assert optimizer.accum_type == dtype
    if name == "sgd":
        assert optimizer.velocity_accum_type == dtype
    else:
        assert optimizer.first_order_momentum_accum_type == dtype
        assert optimizer.second_order_momentum_accum_type == torch.float32


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimizer": "adam", "betas": "0.8,0.9", "eps": 1e-6}, {"betas": (0.8, 0.9), "eps": 1e-6}),
        ({"optimizer": "adamw", "bias_correction": False}, {"bias_correction": False, "betas": (0.9, 0.999)}),
        ({"optimizer": "lamb", "max_weight_norm": 10.0}, {"max_weight_norm": 10.0}),
        (
            {"optimizer": "rmsprop", "rmsprop_tf": True, "rmsprop_alpha": 0.9, "eps": 1e-3, "momentum": 0.5},
            {"use_tf_variant": True, "alpha": 0.9, "eps": 1e-3, "momentum": 0.5},
        ),
        (
            {"combined_accumulator": True, "loss_scaling": 128.0},
            {"use_combined_accum": True, "velocity_scaling": 128.0, "loss_scaling": 128.0},
        ),
        ({"combined_accumulator": True, "velocity_scaling": 4.0}, {"velocity_scaling": 4.0}),
        ({}, {"use_combined_accum": False, "momentum": 0.9}),
    ],
)
def test_settings_of_an_optimizer_are_those_of_poptorchs(settings: Dict[str, Any], expected: Dict[str, Any]) -> None:
    optimizer: Any = optimizers.build_optimizer(config(**settings), [{"params": nn.Linear(2, 2).parameters()}])
    found = {name: optimizer.param_groups[0].get(name, getattr(optimizer, name, None)) for name in expected}
    assert found == expected


def test_the_bound_of_biases_holds_for_all_parameters_of_one_dimension() -> None:
    weight, bias, scale = (nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,), (3,)))
    groups = [{"params": [bias, weight], "weight_decay": 0.1}, {"params": [scale], "max_weight_norm": 7.0}]
    settings = {"optimizer": "lamb", "max_weight_norm": 10.0}
    optimizer: Any = optimizers.build_optimizer(config(**settings, max_bias_norm=0.0), groups)
    found = [(group["params"], group["max_weight_norm"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [([weight], 10.0, 0.1), ([bias], 0.0, 0.1), ([scale], 7.0, 0.01)]
    assert len(optimizers.build_optimizer(config(**settings), groups).param_groups) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "adamw", "max_bias_norm": 0.0}, "it is for lamb"),
        ({"betas": "0.8,0.9"}, "--betas has no effect on --optimizer sgd; it is for adam, adamw or lamb"),
        ({"bias_correction": False}, "it is for adamw or lamb"),
        ({"optimizer": "adam", "combined_accumulator": True}, "it is for sgd"),
        ({"velocity_scaling": 2.0}, "--velocity-scaling has no effect without --combined-accumulator"),
        ({"optimizer": "rmsprop", "max_grad_norm": 1.0}, "RMSprop cannot clip gradients"),
    ],
)
def test_settings_of_another_optimizer_are_mistakes(settings: Dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_compatible(config(**settings))


def step_with_results(network: nn.Module, geometry: Geometry) -> program.TrainingStep:
    results = recent_results.RecentResults(geometry, 4)
    return program.TrainingStep(task_of(Config()), METRICS, network, nn.Identity(), results)


@pytest.fixture(scope="module", params=[(1, 1), (2, 3)], ids=["one micro-batch per call", "six micro-batches per call"])
def trained(request: Any) -> Iterator[Tuple[Geometry, Dict[str, Any], Dict[Tuple[int, int], CallReport]]]:
    """Sizes, the replicas' state after `CALLS` calls, and the report of each call and instance."""
    iterations, accumulation = request.param
    geometry = Geometry(2, 1, 1, 4, accumulation, iterations)
    options = poptorch.Options().replicationFactor(2).deviceIterations(iterations).broadcastBuffers(False)
    options.Training.gradientAccumulation(accumulation)
    options.outputMode(poptorch.OutputMode.All)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    optimizer = poptorch.optim.SGD(network.parameters(), lr=0.1)
    training = poptorch.trainingModel(step_with_results(network, geometry), options, optimizer)
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
    assert list(recent_results.lost_reports(state, geometry, list(reports))) == list(reports.values())[-64:]
    last = list(reports)[-1][0]
    of_two = dataclasses.replace(geometry, num_instances=2)  # each has the results of its replicas
    first, second = recent_results.lost_reports(state, of_two, [(last, 0), (last, 1)])
    assert (first.instance, second.instance) == (0, 1)
    assert tuple(one + other for one, other in zip(first.sums, second.sums)) == reports[last, 0].sums


def test_a_state_without_results_has_no_reports_and_the_results_are_not_saved(trained: Any) -> None:
    geometry, state, reports = trained
    saved = recent_results.without_rows(state)
    assert saved is not None
    assert set(state["buffers"]) - set(saved["buffers"]) == {"recent_results.rows"}
    loaded = recent_results.with_empty_rows(saved, geometry, 4)
    assert loaded is not None
    assert loaded["buffers"]["recent_results.rows"].shape == state["buffers"]["recent_results.rows"].shape
    for each in (None, saved, loaded):
        assert list(recent_results.lost_reports(each, geometry, list(reports))) == []
    step = step_with_results(nn.Linear(2, 2), Geometry(2, 2, 1, 1, 1, 1))
    assert set(step.state_dict()) == {"network.weight", "network.bias"}
