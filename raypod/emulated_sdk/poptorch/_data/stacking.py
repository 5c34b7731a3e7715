"""Stacks samples straight into a place that is there already: what torch's `default_collate` makes, without a copy."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch
from torch.utils.data import default_collate

from poptorch._data.elements import ElementKind


def stack_into(targets: Sequence[torch.Tensor], kind: ElementKind, samples: Sequence[Any]) -> bool:
    """Fill `targets` with what default_collate makes of `samples`; False if that is not of this kind and these shapes.

    After False the contents of `targets` do not matter.
    """
    columns = _columns(kind, samples)
    if columns is None or len(columns) != len(targets):
        return False
    return all(_fill(target, column) for target, column in zip(targets, columns))


def _columns(kind: ElementKind, samples: Sequence[Any]) -> Optional[List[Sequence[Any]]]:
    """The samples' first items, second items, ...; None if that takes default_collate itself."""
    if kind.type is torch.Tensor:
        return [samples]
    if kind.type is dict and all(type(sample) is dict and tuple(sample) == kind.keys for sample in samples):
        return [[sample[key] for sample in samples] for key in kind.keys]
    if kind.type is list and all(type(sample) in (tuple, list) and (len(sample),) == kind.keys for sample in samples):
        return list(zip(*samples))
    return None


def _fill(target: torch.Tensor, column: Sequence[Any]) -> bool:
    if len(column) != target.shape[0]:
        return False
    if all(type(item) in (int, float) for item in column):
        numbers = default_collate(list(column))
        if numbers.dtype != target.dtype or numbers.shape != target.shape:
            return False
        target.copy_(numbers)
        return True
    shape, dtype = target.shape[1:], target.dtype
    for item in column:
        is_alike = type(item) is torch.Tensor and item.dtype == dtype and item.shape == shape
        if not is_alike or item.requires_grad or item.layout != torch.strided:
            return False
    torch.stack(tuple(column), out=target)
    return True
