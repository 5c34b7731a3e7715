"""The result of a run, read from its folder."""

from __future__ import annotations

import html
import importlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Optional, Sequence, Union

from raypod.errors import ConfigError
from raypod.events import EvaluationDone, UpdateDone
from raypod.plan import layout
from raypod.plan.layout import EVALUATIONS, METRICS, SUMMARY
from raypod.plan.metric import Metric
from raypod.runs.metrics import flat
from raypod.runs.run_folder import measured, way_to_continue
from raypod.system.command_line import counted
from raypod.system.files import parse_json
from raypod.training.checkpoint import storage, weights_file

if TYPE_CHECKING:
    from torch import nn

PathLike = Union[str, "os.PathLike[str]"]


class Result:
    """What a run has produced.

    Attributes:
        run_dir: the run folder, absolute.
        summary: the content of `summary.json`: the last loss and metrics, those of the test split (`test_...`),
            `weights_sha256` and more.
        interrupted: whether the run ended before its last update; `fit` with `resume=result.run_dir` continues it.
        stop_cause: what requested that end; empty for a signal, and for a run that is complete.
    """

    def __init__(self, run_dir: PathLike, best_by: Metric, stop_cause: str = "") -> None:
        """Read the result of the run in a folder; `best_by` is the metric that determines the best checkpoint."""
        self.run_dir = Path(run_dir)
        self.summary: Dict[str, Any] = parse_json((self.run_dir / SUMMARY).read_text())
        self.interrupted = bool(self.summary["interrupted"])
        self.stop_cause = stop_cause
        self._best_by = best_by

    def __repr__(self) -> str:
        state = f"interrupted after {counted(self.summary['updates'], 'update')}" if self.interrupted else "done"
        tested = {name: value for name, value in self.summary.items() if name.startswith("test_") and value is not None}
        shown = "".join(f", {name}={value:.4g}" for name, value in tested.items())
        return f"<raypod.Result of {self.run_dir}: {state}{shown}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the state, the results and the curves."""
        from raypod.api.result_html import result_html

        return result_html(self.run_dir)

    def report(self) -> ReportPage:
        """Write `report.html` into the run folder, and return it; a notebook shows it below the cell.

        Raises:
            ConfigError: a file of the run cannot be read.
            OSError: the report cannot be written.
        """
        from raypod.observe.report import command

        command.write_report(self.run_dir)
        return ReportPage(self.run_dir / layout.REPORT)

    @property
    def metrics(self) -> Any:
        """One row per update (`update, epoch, loss, ..., samples_per_s, time_s`).

        A `pandas.DataFrame` where pandas is installed, else a list of dicts. An unknown value is NaN.
        """
        return _table(measured(UpdateDone, self.run_dir / METRICS))

    @property
    def evaluations(self) -> Any:
        """One row per evaluation of the test split, in the form of `metrics`."""
        return _table(measured(EvaluationDone, self.run_dir / EVALUATIONS))

    @property
    def best_checkpoint(self) -> Optional[Path]:
        """The folder of the checkpoint with the best test metric; the newest one if none was evaluated.

        None if the run has no checkpoint. CheckpointDamaged if a manifest cannot be read.
        """
        best = weights_file.best_checkpoint(self.run_dir, self._best_by)
        return None if best is None else best.path

    def load_weights_into(self, module: nn.Module, checkpoint: Optional[PathLike] = None) -> None:
        """Load weights into a network that has the names and shapes of the trained one.

        A checkpoint of a run with `ema` has averaged weights, which its evaluations used: these are loaded.

        Args:
            module: the network, on any device and with any floating-point type.
            checkpoint: the folder of a checkpoint; default: the best one.

        Raises:
            ConfigError: there is no checkpoint, or names or shapes differ; the message lists all differences.
            CheckpointDamaged: a file of the checkpoint is not the one that was written.
        """
        from raypod.training.checkpoint import tensors  # imports torch, which the rest of a result does not need

        path = Path(checkpoint) if checkpoint is not None else self.best_checkpoint
        if path is None or not storage.is_checkpoint(path):
            raise ConfigError(f"{path or self.run_dir}: there is no checkpoint")
        found = storage.read_manifest(path)
        storage.verify(found)
        saved, _ = tensors.read_tensors(weights_file.weights_of(found))
        wrong = [
            f"{name} is {ours} in the module and {theirs} in the checkpoint"
            for name, (ours, theirs) in tensors.different_shapes(module.state_dict(), saved).items()
        ]
        if wrong:
            raise ConfigError(f"the weights of {path} do not fit the module: {'; '.join(wrong)}")
        module.load_state_dict(saved)


class ReportPage:
    """The report of a run: `path` is its file. A notebook shows the page itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<raypod report {self.path}>"

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" width="100%" height="700" style="border:0"></iframe>'


class Interrupted(KeyboardInterrupt):
    """Raised if a signal, as of Ctrl-C, has ended a run after a checkpoint. `result` is the run's result."""

    def __init__(self, result: Result) -> None:
        self.result = result
        updates, checkpoint = (result.summary[name] for name in ("updates", "checkpoint"))
        hint = way_to_continue(str(result.run_dir), updates, checkpoint, "resume=")
        super().__init__(f"interrupted after update {updates}; {hint}")


def _table(events: Sequence[Union[UpdateDone, EvaluationDone]]) -> Any:
    """Return a row per event: a DataFrame where pandas is installed, else a list of dicts."""
    rows = [flat(each) for each in events]
    if importlib.util.find_spec("pandas") is None:
        return rows
    return importlib.import_module("pandas").DataFrame(rows)
