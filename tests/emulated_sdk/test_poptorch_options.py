"""`poptorch.Options`: values, types, freezing, environment variables, and options as text."""

from __future__ import annotations

import copy
import json
import operator
import re

import poptorch
import pytest
import torch

from tests.support.poptorch_models import on_device, wrapped

Options = poptorch.Options


def test_an_option_can_be_assigned_and_has_its_type():
    opts = Options()
    opts.replication_factor = 4
    assert opts.outputMode(poptorch.OutputMode.All).toDict()["replication_factor"] == 4
    with pytest.raises(AssertionError, match="replication_factor"):
        opts.replication_factor = "2"
    with pytest.raises(AssertionError, match="no_such_option"):
        opts.no_such_option = 1
    with pytest.raises(AssertionError, match="no_such_option"):
        opts.set(no_such_option=1)
    assert not opts.exists("random_seed")
    opts.randomSeed(42)
    drawn = torch.rand(3)
    torch.manual_seed(42)
    assert opts.random_seed == 42
    assert torch.equal(drawn, torch.rand(3)), "the seed is also that of the host"


@pytest.mark.parametrize("copied", [copy.deepcopy, Options.clone])
def test_data_loader_freezes_options_but_not_a_copy(copied):
    opts = Options()
    poptorch.DataLoader(opts, torch.utils.data.TensorDataset(torch.arange(4)))
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        opts.deviceIterations(2)
    with pytest.raises(AttributeError, match="frozen"):
        opts.Training.gradientAccumulation(2)
    clone = copied(opts).deviceIterations(2)
    clone.Training.gradientAccumulation(2)
    clone.Precision.enableFloatingPointExceptions(True)
    assert (opts.device_iterations, clone.device_iterations) == (1, 2)


def test_output_mode_is_default_until_set_and_every_n_needs_a_period():
    opts = Options()
    assert opts.defaultOutputMode()
    for period in (None, 0, -1):
        with pytest.raises(AssertionError, match="output_return_period"):
            Options().outputMode(poptorch.OutputMode.EveryN, period)
    with pytest.raises(AssertionError, match="output mode"):
        opts.toDict()
    assert not opts.outputMode(poptorch.OutputMode.Sum).defaultOutputMode()


@pytest.mark.parametrize(
    ("setter", "arguments", "error", "message"),
    [
        ("inputReplicaGrouping", (2, poptorch.CommGroupType.All), ValueError, "All"),
        ("inputReplicaGrouping", (3, poptorch.CommGroupType.Consecutive), ValueError, "factor of replication_factor"),
        ("Precision.setPartialsType", (torch.bfloat16,), ValueError, "bfloat16"),
        ("Jit.traceModel", (True,), ValueError, "no longer supported"),
        ("Distributed.configureProcessId", (2, 2), ValueError, "2 is out of range for 2"),
        ("setAvailableMemoryProportion", ({"IPU0": 1.5},), AssertionError, "IPU0"),
        ("setAvailableMemoryProportion", ({"GPU0": 0.5},), AssertionError, "GPU0"),
        ("TensorLocations.numIOTiles", (31,), AssertionError, "31"),
        ("anchorMode", (poptorch.OutputMode.All,), AttributeError, "outputMode"),
    ],
)
def test_values_that_the_sdk_rejects_raise_error_at_the_setter(setter, arguments, error, message):
    opts = Options().replicationFactor(2)
    with pytest.raises(error, match=message):
        operator.attrgetter(setter)(opts)(*arguments)


def test_a_reduction_is_sum_or_mean_and_an_input_group_without_grouping_has_one_replica():
    with pytest.raises(ValueError, match="Sum"):
        Options().Training.accumulationAndReplicationReductionType(poptorch.ReductionType.NoReduction)
    assert Options().inputReplicaGrouping(2, poptorch.CommGroupType.NoGrouping).input_group_size == 1


def test_distributed_options_are_read_from_variables(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    opts = Options().replicationFactor(2).outputMode(poptorch.OutputMode.All)
    assert (opts.Distributed.processId, opts.Distributed.numProcesses) == (3, 4)
    assert opts.toDict()["num_distributed_processes"] == 4
    assert opts.Distributed.disable().numProcesses == 1
    monkeypatch.setenv("SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert opts.Distributed.setEnvVarNames("SIZE", "RANK").processId == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "first")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK='first' is not an integer"):
        Options()


def test_defaults_are_read_from_the_environment(monkeypatch):
    defaults = {"Training.gradientAccumulation": 4, "outputMode": ["OutputMode.EveryN", 2]}
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", json.dumps(defaults))
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "/some/where")
    opts = Options()
    assert opts.Training.gradient_accumulation == 4
    assert (opts.output_mode, opts.output_return_period) == (poptorch.OutputMode.EveryN, 2)
    assert opts._Popart.options["cachePath"] == "/some/where"


def test_a_file_has_setters_with_all_names_of_the_package(tmp_path):
    path = tmp_path / "options.txt"
    path.write_text(
        "# comment\n\ndeviceIterations(5)\nTraining.gradientAccumulation(3)\noutputMode(OutputMode.Sum)\n"
        "setExecutionStrategy(poptorch.ShardedExecution())\n"
        "TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))\n"
        "_Popart.set('hardwareInstrumentations', set([0, 1]))\n"
        "Precision.setPartialsType(torch.half)\n"
    )
    opts = Options().loadFromFile(str(path))
    assert (opts.device_iterations, opts.Training.gradient_accumulation) == (5, 3)
    assert opts.output_mode == poptorch.OutputMode.Sum
    assert opts._Popart.options["hardwareInstrumentations"] == {0, 1}
    assert opts._Popart.options["convolutionOptions"] == {"partialsType": "half"}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("deviceIterations(", "SyntaxError"),
        ("noSuchSetter(1)", "AttributeError"),
        ("deviceIterations(0)", "AssertionError"),
    ],
)
def test_invalid_line_of_a_file_raises_error_with_its_number(tmp_path, line, error):
    path = tmp_path / "options.txt"
    path.write_text(f"deviceIterations(1)\n\n{line}\n")
    expected = f"{error} at line 2 of options.txt: .*> options.{re.escape(line)}"
    with pytest.raises(poptorch.ConfigFileError, match=f"(?s){expected}"):
        Options().loadFromFile(str(path))


def test_json_with_setters_enumeration_members_and_dtypes():
    opts = Options().from_json(
        '{"Precision.setPartialsType": "torch.half", "outputMode": "poptorch.OutputMode.All",'
        ' "setAvailableMemoryProportion": {"IPU0": 0.1}, "sourceLocationExcludes": [["a", "b"]]}'
    )
    assert opts._Popart.options["partialsTypeMatMuls"] == "half"
    assert opts.output_mode == poptorch.OutputMode.All
    assert (opts.available_memory_proportion, opts._source_location_excludes) == ({0: 0.1}, ["a", "b"])


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[1]", ValueError, "an object"),
        ("{", ValueError, "line 1"),
        ('{"noSuch": 1}', AttributeError, "noSuch"),
        ('{"device_iterations": 2}', AttributeError, "not a setter"),
        ('{"deviceIterations": "2"}', AssertionError, "device_iterations"),
    ],
)
def test_invalid_json_raises_error(text, error, message):
    with pytest.raises(error, match=message):
        Options().from_json(text)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("typo", 1, "Unknown uint64 option typo"),
        ("enableOutlining", 2, "Unknown uint64 option enableOutlining"),
        ("enableOutlining", None, "Unknown value type NoneType for option enableOutlining"),
        ("patterns", {"PadSum": True}, "patterns_level"),
        (None, {"PadSum": True, "NoSuchPattern": True}, "Unknown pattern 'NoSuchPattern'"),
    ],
)
def test_unknown_option_of_the_compiler_is_an_error_at_compilation(name, value, error):
    opts = Options()
    if name:
        opts._Popart.set(name, value)
    else:
        opts._Popart.setPatterns(value)
    with pytest.raises(poptorch.Error, match=error):
        poptorch.inferenceModel(torch.nn.ReLU(), opts).compile(torch.zeros(1))


def test_options_of_the_compiler_take_any_key_and_value():
    opts = Options().enableSyntheticData(2).enableStableNorm(None)
    opts.Precision.enableStochasticRounding(None)
    assert opts._Popart.options["syntheticDataMode"] == 2
    assert opts._Popart.options["enableStochasticRounding"] is None
    opts._Popart.set("accumulateOuterFragmentSettings.schedule", 1)
    opts._Popart.setEngineOptions({"target.hostSyncTimeout": "3000"})
    assert opts._Popart.options["engineOptions"] == {"target.hostSyncTimeout": "3000"}
    opts = Options()
    opts._Popart.set("syntheticDataMode", 2)
    assert on_device(torch.relu, torch.ones(2), opts=opts).tolist() == [0, 0]


def test_options_of_groups_are_attributes_by_their_names_in_the_sdk():
    opts, strategies = Options().replicationFactor(4), poptorch.MeanReductionStrategy
    assert repr(opts).startswith("Options(replication_factor=4, ")
    assert "Training=_TrainingOptions(gradient_accumulation=1, " in repr(opts)
    assert repr(opts) != repr(Options()) == repr(Options())
    opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    assert opts.TensorLocations.location_optimizer == {"onChip": 0}
    assert poptorch.TensorLocationSettings().useOnChipStorage(True).useOnChipStorage(None).toDict() == {}
    assert opts.Training.meanAccumulationAndReplicationReductionStrategy == strategies.Post
    training = wrapped(torch.nn.Linear(2, 2), opts, accum_type=torch.half)
    assert training.options.Training.meanAccumulationAndReplicationReductionStrategy == strategies.Running
    assert opts.Training.meanAccumulationAndReplicationReductionStrategy == strategies.Post


def test_offline_target_sets_connection_type_never():
    opts = Options().useOfflineIpuTarget()
    assert opts.connection_type == poptorch.ConnectionType.Never
    with pytest.raises(AssertionError, match="Never"):
        on_device(torch.relu, torch.zeros(1), opts=opts)


def test_deprecated_options_warn(caplog):
    Options().Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.Default)
    assert "[Deprecated] Do not call options.Precision.halfFloatCasting()" in caplog.text
