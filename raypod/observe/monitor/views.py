"""The screen as lines of text: the pod, run, log and events views. Pure functions of the model and the size."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from rich.text import Text

from raypod.observe.monitor import style
from raypod.observe.monitor.model import (
    EVENTS,
    LOG,
    POD,
    RUN,
    EventLine,
    HostView,
    Instance,
    Ipu,
    Pod,
    Run,
    Screen,
    Usage,
)
from raypod.observe.monitor.pod_source import LOST, collapsed
from raypod.observe.monitor.style import (
    UNKNOWN,
    Column,
    age,
    amount,
    bar,
    clock,
    duration,
    fitted,
    percent,
    size,
    sparkline,
    table,
)
from raypod.runs.call_times import STRAGGLER_RATIO
from raypod.runs.event_log import ROUTINE
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
            (counted(run.restarts, "restart"), style.WARN if run.restarts else ""),
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
    shown = min(length, max((len(run.series.get(name, ())) for name in names), default=0))
    lines = []
    for name, limits in zip(names, ranges):
        label = f"{run.samples_are}/s" if name == "samples_per_s" else name
        values = run.series.get(name, ())
        is_live_rate = name == "samples_per_s" and run.is_active
        newest = run.samples_per_s if is_live_rate else run.metrics.get(name, values[-1] if values else None)
        line = Text(f"{label:<{_SPARK_LABEL}.{_SPARK_LABEL}} {amount(newest):>8}  ")
        line.append(f"{sparkline(values, length, ascii_only):<{shown}}", style=style.NOTE)
        line.append(f"  {limits:>{longest}}", style=style.DIM)
        lines.append(fitted(line, width, ascii_only))
    return lines


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
    if ratio is None:
        return UNKNOWN, ""
    return (f"{ratio:.2f}x slow", style.BAD) if ratio >= STRAGGLER_RATIO else (f"{ratio:.2f}x", "")


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


_BAR = 10
_INDENT = 2
_MAX_RUNS = 8


def pod_lines(pod: Pod, selected: Optional[Run], area: Tuple[int, int], scroll: int, ascii_only: bool) -> List[Text]:
    """Return at most area[1] lines: each IPU in a line if that fits, else each instance."""
    width, height = area
    lines = _run_rows(pod, selected, width, ascii_only)
    room = height - len(lines) - 1
    hosts = _all_hosts(pod, [[(row, row) for row in host.ipus] for host in pod.hosts], width, ascii_only)
    if len(hosts) > room:
        hosts = _all_hosts(pod, [collapsed(host.ipus) for host in pod.hosts], width, ascii_only)
    if len(hosts) > room:
        first = min(scroll, len(hosts) - max(1, room - 1))
        left = len(hosts) - first - max(1, room - 1)
        more = f"{left} more lines: down" if left > 0 else "up for the first lines"
        hosts = [*hosts[first : first + max(1, room - 1)], Text(more, style=style.DIM)]
    return [*lines, Text(), *hosts][:height]


def _run_rows(pod: Pod, selected: Optional[Run], width: int, ascii_only: bool) -> List[Text]:
    runs = list(pod.runs[:_MAX_RUNS])
    if not runs:
        return [Text("no run of this user on this pod" if pod.hosts else "no host", style=style.DIM)]
    states = [style.state_of(run) for run in runs]
    done = [f"{run.update}/{run.total_updates}" if run.total_updates else "" for run in runs]
    columns = [
        Column("run", [(run.name, style.TITLE) for run in runs], most=36),
        Column("state", [(state, style.of_state(state)) for state in states]),
        Column("owner", [(run.user, "") for run in runs], rank=3, most=16),
        Column("host", [(run.host, "") for run in runs], rank=4, most=24),
        Column("update", [(text, "") for text in done], rank=1, right=True),
        Column("", [(_bar(run, ascii_only), style.GOOD) for run in runs], rank=5),
        Column("ETA", [(duration(run.eta_s) if run.is_active else UNKNOWN, "") for run in runs], rank=1, right=True),
        Column("rate", [(style.rate(run), "") for run in runs], rank=2, right=True),
        Column("loss", [(_loss(run), "") for run in runs], rank=2, right=True),
        Column("restarts", [(str(run.restarts or ""), style.WARN) for run in runs], rank=6, right=True),
        Column("program", [(run.problem or run.program, _program_style(run)) for run in runs], flexible=True),
    ]
    lines = table(columns, width, ascii_only)
    for index, run in enumerate(runs):
        if selected is not None and run.run_dir == selected.run_dir and len(runs) > 1:
            lines[index + 1].stylize("reverse", 0, len(run.name))
    hidden = len(pod.runs) - len(runs)
    return lines + ([Text(f"{hidden} more runs: left and right select one", style=style.DIM)] if hidden else [])


def _bar(run: Run, ascii_only: bool) -> str:
    share = style.share_done(run)
    return "" if share is None else bar(share, _BAR, ascii_only)


def _loss(run: Run) -> str:
    return amount(run.metrics["loss"]) if "loss" in run.metrics else ""


def _program_style(run: Run) -> str:
    return style.BAD if run.problem else style.DIM


def _all_hosts(pod: Pod, groups: Sequence[Sequence[Tuple[Ipu, Ipu]]], width: int, ascii_only: bool) -> List[Text]:
    """Return the lines of all hosts; the tables of IPUs have the same columns."""
    rows = _ipu_rows([group for each in groups for group in each], max(1, width - _INDENT), ascii_only)
    header, body = rows[0], rows[1:]
    header.pad_left(_INDENT)
    lines = [header] if body else []
    for host, group in zip(pod.hosts, groups):
        lines.append(host_line(host, width, ascii_only))
        for row in body[: len(group)]:
            row.pad_left(_INDENT)
            lines.append(row)
        body = body[len(group) :]
    return lines


def host_line(host: HostView, width: int, ascii_only: bool) -> Text:
    """Return the name and the load of a host."""
    line = Text.assemble((host.name, style.TITLE))
    if host.problem:
        line.append(f"  {host.problem}", style=style.BAD)
        if all(each.state == LOST for each in host.ipus):
            return fitted(line, width, ascii_only)
    working = sum(1 for each in host.ipus if each.run or each.pid)
    line.append(f"  {working}/{len(host.ipus)} IPUs busy" if host.ipus else "  no IPU busy")
    line.append_text(_usage(host.usage, ascii_only))
    return fitted(line, width, ascii_only)


def _usage(usage: Usage, ascii_only: bool) -> Text:
    line = Text()
    if usage.memory_total_bytes:
        memory = (usage.memory_used_bytes or 0) / usage.memory_total_bytes
        line.append("  cpu ", style=style.DIM).append(percent(usage.cpu_share), style=style.of_load(usage.cpu_share))
        line.append("  mem ", style=style.DIM).append(_of(usage.memory_used_bytes, usage.memory_total_bytes))
        line.stylize(style.of_load(memory), len(line.plain) - 1)
        down, up = ("in ", "out ") if ascii_only else ("↓", "↑")
        line.append("  net ", style=style.DIM)
        line.append(f"{down}{_per_s(usage.received_bytes_per_s)} {up}{_per_s(usage.sent_bytes_per_s)}")
    if usage.disk_total_bytes:
        disk = (usage.disk_used_bytes or 0) / usage.disk_total_bytes
        line.append("  disk ", style=style.DIM)
        line.append(_of(usage.disk_used_bytes, usage.disk_total_bytes), style=style.of_load(disk))
    return line


def _of(used: Optional[int], total: int) -> str:
    """Return a used and a total size, with the unit once if it is the same."""
    left, right = size(used), size(total)
    number, _, unit = left.partition(" ")
    return f"{number}/{right}" if right.endswith(f" {unit}") else f"{left}/{right}"


def _per_s(rate: Optional[float]) -> str:
    return UNKNOWN if rate is None else f"{size(rate)}/s"


def _ipu_rows(groups: Sequence[Tuple[Ipu, Ipu]], width: int, ascii_only: bool) -> List[Text]:
    firsts = [first for first, _ in groups]
    columns = [
        Column("IPU", [(_span(first.ipu, last.ipu), "") for first, last in groups], right=True),
        Column("state", [(each.state, style.of_state(each.state)) for each in firsts]),
        Column("owner", [(each.owner, "") for each in firsts], rank=3, most=16),
        Column("run", [(each.run, "") for each in firsts], most=36),
        Column("instance", [(_text(each.instance), "") for each in firsts], rank=1, right=True),
        Column("replica", [(_span(first.replica, last.replica), "") for first, last in groups], rank=2, right=True),
        Column("pid", [(_text(each.pid), "") for each in firsts], rank=1, right=True),
        Column("program", [(each.program, style.DIM) for each in firsts], flexible=True),
    ]
    return table(columns, width, ascii_only)


def _span(first: Optional[int], last: Optional[int]) -> str:
    return _text(first) if first == last else f"{_text(first)}-{_text(last)}"


def _text(number: Optional[int]) -> str:
    return "" if number is None else str(number)


KEYS = (("p", "pod"), ("r", "run"), ("l", "log"), ("e", "events"), ("h", "help"), ("q", "quit"))
_HELP = (
    "p             the pod: its hosts, their load, and which IPU works for whom",
    "r             the run: progress, metrics, instances, events",
    "l             the log of the selected instance, as it grows",
    "e             the events of the run",
    "tab           the next view        escape  the pod",
    "left, right   the previous, the next run (also N, n)",
    "up, down      select an instance; scroll in other views (also k, j)",
    "0 to 9        select an instance",
    "enter         from the pod to the run, from the run to the log",
    "q             quit; runs continue",
    "",
    "waits         share of its calls' time that an instance waits for data",
    "median        of the durations of its calls; slowest: the longest of them",
    "busy          time of a call without the wait for other instances, over the",
    "              median of all instances; from 1.25x on marked as slow",
    "beat          age of its last heartbeat",
)


def render(pod: Pod, screen: Screen, log: Sequence[str], size: Tuple[int, int], ascii_only: bool = False) -> List[Text]:
    """Return the lines of the screen, as many as its height; `log` are the newest lines of the selected instance."""
    width, height = size
    body = _body(pod, screen, log, (width, max(1, height - 2)), ascii_only)
    filled = [*body, *(Text() for _ in range(max(0, height - 2) - len(body)))]
    lines = [_title(pod, screen, width, ascii_only), *filled, _keys(screen, width, ascii_only)]
    return _harmless(lines[:height])


def plain(pod: Pod, screen: Screen, width: int, ascii_only: bool = False) -> List[Text]:
    """Return the view in full, for output that is not a screen."""
    height = 10000
    lines = _body(pod, screen, (), (width, height), ascii_only)
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return _harmless(lines)


def _harmless(lines: List[Text]) -> List[Text]:
    """Replace the control characters in names of others, each by a space, as styles count characters."""
    for line in lines:
        line.plain = "".join(each if each.isprintable() else " " for each in line.plain)
    return lines


def _body(pod: Pod, screen: Screen, log: Sequence[str], size: Tuple[int, int], ascii_only: bool) -> List[Text]:
    width, height = size
    run = screen.run(pod)
    if screen.shows_help:
        return [fitted(Text(line), width, ascii_only) for line in _HELP][:height]
    if screen.view == POD or run is None:
        return pod_lines(pod, run, size, screen.scroll, ascii_only)
    if screen.view == RUN:
        return run_lines(run, pod.unix_s, screen.instance, size, ascii_only)
    lines = head_lines(run, pod.unix_s, width, ascii_only)[: 2 if height < 16 else None]
    if screen.view == LOG:
        title, rows = _log(run, screen, log, width, ascii_only)
    else:
        title, rows = Text("events", style=style.DIM), event_lines(run.events, width, ascii_only)
    lines += [Text(), title]
    return [*lines, *tail(rows, max(1, height - len(lines)), screen.scroll)][:height]


def _log(run: Run, screen: Screen, log: Sequence[str], width: int, ascii_only: bool) -> Tuple[Text, List[Text]]:
    if screen.instance >= len(run.instances):
        return Text("the run has no instance", style=style.DIM), []
    instance = run.instances[screen.instance]
    title = Text(f"log of instance {instance.instance} on {instance.host}: {instance.log_file or 'none'}")
    title.stylize(style.DIM)
    lines = log or ["(empty, or not on this host)"]
    return fitted(title, width, ascii_only), [fitted(Text(line), width, ascii_only) for line in lines]


def _title(pod: Pod, screen: Screen, width: int, ascii_only: bool) -> Text:
    active = sum(run.is_active for run in pod.runs)
    line = Text.assemble((" raypod monitor ", "reverse"), f"  {pod.name}  ", (screen.view, style.TITLE))
    line.append(f"  {counted(len(pod.hosts), 'host')}, {counted(active, 'run')} active")
    run = screen.run(pod)
    if run is not None and len(pod.runs) > 1 and screen.view in (RUN, LOG, EVENTS):
        line.append(f"  run {pod.runs.index(run) + 1} of {len(pod.runs)}", style=style.DIM)
    time = clock(pod.unix_s)
    line = fitted(line, max(0, width - len(time) - 1), ascii_only)
    line.append(" " * max(1, width - line.cell_len - len(time)) + time)
    return fitted(line, width, ascii_only)


def _keys(screen: Screen, width: int, ascii_only: bool) -> Text:
    line = Text()
    for key, name in KEYS:
        line.append(f" {key} ", style="reverse").append(f" {name}  ", style=style.TITLE if name == screen.view else "")
    hints = {POD: "left/right run", RUN: "up/down instance", LOG: "0-9 instance", EVENTS: "up/down scroll"}
    line.append(hints[screen.view], style=style.DIM)
    return fitted(line, width, ascii_only)
