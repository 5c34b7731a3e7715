"""`raypod.fit` and `raypod.stream`: a training run as a function call, and as an iterator of events."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Callable, Generator, Iterator, Optional, Sequence, Type, Union

from raypod.api.callbacks import Callbacks
from raypod.api.media import logging_to
from raypod.api.request import ConfigLike, PathLike, TaskLike, plan_of, process_kept
from raypod.api.result import Interrupted, Result
from raypod.api.training import LogReporter, Reporter, Training, claimed
from raypod.errors import RunError
from raypod.events import Event
from raypod.plan.plan import Plan
from raypod.runs.media import Kind
from raypod.runs.progress import Progress
from raypod.runtime.coordinator.stop import Stop

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
        self._callbacks = Callbacks(callbacks)
        self._shows_progress = progress
        self._stop = Stop()
        self._events = self._run()
        self._error: Optional[BaseException] = None
        self._result: Optional[Result] = None
        self._training: Optional[Training] = None
        self._has_ended = False

    @property
    def total_updates(self) -> int:
        """The updates of the whole run."""
        return self._plan.total_updates

    def __next__(self) -> Event:
        try:
            event = next(self._events)
        except StopIteration:
            self._end()
            raise
        except BaseException as error:
            self._error = self._error or error
            raise
        try:
            with logging_to(self._log_media):
                stopped_by = self._callbacks.handle(event)
        except BaseException:
            self.close()
            raise
        if stopped_by:
            self.stop(f"the callback {stopped_by} requested it")
        return event

    def stop(self, cause: str = "the caller requested it") -> None:
        """Request the end of the run after the current call of the device, with a checkpoint; take the last events."""
        self._stop.request(cause)

    def close(self) -> None:
        """End the run, if it has started and has not ended: after the current call, with a checkpoint."""
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

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def _run(self) -> Generator[Event, None, None]:
        reporter: Reporter = LogReporter()
        with process_kept(), claimed(self._plan, reporter.print_line, self._take_over) as run:
            if self._shows_progress:
                reporter = Progress(run.plan)
            training = self._training = Training(run, reporter, self._stop)
            try:
                yield from training.events()
            except GeneratorExit:  # the run has ended, and its files are written
                self._result = Result(run.plan.run_dir, run.plan.best_metric, self._stop.cause)
                raise
            self._result = Result(run.plan.run_dir, run.plan.best_metric, self._stop.cause)

    def _log_media(self, kind: Kind, name: str, content: bytes) -> None:
        assert self._training is not None, "it has the event of the callback"
        self._training.log_media(kind, name, content)

    def _end(self) -> None:
        """Raise Interrupted once if a signal has requested the end."""
        if not self._has_ended:
            self._has_ended = True
            if self._stop.is_signalled and self._result is not None:
                raise Interrupted(self._result)
