"""Tensors as files: the safetensors format, written as a stream and read without trusting the file.

The format (huggingface.co/docs/safetensors): the length of a JSON header (8 bytes, little endian), the header (name to
dtype, shape and offsets), the bytes. Any program that knows it reads these files, and reading executes nothing; that
`torch.load(weights_only=True)` executes nothing holds from torch 2.6 on only (CVE-2025-32434), and 2.0.1 is supported
here. Written out here and not by the package, so that bytes are hashed on their way and no second copy is made.

An optimizer's state is nested and holds numbers too: `pack` takes the tensors out of it and describes the rest.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Mapping, Tuple

import torch

from raypod.errors import CheckpointDamaged
from raypod.record.durable import HashedFile

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LARGEST_HEADER_BYTES = 100 << 20  # the format's own limit
_STRUCTURE = "structure"
Tensors = Dict[str, torch.Tensor]


def write(file: HashedFile, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write CPU tensors of any shape. TypeError for a dtype that the format does not have."""
    header: Dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is {tensor.dtype}, which the safetensors format does not have")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(_bytes_of(tensor.contiguous()))


def read(path: Path) -> Tuple[Tensors, Dict[str, str]]:
    """The tensors of a file and its metadata.

    Raises:
        CheckpointDamaged: it is no safetensors file, or not a whole one.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = _header(path, file, size)
            metadata = header.pop("__metadata__", {})
            data_bytes = size - file.tell()
            tensors = {name: _empty(entry, data_bytes) for name, entry in header.items()}
            _check_offsets(path, header, tensors, data_bytes)
            for tensor in tensors.values():
                view = _bytes_of(tensor)
                if len(view) and file.readinto(view) != len(view):
                    raise CheckpointDamaged(str(path), "it ends too early")
    except OSError as error:
        raise CheckpointDamaged(str(path), error.strerror or str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(str(path), f"it is no safetensors file ({error})") from None
    return tensors, {str(name): str(value) for name, value in metadata.items()}


def pack(nested: Any) -> Tuple[Tensors, Dict[str, str]]:
    """A nest of dicts, lists, tuples, tensors, numbers, strings and None as (tensors, metadata) for `write`.

    Raises:
        TypeError: it holds something else.
    """
    tensors: Tensors = {}
    structure = _pack(nested, tensors)
    return tensors, {_STRUCTURE: json.dumps(structure, separators=(",", ":"))}


def unpack(path: Path) -> Any:
    """What was packed into a file. CheckpointDamaged as `read`."""
    tensors, metadata = read(path)
    try:
        return _unpack(json.loads(metadata[_STRUCTURE]), tensors)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(str(path), f"it has no structure that can be read ({error})") from None


def copied(nested: Any) -> Any:
    """The same nest with a copy of every tensor, on the CPU: what goes on changing does not change it."""
    if isinstance(nested, torch.Tensor):
        return nested.detach().to("cpu", copy=True)
    if isinstance(nested, Mapping):
        return {key: copied(value) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        return type(nested)(copied(value) for value in nested)
    return nested


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.flatten().view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(flat)


def _header(path: Path, file: BinaryIO, size: int) -> Dict[str, Any]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LARGEST_HEADER_BYTES):
        raise CheckpointDamaged(str(path), "it is no safetensors file, or a part of one")
    header: Dict[str, Any] = json.loads(file.read(length).decode())
    return header


def _empty(entry: Dict[str, Any], data_bytes: int) -> torch.Tensor:
    shape: List[int] = [int(size) for size in entry["shape"]]
    first, end = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    # Checked before memory is asked for: a damaged header may name any size.
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    if min(shape, default=0) < 0 or size != end - first or not 0 <= first <= end <= data_bytes:
        raise ValueError("a shape does not match its bytes")
    return torch.empty(shape, dtype=dtype)


def _check_offsets(path: Path, header: Dict[str, Any], tensors: Tensors, data_bytes: int) -> None:
    offset = 0
    for name, tensor in tensors.items():
        if header[name]["data_offsets"][0] != offset:
            raise ValueError(f"{name} does not follow the tensor before it")
        offset += tensor.numel() * tensor.element_size()
    if offset != data_bytes:
        raise CheckpointDamaged(str(path), f"it holds {data_bytes} bytes of tensors and should hold {offset}")


def _pack(nested: Any, tensors: Tensors) -> Any:
    if isinstance(nested, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = nested
        return {"tensor": name}
    if isinstance(nested, Mapping):
        return {"dict": [[_pack(key, tensors), _pack(value, tensors)] for key, value in nested.items()]}
    if isinstance(nested, (list, tuple)):
        return {"list" if isinstance(nested, list) else "tuple": [_pack(value, tensors) for value in nested]}
    if nested is None or isinstance(nested, (bool, int, float, str)):
        return nested
    raise TypeError(f"a checkpoint cannot hold a {type(nested).__name__}")


def _unpack(structure: Any, tensors: Tensors) -> Any:
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_unpack(key, tensors): _unpack(value, tensors) for key, value in content}
    values = [_unpack(value, tensors) for value in content]
    return tuple(values) if kind == "tuple" else values
