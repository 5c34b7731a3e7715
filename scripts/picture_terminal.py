"""Record a training in a terminal as an animated SVG: `python scripts/picture_terminal.py [FILE]`.

It runs `raypod train` in a pseudo-terminal; each line appears at the time at which it was printed. The picture contains
text, loads nothing, and is still for readers who prefer reduced motion.
"""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import List, Tuple

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
WIDTH, LIMIT_S = 100, 300.0
COMMAND = ["raypod", "train", "--epochs", "2", "--fleet", "inline", "--num-instances", "1", "--run-dir", "runs/digits"]
_STYLE = """
@keyframes appear { from { opacity: 0 } to { opacity: 1 } }
@media (prefers-reduced-motion: no-preference) { .line { opacity: 0; animation: appear 0.05s linear forwards } }
"""


def record(folder: Path) -> List[Tuple[float, str]]:
    """Run the command in `folder`; return its lines, each with the seconds until it was complete."""
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", *COMMAND]
    began, data, found = time.monotonic(), b"", []
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        while time.monotonic() - began < LIMIT_S:
            ready, _, _ = select.select([master], [], [], 1.0)
            try:
                chunk = os.read(master, 65536) if ready else b""
            except OSError:  # the terminal is closed: the process has ended
                break
            data += chunk
            *lines, data = data.split(b"\n")
            for line in (each.decode(errors="replace").replace(f"{folder}/", "").rstrip("\r") for each in lines):
                state = last_state(line)
                if state or not line:  # not a bar that was removed
                    found.append((time.monotonic() - began, state))
        process.terminate()
    os.close(master)
    return found


def last_state(line: str) -> str:
    """Return what a line that was redrawn shows in the end."""
    states = [state for state in re.split(r"\r|\x1b\[[0-9]*[AK]", line.rstrip("\r")) if state.strip()]
    return states[-1] if states else ""


def picture(lines: List[Tuple[float, str]]) -> str:
    """Return the SVG; the first line is the command."""
    shown = [(0.0, f"\x1b[1m$ {' '.join(COMMAND)}\x1b[0m"), *lines]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for _, line in shown:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True, highlight=False)
    # rich's template names fonts of a public server; the picture must load nothing.
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(title="raypod train", theme=MONOKAI, code_format=template, unique_id="terminal")

    def delayed(match: re.Match[str]) -> str:
        at = shown[min(int(match[1]), len(shown) - 1)][0]
        return f'<text class="line" style="animation-delay:{at:.2f}s" {match[0][6:]}'

    svg = re.sub(r'<text [^>]*clip-path="url\(#terminal-line-(\d+)\)"', delayed, svg)
    svg = svg.replace('class="line" style="animation-delay', 'data-line="" style="animation-delay')
    svg = re.sub(r'data-line="" (style="[^"]*") class="([^"]*)"', r'\1 class="line \2"', svg)
    return svg.replace("</style>", f"{_STYLE}</style>", 1)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "terminal.svg"
    with tempfile.TemporaryDirectory(prefix="raypod-terminal-") as scratch:
        text = picture(record(Path(scratch)))
    target.write_text(text)
    print(f"{target}: {len(text) / 1000:.0f} kB")
