"""Which samples each process reads, and how the batches of a batch sampler are combined."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sized, cast

import torch


class Partition(torch.utils.data.Dataset):  # type: ignore[type-arg]  # not generic at run time in old torch
    """The contiguous window of a map-style data set that belongs to one process.

    With `drop_last` every process has the same number of steps. Without, each of the first
    `len(dataset) % num_processes` processes has one sample more.

    Args:
        dataset: the WHOLE data set, in every process.
        step: samples that one process reads per call.
        seed: seed of the permutations of `shuffle`; None for the order of the data set.

    Raises:
        ZeroDivisionError: with `drop_last`, there is no whole step for each process, as in the SDK.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        step: int,
        process_id: int,
        num_processes: int,
        drop_last: bool,
        seed: Optional[int],
    ) -> None:
        total = len(dataset)
        if drop_last:
            self._length = step * (total // (step * num_processes))
            self._base = process_id * self._length
            self._leftovers = total % self._length
        else:
            share, more = divmod(total, num_processes)
            self._length = share + (process_id < more)
            self._base = process_id * share + min(process_id, more)
            self._leftovers = 0
        self._dataset = dataset
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        # In shared memory, so that persistent workers see the changes of `shuffle`.
        self._offset = _shared(torch.tensor(self._base))
        self._order = None if seed is None else _shared(torch.arange(total))

    def shuffle(self) -> None:
        """Start an epoch: draw a permutation of the whole data set, and shift the window by the leftovers or back.

        The generator is seeded once, so all processes draw the same permutations.
        """
        if self._order is not None:
            self._order.copy_(torch.randperm(len(self._order), generator=self._generator))
            at_base = int(self._offset) == self._base
            self._offset.fill_(self._base + self._leftovers if at_base else self._base)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"Sample {index} is not one of this process's {self._length} samples")
        position = int(self._offset) + index
        return self._dataset[position if self._order is None else int(self._order[position])]

    def unshare(self) -> None:
        """Stop sharing the order with the process that this copy comes from. Workers started later share it."""
        self._offset = _shared(self._offset.clone())
        if self._order is not None:
            self._order = _shared(self._order.clone())

    def __getstate__(self) -> Any:
        # torch 2.0 cannot pickle a generator, and its state as a tensor would be sent as a file descriptor that may be
        # closed before the receiving process has opened it.
        state = None if self._generator is None else self._generator.get_state().numpy().tobytes()
        return {**self.__dict__, "_generator": state}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["_generator"] is not None:
            self._generator = torch.Generator()
            self._generator.set_state(torch.frombuffer(bytearray(state["_generator"]), dtype=torch.uint8))


class CombinedBatchSampler:
    """Joins consecutive batches of a batch sampler; a shorter last batch is dropped with `drop_last`."""

    def __init__(self, batch_sampler: Any, batches_to_combine: int, drop_last: bool) -> None:
        self._batch_sampler = batch_sampler
        self._batches_to_combine = batches_to_combine
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[List[Any]]:
        joined: List[Any] = []
        for count, batch in enumerate(self._batch_sampler, start=1):
            joined += batch
            if count % self._batches_to_combine == 0:
                yield joined
                joined = []
        if joined and not self._drop_last:
            yield joined

    def __len__(self) -> int:
        batches = len(cast(Sized, self._batch_sampler))
        has_rest = batches % self._batches_to_combine > 0 and not self._drop_last
        return batches // self._batches_to_combine + has_rest


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
