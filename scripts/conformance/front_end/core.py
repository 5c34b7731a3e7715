"""The module `poptorch.poptorch_core`: what PopTorch's front end calls of its C++ core, on the CPU."""

from __future__ import annotations

import enum
import hashlib
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch

from . import device
from .device import Device, error
from .device import Error as Error  # of this module, for the front end
from .device import RecoverableError as RecoverableError
from .device import UnrecoverableError as UnrecoverableError
from .executable import InternalPoplarExecutable
from .session_options import SessionOptions, operators
from .trace import Graph, Recorder, value_of_operator

_ALWAYS = 0  # connection type
_SOURCES = Path(os.environ["FRONT_END_SOURCES"])
_session_options = SessionOptions(_SOURCES / "popart_compiler" / "source" / "SessionOptions.cpp")


def _below_autograd(name: str) -> Any:
    """The kernel of autograd for tensors of the IPU, which torch does not have: passes the call on to the recorder."""

    def call(*args: Any) -> Any:
        guard = torch._C._AutoDispatchBelowAutograd()
        try:
            return getattr(torch.ops.poptorch, name)(*args)
        finally:
            del guard

    return call


_library = torch.library.Library("poptorch", "DEF")
for _schema in operators(_SOURCES / "poptorch" / "source" / "dispatch_tracer" / "RegisterAtenOverloads.cpp"):
    _library.define(_schema)
    _name = _schema.partition("(")[0]
    _function = value_of_operator(_name) or (None if "-> Tensor" in _schema else lambda *_: None)
    _library.impl(_name, _below_autograd(_name), "AutogradIPU")
    if _function is not None:
        _library.impl(_name, _function, "CompositeExplicitAutograd")


class TracingMode(enum.Enum):
    """As in C++."""

    PopART = 0


class CompilerOptions:
    """As in C++."""

    source_location_excludes: List[str] = []


_graph: Optional[Graph] = None
_recorder: Optional[Recorder] = None
_no_grad: Any = None


def createGraph(_mode: Any, inputs: List[torch.Tensor], _options: Any) -> None:
    """Begins the recording. Nothing in it has a gradient: torch cannot record gradients on a device without kernels."""
    global _graph, _recorder, _no_grad
    _graph = Graph(list(inputs))
    _recorder, _no_grad = Recorder(_graph), torch.no_grad()
    _no_grad.__enter__()
    _recorder.__enter__()


def endDispatch(_failed: bool = False) -> None:
    """Ends the recording."""
    global _recorder
    if _recorder is not None:
        _recorder.__exit__(None, None, None)
        _no_grad.__exit__(None, None, None)
        _recorder = None


def destroyDispatcher() -> None:
    """Forgets the graph."""
    global _graph
    endDispatch()
    _graph = None


def _current() -> Graph:
    assert _graph is not None, "createGraph comes first"
    return _graph


def startParametersMove() -> None:
    """The tensors that are moved now are parameters and buffers."""
    _current().is_moving_parameters = True


def endParametersMove() -> None:
    """End of `startParametersMove`."""
    _current().is_moving_parameters = False


def startOutputsMove() -> None:
    """The tensors that are moved now are outputs."""
    _current().is_moving_outputs = True


def endOutputsMove() -> None:
    """End of `startOutputsMove`."""
    _current().is_moving_outputs = False


def mapParamsToNames(names: Tuple[str, ...], tensors: Tuple[Any, ...]) -> None:
    """Names parameters and buffers."""
    for name, tensor in zip(names, tensors):
        _current().add_named(name, tensor)


def getIpuTensorId(tensor: Any) -> int:
    """The number of a tensor of the IPU."""
    return int(tensor.number)


def startDispatch() -> None:
    """No effect: the recording has begun."""


def finalizeGraph() -> None:
    """The graph is complete."""
    _current().finish()


def isCompilingWithDispatcher() -> bool:
    """Whether a graph is recorded."""
    return _recorder is not None


def compileWithManualTracing(
    options: Dict[str, Any], _attributes: Any, training: bool, optimizer: Dict[str, Any], _anchors: List[Any]
) -> InternalPoplarExecutable:
    """Compiles the graph, and attaches with the connection type Always."""
    try:
        _session_options.check(options)
        executable = InternalPoplarExecutable(options, training, optimizer, _current())
        executable.check()
    except ValueError as problem:
        raise error(str(problem)) from None
    device.keep_options(options, executable.graph.operators(), training)
    cached = None
    if options.get("cachePath"):
        nodes = repr([(str(node.func), node.results) for node in executable.graph.nodes])
        key = hashlib.sha256(f"{nodes}{training}{sorted(map(str, options.items()))}".encode()).hexdigest()
        cached = Path(options["cachePath"]) / f"{key}.front-end"
    if cached is None or not cached.exists():
        device.compile_pause()
        device.log("compile")
        if cached is not None:
            cached.parent.mkdir(parents=True, exist_ok=True)
            cached.touch()
    if int(options.get("connection_type", _ALWAYS)) == _ALWAYS:
        device.hold("ATTACH_S")
        executable.device.attach()
    return executable


def attachToDevice(executable: InternalPoplarExecutable) -> None:
    """Attaches, and loads the engine; the front end loads it again."""
    device.hold("ATTACH_S")
    executable.device.attach()
    device.hold("LOAD_S")
    device.log("load")


def loadEngineAndConnectStreams(executable: InternalPoplarExecutable) -> None:
    """Loads the engine in all instances at the same time."""
    if not executable.device.is_attached:
        attachToDevice(executable)
    Device.check()
    device.hold("LOAD_S")
    device.log("load")
    executable.peers.load()
    executable.is_loaded = True


def detachFromDevice(executable: InternalPoplarExecutable) -> None:
    """Detaches."""
    executable.device.detach()
    executable.is_loaded = False


def isAttachedToDevice(executable: InternalPoplarExecutable) -> bool:
    """Whether the device is attached."""
    return executable.device.is_attached


def execute(executable: InternalPoplarExecutable, inputs: Tuple[torch.Tensor, ...]) -> List[torch.Tensor]:
    """Runs a call."""
    executable.require_device()
    if executable.training:
        device.hold("CALL_S")
    outputs = executable.run([each.detach() for each in inputs])
    device.log("execute", device.bytes_of([*inputs, *outputs]))
    return outputs


@torch.no_grad()
def copyWeightsToHost_impl(executable: InternalPoplarExecutable, names: Any, tensors: Any) -> None:
    """Copies the weights, and the buffers of replica 0."""
    executable.require_device()
    _transfer("weights to host", executable.memory[0].values())
    for name, tensor in zip(names, tensors):
        if name in executable.memory[0]:
            tensor.detach().copy_(executable.memory[0][name])


@torch.no_grad()
def copyWeightsToDevice_impl(executable: InternalPoplarExecutable, names: Any, tensors: Any) -> None:
    """Copies the weights, and the buffers to every replica."""
    executable.require_device()
    _transfer("weights to device", executable.memory[0].values())
    for name, tensor in zip(names, tensors):
        for memory in executable.memory:
            if name in memory:
                memory[name].copy_(tensor.detach())


def copyNamedBuffersToDevice_impl(executable: InternalPoplarExecutable, names: Any, tensors: Any) -> None:
    """Copies the buffers to every replica."""
    copyWeightsToDevice_impl(executable, names, tensors)


def readOptimizerState(executable: InternalPoplarExecutable) -> Dict[str, Any]:
    """Copies of the optimizer's state."""
    executable.require_device()
    optimizer = executable.optimizer
    assert optimizer is not None
    _transfer("optimizer to host", optimizer.state.values())
    return {
        "ipu_state": {name: each.clone() for name, each in optimizer.state.items()},
        "ipu_param": optimizer.parameters(),
    }


def writeOptimizerState(executable: InternalPoplarExecutable, state: Dict[str, Any]) -> None:
    """Loads the optimizer's state. `ipu_param` reaches the host's buffers only, so the next update does not read it."""
    executable.require_device()
    optimizer = executable.optimizer
    assert optimizer is not None
    _transfer("optimizer to device", optimizer.state.values())
    for name, tensor in optimizer.state.items():
        if name in state["ipu_state"]:
            tensor.copy_(state["ipu_state"][name])


def updateOptimizers(executable: InternalPoplarExecutable, values: Dict[str, Any]) -> None:
    """Uploads the values of the optimizer."""
    executable.require_device()
    assert executable.optimizer is not None
    try:
        executable.optimizer.set_values(values)
    except ValueError as problem:
        raise error(str(problem)) from None


def _transfer(event: str, tensors: Any) -> None:
    device.hold("TRANSFER_S")
    device.log(event, device.bytes_of(tensors))


def getRandomSeed(executable: InternalPoplarExecutable) -> int:
    """The seed."""
    return executable.seed


def getRngState(executable: InternalPoplarExecutable) -> List[int]:
    """The state of the random numbers of all replicas."""
    executable.require_device()
    return [executable.micro_batches & 0xFFFFFFFF, executable.micro_batches >> 32]


def setRngState(executable: InternalPoplarExecutable, seed: int, state: List[int]) -> None:
    """Sets seed and state; a seed alone begins again."""
    executable.require_device()
    executable.seed, executable.micro_batches = seed, state[0] + (state[1] << 32) if state else 0


def getTimestamps(_executable: Any) -> List[List[Any]]:
    """No times."""
    return [[], [], [], []]


def ipuHardwareVersion(numIpus: int = 1) -> int:
    """Mk2."""
    del numIpus
    return 2


def setLogLevel(level: int = 2) -> None:
    """No effect."""


def setPopartLogLevel(level: int) -> None:
    """No effect."""


def setCustomCodeletsPath(path: str) -> None:
    """No effect."""


def poptorchAtExit() -> None:
    """No effect."""


def importPoptorchMetadataFromFile(filename: str) -> bytes:
    """Not available."""
    raise error(f"this core has no executables in files: {filename}")
