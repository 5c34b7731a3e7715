"""The engine behind the collectives: a thread that runs them in the background, as Horovod's does (section 8).

Operations are known by their keys. In each round the engines of all ranks tell each other what their programs have
asked for, and run what all of them have: ranks may ask in any order, and an operation waits until every rank has asked
for it. A round takes place when every rank has something to do, so that an engine without work is silent.

Ranks that disagree about an operation all get the same error for it and go on. So do ranks that wait for each other: if
nothing can run and every rank's program is waiting, it never will.
"""

from __future__ import annotations

import json
import os
import threading
import time
from itertools import groupby
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set

import torch
from _emulated_pod import Group, timeout_s

from horovod.common.exceptions import HorovodInternalError
from horovod.torch._operations import Allreduce, Description, Join, Operation, run_together

_INLINE_BYTES = 2048  # of a rank's news that travel at once; longer ones take a second message
_PAUSE_S = 0.001  # between rounds in which nothing could run
_ENDS_WITHIN_S = 5.0
_SHUT_DOWN = "Horovod has been shut down, here or by a rank that has ended or failed"
_DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently"
    " being processed. If you want to request another tensor, use a different tensor name."
)


class _News(NamedTuple):
    """What one rank tells in a round."""

    joined: bool
    is_waiting: bool
    asked: Dict[str, Description]


class Engine:
    """Runs this rank's operations. Safe to be used from several threads."""

    def __init__(self, wires: Group) -> None:
        self._wires = wires
        self._changed = threading.Condition()
        self._alone = threading.Lock()  # one round at a time where there is no thread for them
        self._pending: Dict[str, Operation] = {}
        self._unnamed = 0
        self._users: Set[threading.Thread] = set()
        self._waiting: Dict[threading.Thread, Operation] = {}
        self._rank_set: Set[int] = set()  # that have joined
        self._last_joined = -1
        self._ended = ""
        self._thread: Optional[threading.Thread] = None
        if wires.size > 1:
            self._thread = threading.Thread(target=self._serve, name="horovod", daemon=True)
            self._thread.start()

    def submit(self, make: Callable[[str], Operation], kind: str, name: Optional[str]) -> Operation:
        """Takes on the operation that `make` makes of its key.

        ValueError if one of that name is under way, HorovodInternalError after the end.
        """
        with self._changed:
            if self._ended:
                raise HorovodInternalError(self._ended)
            operation = make(f"{kind}.{name}" if name else f"{kind}.noname.{self._unnamed}")
            key = operation.description.key
            if key in self._pending:
                raise ValueError(f"{_DUPLICATE} [{key}]")
            self._unnamed += 1
            self._pending[key] = operation
            self._users = {each for each in self._users if each.is_alive()} | {threading.current_thread()}
            self._changed.notify_all()
        if self._thread is None:
            with self._alone:
                self._round()
        return operation

    def wait(self, operation: Operation) -> Any:
        """The operation's result; HorovodInternalError if it fails, or is not done within EMULATED_POD_TIMEOUT_S."""
        me = threading.current_thread()
        bound_s = timeout_s() + _ENDS_WITHIN_S  # the wires' own bound comes first, and knows more
        with self._changed:
            self._waiting[me] = operation
            self._changed.wait_for(lambda: operation.is_done, bound_s)
            del self._waiting[me]
            if not operation.is_done:
                raise HorovodInternalError(f"waited {bound_s:g} s for {operation.description.key}")
        if operation.error is not None:
            raise HorovodInternalError(str(operation.error)) from operation.error
        return operation.result

    def close(self) -> None:
        """Ends the thread; what is under way fails, here and on the other ranks."""
        with self._changed:
            busy = bool(self._pending)
            self._ended = self._ended or _SHUT_DOWN
            self._changed.notify_all()
        if self._thread is not None:
            if busy:
                self._wires.abandon(_SHUT_DOWN)
            self._thread.join(_ENDS_WITHIN_S)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        reason = _SHUT_DOWN
        try:
            while self._wait_for_work():
                if not self._round():
                    time.sleep(_PAUSE_S)
        except RuntimeError as error:
            reason = str(error)
        finally:
            self._end(reason)

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._ended)
            return not self._ended

    def _round(self) -> bool:
        """One round with all ranks; whether anything was done in it."""
        news = self._tell(self._own_news())
        self._note_joined(news)
        active = [rank for rank, told in enumerate(news) if not told.joined]
        if not active:
            return self._end_of_data()
        ready = [key for key in news[active[0]].asked if all(key in news[rank].asked for rank in active)]
        self._run([self._settled(key, news, active) for key in ready])
        if not ready and all(told.is_waiting for told in news):
            calls = "; ".join(f"rank {rank}: {_calls(told)}" for rank, told in enumerate(news))
            error = RuntimeError(f"the ranks are out of step, they do not call the same: {calls}")
            own = [self._pending[key] for key in news[self._wires.rank].asked]
            self._finish([operation for operation in own if not isinstance(operation, Join)], error)
            return True
        return bool(ready)

    def _own_news(self) -> _News:
        with self._changed:
            asked = {key: operation.description for key, operation in self._pending.items()}
            joined = any(isinstance(operation, Join) for operation in self._pending.values())
            stuck = {thread for thread, operation in self._waiting.items() if not operation.is_done}
            is_waiting = all(thread in stuck or not thread.is_alive() for thread in self._users)
        return _News(joined, is_waiting, asked)

    def _tell(self, own: _News) -> List[_News]:
        """Everyone's news, by rank."""
        if self._wires.size == 1:
            return [own]
        told = json.dumps([own.joined, own.is_waiting, list(own.asked.values())]).encode()
        news = []
        for text in _gather_bytes(self._wires, told):
            joined, is_waiting, asked = json.loads(text)
            news.append(_News(joined, is_waiting, {each[0]: Description(*each) for each in asked}))
        return news

    def _note_joined(self, news: Sequence[_News]) -> None:
        joined = {rank for rank, told in enumerate(news) if told.joined}
        if joined - self._rank_set:
            self._last_joined = max(joined - self._rank_set)
        self._rank_set = joined

    def _end_of_data(self) -> bool:
        """All ranks have joined."""
        joins = [operation for operation in self._unfinished() if isinstance(operation, Join)]
        for operation in joins:
            operation.result = self._last_joined
        self._rank_set, self._last_joined = set(), -1
        with self._changed:
            self._unnamed = 0  # some ranks have asked for more than others
        self._finish(joins)
        return True

    def _settled(self, key: str, news: Sequence[_News], active: Sequence[int]) -> Operation:
        """The operation that all active ranks have asked for; with its error if they do not agree about it."""
        told = {rank: each.asked[key] for rank, each in enumerate(news) if key in each.asked}
        first = told[active[0]]
        operation = self._pending[key] if self._wires.rank in told else _of_a_joined_rank(first)
        operation.owns = [told[rank].own if rank in told else [] for rank in range(len(news))]
        if len(told) < len(news) and first.kind != Allreduce.kind:
            operation.error = RuntimeError(
                f"{first.kind.capitalize()} is not supported with Join: rank"
                f" {', '.join(str(rank) for rank in range(len(news)) if rank not in told)} has joined"
            )
        elif any(first.differences(other) != ("", "") for other in told.values()):
            operation.error = RuntimeError(f"Mismatched {first.kind} of {key!r}: {_disagreement(told)}")
        return operation

    def _run(self, operations: Sequence[Operation]) -> None:
        failed = [operation for operation in operations if operation.error is not None]
        for operation in failed:
            self._finish([operation], operation.error)
        sound = [operation for operation in operations if operation.error is None]
        for _, members in groupby(sound, key=lambda each: (each.kind, each.description.how)):
            together = list(members)
            fusable = [each for each in together if isinstance(each, Allreduce)]
            if fusable:
                run_together(self._wires, fusable)
            for operation in together[len(fusable) :]:
                operation.run(self._wires, operation.owns)
            self._finish(together)

    def _unfinished(self) -> List[Operation]:
        with self._changed:
            return list(self._pending.values())

    def _finish(self, operations: Sequence[Operation], error: Optional[Exception] = None) -> None:
        with self._changed:
            for operation in operations:
                operation.error, operation.is_done = error, True
                self._pending.pop(operation.description.key, None)
            self._changed.notify_all()

    def _end(self, reason: str) -> None:
        with self._changed:
            self._ended = self._ended or reason
        self._finish(self._unfinished(), RuntimeError(self._ended))


def _of_a_joined_rank(told: Description) -> Operation:
    """What it does while the others carry out what it has not asked for."""
    return Allreduce.of_zeros(told) if told.kind == Allreduce.kind else Operation(told.key, told.how, told.tensors)


def _gather_bytes(wires: Group, text: bytes) -> List[bytes]:
    """Everyone's bytes, by rank, however many."""
    row = torch.zeros(8 + _INLINE_BYTES, dtype=torch.uint8)
    head = len(text).to_bytes(8, "little") + text[:_INLINE_BYTES]
    row[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    table = wires.gather(row)
    lengths = [int.from_bytes(bytes(other[:8].tolist()), "little") for other in table]
    found = [other[8:] for other in table]
    if max(lengths) > _INLINE_BYTES:
        whole = torch.zeros(max(lengths), dtype=torch.uint8)
        whole[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = list(wires.gather(whole))
    return [other[:length].numpy().tobytes() for other, length in zip(found, lengths)]


def _disagreement(told: Dict[int, Description]) -> str:
    """Who says what, where they differ from the first rank."""
    ranks = list(told)
    first = told[ranks[0]]
    different = next(told[rank] for rank in ranks if first.differences(told[rank]) != ("", ""))
    texts = {ranks[0]: first.differences(different)[0]}
    for rank in ranks[1:]:
        own, other = first.differences(told[rank])
        texts[rank] = other if own else "as rank " + str(ranks[0])
    return "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())


def _calls(told: _News) -> str:
    return "join" if told.joined else ", ".join(told.asked)


# ---- the engine of this process ------------------------------------------------------------------------------------

_engine: Optional[Engine] = None


def start(wires: Group) -> None:
    """Starts this process's engine; without effect if it runs."""
    global _engine
    if _engine is None:
        _engine = Engine(wires)


def stop() -> None:
    """Ends it. Idempotent; to be called before the process ends."""
    global _engine
    if _engine is not None:
        _engine.close()
        _engine = None


def engine() -> Engine:
    """This process's engine; HorovodInternalError if none runs."""
    if _engine is None:
        raise HorovodInternalError("Horovod has not been initialized; use hvd.init().")
    return _engine


def _forget_in_a_forked_child() -> None:
    """Its thread is not there, and its wires belong to the parent."""
    global _engine
    _engine = None


os.register_at_fork(after_in_child=_forget_in_a_forked_child)
