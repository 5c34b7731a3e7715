"""The options of PopTorch that a program gets are those of the section `ipu`."""

from __future__ import annotations

from typing import Any, Callable, Dict, List

import poptorch
import pytest
import torch
from torch import nn

from raypod.errors import ConfigError
from raypod.plan.plan import Plan
from raypod.runtime.worker import devices
from raypod.training.models import program
from raypod.training.tasks.registry import task_of

Make = Callable[..., Plan]


def options_of(plan: Plan) -> Any:
    return program.training_options(plan).toDict()


@pytest.mark.parametrize(
    ("ipu", "training", "expected"),
    [
        ({}, {"precision": "16.16"}, {"enableStochasticRounding": True, "partialsTypeMatMuls": "half"}),
        ({"partials": "half"}, {}, {"convolutionOptions": {"partialsType": "half"}}),
        (
            {"automatic_loss_scaling": True},
            {"precision": "16.32"},
            {"automaticLossScalingSettings.enabled": True},
        ),
        ({"stable_norm": False}, {}, {"enableStableNorm": False}),
        ({"synthetic_data_on_device": True}, {}, {"syntheticDataMode": 2}),
        ({"floating_point_exceptions": True}, {}, {"enableFloatingPointChecks": True}),
        ({"available_memory_proportion": 0.2}, {}, {"available_memory_proportion": {0: 0.2}}),
        ({"recomputation": "all"}, {}, {"autoRecomputation": 4, "explicitRecomputation": True}),
        ({"io_tiles": 32}, {"execution": "sharded"}, {"numIOTiles": 32}),
        ({"prefetch_depth": 3}, {}, {"defaultPrefetchBufferingDepth": 3}),
        (
            {},
            {},
            {
                "accumulateOuterFragmentSettings.schedule": 0,
                "replicatedCollectivesSettings.mergeAllReduceCollectives": True,
                "replicatedCollectivesSettings.prepareScheduleForMergingCollectives": True,
                "disableGradAccumulationTensorStreams": True,
                "engineOptions": {"target.deterministicWorkers": "portable"},
            },
        ),
        (
            {"merged_all_reduces": False, "accumulator_streams": True},
            {},
            {
                "replicatedCollectivesSettings.mergeAllReduceCollectives": None,
                "disableGradAccumulationTensorStreams": None,
            },
        ),
        (
            {"engine_options": ["opt.a=memory", "b=true"], "popart_patterns": "TiedGather=false"},
            {},
            {
                "engineOptions": {"target.deterministicWorkers": "portable", "opt.a": "memory", "b": "true"},
                "patterns": {"TiedGather": False},
            },
        ),
        (
            {"popart": {"outlineThreshold": 10.0, "autoRecomputation": 1}, "recomputation": "all"},
            {},
            {"outlineThreshold": 10.0, "autoRecomputation": 1},
        ),
        (
            {"popart": {"convolutionOptions": {"enableConvDithering": True}}},
            {"precision": "16.16"},
            {"convolutionOptions": {"partialsType": "half", "enableConvDithering": True}},
        ),
        (
            {"off_chip": "optimizer", "replicated_tensor_sharding": "optimizer,weights", "sharding_min_elements": 8},
            {},
            {
                "location_optimizer": {
                    "onChip": 0,
                    "useReplicatedTensorSharding": 1,
                    "minElementsForReplicatedTensorSharding": 8,
                },
                "location_weight": {
                    "onChip": 1,
                    "useReplicatedTensorSharding": 1,
                    "minElementsForReplicatedTensorSharding": 8,
                },
            },
        ),
    ],
)
def test_a_setting_is_an_option(
    make: Make, ipu: Dict[str, Any], training: Dict[str, Any], expected: Dict[str, Any]
) -> None:
    found = options_of(make(ipu=ipu, training=training))
    assert {name: found.get(name) for name in expected} == expected


def test_checkpoints_of_the_recomputation_are_the_outputs_of_modules_in_training(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: List[torch.Size] = []
    monkeypatch.setattr(poptorch, "recomputationCheckpoint", lambda output: kept.append(output.shape) or output)
    plan = make(ipu={"recomputation": "all", "recomputation_checkpoints": "0,*.inner"})
    inner = nn.Sequential()
    inner.add_module("inner", nn.Linear(4, 5))
    network = program.finish_network(plan, nn.Sequential(nn.Linear(3, 4), inner))
    network(torch.ones(2, 3))
    assert kept == [(2, 4), (2, 5)]
    network.eval()(torch.ones(2, 3))
    assert len(kept) == 2
    with pytest.raises(ConfigError, match="innr matches no module of the network; there are .*inner"):
        program.keep_outputs(network, ["*.innr"])


class OneInATuple(nn.Linear):
    """Returns a tuple of one tensor, as the layers of transformers 4 do."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return (super().forward(inputs),)


def test_the_checkpoint_of_a_module_with_a_tuple_of_one_tensor_is_that_tensor(make: Make) -> None:
    plan = make(ipu={"recomputation": "all", "recomputation_checkpoints": "0"})
    (found,) = program.finish_network(plan, nn.Sequential(OneInATuple(3, 4)))(torch.ones(2, 3))
    assert found.shape == (2, 4)


@pytest.mark.parametrize("mode", ["accumulation-loop", "device-iteration-loop"])
def test_inputs_and_outputs_of_the_training_overlap(make: Make, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    found: List[Any] = []
    for name in ("set_overlap_for_input", "set_overlap_for_output"):
        monkeypatch.setattr(poptorch, name, lambda tensors, mode: found.append((len(tensors), mode.value)) or tensors)
    plan = make(ipu={"io_tiles": 32, "overlap_io": mode}, training={"execution": "sharded"})
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    step = program.TrainingStep(task_of(plan.config), plan.task.metrics, network, nn.Identity())
    step(torch.ones(4, 3, 2, 2), torch.tensor([0, 4, 2, 2]))
    assert found == [(2, f"overlap_{mode.replace('-', '_')}")] * 2


def test_the_evaluation_does_not_round_stochastically(make: Make) -> None:
    plan = make(training={"precision": "16.16"})
    found = program.inference_options(plan).toDict()
    assert "enableStochasticRounding" not in found
    assert found["partialsTypeMatMuls"] == "half"


def test_names_that_the_sdk_does_not_have_are_the_users_mistake() -> None:
    for text, name in (("Unknown uint64 option nonsense", "nonsense"), ("Unknown pattern 'Tied'", "Tied")):
        with pytest.raises(ConfigError, match=f"--popart: the SDK rejects {name}"), devices.CallGuard():
            raise poptorch.Error(text)
