"""How ranks make sure that they call the same collective, as Horovod's coordinator does (contract section 8)."""

from __future__ import annotations

import zlib
from typing import Any, Optional

import torch

from ._identity import group

global_process_set = "all ranks"
CARRIED_BYTES = 1024  # small data travel with the agreement and save a round trip; its messages always have one size
_TEXT_BYTES = 160


def agree(
    doing: str,
    name: Optional[str] = None,
    process_set: Any = global_process_set,
    content: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Tells all ranks what this one is about to do, and returns everyone's `content`, uint8 [ranks, bytes].

    content: uint8 [bytes], at most CARRIED_BYTES, equally many on all ranks; none by default. RuntimeError on all ranks
    if they are about to do different things, ValueError for another process set than that of all ranks.
    """
    if process_set is not global_process_set:
        raise ValueError(f"the emulated Horovod has one process set only, that of all ranks; got {process_set!r}")
    wires = group()
    own = torch.empty(0, dtype=torch.uint8) if content is None else content
    if wires.size == 1:
        return own.unsqueeze(0)
    row = torch.zeros(_TEXT_BYTES + CARRIED_BYTES, dtype=torch.uint8)
    row[:_TEXT_BYTES] = torch.frombuffer(_fitted(doing if name is None else f"{doing}, name {name!r}"), dtype=row.dtype)
    row[_TEXT_BYTES : _TEXT_BYTES + own.numel()] = own
    table = wires.gather(row)
    texts = [bytes(text.tolist()).decode(errors="replace").rstrip() for text in table[:, :_TEXT_BYTES]]
    if len(set(texts)) > 1:
        calls = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise RuntimeError(f"the ranks are out of step, they do not call the same: {calls}")
    return table[:, _TEXT_BYTES : _TEXT_BYTES + own.numel()]


def _fitted(text: str) -> bytearray:
    """The text in exactly _TEXT_BYTES bytes; what does not fit is represented by its checksum."""
    data = text.encode()
    if len(data) > _TEXT_BYTES:
        data = data[: _TEXT_BYTES - 25] + f"... (checksum {zlib.crc32(data):08x})".encode()
    return bytearray(data.ljust(_TEXT_BYTES))
