"""`poptorch.Options`: values, types, freezing, environment variables, and options as text."""

from __future__ import annotations

import copy
import json

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
    assert opts.toDict()["replication_factor"] == 4


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
    assert opts.cache_path == "/some/where"


def test_load_from_file(tmp_path):
    path = tmp_path / "options.txt"
    path.write_text("# comment\n\ndeviceIterations(5)\nTraining.gradientAccumulation(3)\noutputMode(OutputMode.Sum)\n")
    opts = poptorch.Options().loadFromFile(str(path))
    assert (opts.device_iterations, opts.Training.gradient_accumulation) == (5, 3)
    assert opts.output_mode == poptorch.OutputMode.Sum


@pytest.mark.parametrize("line", ["deviceIterations(", "noSuchSetter(1)", "deviceIterations(0)"])
def test_invalid_line_of_a_file_raises_error_with_its_number(tmp_path, line):
    path = tmp_path / "options.txt"
    path.write_text(f"\n{line}\n")
    with pytest.raises(poptorch.ConfigFileError, match="line 2"):
        poptorch.Options().loadFromFile(str(path))


def test_popart_options_accept_any_key():
    opts = poptorch.Options()
    opts._Popart.set("accumulateOuterFragmentSettings.schedule", 1)
    opts._Popart.setEngineOptions({"target.hostSyncTimeout": "3000"})
    assert opts._Popart.options["engineOptions"] == {"target.hostSyncTimeout": "3000"}


def test_tensor_locations_are_validated_and_stored():
    opts = poptorch.Options()
    opts.TensorLocations.numIOTiles(64)
    opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    assert opts.toDict()["location_optimizer"] == {"onChip": False}
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


def test_deprecated_options_warn():
    with pytest.warns(DeprecationWarning, match="halfFloatCasting"):
        poptorch.Options().Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.Default)
