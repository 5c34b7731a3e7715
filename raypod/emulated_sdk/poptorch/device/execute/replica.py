"""A replica that runs the forwards of its micro-batches, and the threads in which the replicas of a process run."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import math
import os
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Callable, ContextManager, DefaultDict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from _pod import telemetry
from _pod.activation import REPLICA_CPUS, REPLICAS_AT_A_TIME
from torch.overrides import _get_current_function_mode_stack

from poptorch.device.compile.arguments import AnchorRecorder, Arguments
from poptorch.device.compile.compilation import CompiledForward, Trace
from poptorch.device.compile.memory import ReplicaMemory
from poptorch.device.kernels.numerics import HalfMode, device_random, mixed_seed
from poptorch.device_mode import DeviceMode, OnDevice, to_device
from poptorch.errors import Error
from poptorch.python_state import ReplicaObjects
from poptorch.pytree import TreeSpec, flatten

_ON_DEVICE = OnDevice()
_NO_CONTEXT: ContextManager[Any] = contextlib.nullcontext()
_TRIALS, _PERIOD = 3, 5000  # calls that measure each choice of threads, and calls until it is measured again
_MOST_SHORT_S = 5e-3  # of work in threads: longer work gains from them


class Forward(NamedTuple):
    """The detached outputs of one forward, and its final loss (training only)."""

    outputs: List[torch.Tensor]
    loss: Optional[torch.Tensor]


class Replica:
    """Runs micro-batches on one replica's module, in one thread at a time.

    Args:
        memory: the replica's module and tensors.
        arguments: the compiled arguments.
        traced: the trace of the forward.
        index: the global index of the replica.
        anchored: the names of the anchored tensors.
        is_stochastic: round to half stochastically.
        compiled: runs in place of the module.

    Attributes:
        anchor_recorder: records the anchored tensors; None if there are none.
        inputs_complete_s: when the inputs of the last micro-batch were on the device, by `time.perf_counter`.
        micro_batches: the micro-batches run so far. With `seed` it determines the random numbers.
    """

    def __init__(
        self,
        memory: ReplicaMemory,
        arguments: Arguments,
        traced: Trace,
        index: int,
        anchored: Sequence[str],
        is_stochastic: bool,
        compiled: Optional[CompiledForward],
    ) -> None:
        self.memory = memory
        self.anchor_recorder = AnchorRecorder(memory.module, anchored) if anchored else None
        self.inputs_complete_s = 0.0
        self.micro_batches = 0
        self.seed = 0
        # Inputs that the forwards of this call have changed in place: the caller's tensor, and that of the device.
        self.changed_inputs: List[Tuple[torch.Tensor, torch.Tensor]] = []
        self._arguments = arguments
        self._compiled = None if compiled is None else compiled.of(memory)
        self._index = index
        self._traced = traced
        originals = memory.originals if traced.uses_originals else None
        self._mode = None if traced.is_plain else DeviceMode(originals=originals)
        self._half_mode = HalfMode(is_stochastic) if traced.has_half else None
        self._objects = ReplicaObjects(memory.module, traced.changes)
        self.save_constants()
        self._memory_addresses = frozenset(tensor.untyped_storage().data_ptr() for tensor in memory.tensors.values())

    def forward(self, inputs: List[torch.Tensor]) -> Forward:
        """Run the module on one micro-batch, given as views into the combined batch."""
        on_device = [to_device(tensor) for tensor in inputs]
        self.inputs_complete_s = time.perf_counter()
        if self.anchor_recorder is not None:
            self.anchor_recorder.begin(self._arguments.spec.names, on_device)
        self._restore_constants()
        try:
            with self._objects.shared, self._random(self._traced.draws), self._mode or _ON_DEVICE:
                tensors, structure = self._outputs(on_device)
        finally:
            self._objects.restore()
        self.micro_batches += 1
        self.changed_inputs += [(inputs[index], on_device[index]) for index in self._traced.changed_inputs]
        if structure != self._traced.structure:
            raise Error(f"forward returned {structure}, but {self._traced.structure} when it was compiled")
        return Forward([self._detached(tensor) for tensor in tensors], self._loss(tensors))

    def _outputs(self, inputs: List[torch.Tensor]) -> Tuple[List[torch.Tensor], TreeSpec]:
        if self._compiled is not None:
            return self._compiled(inputs), self._traced.structure
        args, kwargs = self._arguments.unflatten(inputs)
        return flatten(self.memory.module(*args, **kwargs))

    def end_micro_batch(self) -> None:
        """Release the graph of buffers that forward has updated: a buffer is state, not a part of the next graph."""
        for buffer in self.memory.buffers.values():
            if buffer.requires_grad:
                buffer.detach_()

    def _loss(self, outputs: List[torch.Tensor]) -> Optional[torch.Tensor]:
        if self._mode is not None:
            return self._mode.marks[-1] if self._mode.marks else None
        return None if self._traced.loss_output is None else outputs[self._traced.loss_output]

    def backward_random(self) -> ContextManager[Any]:
        """Return the context for the backward pass of the last micro-batch."""
        return self._random(self._traced.backward_draws)

    def arithmetic(self) -> ContextManager[Any]:
        """Return the context for the forward and backward pass of the next micro-batch."""
        if self._half_mode is None:
            return _NO_CONTEXT
        # Not the numbers that the model draws (`_index`), nor those that round the weights (-1).
        self._half_mode.seed(mixed_seed(self.seed, -2 - self._index, self.micro_batches))
        return self._half_mode

    def _random(self, draws: bool) -> ContextManager[Any]:
        if draws:
            return device_random(self.seed, self._index, self.micro_batches)
        return _NO_CONTEXT

    def _detached(self, output: torch.Tensor) -> torch.Tensor:
        # An output that is a weight or a buffer may change before the call ends.
        detached = output.detach()
        return detached.clone() if detached.untyped_storage().data_ptr() in self._memory_addresses else detached

    def save_constants(self) -> None:
        """Save the present values of the constant buffers: later forwards begin with them."""
        self._constants = [(tensor, tensor._version, tensor.clone()) for tensor in self.memory.constants.values()]

    def _restore_constants(self) -> None:
        """Undo the last forward's changes to integer and bool buffers, which are compile-time constants."""
        for index, (tensor, version, value) in enumerate(self._constants):
            if tensor._version != version:
                tensor.copy_(value)
                self._constants[index] = (tensor, tensor._version, value)


class ReplicaThreads:
    """Runs each replica in a thread, as many at a time as there are cores.

    Replicas that wait for one another (`at_once`) all run at the same time. Others run in the caller's thread, one
    after the other, where one computes at a time, and where short work is faster so: threads pass work and the
    interpreter lock to one another.

    `EMULATED_POD_REPLICAS_AT_A_TIME` limits their number where several processes share the cores.
    `EMULATED_POD_REPLICA_CPUS` (as in `0,1;2,3`) binds the threads to CPUs, and each replica to one of the threads, so
    that it stays near its memory.
    """

    def __init__(self, replicas: int, at_once: bool = False) -> None:
        self._replicas = replicas
        self._pools: List[ThreadPoolExecutor] = []
        self._times: DefaultDict[str, _Times] = collections.defaultdict(_Times)  # by kind of work
        self._at_once = at_once
        cpus = _replica_cpus()[:replicas]
        in_pool = replicas if at_once else 1
        pools = [(sorted(each), in_pool) for each in cpus] or [([], min(replicas, max(in_pool, _at_a_time())))]
        is_one_at_a_time = pools in ([([], 1)], [(sorted(os.sched_getaffinity(0)), 1)])
        if replicas == 1 or is_one_at_a_time:
            return
        for each, workers in pools:
            # A new thread takes torch's number of intra-op threads only at its first parallel region, when oneDNN may
            # have read OpenMP's number already.
            pool = ThreadPoolExecutor(
                max_workers=workers,  # more threads would evict each other's caches
                thread_name_prefix="replica",
                initializer=_begin_thread,
                initargs=(torch.get_num_threads(), each),
            )
            self._pools.append(pool)
            weakref.finalize(self, pool.shutdown, wait=False)

    def each(self, kind: str, work: Callable[[int], None]) -> None:
        """Run `work(replica)` for every replica and wait for all; raises the error of the first that failed.

        How long work of this kind takes decides in which threads it runs.
        """
        if not self._pools:
            self._each_in_caller(work)
        elif self._at_once:
            self._each_in_threads(work)
        else:
            times = self._times[kind]
            is_in_caller, began = times.is_in_caller(), time.perf_counter()
            (self._each_in_caller if is_in_caller else self._each_in_threads)(work)
            times.add(is_in_caller, time.perf_counter() - began)

    def _each_in_caller(self, work: Callable[[int], None]) -> None:
        for replica in range(self._replicas):
            contextvars.copy_context().run(work, replica)

    def _each_in_threads(self, work: Callable[[int], None]) -> None:
        caller = _ThreadState()
        futures: List[Future[None]] = [
            self._pools[replica * len(self._pools) // self._replicas].submit(
                contextvars.copy_context().run, caller.run, work, replica
            )
            for replica in range(self._replicas)
        ]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C: wait until no replica runs any more
            for future in futures:
                future.cancel()
            wait(futures)
            raise
        for future in futures:
            future.result()

    def close(self) -> None:
        """Stop the threads."""
        for pool in self._pools:
            pool.shutdown()


class _Times:
    """How long work takes in threads and in the caller's thread: measured in turn, once in a period."""

    def __init__(self) -> None:
        self._call = 0  # of the period
        self._in_threads_s = self._in_caller_s = math.inf  # the shortest

    def is_in_caller(self) -> bool:
        """Return whether the next call is to run in the caller's thread."""
        if self._call < _TRIALS:
            return False
        if self._call < 2 * _TRIALS:
            return self._in_threads_s < _MOST_SHORT_S
        return self._in_caller_s < self._in_threads_s

    def add(self, is_in_caller: bool, duration_s: float) -> None:
        """Add the duration of a call."""
        if self._call == 0:
            self._in_threads_s = self._in_caller_s = math.inf
        if is_in_caller and self._call < 2 * _TRIALS:
            self._in_caller_s = min(self._in_caller_s, duration_s)
        elif self._call < _TRIALS:
            self._in_threads_s = min(self._in_threads_s, duration_s)
        self._call = (self._call + 1) % _PERIOD


class _ThreadState:
    """The caller's thread-local state of torch that a forward can observe, to be set in the replicas' threads.

    Autocast and inference mode are disabled on the device, and the program sets the grad mode.
    """

    def __init__(self) -> None:
        # For example the default device. The mode objects are shared: entering them again would change them.
        self._modes: List[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._threads = torch.get_num_threads()
        self._caller = threading.get_ident()

    def run(self, work: Callable[[int], None], replica: int) -> None:
        """Run `work(replica)` in the present thread with this state."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        for mode in self._modes:
            torch._C._push_on_torch_function_stack(mode)
        try:
            with telemetry.working_for(self._caller):
                work(replica)
        finally:
            for _ in self._modes:
                torch._C._pop_torch_function_stack()


def _begin_thread(threads: int, cpus: List[int]) -> None:
    """Set the intra-op threads of the present thread, and the CPUs of it and of the threads that it starts."""
    torch.set_num_threads(threads)
    torch.set_autocast_cache_enabled(False)  # as `caller_modes_disabled`
    if cpus:
        os.sched_setaffinity(0, cpus)


def _at_a_time() -> int:
    """Return how many replicas compute at the same time: by default as many as there are usable cores."""
    text = os.environ.get(REPLICAS_AT_A_TIME)
    if text is None:
        return len(os.sched_getaffinity(0))
    if not text.isdigit() or int(text) < 1:
        raise Error(f"{REPLICAS_AT_A_TIME}={text}: must be a whole number, 1 or more")
    return int(text)


def _replica_cpus() -> List[List[int]]:
    """Return the CPUs of each thread in which replicas run; [] if the threads are not bound."""
    text = os.environ.get(REPLICA_CPUS, "")
    try:
        return [[int(cpu) for cpu in part.split(",")] for part in text.split(";")] if text else []
    except ValueError:
        raise Error(f"{REPLICA_CPUS}={text}: must be lists of CPUs, as in 0,1;2,3") from None
