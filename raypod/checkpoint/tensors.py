"""Tensors as files: the safetensors format, written as a stream and read without trusting the file.

The format (huggingface.co/docs/safetensors): the length of a JSON header (8 bytes, little endian), the header (name to
dtype, shape and offsets), the bytes. Any program that knows it reads these files, and reading executes nothing; that
`torch.load(weights_only=True)` executes nothing holds from torch 2.6 on only (CVE-2025-32434), and 2.0.1 is supported
here. Written out here and not by the package, so that bytes are hashed on their way and no second copy is made.

An optimizer's state is nested and holds numbers too: `pack` takes the tensors out of it and describes the rest.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Mapping, Tuple

import numpy as np
import torch
from torch import nn

from raypod.errors import CheckpointDamaged, ConfigError
from raypod.host.files import HashedFile

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


def write_tensors(file: HashedFile, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
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


def read_tensors(path: Path) -> Tuple[Tensors, Dict[str, str]]:
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


def pack_nested(nested: Any) -> Tuple[Tensors, Dict[str, str]]:
    """A nest of dicts, lists, tuples, tensors, numbers, strings and None as (tensors, metadata) for `write_tensors`.

    Raises:
        TypeError: it holds something else.
    """
    tensors: Tensors = {}
    structure = _pack(nested, tensors)
    return tensors, {_STRUCTURE: json.dumps(structure, separators=(",", ":"))}


def unpack_nested(path: Path) -> Any:
    """What was packed into a file. CheckpointDamaged as `read_tensors`."""
    tensors, metadata = read_tensors(path)
    try:
        return _unpack(json.loads(metadata[_STRUCTURE]), tensors)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(str(path), f"it has no structure that can be read_tensors ({error})") from None


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


# --- from state.flat_state: A state dict as one flat run of bytes, and back: what travels when weights and optimizer state are seeded.
#
# A header in JSON says how the dicts and lists lie in each other, and name, dtype, shape and place of every tensor; the
# tensors' bytes follow side by side, whatever their dtypes. Nothing is pickled.
#

_LENGTH_BYTES = 8
_ALIGNMENT = 64  # of every tensor; a cache line, and a multiple of every element size


def pack_flat(state: Any) -> List[np.ndarray]:
    """The bytes of a state, in parts: uint8 [bytes] each. Those of tensors on the host share their memory.

    Args:
        state: dicts (keys: str or int), lists and tuples of tensors, numbers, strings, booleans and None.

    Raises:
        TypeError: it holds something else, which is named.
    """
    tensors: List[torch.Tensor] = []
    tree = _encode(state, "state", tensors)
    parts: List[np.ndarray] = []
    places: List[Tuple[str, List[int], int]] = []  # dtype, shape, offset
    end = 0
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        places.append((str(tensor.dtype).partition(".")[2], list(tensor.shape), end))
        parts += [values, _padding(values.size)]
        end += _aligned(values.size)
    header = json.dumps({"tree": tree, "tensors": places}).encode()
    head = np.frombuffer(len(header).to_bytes(_LENGTH_BYTES, "little") + header, dtype=np.uint8)
    return [part for part in (head, _padding(head.size), *parts) if part.size]


def unpack_flat(flat: np.ndarray) -> Any:
    """The state that `pack_flat` made the parts of, now one behind the other in `flat`: uint8 [bytes].

    Its tensors share the memory of `flat`.
    """
    length = int.from_bytes(flat[:_LENGTH_BYTES].tobytes(), "little")
    header: Dict[str, Any] = json.loads(flat[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
    content = torch.from_numpy(flat[_aligned(_LENGTH_BYTES + length) :])
    tensors = []
    for name, shape, offset in header["tensors"]:
        dtype = getattr(torch, name)
        size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        tensors.append(content[offset : offset + size].view(dtype).reshape(shape))
    return _decode(header["tree"], tensors)


def _padding(size: int) -> np.ndarray:
    return np.zeros(_aligned(size) - size, dtype=np.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _encode(value: Any, name: str, tensors: List[torch.Tensor]) -> Any:
    """JSON for a value: containers as [kind, content], a tensor as its number, whatever else as it is."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{name} has the key {key!r}; only strings and whole numbers can be packed as keys")
        return ["dict", [[key, _encode(each, f"{name}.{key}", tensors)] for key, each in value.items()]]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_encode(each, f"{name}.{place}", tensors) for place, each in enumerate(value)]]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{name} is a {type(value).__name__}, which cannot be packed")


def _decode(value: Any, tensors: List[torch.Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(each, tensors) for key, each in content}
    decoded = [_decode(each, tensors) for each in content]
    return tuple(decoded) if kind == "tuple" else decoded


# --- from state.weights: Weights as one number, by which runs, instances and checkpoints are compared; and saved ones into a network.


def weights_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor of a state_dict, in its order."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_weights(network: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Put saved weights into a network.

    Raises:
        ConfigError: they are those of another network; the first tensor that tells.
    """
    own = network.state_dict()
    for name in (*own, *saved):
        ours, theirs = (str(list(state[name].shape)) if name in state else "missing" for state in (own, saved))
        if ours != theirs:
            raise ConfigError(
                f"the model is not the one that was saved: {name} is {ours} in the model and {theirs} in the "
                "checkpoint; go on with the model as it was, or begin a run without --resume"
            )
    network.load_state_dict(saved)
