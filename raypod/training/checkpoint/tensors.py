"""Encode tensors and nested state as bytes: safetensors files for checkpoints, one flat buffer for the network.

The format (https://huggingface.co/docs/safetensors): the length of a JSON header (8 bytes, little endian), the header
(name to dtype, shape and offsets), the bytes of the tensors. Loading it executes no code; `torch.load` with
`weights_only=True` guarantees this from torch 2.6 on only (CVE-2025-32434), and torch 2.0.1 is supported here.
The `safetensors` package is not used: here bytes are hashed while they are written, and nothing is copied in memory.

Nested state, such as an optimizer's, is split into named tensors and a JSON structure that refers to them by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Dict, Iterator, List, Mapping, Sequence, Tuple, Union

import numpy as np
import torch
from torch import nn

from raypod.errors import CheckpointDamaged, ConfigError
from raypod.system.files import NewFile, parse_json

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
_LENGTH_BYTES = 8
_LARGEST_HEADER_BYTES = 100 << 20  # the format's own limit
_FLAT_ALIGNMENT = 64  # bytes; of every tensor in a flat buffer, so that it can be viewed in place
_METADATA, _STRUCTURE = "__metadata__", "structure"
MISSING = "missing"  # in place of the shape of a tensor
Tensors = Dict[str, torch.Tensor]
_GROUP_BYTES = 8 << 20
_GROUP_BUFFERS = 512  # one system call reads into at most 1024
_THREADS = 2  # more do not help: the bandwidth of the memory is the limit

Group = Tuple[int, List[memoryview]]  # the offset of the first buffer in the file, and the buffers


class TensorFile:
    """The content of a file of CPU tensors of any shape, as buffers that share the memory of contiguous tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """TypeError for a dtype that the format does not have."""
        self._header, self._tensors = _encode_header(tensors, metadata, alignment=1), tensors
        self.size_bytes = len(self._header) + sum(each.numel() * each.element_size() for each in tensors.values())

    def __iter__(self) -> Iterator[Union[bytes, memoryview]]:
        yield self._header
        for tensor in self._tensors.values():
            yield memoryview(_bytes_of(tensor.contiguous()))


def write_tensors(file: NewFile, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write CPU tensors of any shape. TypeError for a dtype that the format does not have."""
    for buffer in TensorFile(tensors, metadata):
        file.write(buffer)


def read_tensors(path: Path) -> Tuple[Tensors, Dict[str, str]]:
    """Return the tensors of a file, and its metadata.

    Raises:
        CheckpointDamaged: the file is not a complete safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = _read_header(path, file, size)
            metadata = header.pop(_METADATA, {})
            data_bytes = size - file.tell()
            tensors = {name: _allocate(entry, data_bytes) for name, entry in header.items()}
            _check_offsets(path, header, tensors, data_bytes)
            read_into(file.fileno(), file.tell(), [memoryview(_bytes_of(each)) for each in tensors.values()])
    except EOFError:
        raise CheckpointDamaged(str(path), "it is truncated") from None
    except OSError as error:
        raise CheckpointDamaged(str(path), error.strerror or str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(str(path), f"it is not a safetensors file ({error})") from None
    return tensors, {str(name): str(value) for name, value in metadata.items()}


def pack_nested(state: Any) -> Tuple[Tensors, Dict[str, str]]:
    """Return nested state as (tensors, metadata) for `write_tensors`. The tensors are not copied.

    Args:
        state: dicts, lists and tuples of tensors, numbers, strings, booleans and None.

    Raises:
        TypeError: it contains something else; the message names it.
    """
    tensors: Tensors = {}
    structure = _encode(state, "state", tensors)
    return tensors, {_STRUCTURE: json.dumps(structure, separators=(",", ":"))}


def read_nested(path: Path) -> Any:
    """Return the nested state of a file. CheckpointDamaged as `read_tensors`."""
    tensors, metadata = read_tensors(path)
    try:
        return _decode(parse_json(metadata[_STRUCTURE]), tensors)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointDamaged(str(path), f"its structure cannot be decoded ({error})") from None


def pack_flat(state: Any) -> List[np.ndarray]:
    """Return nested state as buffers to concatenate, uint8 [bytes] each. Those of CPU tensors share their memory.

    Raises:
        TypeError: as `pack_nested`, or a dtype that the safetensors format does not have.
    """
    tensors, metadata = pack_nested(state)
    buffers = [np.frombuffer(_encode_header(tensors, metadata, _FLAT_ALIGNMENT), dtype=np.uint8)]
    for tensor in tensors.values():
        values = _bytes_of(tensor.detach().cpu().contiguous())
        buffers += [values, np.zeros(-values.size % _FLAT_ALIGNMENT, dtype=np.uint8)]
    return [buffer for buffer in buffers if buffer.size]


def unpack_flat(flat: np.ndarray) -> Any:
    """Return the nested state of the concatenated buffers of `pack_flat`: uint8 [bytes].

    Its tensors share the memory of `flat`.
    """
    start = _LENGTH_BYTES + int.from_bytes(flat[:_LENGTH_BYTES].tobytes(), "little")
    header: Dict[str, Any] = json.loads(flat[_LENGTH_BYTES:start].tobytes())
    structure = json.loads(header.pop(_METADATA)[_STRUCTURE])
    data = torch.from_numpy(flat[start:])
    tensors = {}
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        tensors[name] = data[first:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return _decode(structure, tensors)


def copy_to_cpu(nested: Any) -> Any:
    """Return the same nested state with a contiguous copy of every tensor on the CPU.

    A copy is a plain tensor: PopTorch's class of buffers reads the weights back from the device at each access, of a
    copy, too, and from any thread.
    """
    if isinstance(nested, torch.Tensor):
        copy = torch.empty(nested.shape, dtype=nested.dtype, device="cpu")
        copy.copy_(nested.detach())
        return copy
    if isinstance(nested, Mapping):
        return {key: copy_to_cpu(value) for key, value in nested.items()}
    if isinstance(nested, (list, tuple)):
        return type(nested)(copy_to_cpu(value) for value in nested)
    return nested


def weights_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of name, dtype, shape and bytes of every tensor of a state dict, in its order."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(_bytes_of(values))
    return digest.hexdigest()


def load_weights(
    network: nn.Module,
    saved: Mapping[str, torch.Tensor],
    hint: str = "resume with the same model, or start without --resume",
) -> None:
    """Load saved weights into a network; `hint` is the end of the error message.

    Raises:
        ConfigError: names or shapes differ; the message names the first tensor that does.
    """
    for name, (ours, theirs) in different_shapes(network.state_dict(), saved).items():
        raise ConfigError(
            f"the model is not the one that was saved: {name} is {ours} in the model and {theirs} in the "
            f"checkpoint; {hint}"
        )
    network.load_state_dict(saved)


def different_shapes(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> Dict[str, Tuple[str, str]]:
    """Return the shapes in both state dicts of each tensor whose shapes differ, as text; MISSING where it is not."""
    shapes = {
        name: tuple(str(list(state[name].shape)) if name in state else MISSING for state in (own, other))
        for name in (*own, *other)
    }
    return {name: (ours, theirs) for name, (ours, theirs) in shapes.items() if ours != theirs}


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous CPU tensor: uint8 [bytes], sharing its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _encode_header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], alignment: int) -> bytes:
    """The length and the JSON header; tensors start at multiples of `alignment` bytes, and so does what follows."""
    header: Dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is {tensor.dtype}, which the safetensors format does not have")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end + -end % alignment
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % max(alignment, 8))
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _read_header(path: Path, file: BinaryIO, size: int) -> Dict[str, Any]:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _LARGEST_HEADER_BYTES):
        raise CheckpointDamaged(str(path), "it is not a safetensors file, or it is truncated")
    header: Dict[str, Any] = parse_json(file.read(length))
    return header


def _allocate(entry: Dict[str, Any], data_bytes: int) -> torch.Tensor:
    """Allocate a tensor after checking its size: a damaged header may contain any number."""
    shape: List[int] = [int(size) for size in entry["shape"]]
    first, end = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    if min(shape, default=0) < 0 or size != end - first or not 0 <= first <= end <= data_bytes:
        raise ValueError("a shape does not match its number of bytes")
    return torch.empty(shape, dtype=dtype)


def _check_offsets(path: Path, header: Dict[str, Any], tensors: Tensors, data_bytes: int) -> None:
    offset = 0
    for name, tensor in tensors.items():
        if header[name]["data_offsets"][0] != offset:
            raise ValueError(f"{name} does not follow the tensor before it")
        offset += tensor.numel() * tensor.element_size()
    if offset != data_bytes:
        raise CheckpointDamaged(str(path), f"it contains {data_bytes} bytes of tensors, expected {offset}")


def _encode(value: Any, path: str, tensors: Tensors) -> Any:
    """JSON for a value: tensors and containers as {kind: content}, all else as it is. Adds its tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        items = value.items()
        return {"dict": [[_encode(each, f"{path}.{item[0]}", tensors) for each in item] for item in items]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(each, f"{path}.{index}", tensors) for index, each in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{path} is a {type(value).__name__}, which a checkpoint cannot contain")


def _decode(structure: Any, tensors: Tensors) -> Any:
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_decode(key, tensors): _decode(value, tensors) for key, value in content}
    values = [_decode(value, tensors) for value in content]
    return tuple(values) if kind == "tuple" else values


def read_into(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Fill buffers, uint8 [bytes] each, from a position of an open file on.

    Raises:
        OSError: the file system's own.
        EOFError: the file ends before.
    """
    groups = _groups_of(offset, buffers)
    if len(groups) == 1:
        _read_group(descriptor, groups[0])
        return
    with ThreadPoolExecutor(_THREADS, "checkpoint-read") as pool:
        for each in [pool.submit(_read_group, descriptor, group) for group in groups]:
            each.result()


def _groups_of(offset: int, buffers: Sequence[memoryview]) -> List[Group]:
    """Divide the buffers into groups for one system call each."""
    groups: List[Group] = [(offset, [])]
    group_bytes = 0
    for buffer in buffers:
        for first in range(0, len(buffer), _GROUP_BYTES):
            part = buffer[first : first + _GROUP_BYTES]
            if group_bytes + len(part) > _GROUP_BYTES or len(groups[-1][1]) == _GROUP_BUFFERS:
                groups.append((offset, []))
                group_bytes = 0
            groups[-1][1].append(part)
            group_bytes += len(part)
            offset += len(part)
    return groups


def _read_group(descriptor: int, group: Group) -> None:
    offset, left = group
    while left:
        count = os.preadv(descriptor, left, offset)
        if not count:
            raise EOFError
        offset += count
        while left and count >= len(left[0]):
            count -= len(left[0])
            left = left[1:]
        if count:
            left = [left[0][count:], *left[1:]]
