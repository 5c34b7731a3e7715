"""Words, tables and colours of the monitor: numbers, times, foreign text, sparklines, columns that fit a width."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import List, Optional, Sequence, Tuple

from rich.cells import cell_len
from rich.text import Text

from raypod.observe.monitor.model import Run
from raypod.system.command_line import printable

_BLOCKS, _ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " _.-:=+*#"
_OUTLIERS, _MANY = 0.02, 25  # share of the groups at each end, from so many groups on
UNKNOWN = "-"


def clean(text: str) -> str:
    """Return foreign text without control characters and escape sequences, in one line with single spaces."""
    return " ".join(clean_line(text).split())


def clean_line(line: str) -> str:
    """Return a line of a log without control characters and escape sequences, with its indentation."""
    line = line.rstrip("\r\n")  # ssh ends its messages with both
    shown = printable(line.rpartition("\r")[2] or line)
    return " ".join(shown.expandtabs().splitlines()).rstrip()  # U+2028 and others are line ends, too


def duration(seconds: Optional[float]) -> str:
    """Return a duration: `85 ms`, `4.2 s`, `3:07`, `2:03:07`, `3 d 4 h`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def age(seconds: Optional[float]) -> str:
    """Return how long ago something was, without fractions: `now`, `12 s`, `3:07`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 1.5:
        return "now"
    return f"{seconds:.0f} s" if seconds < 59.5 else duration(seconds)


def amount(value: Optional[float], digits: int = 4) -> str:
    """Return a number with at most `digits` significant digits."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}" if abs(value) < 1e7 else f"{value:.{digits}g}"
    return f"{value:.{digits}g}"


def percent(share: Optional[float]) -> str:
    """Return a share of 0..1 in percent."""
    return UNKNOWN if share is None or not math.isfinite(share) else f"{100 * share:.0f} %"


def size(count: Optional[float]) -> str:
    """Return bytes with a decimal prefix, as in `1.3 GB`."""
    if count is None:
        return UNKNOWN
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 9.95 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def clock(unix_s: Optional[float]) -> str:
    """Return the local time of day."""
    if unix_s is None or not math.isfinite(unix_s):
        return "--:--:--"
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def sparkline(values: Sequence[Optional[float]], width: int, ascii_only: bool = False) -> str:
    """Return values as a line of blocks of increasing height, at most `width` characters, oldest first.

    More values than characters are averaged in groups. A group without a finite value is a space. Of many groups, the
    highest and the lowest 2 % do not stretch the range.
    """
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    groups = _averages(values, width)
    known = [each for each in groups if each is not None]
    if not known:
        return ""
    ordered = sorted(known)
    outliers = math.ceil(_OUTLIERS * len(known)) if len(known) >= _MANY else 0
    low, high = ordered[outliers], ordered[-1 - outliers]
    scale = (len(blocks) - 2) / (high - low) if high > low else 0.0
    return "".join(
        " " if each is None else blocks[1 + round((min(max(each, low), high) - low) * scale)] for each in groups
    )


def bar(share: Optional[float], width: int, ascii_only: bool = False) -> str:
    """Return a bar of `width` characters for a share of 0..1."""
    full, empty = "#-" if ascii_only else "━─"
    done = round(min(1.0, max(0.0, share or 0.0)) * width)
    return full * done + empty * (width - done)


def _averages(values: Sequence[Optional[float]], width: int) -> List[Optional[float]]:
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)] if count > 0 else []
    found: List[Optional[float]] = []
    for first, last in zip(edges, edges[1:]):
        group = [each for each in values[first:last] if each is not None and math.isfinite(each)]
        found.append(math.fsum(group) / len(group) if group else None)
    return found


GAP = 2
_LEAST_FLEXIBLE = 12
Cell = Tuple[str, str]  # text, style


@dataclasses.dataclass(frozen=True)
class Column:
    """A column. Those of the highest `rank` are left out first; rank 0 stays."""

    title: str
    cells: Sequence[Cell]
    rank: int = 0
    right: bool = False
    flexible: bool = False  # gets what is left of the width, and is cut to it
    most: int = 40  # characters

    @property
    def natural_width(self) -> int:
        """The width without cutting, at most `most`."""
        widest = max([cell_len(self.title), *(cell_len(text) for text, _ in self.cells)])
        return min(widest, self.most)


def table(columns: Sequence[Column], width: int, ascii_only: bool = False) -> List[Text]:
    """Return the header and the rows, each at most `width` wide."""
    shown = [each for each in columns if each.title or any(text for text, _ in each.cells)]
    while _least_width(shown) > width and any(each.rank for each in shown):
        worst = max(shown, key=lambda each: each.rank)
        shown = [each for each in shown if each is not worst]
    fixed = sum(each.natural_width for each in shown if not each.flexible) + GAP * (len(shown) - 1)
    rest = max(0, width - fixed)
    widths = [rest if each.flexible else each.natural_width for each in shown]
    header = _row([(each.title, "dim") for each in shown], shown, widths, ascii_only)
    body = [_row(list(cells), shown, widths, ascii_only) for cells in zip(*(each.cells for each in shown))]
    return [fitted(line, width, ascii_only) for line in (header, *body)]


def fitted(line: Text, width: int, ascii_only: bool = False) -> Text:
    """Return a line cut to a width."""
    line.truncate(max(0, width), overflow="crop" if ascii_only else "ellipsis")
    return line


def _least_width(columns: Sequence[Column]) -> int:
    widths = [min(_LEAST_FLEXIBLE, each.natural_width) if each.flexible else each.natural_width for each in columns]
    return sum(widths) + GAP * (len(columns) - 1)


def _row(cells: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], ascii_only: bool) -> Text:
    line = Text(no_wrap=True)
    for index, ((text, style), column, width) in enumerate(zip(cells, columns, widths)):
        cell = fitted(Text(text, style=style), width, ascii_only)
        padding = " " * max(0, width - cell_len(cell.plain))
        line.append(" " * GAP if index else "")
        line.append(padding if column.right else "")
        line.append_text(cell)
        line.append("" if column.right else padding)
    return line


GOOD, WARN, BAD, NOTE, DIM, TITLE = "green", "yellow", "bold red", "cyan", "dim", "bold"
_STATES = {
    "training": GOOD,
    "running": GOOD,
    "evaluating": "magenta",
    "saving": NOTE,
    "starting": WARN,
    "repairing": WARN,
    "ending": WARN,
    "interrupted": WARN,
    "preempted": WARN,
    "lost": BAD,
    "failed": BAD,
    "died": BAD,
    "no answer": BAD,
    "busy": WARN,
    "idle": DIM,
}
_EVENTS = {
    "instance_lost": BAD,
    "process_failed": BAD,
    "checkpoint_failed": BAD,
    "instance_warned": WARN,
    "repaired": WARN,
    "resized": WARN,
    "checkpoint_saved": NOTE,
    "evaluation_done": "magenta",
    "epoch_done": DIM,
    "run_ended": GOOD,
}
_HEARTBEAT_LATE_S, _HEARTBEAT_SILENT_S = 10.0, 30.0


def of_state(state: str) -> str:
    """Return the style of the state of a run or an instance."""
    return _STATES.get(state, "")


def of_event(kind: str) -> str:
    """Return the style of an event."""
    return _EVENTS.get(kind, "")


def of_heartbeat(age_s: Optional[float]) -> str:
    """Return the style of the age of a heartbeat."""
    if age_s is None or age_s < _HEARTBEAT_LATE_S:
        return ""
    return WARN if age_s < _HEARTBEAT_SILENT_S else BAD


def of_load(share: Optional[float]) -> str:
    """Return the style of a share of a capacity."""
    return "" if share is None or share < 0.8 else WARN if share < 0.95 else BAD


def state_of(run: Run) -> str:
    """Return the state of a run in a word: its phase while it runs."""
    if run.problem:
        return "no answer"
    return (run.phase or run.state) if run.is_active else run.state


def share_done(run: Run) -> Optional[float]:
    """Return the share of the updates that are done; None for a launch."""
    return run.update / run.total_updates if run.total_updates else None


def rate(run: Run) -> str:
    """Return the throughput with its unit, in parts of samples if it has any; of a run that has ended, its mean."""
    rates = {name.replace("_per_s", "/s"): rate for name, rate in run.part_rates.items()}
    if not rates and run.samples_per_s is not None:
        rates = {f"{run.samples_are}/s": run.samples_per_s}
    mean = "" if run.is_active else "mean "
    return ", ".join(f"{mean}{amount(rate)} {unit}" for unit, rate in rates.items())


def last_save(run: Run, now_unix_s: float) -> str:
    """Return the update and the age of the last checkpoint."""
    if run.checkpoint_update is None:
        return "no checkpoint"
    ago = f", {age(now_unix_s - run.checkpoint_unix_s)} ago" if run.checkpoint_unix_s and run.is_active else ""
    return f"saved after {run.checkpoint_update}{ago.replace('now ago', 'now')}"


def last_evaluation(run: Run) -> str:
    """Return the metrics of the last evaluation."""
    if run.evaluation_update is None:
        return ""
    metrics = " ".join(f"{name} {amount(value)}" for name, value in run.evaluation.items())
    return f"evaluated after {run.evaluation_update}: {metrics}"


def waiting(run: Run) -> str:
    """Return the share of waiting for data."""
    return "" if run.data_wait_share is None else f"{percent(run.data_wait_share)} waiting for data"
