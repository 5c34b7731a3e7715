"""`poptorch.Options`: values, types, freezing, environment variables, and options as text."""

from __future__ import annotations

import copy
import json
import re

import poptorch
import pytest
import torch


def test_setters_chain_and_attributes_return_values():
    opts = poptorch.Options().deviceIterations(3).replicationFactor(2)
    opts.Training.gradientAccumulation(4)
    assert (opts.device_iterations, opts.replication_factor, opts.Training.gradient_accumulation) == (3, 2, 4)


def test_option_can_be_assigned():
    opts = poptorch.Options()
    opts.replication_factor = 4
    assert opts.outputMode(poptorch.OutputMode.All).toDict()["replication_factor"] == 4
    with pytest.raises(AssertionError, match="no_such_option"):
        opts.no_such_option = 1


def test_value_of_another_type_raises_error():
    with pytest.raises(AssertionError, match="replication_factor"):
        poptorch.Options().replication_factor = "2"


def test_unknown_option_raises_error():
    with pytest.raises(AssertionError, match="no_such_option"):
        poptorch.Options().set(no_such_option=1)


def test_random_seed_has_no_default_and_seeds_the_host():
    opts = poptorch.Options()
    assert not opts.exists("random_seed")
    opts.randomSeed(42)
    drawn = torch.rand(3)
    torch.manual_seed(42)
    assert opts.random_seed == 42
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("copied", [copy.deepcopy, poptorch.Options.clone])
def test_data_loader_freezes_options_but_not_a_copy(copied):
    opts = poptorch.Options()
    poptorch.DataLoader(opts, torch.utils.data.TensorDataset(torch.arange(4)))
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        opts.deviceIterations(2)
    with pytest.raises(AttributeError, match="frozen"):
        opts.Training.gradientAccumulation(2)
    clone = copied(opts).deviceIterations(2)
    clone.Training.gradientAccumulation(2)
    clone.Precision.enableFloatingPointExceptions(True)
    assert (opts.device_iterations, clone.device_iterations) == (1, 2)


@pytest.mark.parametrize("period", [None, 0, -1])
def test_every_n_needs_a_period(period):
    with pytest.raises(AssertionError, match="output_return_period"):
        poptorch.Options().outputMode(poptorch.OutputMode.EveryN, period)


def test_output_mode_is_default_until_set():
    opts = poptorch.Options()
    assert opts.defaultOutputMode()
    assert not opts.outputMode(poptorch.OutputMode.Sum).defaultOutputMode()


def test_input_group_type_all_raises_error():
    with pytest.raises(ValueError, match="All"):
        poptorch.Options().inputReplicaGrouping(2, poptorch.CommGroupType.All)
    opts = poptorch.Options().inputReplicaGrouping(2, poptorch.CommGroupType.NoGrouping)
    assert opts.input_group_size == 1


def test_invalid_reduction_and_partials_type_raise_error():
    with pytest.raises(ValueError, match="Sum"):
        poptorch.Options().Training.accumulationAndReplicationReductionType(poptorch.ReductionType.NoReduction)
    with pytest.raises(ValueError, match="bfloat16"):
        poptorch.Options().Precision.setPartialsType(torch.bfloat16)


def test_distributed_options_are_read_from_mpirun_variables(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    distributed = poptorch.Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (3, 4)
    assert distributed.disable().numProcesses == 1


def test_set_env_var_names(monkeypatch):
    monkeypatch.setenv("SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert poptorch.Options().Distributed.setEnvVarNames("SIZE", "RANK").processId == 1


def test_process_id_out_of_range_raises_error():
    with pytest.raises(ValueError, match="2 is out of range for 2"):
        poptorch.Options().Distributed.configureProcessId(2, 2)


def test_defaults_are_read_from_the_environment(monkeypatch):
    defaults = {"Training.gradientAccumulation": 4, "outputMode": ["OutputMode.EveryN", 2]}
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", json.dumps(defaults))
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "/some/where")
    opts = poptorch.Options()
    assert opts.Training.gradient_accumulation == 4
    assert (opts.output_mode, opts.output_return_period) == (poptorch.OutputMode.EveryN, 2)
    assert opts._Popart.options["cachePath"] == "/some/where"


def test_load_from_file(tmp_path):
    path = tmp_path / "options.txt"
    path.write_text("# comment\n\ndeviceIterations(5)\nTraining.gradientAccumulation(3)\noutputMode(OutputMode.Sum)\n")
    opts = poptorch.Options().loadFromFile(str(path))
    assert (opts.device_iterations, opts.Training.gradient_accumulation) == (5, 3)
    assert opts.output_mode == poptorch.OutputMode.Sum


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
        poptorch.Options().loadFromFile(str(path))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("typo", 1, "Unknown uint64 option typo"),
        ("enableOutlining", 2, "Unknown uint64 option enableOutlining"),
        ("enableOutlining", None, "Unknown value type NoneType for option enableOutlining"),
        ("patterns", {"PadSum": True}, "patterns_level"),
    ],
)
def test_unknown_option_of_the_compiler_is_an_error_at_compilation(name, value, error):
    opts = poptorch.Options()
    opts._Popart.set(name, value)
    with pytest.raises(poptorch.Error, match=error):
        poptorch.inferenceModel(torch.nn.ReLU(), opts).compile(torch.zeros(1))


def test_unknown_pattern_is_an_error_at_compilation():
    opts = poptorch.Options()
    opts._Popart.setPatterns({"PadSum": True, "NoSuchPattern": True})
    with pytest.raises(poptorch.Error, match="Unknown pattern 'NoSuchPattern'"):
        poptorch.inferenceModel(torch.nn.ReLU(), opts).compile(torch.zeros(1))


def test_setters_of_the_compiler_take_any_value():
    opts = poptorch.Options().enableSyntheticData(2).enableStableNorm(None)
    opts.Precision.enableStochasticRounding(None)
    assert opts._Popart.options["syntheticDataMode"] == 2
    assert opts._Popart.options["enableStochasticRounding"] is None


def test_option_of_the_compiler_has_the_effect_of_its_setter():
    opts = poptorch.Options()
    opts._Popart.set("syntheticDataMode", 2)
    assert torch.equal(poptorch.inferenceModel(torch.nn.ReLU(), opts)(torch.ones(2)), torch.zeros(2))


def test_repr_has_all_values():
    opts = poptorch.Options().replicationFactor(4)
    opts.Training.gradientAccumulation(3)
    assert repr(opts).startswith("Options(replication_factor=4, ")
    assert "Training=_TrainingOptions(gradient_accumulation=3, " in repr(opts)
    assert repr(opts) != repr(poptorch.Options()) == repr(poptorch.Options())


def test_options_of_groups_are_attributes_by_their_names_in_the_sdk():
    opts = poptorch.Options()
    assert opts.Training.meanAccumulationAndReplicationReductionStrategy == poptorch.MeanReductionStrategy.Post
    model = torch.nn.Linear(2, 2)
    half = poptorch.optim.SGD(model.parameters(), lr=0.1, accum_type=torch.half)
    training = poptorch.trainingModel(model, opts, half)
    assert training.options.Training.meanAccumulationAndReplicationReductionStrategy == (
        poptorch.MeanReductionStrategy.Running
    )
    assert opts.Training.meanAccumulationAndReplicationReductionStrategy == poptorch.MeanReductionStrategy.Post


def test_values_that_the_sdk_rejects_raise_error_at_the_setter():
    opts = poptorch.Options().replicationFactor(2)
    with pytest.raises(ValueError, match="factor of replication_factor"):
        opts.inputReplicaGrouping(3, poptorch.CommGroupType.Consecutive)
    with pytest.raises(ValueError, match="no longer supported"):
        opts.Jit.traceModel(True)
    with pytest.raises(AssertionError, match="output mode"):
        opts.toDict()


def test_popart_options_accept_any_key():
    opts = poptorch.Options()
    opts._Popart.set("accumulateOuterFragmentSettings.schedule", 1)
    opts._Popart.setEngineOptions({"target.hostSyncTimeout": "3000"})
    assert opts._Popart.options["engineOptions"] == {"target.hostSyncTimeout": "3000"}


def test_tensor_locations_are_validated_and_stored():
    opts = poptorch.Options()
    opts.TensorLocations.numIOTiles(64)
    opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    assert opts.TensorLocations.location_optimizer == {"onChip": 0}
    assert poptorch.TensorLocationSettings().useOnChipStorage(True).useOnChipStorage(None).toDict() == {}
    with pytest.raises(AssertionError, match="31"):
        opts.TensorLocations.numIOTiles(31)


def test_offline_target_sets_connection_type_never():
    opts = poptorch.Options().useOfflineIpuTarget()
    assert opts.connection_type == poptorch.ConnectionType.Never
    model = poptorch.inferenceModel(torch.nn.ReLU(), opts)
    with pytest.raises(AssertionError, match="Never"):
        model(torch.zeros(1))


def test_memory_proportion_must_be_in_0_to_1():
    with pytest.raises(AssertionError, match="IPU0"):
        poptorch.Options().setAvailableMemoryProportion({"IPU0": 1.5})
    with pytest.raises(AssertionError, match="GPU0"):
        poptorch.Options().setAvailableMemoryProportion({"GPU0": 0.5})


def test_deprecated_options_warn(caplog):
    poptorch.Options().Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.Default)
    assert "[Deprecated] Do not call options.Precision.halfFloatCasting()" in caplog.text
