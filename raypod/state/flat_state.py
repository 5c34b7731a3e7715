"""A state dict as one flat run of bytes, and back: what travels when weights and optimizer state are seeded.

A header in JSON says how the dicts and lists lie in each other, and name, dtype, shape and place of every tensor; the
tensors' bytes follow side by side, whatever their dtypes. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
from typing import Any, Dict, List, Tuple

import numpy as np
import torch

_LENGTH_BYTES = 8
_ALIGNMENT = 64  # of every tensor; a cache line, and a multiple of every element size


def pack(state: Any) -> List[np.ndarray]:
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


def unpack(flat: np.ndarray) -> Any:
    """The state that `pack` made the parts of, now one behind the other in `flat`: uint8 [bytes].

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
