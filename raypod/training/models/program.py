"""The PopTorch programs of a replica: modules, options (section `ipu`) and optimizer of training and evaluation."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from typing import Any, Callable, ClassVar, Dict, Iterable, Iterator, Optional, Sequence, Tuple

import popdist.poptorch
import poptorch
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import Protocol

from raypod.errors import ConfigError
from raypod.plan import ipu_options, user_code
from raypod.plan.config import Config
from raypod.plan.metric import Metric
from raypod.plan.plan import Plan
from raypod.plan.values import stages_of, stages_return
from raypod.system.command_line import nearest
from raypod.training.data.transforms import activation_dtype
from raypod.training.models import optimizers
from raypod.training.models.decoder import Projection
from raypod.training.models.networks import TaskNetwork
from raypod.training.models.recent_results import RecentResults

Ratios = Dict[str, Tuple[Any, Any]]  # numerator and denominator by the name of the metric
_REDUCTIONS = {"sum": poptorch.ReductionType.Sum, "mean": poptorch.ReductionType.Mean}


class TaskOutputs(Protocol):
    """What the steps need of a task; see `tasks.task.Task`."""

    config: Config
    names: Optional[Tuple[str, ...]]
    predictions: ClassVar[Tuple[str, ...]]

    def training_outputs(self, network: Any, *batch: Any, **named: Any) -> Tuple[torch.Tensor, Ratios]:
        """Return the loss and the other metrics of a micro-batch."""

    def evaluation_outputs(self, network: Any, *batch: Any, **named: Any) -> Any:
        """Return all metrics per sample; with `predictions`, also those."""


# They read or convert a parameter: its own dtype stays.
_CONVERSIONS = {torch.Tensor.to, torch.Tensor.type, torch.Tensor.float, torch.Tensor.half, torch.Tensor.double}
_ACCESSORS = ("__get__", "__set__", "__delete__")


class _CastParameters(TorchFunctionMode):
    """Context in which every function gets the parameters in a dtype, cast where it uses them.

    For half activations with float32 weights. PopTorch's sources disagree about mixed operands: its guide describes
    both that a layer runs in the dtype of its input, and that operands are converted to float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Tuple[Any, ...] = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CONVERSIONS or getattr(func, "__name__", "") in _ACCESSORS:
            return func(*args, **kwargs)
        return func(*map(self._cast, args), **{name: self._cast(value) for name, value in kwargs.items()})

    def _cast(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter) and value.is_floating_point():
            return value.to(self._dtype)
        return type(value)(map(self._cast, value)) if type(value) in (list, tuple) else value


class _Step(nn.Module):
    """The network of one micro-batch; `prepare` transforms the first input of the network on the device."""

    def __init__(self, task: TaskOutputs, metrics: Sequence[Metric], network: nn.Module, prepare: nn.Module) -> None:
        super().__init__()
        self.network, self.prepare = network, prepare
        self._task, self._metrics = task, [metric.name for metric in metrics]
        precision = task.config.training.precision
        self._dtype, self._casts_parameters = activation_dtype(precision), precision == "16.32"

    def _outputs(self, method: Callable[..., Any], batch: Sequence[torch.Tensor]) -> Any:
        network, names = TaskNetwork(self.network, self._run_network), self._task.names
        return method(network, *batch) if names is None else method(network, **dict(zip(names, batch)))

    def _run_network(self, *inputs: Any, **named: Any) -> Any:
        if inputs:
            inputs = (self.prepare(inputs[0]), *inputs[1:])
        with _CastParameters(self._dtype) if self._casts_parameters else contextlib.nullcontext():
            return self.network(*map(self._cast, inputs), **{name: self._cast(each) for name, each in named.items()})

    def _cast(self, value: Any) -> Any:
        """Convert a floating-point tensor to the precision of the activations; a no-op for images."""
        is_other = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != self._dtype
        return value.to(self._dtype) if is_other else value

    def _sums(self, ratios: Any, method: str) -> Iterator[Any]:
        """Yield numerator and denominator of each metric. ConfigError if they are those of other metrics."""
        if not isinstance(ratios, dict) or set(ratios) != set(self._metrics):
            shown = ", ".join(map(repr, ratios)) if isinstance(ratios, dict) else repr(type(ratios).__name__)
            known = ", ".join(map(repr, self._metrics))
            where = "the loss and what `metrics` of the class lists"
            raise self._error(method, f"returned the metrics {shown}; they are {known}: {where}")
        for name in self._metrics:
            try:
                numerator, denominator = ratios[name]
            except (TypeError, ValueError):
                raise self._error(method, f"{name!r} must be a pair (numerator, denominator)") from None
            yield from (numerator, denominator)

    def _error(self, method: str, what: str) -> ConfigError:
        """Return the error for what a method of the task returned, with the place of the method."""
        place = user_code.place_of_function(getattr(self._task, method))
        return ConfigError(f"{type(self._task).__name__}.{method}{place} {what}")


class TrainingStep(_Step):
    """Network and loss for one micro-batch of training.

    With `recent_results`, the last argument of `forward` is a row of `recent_results.call_words`.
    """

    def __init__(
        self,
        task: TaskOutputs,
        metrics: Sequence[Metric],
        network: nn.Module,
        prepare: nn.Module,
        recent_results: Optional[RecentResults] = None,
    ) -> None:
        super().__init__(task, metrics, network, prepare)
        self.recent_results = recent_results
        self._overlap = overlap_mode(task.config)

    def forward(self, *arguments: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, 0-d, and numerator and denominator of each metric, float32 [2 x metrics]."""
        if self._overlap is not None:
            arguments = poptorch.set_overlap_for_input(arguments, self._overlap)
        batch = arguments if self.recent_results is None else arguments[:-1]
        outputs = self._outputs(self._task.training_outputs, batch)
        loss, ratios = outputs if isinstance(outputs, (tuple, list)) and len(outputs) == 2 else (None, None)
        if not isinstance(loss, torch.Tensor) or loss.dim() or not isinstance(ratios, dict):
            others = ", ".join(f"{name!r}: (numerator, denominator)" for name in self._metrics if name != "loss")
            form = f"return loss, {{{others}}}, where the loss is a 0-d tensor"
            raise self._error("training_outputs", f"returned {_shown(outputs)}; it must {form}")
        # PopTorch's backward pass begins at the last marked loss, which need not be the sum that a task returns.
        loss = poptorch.identity_loss(loss, reduction="none")
        ratios = {"loss": (loss.detach(), 1), **ratios}
        sums = torch.stack([_scalar(each, loss) for each in self._sums(ratios, "training_outputs")])
        if self.recent_results is not None:
            self.recent_results(sums, arguments[-1])
        if self._overlap is not None:
            loss, sums = poptorch.set_overlap_for_output((loss, sums), self._overlap)
        return loss, sums


def _shown(value: Any) -> str:
    """Return what a value is: a tensor with its shape, a tuple or list with its entries."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}" if value.dim() else "a 0-d tensor"
    return f"a {type(value).__name__}"


def _scalar(value: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a 0-d float32 tensor on the device of another one."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float32)
    return torch.full((), float(value), dtype=torch.float32, device=like.device)


class EvaluationStep(_Step):
    """Network and metrics for one micro-batch of the test split."""

    def forward(self, *batch: torch.Tensor) -> Any:
        """Return numerator and denominator of each metric per sample: float32 [samples, 2 x metrics].

        With `Task.predictions`: a tuple of that and the tensor [samples, ...] of each prediction.
        """
        outputs, names = self._outputs(self._task.evaluation_outputs, batch), self._task.predictions
        ratios: Any = outputs
        predictions: Any = {}
        if isinstance(outputs, tuple) and len(outputs) == 2:
            ratios, predictions = outputs
        if not isinstance(predictions, dict) or set(predictions) != set(names):
            shown = ", ".join(map(repr, predictions)) if isinstance(predictions, dict) else _shown(predictions)
            known = ", ".join(map(repr, names)) or "none"
            what = f"returned the predictions {shown or 'none'}; `predictions` of the task are {known}: "
            raise self._error("evaluation_outputs", f"{what}return metrics, {{name: tensor [samples, ...]}}")
        of = [name for name in self._metrics for _ in range(2)]
        columns = zip(of, self._sums(ratios, "evaluation_outputs"))
        sums = torch.stack([self._column(name, each, batch[0]) for name, each in columns], dim=1)
        if not names:
            return sums
        for name in names:
            value = predictions[name]
            if not isinstance(value, torch.Tensor) or value.shape[:1] != batch[0].shape[:1]:
                expected = f"a tensor [{batch[0].shape[0]}, ...] with an entry per sample"
                raise self._error("evaluation_outputs", f"{name!r} is {_shown(value)}; a prediction is {expected}")
        return (sums, *(predictions[name] for name in names))

    def _column(self, name: str, value: Any, batch: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            if value.shape != batch.shape[:1]:
                expected = f"sums are tensors with one value per sample, {list(batch.shape[:1])}, or numbers"
                raise self._error("evaluation_outputs", f"returned {_shown(value)} for {name!r}; {expected}")
            return value.to(torch.float32)
        return torch.full((batch.shape[0],), float(value), dtype=torch.float32, device=batch.device)


def finish_network(plan: Plan, network: nn.Module) -> nn.Module:
    """Return a task's network with the plan's splits and frozen parameters, in the precision of the stored weights.

    ConfigError if it is no module.
    """
    if not isinstance(network, nn.Module):
        found = "None: `return` is missing" if network is None else f"a {type(network).__name__}"
        raise ConfigError(f"task {plan.config.task.name}: network() must return an nn.Module, and returned {found}")
    for name, ipu in stages_of(plan.pipeline_splits):
        poptorch.BeginBlock(network.get_submodule(name), user_id=name, ipu_id=ipu)
    if plan.config.training.precision.endswith(".16"):
        network.half()
    optimizers.freeze(network, plan.config.training.freeze or ())
    split_products(network)
    keep_outputs(network, plan.config.ipu.recomputation_checkpoints or ())
    return network


def training_options(plan: Plan, cache: Optional[str] = None) -> Any:
    """Return the `popdist.poptorch.Options` of training; popdist reads the replicas from the environment.

    `cache`: the folder of compiled executables.
    """
    training = plan.config.training
    options = _common_options(plan, cache)
    make_calls(options, plan.config)
    options.deviceIterations(training.device_iterations)
    options.Training.gradientAccumulation(training.gradient_accumulation)
    options.Training.accumulationAndReplicationReductionType(_REDUCTIONS[training.reduction])
    # A micro-batch returns a few scalars, so returning all of them costs little.
    options.outputMode(poptorch.OutputMode.All)
    if keeps_recent_results(plan):
        options.broadcastBuffers(False)  # PopTorch accepts changed buffers only if they may differ between replicas
    return options


def keeps_recent_results(plan: Plan) -> bool:
    """Return whether the training step has `RecentResults`: the SDK gives each instance the buffers of the others."""
    return has_replica_state(poptorch.PoplarExecutor) and plan.geometry.num_instances > 1


def inference_options(plan: Plan, cache: Optional[str] = None) -> Any:
    """Return the `popdist.poptorch.Options` of evaluation; see `training_options`."""
    options = _common_options(plan, cache)
    make_calls(options, plan.config, is_training=False)
    options.deviceIterations(plan.geometry.evaluation_iterations)
    return options.outputMode(poptorch.OutputMode.All)


def _common_options(plan: Plan, cache: Optional[str]) -> Any:
    options = popdist.poptorch.Options(ipus_per_replica=plan.geometry.ipus_per_replica)
    options.randomSeed(plan.config.training.seed)
    options.showCompilationProgressBar(False)
    options.setExecutionStrategy(execution_strategy(plan))
    if cache is not None:
        options.enableExecutableCaching(cache)
    return options


def execution_strategy(plan: Plan) -> Any:
    """Return the PopTorch strategy for several IPUs per replica: "pipelined" or "sharded"."""
    is_pipeline = plan.config.training.execution == "pipelined"
    strategy = poptorch.PipelinedExecution if is_pipeline else poptorch.ShardedExecution
    # By default the number of a stage is that of its IPU, and must increase.
    return strategy(poptorch.AutoStage.AutoIncrement) if stages_return(plan.pipeline_splits) else strategy()


def has_replica_state(training: Any) -> bool:
    """Return whether the SDK of a training model can read and load the state of all replicas: only the emulated one."""
    return hasattr(training, "emulatedReplicaState")


def read_replica_state(training: Any) -> Optional[Dict[str, Any]]:
    """Return the buffers and random states of all replicas of a training model, if the SDK can read them.

    None before the first call, and with the real SDK: it reads back only the buffers of replica 0, with which a resumed
    run then starts all replicas.
    """
    is_readable = has_replica_state(training) and training.isCompiled()
    return training.emulatedReplicaState() if is_readable else None


def replica_state_for(replicas: int, state: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """Return a state of `read_replica_state` for another number of replicas: replica r gets the buffers of r modulo it.

    The random state counts the micro-batches of a replica. It stays: a replica with another index, or with more
    micro-batches done, draws numbers that no other one has drawn. A state of `RandomStates` is returned unchanged.
    """
    if state is None or "buffers" not in state:
        return state
    buffers = {name: values[torch.arange(replicas) % len(values)] for name, values in state["buffers"].items()}
    return {**state, "buffers": buffers}


def load_replica_state(training: Any, state: Optional[Dict[str, Any]]) -> None:
    """Restore a state of `read_replica_state`; does nothing for None or if the SDK cannot load it."""
    loader = getattr(training, "loadEmulatedReplicaState", None)
    if state is not None and loader is not None:
        loader(state)


def copy_replica_0_buffers(buffers: Iterable[Tuple[str, Any]], state: Optional[Dict[str, Any]]) -> None:
    """Copy the values of global replica 0, which are saved, to the host's buffers (name, tensor)."""
    values = state["buffers"] if state is not None else {}
    for name, buffer in buffers:
        if name in values:
            buffer.copy_(values[name][0])


def make_calls(options: Any, config: Config, is_training: bool = True) -> None:
    """Make the calls of `ipu_options.calls_of` on `poptorch.Options`; for the evaluation those that are not its own."""
    for call in ipu_options.calls_of(config):
        if is_training or not call.is_for_training:
            setter = functools.reduce(getattr, call.setter.split("."), options)
            setter(*map(_argument, call.arguments))


def keep_outputs(network: nn.Module, patterns: Sequence[str]) -> None:
    """Mark the outputs of the modules whose names match as checkpoints of a recomputation.

    Raises:
        ConfigError: a pattern matches no module.
    """
    names = [name for name, _ in network.named_modules() if name]
    for pattern in patterns:
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            similar = nearest(pattern, names, 3) or names[:5]
            flag = f"--recomputation-checkpoints {pattern}"
            raise ConfigError(f"{flag} matches no module of the network; there are {', '.join(similar)}")
        for name in found:
            network.get_submodule(name).register_forward_hook(_keep_output)


def overlap_mode(config: Config) -> Any:
    """Return the `poptorch.OverlapMode` of inputs and outputs in training; None for transfers that do not overlap."""
    modes = {
        "accumulation-loop": poptorch.OverlapMode.OverlapAccumulationLoop,
        "device-iteration-loop": poptorch.OverlapMode.OverlapDeviceIterationLoop,
    }
    return modes.get(config.ipu.overlap_io or "")


def _keep_output(module: nn.Module, inputs: Any, output: Any) -> Any:
    if not module.training or output is None:
        return output
    if isinstance(output, (list, tuple)):  # one by one: of a list of one tensor, the SDK gives the list of its rows
        return type(output)(_keep_output(module, inputs, each) for each in output)
    return poptorch.recomputationCheckpoint(output)


def _argument(value: Any) -> Any:
    """Return an argument of a call as PopTorch takes it: plain values as they are."""
    if isinstance(value, ipu_options.Location):
        location = poptorch.TensorLocationSettings()
        for setter, setting in value.settings.items():
            getattr(location, setter)(setting)
        return location
    is_dtype = isinstance(value, str) and value.startswith(ipu_options.TORCH)
    return getattr(torch, value[len(ipu_options.TORCH) :]) if is_dtype else value


def split_products(network: nn.Module) -> None:
    """Let the projections of a network compute their products on the device in the parts that they have."""
    for module in network.modules():
        if isinstance(module, Projection) and module.parts > 1:
            mode = poptorch.MatMulSerializationMode.OutputChannels
            module.product = functools.partial(poptorch.serializedMatMul, mode=mode, factor=module.parts)


def mean_loss(
    logits: torch.Tensor, targets: torch.Tensor, length: Optional[int], count: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Return the mean cross-entropy in float32, of `length` tokens of each window at a time.

    Args:
        logits: [n, tokens, vocabulary].
        targets: int64 [n, tokens].
        length: None for all tokens at once.
        count: of the targets that are not -100, which are ignored; None: all.
    """
    if length is None:
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    total = torch.stack(
        [
            functional.cross_entropy(part.float().flatten(0, 1), wanted.flatten(), reduction="sum")
            for part, wanted in zip(torch.split(logits, length, dim=1), torch.split(targets, length, dim=1))
        ]
    ).sum()
    return poptorch.identity_loss(total / (targets.numel() if count is None else count), "none")
