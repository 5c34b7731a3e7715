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
from raypod.model import classification
from raypod.plan.plan import Geometry

_MOST_CALLS, _MICRO_BATCHES = 64, 1024  # more than a process completes before its reports are sent
_NAME = "recent_results.rows"  # of the buffer in the training step
_WORD_DIGITS = 4  # hexadecimal: float32 represents such integers exactly
_UPDATE_WORDS, _DIGEST_WORDS = 2, 4
_COLUMNS = 2 + _UPDATE_WORDS + _DIGEST_WORDS
ReplicaState = Dict[str, Any]  # of `program.read_replica_state`


class RecentResults(nn.Module):
    """Appends the results of every micro-batch to a buffer of constant size."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.rows: torch.Tensor
        self.register_buffer("rows", _no_rows(geometry), persistent=False)

    def forward(self, loss: torch.Tensor, metric: torch.Tensor, call: torch.Tensor) -> None:
        """Append loss and metric (both 0-d) of a micro-batch, and its row of `call_words`."""
        results = torch.stack([loss.detach(), metric.float()]).unsqueeze(0)
        self.rows.copy_(torch.cat([self.rows[1:], torch.cat([results, call], dim=1)]))


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


def with_empty_rows(state: Optional[ReplicaState], geometry: Geometry) -> Optional[ReplicaState]:
    """Return a state of `without_rows` as a program with `RecentResults` loads it."""
    if state is None:
        return None
    rows = _no_rows(geometry).repeat(geometry.total_replicas, 1, 1)
    return {**state, "buffers": {**state["buffers"], _NAME: rows}}


def _report(rows: torch.Tensor, geometry: Geometry, first_update: int, instance: int) -> Optional[CallReport]:
    """Return the report of a call from the rows of an instance: [local replicas, rows, columns]; None if not there."""
    number = torch.tensor(_words(_number(first_update)))
    is_of_call = (rows[0, :, 2 : 2 + _UPDATE_WORDS] == number).all(dim=1)
    if int(is_of_call.sum()) != _rows_per_call(geometry):
        return None
    of_call = rows[:, is_of_call].transpose(0, 1).reshape(-1, _COLUMNS)  # in the order of the outputs of a call
    outputs = (of_call[:, 0].contiguous(), of_call[:, 1].contiguous())
    results = classification.replica_results(outputs, geometry.call_shape)
    digest = "".join(f"{int(word):0{_WORD_DIGITS}x}" for word in of_call[0, 2 + _UPDATE_WORDS :].tolist())
    return CallReport(instance, first_update, **results, samples_digest=digest)


def _no_rows(geometry: Geometry) -> torch.Tensor:
    per_call = _rows_per_call(geometry)
    calls = max(2, min(_MOST_CALLS, _MICRO_BATCHES // per_call))
    return torch.zeros(calls * per_call, _COLUMNS)


def _rows_per_call(geometry: Geometry) -> int:
    """Return the micro-batches of one replica in a call."""
    return geometry.device_iterations * geometry.gradient_accumulation


def _number(first_update: int) -> str:
    """Return the hexadecimal number of a call; 0 marks an empty row."""
    return f"{first_update + 1:0{_UPDATE_WORDS * _WORD_DIGITS}x}"


def _words(digits: str) -> List[float]:
    return [float(int(digits[start : start + _WORD_DIGITS], 16)) for start in range(0, len(digits), _WORD_DIGITS)]
