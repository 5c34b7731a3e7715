"""EMULATED_POD_COMPILE=1: the forward and backward pass of training programs are compiled by torch.compile.

Its fused kernels compute other bits than torch's operators, the same ones in every replica. A forward that it cannot
compile as a whole is an error: replicas must not differ in what they compute.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Sequence

import torch
from _pod.activation import COMPILE, requests_compilation

from poptorch.device.compile.arguments import Arguments
from poptorch.device.compile.compilation import Trace
from poptorch.device.compile.memory import ReplicaMemory
from poptorch.device_mode import OnDevice, to_device
from poptorch.errors import Error
from poptorch.pytree import flatten

_CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
_DISTUTILS = "SETUPTOOLS_USE_DISTUTILS"
_FIRST_VERSION = (2, 1)


def is_requested() -> bool:
    """Return whether training programs are compiled. Raises Error if EMULATED_POD_COMPILE is neither 0 nor 1."""
    try:
        return requests_compilation()
    except ValueError as error:
        raise Error(str(error)) from None


def checked_loss(traced: Trace, anchored: Sequence[str]) -> int:
    """Return the index of the output that is the final loss.

    Raises:
        Error: this host, or a program with this trace and these anchored tensors, cannot compile.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < _FIRST_VERSION:
        raise Error(f"{COMPILE}=1 needs torch 2.1 or later, and this is {torch.__version__}")
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise Error(f"{COMPILE}=1 needs a C++ compiler, and there is no {compiler}: install it, or set CXX")
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
        _use_own_cache()
        with _distutils_of_python():
            self._compile(scratch, arguments, inputs, loss_output)

    def _compile(
        self, scratch: ReplicaMemory, arguments: Arguments, inputs: Sequence[torch.Tensor], loss_output: int
    ) -> None:
        from torch import _inductor  # only here: a second of imports
        from torch.fx.experimental.proxy_tensor import make_fx

        _inductor.config.compile_threads = 1  # no processes besides the program's
        self._names = list(_state(scratch))

        def forward(*tensors: torch.Tensor) -> List[torch.Tensor]:
            args, kwargs = arguments.unflatten(list(tensors[len(self._names) :]))
            state = dict(zip(self._names, tensors))
            with OnDevice():
                return flatten(torch.func.functional_call(scratch.module, state, args, kwargs))[0]

        tensors = [*_state(scratch).values(), *map(to_device, inputs)]
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
        state = _state(memory)
        tensors = [state[name] for name in self._names]
        return lambda inputs: list(self._run(*tensors, *inputs))


def _state(memory: ReplicaMemory) -> Dict[str, torch.Tensor]:
    return {**memory.parameters, **memory.buffers, **memory.constants}


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


def _use_own_cache() -> None:
    """Set torch's folder of compiled code, which is executed, to one that only this user can write to."""
    if not os.environ.get(_CACHE_DIR):
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
        os.environ[_CACHE_DIR] = str(folder)
