"""Which samples of a data set each process reads (contract 1.9, partitioning)."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch


class Partition(torch.utils.data.Dataset):  # type: ignore[type-arg]  # not generic at run time in old torch
    """The contiguous window of a map-style data set that belongs to one process.

    dataset: the WHOLE data set, in every process.
    step: samples that one process feeds per call.
    seed: of the permutation that `shuffle` draws; None to keep the order of the data set.

    With `drop_last` every process owns the same whole number of steps; ZeroDivisionError when that is none, as in the
    SDK. Without, the first `len(dataset) % num_processes` processes own one sample more.
    """

    def __init__(  # the numbers that define a window
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
        # In shared memory, so that workers that live on from epoch to epoch see the change.
        self._offset = _shared(torch.tensor(self._base))
        self._order = None if seed is None else _shared(torch.arange(total))

    def shuffle(self) -> None:
        """Begin an epoch: draw a permutation of the whole data set, and toggle the window by the leftovers.

        The generator is seeded once and goes on from epoch to epoch, alike in all processes.
        """
        if self._order is not None:
            self._order.copy_(torch.randperm(len(self._order), generator=self._generator))
            at_base = int(self._offset) == self._base
            self._offset.fill_(self._base + self._leftovers if at_base else self._base)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"Sample {index} is outside of this process's {self._length} samples")
        position = int(self._offset) + index
        return self._dataset[position if self._order is None else int(self._order[position])]

    def become_independent(self) -> None:
        """Shuffle from now on apart from the process that this is a copy from, though not from one's own workers."""
        self._offset = _shared(self._offset.clone())
        if self._order is not None:
            self._order = _shared(self._order.clone())

    def __getstate__(self) -> Any:
        # A generator cannot be pickled by torch 2.0; and its state, as a tensor, would travel as a file descriptor,
        # which is closed with the tensor before a process that is being started has it.
        state = None if self._generator is None else self._generator.get_state().numpy().tobytes()
        return {**self.__dict__, "_generator": state}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["_generator"] is not None:
            self._generator = torch.Generator()
            self._generator.set_state(torch.frombuffer(bytearray(state["_generator"]), dtype=torch.uint8))


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
