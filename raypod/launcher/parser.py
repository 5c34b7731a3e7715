"""Command lines and option files to a `Request`; every complaint is one line that names the option and the way out.

Yes/no options are accepted as poprun accepts them: `--numa-aware`, `--numa-aware=yes`, `--numa-aware 1`.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Dict, List, NoReturn, Optional, Sequence, Tuple

import yaml

from raypod.errors import ConfigError
from raypod.launcher.options import BY_KEY, INT, NOT_EXPORTED, OPTIONS, TEXT, WORDS, YES_NO, Option, Request

_YES, _NO = ("yes", "on", "true", "1", "y"), ("no", "off", "false", "0", "n")
_LETTERS = {option.letter: option for option in OPTIONS if option.letter}
_QUERIES = ("help", "version", "version-format")
_REFUSED = {
    "synchronise_python_venv": "file_mounts and setup_commands of the cluster YAML bring files and packages to hosts",
    "synchronise_poplar_sdk": "install the SDK on every host, as setup_commands of the cluster YAML",
    "distribute_ssh_key": "no ssh connects the hosts here; Ray does",
}


def parse(words: Sequence[str]) -> Tuple[Request, Optional[str]]:
    """The request of a command line, and a query (help, version, version-format) if there is one.

    Raises:
        ConfigError: an unknown option, or a value that it cannot have.
    """
    scan = _Scan(words)
    scan.run()
    imported = _read(scan.given["import_config"]) if "import_config" in scan.given else {}
    given = {**imported, **scan.given}
    values = {**{option.key: option.default for option in OPTIONS}, **given}
    for key, instead in _REFUSED.items():
        if values[key]:
            raise ConfigError(f"--{BY_KEY[key].name}: raypod copies nothing to hosts; {instead}")
    return Request(values, tuple(given), scan.verbosity, tuple(scan.program)), scan.query


def export(request: Request) -> str:
    """The options that were set, as YAML that `--import-config` reads back to the same request."""
    keys = [key for key in request.given if key not in NOT_EXPORTED]
    values = {BY_KEY[key].name: request.values[key] for key in keys}
    return yaml.safe_dump(
        {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}, sort_keys=False
    )


def usage(prog: str) -> str:
    """The page of `--help`."""
    lines = [f"usage: {prog} [options] PROGRAM [ARGS...]", "", "Runs PROGRAM in every instance, as poprun does.", ""]
    for option in OPTIONS:
        letter = f"-{option.letter}, " if option.letter else "    "
        name = f"{letter}--{option.name} {option.kind}" if option.letter != "x" else "-x VAR[=VALUE]"
        default = "" if option.default in (None, ()) else f" [{_text(option.default)}]"
        lines.append(f"  {name:<38}{option.help}{default}")
    lines += [f"  {'-v, -vv':<38}say what is done", f"  {'--version, --version-format':<38}raypod's version", ""]
    lines += [f"--{BY_KEY[key].name} is refused: {instead}." for key, instead in _REFUSED.items()]
    return "\n".join(lines)


class _Scan:
    """One walk over the words in front of the program."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words: List[str] = list(words)
        self.given: Dict[str, Any] = {}
        self.verbosity = 0
        self.query: Optional[str] = None
        self.program: List[str] = []

    def run(self) -> None:
        """Take options off the front until the program comes."""
        while self._words:
            word = self._words.pop(0)
            if word == "--" or not word.startswith("-"):
                self.program = self._words if word == "--" else [word, *self._words]
                return
            if word.lstrip("-") in ("v", "vv", "vvv"):
                self.verbosity += len(word.lstrip("-"))
            elif word.lstrip("-") in (*_QUERIES, "h"):
                self.query = self.query or {"h": "help"}.get(word.lstrip("-"), word.lstrip("-"))
            else:
                self._take(word)

    def _take(self, word: str) -> None:
        option, text = self._find(word)
        if option.kind == YES_NO:
            value: Any = self._yes_or_no(option, text)
        elif text is None and not self._words:
            raise ConfigError(f"{_said(option)} needs a value")
        else:
            value = convert(option, self._words.pop(0) if text is None else text)
        if option.is_repeated:
            value = (*self.given.get(option.key, ()), value)
        self.given[option.key] = value

    def _find(self, word: str) -> Tuple[Option, Optional[str]]:
        name, equals, text = word.partition("=")
        if name.startswith("--"):
            option = BY_KEY.get(name[2:].replace("-", "_"))
            if option is None or option.letter == "x":
                _unknown(name)
            return option, text if equals else None
        option = _LETTERS.get(word[1:2])
        if option is None:
            _unknown(word)
        return option, word[2:] or None

    def _yes_or_no(self, option: Option, text: Optional[str]) -> bool:
        follows = self._words[0].lower() if len(self._words) > 1 else ""  # the last word can only be the program
        if text is None:
            return convert(option, self._words.pop(0)) if follows in (*_YES, *_NO) else True
        return bool(convert(option, text))


def convert(option: Option, value: Any) -> Any:
    """A value out of its text, or out of YAML; ConfigError if the option cannot have it."""
    text = str(value)
    if option.kind in (TEXT, WORDS):
        return text
    if option.kind == YES_NO:
        if text.lower() in _YES or text.lower() in _NO:
            return text.lower() in _YES
        raise ConfigError(f"{_said(option)} {text}: say yes or no")
    try:
        number = int(text) if option.kind == INT else float(text)
    except ValueError:
        raise ConfigError(
            f"{_said(option)} {text}: a {'whole ' if option.kind == INT else ''}number is needed"
        ) from None
    if option.least is not None and not number >= option.least:
        raise ConfigError(f"{_said(option)} {text}: must be at least {option.least:g}")
    return number


def _read(path: str) -> Dict[str, Any]:
    try:
        document = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"--import-config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--import-config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document or {}, dict):
        raise ConfigError(f"--import-config {path}: expected options and their values")
    values: Dict[str, Any] = {}
    for name, value in (document or {}).items():
        option = BY_KEY.get(str(name).replace("-", "_"))
        if option is None or option.key in NOT_EXPORTED:
            _unknown(f"--{name}", f" in {path}")
        if isinstance(value, list) != option.is_repeated:
            raise ConfigError(f"{path}: {name} needs {'a list' if option.is_repeated else 'one value'}")
        values[option.key] = tuple(str(each) for each in value) if option.is_repeated else convert(option, value)
    return values


def _unknown(word: str, where: str = "") -> NoReturn:
    known = [f"--{option.name}" for option in OPTIONS if option.letter != "x"] + [f"--{query}" for query in _QUERIES]
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise ConfigError(f"unknown option {word}{where}{hint} (--help lists all)")


def _said(option: Option) -> str:
    return f"-{option.letter}" if option.letter == "x" else f"--{option.name}"


def _text(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
