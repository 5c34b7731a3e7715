"""Settings of optimum-graphcore's `ipu_config.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import pytest

from raypod.errors import ConfigError
from raypod.plan import resolve

# As Graphcore has published one for BERT.
BERT = {
    "embedding_serialization_factor": 2,
    "enable_half_partials": True,
    "executable_cache_dir": "./exe_cache",
    "gradient_accumulation_steps": 16,
    "inference_device_iterations": 5,
    "inference_replication_factor": {"default": 4, "pod16": 4},
    "ipus_per_replica": 4,
    "layers_per_ipu": [3, 3, 3, 3],
    "matmul_proportion": [0.22, 0.2, 0.2, 0.25],
    "optimizer_state_offchip": True,
    "optimum_version": "1.0.0",
    "recompute_checkpoint_every_layer": True,
    "replicated_tensor_sharding": True,
    "replication_factor": {"default": 2, "pod16": 4},
    "seed": 7,
    "transformers_version": "4.20.0",
}


def config_of(folder: Path, content: Any, given: Dict[str, Any]) -> Any:
    path = folder / "ipu_config.json"
    path.write_text(json.dumps(content))
    values, source = resolve.combine({"ipu.ipu_config": str(path), **given}, None)
    return resolve.from_values(values, source)


def test_the_settings_of_the_file_are_those_of_the_configuration(tmp_path: Path, capsys: Any) -> None:
    config = config_of(tmp_path, BERT, {"training.seed": 1})
    pod, training, ipu = config.pod, config.training, config.ipu
    assert (pod.replicas, pod.ipus_per_replica, pod.executable_cache_path) == (2, 4, "./exe_cache")
    assert (training.gradient_accumulation, training.layers_per_ipu) == (16, (3, 3, 3, 3))
    assert (training.evaluation_iterations, training.seed) == (5, 1)  # the command line takes precedence
    assert ipu.available_memory_proportion == (0.22, 0.2, 0.2, 0.25)
    assert (ipu.partials, ipu.off_chip, ipu.replicated_tensor_sharding) == ("half", ("optimizer",), ("optimizer",))
    assert ipu.ipu_config is None
    shown = capsys.readouterr().err
    assert "5 keys without effect: embedding_serialization_factor, inference_replication_factor, optimum" in shown


def test_stages_of_the_command_line_take_precedence(tmp_path: Path) -> None:
    training = config_of(tmp_path, BERT, {"training.pipeline_balance": "time"}).training
    assert (training.layers_per_ipu, training.pipeline_balance) == (None, "time")
    training = config_of(tmp_path, {"layers_per_ipu": [-1], "ipus_per_replica": 2}, {}).training
    assert (training.layers_per_ipu, training.pipeline_balance) == (None, "parameters")
    config = config_of(tmp_path, {"layers_per_ipu": [12], "replication_factor": 1, "matmul_proportion": 0.3}, {})
    assert (config.pod.ipus_per_replica, config.training.layers_per_ipu) == (1, None)
    assert config.ipu.available_memory_proportion == (0.3,)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"layer_per_ipu": [1]}, "has no key 'layer_per_ipu'; did you mean layers_per_ipu?"),
        ({"layers_per_ipu": [1, -1]}, r"layers_per_ipu = \[1, -1\] has -1 beside numbers"),
        ({"serialized_embedding_splits_per_ipu": [1, 1]}, "serialized_embedding_splits_per_ipu = .* no counterpart"),
        ([], "is no JSON object"),
    ],
)
def test_a_key_that_cannot_be_followed_is_an_error(content: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(tmp_path, content, {})
    with pytest.raises(ConfigError, match="--ipu-config none.json: No such file"):
        resolve.combine({"ipu.ipu_config": "none.json"}, None)
