"""Render the report: one HTML page that holds the data of its runs, the drawing code and Apache ECharts.

`render(runs)` returns the page of `RunReader.data()` of any number of runs, also of none. The page needs no network; a
content security policy allows only the scripts that `render` has put into it. In the page, the global object

    window.raypodReport.update(runs)   draws other data of the same form: the newest data of the runs, or other runs.
                                       The zoom, the folded parts and the settings of the reader stay as they are; a run
                                       with the same `id` keeps its colour
    window.raypodReport.runs           the data that is drawn
    window.raypodReport.charts         a Map from the key of a chart, as in "curve:loss", to its ECharts instance
    window.raypodReport.ready          True once the page is drawn

`raypod/observe/report/assets` holds the parts. A server adds its own with `body`, `styles` and `scripts`.
"""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path
from typing import Any, Callable, Dict, Sequence

from raypod.errors import as_utf8
from raypod.system.files import strict_json

MAX_BYTES = 5_000_000
_ASSETS = Path(__file__).resolve().parent / "assets"
_SCRIPTS = (
    "base.js",
    "curves.js",
    "instances.js",
    "timeline.js",
    "plan.js",
    "tables.js",
    "parallel.js",
    "predictions.js",
    "main.js",
)
_ROWS = (4000, 2000, 1000, 500, 250, 100)  # of the curves of a run, until the page is small enough
_RESERVE = 200_000  # bytes, for what a caller adds


def render(
    runs: Sequence[Dict[str, Any]],
    title: str = "raypod report",
    body: str = "",
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    connects: bool = False,
) -> str:
    """Return the page.

    Args:
        runs: the data of runs, as `run_data.RunReader.data` returns it.
        title: the title of the page, as text.
        body: HTML that is placed above the runs.
        styles: further style sheets.
        scripts: further scripts, which run after those of the page.
        connects: allow the scripts to send requests to the server that the page came from.
    """
    echarts = (_ASSETS / "echarts.min.js").read_text(encoding="utf-8")
    own = "".join((_ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    code = [echarts, f'(() => {{\n"use strict";\n{own}}})();\n', *scripts]
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in code)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    if connects:
        policy += "; connect-src 'self'"
    css = "\n".join([(_ASSETS / "page.css").read_text(encoding="utf-8"), *styles])
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{html.escape(title)}</title><style>{css}</style></head><body>",
        body,
        f'<div id="report" data-title="{html.escape(title)}"></div>',
        "<noscript><p>This page draws its data with JavaScript, which is switched off here.</p></noscript>",
        f'<script type="application/json" id="raypod-data">{embedded_json(list(runs))}</script>',
        *(f"<script>{each}</script>" for each in code),
        "</body></html>\n",
    ]
    return as_utf8("\n".join(parts))


def render_bounded(data_of_runs: Sequence[Callable[[int], Dict[str, Any]]], title: str = "raypod report") -> str:
    """Return a page of less than 5 MB: of many runs, the curves have fewer rows.

    Args:
        data_of_runs: for each run, a function that returns its data with at most so many rows, as `RunReader.data`.
        title: the title of the page.
    """
    page = ""
    for max_rows in _ROWS:
        page = render([data(max_rows) for data in data_of_runs], title)
        if len(page.encode()) < MAX_BYTES - _RESERVE:
            break
    return page


def embedded_json(content: Any) -> str:
    """Return JSON that can stand inside an HTML script element: it has none of the characters <, > and &."""
    text = strict_json(content)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
