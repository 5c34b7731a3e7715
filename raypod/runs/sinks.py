"""Write the events of a run to its metrics, evaluations, ledger and TensorBoard files."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type, Union

from raypod.errors import ConfigError, RunError
from raypod.events import CheckpointBegun, EvaluationDone, Event, Repaired, Resized, RunEnded, RunStarted, UpdateDone
from raypod.plan import user_code
from raypod.plan.compatibility import with_effect
from raypod.plan.config import Config
from raypod.plan.layout import EVALUATIONS, METRICS, TENSORBOARD, TEST
from raypod.plan.plan import Plan
from raypod.runs.callback import Callback, LinesSink, Sink
from raypod.runs.ledger import Ledger
from raypod.runs.media import Media, MediaFolder
from raypod.runs.metrics import keep_until, line_of, traces_of, update_of
from raypod.system import files
from raypod.system.files import AppendOnlyFile, replace_file, strict_json

Warn = Callable[[str], None]
_FLUSH_S = 10  # seconds between flushes of the TensorBoard file


def check_packages(config: Config) -> None:
    """Raise ConfigError if a requested sink needs a package that is not installed."""
    flags = {name: f"--tracker {name}" for name in config.run.trackers or ()}
    if config.run.tensorboard:
        flags["tensorboard"] = "--tensorboard"
    for name, flag in flags.items():
        if ":" in name:
            user_code.check(name, "run.trackers", [])
        elif not _is_installed(name):
            raise ConfigError(f"{flag} needs the package {name}, which is not installed: pip install 'raypod[{name}]'")


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported. A bare directory of that name (W&B creates ./wandb) is a
    namespace package and does not count.
    """
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _open_sinks(plan: Plan, first_update: int, warn: Warn) -> Iterator[Sink]:
    """Open the sinks of a run that starts or resumes after `first_update` updates, one after the other."""
    folder = Path(plan.run_dir)
    yield JsonLines(folder / METRICS, UpdateDone, first_update, warn)
    yield JsonLines(folder / EVALUATIONS, EvaluationDone, first_update, warn)
    if plan.task.predictions:
        yield LatestDetails(folder, first_update, warn)
    yield Ledger(plan, warn)
    yield MediaFolder(folder, first_update, warn)
    if plan.config.run.writes_tensorboard:
        sections = plan.config.model_dump(mode="json").items()
        values = {f"{section}.{key}": value for section, entries in sections for key, value in entries.items()}
        hparams = {name: value for name, value in with_effect(values).items() if value is not None}
        metrics = [f"training/{metric.name}" for metric in plan.task.metrics]
        metrics += [f"test/{metric.name}" for metric in plan.task.evaluated_metrics]
        yield TensorBoardWriter(folder, first_update, hparams, metrics)


class Sinks(Callback):
    """All sinks of a run. `RunStarted` opens them (RunError if that fails): a run that fails to start writes none."""

    def __init__(self, plan: Plan, warn: Warn = lambda text: None) -> None:
        """`warn` gets one line when the disk begins to fail."""
        self._plan, self._warn = plan, warn
        self._sinks: List[Sink] = []
        self._resized: Tuple[Event, ...] = ()  # before the run started
        self._media_before: List[Media] = []  # as above

    def on_event(self, event: Event) -> None:
        """Write an event to the files that record it."""
        if isinstance(event, RunStarted):
            try:
                for sink in _open_sinks(self._plan, event.first_update, self._warn):
                    self._sinks.append(sink)
                    for each in (*self._resized, event):
                        sink.on_event(each)
            except OSError as error:
                raise RunError(f"cannot write {error.filename or self._plan.run_dir}: {error.strerror}") from None
            while self._media_before:
                self.add_media(self._media_before.pop(0))
            return
        if isinstance(event, Resized) and not self._sinks:
            self._resized = (event,)
        for sink in self._sinks:
            if isinstance(event, Repaired) and self._plan.config.pod.is_elastic:
                sink.drop_after(event.update)
            sink.on_event(event)
            if isinstance(event, CheckpointBegun):  # a run that resumes from it finds every line before it
                sink.sync()

    def add_media(self, media: Media) -> None:
        """Write a picture or a text; before the run has started, with its first files."""
        if not self._sinks:
            self._media_before.append(media)
        for sink in self._sinks:
            if isinstance(sink, (MediaFolder, TensorBoardWriter)):
                sink.add(media)

    def copy_to(self, folder: Path) -> None:
        for sink in self._sinks:
            sink.copy_to(folder)

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], trace: object) -> None:
        """Close the files. RunError if lines could not be written (the disk is full) and there is no other error."""
        failed = []
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as failure:
                failed.append(failure.strerror or str(failure))
        self._sinks = []
        if failed and kind is None:
            raise RunError(
                "cannot write all lines of the metrics, evaluations, ledger or TensorBoard files in "
                f"{self._plan.run_dir}: {failed[0]}"
            )


class JsonLines(LinesSink):
    """A file with one line per event of a type (`metrics.jsonl`, `evaluations.jsonl`), written immediately."""

    def __init__(
        self,
        path: Path,
        event_type: Type[Union[UpdateDone, EvaluationDone]],
        first_update: int,
        warn: Warn = lambda text: None,
    ) -> None:
        """Keep the lines up to `first_update`, from which a resumed run continues; remove later ones."""
        if first_update and path.is_file():
            keep_until(path, first_update)
        else:
            replace_file(path, b"")
        self._event_type, self._warn = event_type, warn
        self._file = AppendOnlyFile(path, warn)
        self._file.end_line()

    def on_event(self, event: Event) -> None:
        if isinstance(event, self._event_type):
            self._file.write_line(strict_json(line_of(event)))

    def drop_after(self, update: int) -> None:
        """See `Sink.drop_after`. If the disk is full, the lines stay."""
        with contextlib.suppress(OSError):
            if not self._file.has_unwritten:
                keep_until(self._file.path, update)
                before, self._file = self._file, AppendOnlyFile(self._file.path, self._warn)
                before.close()


class LatestDetails(Sink):
    """`test.json`: what the newest evaluation says of the predictions, beyond its metrics."""

    def __init__(self, folder: Path, first_update: int, warn: Warn) -> None:
        self._path, self._warn, self._is_warned = folder / TEST, warn, False
        self.drop_after(first_update or -1)

    def on_event(self, event: Event) -> None:
        """Replace the file by the details of an evaluation. If the disk is full, the former ones stay."""
        if isinstance(event, EvaluationDone) and event.details is not None:
            content = {"update": event.update, "samples": event.samples, **event.details}
            try:
                replace_file(self._path, strict_json(content).encode())
            except OSError as error:
                if not self._is_warned:
                    self._warn(f"cannot write {self._path}: {error.strerror}")
                self._is_warned = True

    def drop_after(self, update: int) -> None:
        if self._path.is_file() and update_of(self._path.read_bytes()) > update:
            self._path.unlink(missing_ok=True)

    def copy_to(self, folder: Path) -> None:
        if self._path.is_file():
            replace_file(folder / TEST, self._path.read_bytes())


class _Entry(NamedTuple):
    """What a method of the `SummaryWriter` gets."""

    method: str
    tag: str
    value: Any
    step: int
    options: Mapping[str, str] = {}


class TensorBoardWriter(Sink):
    """Writes scalars, media and hyperparameters of a run with `torch.utils.tensorboard.SummaryWriter`.

    A full disk does not stop the run: points that are not yet on the disk stay in memory, and `sync` and `close`
    write them again, into a new event file.
    """

    def __init__(
        self,
        run_dir: Path,
        first_update: int,
        hparams: Mapping[str, Any] = MappingProxyType({}),
        metrics: Sequence[str] = (),
    ) -> None:
        """Hide the points after `first_update`, from which a resumed run continues, in earlier event files.

        Args:
            run_dir: the run folder.
            first_update: the number of updates from which the run continues.
            hparams: the settings that TensorBoard shows as hyperparameters.
            metrics: the tags of the scalars that it shows with them.
        """
        # Imported here: it needs an optional package, and it imports torch, which reads OMP_NUM_THREADS.
        self._module: Any = importlib.import_module("torch.utils.tensorboard")
        self._folder = str(run_dir / TENSORBOARD)
        self._purge_step = first_update + 1  # the first step that is not on the disk
        self._points: List[_Entry] = []  # not on the disk yet
        self._writer: Any = None
        self._hparams = _summaries_of(hparams, metrics) if hparams else ()
        self._is_done = False
        self.sync()

    def on_event(self, event: Event) -> None:
        values: Dict[str, float] = {}
        if isinstance(event, UpdateDone):
            values = {**(event.metrics if event.has_results else {}), "samples_per_s": event.samples_per_s}
            values.update({**event.part_rates, **traces_of(event)})
            self._keep([_Entry("add_scalar", f"training/{name}", each, event.update) for name, each in values.items()])
        elif isinstance(event, EvaluationDone):
            values = event.metrics
            self._keep([_Entry("add_scalar", f"test/{name}", each, event.update) for name, each in values.items()])
        elif isinstance(event, RunEnded):
            self._is_done = not event.interrupted

    def add(self, media: Media) -> None:
        """Add a picture or a text."""
        if media.kind == "text":
            self._keep([_Entry("add_text", media.name, media.content.decode(), media.update)])
            return
        import numpy as np  # planning imports this module, and works without Pillow
        from PIL import Image

        pixels = np.asarray(Image.open(io.BytesIO(media.content)))
        formats = {"dataformats": "HW" if pixels.ndim == 2 else "HWC"}
        self._keep([_Entry("add_image", media.name, pixels, media.update, formats)])

    def _keep(self, points: List[_Entry]) -> None:
        self._points += points
        if self._writer is not None:
            try:
                self._add(points)
            except OSError:
                self._writer = None

    def drop_after(self, update: int) -> None:
        """Hide the points after `update`, as a resumed run does."""
        if self._purge_step > update + 1 or any(point.step > update for point in self._points):
            with contextlib.suppress(OSError):
                if self._writer is not None:
                    self._writer.close()
            self._writer, self._purge_step = None, min(self._purge_step, update + 1)
            self._points = [point for point in self._points if point.step <= update]

    def sync(self) -> None:
        with contextlib.suppress(OSError):
            self._flush()

    def close(self) -> None:
        self._flush()
        for summary in self._hparams[2:] if self._is_done else ():  # the end of the session
            self._writer.file_writer.add_summary(summary)
        self._writer.close()

    def _flush(self) -> None:
        try:
            files.check_held(Path(self._folder))
            if self._writer is None:
                self._writer = self._module.SummaryWriter(
                    self._folder, purge_step=self._purge_step, flush_secs=_FLUSH_S
                )
                for summary in self._hparams[:2]:
                    self._writer.file_writer.add_summary(summary)
                self._add(self._points)
            self._writer.flush()
        except OSError:
            self._writer = None  # its thread has ended
            raise
        if self._points:
            self._purge_step = self._points[-1].step + 1
            self._points.clear()

    def _add(self, points: List[_Entry]) -> None:
        for method, tag, value, step, options in points:
            getattr(self._writer, method)(tag, value, step, **options)


def _summaries_of(hparams: Mapping[str, Any], metrics: Sequence[str]) -> Tuple[Any, ...]:
    """Return the summaries of an experiment, of the begin and of the end of its session."""
    summary: Any = importlib.import_module("torch.utils.tensorboard.summary")
    plain = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in hparams.items()}
    found: Tuple[Any, ...] = summary.hparams(plain, dict.fromkeys(metrics, 0.0))
    return found
