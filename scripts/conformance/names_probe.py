"""Calls the public names that `api_probe.py` leaves out, with many kinds of values. A program of api_sweep.py.

These are the values of the enums, options from files and dictionaries, attributes of optimizers, what a block, a name
scope or a channel does, saved executables, the state of the random numbers, and the measurements of an executor.
"""

from __future__ import annotations

import enum
import inspect
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

import poptorch
import poptorch.profiling
import torch

from conformance import api_probe
from conformance.api_probe import KINDS, Subject, run

_ENUMS = [each for _, each in inspect.getmembers(poptorch.enums, inspect.isclass) if issubclass(each, enum.Enum)]
_FILES: Dict[str, str] = {
    "a file": "deviceIterations(2)\nTraining.gradientAccumulation(2)\n",
    "comments": "# of the run\n\ndeviceIterations(2)  # calls\n",
    "an unknown option": "deviceIteration(2)\n",
    "an invalid value": "deviceIterations(-1)\n",
    "no call": "x = 2\n",
    "no Python": "deviceIterations(\n",
    "an empty file": "",
}


def subjects() -> Iterator[Subject]:
    """Yield what is called."""
    for kind in _ENUMS:
        yield _subject(f"enums.{kind.__name__}()", kind, value=lambda: 0)
        members = lambda kind=kind: {each.name: each.value for each in kind}  # noqa: E731
        yield _subject(f"enums.{kind.__name__}", members)
    yield from _of_options()
    yield from _of_optimizers()
    yield from _of_operators()
    for name in ("yieldTensors", "reconstruct"):
        call = lambda name=name: getattr(_Parser(), name)(None, None)  # noqa: E731
        yield _subject(f"ICustomArgParser.{name}, not implemented", call)
    yield _subject("profiling.Channel.instrument", _instrumented, obj=lambda: _Counted, method=lambda: "count")
    yield _subject("profiling.Channel.tracepoint", _traced, name=lambda: "x")
    yield from _of_executors()


class _Parser(poptorch.ICustomArgParser):
    """A parser without methods."""


def _subject(name: str, function: Callable[..., Any], /, **base: Callable[[], Any]) -> Subject:
    """A function whose parameters, those of `base`, are varied; it returns what is observed."""
    kinds = {kind: make for kind, make in KINDS.items() if kind != "2**40"}

    def called(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    parameters = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_ONLY) for each in base]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Subject(name, lambda: (called, None), kinds=kinds, base=base)


def _of_options() -> Iterator[Subject]:
    def loaded(filepath: Any) -> Any:
        options = poptorch.Options()
        options.loadFromFile(filepath)
        return api_probe._options_state(options)

    def file(text: str) -> Callable[[], str]:
        def make() -> str:
            Path("options.conf").write_text(text, encoding="utf-8")
            return "options.conf"

        return make

    files = {kind: file(text) for kind, text in _FILES.items()}
    subject = _subject("Options.loadFromFile", loaded, filepath=files["a file"])
    kinds = {kind: KINDS[kind] for kind in ("None", "0.5", "'x'", "''", "[]", "{}", "bytes", "object")}
    yield subject._replace(kinds={**kinds, **files})
    for title, options in (("", poptorch.Options), (".Training", lambda: poptorch.Options().Training)):
        called = lambda option, options=options: options()(option)  # noqa: E731
        yield _subject(f"Options{title}.__call__", called, option=lambda: "x")
        read = lambda option, options=options: getattr(options(), option)  # noqa: E731
        yield _subject(f"Options{title}, reading", read, option=lambda: "x")

        def assigned(value: Any, name: str, options: Callable[[], Any] = options) -> Any:
            owner = options()
            setattr(owner, name, value)
            return getattr(owner, name)

        for name in ("device_iterations", "gradient_accumulation", "unknown"):
            assign = lambda value, name=name, assigned=assigned: assigned(value, name)  # noqa: E731
            yield _subject(f"Options{title}, assigning {name}", assign, value=lambda: 2)
    yield _subject("Options.clone", lambda: api_probe._options_state(poptorch.Options().deviceIterations(3).clone()))


def _of_optimizers() -> Iterator[Subject]:
    def marked(name: str, attr: Any) -> Any:
        attributes = poptorch.optim.VariableAttributes(["lr"], ["lr", "momentum"])
        returned = getattr(attributes, name)(attr)
        return [returned, *(attributes.isConstant(each) for each in ("lr", "momentum"))]

    for name in ("isConstant", "markAsConstant", "markAsVariable"):
        mark = lambda attr, name=name: marked(name, attr)  # noqa: E731
        subject = _subject(f"optim.VariableAttributes.{name}", mark, attr=lambda: "momentum")
        yield subject._replace(own_kinds={"attr": {"'lr'": lambda: "lr"}})


class _Counted:
    calls = 0

    def count(self, value: int = 1) -> int:
        self.calls += value
        return self.calls


def _instrumented(obj: Any, method: Any) -> Any:
    channel = poptorch.profiling.Channel("x")
    own = type("Own", (_Counted,), {"count": _Counted.count})() if obj is _Counted else obj
    channel.instrument(own, method)
    return own.count(2) if obj is _Counted else None


def _traced(name: Any) -> Any:
    with poptorch.profiling.Channel("x").tracepoint(name):
        return "inside"


def _of_operators() -> Iterator[Subject]:
    def inside(context: Callable[[], Any]) -> Any:
        with context():
            return torch.ones(2) * 2

    yield _subject(
        "NameScope, outside of a model", lambda name: inside(lambda: poptorch.NameScope(name)), name=lambda: "x"
    )
    block = lambda user_id, ipu_id: inside(lambda: poptorch.Block(user_id, ipu_id))  # noqa: E731
    yield _subject("Block, outside of a model", block, user_id=lambda: "a", ipu_id=lambda: 0)
    yield _subject("MultiConv, outside of a model", lambda: inside(poptorch.MultiConv))
    yield _subject("Block.useAutoId", lambda: poptorch.Block.useAutoId())
    start = lambda user_id, ipu_id: poptorch.Block.start(user_id, ipu_id)  # noqa: E731
    yield _subject("Block.start, outside of a model", start, user_id=lambda: "a", ipu_id=lambda: 0)
    cpu = lambda x, ID: poptorch.CPU(lambda tensor: tensor + 1, ID)(x)  # noqa: E731
    yield _subject("CPU, outside of a model", cpu, x=lambda: torch.ones(2), ID=lambda: "x")


def _of_executors() -> Iterator[Subject]:
    short = {kind: KINDS[kind] for kind in (*api_probe._EXECUTOR_NAMES, "''", "bytes", "tensor()", "torch.half")}

    def named(name: str, *, is_compiled: bool) -> Callable[..., Any]:
        return lambda *args: getattr(api_probe._trained(is_compiled), name)(*args)

    def state(state: Any) -> Any:
        model = api_probe._trained(True)
        given = model.rng_state if isinstance(state, str) and state == "its own" else state
        model.rng_state = given
        return model.rng_state == given

    def saved(name: str, filename: Any, *, is_compiled: bool) -> Any:
        x = [torch.ones(1, 2)] if name == "compileAndExport" else []
        returned = getattr(api_probe._trained(is_compiled), name)(filename, *x, export_model=False)
        return [returned, Path(filename).is_file()]

    for is_compiled in (False, True):
        title = ", compiled" if is_compiled else ""
        for name in (
            "compilationTime",
            "getPerfCounters",
            "getLatency",
            "getComputeLatency",
            "getHostIpuLatency",
            "getIpuHostLatency",
        ):
            measured = lambda name=name, is_compiled=is_compiled: type(named(name, is_compiled=is_compiled)()).__name__  # noqa: E731
            yield _subject(f"PoplarExecutor.{name}{title}", measured)
        for name in ("save", "compileAndExport"):
            save = lambda filename, name=name, is_compiled=is_compiled: saved(name, filename, is_compiled=is_compiled)  # noqa: E731
            yield _subject(f"PoplarExecutor.{name}{title}", save, filename=lambda: "saved")._replace(kinds=short)
        read = lambda is_compiled=is_compiled: type(api_probe._trained(is_compiled).rng_state).__name__  # noqa: E731
        yield _subject(f"PoplarExecutor.rng_state{title}, reading", read)
    subject = _subject("PoplarExecutor.rng_state, compiled, assigning", state, state=lambda: "its own")
    yield subject._replace(kinds=short)


if __name__ == "__main__":
    run(subjects())
