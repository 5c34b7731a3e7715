"""Draw the schedules of a pipelined and a sharded model as SVG: `python scripts/picture_pipeline.py [FILE]`.

The schedules are those that `raypod plan` prints, for two stages of equal cost and four micro-batches.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import List

from raypod.training.models.schedule import Schedule, StageCost, compare_strategies

ROOT = Path(__file__).resolve().parents[1]
STAGES, MICRO_BATCHES = 2, 4
CELL, LEFT, TOP, ROW = 36, 96, 40, 34
COLOURS = {"forward": "#cfe4ff", "backward": "#fbd9c4", "update": "#d9f2e3"}
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
 aria-label="Cycles of one update of a model over two IPUs, pipelined and sharded.">
<style>
text {{ font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 14px; fill: #12263a }}
.n {{ text-anchor: middle }} .h {{ font-weight: 600 }} .i {{ fill: #f3f6fa; stroke: #dbe3ea }}
</style>
<rect width="{width}" height="{height}" rx="14" fill="#ffffff"/>
"""


def draw(name: str, schedule: Schedule, top: int) -> List[str]:
    """Return the elements of one schedule, whose upper edge is at `top`."""
    idle = f"{schedule.cycles} cycles, IPUs idle {100 * schedule.idle_share:.0f} % of the time"
    parts = [f'<text class="h" x="20" y="{top + 18}">{name}: {idle}</text>']
    for stage in range(STAGES):
        y = top + TOP - 8 + stage * ROW
        parts.append(f'<text x="20" y="{y + 21}">IPU {stage}</text>')
        for cycle in range(schedule.cycles):
            x = LEFT + cycle * CELL
            parts.append(f'<rect class="i" x="{x}" y="{y}" width="{CELL - 2}" height="{ROW - 4}"/>')
            work = [
                cell for cell in schedule.cells if (cell.cycle, cell.stage) == (cycle, stage) and cell.what in COLOURS
            ]
            for index, cell in enumerate(work):
                height = (ROW - 4) / len(work)
                upper = y + index * height
                fill, label = COLOURS[cell.what], "U" if cell.what == "update" else str(cell.micro_batch)
                parts.append(f'<rect x="{x}" y="{upper:g}" width="{CELL - 2}" height="{height:g}" fill="{fill}"/>')
                size = 14 if len(work) == 1 else 11
                parts.append(
                    f'<text class="n" style="font-size:{size}px" x="{x + CELL / 2 - 1:g}" '
                    f'y="{upper + height / 2 + size / 3:g}">{label}</text>'
                )
    return parts


def picture() -> str:
    """Return the SVG."""
    stages = [StageCost(1000.0, 2000.0, 1.0, stage) for stage in range(STAGES)]
    schedules = compare_strategies(stages, MICRO_BATCHES)
    shown = [(name, schedules[name]) for name in ("pipelined", "sharded")]
    width = LEFT + CELL * max(schedule.cycles for _, schedule in shown) + 20
    step = TOP + STAGES * ROW + 16
    parts = [_HEAD.format(width=width, height=step * len(shown) + 40)]
    for index, (name, schedule) in enumerate(shown):
        parts += draw(name, schedule, 10 + index * step)
    x, y = LEFT, 10 + step * len(shown)
    for what, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="{y}" width="20" height="16" fill="{colour}"/>')
        label = what if what == "update" else f"{what} of a micro-batch"
        parts.append(f'<text x="{x + 28}" y="{y + 13}">{label}</text>')
        x += 226
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "pipeline.svg"
    target.write_text(picture())
    print(target)
