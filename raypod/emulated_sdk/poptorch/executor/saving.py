"""Saved models: what `save` writes to a file, and what `loadExecutable` and `poptorch.load` read from it.

A saved executable is what the model was compiled for: the arguments with one micro-batch of example inputs, and a
description of model and options. Loading it traces the model again. The format of the file is the emulation's own, as
PopTorch's format is not public:

    16 bytes  magic, with the version of the format
     4 bytes  length of the header, little-endian
    32 bytes  SHA-256 of the header
              header: JSON {"poptorch": version, "sections": [{"name", "length", "sha256"}, ...]}
              the sections, one after another, to the end of the file

Checksums are verified before the content is parsed. A file is written under a temporary name and then renamed, so that
readers never see an incomplete file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import struct
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

import torch

from poptorch.device.compile.arguments import Arguments, ArgumentSpec
from poptorch.device.compile.memory import original_class
from poptorch.environment import VERSION, logger
from poptorch.errors import Error, ModelFileError
from poptorch.options import Options
from poptorch.parallel.blocks import block_of

Filename = Union[str, "os.PathLike[str]"]
Description = Dict[str, Any]

_KIND = b"emulated popef"
_MAGIC = _KIND + b"\x03\n"
_PREFIX = struct.Struct("<16sI32s")
_MAX_HEADER = 1 << 20
_DEFAULT_NAME = "model.poptorch"
_EXECUTABLE, _MODEL, _RNG_STATE = "executable", "model", "rng_state"
_MODES = "modes"  # in a description: whether each module was in training mode
# What pickling an arbitrary Python object may raise.
_UNPICKLABLE = (TypeError, AttributeError, RuntimeError, ValueError, pickle.PickleError)


class SavedModel(NamedTuple):
    """The model of a file, as the arguments of `trainingModel` or `inferenceModel`."""

    model: torch.nn.Module
    optimizer: Optional[torch.optim.Optimizer]
    options: Options
    is_training: bool


class SavedExecutable(NamedTuple):
    """The executable of a file.

    Attributes:
        spec: the arguments that the model was compiled for.
        example_inputs: the tensors of one micro-batch.
        compiled_for: the description of model and options.
        rng_state: the state of the device's random numbers; None if it was not saved.
    """

    spec: ArgumentSpec
    example_inputs: List[torch.Tensor]
    compiled_for: Description
    rng_state: Optional[List[int]]

    def arguments(self, forward: Callable[..., Any], expected: Description) -> Arguments:
        """Return the arguments for this model. Raises Error if it was compiled for another description."""
        for name in sorted({*self.compiled_for, *expected} - {_MODES}):
            if self.compiled_for.get(name) != expected.get(name):
                raise Error(
                    f"The executable was compiled for another model or other options: {name} was "
                    f"{self.compiled_for.get(name)!r} and is {expected.get(name)!r}"
                )
        return Arguments(forward, self.spec, self.example_inputs)

    @contextlib.contextmanager
    def modes_of(self, model: torch.nn.Module) -> Iterator[None]:
        """Context in which the modules are in the modes (train or eval) for which the executable was compiled."""
        modules = dict(model.named_modules())
        before = {name: module.training for name, module in modules.items()}
        try:
            for name, is_training in self.compiled_for[_MODES].items():
                modules[name].training = is_training
            yield
        finally:
            for name, is_training in before.items():
                modules[name].training = is_training


def write(
    filename: Filename,
    arguments: Arguments,
    compiled_for: Description,
    saved_model: Optional[SavedModel],
    rng_state: Optional[List[int]],
) -> None:
    """Write an executable to a file, with the model and the state of the random numbers if they are given."""
    executable = (tuple(arguments.spec), arguments.example_inputs, compiled_for)
    sections = {_EXECUTABLE: _pickled("the executable", executable)}
    if saved_model is not None:
        sections[_MODEL] = _pickled("the model (export_model=False leaves it out)", tuple(saved_model))
    if rng_state is not None:
        sections[_RNG_STATE] = json.dumps(rng_state).encode()
    _write_sections(filename, sections)


def read_executable(sections: Dict[str, bytes]) -> SavedExecutable:
    """Return the executable of a file's sections."""
    spec, example_inputs, compiled_for = _unpickled("the executable", sections[_EXECUTABLE])
    rng_state = json.loads(sections[_RNG_STATE]) if _RNG_STATE in sections else None
    return SavedExecutable(ArgumentSpec(*spec), example_inputs, compiled_for, rng_state)


def read_model(filename: Filename, sections: Dict[str, bytes]) -> SavedModel:
    """Return the model of a file's sections. Raises ModelFileError if the file has none."""
    if _MODEL not in sections:
        raise ModelFileError(
            f"{filename} is a valid PopTorch file but was created with 'export_model=False' which means you need to "
            "re-create the PopTorch model using poptorch.inferenceModel or poptorch.trainingModel then call "
            f'`model.loadExecutable("{filename}")` to restore its state.'
        )
    return SavedModel(*_unpickled("the model", sections[_MODEL]))


def _pickled(what: str, content: Tuple[Any, ...]) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(content, file)
    except _UNPICKLABLE as error:
        raise Error(f"{what} cannot be saved: {error}") from error
    return file.getvalue()


def _unpickled(what: str, data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=False)
    except (AttributeError, ImportError) as error:
        raise Error(f"{what} needs classes that cannot be imported here: {error}") from error


def describe(
    model: torch.nn.Module,
    options: Options,
    optimizer: Optional[torch.optim.Optimizer],
    is_training: bool,
    groupings: Dict[str, Any],
) -> Description:
    """Return what an executable depends on, by name: neither the process id nor the values of the weights."""
    return {
        "kind": "training" if is_training else "inference",
        **_of_options(options),
        "groups of replicas": groupings,
        **_of_model(model, optimizer),
    }


def _of_options(options: Options) -> Description:
    training: Any = options.Training
    return {
        "device iterations": options.device_iterations,
        "gradient accumulation": training.gradient_accumulation,
        "reduction": int(training.accumulation_and_replication_reduction_type),
        "replication factor": options.replication_factor,
        "number of processes": options.Distributed.numProcesses,
        "input groups": (options.input_group_size, int(options.input_cgt)),
        "output mode": (int(options.output_mode), options.output_return_period),
        "execution strategy": options._execution_strategy._to_dict(),
        "broadcast of buffers": options.broadcast_buffers,
        "anchored tensors": {name: tuple(anchor) for name, anchor in options.anchored_tensors.items()},
    }


def _of_model(model: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer]) -> Description:
    found: Description = {
        "optimizer": None if optimizer is None else type(optimizer).__qualname__,
        _MODES: {name: module.training for name, module in model.named_modules()},
    }
    for name, module in model.named_modules():
        kind = original_class(type(module))
        found[f"module {name!r}"] = (kind.__module__, kind.__qualname__, block_of(module))
    with torch._C.DisableTorchFunctionSubclass():
        for name, parameter in model.named_parameters():
            found[f"parameter {name!r}"] = (*_of_tensor(parameter), parameter.requires_grad)
        for name, buffer in model.named_buffers():
            found[f"buffer {name!r}"] = _of_tensor(buffer)
    return found


def _of_tensor(tensor: torch.Tensor) -> Any:
    return list(tensor.shape), str(tensor.dtype)


def _write_sections(filename: Filename, sections: Dict[str, bytes]) -> None:
    """Write the sections to a file, and create missing parents.

    An existing directory gets a file `model.poptorch`, with a warning.
    """
    path = Path(filename)
    if path.is_dir():
        path = path / _DEFAULT_NAME
        logger.warning("save: %s is a directory; the model is saved to %s", filename, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    described = [
        {"name": name, "length": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sections.items()
    ]
    header = json.dumps({"poptorch": VERSION, "sections": described}).encode()
    prefix = _PREFIX.pack(_MAGIC, len(header), hashlib.sha256(header).digest())
    _replace(path, [prefix, header, *sections.values()])


def read_sections(filename: Filename) -> Dict[str, bytes]:
    """Return the sections of a file.

    Raises:
        ModelFileError: the file is missing, truncated, damaged, of another kind, or of another version of poptorch or
            of the format.
    """
    path = Path(filename)
    if path.is_dir():
        path = path / _DEFAULT_NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
    header = _header(path, content)
    if header["poptorch"] != VERSION:
        raise ModelFileError(
            f"{path} was saved by poptorch {header['poptorch']}, and this is {VERSION}: compile and save it again"
        )
    return _sections(path, content[_PREFIX.size + header["length"] :], header["sections"])


def _replace(path: Path, parts: List[bytes]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's permissions are for this user alone; these are the usual ones of a new file.
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _header(path: Path, content: bytes) -> Dict[str, Any]:
    if not content.startswith(_KIND):
        raise ModelFileError(f"{path} is not a valid PopTorch file: PoplarExecutor.save of this SDK did not write it")
    if not content.startswith(_MAGIC[: len(content)]):
        raise ModelFileError(f"{path} was saved by another version of the emulated SDK: compile and save it again")
    if len(content) < _PREFIX.size:
        raise ModelFileError(f"{path} is truncated: {len(content)} bytes")
    _, length, digest = _PREFIX.unpack_from(content)
    header = content[_PREFIX.size : _PREFIX.size + min(length, _MAX_HEADER)]
    if hashlib.sha256(header).digest() != digest:
        raise ModelFileError(f"{path} is damaged or truncated: the checksum of its header is wrong")
    parsed: Dict[str, Any] = json.loads(header)
    return {**parsed, "length": length}


def _sections(path: Path, content: bytes, described: List[Dict[str, Any]]) -> Dict[str, bytes]:
    expected = sum(section["length"] for section in described)
    if len(content) != expected:
        raise ModelFileError(f"{path} is damaged or truncated: {len(content)} bytes of sections instead of {expected}")
    found, start = {}, 0
    for section in described:
        data = content[start : start + section["length"]]
        start += section["length"]
        if hashlib.sha256(data).hexdigest() != section["sha256"]:
            raise ModelFileError(f"{path} is damaged: the checksum of its section {section['name']!r} is wrong")
        found[section["name"]] = data
    return found
