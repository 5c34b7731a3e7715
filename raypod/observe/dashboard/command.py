"""`raypod dashboard [RUNS_FOLDER]`: the command line and the routes of the server.

The runs of a folder: a list from their `state.json`, and the data of single runs, read incrementally.

Runs are found by their name in the list; a name of a request never becomes a part of a path. Symbolic links below the
folder are not followed: a linked folder is not listed, nor is a run folder with a linked file.
"""

from __future__ import annotations

import collections
import os
import secrets
import stat
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, OrderedDict, Tuple

from raypod.errors import ConfigError, as_utf8
from raypod.observe.report import page
from raypod.observe.report.run_data import RunReader
from raypod.observe.status.endpoint import cached_route
from raypod.observe.status.token_server import HTML, Query, Response, Route, TokenServer, error_response, json_response
from raypod.plan import layout
from raypod.plan.layout import is_run_folder
from raypod.runs import run_state
from raypod.runs.run_state import RunEndWatch
from raypod.system.command_line import FlagParser, show
from raypod.system.urls import check_local

_ALIVE = (run_state.STARTING, run_state.RUNNING)
_MAX_READERS = 32  # the least recently used one is closed
_MOVING_S = 5.0  # the data of a run that is alive changes with time, even if it writes nothing

Identity = Tuple[int, ...]


class Entry(NamedTuple):
    """What was read of a run folder at a time."""

    folder: Identity
    state_file: Identity
    is_shown: bool
    modified_s: float  # of the state, else of the folder; since 1970
    state: Optional[run_state.RunState]


class Version(NamedTuple):
    """The data of a run, and a word that changes when the data does."""

    word: str
    data: Optional[Dict[str, Any]]  # None if the client has this version


class RunsFolder:
    """All methods can be called from any thread."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds run folders, or is one itself. ConfigError if it cannot be read."""
        self.folder = folder.resolve()
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else "the folder does not exist"
            raise ConfigError(f"dashboard {folder}: {problem}; give the folder that holds the runs")
        self._entries: Dict[str, Entry] = {}
        self._readers: OrderedDict[str, _Reader] = collections.OrderedDict()
        self._ends: Dict[str, RunEndWatch] = {}  # of runs without an end on record
        self._lock = threading.Lock()
        try:
            self._paths()
        except OSError as error:
            raise ConfigError(f"dashboard {folder}: {error.strerror}") from None

    def list(self) -> List[Dict[str, Any]]:
        """Return the runs: those that are alive first, then the newest one first: docs/reference/observability.md."""
        with self._lock:
            before, self._entries = self._entries, {}
            for name, path in self._paths().items():
                entry = _read(path, before.get(name))
                if entry is not None:
                    self._entries[name] = entry
            found = [self._listed(name, entry) for name, entry in self._entries.items() if entry.is_shown]
        return sorted(found, key=lambda run: (run["state"] not in _ALIVE, -run["modified_s"], run["name"]))

    def data(self, name: str, max_rows: int, known: str) -> Optional[Version]:
        """Return the data of the run of this name; None if there is no such run in the folder.

        Args:
            name: as in `list`.
            max_rows: of its curves.
            known: the version that the client has.
        """
        with self._lock:
            path = self._paths().get(name)
            entry = _read(path, self._entries.get(name)) if path is not None else None
            if path is None or entry is None or not entry.is_shown:
                self._readers.pop(name, None)
                return None
            reader = self._readers.pop(name, None) or _Reader(path)
            self._readers[name] = reader
            while len(self._readers) > _MAX_READERS:
                self._readers.popitem(last=False)
        return reader.read(max_rows, known)

    def _paths(self) -> Dict[str, Path]:
        """Return the folders that can hold a run, by name."""
        if is_run_folder(self.folder):
            return {self.folder.name: self.folder}
        with os.scandir(self.folder) as entries:
            return {entry.name: Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)}

    def _listed(self, name: str, entry: Entry) -> Dict[str, Any]:
        state = entry.state
        shown: Dict[str, Any] = {"name": name, "modified_s": entry.modified_s, "state": "unknown"}
        if state is not None:
            shown.update(
                state="died" if self._has_died(name, state) else state.state,
                update=state.update,
                total_updates=state.total_updates,
                loss=state.loss,
                samples_per_s=state.samples_per_s,
                restarts=state.restarts,
            )
        return shown

    def _has_died(self, name: str, state: run_state.RunState) -> bool:
        if state.has_ended:
            self._ends.pop(name, None)
            return False
        path = self.folder if is_run_folder(self.folder) else self.folder / name
        return self._ends.setdefault(name, RunEndWatch(path)).has_died


class _Reader:
    """Reads one run, for one request at a time."""

    def __init__(self, path: Path) -> None:
        self._reader, self._lock = RunReader(path), threading.Lock()
        self._word, self._changes = secrets.token_hex(4), 0

    def read(self, max_rows: int, known: str) -> Version:
        with self._lock:
            self._changes += self._reader.refresh()
            state = run_state.read(self._reader.folder)
            moving = int(time.time() / _MOVING_S) if state is not None and not state.has_ended else 0
            word = f"{self._word}.{self._changes}.{moving}.{max_rows}"
            return Version(word, None if word == known else self._reader.data(max_rows))


def _read(path: Path, known: Optional[Entry]) -> Optional[Entry]:
    """Read a folder again if it has changed; None if it has disappeared."""
    try:
        folder, state_file = _identity(path), _identity(path / layout.STATE)
    except OSError:
        return None
    if known is not None and (known.folder, known.state_file) == (folder, state_file):
        return known
    is_shown = _has_only_files(path) and is_run_folder(path)
    state = run_state.read(path) if is_shown and state_file else None
    modified_s = state.written_at_s if state is not None else folder[1] / 1e9
    return Entry(folder, state_file, is_shown, modified_s, state)


def _identity(path: Path) -> Identity:
    """Return what changes when a file is replaced, or an entry of a folder is; () for a missing file."""
    try:
        facts = path.lstat()
    except FileNotFoundError:
        if path.name == layout.STATE:
            return ()
        raise
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _has_only_files(path: Path) -> bool:
    """Return whether the files that are read are regular ones: no links out of the folder, and no pipes."""
    for name in layout.names("show"):
        try:
            if not stat.S_ISREG((path / name).lstat().st_mode):
                return False
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


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
    check_local(args.folder, "dashboard")
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
    serve_list = cached_route(lambda: json_response({"folder": str(runs.folder), "runs": runs.list()}), share=1.0)

    def serve_run(query: Query) -> Response:
        name, rows = query.get("name", ""), query.get("rows", "")
        max_rows = min(max(int(rows), _LEAST_ROWS), _MOST_ROWS) if rows.isdecimal() else _MOST_ROWS
        found = runs.data(name, max_rows, query.get("version", ""))
        if found is None:
            return error_response(404, f"the run {name!r} does not exist")
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
