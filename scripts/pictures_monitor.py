"""Pictures of `raypod monitor` for the documentation, from its JSON: `raypod monitor --json > FILE` during a run.

    python scripts/pictures_monitor.py FILE FOLDER

writes FOLDER/monitor-pod.svg and FOLDER/monitor-run.svg. They contain text, no bitmap, and load nothing.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any, List, Mapping, Optional

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from raypod.observe.monitor.model import POD, RUN, HostFacts, Screen, from_json
from raypod.observe.monitor.pod_source import build_pod
from raypod.observe.monitor.views import render

WIDTH, HEIGHT = 132, 34


def make_pictures(content: Mapping[str, Any], folder: Path, run_dir: Optional[str] = None) -> List[Path]:
    """Write the pictures of the pod view and of the run view; return their paths.

    Args:
        content: the JSON of `raypod monitor --json`.
        folder: for the pictures; it is created.
        run_dir: the run to show; default: the first one.
    """
    facts, runs = from_json(content)
    hosts = [HostFacts(each["name"], facts.usage) if each["name"] == facts.name else None for each in content["hosts"]]
    pod = build_pod(str(content["pod"]), float(content["unix_s"]), list(filter(None, hosts)), runs)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for view in (POD, RUN):
        path = folder / f"monitor-{view}.svg"
        path.write_text(_svg(render(pod, Screen(view, run_dir), (), (WIDTH, HEIGHT)), f"raypod monitor: {view}"))
        paths.append(path)
    return paths


def _svg(lines: List[Text], title: str) -> str:
    """Return the lines of a screen as SVG, without the empty ones above the line of keys."""
    while len(lines) > 2 and not lines[-2].plain.strip():
        del lines[-2]
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(Text("\n").join(lines), no_wrap=True, crop=True)
    # rich's template names fonts of a public server; the pictures must load nothing.
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, theme=MONOKAI, code_format=template)


if __name__ == "__main__":
    for written in make_pictures(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])):
        print(f"{written}: {written.stat().st_size} bytes")
