"""Helpers of every command line: errors as one line and an exit code, flags, suggestions, and tables of text."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import io
import itertools
import os
import re
import select
import shutil
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Mapping, NoReturn, Optional, Sequence, TextIO

from raypod.errors import ConfigError, Preempted, RaypodError, as_utf8

INTERRUPTED = 130
CLOSED_PIPE = 141  # as a shell reports SIGPIPE
DEFAULT_WIDTH = 80  # of a terminal that does not know its own
_LEAST_ROOM = 20  # columns of a folded text
_OWN = f"{Path(__file__).parents[1]}{os.sep}"  # where the files of raypod are
_STYLES = {"bold": 1, "red": 31, "green": 32, "yellow": 33}
_OWN_STYLES = {f"\x1b[{number}m" for number in (0, *_STYLES.values())}
# Escape sequences, control characters without tabs and line ends, and what reverses the direction of text.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b."
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def report_errors(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; print errors and warnings of raypod as one line each on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or "utf" not in stream.encoding.lower()):
            stream.reconfigure(errors="backslashreplace")  # for characters, and names of files, that it does not have
    try:
        with _own_warnings_in_lines():
            code = int(command())
        sys.stdout.flush()
        return code
    except RaypodError as error:
        _tell_last(f"{paint('error:', 'red', sys.stderr)} {error}")
        return error.exit_code
    except Preempted as preempted:
        _tell_last(str(preempted))
        return preempted.exit_code
    except KeyboardInterrupt as interrupt:
        _tell_last("interrupted")
        return int(getattr(interrupt, "exit_code", INTERRUPTED))
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        return CLOSED_PIPE
    except OSError as error:  # os.stat and what is built on it raise this for a name that cannot exist
        if error.errno != errno.ENAMETOOLONG:
            raise
        _tell_last(f"{paint('error:', 'red', sys.stderr)} {error.filename}: {error.strerror}")
        return ConfigError.exit_code


@contextlib.contextmanager
def _own_warnings_in_lines() -> Iterator[None]:
    """Print a warning whose place is in raypod without it: it is about the run. Others have file and line."""
    before = warnings.formatwarning

    def formatted(message: Any, category: Any, filename: str, lineno: int, line: Optional[str] = None) -> str:
        if category not in (UserWarning, RuntimeWarning) or not filename.startswith(_OWN):
            return before(message, category, filename, lineno, line)
        return f"raypod: {paint('warning:', 'yellow', sys.stderr)} {printable(' '.join(str(message).split()))}\n"

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


def _tell_last(text: str) -> None:
    """Print why a command ends. Its exit code counts, also if the text cannot be written."""
    tell(f"raypod: {text}", sys.stderr)
    discard_unwritten()


def _stdout_is_closed() -> bool:
    """Return whether the reader of stdout has ended, as `head` does; then what is still buffered is discarded."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # an error is always reported
    if not poll.poll(0):
        return False
    discard(sys.stdout)
    return True


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, with what it has kept: its reader is gone, and the interpreter flushes it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def paint(text: str, style: str, stream: Any) -> str:
    """Return `text` as `stream` shows it in a style: bold, red, green or yellow.

    It is unchanged if the stream is no terminal, the terminal is dumb, or the variable NO_COLOR is set.
    """
    if not stream.isatty() or os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def current_folder() -> str:
    """Return the path of the current folder. ConfigError if it was removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise ConfigError("the current folder does not exist any more; change to another one") from None


def check_utf8(named: Mapping[str, object]) -> None:
    """Check what Ray gets of a command: texts by name, the current folder, and the words of the command line.

    Raises:
        ConfigError: one of them is not UTF-8.
    """
    words = os.fsdecode(Path("/proc/self/cmdline").read_bytes()).split("\0")
    word = next((each for each in words if as_utf8(each) != each), "")
    for name, text in {**named, "the current folder": str(Path.cwd()), "the command line": word}.items():
        if isinstance(text, str) and as_utf8(text) != text:
            raise ConfigError(
                f"{name}: the name {as_utf8(text)} is not UTF-8, and Ray accepts no other: rename it, or make a link "
                "with another name to it"
            )


def printable(text: str) -> str:
    """Return foreign text without control characters and escape sequences, which would act on the terminal.

    Tabs and line ends stay. Names, messages and logs of a run folder can come from anyone.
    """
    return _CONTROL.sub("", text)


def show(text: str, stream: Optional[TextIO] = None) -> None:
    r"""Print text with a line end, by default to stdout; of control sequences only the styles of `paint` get there.

    Bytes of file names that are not UTF-8 are shown as \xNN.
    """
    shown = _CONTROL.sub(lambda found: found.group() if found.group() in _OWN_STYLES else "", as_utf8(text))
    print(shown, file=stream or sys.stdout, flush=True)


def say(text: str) -> None:
    """Print a line of raypod itself to stderr."""
    show(f"raypod: {text}", sys.stderr)


def tell(text: str, stream: Optional[TextIO] = None) -> None:
    """As `show`, for a command that a full disk under its output must not end: the text is lost if that lasts.

    Python keeps up to 8 KiB of it, and writes that with the next text.
    """
    try:
        show(text, stream)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise


def discard_unwritten() -> None:
    """Write what stdout and stderr have kept; if that fails, discard it, so that it does not change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard(stream)


class FlagParser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises ConfigError instead of printing its usage and exiting.

    `run` is the command: it takes the parsed flags, with the whole command line as `argv`, and returns the exit code.
    """

    def __init__(self, run: Callable[[argparse.Namespace], int] = lambda args: 0, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)
        self.run = run

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message in one line, with the values of the flags that it asks for."""
        what, is_missing, names = message.partition("are required: ")
        if is_missing:
            known = self._option_string_actions
            asked = [
                f"{name} {known[name].metavar or ''}".strip() if name in known else name for name in names.split(", ")
            ]
            message = f"{what}{is_missing}{', '.join(asked)}"
        raise ConfigError(f"{message.replace('argument ', '', 1)} ({self.prog} --help lists all flags)")

    def parse_args(  # type: ignore[override]
        self, args: Optional[Sequence[str]] = None, namespace: Optional[argparse.Namespace] = None
    ) -> argparse.Namespace:
        """Parse flags and other words in any order. ConfigError names the flag nearest to an unknown one."""
        words = sys.argv[1:] if args is None else list(args)
        self._check_flags(words)
        parsed: argparse.Namespace = self.parse_intermixed_args(words, namespace)
        parsed.argv = words
        return parsed

    def _check_flags(self, words: Sequence[str]) -> None:
        """Raise ConfigError for the first unknown flag, before argparse reports what is missing."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for word in itertools.takewhile(lambda each: each != "--", words):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known:
                found = nearest(name, sorted(known))
                hint = f"; did you mean {found[0]}?" if found else ""
                raise ConfigError(f"unknown flag {name}{hint}; {self.prog} --help lists all")


def without_flags(words: Sequence[str], *names: str) -> List[str]:
    """Return a command line without some flags and their values."""
    kept: List[str] = []
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_removed = is_value or name in names
        is_value = not is_value and is_removed and not equals
        if not is_removed:
            kept.append(word)
    return kept


def value_of(words: Sequence[str], flag: str, key: str) -> Optional[str]:
    """Return the last value of a flag, or of the override of its key, in a command line; None without one."""
    found = None
    for word, after in zip(words, [*words[1:], "--"]):
        name, equals, value = word.partition("=")
        if name in (flag, key) and equals:
            found = value
        elif word == flag and not after.startswith("--"):
            found = after
    return found


# What other programs call the flags of a training.
_ELSEWHERE = {
    "learning_rate": ("lr",),
    "batch_size": ("bs",),
    "weight_decay": ("wd",),
    "updates": ("steps", "max_steps"),
    "lr_schedule": ("scheduler",),
    "max_grad_norm": ("clip", "grad_clip"),
    "gradient_accumulation": ("grad_accum",),
    "precision": ("fp16", "amp"),
    "model": ("arch", "net"),
    "replicas": ("gpus", "num_gpus", "devices"),
    "num_workers": ("workers",),
    "data_dir": ("root", "data_path"),
    "run_dir": ("output_dir", "save_dir"),
}


def nearest(word: str, known: Iterable[str], count: int = 1) -> List[str]:
    """Return at most `count` of the known names that mean `word` elsewhere or are similar to it, the nearest first."""
    names, plain = list(known), _underscored(word)
    found = [name for name in names if plain in _ELSEWHERE.get(_underscored(name), ())]
    similar = difflib.get_close_matches(word, names, n=count, cutoff=0.5)
    return [*found, *(name for name in similar if name not in found)][:count]


def _underscored(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the nearest known name, or all of them."""
    names = list(known)
    found = nearest(word, names)
    return f"; did you mean {found[0]}?" if found else f"; known: {', '.join(names)}"


def shortened(names: Sequence[str]) -> str:
    """Return a list of names in one line; of more than four the first three and the number of the others."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def listed(words: Sequence[str], conjunction: str = "or") -> str:
    """Return words in one line, with a conjunction before the last one, as in "a, b or c"."""
    return f" {conjunction} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def width_of(stream: TextIO) -> Optional[int]:
    """Return the columns of the terminal that a stream writes to; None if it is no terminal."""
    if not stream.isatty():
        return None
    if not os.environ.get("COLUMNS"):
        with contextlib.suppress(OSError):  # a notebook's stream, for example, has no file descriptor
            return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    return shutil.get_terminal_size().columns


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 host" and "2 hosts"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_table(
    rows: Sequence[Sequence[str]],
    least_widths: Sequence[int] = (),
    separator: str = "  ",
    boxed: bool = False,
    width: Optional[int] = None,
) -> List[str]:
    """Return the lines of a table whose columns are left-aligned; `rows[0]` is the header.

    A column is as wide as its longest cell, and at least as wide as its entry in `least_widths`. `boxed` draws lines
    around the table and below the header; `separator` stands between the columns otherwise. `width` folds the last
    column to a terminal of so many columns, except in the middle of a word or a path; None folds nothing.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    widths[: len(least_widths)] = map(max, least_widths, widths)
    if width is not None:
        room = width - sum(widths[:-1]) - len(separator) * len(widths[:-1])
        rows = [line for row in rows for line in _folded(row, max(_LEAST_ROOM, room))]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in rows]
    if not boxed:
        return [separator.join(row).rstrip() for row in cells]
    rule = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [rule, lines[0], rule, *lines[1:], rule]


def _folded(row: Sequence[str], room: int) -> Iterator[Sequence[str]]:
    """Yield a row of a table whose last cell fits in a number of columns, and rows with the rest of that cell."""
    parts = textwrap.wrap(row[-1], room, break_long_words=False, break_on_hyphens=False)
    for index, part in enumerate(parts or [""]):
        yield (*(row[:-1] if index == 0 else [""] * (len(row) - 1)), part)


class Joined(argparse.Action):
    """Joins the values of a flag that is given several times to one list."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")
