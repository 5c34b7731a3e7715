"""Copies elements into slots of the ring: each into one, or rebatched, many into one (contract 1.9, AsyncRebatched)."""

from __future__ import annotations

from typing import Callable, List, Optional

import torch

from poptorch._data.elements import ElementKind
from poptorch._data.ring import WHOLE, SlotLayout
from poptorch._errors import Error


class SlotWriter:
    """Knows the first element: all others must be like it, but that dimension 0 may be shorter.

    With `rebatched_size` slots hold so many samples, joined and cut out of consecutive elements along dimension 0.
    Error when the first element has no samples to join.
    """

    def __init__(
        self, first: List[torch.Tensor], kind: ElementKind, rebatched_size: Optional[int], drop_last: bool
    ) -> None:
        self._kind = kind
        self._rebatched_size = rebatched_size
        self._drop_last = drop_last
        self._slots: List[List[torch.Tensor]] = []
        self._slot: Optional[int] = None  # that is being filled
        self._samples = 0  # in it
        self.layout = SlotLayout.of(first)
        if rebatched_size is not None:
            _samples(first)
            shapes = [torch.Size((rebatched_size, *tensor.shape[1:])) for tensor in first]
            self.layout = SlotLayout(tuple((tensor.dtype, shape) for tensor, shape in zip(first, shapes)))

    def open(
        self, slots: List[List[torch.Tensor]], next_slot: Callable[[], int], publish: Callable[[int, int], None]
    ) -> None:
        """Write into these slots; `next_slot()` waits for a free one, `publish(rows, slot)` hands it over."""
        self._slots, self._next_slot, self._publish = slots, next_slot, publish

    def write(self, tensors: List[torch.Tensor], kind: ElementKind) -> None:
        """Copy one element. Error if it is unlike the first."""
        self._check(tensors, kind)
        if self._rebatched_size is None:
            self._write_whole(tensors)
        else:
            self._join(tensors, self._rebatched_size)

    def end_epoch(self) -> None:
        """Hand over the samples that fill no slot, or drop them."""
        if self._slot is not None and self._samples and not self._drop_last:
            self._publish(self._samples, self._slot)
        self.forget_rest()

    def forget_rest(self) -> None:
        """Drop the samples that fill no slot."""
        self._slot, self._samples = None, 0

    def _write_whole(self, tensors: List[torch.Tensor]) -> None:
        is_short = any(tensor.shape != shape for tensor, (_, shape) in zip(tensors, self.layout.tensors))
        rows = _samples(tensors) if is_short else WHOLE
        slot = self._next_slot()
        for target, tensor in zip(self._slots[slot], tensors):
            (target[:rows] if is_short else target).copy_(tensor)
        self._publish(rows, slot)

    def _join(self, tensors: List[torch.Tensor], size: int) -> None:
        samples, done = _samples(tensors), 0
        while done < samples:
            if self._slot is None:
                self._slot = self._next_slot()
            count = min(samples - done, size - self._samples)
            for target, tensor in zip(self._slots[self._slot], tensors):
                target[self._samples : self._samples + count].copy_(tensor[done : done + count])
            done += count
            self._samples += count
            if self._samples == size:
                self._publish(WHOLE, self._slot)
                self.forget_rest()

    def _check(self, tensors: List[torch.Tensor], kind: ElementKind) -> None:
        if kind != self._kind or len(tensors) != len(self.layout.tensors):
            raise Error(f"An element is {kind.describe()}, but the first one was {self._kind.describe()}")
        for index, (tensor, (dtype, shape)) in enumerate(zip(tensors, self.layout.tensors)):
            fits = tensor.shape == shape or (
                tensor.dim() > 0
                and tensor.shape[1:] == shape[1:]
                and (self._rebatched_size is not None or tensor.shape[0] < shape[0])
            )
            if tensor.dtype != dtype or not fits:
                raise Error(
                    f"Tensor {index} of an element is {tensor.dtype} {list(tensor.shape)}, but the ring buffer was "
                    f"made for {dtype} {list(shape)}: all elements must be like the first"
                )


def _samples(tensors: List[torch.Tensor]) -> int:
    """Dimension 0, which all tensors share. Error if they do not."""
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors}
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None:
        raise Error(
            f"The tensors of a batch have the shapes {[list(tensor.shape) for tensor in tensors]}: to be joined or "
            "shortened they need the same number of samples in dimension 0"
        )
    return size
