"""`PoplarExecutor`: a model on the device (contract 2)."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from poptorch._device.compilation import Trace
from poptorch._device.executable import Executable, describe
from poptorch._device.program import Program, TrainingProgram
from poptorch._errors import Error
from poptorch._executor import compile_hooks, optimizer_exchange
from poptorch._executor.arguments import Arguments
from poptorch._executor.emulated import Emulated
from poptorch._executor.measurements import Measurements
from poptorch._executor.progress_bar import ProgressBar
from poptorch._executor.saving import Saving
from poptorch._executor.user_model import device_of, host_tensors, unwrap, wrap
from poptorch._log import logger
from poptorch._optimizers.attribute_checks import AttributeChecks
from poptorch._optimizers.hyperparameters import extract, warn_of_what_is_ignored
from poptorch._options.base import is_integer
from poptorch.enums import CommGroupType, ConnectionType
from poptorch.options import Options

_versions = itertools.count(1)  # of the host's weights, over all executors


class PoplarExecutor(Measurements, Saving, Emulated):
    """A user's module compiled for the device. Made by `trainingModel` and `inferenceModel`.

    The first call compiles: structure, shapes and dtypes of the arguments are fixed from then on. Names that the
    executor has not are looked up in the user's module.
    """

    def __init__(  # the SDK's signature
        self,
        model: torch.nn.Module,
        options: Options,
        training: bool,
        poptorch_version: str,
        optimizer: Optional[torch.optim.Optimizer] = None,
        user_model: Optional[torch.nn.Module] = None,
    ) -> None:
        self._model = model
        self._user_model = model if user_model is None else user_model
        self._options = options
        self._training = training
        self._poptorch_version = poptorch_version
        self._optimizer = optimizer
        self._program: Optional[Program] = None
        self._made_for: Dict[str, Any] = {}
        self._compilation_s = 0.0
        self._first_rng_state: Optional[List[int]] = None
        self._is_attached = False
        self._device_is_newer = False
        self._weights_version = 0
        self._uploaded: Tuple[int, ...] = ()
        self._attribute_checks = AttributeChecks(options.relax_optimizer_checks)
        if training and optimizer is not None:
            extract(optimizer)  # refuses what the device cannot do
            warn_of_what_is_ignored(optimizer)
            self._attribute_checks.check(optimizer)
        if training:
            wrap(self._user_model, self)

    # -- running -----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call: device iterations x gradient accumulation x replicas micro-batches.

        Every tensor's dimension 0 is [device iterations, accumulation, replicas, micro-batch]. AssertionError for
        ConnectionType.Never and for a batch dimension that does not divide; Error for arguments other than compiled.
        """
        never = self._options.connection_type == ConnectionType.Never
        assert not never, (
            "Trying to run a model on an offline device (ConnectionType.Never): use model.compile(inputs) instead of "
            "model(inputs)"
        )
        if self._program is None:
            self.compile(*args, **kwargs)
        program = self._compiled()
        if not self._is_attached:
            self.attachToDevice()
        tensors = program.arguments.tensors(args, kwargs)
        if self._training:
            optimizer_exchange.upload_if_newer(self._optimizer, program)
            self._device_is_newer = True
        else:
            self._follow_training()
        with _plain_torch():
            result = program.run(tensors)
        optimizer_exchange.note_step(self._optimizer)
        return result

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments without running. A second compilation only warns."""
        if self._program is not None:
            logger.warning("compile: the model is compiled already; the call has no effect")
            return
        compile_hooks.call(compile_hooks.before_compile, self)
        progress = ProgressBar() if self._options.show_compilation_progress_bar else _no_progress
        progress(0, 100)
        began = time.perf_counter()
        try:
            self._install(lambda: Arguments.of_call(self._model.forward, args, kwargs))
        finally:
            progress(100, 100)
        self._compilation_s = time.perf_counter() - began
        compile_hooks.call(compile_hooks.after_compile, self)

    def isCompiled(self) -> bool:
        """Whether the model is compiled."""
        return self._program is not None

    def destroy(self) -> None:
        """Fetch weights and optimizer state, leave the device and give the user's module its own class back.

        Before compilation it does nothing at all, as in the SDK.
        """
        if self._program is None:
            return
        if self._training:
            self.copyWeightsToHostIfNeeded()
            optimizer_exchange.unbind(self._optimizer, self._program)
            unwrap(self._user_model)
        self._program.close()
        self._program = None
        self._is_attached = False

    # -- the device --------------------------------------------------------------------------------------------------

    def attachToDevice(self) -> None:
        """Acquire the device and upload the host's weights. Error unless compiled and detached."""
        program = self._compiled()
        if self._is_attached:
            raise Error("Cannot attach to the device: the model is already attached")
        self._is_attached = True
        self._uploaded = self._fetch_training()
        program.upload()
        self._use_replica_state()

    def detachFromDevice(self) -> None:
        """Fetch weights and optimizer state and give the device back. Error unless compiled and attached.

        Wires to processes that were lost are given up: attached again, the program meets the others anew.
        """
        program = self._compiled()
        if not self._is_attached:
            raise Error("Cannot detach from the device: the model is not attached")
        self.copyWeightsToHostIfNeeded()
        optimizer_exchange.fetch(self._optimizer, program)
        program.let_go()
        self._is_attached = False

    def isAttachedToDevice(self) -> bool:
        """Whether the model holds the device."""
        return self._is_attached

    # -- weights -----------------------------------------------------------------------------------------------------

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Fetch the weights if the device has newer ones; returns whether it had."""
        if not self._device_is_newer:
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToHost(self) -> None:
        """Fetch weights, and the buffers of replica 0, into the user's module. Error unless compiled."""
        program = self._compiled()
        self._device_is_newer = False
        if self._is_attached:
            program.memory.download()
            self._weights_version = next(_versions)

    def copyWeightsToDevice(self) -> None:
        """Upload the weights that the user's module has NOW: what the device has trained since is lost.

        Error unless compiled.
        """
        program = self._compiled()
        self._device_is_newer = False
        self._weights_version = next(_versions)
        if self._is_attached:
            program.upload()

    def copyNamedBuffersToDevice(self) -> None:
        """Upload the buffers named by `options.updatableNamedBuffers`, and nothing else.

        Error unless compiled, without such names, and for names of no buffer.
        """
        program, names = self._compiled(), self._options.updatable_named_buffers
        if not names:
            raise Error("No buffer may be updated: name them by options.updatableNamedBuffers before wrapping")
        if self._is_attached:
            program.upload_buffers(names)

    def load_state_dict(self, state_dict: Dict[str, Any], strict: bool = True) -> Any:
        """Load into the user's module, and upload if the model is attached."""
        result = self._user_model.load_state_dict(state_dict, strict=strict)
        self._weights_version = next(_versions)
        if self._is_attached:
            self.copyWeightsToDevice()
        return result

    def _check_grouping(self, comm_group_type: CommGroupType, shards: int) -> None:
        """Error unless groups of this kind are all replicas, and the model is not compiled yet."""
        if self._program is not None:
            raise Error("replicaGrouping must be called before the model is compiled")
        replicas = self._options.replication_factor * self._options.Distributed.numProcesses
        size = {CommGroupType.All: replicas, CommGroupType.NoGrouping: 1}.get(comm_group_type, shards)
        if size != replicas:
            raise Error(
                f"replicaGrouping: groups of {size} of the {replicas} replicas need weights of their own, but the "
                "emulated replicas share one copy of the weights: use CommGroupType.All"
            )

    # -- the optimizer and other state -------------------------------------------------------------------------------

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Push the optimizer's present values to the device; changing an optimizer alone has no effect there.

        Error when a compile-time constant, the algorithm or the number of groups changed, or for an inference model.
        """
        if not self._training:
            raise Error("An inference model has no optimizer")
        values = extract(optimizer)
        self._attribute_checks.check(optimizer)
        if isinstance(self._program, TrainingProgram):
            optimizer_exchange.replace(self._optimizer, optimizer, values, self._program)
        self._optimizer = optimizer

    @property
    def rng_state(self) -> List[int]:
        """Seed of the device's random numbers, and micro-batches run by each replica.

        Set before compilation it is what the device begins with; reading it is an Error then.
        """
        return self._compiled().rng_state

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        if not isinstance(state, (list, tuple)) or len(state) != 2 or not all(map(is_integer, state)):
            raise Error(f"The state of the random numbers is a seed and a number of micro-batches, not {state!r}")
        self._first_rng_state = list(state)
        if self._program is not None:
            self._program.rng_state = self._first_rng_state

    @property
    def model(self) -> torch.nn.Module:
        """The user's module."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The frozen options."""
        return self._options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_user_model" not in vars(self):
            raise AttributeError(name)
        return getattr(self._user_model, name)

    # -- private -----------------------------------------------------------------------------------------------------

    def _compiled(self) -> Program:
        if self._program is None:
            raise Error("The model is not compiled yet: call it, or compile(), first")
        return self._program

    def _executable(self) -> Executable:
        program = self._compiled()
        return Executable(program.traced, program.arguments.compiled, self._made_for)

    def _start(self, executable: Executable) -> None:
        executable.check(describe(self._model, self._options, self._optimizer, self._training))
        self._install(lambda: Arguments(self._model.forward, executable.compiled), executable.traced)

    def _install(self, arguments: Callable[[], Arguments], traced: Optional[Trace] = None) -> None:
        if self._training and device_of(type(self._user_model)) is not self:
            wrap(self._user_model, self)  # again, after destroy()
        self._follow_training()
        with _plain_torch():
            self._made_for = describe(self._model, self._options, self._optimizer, self._training)
            self._program = self._build(arguments(), traced)
        if self._first_rng_state is not None:
            self._program.rng_state = self._first_rng_state
        self._is_attached = self._options.connection_type == ConnectionType.Always
        if self._is_attached:
            self._use_replica_state()

    def _build(self, arguments: Arguments, traced: Optional[Trace] = None) -> Program:
        model, options, user_model = self._model, self._options, self._user_model
        if not self._training or self._optimizer is None:
            return Program(model, options, arguments, user_model, traced)
        program = TrainingProgram(model, options, arguments, self._optimizer, user_model, traced)
        optimizer_exchange.bind(self._optimizer, program)
        return program

    def _fetch_training(self) -> Tuple[int, ...]:
        """Let executors that train these tensors fetch them; returns the versions of what the host has then."""
        executors = {device_of(type(tensor)) for tensor in host_tensors(self._model)} - {None, self}
        for executor in executors:
            executor.copyWeightsToHostIfNeeded()
        return tuple(sorted(executor._weights_version for executor in executors))

    def _follow_training(self) -> None:
        """Upload the weights if an executor has trained them further since the last upload."""
        versions = self._fetch_training()
        if versions != self._uploaded and self._program is not None:
            self._program.upload()
        self._uploaded = versions


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """Modes of the caller's thread do not reach the device: replicas in threads of their own would not see them."""
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        yield


def _no_progress(progress: int, total: int) -> None:
    """Stands in for a progress bar that is not wanted."""
