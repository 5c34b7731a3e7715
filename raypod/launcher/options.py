"""The options of the launcher: poprun's names and meanings (contract section 7), their values, and a file of them.

The table below is all there is to know of an option; parser.py reads command lines by it. Options come before the
program; everything from the program on is the program's own.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any, Dict, List, NoReturn, Optional, Sequence, Tuple

import yaml

from raypod.errors import ConfigError

INT, NUMBER, TEXT, YES_NO, WORDS = "N", "S", "TEXT", "yes|no", "ARGS"


@dataclasses.dataclass(frozen=True)
class Option:
    """One option: its long name, what it takes, its default, and what it is for."""

    name: str
    kind: str
    default: Any
    help: str
    letter: str = ""
    least: Optional[float] = None
    is_repeated: bool = False

    @property
    def key(self) -> str:
        """Its name in Python."""
        return self.name.replace("-", "_")


OPTIONS: Tuple[Option, ...] = (
    Option("num-replicas", INT, 1, "model replicas, TOTAL over all instances", least=1),
    Option("num-instances", INT, 1, "host processes; the replicas are divided equally between them", least=1),
    Option("ipus-per-replica", INT, 1, "IPUs of one replica", least=1),
    Option("host", TEXT, None, "hosts, as in a,b or host[0-2,4], or a file of them; default: this host", letter="H"),
    Option("hostfile", TEXT, None, "file with a host per line"),
    Option("cluster", TEXT, None, "take the hosts from a cluster YAML, the one of `ray up`"),
    Option("host-subnet", TEXT, None, "CIDR (or interface) of the network by which instances reach each other"),
    Option("num-ilds", INT, None, "IPU-Link domains of the partition", least=1),
    Option("numa-aware", YES_NO, False, "bind each instance to a NUMA node of its host, in turn"),
    Option("process-placement", TEXT, None, "disabled: bind nothing; spreadnuma: as --numa-aware"),
    Option("only-output-from-instance", INT, None, "show the output of this instance alone; logs keep all", least=0),
    Option("print-topology", YES_NO, False, "print which instance and replica is where, then go on"),
    Option("offline-mode", YES_NO, False, "no IPUs are attached: test the launch, or the host's input pipeline"),
    Option("executable-cache-path", TEXT, None, "folder of compiled executables"),
    Option("vipu-server-host", TEXT, "localhost", "V-IPU controller"),
    Option("vipu-server-port", INT, 8090, "its port", least=1),
    Option("vipu-server-timeout", INT, 120, "seconds that every request to it may take", least=1),
    Option("vipu-partition", TEXT, None, "partition to use; made if it is not there"),
    Option("vipu-allocation", TEXT, None, "allocation in which to make it"),
    Option("vipu-cluster", TEXT, None, "deprecated name of --vipu-allocation"),
    Option("update-partition", YES_NO, False, "resize the partition if it does not fit"),
    Option("reset-partition", YES_NO, None, "reset it before the start; default: if it is not reconfigurable"),
    Option("remove-partition", YES_NO, True, "remove it at the end, if this launch made it"),
    Option("vipu-partition-attempts", INT, 1, "how often to try to make it", least=1),
    Option("sync-type", TEXT, None, "sync type of a partition that is made, as in ST_POD_NATIVE_DEFAULT"),
    Option("x", TEXT, (), "VAR[=VALUE]: environment of every instance", letter="x", is_repeated=True),
    Option("mpi-global-args", WORDS, (), "arguments for mpirun; what has a meaning here is kept", is_repeated=True),
    Option("mpi-local-args", WORDS, (), "the same", is_repeated=True),
    Option("instance-mpi-local-args", WORDS, (), 'INSTANCE:"-x VAR=VALUE ...": environment of one', is_repeated=True),
    Option("import-config", TEXT, None, "YAML of options; those of the command line win"),
    Option("export-config", TEXT, None, "write the options to a YAML file, then go on"),
    Option("overwrite-config", YES_NO, False, "let --export-config replace a file"),
    Option("device", TEXT, "auto", "auto, ipu or emulated: which SDK the programs find"),
    Option("run-dir", TEXT, None, "folder of the log files; default: runs/<time>-launch-<program>"),
    Option(
        "grace",
        NUMBER,
        2.0,
        "seconds from SIGTERM to SIGKILL when a launch ends early; 10 times that after a passed-on signal",
        least=0,
    ),
    Option("start-timeout", NUMBER, 120.0, "seconds that every step of the start may take", least=0.1),
    Option("allow-run-as-root", YES_NO, False, "accepted: nothing here minds"),
    Option("synchronise-python-venv", YES_NO, False, "refused: see below"),
    Option("synchronise-poplar-sdk", YES_NO, False, "refused: see below"),
    Option("distribute-ssh-key", YES_NO, False, "refused: see below"),
)
BY_KEY: Dict[str, Option] = {option.key: option for option in OPTIONS}
OF_VIPU = tuple(option.key for option in OPTIONS if "vipu" in option.name or option.name.endswith("-partition"))
NOT_EXPORTED = ("import_config", "export_config", "overwrite_config")


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for: the value of every option by its key, and the program with its arguments."""

    values: Dict[str, Any]
    given: Tuple[str, ...]  # keys that somebody set, in a file or on the command line
    verbosity: int
    program: Tuple[str, ...]

    def __getattr__(self, key: str) -> Any:
        if key in BY_KEY:
            return self.values[key]
        raise AttributeError(key)


# --- from launcher.parser: Command lines and option files to a `Request`; every complaint is one line that names the option and the way out.
#
# Yes/no options are accepted as poprun accepts them: `--numa-aware`, `--numa-aware=yes`, `--numa-aware 1`.
#

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
