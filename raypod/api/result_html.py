"""What a notebook shows of a `Result`: the state, the results of each metric, and its curves as SVG."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from raypod.observe.report.run_data import RunReader

_MAX_ROWS = 300  # of a curve
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 320, 150, 46, 16  # pixels of a chart, and of its margins with numbers
_TRAINING, _TEST = "#1f77b4", "#d62728"
Point = Tuple[float, float]


def result_html(folder: Path) -> str:
    """Return the run of a folder as HTML without scripts. ConfigError if a file cannot be read."""
    reader = RunReader(folder)
    reader.refresh()
    run = reader.data(_MAX_ROWS)
    charts = "".join(_charts(run))
    colours = f'<span style="color:{_TRAINING}">training</span>, <span style="color:{_TEST}">test</span>'
    updates = f"{run['update']} of {run['total_updates']} updates"
    state = f"<b>{html.escape(run['name'])}</b>: {html.escape(run['state'])}, {updates} ({html.escape(str(folder))})"
    return f"<div><p>{state}</p>{_table(run['results'])}<p>{colours}, over updates</p><div>{charts}</div></div>"


def _table(results: Sequence[Dict[str, Any]]) -> str:
    """Return the best and the last value of each metric, as `raypod compare` prints them."""
    rows: List[Tuple[str, ...]] = [("", "last", "best", "after update")]
    for each in results:
        rows.append((f"{each['split']} {each['name']}", *(_number(each[key]) for key in ("last", "best", "update"))))
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _charts(run: Dict[str, Any]) -> Iterator[str]:
    tables = (run["curves"], run["evaluations"])
    names = dict.fromkeys([*run["metrics"], *run["evaluations"]["columns"][3:]])
    for name in names:
        training, test = (_points(table, name) for table in tables)
        if training or test:
            yield _chart(name, training, test)


def _points(table: Dict[str, Any], name: str) -> List[Point]:
    if name not in table["columns"]:
        return []
    column = table["columns"].index(name)
    return [(row[0], row[column]) for row in table["rows"] if math.isfinite(row[column])]


def _chart(name: str, training: Sequence[Point], test: Sequence[Point]) -> str:
    """Return an SVG element with both curves."""
    points = [*training, *test]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points))

    def place(point: Point) -> str:
        x = _LEFT + (point[0] - left) / ((right - left) or 1) * (_WIDTH - _LEFT - 6)
        y = 20 + (high - point[1]) / ((high - low) or 1) * (_HEIGHT - _BOTTOM - 26)
        return f"{x:.1f},{y:.1f}"

    dots = (place(point).split(",") for point in test)
    parts = [
        f'<polyline points="{" ".join(map(place, training))}" fill="none" stroke="{_TRAINING}"/>',
        f'<polyline points="{" ".join(map(place, test))}" fill="none" stroke="{_TEST}" stroke-dasharray="4"/>',
        *(f'<circle cx="{x}" cy="{y}" r="3" fill="{_TEST}"/>' for x, y in dots),
        _text(_LEFT, 12, name),
        _text(0, 24, _number(high)),
        _text(0, _HEIGHT - _BOTTOM - 2, _number(low)),
        _text(_LEFT, _HEIGHT - 2, _number(left)),
        _text(_WIDTH - 40, _HEIGHT - 2, _number(right)),
    ]
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{html.escape(name)}">{"".join(parts)}</svg>'
    )


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="11" fill="currentColor">{html.escape(text)}</text>'


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
