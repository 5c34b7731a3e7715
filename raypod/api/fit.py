"""`raypod.fit` and `raypod.stream`: a training run as a function call, its arguments, and callbacks for its events."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Generator,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    Union,
    get_args,
)

from raypod.api import planning
from raypod.api.result import Interrupted, Result
from raypod.api.training import Training, claimed
from raypod.errors import ConfigError, RunError
from raypod.events import Event
from raypod.plan import resolve
from raypod.plan.config import Config, fields
from raypod.plan.flags import ALIASES
from raypod.plan.plan import Plan
from raypod.runs.callback import Callback, Reporter
from raypod.runs.progress import Progress
from raypod.runs.upload import remote_run
from raypod.runtime.coordinator.stop import Stop
from raypod.system.command_line import nearest, suggestion
from raypod.system.sdk import activation
from raypod.training.tasks import registry

if TYPE_CHECKING:
    from raypod.training.tasks.task import Task


CallbacksLike = Union[Callable[[Event], Any], Sequence[Any]]


def fit(
    task: TaskLike = None,
    config: ConfigLike = None,
    *,
    cluster: Optional[PathLike] = None,
    callbacks: CallbacksLike = (),
    progress: bool = True,
    take_over: bool = False,
    **flags: Any,
) -> Result:
    """Train, and return the result. `raypod train` runs the same code.

    Inside a Ray session (`ray.is_initialized()`) the instances run in it, and it stays; otherwise a running cluster is
    joined or a local session is started, and left or ended again.

    Args:
        task: a name ("image-classification", "language-model"), "module:Class", or a subclass of `raypod.Task`, also
            one that a script, a notebook or a function defines. Default: that of the config.
        config: the path of a YAML file, a dict of sections as in `{"training": {"epochs": 2}}`, or a `raypod.Config`.
        cluster: the cluster file of `ray up`; default: this host.
        callbacks: called with each event, in their order, in this thread: functions, or objects with a method
            `on_event(event)` or with methods for types of events, as in `on_evaluation_done(event)`. One that returns
            `raypod.STOP` ends the run after the current call of the device, with a checkpoint. If one raises, the run
            ends the same way, and the exception is raised.
        progress: show the plan, a progress bar, and lines about epochs, failures and the result.
        take_over: end another run that uses the run folder, and continue it.
        **flags: the flags of the command line with underscores, as in `batch_size=8`; they replace those of `config`.
            None is the default.

    Raises:
        UserError: the request is wrong; nothing was started, and nothing is left behind. `ConfigError` names the
            nearest known name of a flag.
        RunError: the run failed.
        Interrupted: a signal such as Ctrl-C ended the run; a checkpoint is saved. It is a KeyboardInterrupt, and its
            `result` is the result. Only in the main thread. A second Ctrl-C ends the run at once, without a checkpoint.
    """
    stream_of_run = Stream(plan_of(task, config, cluster, flags), callbacks, progress, take_over)
    with stream_of_run as events:
        for _ in events:
            pass
    return events.result()


def stream(
    task: TaskLike = None,
    config: ConfigLike = None,
    *,
    cluster: Optional[PathLike] = None,
    callbacks: CallbacksLike = (),
    progress: bool = False,
    take_over: bool = False,
    **flags: Any,
) -> Stream:
    """Return the events of a run as an iterator. The arguments and errors are those of `fit`.

    The request is checked at once; the run starts with the first `next`, and advances only as the caller takes events.
    """
    return Stream(plan_of(task, config, cluster, flags), callbacks, progress, take_over)


class Stream(Iterator[Event]):
    """The events of a run (`raypod.events`), from `RunStarted` to `RunEnded`.

    As a context manager it calls `close` at its end. A loop that ends early should use that: without a context the run
    ends when the object is deleted.
    """

    def __init__(self, plan: Plan, callbacks: CallbacksLike, progress: bool, take_over: bool = False) -> None:
        self._plan, self._take_over = plan, take_over
        self._stop, self._shows_progress = Stop(), progress
        self._callbacks = Callbacks(callbacks, self.stop)
        self._events = self._run()
        self._error: Optional[BaseException] = None
        self._result: Optional[Result] = None
        self._has_ended = False

    @property
    def total_updates(self) -> int:
        """The updates of the whole run."""
        return self._plan.total_updates

    def __next__(self) -> Event:
        try:
            return next(self._events)
        except StopIteration:
            self._end()
            raise
        except BaseException as error:
            self._error = self._error or error
            raise

    def stop(self, cause: str = "the caller requested it") -> None:
        """Request the end of the run after the current call of the device, with a checkpoint; take the last events."""
        self._stop.request(cause)

    def close(self) -> None:
        """End the run, if it has started and has not ended: after the current call, with a checkpoint."""
        if inspect.getgeneratorstate(self._events) == inspect.GEN_RUNNING:  # a callback calls this
            self.stop("the stream of events was closed")
        else:
            self._events.close()

    def result(self) -> Result:
        """Take all remaining events, and return the result.

        Raises:
            RunError: the stream was closed before the run had started; or the error that ended the run.
        """
        if self._error is not None:
            raise self._error
        for _ in self:
            pass
        if self._result is None:
            raise RunError("the stream was closed before the run started: there is no result")
        return self._result

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> Generator[Event, None, None]:
        reporter = Reporter()
        with process_kept(), claimed(self._plan, reporter.print_line, self._take_over) as run:
            if self._shows_progress:
                reporter = Progress(run.plan)
            training = Training(run, reporter, self._stop, callbacks=self._callbacks)
            try:
                yield from training.events()
            except GeneratorExit:  # the run has ended, and its files are written
                self._result = Result(run.plan.run_dir, run.plan.best_metric, self._stop.cause)
                raise
            self._result = Result(run.plan.run_dir, run.plan.best_metric, self._stop.cause)

    def _end(self) -> None:
        """Raise Interrupted once if a signal has requested the end."""
        if not self._has_ended:
            self._has_ended = True
            if self._stop.is_signalled and self._result is not None:
                raise Interrupted(self._result)


PathLike = Union[str, "os.PathLike[str]"]
TaskLike = Union[str, "Type[Task]", None]
ConfigLike = Union[PathLike, Config, Mapping[str, Mapping[str, Any]], None]


def plan_of(
    task: TaskLike, config: ConfigLike, cluster: Optional[PathLike], flags: Mapping[str, Any], is_dry: bool = False
) -> Plan:
    """Return the plan of a run; the arguments are those of `fit`. `is_dry` as in `planning.plan_from`.

    Raises:
        UserError: an argument, the cluster file or the data set is wrong.
    """
    with process_kept():
        given: Dict[str, Any] = {} if task is None else {"task.name": _name_of(task)}
        given.update({} if cluster is None else {"pod.cluster": os.fspath(cluster)})
        base = _base_of(config)
        resume = flags.get("resume")
        remote_run.take_resumed(None if resume is None else os.fspath(resume))
        values, _ = resolve.combine({} if resume is None else {"run.resume": os.fspath(resume)}, base)
        name = given.get("task.name") or resolve.task_of_values(values)
        schema = registry.schema_of(str(name))
        for key, value in _by_section(flags, schema).items():
            if key in given:
                raise ConfigError(f"{key.rpartition('.')[2]} is given twice, as an argument and as a flag")
            given[key] = value
        values, source = resolve.combine(given, base, schema)
        return planning.plan_from(values, source, is_dry, planning.check_compilation)


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Remove the entries from `sys.path` that raypod adds within the context; the caller's own changes stay.

    The same holds for the environment variables that Ray sets when it is imported and a session starts.
    """
    before, variables = list(sys.path), set(os.environ)
    try:
        yield
    finally:
        for name in _SET_BY_RAY - variables:
            os.environ.pop(name, None)
        added = {activation.FOLDER, str(Path.cwd())} - set(before)
        sys.path[:] = [entry for entry in sys.path if entry not in added]


def _name_of(task: Union[str, Type[Task]]) -> str:
    if isinstance(task, str):
        return task
    from raypod.training.tasks.task import Task  # only for a task that is a class

    if not isinstance(task, type) or not issubclass(task, Task):
        shown = task.__name__ if isinstance(task, type) else type(task).__name__
        hint = (
            "pass the class" if isinstance(task, Task) else 'pass a name, "module:Class" or a subclass of raypod.Task'
        )
        raise ConfigError(f"task = {shown}: {hint}")
    return registry.register(task)


def _base_of(config: ConfigLike) -> Union[str, resolve.Values, None]:
    """Return the path of a config file, or its sections."""
    if isinstance(config, Config):
        return {name: dict(section) for name, section in config.model_dump(exclude_unset=True).items()}
    if isinstance(config, Mapping):
        wrong = [name for name, section in config.items() if not isinstance(section, Mapping)]
        if wrong:
            sections = ", ".join(Config.model_fields)
            known = wrong[0] in Config.model_fields
            hint = "a section is a dict of its keys" if known else f"the keys of a config are sections: {sections}"
            raise ConfigError(f"config[{wrong[0]!r}] is no section; {hint}")
        return {str(name): {key: _plain(value) for key, value in each.items()} for name, each in config.items()}
    if config is None:
        return None
    try:
        return os.fspath(config)
    except TypeError:
        raise ConfigError(f"config = {config!r}: pass a path, a dict of sections or a raypod.Config") from None


def _by_section(flags: Mapping[str, Any], schema: resolve.Schema) -> Dict[str, Any]:
    """Return keyword flags by section.key. ConfigError for an unknown flag, with the nearest known one."""
    names = {key: f"{section}.{key}" for section, key, _ in fields(schema.options) if f"{section}.{key}" != "task.name"}
    names.update({flag[2:].replace("-", "_"): names[key] for key, flags_ in ALIASES.items() for flag in flags_})
    given: Dict[str, Any] = {}
    for flag, value in flags.items():
        if flag not in names:
            found = nearest(flag, sorted([*names, *_ARGUMENTS]))
            hint = f"did you mean {found[0]}?" if found else "raypod train --help-all lists all, here with underscores"
            raise ConfigError(f"unknown flag {flag}; {hint}")
        if value is None:
            continue  # the default, as for a flag that is not given
        if names[flag] in given:
            raise ConfigError(f"{flag} and another name of {names[flag]} are both given")
        given[names[flag]] = _plain(value)
    return given


_SET_BY_RAY = {"RAY_CLIENT_MODE", "RAY_USAGE_STATS_ENABLED", "PYTHONBREAKPOINT"}
_ARGUMENTS = ("task", "config", "cluster", "callbacks")


def _plain(value: Any) -> Any:
    """Return a value as a YAML file holds it: a path as text, a number of NumPy or a 0-d tensor as a Python number."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) in ((), []) else value


Handler = Callable[[Any], Any]


class _Stop:
    """The type of `STOP`."""

    def __repr__(self) -> str:
        return "raypod.STOP"


STOP = _Stop()  # a callback returns it to end the run after the current call, with a checkpoint


def _method_of(event_type: type) -> str:
    """Return the method that gets the events of a type: `on_update_done` for `UpdateDone`."""
    return "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", event_type.__name__).lower()


_METHODS: Dict[str, Tuple[type, ...]] = {_method_of(kind): (kind,) for kind in get_args(Event)}
_METHODS["on_event"] = get_args(Event)


class Callbacks(Callback):
    """Passes events to the callbacks of the user, in their order."""

    def __init__(self, callbacks: Union[Handler, Iterable[Any]], stop: Callable[[str], None]) -> None:
        """`callbacks`: one callback or several, see `raypod.fit`; `stop` ends the run.

        Raises:
            ConfigError: an object is no callback, or has a method `on_...` that is not the one of an event.
        """
        each = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        self._stop = stop
        self._handlers: List[Tuple[Tuple[type, ...], Handler, str]] = []
        for callback in each:
            self._handlers += _handlers_of(callback)

    def on_event(self, event: Event) -> None:
        """Pass an event to the callbacks."""
        for kinds, handler, name in self._handlers:
            if isinstance(event, kinds) and handler(event) is STOP:
                self._stop(f"the callback {name} requested it")


def _handlers_of(callback: Any) -> Iterable[Tuple[Tuple[type, ...], Handler, str]]:
    methods = [name for name in dir(callback) if name.startswith("on_") and callable(getattr(callback, name))]
    name = getattr(callback, "__name__", type(callback).__name__)
    if isinstance(callback, type):
        raise ConfigError(f"the callback {name} is a class: pass an object, {name}()")
    for method in methods:
        if method not in _METHODS:
            raise ConfigError(f"the callback {name} has the method {method}, of no event{suggestion(method, _METHODS)}")
        yield _METHODS[method], getattr(callback, method), name
    if not methods:
        if not callable(callback):
            known = ", ".join(sorted(_METHODS))
            raise ConfigError(f"the callback {name} is neither callable nor has one of the methods {known}")
        yield get_args(Event), callback, name
