"""The file `ipu_config.json` of optimum-graphcore, as values of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Tuple

from raypod.errors import ConfigError
from raypod.system.command_line import counted, suggestion

KEY = "ipu_config"  # of the section `ipu`
Values = Dict[str, Dict[str, Any]]
_SAME = {  # the names of values that are taken as they are
    "seed": "training.seed",
    "gradient_accumulation_steps": "training.gradient_accumulation",
    "device_iterations": "training.device_iterations",
    "inference_device_iterations": "training.evaluation_iterations",
    "replication_factor": "pod.replicas",
    "ipus_per_replica": "pod.ipus_per_replica",
    "executable_cache_dir": "pod.executable_cache_path",
    "auto_loss_scaling": "ipu.automatic_loss_scaling",
    "matmul_proportion": "ipu.available_memory_proportion",
}
_OPTIMIZER = {  # of the state of the optimizer
    "optimizer_state_offchip": "ipu.off_chip",
    "replicated_tensor_sharding": "ipu.replicated_tensor_sharding",
}
# What changes no result: settings of the inference alone, which has those of the training here, and of the memory.
_WITHOUT_EFFECT = (
    *("inference_layers_per_ipu", "inference_ipus_per_replica", "inference_replication_factor"),
    *("inference_matmul_proportion", "inference_parallelize_kwargs", "explicit_ir_inference"),
    *("inference_embedding_serialization_factor", "inference_serialized_embedding_splits_per_ipu"),
    *("inference_projection_serialization_factor", "inference_serialized_projection_splits_per_ipu"),
    *("embedding_serialization_factor", "projection_serialization_factor", "recompute_checkpoint_every_layer"),
    *("output_mode", "optimum_version", "transformers_version", "profile_dir", "use_popdist", "name_or_path"),
    "_name_or_path",
)
# What would place modules otherwise than raypod does; only these values can be used.
_REFUSED: Dict[str, Tuple[Any, ...]] = {
    "serialized_embedding_splits_per_ipu": (None,),
    "serialized_projection_splits_per_ipu": (None,),
    "parallelize_kwargs": (None, {}),
    "execute_encoder_on_cpu_for_generation": (False,),
    "sharded_execution_for_inference": (None, False),
    "enable_half_first_order_momentum": (None, False),
}
_OWN = ("layers_per_ipu", "enable_half_partials")
_STAGES = ("layers_per_ipu", "pipeline_splits", "pipeline_balance")


def expand(values: Values) -> List[str]:
    """Replace `ipu.ipu_config` of a configuration by the settings of that file, where it has none of its own.

    Returns:
        Lines for the user: what of the file has no effect.

    Raises:
        ConfigError: the file cannot be read, or has a key that is unknown or cannot be followed.
    """
    path = values.get("ipu", {}).pop(KEY, None)
    if path is None:
        return []
    content = _read(Path(str(path)).expanduser())
    found, unused = _settings(f"--ipu-config {path}", content)
    has_stages = any(values.get("training", {}).get(key) is not None for key in _STAGES)
    for name, value in found.items():
        section, _, key = name.partition(".")
        if not (has_stages and key in _STAGES):
            values.setdefault(section, {}).setdefault(key, value)
    return [f"--ipu-config {path}: {counted(len(unused), 'key')} without effect: {', '.join(unused)}"] if unused else []


def _read(path: Path) -> Dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--ipu-config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--ipu-config {path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--ipu-config {path} is no JSON object")
    return content


def _settings(flag: str, content: Dict[str, Any]) -> Tuple[Dict[str, Any], List[str]]:
    """Return values by section.key, and the keys without effect."""
    found: Dict[str, Any] = {}
    known = (*_SAME, *_OPTIMIZER, *_WITHOUT_EFFECT, *_REFUSED, *_OWN)
    for key, given in content.items():
        value = given.get("default") if isinstance(given, dict) and key != "parallelize_kwargs" else given
        if key not in known:
            raise ConfigError(f"{flag}: optimum-graphcore has no key {key!r}{suggestion(key, known)}")
        if key in _REFUSED and value not in _REFUSED[key]:
            raise ConfigError(f"{flag}: {key} = {value!r} has no counterpart here; remove it from the file")
        if key in _SAME and value not in (None, "", "disabled"):
            found[_SAME[key]] = value
        elif key in _OPTIMIZER and value:
            found[_OPTIMIZER[key]] = ["optimizer"]
        elif key == "enable_half_partials" and value is not None:
            found["ipu.partials"] = "half" if value else "float"
    if found.get("pod.replicas") == 1:  # there is nothing to divide
        found.pop("ipu.replicated_tensor_sharding", None)
    found.update(_stages(flag, content))
    return found, [key for key in content if key in _WITHOUT_EFFECT]


def _stages(flag: str, content: Dict[str, Any]) -> Dict[str, Any]:
    """Return the layers of each IPU, or that the stages are balanced: a -1 for every IPU."""
    layers = content.get("layers_per_ipu")
    if layers is None:
        return {}
    if not isinstance(layers, list) or not all(isinstance(each, int) for each in layers):
        raise ConfigError(f"{flag}: layers_per_ipu = {layers!r} must be a list of whole numbers")
    ipus = content.get("ipus_per_replica") or len(layers)
    if -1 in layers and len(set(layers)) > 1:
        raise ConfigError(f"{flag}: layers_per_ipu = {layers} has -1 beside numbers: write the number of each IPU")
    found: Dict[str, Any] = {"pod.ipus_per_replica": ipus}
    if ipus > 1:
        is_balanced = -1 in layers
        found["training.pipeline_balance" if is_balanced else "training.layers_per_ipu"] = (
            "parameters" if is_balanced else layers
        )
    return found
