"""The results of each replica's last micro-batches, kept in a buffer on the device.

A process that dies takes along the reports that it has not sent, although the updates that they belong to may be done.
The emulated SDK exchanges the changed buffers of all replicas in every call, before the weights change, so every
instance that has done a call has the results of all replicas for it.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from raypod.events import CallReport
from raypod.plan.plan import Geometry

_MOST_CALLS, _MICRO_BATCHES = 64, 1024  # more than a process completes before its reports are sent
_NAME = "recent_results.rows"  # of the buffer in the training step
_WORD_DIGITS = 4  # hexadecimal: float32 represents such integers exactly
_UPDATE_WORDS, _DIGEST_WORDS = 2, 4
_WORDS = _UPDATE_WORDS + _DIGEST_WORDS
ReplicaState = Dict[str, Any]  # of `program.read_replica_state`


class RecentResults(nn.Module):
    """Appends the results of every micro-batch to a buffer of constant size."""

    def __init__(self, geometry: Geometry, num_sums: int) -> None:
        super().__init__()
        self.rows: torch.Tensor
        self.register_buffer("rows", _no_rows(geometry, num_sums), persistent=False)

    def forward(self, sums: torch.Tensor, call: torch.Tensor) -> None:
        """Append the sums of a micro-batch, float32 [num_sums], and its row of `call_words`."""
        self.rows.copy_(torch.cat([self.rows[1:], torch.cat([sums.unsqueeze(0), call], dim=1)]))


def replica_sums(sums: torch.Tensor, shape: Tuple[int, int, int]) -> Tuple[Tuple[Tuple[float, ...], ...], ...]:
    """Return `CallReport.sums`: the sums of each update and local replica.

    Args:
        sums: of all micro-batches of a call, float32 [micro-batches x num_sums] or [micro-batches, num_sums].
        shape: the number of updates, of micro-batches per update, and of local replicas.
    """
    updates, micro_batches, replicas = shape
    of_replicas = sums.double().reshape(updates, micro_batches, replicas, -1).sum(dim=1)
    return tuple(tuple(tuple(row) for row in update) for update in of_replicas.tolist())


def call_words(geometry: Geometry, first_update: int, samples_digest: str) -> torch.Tensor:
    """Return what identifies a call and its samples: float32 [micro-batches of all local replicas, words]."""
    words = torch.tensor([_words(_number(first_update) + samples_digest)])
    return words.repeat(geometry.micro_batches_per_call, 1)


def lost_reports(
    state: Optional[ReplicaState], geometry: Geometry, missing: Sequence[Tuple[int, int]]
) -> Iterator[CallReport]:
    """Yield the missing reports whose results `state` has. They equal the lost ones, without times and saves.

    Args:
        state: the replicas' state; None if it is unknown.
        missing: (first update of the call, instance) of each report.
    """
    rows = (state or {"buffers": {}})["buffers"].get(_NAME)
    for first_update, instance in missing if rows is not None else ():
        replicas = geometry.replicas_of(instance)
        report = _report(rows[replicas.start : replicas.stop], geometry, first_update, instance)
        if report is not None:
            yield report


def without_rows(state: Optional[ReplicaState]) -> Optional[ReplicaState]:
    """Return the state of the replicas that a checkpoint contains."""
    if state is None:
        return None
    return {**state, "buffers": {name: values for name, values in state["buffers"].items() if name != _NAME}}


def with_empty_rows(state: Optional[ReplicaState], geometry: Geometry, num_sums: int) -> Optional[ReplicaState]:
    """Return a state of `without_rows` as a program with `RecentResults` loads it."""
    if state is None:
        return None
    rows = _no_rows(geometry, num_sums).repeat(geometry.total_replicas, 1, 1)
    return {**state, "buffers": {**state["buffers"], _NAME: rows}}


def _report(rows: torch.Tensor, geometry: Geometry, first_update: int, instance: int) -> Optional[CallReport]:
    """Return the report of a call from the rows of an instance: [local replicas, rows, columns]; None if not there."""
    number = torch.tensor(_words(_number(first_update)))
    num_sums = rows.shape[-1] - _WORDS
    is_of_call = (rows[0, :, num_sums : num_sums + _UPDATE_WORDS] == number).all(dim=1)
    if int(is_of_call.sum()) != _rows_per_call(geometry):
        return None
    # In the order of the outputs of a call.
    of_call = rows[:, is_of_call].transpose(0, 1).reshape(-1, num_sums + _WORDS)
    sums = replica_sums(of_call[:, :num_sums], geometry.call_shape)
    digest = "".join(f"{int(word):0{_WORD_DIGITS}x}" for word in of_call[0, num_sums + _UPDATE_WORDS :].tolist())
    return CallReport(instance, first_update, sums, samples_digest=digest)


def _no_rows(geometry: Geometry, num_sums: int) -> torch.Tensor:
    per_call = _rows_per_call(geometry)
    calls = max(2, min(_MOST_CALLS, _MICRO_BATCHES // per_call))
    return torch.zeros(calls * per_call, num_sums + _WORDS)


def _rows_per_call(geometry: Geometry) -> int:
    """Return the micro-batches of one replica in a call."""
    return geometry.device_iterations * geometry.gradient_accumulation


def _number(first_update: int) -> str:
    """Return the hexadecimal number of a call; 0 marks an empty row."""
    return f"{first_update + 1:0{_UPDATE_WORDS * _WORD_DIGITS}x}"


def _words(digits: str) -> List[float]:
    return [float(int(digits[start : start + _WORD_DIGITS], 16)) for start in range(0, len(digits), _WORD_DIGITS)]
