"""Broadcast of whole models and of arbitrary objects (contract section 8)."""

from __future__ import annotations

import pickle
from typing import Any, Iterable, List, Mapping, Optional, Tuple, Union

import torch
from _emulated_pod import as_bytes

from ._agreement import agree, global_process_set
from ._identity import group, rank
from .mpi_ops import checked_root

Named = Union[Mapping[str, torch.Tensor], Iterable[Union[torch.Tensor, Tuple[str, torch.Tensor]]]]


def broadcast_parameters(params: Named, root_rank: int, process_set: Any = global_process_set) -> None:
    """Overwrites everyone's tensors by root's, bit by bit, whatever their dtypes.

    params: a `state_dict()`, `named_parameters()`, or a list of tensors; the same names, shapes and dtypes on all
    ranks (RuntimeError). They travel as one flat tensor, which is about twice as fast as one by one. ValueError for
    entries that are no tensors.
    """
    named = _named_tensors(params)
    texts = [f"{name}: {tensor.dtype}{list(tensor.shape)}" for name, tensor in named]
    agree(f"broadcast_parameters from rank {checked_root(root_rank)} of {'; '.join(texts)}", None, process_set)
    tensors = [tensor.detach() for _, tensor in named if tensor.numel()]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if rank() == root_rank and tensors:
        flat = torch.cat([as_bytes(tensor.contiguous()) for tensor in tensors])
    else:
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
    group().broadcast_(flat, root_rank)
    if rank() != root_rank:
        for tensor, piece in zip(tensors, flat.split_with_sizes(sizes)):
            _overwrite(tensor, piece)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: Optional[str] = None, process_set: Any = global_process_set
) -> Any:
    """Root's object, pickled, on all ranks; root gets its own back. Others need not bring one."""
    agree(f"broadcast_object from rank {checked_root(root_rank)}", name, process_set)
    wires = group()
    data = pickle.dumps(obj) if wires.rank == root_rank else b""
    length = wires.gather_numbers([len(data)])[root_rank][0]
    content = torch.empty(length, dtype=torch.uint8)
    if wires.rank == root_rank:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    wires.broadcast_(content, root_rank)
    return obj if wires.rank == root_rank else pickle.loads(content.numpy().tobytes())


def _named_tensors(params: Named) -> List[Tuple[str, torch.Tensor]]:
    """Names and tensors in an order that all ranks share."""
    entries = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    named = [entry if isinstance(entry, tuple) else (str(index), entry) for index, entry in enumerate(entries)]
    for name, tensor in named:
        if not torch.is_tensor(tensor):
            raise ValueError(f"broadcast_parameters takes tensors; {name!r} is a {type(tensor).__name__}")
    return named


def _overwrite(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Puts bytes into a tensor of any dtype and layout."""
    dense = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
    as_bytes(dense).copy_(content)
    if dense is not tensor:
        tensor.copy_(dense)
