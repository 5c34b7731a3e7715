"""The pod view as lines of text: the runs, and host by host the load and the IPUs. Pure functions."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from rich.text import Text

from raypod.observe.monitor import style
from raypod.observe.monitor.build_pod import LOST, collapsed
from raypod.observe.monitor.columns import Column, fitted, table
from raypod.observe.monitor.model import HostView, Ipu, Pod, Run, Usage
from raypod.observe.monitor.words import UNKNOWN, amount, bar, duration, percent, size

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
        Column("restarts", [(_restarts(run), style.WARN) for run in runs], rank=6, right=True),
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


def _restarts(run: Run) -> str:
    return str(run.restarts) if run.restarts else ""


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
