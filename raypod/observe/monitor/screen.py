"""What the user looks at: the view, the selected run and instance, and how keys change them. Pure data."""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional

from raypod.observe.monitor.model import Pod, Run

POD, RUN, LOG, EVENTS = "pod", "run", "log", "events"
_VIEWS = {"p": POD, "r": RUN, "l": LOG, "e": EVENTS}
_NEXT = {POD: RUN, RUN: LOG, LOG: EVENTS, EVENTS: POD}
_PAGE = 10


@dataclasses.dataclass(frozen=True)
class Screen:
    """The state of the display. `run_dir` None: the first run."""

    view: str = POD
    run_dir: Optional[str] = None
    instance: int = 0  # position in the list of instances
    scroll: int = 0  # lines back from the end in logs and events, and down from the top in the pod
    shows_help: bool = False

    def run(self, pod: Pod) -> Optional[Run]:
        """Return the selected run; the first one if it is gone."""
        found = next((run for run in pod.runs if run.run_dir == self.run_dir), None)
        return found or (pod.runs[0] if pod.runs else None)

    def pressed(self, key: str, pod: Pod) -> Screen:
        """Return the screen after a key: a character, or up, down, left, right, tab, page up, page down, escape."""
        if self.shows_help:
            return dataclasses.replace(self, shows_help=False)
        if key in ("h", "?"):
            return dataclasses.replace(self, shows_help=True)
        if key in _VIEWS:
            return dataclasses.replace(self, view=_VIEWS[key], scroll=0)
        if key == "tab":
            return dataclasses.replace(self, view=_NEXT[self.view], scroll=0)
        if key == "escape":
            return dataclasses.replace(self, view=POD, scroll=0)
        if key == "enter":
            return dataclasses.replace(self, view={POD: RUN, RUN: LOG}.get(self.view, self.view), scroll=0)
        if key in ("left", "right", "n", "N"):
            return self._other_run(pod, -1 if key in ("left", "N") else 1)
        if key.isdigit():
            return self._with_instance(pod, int(key))
        return self._moved(key, pod)

    def _moved(self, key: str, pod: Pod) -> Screen:
        steps: Dict[str, int] = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -_PAGE, "page down": _PAGE}
        step = steps.get(key)
        if step is None:
            return self
        if self.view == RUN:
            return self._with_instance(pod, self.instance + step)
        down = step if self.view == POD else -step
        return dataclasses.replace(self, scroll=max(0, self.scroll + down))

    def _with_instance(self, pod: Pod, instance: int) -> Screen:
        run = self.run(pod)
        last = max(0, len(run.instances) - 1) if run is not None else 0
        return dataclasses.replace(self, instance=min(max(0, instance), last), scroll=0)

    def _other_run(self, pod: Pod, step: int) -> Screen:
        run = self.run(pod)
        if run is None:
            return self
        index = (pod.runs.index(run) + step) % len(pod.runs)
        return dataclasses.replace(self, run_dir=pod.runs[index].run_dir, instance=0, scroll=0)
