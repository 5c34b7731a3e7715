"""Pipeline splits: how they are found, that they do not change the weights, and the pipeline table."""

from __future__ import annotations

import itertools
from typing import Callable, Dict, List, Optional, Tuple

import poptorch
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from raypod.coordinator import coordinator
from raypod.errors import ConfigError
from raypod.events import RunEnded
from raypod.fleet.inline import InlineFleet
from raypod.model import pipeline
from raypod.model.pipeline import Unit
from raypod.model.pipeline_table import Pipeline, describe_pipeline, inspect_pipeline, render_pipeline
from raypod.plan.config import Config
from raypod.plan.plan import Plan
from raypod.plan.resolve import from_values
from raypod.record.metrics import MetricsAggregator
from raypod.tasks.registry import task_of

INLINE = {"run": {"fleet": "inline", "device": "emulated"}}


def config(model: str, ipus: int, **training: object) -> Config:
    sections = {"training": {"model": model, **training}, "pod": {"ipus_per_replica": ipus}}
    return from_values({"data": {"dataset": "synthetic"}, **sections})


def find_splits(found: Config) -> Optional[Tuple[str, ...]]:
    return pipeline.find_splits(found, task_of(found))


def inspect(plan: Plan) -> Pipeline:
    return inspect_pipeline(plan, task_of(plan.config))


@example(costs=[4, 6, 3, 2, 7, 10], stages=4)  # the sum of squares of a prefix depends on the most expensive stage
@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=7), stages=st.integers(1, 4))
def test_balanced_splits_minimize_the_cost_of_the_most_expensive_stage(costs: List[int], stages: int) -> None:
    units = [Unit(str(index), float(cost)) for index, cost in enumerate(costs)]
    if len(units) < stages:
        with pytest.raises(ConfigError, match=f"the model has only {len(units)} modules"):
            pipeline.balanced_splits(units, stages)
        return

    def weigh(cuts: Tuple[int, ...]) -> Tuple[int, int]:
        edges = [0, *cuts, len(costs)]
        sums = [sum(costs[begin:end]) for begin, end in zip(edges, edges[1:])]
        return max(sums), sum(each * each for each in sums)

    cuts = tuple(int(name) for name in pipeline.balanced_splits(units, stages))
    assert weigh(cuts) == min(map(weigh, itertools.combinations(range(1, len(costs)), stages - 1)))


def test_a_resnet_is_split_between_its_blocks() -> None:
    # 14,575,168 parameters on IPU 0 and 8,945,674 on IPU 1; splitting one block earlier: 8,536,128 and 14,984,714.
    assert find_splits(config("resnet50", 2)) == ("layer4.1",)


def test_residual_blocks_and_transformer_layers_are_the_units() -> None:
    assert find_splits(config("resnet8", 4)) == ("features.4", "features.5", "head")
    splits = find_splits(config("vit_tiny", 2))
    assert splits == ("encoder.layers.encoder_layer_3",)


class Uneven(nn.Module):
    """Few parameters with much computation, then many with little."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = nn.Conv2d(3, 64, 7, 1, 3)
        self.busier = nn.Conv2d(64, 64, 7, 1, 3)
        self.lazy = nn.Linear(64, 3000)
        self.last = nn.Linear(3000, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.busier(self.busy(images)).mean(dim=(2, 3))
        logits: torch.Tensor = self.last(self.lazy(hidden))
        return logits


def test_splits_by_time_differ_from_splits_by_parameters() -> None:
    network, inputs = Uneven(), pipeline.Inputs((torch.zeros(2, 3, 64, 64),))
    assert pipeline.balanced_splits(pipeline.units_by_parameters(network, inputs), 2) == ("last",)
    assert pipeline.balanced_splits(pipeline.units_by_time(network, inputs), 2) in (("busier",), ("lazy",))
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize(
    ("splits", "words"),
    [("features.33", "no module 'features.33'; similar: features.3"), ("features.3,features.3", "twice")],
)
def test_an_unknown_split_is_an_error_with_similar_names(splits: str, words: str) -> None:
    ipus = splits.count(",") + 2
    with pytest.raises(ConfigError, match=words):
        find_splits(config("resnet8", ipus, pipeline_splits=splits))


def test_a_user_model_is_split_only_with_pipeline_balance() -> None:
    own = f"{__name__}:build"
    assert find_splits(config(own, 2)) is None
    assert find_splits(config(own, 2, pipeline_balance="parameters")) == ("last",)


def build(channels: int, classes: int) -> nn.Module:
    return Uneven()


def weights_of(plan: Plan) -> str:
    events = coordinator.run(plan, InlineFleet(plan), MetricsAggregator(plan, 0.0))
    return next(event for event in events if isinstance(event, RunEnded)).weights_sha256


def test_pipelined_sharded_and_single_ipu_models_train_to_the_same_bits(make: Callable[..., Plan]) -> None:
    sizes: Dict[str, object] = {"gradient_accumulation": 7, "updates": 3}
    whole = make(training=sizes, **INLINE)
    hashes = {weights_of(whole)}
    four: Dict[str, object] = {"ipus_per_replica": 4}
    for execution, splits in (("pipelined", "features.3,features.4,head"), ("sharded", "features.1,features.5,head")):
        plan = make(training={**sizes, "execution": execution, "pipeline_splits": splits}, pod=four, **INLINE)
        hashes.add(weights_of(plan))
    assert len(hashes) == 1


def test_the_pipeline_table_shows_stages_and_cycles(make: Callable[..., Plan]) -> None:
    sizes: Dict[str, object] = {"gradient_accumulation": 8, "batch_size": 2, "pipeline_splits": "features.5"}
    pipeline_of_plan = inspect(make(training={**sizes, "precision": "16.16"}, pod={"ipus_per_replica": 2}))
    first, second = pipeline_of_plan.stages
    assert (first.modules[0], second.modules[0]) == ("features.0", "features.5.conv1")
    # Weights, gradient and momentum in half precision.
    assert second.parameters == 64 * 32 * 9 + 64 * 64 * 9 + 64 * 32 + 3 * 2 * 64 + 65 * 10
    assert second.weight_bytes == 2 * (second.parameters + 3 * 2 * 64)
    assert second.update_bytes == 4 * second.parameters
    described = describe_pipeline(pipeline_of_plan)["schedules"]
    assert described["pipelined"]["cycles"] == 2 + 6 + 2 + 1
    assert described["sharded"]["cycles"] == 2 * 2 * 8 + 1
    idle = [each["pipelined"].idle_share for each in pipeline_of_plan.schedules.values()]
    assert idle == sorted(idle, reverse=True)  # more accumulation, less idle time
    text = render_pipeline(pipeline_of_plan, "pipelined")
    rows = [line.split() for line in text.splitlines()]
    assert ["IPU", "0", "forward", *"01234567", ".", ".", "U"] in rows
    assert ["backward", ".", *"01234567", ".", "U"] in rows
    assert text.index("pipelined  11 cycles") < text.index("sharded  33 cycles")


def test_invalid_blocks_of_a_user_model_are_an_error_of_the_plan(make: Callable[..., Plan]) -> None:
    own: Dict[str, object] = {"model": f"{__name__}:build_there_and_back", "gradient_accumulation": 3}
    with pytest.raises(ConfigError, match=r"number of pipeline stages \(5\)"):
        inspect(make(training=own, pod={"ipus_per_replica": 2}))


def build_there_and_back(channels: int, classes: int) -> nn.Module:
    """IPU 0, IPU 1, IPU 0: three stages on two IPUs."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, classes))
    poptorch.BeginBlock(network[2], ipu_id=1)
    poptorch.BeginBlock(network[3], ipu_id=0)
    return network
