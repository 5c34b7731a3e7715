"""Options: values, types, freezing, environment, text (contract 1.1 to 1.7)."""

from __future__ import annotations

import json

import poptorch
import pytest
import torch


def test_setters_chain_and_values_read_as_attributes():
    opts = poptorch.Options().deviceIterations(3).replicationFactor(2)
    opts.Training.gradientAccumulation(4)
    assert (opts.device_iterations, opts.replication_factor, opts.Training.gradient_accumulation) == (3, 2, 4)


def test_an_existing_option_can_be_assigned():
    opts = poptorch.Options()
    opts.replication_factor = 4
    assert opts.toDict()["replication_factor"] == 4


def test_a_value_of_another_type_is_refused():
    with pytest.raises(AssertionError, match="replication_factor"):
        poptorch.Options().replication_factor = "2"


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(AssertionError, match="no_such_option"):
        poptorch.Options().set(no_such_option=1)


def test_the_seed_is_absent_until_set_and_seeds_the_host():
    opts = poptorch.Options()
    assert not opts.exists("random_seed")
    opts.randomSeed(42)
    drawn = torch.rand(3)
    torch.manual_seed(42)
    assert opts.random_seed == 42
    assert torch.equal(drawn, torch.rand(3))


def test_a_data_loader_freezes_options_and_a_clone_is_free():
    opts = poptorch.Options()
    poptorch.DataLoader(opts, torch.utils.data.TensorDataset(torch.arange(4)))
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        opts.deviceIterations(2)
    with pytest.raises(AttributeError, match="frozen"):
        opts.Training.gradientAccumulation(2)
    clone = opts.clone().deviceIterations(2)
    clone.Training.gradientAccumulation(2)
    assert (opts.device_iterations, clone.device_iterations) == (1, 2)


@pytest.mark.parametrize("period", [None, 0, -1])
def test_every_n_needs_a_period(period):
    with pytest.raises(AssertionError, match="output_return_period"):
        poptorch.Options().outputMode(poptorch.OutputMode.EveryN, period)


def test_the_output_mode_is_default_until_chosen():
    opts = poptorch.Options()
    assert opts.defaultOutputMode()
    assert not opts.outputMode(poptorch.OutputMode.Sum).defaultOutputMode()


def test_input_groups_may_not_span_all_replicas():
    with pytest.raises(ValueError, match="All"):
        poptorch.Options().inputReplicaGrouping(2, poptorch.CommGroupType.All)
    opts = poptorch.Options().inputReplicaGrouping(2, poptorch.CommGroupType.NoGrouping)
    assert opts.input_group_size == 1


def test_gradients_must_reduce_and_partials_are_float_or_half():
    with pytest.raises(ValueError, match="Sum"):
        poptorch.Options().Training.accumulationAndReplicationReductionType(poptorch.ReductionType.NoReduction)
    with pytest.raises(ValueError, match="bfloat16"):
        poptorch.Options().Precision.setPartialsType(torch.bfloat16)


def test_mpirun_makes_options_distributed(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    distributed = poptorch.Options().Distributed
    assert (distributed.processId, distributed.numProcesses) == (3, 4)
    assert distributed.disable().numProcesses == 1


def test_other_variables_can_say_which_process_this_is(monkeypatch):
    monkeypatch.setenv("SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert poptorch.Options().Distributed.setEnvVarNames("SIZE", "RANK").processId == 1


def test_a_process_id_beyond_the_processes_is_refused():
    with pytest.raises(ValueError, match="2 is out of range for 2"):
        poptorch.Options().Distributed.configureProcessId(2, 2)


def test_defaults_come_from_the_environment(monkeypatch):
    defaults = {"Training.gradientAccumulation": 4, "outputMode": ["OutputMode.EveryN", 2]}
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", json.dumps(defaults))
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "/some/where")
    opts = poptorch.Options()
    assert opts.Training.gradient_accumulation == 4
    assert (opts.output_mode, opts.output_return_period) == (poptorch.OutputMode.EveryN, 2)
    assert opts.cache_path == "/some/where"


def test_a_file_of_setters_is_applied(tmp_path):
    path = tmp_path / "options.txt"
    path.write_text("# comment\n\ndeviceIterations(5)\nTraining.gradientAccumulation(3)\noutputMode(OutputMode.Sum)\n")
    opts = poptorch.Options().loadFromFile(str(path))
    assert (opts.device_iterations, opts.Training.gradient_accumulation) == (5, 3)
    assert opts.output_mode == poptorch.OutputMode.Sum


@pytest.mark.parametrize("line", ["deviceIterations(", "noSuchSetter(1)", "deviceIterations(0)"])
def test_a_bad_line_of_a_file_is_named(tmp_path, line):
    path = tmp_path / "options.txt"
    path.write_text(f"\n{line}\n")
    with pytest.raises(poptorch.ConfigFileError, match="line 2"):
        poptorch.Options().loadFromFile(str(path))


def test_compiler_options_accept_any_key():
    opts = poptorch.Options()
    opts._Popart.set("accumulateOuterFragmentSettings.schedule", 1)
    opts._Popart.setEngineOptions({"target.hostSyncTimeout": "3000"})
    assert opts._Popart.options["engineOptions"] == {"target.hostSyncTimeout": "3000"}


def test_tensor_locations_are_validated_and_kept():
    opts = poptorch.Options()
    opts.TensorLocations.numIOTiles(64)
    opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    assert opts.toDict()["location_optimizer"] == {"onChip": False}
    with pytest.raises(AssertionError, match="31"):
        opts.TensorLocations.numIOTiles(31)


def test_an_offline_target_never_connects():
    opts = poptorch.Options().useOfflineIpuTarget()
    assert opts.connection_type == poptorch.ConnectionType.Never
    model = poptorch.inferenceModel(torch.nn.ReLU(), opts)
    with pytest.raises(AssertionError, match="Never"):
        model(torch.zeros(1))


def test_a_memory_proportion_is_a_share():
    with pytest.raises(AssertionError, match="IPU0"):
        poptorch.Options().setAvailableMemoryProportion({"IPU0": 1.5})
    with pytest.raises(AssertionError, match="GPU0"):
        poptorch.Options().setAvailableMemoryProportion({"GPU0": 0.5})


def test_deprecated_options_warn_only():
    with pytest.warns(DeprecationWarning, match="halfFloatCasting"):
        poptorch.Options().Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.Default)
