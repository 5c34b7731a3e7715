"""Load the weights with which a run starts from a safetensors file or a state dict of torch.

Read the tensors of a file of `torch.save` without executing what it contains.

`torch.load(weights_only=True)` guarantees this only from torch 2.6 on, and raypod also runs with 2.0. Only the zip
format is read, which torch writes since 1.6.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import torch
from torch import nn

from raypod.errors import CheckpointDamaged, ConfigError
from raypod.plan.user_code import reported
from raypod.plan.values import check_all_match, matches
from raypod.training.checkpoint import tensors

_NESTED = ("state_dict", "model")  # under which training scripts keep the state dict
_COUNTER = "num_batches_tracked"  # of BatchNorm; without effect, and absent from some files


def load(network: nn.Module, path: Path, ignored: Sequence[str]) -> None:
    """Load a file into a network, converted to the dtypes of the network.

    Args:
        network: the network.
        path: a safetensors file, or a state dict that `read_torch_file` reads, also one in a dict under
            `state_dict` or `model`.
        ignored: patterns of names that keep their initialization, or that are left out of the file.

    Raises:
        ConfigError: the file cannot be read, or names or shapes differ; the message lists all of them.
    """
    flag = f"--init-weights {path}"
    content, state = _read(path, flag), network.state_dict()
    check_all_match("--init-ignore", ignored, [*state, *content])
    saved = {name: value for name, value in content.items() if not matches(name, ignored)}
    own = {name: value for name, value in state.items() if not matches(name, ignored)}
    differences = _differences(own, saved)
    if differences:
        raise ConfigError(
            f"{flag} does not fit the network: {'; '.join(differences)}; "
            "--init-ignore leaves names that match a pattern at their initialization"
        )
    with torch.no_grad():
        for name, value in own.items():
            if name in saved:
                value.copy_(saved[name])


def _read(path: Path, flag: str) -> Dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return tensors.read_tensors(path)[0]
    except CheckpointDamaged as error:
        raise ConfigError(f"{flag}: {error.cause}") from None
    with reported(flag):  # a damaged file can raise anything
        try:
            content: Any = read_torch_file(path)
        except pickle.UnpicklingError as error:
            raise ConfigError(
                f"{flag}: it contains more than tensors, or is damaged ({error}); "
                "write the state dict alone: torch.save(network.state_dict(), FILE)"
            ) from None
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ConfigError(f"{flag}: it contains a {type(content).__name__}, not a state dict")
    others = [str(name) for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigError(f"{flag}: it is not a state dict: {', '.join(others)} are no tensors")
    return {str(name): value for name, value in content.items()}


def _differences(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> List[str]:
    """Return what differs, in groups; empty if the weights fit."""
    different = tensors.different_shapes(own, saved)
    missing = [name for name in different if name not in saved and not name.endswith(_COUNTER)]
    unexpected = [name for name in different if name not in own and not name.endswith(_COUNTER)]
    shapes = [
        f"{name} is {theirs} there and {ours} in the network"
        for name, (ours, theirs) in different.items()
        if tensors.MISSING not in (ours, theirs)
    ]
    kinds = [
        f"{name} is {saved[name].dtype} there and {value.dtype} in the network"
        for name, value in own.items()
        if name in saved and saved[name].is_floating_point() != value.is_floating_point()
    ]
    groups = (("it lacks ", missing), ("the network has no ", unexpected), ("", shapes), ("", kinds))
    return [label + ", ".join(names) for label, names in groups if names]


_DTYPES: Mapping[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def read_torch_file(path: Path) -> Any:
    """Return the content of a file: tensors on the CPU, in containers of plain values.

    Raises:
        pickle.UnpicklingError: it contains something else, or is damaged.
        OSError: as from the file system.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = [each for each in archive.namelist() if each.endswith("/data.pkl") and each.count("/") == 1]
            with archive.open(name) as file:
                return _Unpickler(file, archive, name[: -len("data.pkl")]).load()
    except zipfile.BadZipFile as error:
        raise pickle.UnpicklingError(f"{error}; torch writes zip files since 1.6") from None
    except (OSError, pickle.UnpicklingError):
        raise
    except Exception as error:  # noqa: BLE001 - unpickling a damaged file can raise any exception
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from None


class _Storage(NamedTuple):
    """The elements of a storage, [n]."""

    elements: torch.Tensor


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(file)
        self._archive, self._folder = archive, folder
        self._storages: Dict[str, _Storage] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return an allowed global."""
        if module_name == "torch" and global_name in _DTYPES:
            return _DTYPES[global_name]
        allowed = _ALLOWED.get((module_name, global_name))
        if allowed is None:
            raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}")
        return allowed

    def persistent_load(self, pid: Any) -> _Storage:
        """Return a storage of the archive; `pid` is ("storage", dtype, key, device, number of elements)."""
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"it refers to a {kind!r}")
        if key not in self._storages:
            content = bytearray(self._archive.read(f"{self._folder}data/{key}"))
            empty = torch.empty(0, dtype=dtype)
            self._storages[key] = _Storage(torch.frombuffer(content, dtype=dtype, count=count) if count else empty)
        return self._storages[key]


def _tensor(storage: _Storage, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> torch.Tensor:
    return storage.elements.as_strided(tuple(size), tuple(stride), offset)


def _parameter(data: torch.Tensor, *_: Any) -> torch.Tensor:
    return data


_ALLOWED: Dict[Tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
