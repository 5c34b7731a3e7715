"""A call besides its arithmetic: what it returns by output mode, what a failed one leaves, and what a real device does.

A call is a transaction: one that fails leaves the device's state as it was.

After a peer is lost in the middle of a call, every process has the state after its last complete call. (On real
IPUs the state after a failed call is undefined, and programs do not read it.)

Weights and optimizer state are the same in every process. Buffers (running statistics) belong to one replica and would
be lost with its process, so every process stores the buffers of ALL replicas as of the last complete call. The replicas
flag changed buffers beside their gradients, and the processes exchange those buffers before the weights change.

PopTorch releases the interpreter lock only while it compiles (source: the bindings of `poptorch_core`). Other threads
of the process do not run meanwhile. The emulation works with torch, which releases the lock; these variables hold it:

    EMULATED_POD_CALL_S    seconds for which each call holds the lock, after the call's own time
    EMULATED_POD_LOAD_S    the same when a model attaches to the device

EMULATED_POD_DEVICE_FAULT says how a call ends that loses a peer, as on IPUs:

    raise[:ACTION]       RecoverableError; the device can still be read, and used again
    unusable[:ACTION]    RecoverableError; from then on every use of a compiled model in this process is an Error
    unrecoverable        UnrecoverableError, and the same
    hang                 holds the interpreter lock for EMULATED_POD_TIMEOUT_S; then Error: the host sync timed out
    @FILE                what FILE contains as the peer is lost, for a fault in a program that runs; nothing without it

ACTION is the `recovery_action`, by default IPU_RESET. Without the variable the call raises PeerFailed.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Set, Tuple

import torch
from _pod.gradient_sum import Placement
from _pod.rendezvous import PeerFailed, timeout_s
from _pod.wires import as_bytes

from poptorch.device.compile.arguments import FINAL_LOSS_SCALE, GRADIENT, UPDATED, Anchor, AnchorRecorder, BatchLayout
from poptorch.device.compile.memory import DeviceMemory
from poptorch.device.execute.replica import Replica
from poptorch.device_mode import API_DTYPE
from poptorch.enums import OutputMode
from poptorch.errors import Error, RecoverableError, UnrecoverableError
from poptorch.optimizers.device_optimizer import DeviceOptimizer

Gather = Callable[[torch.Tensor], torch.Tensor]


class CallTransaction:
    """Saves and restores what an inference changes: buffers and micro-batch counters of the replicas, and inputs."""

    def __init__(self, replicas: List[Replica]) -> None:
        self._replicas = replicas
        self._micro_batches: List[int] = []
        self._saved_buffers: List[Dict[str, torch.Tensor]] = []

    def begin(self) -> None:
        """Save what the call changes."""
        self._micro_batches = [replica.micro_batches for replica in self._replicas]
        self._save_buffers()

    def roll_back(self) -> None:
        """Restore the state before the call."""
        for replica, micro_batches in zip(self._replicas, self._micro_batches):
            replica.micro_batches = micro_batches
            replica.changed_inputs.clear()
        self._restore_buffers()

    def commit(self) -> None:
        """Complete the call: copy the inputs that forward changes in place back to the caller's tensors.

        inferred: the SDK's documentation does not state this.
        """
        for replica in self._replicas:
            for host, device in replica.changed_inputs:
                with torch.inference_mode(host.is_inference()), torch.no_grad():  # False enables gradients
                    host.copy_(device)
            replica.changed_inputs.clear()

    def buffers_uploaded(self) -> None:
        """Take over buffers that were copied from the host."""

    def _save_buffers(self) -> None:
        self._saved_buffers = [
            {name: buffer.clone() for name, buffer in replica.memory.buffers.items()} for replica in self._replicas
        ]

    def _restore_buffers(self) -> None:
        with torch.no_grad():
            for replica, saved in zip(self._replicas, self._saved_buffers):
                for name, value in saved.items():
                    replica.memory.buffers[name].copy_(value)


class TrainingTransaction(CallTransaction):
    """Saves and restores weights, optimizer state, buffers and micro-batch counters of a training program.

    A single update changes the weights in its last step, which cannot fail; only calls of several updates, and those
    that check the new weights, need a copy of them (`saves_weights`).
    """

    def __init__(
        self,
        memory: DeviceMemory,
        optimizer: DeviceOptimizer,
        replicas: List[Replica],
        buffers: ReplicaBuffers,
        saves_weights: bool,
    ) -> None:
        super().__init__(replicas)
        self._memory, self._optimizer, self._buffers = memory, optimizer, buffers
        self._saves_weights = saves_weights
        self._weights: List[torch.Tensor] = []
        self._optimizer_state: List[Any] = []
        self._loss_scale_factor: Optional[float] = None

    def begin(self) -> None:
        super().begin()
        if self._saves_weights:
            with torch.no_grad():
                self._weights = [weight.clone() for weight in self._memory.updated.values()]
            self._optimizer_state = self._optimizer.snapshot()
            self._loss_scale_factor = self._optimizer.loss_scale_update_factor

    def roll_back(self) -> None:
        super().roll_back()
        if self._saves_weights:
            with torch.no_grad():
                for name, value in zip(self._memory.updated, self._weights):
                    self._memory.updated[name].copy_(value)
                    self._memory.parameters[name].copy_(value)
            self._optimizer.restore(self._optimizer_state)
            self._optimizer.loss_scale_update_factor = self._loss_scale_factor

    def commit(self) -> None:
        """Store the exchanged buffers, and copy changed inputs back."""
        self._buffers.commit()
        super().commit()

    def buffers_uploaded(self) -> None:
        self._buffers.take_local()

    def _save_buffers(self) -> None:
        """Do nothing: `ReplicaBuffers` has those of the last complete call."""

    def _restore_buffers(self) -> None:
        self._buffers.roll_back()


class ReplicaBuffers:
    """The floating point buffers of all replicas of all processes, as of the last complete call.

    A buffer that no replica has changed so far is the same everywhere, and stored once.
    """

    def __init__(self, memory: DeviceMemory, placement: Placement) -> None:
        self._replicas = [replica.buffers for replica in memory.replicas]
        self._placement = placement
        self._names = list(self._replicas[0])
        self._was_changed = [False] * len(self._names)  # by any replica, in any call
        self._committed: Dict[str, torch.Tensor] = {}
        self._received: Optional[Dict[str, torch.Tensor]] = None
        self.take_local()

    def take_local(self) -> None:
        """Commit the buffers of the local replicas.

        Other processes' buffers are assumed to equal those of the local replica 0 until their next call.
        """
        total = self._placement.total_replicas
        for name, was_changed in zip(self._names, self._was_changed):
            row = self._replicas[0][name].detach().clone().unsqueeze(0)
            self._committed[name] = row.expand(total, *row.shape[1:])
            if was_changed:
                self._commit_local(name)

    def changed(self, replica: int, is_last: bool) -> torch.Tensor:
        """Return which buffers this replica changed in this call or any replica changed before: 1 for changed.

        Buffers are compared in the last update of a call only; in other updates the flags are 0.

        Returns:
            A float32 tensor of shape [buffers].
        """
        first = self._placement.first_replica
        if is_last:
            flags = [
                float(changed or not torch.equal(self._replicas[replica][name], self._committed[name][first + replica]))
                for name, changed in zip(self._names, self._was_changed)
            ]
            return torch.tensor(flags, dtype=torch.float32)
        return torch.zeros(len(self._names))

    def exchange(self, changed: List[float], gather: Gather) -> None:
        """Gather from all processes the buffers that any replica changed.

        Args:
            changed: the sum of `changed()` over all replicas.
            gather: gathers one row of bytes per process, as a tensor of shape [processes, bytes].

        Raises:
            RuntimeError: a peer is lost or does not answer.
        """
        self._was_changed = [before or bool(count) for before, count in zip(self._was_changed, changed)]
        names = [name for name, was_changed in zip(self._names, self._was_changed) if was_changed]
        self._received = {}
        if not names:
            return
        local = {name: torch.stack([replica[name].detach() for replica in self._replicas]) for name in names}
        row = torch.cat([as_bytes(local[name]) for name in names])
        table = gather(row)
        start = 0
        for name in names:
            values, stop = local[name], start + local[name].numel() * local[name].element_size()
            columns = table[:, start:stop].contiguous()
            shape = (self._placement.total_replicas, *values.shape[1:])
            self._received[name] = columns.flatten().view(values.dtype).view(shape)
            start = stop

    def commit(self) -> None:
        """Store the buffers received in the last exchange."""
        self._committed.update(self._received or {})
        self._received = None

    def roll_back(self) -> None:
        """Restore the local replicas' buffers."""
        self._received = None
        self._write_local()

    def state(self) -> Dict[str, torch.Tensor]:
        """Return a copy of every buffer, of shape [total replicas, *shape]."""
        return {name: values.clone() for name, values in self._committed.items()}

    def load(self, state: Dict[str, torch.Tensor]) -> None:
        """Load a `state()`. Raises Error if its buffers or its number of replicas differ."""
        for name in {**self._committed, **state}:
            expected = tuple(self._committed[name].shape) if name in self._committed else "no such buffer"
            given = tuple(state[name].shape) if name in state else "missing"
            if expected != given:
                raise Error(f"The state of the replicas does not fit: {name!r} is {given}, but {expected} is expected")
        for name in self._names:
            self._committed[name] = state[name].to(self._committed[name].dtype, copy=True)
        self._write_local()

    def _write_local(self) -> None:
        first = self._placement.first_replica
        with torch.no_grad():
            for index, buffers in enumerate(self._replicas):
                for name, buffer in buffers.items():
                    buffer.copy_(self._committed[name][first + index])

    def _commit_local(self, name: str) -> None:
        self._committed[name] = self._committed[name].clone()
        for index, buffers in enumerate(self._replicas):
            self._committed[name][self._placement.first_replica + index] = buffers[name].detach()


class OutputCollector:
    """Collects the outputs that the output mode of a call returns.

    Each replica's thread accesses its own list only.

    Args:
        mode: the output mode.
        period: the device iterations between two outputs, for `OutputMode.EveryN`.
        layout: the layout of the batch.
        dtypes: the dtypes of the outputs at the API; None derives them from the dtypes on the device.
        name: of the only output, for messages; by default outputs have numbers.
    """

    def __init__(
        self,
        mode: OutputMode,
        period: int,
        layout: BatchLayout,
        dtypes: Optional[Sequence[torch.dtype]],
        name: str = "",
    ) -> None:
        self._name = name
        self._mode = mode
        self._period = period
        self._layout = layout
        self._dtypes = dtypes
        self._collected: List[List[List[torch.Tensor]]] = [[] for _ in range(layout.replicas)]

    def add(self, iteration: int, step: int, replica: int, outputs: List[torch.Tensor]) -> None:
        """Add one micro-batch's detached outputs; the micro-batches of a replica come in order.

        Raises:
            Error: outputs are summed, and have other shapes than those of the previous micro-batch.
        """
        collected = self._collected[replica]
        if self._mode == OutputMode.Sum and collected:
            for index, (total, output) in enumerate(zip(collected[0], outputs)):
                self._check_shapes(index, {total.shape, output.shape})
            collected[0] = [total + output for total, output in zip(collected[0], outputs)]
        elif self._is_returned(iteration, step):
            collected.append(outputs)

    def assemble(self) -> List[torch.Tensor]:
        """Return one tensor per output: the collected micro-batches in the order [iteration, step, replica]."""
        dtypes = self._dtypes
        if dtypes is None:
            dtypes = [API_DTYPE.get(output.dtype, output.dtype) for output in self._collected[0][0]]
        return [self._join(index, dtype) for index, dtype in enumerate(dtypes)]

    def _is_returned(self, iteration: int, step: int) -> bool:
        if self._mode == OutputMode.Final:
            is_last_step = step == self._layout.accumulation_steps - 1
            return is_last_step and iteration == self._layout.device_iterations - 1
        if self._mode == OutputMode.EveryN:
            return bool((iteration + 1) % self._period == 0)
        return True

    def _join(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        pieces = [outputs[index] for micro_batches in zip(*self._collected) for outputs in micro_batches]
        self._check_shapes(index, {piece.shape[1:] for piece in pieces}, ", after the batch dimension")
        result = _joined(pieces).to(dtype)
        result.backward = _NO_BACKWARD  # type: ignore[method-assign]
        return result

    def _check_shapes(self, index: int, shapes: Set[torch.Size], where: str = "") -> None:
        if len(shapes) > 1:
            name = self._name or f"Output number {index}"
            found = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise Error(f"{name} has micro-batches of different shapes{where}: {found}")


def _joined(pieces: List[torch.Tensor]) -> torch.Tensor:
    """Return one new contiguous tensor; a single scalar stays 0-d."""
    if pieces[0].dim():
        return torch.cat(pieces).contiguous()  # the pieces may be in another memory format
    return torch.stack(pieces) if len(pieces) > 1 else pieces[0].clone()


class _NoBackward:
    """The `backward` of every output: raises Error."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Error(
            "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
            "trainingModel, the backwards pass is performed automatically when invoking the model. If you're using an "
            "inferenceModel, you should use a trainingModel instead."
        )

    def __deepcopy__(self, memo: Dict[int, Any]) -> _NoBackward:
        return self

    def __reduce__(self) -> Any:
        # A saved output must load without poptorch and with `torch.load(weights_only=True)`, which allows this global.
        return collections.OrderedDict, ()


_NO_BACKWARD = _NoBackward()


class Scales(NamedTuple):
    """The loss scaling, and the factor from the gradients of the emulation to those of a micro-batch's loss."""

    loss: float
    gradient: float


class AnchorOutputs:
    """Collects the anchored tensors of one call, each by the output mode of its anchor."""

    def __init__(self, anchors: Sequence[Anchor], layout: BatchLayout) -> None:
        self._collectors = [
            (each, OutputCollector(each.mode, each.period, layout, None, f"The anchored tensor {each.short_name!r}"))
            for each in anchors
        ]
        self._layout = layout

    def add(self, iteration: int, step: int, replica: int, recorder: AnchorRecorder, scales: Scales) -> None:
        """Add one micro-batch's tensors."""
        for anchor, collector in self._collectors:
            if anchor.name.startswith(UPDATED):
                continue
            is_scale = anchor.name == FINAL_LOSS_SCALE
            tensor = torch.tensor(scales.loss) if is_scale else recorder.value(anchor.name)
            is_scaled = anchor.name.startswith(GRADIENT) and scales.gradient != 1.0
            collector.add(iteration, step, replica, [tensor * scales.gradient if is_scaled else tensor])
        recorder.end()

    def add_updated(self, iteration: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add the parameters after the update of an iteration, the same for all its micro-batches."""
        for anchor, collector in self._collectors:
            if anchor.name.startswith(UPDATED):
                value = parameters[anchor.name[len(UPDATED) :]].detach().clone()
                for replica in range(self._layout.replicas):
                    for step in range(self._layout.accumulation_steps):
                        collector.add(iteration, step, replica, [value])

    def assemble(self, updated: bool) -> Dict[str, torch.Tensor]:
        """Return one tensor for every short name of an updated parameter, or of what is known before the update.

        Raises:
            Error: the shapes of a tensor differ between micro-batches; those of parameters do not.
        """
        return {
            anchor.short_name: collector.assemble()[0]
            for anchor, collector in self._collectors
            if anchor.name.startswith(UPDATED) == updated
        }


FAULT_VARIABLE = "EMULATED_POD_DEVICE_FAULT"
_RECOVERY_ACTIONS = ("IPU_RESET", "LINK_RESET", "PARTITION_RESET", "FULL_RESET")
_APPLICATION_ERROR = "poplar_application_runtime_error"


class _DeviceState:
    is_usable = True  # of this process


@contextlib.contextmanager
def at_a_lost_peer() -> Iterator[None]:
    """Within this context the loss of a peer ends the call as the variable says; Error if its value is unknown."""
    _chosen_fault()
    try:
        yield
    except PeerFailed as error:
        fault, action = _chosen_fault()
        if not fault:
            raise
        _DeviceState.is_usable = fault in ("raise", "hang")
        if fault == "hang":
            _hold_for(timeout_s())
            raise Error(f"Host sync timed out: {error}", _APPLICATION_ERROR) from error
        if fault == "unrecoverable":
            raise UnrecoverableError(str(error)) from error
        raise RecoverableError(str(error), recovery_action=action) from error


def check_usable() -> None:
    """Raise Error if a fault has made the device of this process unusable."""
    if not _DeviceState.is_usable:
        raise Error("Application runtime error: the device is in an error state", _APPLICATION_ERROR)


def _chosen_fault() -> Tuple[str, str]:
    """Return the fault, "" for none, and its recovery action."""
    text = os.environ.get(FAULT_VARIABLE, "")
    if text.startswith("@"):
        file = Path(text[1:])
        text = file.read_text().strip() if file.exists() else ""
    fault, colon, action = text.partition(":")
    has_action = fault in ("raise", "unusable")
    if not (
        fault in ("", "hang", "unrecoverable")
        and not colon
        or has_action
        and (not colon or action in _RECOVERY_ACTIONS)
    ):
        raise Error(
            f"{FAULT_VARIABLE}={text}: must be raise, unusable, unrecoverable or hang; the first two may name a "
            f"recovery action, as in unusable:PARTITION_RESET ({', '.join(_RECOVERY_ACTIONS)})"
        )
    return fault, action or "IPU_RESET"


_MICROSECONDS = 1_000_000
_LIBC = ctypes.PyDLL(None)  # its functions run without releasing the lock


def hold_interpreter_lock(variable: str) -> None:
    """Hold the interpreter lock for the seconds of an environment variable.

    Raises:
        Error: it is set, and no number of seconds.
    """
    text = os.environ.get(variable)
    if not text:
        return
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise Error(f"{variable}={text}: must be a number of seconds")
    _hold_for(seconds)


def _hold_for(seconds: float) -> None:
    """Hold the interpreter lock for a time."""
    until = time.monotonic() + seconds
    while True:  # a signal ends a sleep
        left = until - time.monotonic()
        if left <= 0:
            return
        if left >= 1:
            _LIBC.sleep(int(left))
        else:
            _LIBC.usleep(int(left * _MICROSECONDS) + 1)
