"""Pipeline splits: how they are found, that they do not change the weights, schedules, tables and the memory bars."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple

import poptorch
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from raypod.api import planning
from raypod.errors import ConfigError
from raypod.plan.cluster import LOCAL
from raypod.plan.config import Config
from raypod.plan.plan import Plan, make_plan
from raypod.plan.resolve import from_values
from raypod.plan.values import stages_of
from raypod.runs.metrics import MetricsAggregator
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.inline import InlineFleet
from raypod.training.models import pipeline, pipeline_table, program
from raypod.training.models.memory_balance import render_memory, splits_by_memory
from raypod.training.models.pipeline import Unit
from raypod.training.models.pipeline_table import Pipeline, describe_pipeline, inspect_pipeline, render_pipeline
from raypod.training.models.schedule import StageCost, compare_strategies, pipelined, sharded
from raypod.training.tasks.registry import facts_of, task_of
from tests.support.refused import refused
from tests.support.saved_runs import weights_of

LARGE_DATA = """
import torch
class Data:
    def __init__(self, samples): self.images = torch.ones(samples, 1, 8, 8)
    def __len__(self): return len(self.images)
    def __getitem__(self, index): return self.images[index], index % 2
def data(folder):
    return Data(230_000), Data(4_375), 2  # 60 MB
"""
LETTERS = {("forward",): "f", ("backward",): "b", ("backward", "forward"): "x", ("idle",): ".", ("update",): "u"}


def config(model: str, ipus: int, **training: object) -> Config:
    sections = {"training": {"model": model, **training}, "pod": {"ipus_per_replica": ipus}}
    return from_values({"data": {"dataset": "synthetic"}, **sections})


def find_splits(found: Config) -> Optional[Tuple[str, ...]]:
    return pipeline.find_splits(found, task_of(found))


def inspect(plan: Plan) -> Pipeline:
    return inspect_pipeline(plan, task_of(plan.config))


@functools.lru_cache(maxsize=None)
def estimated(ipu: str) -> Any:
    """Return the estimate with a section `ipu`, as JSON, of which the default is compiled once."""
    training = {"model": "resnet14", "gradient_accumulation": 2}
    pod = {"replicas": 4, "num_instances": 2}
    plan = planning.plan_from({"ipu": json.loads(ipu), "training": training, "pod": pod}, "the test", is_dry=True)
    return inspect(plan).memory[0]


@pytest.mark.parametrize(
    ("ipu", "part", "share"),
    [
        ({"recomputation": "all", "recomputation_checkpoints": ["features.[3-9]"]}, "activations", (0.1, 0.7)),
        ({"recomputation": "standard"}, "activations", (0.1, 0.9)),
        ({"recomputation": "norms"}, "activations", (0.1, 0.9)),
        ({"off_chip": ["optimizer"], "off_chip_min_elements": 0}, "optimizer", (0.1, 0.6)),
        ({"off_chip": ["weights"], "off_chip_min_elements": 0}, "weights", (0.1, 0.6)),
        ({"replicated_tensor_sharding": ["optimizer"], "sharding_min_elements": 0}, "optimizer", (0.49, 0.51)),
        ({"replicated_tensor_sharding": ["weights"], "sharding_min_elements": 0}, "weights", (0.49, 0.52)),
        ({"replicated_tensor_sharding": ["accumulators"], "sharding_min_elements": 0}, "gradients", (0.49, 0.51)),
        ({"off_chip": ["accumulators"], "off_chip_min_elements": 0}, "gradients", (0.1, 0.6)),
        # Temporary memory is not counted, so that these change nothing.
        ({"partials": "half"}, "activations", (1, 1)),
        ({"available_memory_proportion": [0.1]}, "activations", (1, 1)),
    ],
)
def test_an_option_changes_the_estimate_in_its_direction(ipu: Any, part: str, share: Tuple[float, float]) -> None:
    before, after = estimated("{}"), estimated(json.dumps(ipu))
    assert share[0] <= getattr(after, part) / getattr(before, part) <= share[1]
    others = [name for name in ("weights", "gradients", "optimizer", "activations", "code") if name != part]
    assert [getattr(after, name) for name in others] == [getattr(before, name) for name in others]


def test_the_copies_of_weights_in_half_precision_are_counted_once_for_all_micro_batches(make: Any) -> None:
    copies: List[int] = []
    parameters: List[nn.Parameter] = []
    for batch_size in (1, 4):
        sizes = {"model": "resnet8", "batch_size": batch_size}
        mixed, half = (make(training={**sizes, "precision": each}) for each in ("16.32", "16.16"))
        copies.append(inspect(mixed).memory[0].activations - inspect(half).memory[0].activations)
        parameters = list(pipeline.network_of(task_of(mixed.config)).parameters())
    matrices = sum(each.numel() for each in parameters if each.dim() > 1)
    assert copies[0] == copies[1]
    assert 2 * matrices <= copies[0] <= 2 * sum(each.numel() for each in parameters)


@example(costs=[4, 6, 3, 2, 7, 10], stages=4)  # the sum of squares of a prefix depends on the most expensive stage
@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=7), stages=st.integers(1, 4))
def test_balanced_splits_minimize_the_cost_of_the_most_expensive_stage(costs: List[int], stages: int) -> None:
    units = [Unit(str(index), float(cost)) for index, cost in enumerate(costs)]
    if len(units) < stages:
        refused(f"the model has only {len(units)} modules", pipeline.balanced_splits, units, stages)
        return

    def weigh(cuts: Tuple[int, ...]) -> Tuple[int, int]:
        edges = [0, *cuts, len(costs)]
        sums = [sum(costs[begin:end]) for begin, end in zip(edges, edges[1:])]
        return max(sums), sum(each * each for each in sums)

    cuts = tuple(int(name) for name in pipeline.balanced_splits(units, stages))
    assert weigh(cuts) == min(map(weigh, itertools.combinations(range(1, len(costs)), stages - 1)))


def test_units_are_blocks_and_layers_and_their_order_needs_no_values_unless_the_model_reads_them() -> None:
    assert find_splits(config("resnet50", 2)) == ("layer4.1",)
    assert find_splits(config("resnet8", 4)) == ("features.4", "features.5", "head")
    assert find_splits(config("vit_tiny", 2)) == ("encoder.layers.encoder_layer_3",)
    own = f"{__name__}:build"
    assert find_splits(config(own, 2)) is None
    assert find_splits(config(own, 2, pipeline_balance="parameters")) == ("last",)
    for reads, devices in ((False, []), (True, ["cpu"])):
        network = nn.Sequential(nn.Linear(2, 2), Reader(reads))
        called = pipeline.called_units(network, pipeline.Inputs((torch.ones(2, 2),)))
        assert ([name for name, _ in called], network[1].devices) == (["0", "1"], devices)


class Reader(nn.Module):
    """A module that records where its input is, and can read a value of it."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.scale, self.reads = nn.Parameter(torch.ones(1)), reads
        self.devices: List[str] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.devices.append(images.device.type)
        return images * self.scale * (images[0, 0].item() if self.reads else 1.0)


def fullest(plan: Plan) -> int:
    return max(each.total for each in inspect(plan).memory)


@pytest.mark.parametrize("execution", ["pipelined", "sharded"])
def test_splits_by_memory_need_less_memory_of_the_fullest_ipu(make: Any, execution: str) -> None:
    training: Dict[str, object] = {"gradient_accumulation": 3, "batch_size": 64, "execution": execution}

    def planned(**more: object) -> Plan:
        return make(training={**training, **more}, pod={"ipus_per_replica": 2}, ipu={"recomputation": "none"})

    found = splits_by_memory(planned(pipeline_balance="memory"), task_of(planned().config))
    others = (planned(pipeline_splits=name) for name in (*(f"features.{number}" for number in (1, 3, 4, 5)), "head"))
    assert fullest(planned(pipeline_splits=",".join(found))) <= min(map(fullest, others))


def test_splits_by_memory_return_to_shared_weights_and_those_by_time_differ() -> None:
    own = {"model": f"{__name__}:build_shared", "pipeline_balance": "memory", "gradient_accumulation": 5}
    data = {"dataset": "synthetic", "image": "1x8x8", "classes": 64}
    sections = {"data": data, "training": own, "pod": {"ipus_per_replica": 2}}
    (first, last) = planning.plan_from(sections, "").pipeline_splits
    assert first.startswith("layers.")
    assert last == "last=0"
    network, inputs = Uneven(), pipeline.Inputs((torch.zeros(2, 3, 64, 64),))
    assert pipeline.balanced_splits(pipeline.units_by_parameters(network, inputs), 2) == ("last",)
    assert pipeline.balanced_splits(pipeline.units_by_time(network, inputs), 2) in (("busier",), ("lazy",))
    assert all(parameter.grad is None for parameter in network.parameters())


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
        return self.last(self.lazy(hidden))


def build(channels: int, classes: int) -> nn.Module:
    return Uneven()


class Shared(nn.Module):
    """Layers of one class between two that share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.last = nn.Linear(64, 64, bias=False)
        self.last.weight = self.first.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images.flatten(1))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(hidden)


def build_shared(channels: int, classes: int) -> nn.Module:
    return Shared()


def test_a_pipeline_returns_to_the_ipu_of_shared_weights_which_others_cannot_share() -> None:
    own = f"{__name__}:build_shared"
    data = {"dataset": "synthetic", "image": "1x8x8"}

    def found(ipus: int, **training: object) -> Optional[Tuple[str, ...]]:
        sections = {"data": data, "training": {"model": own, **training}, "pod": {"ipus_per_replica": ipus}}
        return find_splits(from_values(sections))

    assert found(2, pipeline_balance="parameters") == ("layers.2", "last=0")
    assert found(4, layers_per_ipu="0,2,1,2") == ("layers.0", "layers.2", "layers.3", "last=0")
    refused(r"has 4 layers, and the model has 5: layers.0 .. layers.4", found, 2, layers_per_ipu=2)
    network = Shared()
    inputs = pipeline.Inputs((torch.zeros(2, 1, 8, 8),))
    pipeline.check_shared(network, inputs, stages_of(["layers.1", "last=0"]))
    with pytest.raises(ConfigError, match="last on IPU 1 has a parameter of first on IPU 0.* let last=0 begin a stage"):
        pipeline.check_shared(network, inputs, stages_of(["layers.1"]))
    with pytest.raises(ConfigError, match="again shares a parameter with first, and others follow it"):
        pipeline.tied_unit([("first", network.first), ("again", network.last), ("end", nn.Linear(1, 1))])


def test_layers_are_placed_by_their_numbers_and_an_unknown_split_has_similar_names() -> None:
    assert find_splits(config("vit_tiny", 2, layers_per_ipu="2,4")) == ("encoder.layers.encoder_layer_2",)
    assert find_splits(config("vit_tiny", 2, layers_per_ipu="6,0")) == ("encoder.ln",)
    with pytest.raises(ConfigError, match="only the first and the last IPU can be without layers"):
        find_splits(config("vit_tiny", 4, layers_per_ipu="2,0,2,2"))
    for splits, words in (
        ("features.33", "no module 'features.33'; similar: features.3"),
        ("features.3,features.3", "twice"),
    ):
        with pytest.raises(ConfigError, match=words):
            find_splits(config("resnet8", splits.count(",") + 2, pipeline_splits=splits))


def test_pipelined_sharded_and_single_ipu_models_train_to_the_same_bits(make: Any) -> None:
    hashes = set()
    for splits in (
        {},
        {"pipelined": "features.3,features.4,head"},
        {"sharded": "features.1,features.5,head"},
        {"pipelined": "features.3,head=0"},
    ):
        training: Dict[str, object] = {"gradient_accumulation": 7, "updates": 2}
        for execution, names in splits.items():
            training.update(execution=execution, pipeline_splits=names)
        inline = {"fleet": "inline", "device": "emulated"}
        ipus = 1 if not splits else 2 if "=0" in str(splits) else 4
        plan = make(training=training, pod={"ipus_per_replica": ipus}, run=inline)
        hashes.add(weights_of(list(coordinator.run(plan, InlineFleet(plan), MetricsAggregator(plan, 0.0)))))
    assert len(hashes) == 1


def test_the_pipeline_table_shows_stages_also_one_that_returns_and_cycles(make: Any) -> None:
    sizes: Dict[str, object] = {"gradient_accumulation": 8, "batch_size": 2, "pipeline_splits": "features.5"}
    pipeline_of_plan = inspect(make(training={**sizes, "precision": "16.16"}, pod={"ipus_per_replica": 2}))
    first, second = pipeline_of_plan.stages
    assert (first.modules[0], second.modules[0]) == ("features.0", "features.5.conv1")
    # Weights, gradient and momentum in half precision.
    assert second.parameters == 64 * 32 * 9 + 64 * 64 * 9 + 64 * 32 + 3 * 2 * 64 + 65 * 10
    assert second.weight_bytes == 2 * (second.parameters + 3 * 2 * 64)
    assert second.update_bytes == 4 * second.parameters
    described = describe_pipeline(pipeline_of_plan)["schedules"]
    assert (described["pipelined"]["cycles"], described["sharded"]["cycles"]) == (2 + 6 + 2 + 1, 2 * 2 * 8 + 1)
    idle = [each["pipelined"].idle_share for each in pipeline_of_plan.schedules.values()]
    assert idle == sorted(idle, reverse=True)  # more accumulation, less idle time
    text = render_pipeline(pipeline_of_plan, "pipelined")
    rows = [line.split() for line in text.splitlines()]
    assert ["IPU", "0", "forward", *"01234567", ".", ".", "U"] in rows
    assert ["backward", ".", *"01234567", ".", "U"] in rows
    assert text.index("pipelined  11 cycles") < text.index("sharded  33 cycles")
    sizes: Dict[str, object] = {"gradient_accumulation": 5, "pipeline_splits": "features.5,head=0"}
    plan = make(training=sizes, pod={"ipus_per_replica": 2})
    assert plan.geometry.evaluation_iterations == 3
    text = planning.render_with_pipeline(plan)
    assert "IPU 1 from features.5, IPU 0 from head" in text
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows if row[1:3] == ["head", "650"]] == ["0"]
    assert [row[1] for row in rows if row[0:1] == ["IPU"] and "forward" in row][:3] == ["0", "1", "0"]
    options = program.training_options(plan).toDict()
    stage = program.execution_strategy(plan)._auto_stage
    assert (options["execution_mode"], stage) == (0, poptorch.AutoStage.AutoIncrement)


def test_the_plan_shows_a_bar_for_each_ipu_that_says_if_it_is_longer_than_the_memory(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training: Dict[str, object] = {"gradient_accumulation": 4, "batch_size": 64, "pipeline_splits": "features.5"}
    text = planning.render_with_pipeline(make(training=training, pod={"ipus_per_replica": 2}))
    assert "an estimate for Mk2 IPUs with 918 MB" in text
    bars = [line.split() for line in text.splitlines() if "%" in line and line.strip().startswith("IPU ")]
    assert [(*line[:2], line[2][0]) for line in bars] == [("IPU", "0", "["), ("IPU", "1", "[")]
    single = planning.render_with_pipeline(make())
    assert single.count("  IPU 0  [") == 1
    assert "cycles" not in single
    described = json.loads(json.dumps(planning.describe_with_pipeline(make())))["memory"]
    assert described["is_estimate"]
    (ipu,) = described["ipus"]
    assert ipu["total"] == sum(ipu[name] for name in ("weights", "gradients", "optimizer", "activations", "code"))
    assert ipu["share"] == pytest.approx(ipu["total"] / described["bytes_per_ipu"], abs=1e-3)
    (ipu,) = inspect(make()).memory
    for share, figure, end in (
        (0.5, ".]  50 % (", " MB)"),
        (0.9, " 90 % (", "nearly full"),
        (1.0, "] 100 % (", "nearly full"),
        (1.001, "!] 100 % (", "DOES NOT FIT"),  # 0.1 % is less than a character
        (1.2, "!] 120 % (", "DOES NOT FIT"),
    ):
        monkeypatch.setattr("poptorch.device.compile.memory_estimate.MEMORY_BYTES", ipu.total / share)
        line = render_memory((ipu,)).splitlines()[-1]
        assert figure in line
        assert line.endswith(end)
        assert ("!" in line) == (share > 1)


def test_the_memory_of_a_host_for_snapshots_is_two_copies_of_weights_and_optimizer_state(make: Any) -> None:
    def size(**training: Any) -> int:
        plan = make(run={"snapshot_every": 2}, training=training)
        found: int = planning.describe_with_pipeline(plan)["memory"]["snapshot_bytes_per_host"]
        assert f" MB of each host for the snapshots ({found} bytes" in planning.render_with_pipeline(plan)
        return found

    (stage,) = inspect(make()).stages
    weights, state = 2 * stage.weight_bytes, 2 * 4 * stage.parameters
    assert (size(momentum=0.0), size(momentum=0.9, ema=0.9)) == (weights, 2 * weights + state)
    assert size(optimizer="adamw") == weights + 2 * state


def test_the_memory_of_a_host_for_standbys_is_that_of_a_forked_process_and_its_data_for_each(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(plan: Plan) -> Tuple[Optional[int], str]:
        size = planning.describe_with_pipeline(plan)["memory"]["standby_bytes_per_host"]
        return size, planning.render_with_pipeline(plan)

    (tmp_path / "large_data.py").write_text(LARGE_DATA)
    monkeypatch.syspath_prepend(tmp_path)
    for standby, data, expected in (
        (1, {}, 100_000_000),
        (2, {}, 200_000_000),
        (2, {"dataset": "large_data:data"}, 2 * (100_000_000 + 60_000_000)),
    ):
        size, text = shown(make(run={"standby": standby}, data=data))
        assert size == expected
        assert f"  {expected // 10**6} MB of each host for the standbys ({expected} bytes, an estimate)" in text
    large_model = make(run={"standby": 1}, training={"model": "resnet18"})  # which a standby has not built
    assert shown(large_model)[0] == 100_000_000
    missing = from_values({"run": {"standby": 1}, "data": {"dataset": "cifar10", "data_dir": str(tmp_path)}})
    size, text = shown(make_plan(missing, LOCAL, facts_of(missing, is_dry=True), str(tmp_path)))
    assert size is None
    assert text.endswith("no estimate for the standbys: their data is not on this host")


def test_activations_are_those_of_the_micro_batch_and_blocks_of_a_user_model_must_be_valid(make: Any) -> None:
    memory = [inspect(make(training={"batch_size": size})).memory[0] for size in (8, 16)]
    assert (memory[1].activations, memory[1].weights) == (2 * memory[0].activations, memory[0].weights)
    own: Dict[str, object] = {"model": f"{__name__}:build_there_and_back", "gradient_accumulation": 3}
    refused(r"number of pipeline stages \(5\)", inspect, make(training=own, pod={"ipus_per_replica": 2}))


def test_a_model_that_fits_only_as_one_of_several_replicas_fits(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ipu = {"replicated_tensor_sharding": ["optimizer"], "sharding_min_elements": 0}
    training = {"model": "resnet14", "optimizer": "adamw", "batch_size": 1}
    plan = make(ipu=ipu, training=training, pod={"replicas": 4, "num_instances": 1})
    (needed,) = inspect(plan).memory
    body, code_share = needed.total - needed.code, needed.code / needed.available
    monkeypatch.setattr("poptorch.device.compile.memory_estimate.MEMORY_BYTES", 1.01 * body / (1 - code_share))
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    assert 0.98 < inspect(plan).memory[0].share < 1


def build_there_and_back(channels: int, classes: int) -> nn.Module:
    """IPU 0, IPU 1, IPU 0: three stages on two IPUs."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, classes))
    poptorch.BeginBlock(network[2], ipu_id=1)
    poptorch.BeginBlock(network[3], ipu_id=0)
    return network


def equal(stages: int, update: float = 0.0) -> List[StageCost]:
    """Return stages whose forward and backward take one unit each."""
    return [StageCost(1.0, 1.0, update, ipu) for ipu in range(stages)]


def picture(schedule: Any) -> List[str]:
    """Return one line per stage: f and b for forward and backward, x for both, u for the update, . for idle."""
    done: Dict[Tuple[int, int], Set[str]] = {}
    for cell in schedule.cells:
        done.setdefault((cell.stage, cell.cycle), set()).add(cell.what)
    letters = {place: LETTERS[tuple(sorted(what))] for place, what in done.items()}
    stages, cycles = range(len(schedule.stages)), range(schedule.cycles)
    return ["".join(letters[stage, cycle] for cycle in cycles) for stage in stages]


def test_pipelines_drawn_by_hand_have_each_micro_batch_forward_then_backward_once() -> None:
    schedule = pipelined(equal(1), 3)
    assert (picture(schedule), schedule.idle_share) == (["xxxu"], 0.0)
    assert schedule.sections == ("main", "main", "main", "update")
    schedule = pipelined(equal(2, update=0.5), 3)
    assert picture(schedule) == ["ffxbbu", ".xxx.u"]
    assert schedule.sections == ("ramp-up",) * 2 + ("main",) + ("ramp-down",) * 2 + ("update",)
    assert schedule.cycle_times == (1.0, 2.0, 2.0, 2.0, 1.0, 0.5)
    assert schedule.idle_share == pytest.approx(1 - 13 / 17)
    schedule = pipelined(equal(4), 7)
    assert picture(schedule) == ["ffffffxbbbbbbu", ".ffffxxxbbbb.u", "..ffxxxxxbb..u", "...xxxxxxx...u"]
    assert [schedule.sections.count(name) for name in ("ramp-up", "main", "ramp-down", "update")] == [6, 1, 6, 1]
    schedule = pipelined(equal(3), 8)
    for stage in range(3):
        for what in ("forward", "backward"):
            batches = [cell.micro_batch for cell in schedule.cells if (cell.stage, cell.what) == (stage, what)]
            assert batches == list(range(8))


def test_idle_shares_and_times_of_cycles() -> None:
    for stages, batches in ((1, 1), (2, 3), (4, 7), (4, 10), (8, 100)):
        schedule = pipelined(equal(stages), batches)
        work, depth = batches + 2 * stages - 2, 2 * stages - 1
        assert (schedule.cycles, schedule.sections.count("main")) == (work + 1, batches - depth + 1)
        assert schedule.idle_share == pytest.approx(1 - 2 * batches / sum(schedule.cycle_times))
    for stages, batches, times, idle in (
        # The slowest IPU determines the time.
        ([StageCost(3.0, 0.0, 0.0, 0), StageCost(1.0, 0.0, 0.0, 1)], 3, (3.0, 3.0, 3.0, 1.0, 0.0, 0.0), 1 - 12 / 20),
        # Stages on one IPU run one after the other.
        ([StageCost(1.0, 0.0, 0.0, ipu) for ipu in (0, 1, 0)], 5, (1, 1, 2, 2, 2, 1, 1, 0, 0, 0), 1 - 15 / 20),
    ):
        schedule = pipelined(stages, batches)
        assert (schedule.cycle_times, schedule.idle_share) == (times, pytest.approx(idle))


@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 3), (3, 7), (4, 20)])
def test_one_sharded_stage_works_at_a_time(stages: int, batches: int) -> None:
    schedule = sharded(equal(stages), batches)
    assert (schedule.time, schedule.cycles) == (2 * batches * stages, schedule.time + 1)
    assert schedule.idle_share == pytest.approx(1 - 1 / stages)
    assert picture(sharded(equal(2), 2)) == ["f..bf..bu", ".fb..fb.u"]  # backward before the next micro-batch


def test_recomputation_and_the_comparison() -> None:
    costs = {cell.stage: cell.cost for cell in pipelined(equal(2), 3, recompute=True).cells if cell.what == "backward"}
    assert costs == {0: 2.0, 1: 1.0}
    both = compare_strategies(equal(2), 8)
    assert set(both) == {"sharded", "pipelined"}
    assert both["pipelined"].idle_share < both["sharded"].idle_share
    assert set(compare_strategies(equal(2), 2)) == {"sharded"}
    for make, batches in ((pipelined, 2), (sharded, 0)):
        with pytest.raises(ValueError, match=f"got {batches}"):
            make(equal(2), batches)


def test_the_numbers_of_many_micro_batches_have_a_space_between_them() -> None:
    schedule = pipelined(equal(2), 2048)
    lines = pipeline_table._schedule_lines(schedule, 2048, schedule)
    assert lines[3].split()[-4:] == ["2045", "2046", "2047", "U"]
    assert len({len(line) for line in lines[1:]}) == 1  # the columns are aligned
