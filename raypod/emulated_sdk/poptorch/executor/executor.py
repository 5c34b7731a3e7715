"""`PoplarExecutor`: a wrapped model and its life cycle on the device, and the functions that construct one."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from _pod.activation import CALL_S, LOAD_S

from poptorch import findings
from poptorch._args_parser import ArgsParser
from poptorch.device.compile.arguments import Arguments, BatchLayout
from poptorch.device.execute.calls import at_a_lost_peer, hold_interpreter_lock
from poptorch.device.execute.program import Program, TrainingProgram
from poptorch.device_mode import caller_modes_disabled, is_on_device
from poptorch.enums import ConnectionType, OutputMode
from poptorch.environment import VERSION, logger
from poptorch.errors import Error
from poptorch.executor import compile_context, host_state, saving
from poptorch.executor.compile_context import Substitutions, around_compilation
from poptorch.executor.host_state import executor_of, host_tensors, shallow_copy, unwrap, wrap
from poptorch.executor.measurements import Measurements
from poptorch.optim import SGD
from poptorch.optimizers.hyperparameters import AttributeChecks, extract, warn_ignored
from poptorch.options import Options
from poptorch.options.base import is_integer
from poptorch.options.popart_options import validate
from poptorch.options.strategies import ShardedExecution
from poptorch.parallel.blocks import module_repr
from poptorch.profiling import Channel

_PROFILED = ("copyWeightsToHost", "copyWeightsToDevice", "setOptimizer", "compile", "destroy", "save")
_versions = itertools.count(1)  # of the host's weights, over all executors


class PoplarExecutor(Measurements):
    """A user's module compiled for the device. `trainingModel` and `inferenceModel` construct it.

    The first call compiles the model: structure, shapes and dtypes of the arguments are fixed from then on. Attributes
    that the executor does not have are those of the user's module.
    """

    def __init__(  # the SDK's signature
        self,
        model: torch.nn.Module,
        options: Optional[Options],
        training: bool,
        poptorch_version: str,
        optimizer: Optional[torch.optim.Optimizer] = None,
        user_model: Optional[torch.nn.Module] = None,
    ) -> None:
        options = chosen_options(options, training)
        super().__init__(options)
        self._model = model
        self._lock = threading.RLock()  # of calls: the SDK executes one at a time, as it holds the interpreter lock
        self._args_parser = ArgsParser(model)  # programs change or replace it, which has no effect here
        self._user_model = model if user_model is None else user_model
        self._training = training
        self._poptorch_version = poptorch_version
        self._optimizer = optimizer = default_optimizer(self._user_model) if training and not optimizer else optimizer
        self._compiled_for: saving.Description = {}
        self._initial_rng_state: Optional[List[int]] = None
        self._device_is_newer = False
        self._weights_version = 0
        self.per_replica_params: Dict[str, Any] = {}  # arguments of `replicaGrouping` by parameter
        self.host_classes: List[type] = []  # of the wrapped module and its tensors
        self._uploaded: Tuple[int, ...] = ()
        self._attribute_checks = AttributeChecks(options._relax_optimizer_checks)
        if training and optimizer is not None:
            extract(optimizer)  # raises Error for what the device does not support
            warn_ignored(optimizer)
            self._attribute_checks.check(optimizer)
            host_state.choose_reduction_strategy(optimizer, options)
        self._profiling = Channel("poptorch.trainingModel" if training else "poptorch.inferenceModel")
        self._profiling.instrument(self, *_PROFILED)
        if training:
            wrap(self._user_model, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call: device iterations x gradient accumulation x replicas micro-batches.

        Dimension 0 of every tensor is [device iterations, accumulation, replicas, micro-batch].

        Raises:
            AssertionError: `ConnectionType.Never` is set, or the batch dimension does not divide.
            Error: the arguments differ from the compiled ones, or the caller is the forward of another model.
        """
        never = self._options.connection_type == ConnectionType.Never
        assert not never, (
            "Trying to run a model on an offline device (ConnectionType.Never): use model.compile(inputs) instead of "
            "model(inputs)"
        )
        _check_not_in_forward()
        if not findings.is_active():
            return self._call(args, kwargs)
        limit_s = compile_context.host_sync_timeout_s(self._options)
        with findings.during("call", limit_s=limit_s):
            began_s, compiled_before_s = time.perf_counter(), self._compilation_s
            self._call(args, kwargs)
            call_s = time.perf_counter() - began_s - (self._compilation_s - compiled_before_s)
        micro_batches = self._compiled().layout.micro_batches
        return findings.end_program(call_s=call_s, compile_s=self._compilation_s, micro_batches=micro_batches)

    def _call(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        with self._lock:
            if self._program is None:
                self.compile(*args, **kwargs)
            program = self._compiled()
            if not self._is_attached:
                self.attachToDevice()
            tensors = program.arguments.tensors(args, kwargs)
            if self._training:
                host_state.upload_optimizer_if_newer(self._optimizer, program)
                self._device_is_newer = True
            else:
                self._upload_trained()
            with caller_modes_disabled(), Substitutions(), self._profiling.tracepoint("modelExecution"):
                with at_a_lost_peer():
                    result = program.run(tensors)
                hold_interpreter_lock(CALL_S)
            host_state.mark_step(self._optimizer)
            return result

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments without running. A second compilation only warns."""
        _check_not_in_forward()
        if self._program is not None:
            logger.warning("compile: the model is compiled already; the call has no effect")
            return
        with findings.during("compilation"), around_compilation(self._options._show_compilation_progress_bar):
            began = time.perf_counter()
            with caller_modes_disabled():
                arguments = Arguments.of_call(self._model.forward, args, kwargs, BatchLayout.of(self._options))
            self._build(arguments)
            self._compilation_s = time.perf_counter() - began

    def destroy(self) -> None:
        """Fetch weights and optimizer state, release the device and unwrap the user's module.

        Without effect before compilation, as in the SDK.
        """
        if self._program is None:
            return
        if self._training:
            self.copyWeightsToHostIfNeeded()
            host_state.unbind_optimizer(self._optimizer, self._program)
            unwrap(self._user_model)
        self._program.close()
        self._program = None
        self._is_attached = False

    def attachToDevice(self) -> None:
        """Acquire the device and upload the host's weights.

        Raises:
            AssertionError: `ConnectionType.Never` is set.
            Error: the model is not compiled, or it is attached already.
        """
        never = self._options.connection_type == ConnectionType.Never
        assert not never, "Trying to attach to an offline device (ConnectionType.Never)"
        program = self._compiled()
        if self._is_attached:
            raise Error("Cannot attach to the device: the model is already attached")
        self._is_attached = True
        self._uploaded = self._fetch_trained()
        program.upload()
        self._upload_replica_state()
        hold_interpreter_lock(LOAD_S)

    def detachFromDevice(self) -> None:
        """Fetch weights and optimizer state, and release the device. Raises Error unless compiled and attached.

        Closes connections to processes that were lost: after the next attach the program opens new ones.
        """
        program = self._compiled()
        if not self._is_attached:
            raise Error("Cannot detach from the device: the model is not attached")
        self.copyWeightsToHostIfNeeded()
        host_state.fetch_optimizer(self._optimizer, program)
        program.close_connections()
        self._is_attached = False

    def isAttachedToDevice(self) -> bool:
        """Return whether the model is attached to the device."""
        return self._is_attached

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Fetch the weights if the device has newer ones, and return whether it had."""
        if not self._device_is_newer:
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToHost(self) -> None:
        """Fetch weights, and the buffers of replica 0, into the user's module. Raises Error unless compiled."""
        program = self._compiled()
        self._device_is_newer = False
        if self._is_attached:
            program.memory.download()
            self._weights_version = next(_versions)

    def copyWeightsToDevice(self) -> None:
        """Upload the present weights of the user's module, replacing what the device has trained since.

        Raises Error unless compiled.
        """
        program = self._compiled()
        self._device_is_newer = False
        self._weights_version = next(_versions)
        if self._is_attached:
            program.upload()

    def copyNamedBuffersToDevice(self) -> None:
        """Upload only the buffers named by `options.updatableNamedBuffers`.

        Raises Error if the model is not compiled, the options name no buffers, or a name is unknown.
        """
        program, names = self._compiled(), self._options._Popart.options.get("updatableNamedBuffers")
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

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Upload the optimizer's present values; changing the optimizer alone has no effect on the device.

        Raises:
            Error: a compile-time constant, the algorithm or the number of groups changed, or the model is an inference
                model.
        """
        if not self._training:
            raise Error("An inference model has no optimizer")
        values = extract(optimizer)
        self._attribute_checks.check(optimizer)
        if self._program is None:
            host_state.choose_reduction_strategy(optimizer, self._options)
        if isinstance(self._program, TrainingProgram):
            host_state.replace_optimizer(self._optimizer, optimizer, values, self._program)
        self._optimizer = optimizer

    @property
    def rng_state(self) -> List[int]:
        """The seed of the device's random numbers, and the micro-batches run by each replica.

        Reading it before compilation raises Error; setting it then sets the initial state. `[seed]` alone restarts the
        random numbers.
        """
        return self._compiled().rng_state

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        is_state = isinstance(state, (list, tuple)) and len(state) in (1, 2) and all(map(is_integer, state))
        if not is_state:
            raise Error(f"The state of the random numbers is [seed] or [seed, micro-batches], not {state!r}")
        self._initial_rng_state = [*state, 0][:2]
        if self._program is not None:
            self._program.rng_state = self._initial_rng_state

    def __repr__(self) -> str:
        return module_repr(self.model)

    @property
    def model(self) -> torch.nn.Module:
        """The user's module; of an inference model a shallow copy of it, with the same tensors and submodules."""
        return self._user_model if self._training else self._model

    def save(self, filename: saving.Filename, export_model: bool = True, save_rng_state: bool = True) -> None:
        """Write the executable to a file, and with `export_model` the model, its weights, optimizer and options.

        The executable contains one micro-batch of the compiling call. An existing directory gets a file
        `model.poptorch`; missing parents are created.

        Raises:
            Error: the model is not compiled, or a part of it cannot be pickled.
        """
        program = self._compiled()
        self.copyWeightsToHostIfNeeded()
        model = saving.SavedModel(self._model, self._optimizer, self._options, self._training) if export_model else None
        rng_state = program.rng_state if save_rng_state else None
        saving.write(filename, program.arguments, self._compiled_for, model, rng_state)

    def compileAndExport(self, filename: saving.Filename, *args: Any, export_model: bool = True, **kwargs: Any) -> None:
        """Compile for these arguments without running, and `save`."""
        self.compile(*args, **kwargs)
        self.save(filename, export_model=export_model)

    def loadExecutable(self, filename: saving.Filename) -> None:
        """Compile for the arguments of a saved executable; weights and optimizer stay those of the host.

        Raises:
            Error: `save` did not write the file, it has another version or is truncated or damaged, the executable was
                compiled for another model or other options, or the model is compiled already.
        """
        self._load(saving.read_sections(filename))

    def _load(self, sections: Dict[str, bytes]) -> None:
        if self._program is not None:
            raise Error("An executable can be loaded only before the model is compiled")
        saved = saving.read_executable(sections)
        arguments = saved.arguments(self._model.forward, self._describe())
        with saved.modes_of(self._model):
            self._build(arguments)
        if saved.rng_state is not None:
            self._compiled().rng_state = saved.rng_state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_user_model" not in vars(self):
            raise AttributeError(name)
        value = getattr(self.model, name)
        if isinstance(value, torch.nn.Parameter) and not self._training:
            return host_state.GroupedParameter(value, self)
        return value

    def _describe(self) -> saving.Description:
        return saving.describe(self._model, self._options, self._optimizer, self._training, self.per_replica_params)

    def _build(self, arguments: Arguments) -> None:
        if self._training and executor_of(type(self._user_model)) is not self:
            wrap(self._user_model, self)  # again, after destroy()
        self._upload_trained()
        validate(self._options._Popart.options)
        compile_context.warn_of_variables(self._options)
        with caller_modes_disabled(), Substitutions(), compile_context.replaced():
            self._compiled_for = self._describe()
            if self._training and self._optimizer is not None:
                program = TrainingProgram(
                    self._model, self._options, arguments, self._optimizer, self._user_model, self.per_replica_params
                )
                program.measure_gradients(self._measures_gradients)
                if self._options.connection_type != ConnectionType.Never:
                    host_state.bind_optimizer(self._optimizer, program)
                self._program = program
            else:
                self._program = Program(
                    self._model, self._options, arguments, self._user_model, self.per_replica_params
                )
        if self._initial_rng_state is not None:
            self._program.rng_state = self._initial_rng_state
        self._is_attached = self._options.connection_type != ConnectionType.Never
        if self._is_attached:
            self._upload_replica_state()
            hold_interpreter_lock(LOAD_S)

    def _fetch_trained(self) -> Tuple[int, ...]:
        """Make other executors that train these tensors fetch them, and return the versions that the host then has."""
        executors = {executor_of(type(tensor)) for tensor in host_tensors(self._model)} - {None, self}
        for executor in executors:
            with executor._lock:  # after a whole call, if another thread calls it
                executor.copyWeightsToHostIfNeeded()
        return tuple(sorted(executor._weights_version for executor in executors))

    def _upload_trained(self) -> None:
        """Upload the weights if another executor has trained them since the last upload."""
        versions = self._fetch_trained()
        if versions != self._uploaded and self._program is not None:
            self._program.upload()
        self._uploaded = versions


def _check_not_in_forward() -> None:
    if is_on_device():
        raise Error(
            "A wrapped model is called in the forward of another one, whose tensors have no values when it is "
            "compiled: call its module there, executor.model"
        )


_ITERATIONS = (
    " Use poptorch.Options().deviceIterations to process a sufficient number of batches each run for pipelined "
    "execution instead."
)


def chosen_options(options: Optional[Options], is_training: bool) -> Options:
    """Return a frozen clone of the options with an output mode; the given object is frozen too.

    Raises Error for another type, and for inference unless gradient accumulation is 1.
    """
    given = Options() if options is None else options
    if not isinstance(given, Options):
        raise Error(f"options must be a poptorch.Options, not {type(given).__name__}")
    chosen = given.clone()
    given._freeze()
    if chosen.defaultOutputMode():
        chosen.outputMode(OutputMode.Final if is_training else OutputMode.All)
    chosen._freeze()
    if not is_training and chosen.Training.gradient_accumulation != 1:
        is_pipelined = not isinstance(chosen._execution_strategy, ShardedExecution)
        raise Error(
            "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default value (1) "
            f"when running a poptorch.inferenceModel().{_ITERATIONS if is_pipelined else ''} It is "
            f"{chosen.Training.gradient_accumulation}: use separate options for validation"
        )
    return chosen


def default_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a training model without one."""
    # A model may have nothing to train, but torch's optimizers need a parameter.
    return SGD(list(model.parameters()) or [torch.nn.Parameter(torch.zeros(()))], lr=0.01)


def trainingModel(
    model: Union[torch.nn.Module, PoplarExecutor],
    options: Optional[Options] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> PoplarExecutor:
    """Wrap a module, whose forward marks a loss, for training.

    The module itself is wrapped: reading its parameters fetches trained weights.

    Args:
        optimizer: default: `poptorch.optim.SGD(lr=0.01)`.

    Raises:
        RuntimeError: the module is wrapped already.
    """
    module = _module_of(model)
    return PoplarExecutor(shallow_copy(module), options, True, VERSION, optimizer, module)


def inferenceModel(model: Union[torch.nn.Module, PoplarExecutor], options: Optional[Options] = None) -> PoplarExecutor:
    """Wrap a module for inference. Raises Error unless gradient accumulation is 1."""
    module = _module_of(model)
    return PoplarExecutor(shallow_copy(module), options, False, VERSION, None, module)


def _module_of(model: Union[torch.nn.Module, PoplarExecutor]) -> torch.nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if not isinstance(model, torch.nn.Module):
        raise Error(f"Only a torch.nn.Module can be wrapped, not {type(model).__name__}")
    scripts = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripts:
        raise Error(f"The module {scripts[0]!r} is a torch.jit.ScriptModule: wrap the Python module it was made of")
    return model


def load(filename: saving.Filename, edit_opts_fn: Optional[Callable[[Options], Any]] = None) -> PoplarExecutor:
    """Return the executor that `save` wrote: model with weights, optimizer, options, executable and random state.

    Args:
        filename: the file, or a directory that contains `model.poptorch`.
        edit_opts_fn: changes the options in place before they are used. Options that the executable was compiled for
            must stay.

    Raises:
        Error: the file has no model, is of another kind or version, or is damaged.
    """
    sections = saving.read_sections(filename)
    saved = saving.read_model(filename, sections)
    options = saved.options.clone()
    options.deleteIfExists("ipu_version")
    if options.connection_type == ConnectionType.Never:  # compiled offline, to be run here
        options.connectionType(ConnectionType.Always)
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    executor = (
        trainingModel(saved.model, options, saved.optimizer)
        if saved.is_training
        else inferenceModel(saved.model, options)
    )
    executor._load(sections)
    return executor
