"""Calls every public function of the `poptorch` that is importable with many kinds of values, and prints what happens.

A program of `api_sweep.py`, which starts it with PopTorch's own Python package and with the emulated SDK; `run` serves
the others, `names_probe.py`, `loader_probe.py` and `horovod_probe.py`. It prints one line of JSON per call: `[name,
parameter, kind, outcome]`. An outcome has a `value` (what is returned, and what of the state has changed) or an `error`
(the names of the exception's classes), and `warned`; `core` if the exception comes from the stand-in for the compiled
part of PopTorch. A line with the outcome null comes before each call, so that one that ends the process is known;
PROBE_FROM continues behind it.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import inspect
import itertools
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy
import popdist.poptorch
import poptorch
import poptorch.profiling
import poptorch.testing
import torch

_ENUMS = [each for _, each in inspect.getmembers(poptorch.enums, inspect.isclass) if issubclass(each, enum.Enum)]
_ENUMS = [each for each in _ENUMS if not each.__name__.startswith("_") and list(each)]


def _function(*_args: Any) -> None:
    """A value of a kind."""


KINDS: Dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "2": lambda: 2,
    "3": lambda: 3,
    "32": lambda: 32,
    "-1": lambda: -1,
    "2**40": lambda: 2**40,
    "0.5": lambda: 0.5,
    "2.0": lambda: 2.0,
    "nan": lambda: float("nan"),
    "numpy.int64(2)": lambda: numpy.int64(2),
    "numpy.float32(0.5)": lambda: numpy.float32(0.5),
    "'x'": lambda: "x",
    "''": lambda: "",
    "'2'": lambda: "2",
    "bytes": lambda: b"x",
    "[]": list,
    "[1]": lambda: [1],
    "['x']": lambda: ["x"],
    "()": tuple,
    "(0.9, 0.99)": lambda: (0.9, 0.99),
    "{}": dict,
    "{'x': 1}": lambda: {"x": 1},
    "{'x': True}": lambda: {"x": True},
    "{'IPU0': 0.5}": lambda: {"IPU0": 0.5},
    "torch.float": lambda: torch.float,
    "torch.half": lambda: torch.half,
    "torch.int32": lambda: torch.int32,
    "tensor()": lambda: torch.tensor(2),
    "tensor[4]": lambda: torch.ones(4),
    "[tensor]": lambda: [torch.ones(4)],
    "function": lambda: _function,
    "object": object,
    "module": lambda: torch.nn.Linear(2, 2),
    "Options": lambda: poptorch.Options(),
    "TensorLocationSettings": lambda: poptorch.TensorLocationSettings().useOnChipStorage(False),
    "ShardedExecution": lambda: poptorch.ShardedExecution(),
    **{f"{each.__name__}.{member.name}": lambda member=member: member for each in _ENUMS for member in list(each)[-2:]},  # type: ignore[misc]
}

# Valid values of the parameters without a default, by name.
BASE: Dict[str, Callable[[], Any]] = {
    "min_elements": lambda: 4,
    "num_tiles": lambda: 64,
    "location": KINDS["TensorLocationSettings"],
    "gradient_accumulation": lambda: 2,
    "reduction_type": lambda: poptorch.ReductionType.Sum,
    "mean_reduction_strategy": lambda: poptorch.MeanReductionStrategy.Running,
    "enabled": lambda: True,
    "value": lambda: True,
    "dtype": lambda: torch.half,
    "trace_model": lambda: False,
    "var_num_processes": lambda: "SIZE",
    "var_process_id": lambda: "RANK",
    "process_id": lambda: 1,
    "num_processes": lambda: 2,
    "engine_options": lambda: {"x": "y"},
    "patterns": lambda: {"PadSum": True},
    "key": lambda: "enableOutlining",
    "string": lambda: '{"deviceIterations": 2}',
    "excludes": lambda: ["x"],
    "device_iterations": lambda: 2,
    "strategy": lambda: poptorch.ShardedExecution(),
    "available_memory_proportion": lambda: {"IPU0": 0.5},
    "replication_factor": lambda: 2,
    "input_group_size": lambda: 1,
    "input_group_type": lambda: poptorch.CommGroupType.Consecutive,
    "log_dir": lambda: "x",
    "max_lines": lambda: 2,
    "name": lambda: "x",
    "path": lambda: "x",
    "use_model": lambda: True,
    "connection_type": lambda: poptorch.ConnectionType.Never,
    "sync_pattern": lambda: poptorch.SyncPattern.SinglePipeline,
    "ipu_id": lambda: 1,
    "short_name": lambda: "x",
    "long_name": lambda: "y",
    "output_mode": lambda: poptorch.OutputMode.Sum,
    "half_float_casting": lambda: poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat,
    "block_id": lambda: "a",
    "random_seed": lambda: 2,
    "log_cycle_count": lambda: True,
    "buffers": lambda: ["x"],
    "auto_stage": lambda: poptorch.AutoStage.SameAsIpu,
    "ipu": lambda: 1,
    "idx": lambda: 0,
    "phase": lambda: 0,
    "liveness": lambda: poptorch.Liveness.AlwaysLive,
    "model": KINDS["module"],
    "lr": lambda: 0.1,
    "layer_to_call": KINDS["module"],
    "halfFloatCasting": lambda: True,
    "level": lambda: "INFO",
    "tensor": KINDS["tensor[4]"],
    "hook": lambda: _function,
    "module": KINDS["module"],
    "ref": KINDS["tensor[4]"],
    "other": KINDS["tensor[4]"],
    "x": KINDS["tensor[4]"],
    "reduction": lambda: "sum",
    "dataset": lambda: torch.utils.data.TensorDataset(torch.ones(8, 2)),
    "options": lambda: poptorch.Options(),
    "option": lambda: "device_iterations",
    "attr": lambda: "lr",
    "variable_attributes": lambda: ["lr"],
    "allowed_attributes": lambda: ["lr", "momentum"],
    "ID": lambda: "x",
    "title": lambda: "x",
    "state": dict,
    "state_dict": lambda: torch.nn.Linear(2, 2).state_dict(),
}


class Subject(NamedTuple):
    """What is called: `make` returns the function, and what has the state that is observed.

    Attributes:
        base: valid values by parameter, besides those of `BASE`.
        own_kinds: further kinds of single parameters.
        without: kinds that single parameters are not called with.
    """

    name: str
    make: Callable[[], Tuple[Callable[..., Any], Any]]
    observe: Callable[[Any], Dict[str, Any]] = lambda _state: {}
    kinds: Dict[str, Callable[[], Any]] = KINDS
    base: Dict[str, Callable[[], Any]] = {}
    own_kinds: Dict[str, Dict[str, Callable[[], Any]]] = {}
    without: Dict[str, List[str]] = {}

    def of(self, parameter: str) -> Dict[str, Callable[[], Any]]:
        """The kinds of a parameter: `kinds`, and those of its own, except those of `without`."""
        kinds = {**self.kinds, **self.own_kinds.get(parameter, {})}
        return {kind: make for kind, make in kinds.items() if kind not in self.without.get(parameter, [])}


def _methods(name: str, make: Callable[[], Any], observe: Callable[[Any], Dict[str, Any]]) -> Iterator[Subject]:
    for method, _ in inspect.getmembers(type(make()), inspect.isfunction):
        if method.startswith("_") or method in _NOT_CALLED:
            continue

        def bound(method: str = method) -> Tuple[Callable[..., Any], Any]:
            owner = make()
            return getattr(owner, method), owner

        yield Subject(f"{name}.{method}", bound, observe)


_NOT_CALLED = {"loadFromFile", "clearDebug", "printDebug", "toDict", "clone", "set", "update", "createOrSet"}
_NOT_CALLED |= {
    "onStartTracing",
    "onEndTracing",
    "backendOptions",
    "step",
    "zero_grad",
    "add_param_group",
    "state_dict",
}
_NOT_CALLED |= {"profile_hook_step"}


def _options_state(options: Any) -> Dict[str, Any]:
    whole = options.clone()
    if whole.defaultOutputMode():
        whole.outputMode(poptorch.OutputMode.All)
    state = dict(whole.toDict())
    state["seed"] = options.random_seed if options.exists("random_seed") else None
    state.pop("compilation_progress_bar_fn", None)
    return state


def _optimizer_state(optimizer: Any) -> Dict[str, Any]:
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    group.update((name, bool(group[name])) for name in _FLAGS if name in group)
    names = ("loss_scaling", "max_grad_norm", "accum_type", "use_combined_accum", "bias_correction", "max_weight_norm")
    own = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    attributes = optimizer.variable_attrs
    constant = {f"{name} is constant": attributes.isConstant(name) for name in (*own, *group) if name in _VARIABLE}
    return {**group, **own, **constant}


_FLAGS = ("nesterov", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
_VARIABLE = {"lr", "momentum", "dampening", "weight_decay", "betas", "eps", "alpha", "loss_scaling"}


def subjects() -> Iterator[Subject]:
    """Yield everything that is called, with valid arguments of its own."""
    for subject in _subjects():
        yield subject._replace(base={**subject.base, **_BASES.get(subject.name, {})})


_BASES: Dict[str, Dict[str, Callable[[], Any]]] = {
    "Stage()": {"block_ids": lambda: "a"},
    "Phase()": {"arg": lambda: "a"},
    "Phase.ipus": {"ipus": lambda: 0},
    "ParallelPhasedExecution()": {"phases": lambda: poptorch.Phase("a")},
    "SerialPhasedExecution()": {"phases": lambda: poptorch.Phase("a")},
    "MultiConv.availableMemoryProportions": {"value": lambda: 0.5},
    "MultiConv.cycleBackOff": {"value": lambda: 0.5},
    "MultiConv.partialsTypes": {"value": lambda: torch.half},
    "MultiConv.planType": {"value": lambda: poptorch.MultiConvPlanType.Parallel},
    "MultiConv.perConvReservedTiles": {"value": lambda: 2},
    "optim.Optimizer.load_state_dict": {"state": lambda: _optimizer("SGD", lr=0.2).state_dict()},
    "optim.Optimizer.set_state_dict": {"state": lambda: _optimizer("SGD", lr=0.2).state_dict()},
}


def _subjects() -> Iterator[Subject]:
    yield from _methods("Options", poptorch.Options, _options_state)
    for group in ("Training", "Precision", "Distributed", "TensorLocations", "Jit", "_Popart"):
        for subject in _methods(f"Options.{group}", lambda group=group: getattr(poptorch.Options(), group), _nothing):  # type: ignore[misc]
            method = subject.name.rpartition(".")[2]

            def bound(group: str = group, method: str = method) -> Tuple[Callable[..., Any], Any]:
                options = poptorch.Options()
                return getattr(getattr(options, group), method), options

            yield subject._replace(make=bound, observe=_options_state)
    yield from _methods("TensorLocationSettings", poptorch.TensorLocationSettings, lambda owner: owner.toDict())
    yield from _classes()
    yield from _executors()
    yield from _functions()  # after the executors, as hooks of compilations stay registered
    yield Subject("popdist.poptorch.Options", lambda: (popdist.poptorch.Options, None))


def _nothing(_owner: Any) -> Dict[str, Any]:
    return {}


def _classes() -> Iterator[Subject]:
    names = ("Attribute", "Stage", "Phase", "PipelinedExecution", "ShardedExecution", "ParallelPhasedExecution")
    for name in (*names, "SerialPhasedExecution", "NameScope", "Block", "CPU", "MultiConv"):
        yield Subject(f"{name}()", lambda name=name: (getattr(poptorch, name), None))  # type: ignore[misc]
    yield Subject("VariableAttributes()", lambda: (poptorch.optim.VariableAttributes, None))
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "LAMB"):

        def build(name: str = name) -> Tuple[Callable[..., Any], Any]:
            return lambda **named: _changed_by(name, named), None

        signature = inspect.signature(getattr(poptorch.optim, name))
        parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in signature.parameters.values()][1:]
        yield Subject(f"optim.{name}()", _with_signature(build, parameters))
    yield from _methods("optim.Optimizer", lambda: _optimizer("SGD", lr=0.1), _nothing)
    stage = lambda: poptorch.Stage("a")  # noqa: E731
    yield from _methods("Stage", stage, lambda owner: {"blocks": owner.blocks})
    yield from _methods("Phase", lambda: poptorch.Phase("a", "b"), _nothing)
    strategies = {"SerialPhasedExecution": poptorch.SerialPhasedExecution}
    strategies["ParallelPhasedExecution"] = poptorch.ParallelPhasedExecution
    for name, kind in strategies.items():
        make = lambda kind=kind: kind(poptorch.Phase("a"), poptorch.Phase("b"))  # noqa: E731
        yield from _methods(name, make, lambda owner: dict(owner.backendOptions()) if hasattr(owner, "x") else {})
    yield from _methods("MultiConv", poptorch.MultiConv, _nothing)


def _with_signature(build: Any, parameters: List[inspect.Parameter]) -> Any:
    def made() -> Tuple[Callable[..., Any], Any]:
        function, state = build()
        function.__signature__ = inspect.Signature(parameters)
        return function, state

    return made


def _changed_by(name: str, named: Dict[str, Any]) -> Dict[str, Any]:
    """Return what of the state of an optimizer these arguments change; its defaults may have other names."""
    default = _optimizer_state(_optimizer(name, lr=0.1))
    state = _optimizer_state(_optimizer(name, **named))
    return {key: value for key, value in state.items() if _plain(value) != _plain(default.get(key))}


def _optimizer(name: str, **named: Any) -> Any:
    return getattr(poptorch.optim, name)([torch.nn.Parameter(torch.ones(2))], **named)


_FUNCTIONS = (
    *("setLogLevel", "registerPreCompileHook", "registerPostCompileHook", "removeBlocks", "BeginBlock"),
    *("BlockFunction", "identity_loss", "set_available_memory", "ipu_print_tensor", "nop", "serializedMatMul"),
    *("dynamic_slice", "dynamic_update", "recomputationCheckpoint", "set_overlap_for_input", "custom_op"),
    *("set_overlap_for_output", "for_loop", "cond", "ctc_beam_search_decoder", "fps", "nearest"),
    *("registerCustomArgParser", "trainingModel", "inferenceModel", "load"),
)
_SHORT = {kind: make for kind, make in KINDS.items() if kind != "2**40"}  # a loop runs on the host, too
_FUNCTION_BASE: Dict[str, Dict[str, Callable[[], Any]]] = {
    "serializedMatMul": {
        "lhs": lambda: torch.ones(2, 4),
        "rhs": lambda: torch.ones(4, 2),
        "mode": lambda: poptorch.MatMulSerializationMode.InputChannels,
        "factor": lambda: 2,
    },
    "set_available_memory": {"available_memory_proportion": lambda: 0.5},
    "dynamic_slice": {"dim": lambda: 0, "start": lambda: torch.tensor(1), "size": lambda: 2, "step": lambda: 1},
    "dynamic_update": {
        "input": KINDS["tensor[4]"],
        "src": lambda: torch.zeros(2),
        "dim": lambda: 0,
        "start": lambda: torch.tensor(1),
        "size": lambda: 2,
    },
    "set_overlap_for_input": {"input_tensors": KINDS["tensor[4]"], "mode": lambda: poptorch.OverlapMode.NoOverlap},
    "set_overlap_for_output": {"output_tensors": KINDS["tensor[4]"], "mode": lambda: poptorch.OverlapMode.NoOverlap},
    "for_loop": {"count": lambda: 2, "body": lambda: lambda x: [x * 2], "inputs": KINDS["[tensor]"]},
    "cond": {
        "condition": lambda: torch.tensor([True]),
        "then_body": lambda: lambda x: x + 1,
        "else_body": lambda: lambda x: x - 1,
        "then_inps": KINDS["[tensor]"],
        "else_inps": KINDS["[tensor]"],
    },
    "custom_op": {
        "inputs": KINDS["[tensor]"],
        "name": lambda: "Cube",
        "domain": lambda: "custom.ops",
        "domain_version": lambda: 1,
        "example_outputs": KINDS["[tensor]"],
    },
    "ctc_beam_search_decoder": {
        "probs": lambda: torch.zeros(4, 1, 3).log_softmax(2),
        "lengths": lambda: torch.tensor([4]),
        "beam_width": lambda: 3,
    },
    "fps": {"src": lambda: torch.ones(4, 2), "ptr": lambda: [0, 4]},
    "nearest": {"x": lambda: torch.ones(4, 2), "y": lambda: torch.ones(2, 2)},
    "registerCustomArgParser": {"arg_data_type": lambda: dict, "arg_parser": lambda: None},
    "load": {"filename": lambda: "absent"},
}


def _functions() -> Iterator[Subject]:
    for name in _FUNCTIONS:
        base = _FUNCTION_BASE.get(name, {})
        subject = Subject(f"{name}()", lambda name=name: (getattr(poptorch, name), None), base=base)  # type: ignore[misc]
        yield subject._replace(kinds=_SHORT) if name == "for_loop" else subject
    yield Subject("testing.allclose()", lambda: (poptorch.testing.allclose, None))
    yield Subject("profiling.Channel()", lambda: (poptorch.profiling.Channel, None))


_present: List[Any] = []  # the model that holds the device


def _trained(is_compiled: bool) -> Any:
    while _present:
        with contextlib.suppress(Exception):
            _present.pop().destroy()

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss(self.fc(x), reduction="sum")

    torch.manual_seed(0)
    step = Step()
    options = poptorch.Options().showCompilationProgressBar(False)
    model = poptorch.trainingModel(step, options, poptorch.optim.SGD(step.parameters(), lr=0.1))
    _present.append(model)
    if is_compiled:
        model(torch.ones(1, 2))
    return model


_EXECUTOR = ("load_state_dict", "getAnchoredTensor", "setOptimizer", "compile", "__call__", "copyWeightsToHost")
_EXECUTOR += ("copyWeightsToDevice", "copyWeightsToHostIfNeeded", "copyNamedBuffersToDevice", "isCompiled", "destroy")
_EXECUTOR += ("isAttachedToDevice", "attachToDevice", "detachFromDevice", "getTensorNames", "cycleCount")
_EXECUTOR += ("loadExecutable",)
_EXECUTOR_NAMES = ("None", "True", "1", "0.5", "'x'", "[]", "{}", "tensor[4]", "[tensor]", "object", "module")
_EXECUTOR_KINDS = {kind: KINDS[kind] for kind in _EXECUTOR_NAMES}


def _executors() -> Iterator[Subject]:
    for is_compiled in (False, True):
        for name in _EXECUTOR:

            def bound(name: str = name, is_compiled: bool = is_compiled) -> Tuple[Callable[..., Any], Any]:
                model = _trained(is_compiled)
                return getattr(model, name), model

            base = {
                "filename": lambda: "absent",
                "optimizer": lambda: _optimizer("SGD", lr=0.2),
                "args": lambda: torch.ones(1, 2),
                "state_dict": lambda: {"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)},
            }
            title = f"PoplarExecutor.{name}{', compiled' if is_compiled else ''}"
            yield Subject(title, bound, _executor_state, _EXECUTOR_KINDS, base)


def _executor_state(model: Any) -> Dict[str, Any]:
    return {"compiled": model.isCompiled(), "attached": model.isCompiled() and model.isAttachedToDevice()}


def calls(subject: Subject) -> Iterator[Tuple[str, str, Optional[Dict[str, Any]]]]:
    """Yield the calls of a subject, each before it is made, without an outcome, and with it: parameter, kind, outcome.

    The first has valid values only. The first PROBE_FROM calls of this process are not made.
    """
    function, _ = subject.make()
    parameters = list(inspect.signature(function).parameters.values())
    _arguments(subject, parameters, None, None)  # KeyError for a parameter without a valid value
    names = [each.name for each in parameters if each.kind != each.VAR_KEYWORD]
    names = [name for name in names if name in getattr(function, "varied", names)]
    planned: List[Any] = [(None, "", None)]
    planned += [(name, kind, make) for name in names for kind, make in subject.of(name).items()]
    for name, kind, make in planned:
        if next(_count) >= int(os.environ.get("PROBE_FROM", "0")):
            yield name or "", kind, None
            yield name or "", kind, _outcome(subject, parameters, name, make)


_count = itertools.count()


def _outcome(
    subject: Subject, parameters: List[inspect.Parameter], changed: Optional[str], value: Optional[Callable[[], Any]]
) -> Dict[str, Any]:
    collector = _Collector()
    environment = dict(os.environ)
    logger = logging.getLogger("poptorch::python")
    level = logger.level
    logger.addHandler(collector)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            function, state = subject.make()
            args, named = _arguments(subject, parameters, changed, value)
            before = copy.deepcopy(subject.observe(state))
            del collector.messages[:], caught[:]
            returned = function(*args, **named)
            after = subject.observe(state)
            names = {*before, *after}
            new = {name: after.get(name) for name in names if _plain(before.get(name)) != _plain(after.get(name))}
            result = "self" if type(returned).__name__ == type(state).__name__ else _plain(returned)
            outcome: Dict[str, Any] = {"value": [result, _plain(new)]}
        except Exception as error:  # noqa: BLE001  # of any kind: it is the outcome
            file = traceback.extract_tb(error.__traceback__)[-1].filename
            is_core = "/front_end/" in file or file.endswith("torch/_ops.py") or "poptorch_core" in str(error)
            kinds = [each.__name__ for each in type(error).__mro__ if each not in (object, BaseException, Exception)]
            outcome = {"error": kinds, "core": is_core, "text": str(error)[:200]}
        finally:
            logger.removeHandler(collector)
            logger.setLevel(level)
            os.environ.clear()
            os.environ.update(environment)
    return {**outcome, "warned": bool(collector.messages or caught)}


def _arguments(
    subject: Subject, parameters: List[inspect.Parameter], changed: Optional[str], value: Optional[Callable[[], Any]]
) -> Tuple[List[Any], Dict[str, Any]]:
    args: List[Any] = []
    named: Dict[str, Any] = {}
    for each in parameters:
        make = value if each.name == changed else subject.base.get(each.name)
        if make is None and each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            make = BASE[each.name]
        if make is None:
            continue
        if each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY):
            args.append(make())
        else:
            named[each.name] = make()
    if args and named:  # what comes before *args is positional, too
        before = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD and each.name in named]
        args = [*(named.pop(name) for name in before), *args]
    return args, named


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning."""
        if record.levelno >= logging.WARNING:
            self.messages.append(record.getMessage())


def _plain(value: Any) -> Any:
    """Return a value that JSON can contain and that is equal where two SDKs mean the same."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, (int, float, str, numpy.number)):
        return f"{float(value):g}" if not isinstance(value, str) else value
    if isinstance(value, torch.Tensor):
        return ["tensor", list(value.shape), str(value.dtype), str(value.detach().double().sum().item())]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if isinstance(value, torch.dtype):
        return str(value)
    return type(value).__name__


def run(subjects: Iterator[Subject]) -> None:
    """Call the subjects whose names have a word of the command line in them, or all; write the outcomes to a file.

    PROBE_OUTPUT names the file, which instance 0 writes.
    """
    is_first = os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0"
    output = Path(os.environ["PROBE_OUTPUT"] if is_first else os.devnull).open("a", 1, encoding="utf-8")  # noqa: SIM115
    only = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for subject in subjects:
            if only and not any(text in subject.name for text in only):
                continue
            try:
                for call in calls(subject):
                    output.write(json.dumps([subject.name, *call]) + "\n")
            except Exception as error:  # noqa: BLE001  # the others go on
                outcome = {"error": ["probe"], "core": True, "text": repr(error), "warned": False}
                output.write(json.dumps([subject.name, "", "", outcome]) + "\n")
    output.close()


if __name__ == "__main__":
    run(subjects())
