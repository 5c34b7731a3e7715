"""Read the tensors of a file of `torch.save` without executing what it contains.

`torch.load(weights_only=True)` guarantees this only from torch 2.6 on, and raypod also runs with 2.0. Only the zip
format is read, which torch writes since 1.6.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NamedTuple, Sequence, Tuple

import torch

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


def read(path: Path) -> Any:
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
