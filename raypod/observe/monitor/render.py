"""The whole screen: a title line, the view, and a line of keys. A pure function of the model and the size."""

from __future__ import annotations

from typing import List, Sequence, Tuple

from rich.text import Text

from raypod.observe.monitor import style
from raypod.observe.monitor.columns import fitted
from raypod.observe.monitor.model import Pod, Run
from raypod.observe.monitor.screen import EVENTS, LOG, POD, RUN, Screen
from raypod.observe.monitor.view_pod import pod_lines
from raypod.observe.monitor.view_run import event_lines, head_lines, run_lines, tail
from raypod.observe.monitor.words import clock

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
    counts = f"  {len(pod.hosts)} host{'s' * (len(pod.hosts) != 1)}, {active} run{'s' * (active != 1)} active"
    line.append(counts)
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
