"""The formats of `raypod export`: each writes a file, whole or not at all, and returns a function that runs it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import inspect
import io
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import nn

from raypod.errors import ConfigError, RunError, summarize_exception
from raypod.system.files import new_file, sync_file, sync_folder
from raypod.training.checkpoint import tensors
from raypod.training.data.hf_folder import HfFolder

Loaded = Callable[..., List[torch.Tensor]]  # of the inputs
_OPSET = 17  # the newest that torch 2.0 writes
_TRACED_SAMPLES = 2  # torch treats a size of 1 as a constant
METADATA_FILE = "raypod.json"  # in a TorchScript file, or a folder


@dataclasses.dataclass
class Exported:
    """A module to export, its inputs, the weights of the checkpoint, and the module's outputs."""

    module: Positional
    inputs: List[torch.Tensor]
    weights: Dict[str, torch.Tensor]
    folder: Optional[HfFolder]  # of a model of transformers
    outputs: List[torch.Tensor] = dataclasses.field(default_factory=list)
    scale: float = 0.0  # largest magnitude of an output

    def described_inputs(self) -> List[Dict[str, Any]]:
        """Return name, dtype and shape of each input; the first dimension is the batch."""
        return [
            {"name": f"input_{index}", "dtype": str(each.dtype).rpartition(".")[2], "shape": ["batch", *each.shape[1:]]}
            for index, each in enumerate(self.inputs)
        ]

    def example(self) -> Tuple[torch.Tensor, ...]:
        """Return inputs of few samples, for tracing."""
        return tuple(each.repeat(2, *[1] * (each.dim() - 1))[:_TRACED_SAMPLES] for each in self.inputs)


class Positional(nn.Module):
    """Calls a network whose inputs are all positional, after `prepare` has transformed the first one."""

    def __init__(
        self, network: nn.Module, prepare: Optional[nn.Module], positional: int, names: Tuple[str, ...]
    ) -> None:
        super().__init__()
        self.network, self.prepare, self._positional, self._names = network, prepare, positional, names

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the output of the network."""
        first = inputs if self.prepare is None else (self.prepare(inputs[0]), *inputs[1:])
        outputs = self.network(*first[: self._positional], **dict(zip(self._names, first[self._positional :])))
        return getattr(outputs, "logits", outputs)  # of transformers

    def of(self, network: nn.Module) -> Positional:
        """Return the call of another network, without `prepare`."""
        return Positional(network, None, self._positional, self._names)


def check(name: str, pixels: bool, tolerance: float) -> None:
    """Raise ConfigError for a format, or settings of it, that cannot be exported here."""
    if name not in ("safetensors", "torchscript", "onnx", "hf"):
        raise ConfigError(f"--format {name}: known are safetensors, torchscript, onnx, hf")
    if pixels and name in ("safetensors", "hf"):
        raise ConfigError(f"--pixels has no effect on {name}, which holds weights only: omit it")
    if not tolerance > 0:
        raise ConfigError(f"--tolerance {tolerance:g} must be positive")
    missing = [each for each in ("onnx", "onnxruntime") if name == "onnx" and importlib.util.find_spec(each) is None]
    if missing:
        raise ConfigError(f"--format onnx needs {' and '.join(missing)}: pip install 'raypod[onnx]'")


def flat(outputs: Any) -> List[torch.Tensor]:
    """Return the tensors of a network's output: a tensor, or a tuple, list or dict of them."""
    if isinstance(outputs, torch.Tensor):
        return [outputs.detach()]
    values = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, (tuple, list)) else ()
    return [tensor for each in values for tensor in flat(each)]


def safetensors(path: Path, exported: Exported, metadata: Dict[str, str]) -> Loaded:
    """Write the weights of the checkpoint, in their own dtypes."""
    write_safetensors(path, exported.weights, metadata)

    def loaded(*inputs: torch.Tensor) -> List[torch.Tensor]:
        weights, _ = tensors.read_tensors(path)
        module = copy.deepcopy(exported.module)
        for value in module.state_dict().values():
            value.zero_()
        tensors.load_weights(module.get_submodule("network"), weights)
        with torch.no_grad():
            return flat(module(*inputs))

    return loaded


def torchscript(path: Path, exported: Exported, metadata: Dict[str, str]) -> Loaded:
    """Write the traced module. `torch.jit.load` reads it; `raypod.json` in the file has the metadata."""
    with _exporting("torchscript"), torch.no_grad():
        traced = torch.jit.trace(  # type: ignore[no-untyped-call]
            exported.module, exported.example(), check_trace=False
        )
        torch.jit.save(traced, str(path), _extra_files={METADATA_FILE: json.dumps(metadata)})

    def loaded(*inputs: torch.Tensor) -> List[torch.Tensor]:
        with _exporting("torchscript"), torch.no_grad():
            module = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
            return flat(module(*inputs))

    return loaded


def onnx(path: Path, exported: Exported, metadata: Dict[str, str]) -> Loaded:
    """Write an ONNX model with the metadata as its properties; onnxruntime runs it."""
    import onnx as onnx_package  # an optional dependency
    import onnxruntime  # likewise

    # The exporter that torch 2.0 has; newer versions need onnxscript for the other one.
    legacy: Dict[str, Any] = {"dynamo": False} if "dynamo" in inspect.signature(torch.onnx.export).parameters else {}
    inputs = [each["name"] for each in exported.described_inputs()]
    outputs = [f"output_{index}" for index in range(len(exported.outputs))]
    with _exporting("onnx"), torch.no_grad():
        torch.onnx.export(
            exported.module,
            exported.example(),
            str(path),
            input_names=inputs,
            output_names=outputs,
            dynamic_axes={name: {0: "batch"} for name in (*inputs, *outputs)},
            opset_version=_OPSET,
            **legacy,
        )
        model = onnx_package.load(str(path))
        onnx_package.helper.set_model_props(model, metadata)
        onnx_package.checker.check_model(model)
        onnx_package.save(model, str(path))

    def loaded(*inputs: torch.Tensor) -> List[torch.Tensor]:
        with _exporting("onnx"):
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            named = {each.name: value.numpy() for each, value in zip(session.get_inputs(), inputs)}
            return [torch.from_numpy(each) for each in session.run(None, named)]

    return loaded


def hf(path: Path, exported: Exported, metadata: Dict[str, str]) -> Loaded:
    """Write the folder of a model of transformers with its weights, its tokenizer or preprocessor, and the metadata."""
    from raypod.training.models import hf_models  # transformers is an optional package

    assert exported.folder is not None
    network = exported.module.network
    with _exporting("hf"):
        hf_models.save(network, exported.folder, path)
        (path / METADATA_FILE).write_text(json.dumps(metadata, indent=2))

    def loaded(*inputs: torch.Tensor) -> List[torch.Tensor]:
        with _exporting("hf"), torch.no_grad():
            return flat(exported.module.of(hf_models.load(type(network), path))(*inputs))

    return loaded


@contextlib.contextmanager
def _exporting(name: str) -> Iterator[None]:
    """Convert exceptions of the exporters to RunError in one line, and hide their warnings and their output."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # torch's tracers warn about every Python value of the network
            yield
    except OSError:
        raise
    except Exception as error:  # the exporters raise many types of exceptions for what they cannot express
        cause = summarize_exception(error)[:500]
        raise RunError(f"the network cannot be exported as {name}: {cause}; no file was written") from error


@contextlib.contextmanager
def completed(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which gets the name `path` at the end of the context; an exception removes it.

    It can become a file, or a folder of files.

    Raises:
        ConfigError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        for each in sorted(partial.iterdir()) if partial.is_dir() else [partial]:
            sync_file(each)
        if partial.is_dir():
            sync_folder(partial)
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(str(partial), ignore_errors=True)  # which leaves a file
        with contextlib.suppress(OSError):
            partial.unlink()


def write_safetensors(path: Path, weights: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, which must not exist, as other programs read it. OSError if that fails."""
    with new_file(path) as file:
        tensors.write_tensors(file, weights, {"format": "pt", **metadata})
