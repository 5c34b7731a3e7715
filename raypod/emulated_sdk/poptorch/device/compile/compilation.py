"""Compilation: trace one forward, reject what the device cannot run, choose the memory format; torch.compile.

EMULATED_POD_MEMORY_FORMAT is `auto` (default), `contiguous` or `channels_last`, for convolution weights and
activations. `auto` depends only on the model and its forward, so all processes choose the same: `channels_last` for a
model with many weights in 2-D convolutions in float32, unless its forward takes a view that only contiguous activations
have. On an IPU the compiler chooses every layout.

With EMULATED_POD_COMPILE=1 the forward and backward pass of training programs are compiled by torch.compile. Its fused
kernels compute other bits than torch's operators, the same ones in every replica. A forward that it cannot compile as a
whole is an error: replicas must not differ in what they compute.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import shutil
import stat
import sys
import tempfile
import warnings
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
)

import torch
from _pod.activation import COMPILE, MEMORY_FORMAT, missing_for_compilation, requests_compilation
from _pod.telemetry import is_inspection

from poptorch.device.compile.arguments import AnchorRecorder, Arguments
from poptorch.device.compile.memory import ReplicaMemory
from poptorch.device.compile.operator_check import NeedsGradients, OperatorCheck, needs_gradients
from poptorch.device.kernels.numerics import DrawKernelDetector, HalfMode, detect_random
from poptorch.device_mode import API_DTYPE, DeviceMode, OnDevice, to_device
from poptorch.enums import OverlapMode
from poptorch.errors import Error
from poptorch.ops.annotations import check_transfers
from poptorch.options.strategies import _IExecutionStrategy
from poptorch.parallel.blocks import block_of
from poptorch.parallel.placement import Placement, place
from poptorch.parallel.tracing import ActivationRecorder, StageActivations, StageRecorder
from poptorch.python_state import Changes, TracedState
from poptorch.pytree import TreeSpec, flatten


class TraceSettings(NamedTuple):
    """How a model is traced: for training or not, with which checks, and by which execution strategy.

    `gradients`: with autograd. PopTorch never disables it; inference here is faster without.
    """

    is_training: bool
    gradients: bool
    reject_changed_buffers: bool
    strategy: _IExecutionStrategy


class Trace(NamedTuple):
    """The properties of a forward that the compilation determines.

    Attributes:
        structure: how the outputs nest.
        dtypes: the dtypes of the outputs at the API.
        gradients: whether the forward runs with autograd: in training, and if it computes gradients itself.
        draws: whether the forward draws random numbers.
        backward_draws: whether the backward pass draws random numbers, as it recomputes part of the forward.
        is_plain: whether the forward computes the same without a `DeviceMode`.
        uses_originals: whether the forward uses tensors of the host's module.
        has_half: whether any tensor is half.
        loss_output: the index of the output that is the final loss itself; None if there is none.
        trained: the parameters that the loss depends on; empty for inference.
        changes: what the forward changes of Python objects.
        changed_inputs: the indices of the input tensors that the forward changes in place.
        placement: the stages and tensors on each IPU.
        overlapped: "inputs", "outputs" or both, if overlap of their transfers with compute is requested.
        tensor_names: the names of the tensors that can be anchored.
        activations: the activations of each stage.
    """

    structure: TreeSpec
    dtypes: List[torch.dtype]
    gradients: bool
    draws: bool
    backward_draws: bool
    is_plain: bool
    uses_originals: bool
    has_half: bool
    loss_output: Optional[int]
    trained: FrozenSet[str]
    changes: Changes
    changed_inputs: Tuple[int, ...]
    placement: Placement
    overlapped: FrozenSet[str]
    tensor_names: Tuple[str, ...]
    activations: Tuple[StageActivations, ...]


def trace(
    scratch: ReplicaMemory, arguments: Arguments, inputs: Sequence[torch.Tensor], settings: TraceSettings
) -> Trace:
    """Run the forward once on one micro-batch, on a scratch replica. The random generators are restored.

    Raises:
        Error: a training model does not have exactly one final loss, a tensor of the device is sparse, or the forward
            uses parameters or buffers in a way that the device does not support.
        NeedsGradients: the forward computes gradients, and the settings are without.
    """
    weights = scratch.tensors
    _check_dense("The parameter or buffer {!r}", weights)
    tensors = [to_device(tensor) for tensor in inputs]
    mode = DeviceMode(is_compiling=True, originals=scratch.originals)
    half = HalfMode()
    recorder = StageRecorder(scratch.module, scratch.host_module, settings.strategy, block_of, settings.is_training)
    originals = [host for host, _ in (scratch.originals or {}).values()]
    check = OperatorCheck(recorder, [*tensors, *weights.values()], originals)
    recorder.observers.append(check.observe)
    activations = ActivationRecorder(recorder, weights.values(), tensors)
    anchor_recorder = AnchorRecorder(scratch.module)
    args, kwargs = arguments.unflatten(tensors)
    python_state = TracedState(scratch.host_module, scratch.module, scratch.originals.values())
    checks = _TensorChecks(scratch)
    versions = [tensor._version for tensor in tensors]
    backward_draws = False
    trained: FrozenSet[str] = frozenset()
    with torch.set_grad_enabled(settings.gradients), detect_random() as has_drawn:
        anchor_recorder.begin(arguments.spec.names, tensors)
        try:
            with half, recorder, mode, check.functions, activations.saving():
                outputs, structure = flatten(scratch.module(*args, **kwargs))
            changes = python_state.changes()
        except RuntimeError as error:
            if settings.gradients or not needs_gradients(error):
                raise
            raise NeedsGradients from error
        finally:
            python_state.undo()
        draws = has_drawn()
        check.report()
        _check_dense("Output number {}", dict(enumerate(outputs)))
        check.check_outputs(outputs)
        check_transfers(mode.overlaps, tensors, outputs)
        checks.check(scratch.module, mode, settings.reject_changed_buffers)
        if settings.is_training:
            loss = _final_loss(mode.marks)
            trained = _trained(scratch, loss)
            with half:
                backward_draws = draws and not is_inspection() and _backward_draws(loss)
    loss_output = _loss_output(outputs, mode)
    overlapped = _overlapped(mode)
    mode.begin()  # it is in a reference cycle with the recorders: the graph would use memory in the first calls, too
    return Trace(
        structure=structure,
        dtypes=[API_DTYPE.get(output.dtype, output.dtype) for output in outputs],
        gradients=settings.gradients,
        draws=draws,
        backward_draws=backward_draws,
        is_plain=not mode.has_replaced and (loss_output is not None or not settings.is_training),
        uses_originals=mode.uses_originals,
        has_half=half.has_half or any(parameter.dtype == torch.half for parameter in scratch.parameters.values()),
        loss_output=loss_output,
        trained=trained,
        placement=place(settings.strategy.name, recorder, scratch.parameters, scratch.buffers),
        overlapped=overlapped,
        tensor_names=anchor_recorder.names,
        activations=activations.stages(len(recorder.stages())),
        changes=changes,
        changed_inputs=tuple(index for index, tensor in enumerate(tensors) if tensor._version != versions[index]),
    )


def _check_dense(description: str, tensors: Mapping[Any, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise Error(
                f"{description.format(name)} is a sparse tensor, which the device does not have: make it dense, or use "
                "it on the host only"
            )


def _overlapped(mode: DeviceMode) -> FrozenSet[str]:
    requested = [overlap for overlap in mode.overlaps if overlap.mode != OverlapMode.NoOverlap]
    return frozenset("inputs" if overlap.is_input else "outputs" for overlap in requested)


class _Fingerprint(NamedTuple):
    """Identifies the value of a tensor.

    Only the sum shows changes through `.data`; it is a string so that NaN equals NaN.
    """

    version: int
    address: int
    total: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Fingerprint:
        with torch.no_grad():
            return cls(tensor._version, tensor.data_ptr(), str(tensor.float().sum().item()))


class _TensorChecks:
    """Compares a module's parameters and buffers before and after the forward."""

    def __init__(self, memory: ReplicaMemory) -> None:
        self._parameters: Dict[str, torch.Tensor] = dict(memory.parameters)
        self._buffers = {**memory.buffers, **memory.constants}
        tensors = [*self._parameters.values(), *self._buffers.values()]
        self._before = {id(tensor): _Fingerprint.of(tensor) for tensor in tensors}

    def check(self, module: torch.nn.Module, mode: DeviceMode, reject_changed_buffers: bool) -> None:
        """Raise Error for a change that the device does not support."""
        after: Dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for kind, tensors in (("parameter", self._parameters), ("buffer", self._buffers)):
            for name, tensor in tensors.items():
                if name not in after:
                    raise Error(
                        f"{kind.capitalize()} {name} is removed from the model when calling the forward method."
                    )
                if after[name] is not tensor or tensor.data_ptr() != self._before[id(tensor)].address:
                    raise Error(
                        f"{kind.capitalize()} {name} is reassigned within the model when calling the forward method. "
                        f"This is not supported. Consider using self.{name}.copy_(src) to copy data from a source "
                        "tensor, where src is the name of the source tensor."
                    )
        for name in self._changed(self._parameters, set()):
            raise Error(
                f"forward changes the parameter {name!r} in place, but on the device only the optimizer may do that: "
                "make it a buffer, or change it on the host and call copyWeightsToDevice()"
            )
        statistics = {id(tensor) for tensor in mode.statistics}
        for name in self._changed(self._buffers, statistics) if reject_changed_buffers else ():
            raise Error(
                "PopTorch does not support broadcasting buffers. If your model is able to tolerate buffers becoming "
                "out of sync between replicas, you can disable buffer broadcasting using "
                f"poptorch.Options.broadcastBuffers(False). Here forward changes the buffer {name!r}"
            )

    def _changed(self, tensors: Dict[str, torch.Tensor], allowed: Set[int]) -> List[str]:
        return [
            name
            for name, tensor in tensors.items()
            if tensor.is_floating_point()
            and id(tensor) not in allowed
            and _Fingerprint.of(tensor) != self._before[id(tensor)]
        ]


def _final_loss(marks: List[torch.Tensor]) -> torch.Tensor:
    """Return the final one of the marked losses, given in the order of marking.

    Raises:
        Error: there is no loss, two losses do not depend on one another, or the final one is not a single number.
    """
    if not marks:
        raise Error(
            "Couldn't find a loss in graph! Compute it by a torch loss, or mark it by "
            "poptorch.identity_loss(x, reduction)"
        )
    final = marks[-1]
    ancestors = _ancestors(final)
    independent = [mark for mark in marks[:-1] if mark.grad_fn not in ancestors]
    if independent:
        raise Error(
            "Multiple independent losses found in graph. Graph must have one final loss. Wrap final graph loss in "
            f"poptorch.identity_loss. Here the last loss does not depend on {len(independent)} of {len(marks)} losses."
        )
    if final.numel() != 1:
        # The SDK's documentation does not define this case.
        raise Error(f"The final loss has shape {list(final.shape)}: reduce it to one number by 'sum' or 'mean'")
    return final


def _ancestors(loss: torch.Tensor) -> Set[Optional[Any]]:
    """Return all nodes of the autograd graph of a loss; {None} if it does not require a gradient."""
    seen: Set[Optional[Any]] = {None} if loss.grad_fn is None else set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [parent for parent, _ in node.next_functions]
    return seen


def _loss_output(outputs: List[torch.Tensor], mode: DeviceMode) -> Optional[int]:
    """Return the index of the output that is the final loss as it was marked, not changed in place since."""
    for index, output in enumerate(outputs):
        if mode.loss_copies and output is mode.loss_copies[-1] and output._version == 0:
            return index
    return None


def _trained(memory: ReplicaMemory, loss: torch.Tensor) -> FrozenSet[str]:
    """Return the names of the parameters that the backward pass from the loss reaches.

    Raises:
        Error: it reaches a parameter that is not part of the model.
    """
    leaves = [getattr(node, "variable", None) for node in _ancestors(loss)]
    reached = {id(leaf) for leaf in leaves}
    trained = frozenset(name for name, parameter in memory.parameters.items() if id(parameter) in reached)
    known = set(map(id, memory.parameters.values()))
    for leaf in leaves:
        if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in known:
            raise Error(
                f"forward uses {_name_in_forward(leaf, memory.module)}, which is not part of the model, so the device "
                "cannot train it: assign it, or its module, to an attribute of the model in __init__"
            )
    return trained


def _name_in_forward(parameter: torch.nn.Parameter, module: torch.nn.Module) -> str:
    """Return a description of a parameter, with its name if it is in a variable of the forward of a module."""
    described = f"parameter of shape {list(parameter.shape)}"
    for each in module.modules():
        forward = inspect.unwrap(getattr(each.forward, "__func__", each.forward))
        if not inspect.isfunction(forward):
            continue
        variables = inspect.getclosurevars(forward)
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            if value is parameter:
                return f"the {described} {name!r}"
            for inner, found in value.named_parameters() if isinstance(value, torch.nn.Module) else ():
                if found is parameter:
                    return f"the {described} '{name}.{inner}'"
    return f"a {described}"


def _backward_draws(loss: torch.Tensor) -> bool:
    """Return whether the backward pass draws random numbers; its gradients go to the scratch replica."""
    if not loss.requires_grad:
        return False
    detector = DrawKernelDetector()  # type: ignore[no-untyped-call]
    with detector:
        torch.autograd.backward(loss)
    return bool(detector.has_drawn)


AUTO, CONTIGUOUS, CHANNELS_LAST = "auto", "contiguous", "channels_last"
_Memory = TypeVar("_Memory")
# Weights in 2-D convolutions from which `auto` chooses channels_last. Smaller models gain nothing (measured on one
# core), and in contiguous compute the bits of plain torch.
_MANY_WEIGHTS = 1 << 20
_FORMATS = (AUTO, CONTIGUOUS, CHANNELS_LAST)


def _requested_format() -> str:
    """Return the format that the environment requests. Raises Error if it is none of the three."""
    value = os.environ.get(MEMORY_FORMAT) or AUTO
    if value not in _FORMATS:
        raise Error(
            f"{MEMORY_FORMAT}={value!r} is no memory format; set it to {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}"
        )
    return value


def convolution_weights(model: torch.nn.Module, grouped: Mapping[str, object]) -> Dict[str, int]:
    """Return the names and sizes of the weights that `channels_last` stores in that format: those of 2-D convolutions.

    Args:
        grouped: the parameters of which groups of replicas have their own values; they stay contiguous.
    """
    convolutions = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Conv2d)}
    named = model.named_parameters()
    return {name: tensor.numel() for name, tensor in named if id(tensor) in convolutions and name not in grouped}


def choose_memory_format(
    weights: Mapping[str, int], compiled: Callable[[FrozenSet[str]], Tuple[_Memory, Trace]]
) -> Tuple[_Memory, Trace]:
    """Compile a model in the requested format.

    Args:
        weights: its `convolution_weights`.
        compiled: compiles the model with these weights in channels_last, the others contiguous.

    Raises:
        Error: the request is unknown, or the forward does not run in channels_last, which is requested.
    """
    request = _requested_format()
    is_small = request == AUTO and sum(weights.values()) < _MANY_WEIGHTS
    if not weights or is_small or request == CONTIGUOUS:
        return compiled(frozenset())
    try:
        memory, traced = compiled(frozenset(weights))
    except RuntimeError as error:
        if not _is_view_error(error):
            raise
        if request == CHANNELS_LAST:
            raise Error(
                f"{MEMORY_FORMAT}={request}: forward takes a view that only contiguous activations have. Use "
                f"reshape or flatten instead of view, or the memory format {AUTO} or {CONTIGUOUS}"
            ) from error
        return compiled(frozenset())
    if request == AUTO and traced.has_half:  # operators on half are conversions mostly
        return compiled(frozenset())
    return memory, traced


def _is_view_error(error: RuntimeError) -> bool:
    """Return whether torch raised this error for a view that the strides of channels_last do not allow."""
    return "view size is not compatible with input tensor's size and stride" in str(error)


_INDUCTOR_CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
_DISTUTILS = "SETUPTOOLS_USE_DISTUTILS"


def is_torch_compile_requested() -> bool:
    """Return whether training programs are compiled. Raises Error if EMULATED_POD_COMPILE is neither 0 nor 1."""
    try:
        return requests_compilation()
    except ValueError as error:
        raise Error(str(error)) from None


def checked_loss_output(traced: Trace, anchored: Sequence[str]) -> int:
    """Return the index of the output that is the final loss.

    Raises:
        Error: this host, or a program with this trace and these anchored tensors, cannot compile.
    """
    missing = missing_for_compilation()
    if missing:
        raise Error(missing)
    obstacles = {
        "marks a loss that it does not return, or has dtypes or tensors of the host": not traced.is_plain,
        "draws random numbers": traced.draws or traced.backward_draws,
        "computes in half": traced.has_half,
        "changes its inputs": traced.changed_inputs,
        "has anchored tensors": anchored,
    }
    for words, is_found in obstacles.items():
        if is_found:
            raise Error(f"{COMPILE}=1: forward {words}, which the compiled program cannot do. Unset the variable")
    assert traced.loss_output is not None, "the forward is plain"
    return traced.loss_output


class CompiledForward:
    """The forward of a program as one compiled function of the tensors of a replica, and of its inputs.

    Args:
        scratch: a replica that the tracing and the first forward and backward pass may change.
        arguments: the compiled arguments.
        inputs: those of a micro-batch.
        loss_output: the index of the output that is the final loss.
    """

    def __init__(
        self, scratch: ReplicaMemory, arguments: Arguments, inputs: Sequence[torch.Tensor], loss_output: int
    ) -> None:
        _use_own_inductor_cache()
        with _distutils_of_python():
            self._compile(scratch, arguments, inputs, loss_output)

    def _compile(
        self, scratch: ReplicaMemory, arguments: Arguments, inputs: Sequence[torch.Tensor], loss_output: int
    ) -> None:
        from torch import _inductor  # only here: a second of imports
        from torch.fx.experimental.proxy_tensor import make_fx

        _inductor.config.compile_threads = 1  # no processes besides the program's
        self._names = list(scratch.tensors)

        def forward(*tensors: torch.Tensor) -> List[torch.Tensor]:
            args, kwargs = arguments.unflatten(list(tensors[len(self._names) :]))
            state = dict(zip(self._names, tensors))
            with OnDevice():
                return flatten(torch.func.functional_call(scratch.module, state, args, kwargs))[0]

        tensors = [*scratch.tensors.values(), *map(to_device, inputs)]
        try:
            graph = make_fx(forward, pre_dispatch=True)(*tensors)
            self._run: Callable[..., Sequence[torch.Tensor]] = _inductor.compile(graph, list(tensors))
            loss = self._run(*tensors)[loss_output]
            if loss.requires_grad:  # torch compiles the backward pass when it first runs
                torch.autograd.backward(loss)
        except RuntimeError as error:
            reason = next(line for line in (*str(error).splitlines(), type(error).__name__) if line.strip())
            raise Error(f"{COMPILE}=1: torch cannot compile forward: {reason.strip()}") from error

    def of(self, memory: ReplicaMemory) -> Callable[[Sequence[torch.Tensor]], List[torch.Tensor]]:
        """Return the function of the inputs of a replica, which returns its flat outputs."""
        state = memory.tensors
        tensors = [state[name] for name in self._names]
        return lambda inputs: list(self._run(*tensors, *inputs))


@contextlib.contextmanager
def _distutils_of_python() -> Iterator[None]:
    """Let setuptools, which torch imports, not replace distutils: it fails if the program has imported that before.

    The warnings of both in Python 3.10 and 3.11 do not concern the program.
    """
    is_set = sys.version_info >= (3, 12) or _DISTUTILS in os.environ
    if not is_set:
        os.environ[_DISTUTILS] = "stdlib"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*distutils", DeprecationWarning)
            warnings.filterwarnings("ignore", "(?s).*distutils", UserWarning)
            yield
    finally:
        if not is_set:
            del os.environ[_DISTUTILS]


def _use_own_inductor_cache() -> None:
    """Set torch's folder of compiled code, which is executed, to one that only this user can write to."""
    if not os.environ.get(_INDUCTOR_CACHE_DIR):
        try:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
            folder = cache / "raypod" / "inductor"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
                raise Error(f"{folder} is writable by other users, or is another user's: remove it")
        except (OSError, RuntimeError):  # no home, or one that cannot be written
            folder = Path(tempfile.mkdtemp(prefix="inductor-"))
            atexit.register(shutil.rmtree, str(folder), ignore_errors=True)
        os.environ[_INDUCTOR_CACHE_DIR] = str(folder)
