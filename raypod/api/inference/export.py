"""`raypod export`: the model of a checkpoint as a file, whose outputs are compared with those of the network."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import torch

from raypod.api.inference import checkpoints, formats, settings
from raypod.api.inference.checkpoints import PathLike, Weights
from raypod.api.inference.formats import Exported, Loaded, completed
from raypod.api.inference.network import HostNetwork, open_network
from raypod.errors import ConfigError, RunError
from raypod.plan.config import HF_TASKS, Config
from raypod.plan.plan import short_name
from raypod.training.checkpoint import tensors

TOLERANCE = 1e-4
_CHECKED_SAMPLES = 8
_FORMATS: Dict[str, Tuple[str, Callable[[Path, Exported, Dict[str, str]], Loaded]]] = {
    "safetensors": (".safetensors", formats.safetensors),
    "torchscript": (".pt", formats.torchscript),
    "onnx": (".onnx", formats.onnx),
    "hf": ("", formats.hf),
}


def export(
    run: PathLike,
    format: str,
    output: Optional[PathLike] = None,
    checkpoint: Optional[str] = None,
    ema: Optional[bool] = None,
    pixels: bool = False,
    tolerance: float = TOLERANCE,
    **changes: Any,
) -> Dict[str, Any]:
    """Write the model of a checkpoint to a file, and compare the file's outputs with those of the network.

    Args:
        run: a run folder, or a checkpoint in it.
        format: "safetensors" (the weights), "torchscript" or "onnx" (the network in float32, for any batch size), or
            "hf" (the folder of a model of transformers, which `from_pretrained` reads).
        output: the file, which is replaced, or the folder, which must not exist. Default:
            `<model>-update-<n>` with the format's suffix, in the run folder.
        checkpoint, ema: as of `evaluate`.
        pixels: torchscript and onnx: the model gets images as uint8, and normalizes and enlarges them itself.
        tolerance: the largest difference of an output, relative to the largest output.
        changes: where the data is: `dataset`, `data_dir`, `cache_dir`, ...

    Returns:
        `output`, `format`, `bytes`, `max_difference` (absolute), `checked_samples`, `inputs`, `checkpoint`, `update`.

    Raises:
        UserError: there is no such run or checkpoint, or its data cannot be used.
        RunError: the network cannot be exported, or the outputs differ by more than the tolerance; nothing is written.
    """
    formats.check(format, pixels, tolerance)
    return export_run(*settings.opened(run, checkpoint, ema, changes), format, output, pixels, tolerance)


def export_run(
    run: checkpoints.Run,
    weights: Weights,
    changes: Mapping[str, Any],
    kind: str,
    output: Optional[PathLike],
    pixels: bool,
    tolerance: float,
) -> Dict[str, Any]:
    """Return the result of `export`; `changes` are by section.key."""
    formats.check(kind, pixels, tolerance)
    suffix, write = _FORMATS[kind]
    if kind == "hf" and run.config.task.name not in HF_TASKS:
        raise ConfigError(f"--format hf: the task {run.config.task.name} trains no model of transformers")
    config = settings.host_config(run, changes)
    if pixels:
        config = config.model_copy(update={"data": config.data.model_copy(update={"eight_bit_io": True})})
    path = Path(output) if output is not None else run.outputs / f"{_stem(config, weights)}{suffix}"
    settings.check_writable(path)
    with open_network(config, weights) as network:
        exported = _exported(network, weights, pixels)
        with completed(path) as partial:
            metadata = _metadata(network, weights, exported)
            difference, samples = _check(exported, write(partial, exported, metadata))
            if not difference <= tolerance * exported.scale:
                raise RunError(
                    f"the outputs of the exported model differ by {difference:.3g} from those of the network, more "
                    f"than {tolerance:g} x {exported.scale:.3g} (--tolerance x the largest output); no file was written"
                )
    return {
        "output": str(path),
        "format": kind,
        "bytes": sum(each.stat().st_size for each in [path, *path.glob("*")] if each.is_file()),
        "max_difference": difference,
        "checked_samples": samples,
        "inputs": exported.described_inputs(),
        **checkpoints.described(weights),
    }


def _stem(config: Config, weights: Weights) -> str:
    update = weights.path.stem if weights.update is None else f"update-{weights.update}"
    return f"{short_name(config.model_name)}-{update}"


def _exported(network: HostNetwork, weights: Weights, pixels: bool) -> Exported:
    inputs, named = network.inputs_of(network.samples(_CHECKED_SAMPLES))
    if not pixels:
        inputs = network.prepared(inputs)
    values = [*inputs, *named.values()]
    if not values or not all(isinstance(each, torch.Tensor) for each in values):
        kinds = ", ".join(type(each).__name__ for each in values) or "nothing"
        raise ConfigError(f"only a network whose inputs are tensors can be exported; it gets {kinds}")
    module = formats.Positional(network.network, network.prepare if pixels else None, len(inputs), tuple(named))
    exported = Exported(module.eval(), values, dict(weights.tensors), getattr(network.task, "folder", None))
    with torch.no_grad():
        exported.outputs = formats.flat(module(*values))
    exported.scale = max((float(each.abs().max()) for each in exported.outputs if each.numel()), default=0.0)
    if not math.isfinite(exported.scale):
        raise RunError("the outputs of the network are not finite; no file was written")
    return exported


def _metadata(network: HostNetwork, weights: Weights, exported: Exported) -> Dict[str, str]:
    config = network.task.config
    return {
        "raypod.task": config.task.name,
        "raypod.update": "" if weights.update is None else str(weights.update),
        "raypod.weights_sha256": tensors.weights_sha256(weights.tensors),
        "raypod.inputs": json.dumps(exported.described_inputs()),
        "raypod.description": json.dumps(network.task.description()),
        "raypod.config": config.to_yaml(),
    }


def _check(exported: Exported, loaded: Loaded) -> Tuple[float, int]:
    """Return the largest difference of any output, and the number of samples; NaN for outputs of other shapes."""
    found = loaded(*exported.inputs)
    expected = exported.outputs
    if [each.shape for each in found] != [each.shape for each in expected]:
        return math.nan, len(exported.inputs[0])
    pairs = [(ours.double() - theirs.double()).abs() for ours, theirs in zip(found, expected) if ours.numel()]
    return max((float(each.max()) for each in pairs), default=0.0), len(exported.inputs[0])
