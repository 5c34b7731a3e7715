"""`raypod dashboard [RUNS_FOLDER]`: the command line and the routes of the server."""

from __future__ import annotations

import threading
from argparse import Namespace
from pathlib import Path
from typing import Dict

from raypod.errors import ConfigError, as_utf8
from raypod.observe.dashboard.runs import RunsFolder
from raypod.observe.report import page
from raypod.observe.status.endpoint import Cached
from raypod.observe.status.token_server import HTML, Query, Response, Route, TokenServer, json_response, not_found
from raypod.system.command_line import FlagParser, show

_ASSETS = Path(__file__).resolve().parent / "assets"
_LEAST_ROWS, _MOST_ROWS = 100, 4000
_LARGEST_PORT = 65535


def parser() -> FlagParser:
    """Return the parser of the command."""
    parser = FlagParser(run, prog="raypod dashboard", description="Show the runs of a folder in a browser, live.")
    parser.add_argument("folder", metavar="RUNS_FOLDER", nargs="?", default="runs", help="default: runs")
    parser.add_argument("--port", metavar="N", default="0", help="on 127.0.0.1; default: 0, any free port")
    return parser


def run(args: Namespace) -> int:
    """Serve the dashboard until Ctrl-C; return 0.

    Raises:
        ConfigError: a mistake in the options, or the folder cannot be read.
    """
    if not args.port.isdecimal() or int(args.port) > _LARGEST_PORT:
        raise ConfigError(f"--port {args.port}: must be a port number, or 0 for any free one")
    runs = RunsFolder(Path(args.folder))
    with TokenServer(routes(runs), int(args.port), "--port", asset("sign_in.html").encode()) as server:
        try:
            show(f"The dashboard of {runs.folder}: {server.url}/?token={server.token}")
            threading.Event().wait()
        except KeyboardInterrupt:  # the usual way to end it
            return 0
    return 0


def routes(runs: RunsFolder) -> Dict[str, Route]:
    """Return the routes: the page, the list of runs as JSON, and the data of one run as JSON."""
    content = Response(as_utf8(render(str(runs.folder))).encode(), HTML)
    listed = Cached(lambda: json_response({"folder": str(runs.folder), "runs": runs.list()}))

    def serve_list(query: Query) -> Response:
        response: Response = listed()
        return response

    def serve_run(query: Query) -> Response:
        name, rows = query.get("name", ""), query.get("rows", "")
        max_rows = min(max(int(rows), _LEAST_ROWS), _MOST_ROWS) if rows.isdecimal() else _MOST_ROWS
        found = runs.data(name, max_rows, query.get("version", ""))
        if found is None:
            return not_found(f"the run {name!r}")
        return json_response({"name": name, "version": found.word, "run": found.data})

    return {"/": lambda query: content, "/runs": serve_list, "/run": serve_run}


def render(folder: str) -> str:
    """Return the page: that of the report without data, with the list of runs of this folder."""
    return page.render(
        [],
        title=f"raypod dashboard: {folder}",
        body=asset("runs.html"),
        styles=[asset("runs.css")],
        scripts=[asset("runs.js")],
        connects=True,
    )


def asset(name: str) -> str:
    """Return the text of a file of this package's assets."""
    return (_ASSETS / name).read_text(encoding="utf-8")
