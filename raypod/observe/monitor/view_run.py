"""The run view, the log view and the events view as lines of text. Pure functions of the model and the size."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from rich.text import Text

from raypod.observe.monitor import style
from raypod.observe.monitor.columns import Column, fitted, table
from raypod.observe.monitor.model import EventLine, Instance, Run
from raypod.observe.monitor.words import UNKNOWN, age, amount, bar, clock, duration, percent, sparkline
from raypod.runs.recent_events import ROUTINE
from raypod.system.command_line import counted

_MAX_SERIES = 4
_LEAST_EVENTS = 3
_SPARK_LABEL, _MAX_SPARK = 12, 100


def run_lines(run: Run, now_s: float, instance: int, size: Tuple[int, int], ascii_only: bool) -> List[Text]:
    """Return at most size[1] lines of at most size[0] characters; `instance` is the position of the selected one."""
    width, height = size
    lines = head_lines(run, now_s, width, ascii_only)
    lines += _spark_lines(run, width, ascii_only)
    rows = _instance_lines(run, width, ascii_only)
    events = event_lines(_notable(run.events), width, ascii_only)
    room = height - len(lines) - 1  # an empty line before the instances
    for_events = min(len(events) + 2, _LEAST_EVENTS + 2) if events and room >= 10 else 0
    shown = _window(rows, instance, max(2, room - for_events))
    lines += [Text(), *shown]
    left = height - len(lines) - 2
    if events and left > 0:
        lines += [Text(), Text("events", style=style.DIM), *events[-left:]]
    return lines[:height]


def head_lines(run: Run, now_s: float, width: int, ascii_only: bool) -> List[Text]:
    """Return who the run is, its progress and its figures."""
    dot = " | " if ascii_only else " · "
    state = style.state_of(run)
    who = Text.assemble((run.name, style.TITLE), "  ", (state, style.of_state(state)))
    process = f"{run.user}@{run.host}" if run.user else run.host
    facts = [process, f"pid {run.pid}" if run.pid and run.is_active else "", run.program, run.device_line or ""]
    who.append("  " + dot.join(filter(None, facts)), style=style.DIM)
    lines = [who]
    if run.problem:
        lines.append(Text(f"{run.problem}; what follows is the last known state", style=style.BAD))
    elif run.message:
        lines.append(Text(run.message, style=style.of_state(run.state)))
    if run.kind == "training":
        lines.append(_progress(run, now_s, width, ascii_only))
        save_style = style.BAD if run.checkpoints_failed else ""
        parts = [
            (style.rate(run), style.TITLE),
            (style.waiting(run), style.of_load(2 * (run.data_wait_share or 0.0))),
            (f"{run.restarts} restart{'s' * (run.restarts != 1)}", style.WARN if run.restarts else ""),
            (style.last_save(run, now_s), save_style),
            (style.last_evaluation(run), ""),
        ]
        lines += _wrapped([each for each in parts if each[0]], dot, width)
    return [fitted(line, width, ascii_only) for line in lines]


def _wrapped(parts: Sequence[Tuple[str, str]], separator: str, width: int) -> List[Text]:
    """Return (text, style) parts in as few lines as hold them."""
    lines: List[Text] = []
    for text, how in parts:
        if lines and lines[-1].cell_len + len(separator) + len(text) <= width:
            lines[-1].append(separator).append(text, style=how)
        else:
            lines.append(Text().append(text, style=how))
    return lines


def _progress(run: Run, now_s: float, width: int, ascii_only: bool) -> Text:
    share = style.share_done(run)
    epochs = f"  epoch {run.epoch or 0}/{run.epochs:.4g}" if run.epochs else ""
    numbers = f"  update {run.update}/{run.total_updates or '?'}  {percent(share)}{epochs}"
    if run.is_active:
        elapsed = duration(now_s - run.started_unix_s) if run.started_unix_s else UNKNOWN
        numbers += f"  {elapsed} elapsed  ETA {duration(run.eta_s)}"
    length = max(4, min(60, width - len(numbers)))
    return Text.assemble((bar(share, length, ascii_only), style.GOOD), numbers)


def _spark_lines(run: Run, width: int, ascii_only: bool) -> List[Text]:
    """Return a line per metric and one for the throughput: name, newest value, sparkline and range."""
    names = [*run.metrics, *(["samples_per_s"] if "samples_per_s" in run.series else [])][:_MAX_SERIES]
    ranges = [_range_of(run.series.get(name, ()), width) for name in names]
    longest = max(map(len, ranges), default=0)
    length = min(_MAX_SPARK, max(0, width - _SPARK_LABEL - 11 - longest - 2))
    lines = []
    for name, limits in zip(names, ranges):
        label = f"{run.samples_are}/s" if name == "samples_per_s" else name
        values = run.series.get(name, ())
        is_live_rate = name == "samples_per_s" and run.is_active
        newest = run.samples_per_s if is_live_rate else run.metrics.get(name, values[-1] if values else None)
        spark = sparkline(run.series.get(name, ()), length, ascii_only)
        line = Text(f"{label:<{_SPARK_LABEL}.{_SPARK_LABEL}} {amount(newest):>8}  ")
        line.append(f"{spark:<{min(length, _spark_width(run, names))}}", style=style.NOTE)
        line.append(f"  {limits:>{longest}}", style=style.DIM)
        lines.append(fitted(line, width, ascii_only))
    return lines


def _spark_width(run: Run, names: Sequence[str]) -> int:
    """Return the number of values of the longest series."""
    return max((len(run.series.get(name, ())) for name in names), default=0)


def _range_of(values: Sequence[Optional[float]], width: int) -> str:
    """Return the range of a series."""
    known = [each for each in values if each is not None]
    if not known:
        return ""
    length = f" in {counted(len(values), 'update')}" if width >= 100 else ""
    return f"{amount(min(known))} to {amount(max(known))}{length}"


def _instance_lines(run: Run, width: int, ascii_only: bool) -> List[Text]:
    each = run.instances
    columns = [
        Column("#", [(str(one.instance), "") for one in each], right=True),
        Column("host", [(one.host, "") for one in each], most=20),
        Column("pid", [(str(one.pid or UNKNOWN), style.DIM) for one in each], rank=6, right=True),
        Column("state", [_state(run, one) for one in each]),
        Column("replicas", [(_range(one.first_replica, one.num_replicas), "") for one in each], rank=8),
    ]
    if run.kind == "training":
        unit = f"{run.samples_are}/s"
        if any(one.samples_per_s is not None for one in each):  # unknown for a run that is read from its files
            columns.append(Column(unit, [(amount(one.samples_per_s), "") for one in each], rank=1, right=True))
        columns += [
            Column("waits", [(percent(one.data_wait_share), _wait_style(one)) for one in each], rank=2, right=True),
            Column("median", [(duration(one.p50_s), "") for one in each], rank=9, right=True),
            Column("slowest", [(duration(one.slowest_s), "") for one in each], rank=3, right=True),
            Column("busy", [_ratio(one) for one in each], rank=1, right=True),
            Column("beat", [(age(one.heartbeat_age_s), _beat(run, one)) for one in each], rank=2, right=True),
            Column("activity", [(_activity(one), style.DIM) for one in each], rank=10, most=36),
        ]
    columns.append(Column("last log line", [(one.log_line or "", style.DIM) for one in each], flexible=True))
    return table(columns, width, ascii_only)


def _state(run: Run, instance: Instance) -> Tuple[str, str]:
    if run.problem and instance.state != "lost":
        return "no answer", style.BAD
    text = instance.state or (run.phase if run.is_active else run.state)
    return text, style.of_state(text)


def _ratio(instance: Instance) -> Tuple[str, str]:
    """Return the busy time over the median of all instances; a straggler is marked."""
    ratio = instance.busy_ratio
    mark = " slow" if style.is_straggler(ratio) else ""
    return (UNKNOWN if ratio is None else f"{ratio:.2f}x{mark}"), style.of_ratio(ratio)


def _wait_style(instance: Instance) -> str:
    return style.of_load(2 * (instance.data_wait_share or 0.0))


def _beat(run: Run, instance: Instance) -> str:
    return style.of_heartbeat(instance.heartbeat_age_s) if run.phase == "training" else ""


def _activity(instance: Instance) -> str:
    if not instance.activity:
        return ""
    waits = ", waits" if instance.waits_for_others else ""
    return f"{instance.activity} for {duration(instance.activity_s)}{waits}"


def _range(first: int, count: int) -> str:
    return UNKNOWN if not count else str(first) if count == 1 else f"{first}-{first + count - 1}"


def _window(rows: Sequence[Text], selected: int, room: int) -> List[Text]:
    """Return the header and as many rows as fit, the selected one among them and reversed."""
    body = list(rows[1:])
    if selected < len(body):
        body[selected].stylize("reverse", 0, len(body[selected].plain.rstrip()))
    if len(body) + 1 <= room:
        return [*rows[:1], *body]
    count = max(1, room - 2)
    first = min(max(0, selected - count // 2), len(body) - count)
    hidden = len(body) - count
    more = Text(f"{hidden} more: up and down", style=style.DIM)
    return [*rows[:1], *body[first : first + count], more]


def _notable(events: Sequence[EventLine]) -> List[EventLine]:
    """Return the events without the epochs, evaluations and checkpoints that a newer one has followed."""
    newest = {each.kind: index for index, each in enumerate(events)}
    return [each for index, each in enumerate(events) if each.kind not in ROUTINE or newest[each.kind] == index]


def event_lines(events: Sequence[EventLine], width: int, ascii_only: bool) -> List[Text]:
    """Return a line per event, oldest first."""
    return [
        fitted(
            Text.assemble((clock(each.unix_s), style.DIM), "  ", (each.text, style.of_event(each.kind))),
            width,
            ascii_only,
        )
        for each in events
    ]


def tail(lines: Sequence[Text], height: int, scroll: int) -> List[Text]:
    """Return the part of a long list that ends `scroll` lines before its end."""
    back = min(scroll, max(0, len(lines) - height))
    return list(lines[max(0, len(lines) - height - back) : len(lines) - back])
