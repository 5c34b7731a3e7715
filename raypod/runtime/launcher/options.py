"""The options of `raypod launch`, with the names and meanings of poprun's, and the parser of its command line.

Options come before the program; the program and all words after it are left as they are. argparse cannot do this: it
would read the program's own flags. Yes/no options take poprun's forms: `--numa-aware`, `--numa-aware=yes`,
`--numa-aware 1`.

The mpirun arguments of a poprun command line that have a meaning without MPI: environment and network.

Every other mpirun argument is a ConfigError that names the replacement.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import textwrap
from pathlib import Path
from typing import Any, Dict, List, NoReturn, Optional, Sequence, Tuple

import yaml

from raypod.errors import ConfigError
from raypod.plan.unique_keys import UniqueKeyLoader
from raypod.system.command_line import FlagParser, nearest

_WIDTH, _COLUMN = 80, 34  # of the help, and where its texts begin
INT, NUMBER, TEXT, YES_NO, WORDS = "N", "S", "TEXT", "yes|no", "ARGS"


@dataclasses.dataclass(frozen=True)
class Option:
    """One option: its long name, the kind of its value, its default, and its help text."""

    name: str
    kind: str
    default: Any
    help: str
    letter: str = ""
    minimum: float = -math.inf
    maximum: float = math.inf
    is_repeated: bool = False

    @property
    def key(self) -> str:
        """The name as a Python identifier."""
        return self.name.replace("-", "_")


OPTIONS: Tuple[Option, ...] = (
    Option("num-replicas", INT, 1, "model replicas, TOTAL over all instances", minimum=1),
    Option("num-instances", INT, 1, "host processes; each gets the same number of replicas", minimum=1),
    Option("ipus-per-replica", INT, 1, "IPUs per model replica", minimum=1),
    Option("host", TEXT, None, "hosts, as in a,b or host[0-2,4] or a:2 (slots); default: this host", letter="H"),
    Option("hostfile", TEXT, None, "file with a host in each line, as in: host0 slots=2"),
    Option("cluster", TEXT, None, "cluster YAML (the file of `ray up`) that lists the hosts"),
    Option("host-subnet", TEXT, None, "CIDR (or interface) of the network between instances"),
    Option("num-ilds", INT, None, "IPU-Link domains of the partition", minimum=1),
    Option("numa-aware", YES_NO, False, "bind instances to the NUMA nodes of their host, round-robin"),
    Option("process-placement", TEXT, None, "disabled: no binding; spreadnuma: same as --numa-aware"),
    Option(
        "only-output-from-instance", INT, None, "print the output of this instance only; log files have all", minimum=0
    ),
    Option("print-topology", YES_NO, False, "print the placement of instances and replicas, then launch"),
    Option("offline-mode", YES_NO, False, "attach no IPUs: test the launch or the input pipeline"),
    Option("executable-cache-path", TEXT, None, "folder of compiled executables"),
    Option("vipu-server-host", TEXT, "localhost", "V-IPU controller"),
    Option("vipu-server-port", INT, 8090, "port of the V-IPU controller", minimum=1, maximum=65535),
    Option("vipu-server-timeout", INT, 120, "timeout of each request to the controller, in seconds", minimum=1),
    Option("vipu-partition", TEXT, None, "partition to use; created if it does not exist"),
    Option("vipu-allocation", TEXT, None, "allocation in which to create the partition"),
    Option("vipu-cluster", TEXT, None, "deprecated name of --vipu-allocation"),
    Option("update-partition", YES_NO, False, "resize the partition if it does not fit"),
    Option(
        "reset-partition", YES_NO, None, "reset the partition before the start; default: only if not reconfigurable"
    ),
    Option("remove-partition", YES_NO, True, "remove the partition at the end if this launch created it"),
    Option("vipu-partition-attempts", INT, 1, "attempts to create the partition", minimum=1),
    Option("sync-type", TEXT, None, "sync type of a created partition, for example ST_POD_NATIVE_DEFAULT"),
    Option(
        "x",
        TEXT,
        (),
        "environment variable of every instance; without VALUE, the caller's value",
        letter="x",
        is_repeated=True,
    ),
    Option("mpi-global-args", WORDS, (), "mpirun arguments; those with a meaning without MPI apply", is_repeated=True),
    Option("mpi-local-args", WORDS, (), "same as --mpi-global-args", is_repeated=True),
    Option(
        "instance-mpi-local-args",
        WORDS,
        (),
        'INSTANCE:"-x VAR=VALUE ...": environment of one instance',
        is_repeated=True,
    ),
    Option("import-config", TEXT, None, "YAML file of options; the command line takes precedence"),
    Option("export-config", TEXT, None, "write the options to a YAML file, then launch"),
    Option("overwrite-config", YES_NO, False, "let --export-config overwrite a file"),
    Option("device", TEXT, "auto", "auto, ipu or emulated: the SDK that the programs import"),
    Option(
        "strict",
        YES_NO,
        None,
        "emulated SDK: what an IPU rejects is an error, not a warning; default: EMULATED_POD_STRICT of the caller",
    ),
    Option("run-dir", TEXT, None, "new or empty run folder for the log files; default: runs/<time>-launch-<program>"),
    Option(
        "grace",
        NUMBER,
        2.0,
        "seconds between SIGTERM and SIGKILL at an early end; 10 times that after a forwarded signal",
        minimum=0,
    ),
    Option("start-timeout", NUMBER, 120.0, "timeout of each start-up step, in seconds", minimum=0.1),
    Option("status-port", INT, 0, "port of the status endpoint on loopback; 0: any free one", minimum=0, maximum=65535),
    Option("allow-run-as-root", YES_NO, False, "accepted, without effect"),
    Option("synchronise-python-venv", YES_NO, False, "not supported, see below"),
    Option("synchronise-poplar-sdk", YES_NO, False, "not supported, see below"),
    Option("distribute-ssh-key", YES_NO, False, "not supported, see below"),
)
BY_KEY: Dict[str, Option] = {option.key: option for option in OPTIONS}
VIPU_KEYS = tuple(
    option.key
    for option in OPTIONS
    if "vipu" in option.name or option.name.endswith("-partition") or option.name == "sync-type"
)
NOT_EXPORTED = ("import_config", "export_config", "overwrite_config")
# Options that poprun does not have, and that choose no host.
_OWN = ("device", "strict", "run_dir", "grace", "start_timeout", "status_port")


@dataclasses.dataclass(frozen=True)
class Request:
    """A parsed command line: the value of every option (also as attributes), and the program with its arguments."""

    values: Dict[str, Any]
    given: Tuple[str, ...]  # keys set on the command line or in the imported file
    verbosity: int
    program: Tuple[str, ...]

    @property
    def is_plain(self) -> bool:
        """Whether no option of poprun is given: the program is no instance, and runs as without a launcher."""
        return not set(self.given) - {*_OWN, *NOT_EXPORTED}

    def __getattr__(self, key: str) -> Any:
        if key in BY_KEY:
            return self.values[key]
        raise AttributeError(key)


_METAVARS = {
    **dict.fromkeys(("hostfile", "cluster", "import-config", "export-config"), "FILE"),
    **dict.fromkeys(("executable-cache-path", "run-dir"), "FOLDER"),
    "device": "{auto,ipu,emulated}",
}
_YES, _NO = ("yes", "on", "true", "1", "y"), ("no", "off", "false", "0", "n")
_LETTERS = {option.letter: option for option in OPTIONS if option.letter}
_QUERIES = ("help", "version", "version-format")
_REFUSED = {
    "synchronise_python_venv": "use file_mounts and setup_commands of the cluster YAML",
    "synchronise_poplar_sdk": "install the SDK on every host, for example by setup_commands of the cluster YAML",
    "distribute_ssh_key": "Ray connects the hosts, not ssh",
}
_NOTES = (
    "PATH of the programs begins with the folder of the Python interpreter that runs this command; on other hosts, of",
    "metadata.raypod.python in the cluster YAML, else of Ray's interpreter. -x PATH and -x PATH=VALUE replace it.",
    "Without an option of poprun, PROGRAM runs as without a launcher: popdist.isPopdistEnvSet() is False.",
    "The slots of a host limit its instances, which are divided equally between the hosts.",
)


def parse(words: Sequence[str]) -> Tuple[Request, Optional[str]]:
    """Parse a command line; return the request, and the query (help, version, version-format) if there is one.

    Raises:
        ConfigError: An option is unknown or has an invalid value.
    """
    program = list(words)
    own, verbosity, query = _scan(program)
    given = {**(_read_file(own["import_config"]) if "import_config" in own else {}), **own}
    values = {**{option.key: option.default for option in OPTIONS}, **given}
    for key, instead in _REFUSED.items():
        if values[key]:
            raise ConfigError(f"--{BY_KEY[key].name}: raypod copies nothing to hosts; {instead}")
    return Request(values, tuple(given), verbosity, tuple(program)), query


def export(request: Request) -> str:
    """Return the options that were set, as YAML for `--import-config`, with the values of variables."""
    keys = [key for key in request.given if key not in NOT_EXPORTED]
    values = {BY_KEY[key].name: request.values[key] for key in keys}
    return yaml.safe_dump(
        {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}, sort_keys=False
    )


def parser() -> FlagParser:
    """Return the options as a parser for the completion of shells; `parse` reads a command line."""
    parser = FlagParser(prog="raypod launch")
    for option in OPTIONS:
        if option.letter == "x":
            parser.add_argument("-x", metavar="VAR", help=option.help)
            continue
        names = [f"--{option.name}", *([f"-{option.letter}"] if option.letter else [])]
        metavar = "{yes,no}" if option.kind == YES_NO else _METAVARS.get(option.name, option.kind)
        parser.add_argument(*names, metavar=metavar, help=option.help.replace("%", "%%"))
    parser.add_argument("program", metavar="FILE", nargs="*", help="the program and its arguments")
    return parser


def usage(prog: str) -> str:
    """Return the text of `--help`."""
    lines = [f"usage: {prog} [options] PROGRAM [ARGS...]", "", "Run PROGRAM in every instance, as poprun does.", ""]
    for option in OPTIONS:
        letter = f"-{option.letter}, " if option.letter else "    "
        name = f"{letter}--{option.name} {option.kind}" if option.letter != "x" else "-x VAR[=VALUE]"
        default = "" if option.default in (None, ()) else f" [{_text(option.default)}]"
        lines += _described(name, f"{option.help}{default}")
    lines += _described("-v, -vv", "log more details")
    lines += _described("--version, --version-format", "print the version of raypod")
    notes = [f"--{BY_KEY[key].name} is not supported: {instead}." for key, instead in _REFUSED.items()]
    for text in ("", *notes, "", " ".join(_NOTES)):
        lines += textwrap.wrap(text, _WIDTH) or [""]
    return "\n".join(lines)


def _described(name: str, text: str) -> List[str]:
    """Return the lines of an option in the help; a long name has a line of its own."""
    parts = textwrap.wrap(text, _WIDTH - _COLUMN, break_on_hyphens=False)
    if len(name) + 3 > _COLUMN:
        return [f"  {name}", *(f"{'':{_COLUMN}}{part}" for part in parts)]
    return [f"  {name if index == 0 else '':{_COLUMN - 2}}{part}" for index, part in enumerate(parts)]


def _scan(words: List[str]) -> Tuple[Dict[str, Any], int, Optional[str]]:
    """Remove the options before the program from the words; return their values, the verbosity and the query."""
    given: Dict[str, Any] = {}
    verbosity, query = 0, None
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        name = word.lstrip("-")
        if name in ("v", "vv", "vvv"):
            verbosity += len(name)
        elif name in (*_QUERIES, "h"):
            query = query or ("help" if name == "h" else name)
        else:
            option, text = _find(word)
            value = convert(option, _following(option, words) if text is None else text)
            given[option.key] = (*given.get(option.key, ()), value) if option.is_repeated else value
    if words[:1] == ["--"]:
        words.pop(0)
    return given, verbosity, query


def _find(word: str) -> Tuple[Option, Optional[str]]:
    """Return the option of a word, and its value if the word contains it."""
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


def _following(option: Option, words: List[str]) -> str:
    """Remove the value of an option from the words after it."""
    if option.kind == YES_NO:
        follows = words[0].lower() if len(words) > 1 else ""  # the last word is the program
        return words.pop(0) if follows in (*_YES, *_NO) else "yes"
    if not words or (option.kind != WORDS and words[0].startswith("--")):
        raise ConfigError(f"{_flag(option)} needs a value{f', not {words[0]}' if words else ''}")
    return words.pop(0)


def convert(option: Option, value: Any) -> Any:
    """Convert a value from text or YAML. Raise ConfigError if it is not valid for the option."""
    text = str(value)
    if option.kind == TEXT and not text:
        raise ConfigError(f"{_flag(option)} needs a value; it is empty")
    if option.kind in (TEXT, WORDS):
        return text
    if option.kind == YES_NO:
        if text.lower() in _YES or text.lower() in _NO:
            return text.lower() in _YES
        raise ConfigError(f"{_flag(option)} {text}: must be yes or no")
    try:
        number = int(text) if option.kind == INT else float(text)
    except ValueError:
        raise ConfigError(
            f"{_flag(option)} {text}: must be {'an integer' if option.kind == INT else 'a number'}"
        ) from None
    if not option.minimum <= number < math.inf:
        raise ConfigError(f"{_flag(option)} {text}: must be at least {option.minimum:g}")
    if number > option.maximum:
        raise ConfigError(f"{_flag(option)} {text}: must be at most {option.maximum:g}")
    return number


def _read_file(path: str) -> Dict[str, Any]:
    try:
        document = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"--import-config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--import-config {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document or {}, dict):
        raise ConfigError(f"--import-config {path}: must map options to their values")
    values: Dict[str, Any] = {}
    for name, value in (document or {}).items():
        option = BY_KEY.get(str(name).replace("-", "_"))
        if option is None or option.key in NOT_EXPORTED:
            _unknown(f"--{name}", f" in {path}")
        if isinstance(value, list) != option.is_repeated or isinstance(value, (dict, type(None))):
            raise ConfigError(f"{path}: {name} must have {'a list' if option.is_repeated else 'a single value'}")
        if option.key in values:
            raise ConfigError(f"{path}: {name} is given twice")
        values[option.key] = tuple(str(each) for each in value) if option.is_repeated else convert(option, value)
    return values


def _unknown(word: str, where: str = "") -> NoReturn:
    known = [f"--{option.name}" for option in OPTIONS if option.letter != "x"] + [f"--{query}" for query in _QUERIES]
    found = nearest(word, known)
    hint = f"; did you mean {found[0]}?" if found else ""
    raise ConfigError(f"unknown option {word}{where}{hint} (--help lists all options)")


def _flag(option: Option) -> str:
    return f"-{option.letter}" if option.letter == "x" else f"--{option.name}"


def _text(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


_QUOTES = "\"'"
_NETWORK = ("btl_tcp_if_include", "oob_tcp_if_include")
_IMPLIED = ("tag-output", "allow-run-as-root", "oversubscribe", "report-bindings", "display-map")
_REPLACEMENTS = {
    "np": "--num-instances",
    "n": "--num-instances",
    "H": "-H",
    "host": "--host",
    "hostfile": "--hostfile",
    "bind-to": "--numa-aware",
    "map-by": "--numa-aware",
    "rank-by": "no option: instances fill the hosts in order",
    "output-filename": "--run-dir, which has a log file per instance",
    "timestamp-output": "timestamps in the program itself",
    "wdir": "cd",
    "prefix": "-x PATH=... and -x LD_LIBRARY_PATH=...",
    "timeout": "timeout(1)",
}


@dataclasses.dataclass(frozen=True)
class MpiArguments:
    """Environment variables for all instances and for single ones, and the network between instances.

    A value of None stands for the caller's value.
    """

    for_all: Dict[str, Optional[str]]
    for_one: Dict[int, Dict[str, Optional[str]]]
    network: Optional[str]  # CIDR or interface name

    def missing(self, caller: Dict[str, str]) -> List[str]:
        """Return the variables that take the caller's value, which has none."""
        all_variables = [pair for each in (self.for_all, *self.for_one.values()) for pair in each.items()]
        return sorted({name for name, value in all_variables if value is None and name not in caller})

    def environment(self, instance: int, caller: Dict[str, str]) -> Dict[str, str]:
        """Return the variables of one instance, without those that the caller does not have (as mpirun does)."""
        both = {**self.for_all, **self.for_one.get(instance, {})}
        values = {name: caller.get(name) if value is None else value for name, value in both.items()}
        return {name: value for name, value in values.items() if value is not None}


def parse_mpi_arguments(request: Request) -> MpiArguments:
    """Parse `-x`, `--mpi-global-args`, `--mpi-local-args` and `--instance-mpi-local-args`.

    Raises:
        ConfigError: An argument requires MPI, or an instance does not exist.
    """
    for_all = dict(_variable(text, "-x") for text in request.x)
    network: Optional[str] = None
    for option in ("mpi_global_args", "mpi_local_args"):
        for text in getattr(request, option):
            variables, found = _parse(text, f"--{option.replace('_', '-')}")
            for_all.update(variables)
            network = found or network
    for_one: Dict[int, Dict[str, Optional[str]]] = {}
    for text in request.instance_mpi_local_args:
        index, colon, arguments = text.partition(":")
        if not colon or not index.strip().isdecimal() or int(index) >= request.num_instances:
            raise ConfigError(
                f'--instance-mpi-local-args {text}: must be INSTANCE:"-x VAR=VALUE" with an instance '
                f"from 0 to {request.num_instances - 1}"
            )
        variables, own_network = _parse(arguments.strip().strip(_QUOTES), "--instance-mpi-local-args")
        if own_network:
            raise ConfigError(f"--instance-mpi-local-args {text}: all instances use one network; use --host-subnet")
        for_one.setdefault(int(index), {}).update(variables)
    return MpiArguments(for_all, for_one, network)


def without_values(request: Request) -> Request:
    """Return the request without the values of variables, which can be secrets: each takes the caller's value."""
    changed: Dict[str, Any] = {"x": tuple(each.partition("=")[0] for each in request.x)}
    for option in ("mpi_global_args", "mpi_local_args"):
        changed[option] = tuple(_names_only(text, option) for text in getattr(request, option))
    pairs = (text.partition(":") for text in request.instance_mpi_local_args)
    option = "instance_mpi_local_args"
    changed[option] = tuple(f"{index}:{_names_only(text.strip().strip(_QUOTES), option)}" for index, _, text in pairs)
    return dataclasses.replace(request, values={**request.values, **changed})


def _names_only(text: str, option: str) -> str:
    words = _split(text, option)
    for at, word in enumerate(words):
        name, _, value = word.lstrip("-").partition("=")
        if name == "x" and value:
            words[at] = f"-x={value.partition('=')[0]}"
        elif name == "x" and at + 1 < len(words):
            words[at + 1] = words[at + 1].partition("=")[0]
    return shlex.join(words)


def _parse(text: str, option: str) -> Tuple[Dict[str, Optional[str]], Optional[str]]:
    variables: Dict[str, Optional[str]] = {}
    network: Optional[str] = None
    words = _split(text, option)
    while words:
        name, _, value = words.pop(0).lstrip("-").partition("=")
        if name == "x":
            variables.update([_variable(value or _next(words, option, "-x"), option)])
        elif name in ("mca", "gmca"):
            parameter, value = _next(words, option, "--mca"), _next(words, option, "--mca")
            if parameter not in _NETWORK:
                raise ConfigError(f"{option}: --mca {parameter}: not supported without MPI")
            network = value
        elif name not in _IMPLIED:
            instead = f"; use {_REPLACEMENTS[name]}" if name in _REPLACEMENTS else ""
            raise ConfigError(f"{option}: {name!r} is not supported without mpirun{instead}")
    return variables, network


def _split(text: str, option: str) -> List[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def _next(words: List[str], option: str, after: str) -> str:
    if not words:
        raise ConfigError(f"{option}: {after} needs a value")
    return words.pop(0)


def _variable(text: str, option: str) -> Tuple[str, Optional[str]]:
    name, equals, value = text.partition("=")
    if not name or " " in name:
        raise ConfigError(f"{option} {text}: must be VAR or VAR=VALUE")
    return name, value if equals else None
