"""`raypod --help`, the dispatch of subcommands, errors with their exit codes, and completion in bash."""

from __future__ import annotations

import importlib.util
import io
import json
import pickle
import shlex
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, List, NoReturn

import pytest

from raypod import errors
from raypod.__main__ import main
from raypod.cli import table
from raypod.errors import ConfigError, Preempted, RunError, as_utf8, summarize_exception
from raypod.runtime.workers.fleet import FleetBroken
from raypod.system.command_line import FlagParser, counted, format_table, nearest, report_errors, suggestion
from tests.support import ROOT
from tests.support.log_folders import RunFolder
from tests.support.run_folders import write_run

LIGHT = ["--help", "version --help", "logs --help", "status --help", "verify-data --help", "monitor --once"]


@pytest.mark.parametrize("name", table.COMMANDS)
def test_every_command_and_every_flag_is_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = table.COMMANDS[name]
    assert command.parser().prog == f"raypod {name}"
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert f"  {name.ljust(13)}{command.summary}\n" in text
    assert max(map(len, text.splitlines())) <= 80
    if name != "launch":  # of poprun
        assert all(action.help for action in command.parser()._actions)


def test_train_and_launch_are_the_modules_of_their_names_and_version_prints_all(capsys: Any) -> None:
    assert main(["version"]) == 0
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert found["python"] == sys.version.split()[0]
    assert {"torch", "numpy", "ray", "poptorch"} <= {*found}
    assert main(["--version"]) == 0
    assert main(["version", "all"]) == 2
    assert main(["train", "-q", "-v", "--dry-run"]) == 2
    assert "--quiet and --verbose contradict each other" in capsys.readouterr().err
    assert main(["launch", "--version"]) == 0
    assert capsys.readouterr().out.startswith("raypod")


@pytest.mark.parametrize("command", ["status", "stop", "attach", "logs", "evaluate", "verify-data"])
def test_the_files_of_a_run_folder_cannot_control_the_terminal(command: str, tmp_path: Path, capfd: Any) -> None:
    bad = "a\x1b]0;title\x07b\x1b]52;c;cm0=\x1b\\c\x1b[2J\x9b2Jd\u202e"
    folder = tmp_path / bad
    write_run(folder)
    state = {"pid": 1, "started_ticks": 0, "host": socket.gethostname(), "state": "failed", "exit_code": 0}
    state.update(message=bad, samples_are=bad, loss=1.0, update=1, total_updates=1)
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "config.yaml").write_text(f"data: {{dataset: {json.dumps(bad)}}}\n")
    (folder / "logs").mkdir()
    for name in ("coordinator", "instance-0"):
        (folder / "logs" / f"{name}.log").write_text(f"10 %\r{bad}\n")
    main([command, str(folder)])
    shown = "".join(capfd.readouterr())
    assert "abc" in shown
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*shown}


@pytest.mark.parametrize("line", LIGHT)
def test_the_help_imports_neither_torch_nor_ray(processes: None, line: str, tmp_path: Path) -> None:
    heavy = "sorted({'torch', 'ray', 'numpy', 'torchvision'} & set(sys.modules))"
    run = f"try: main({line.split()!r})\nfinally: print({heavy}, file=sys.stderr)"
    code = f"import sys; from raypod.__main__ import main\n{run}"
    words: List[str] = [sys.executable, "-c", code]
    ended = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60)
    assert (ended.returncode, ended.stderr.decode().split("\n")[-2]) == (0, "[]")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("monitor --intervall", "unknown flag --intervall; did you mean --interval?; raypod monitor --help lists all"),
        ("export --formt onnx", "unknown flag --formt; did you mean --format?; raypod export --help lists all"),
        ("up --wait-host=3", "unknown flag --wait-host; did you mean --wait-hosts?; raypod up --help lists all"),
        ("doctor --clutser f", "unknown flag --clutser; did you mean --cluster?; raypod doctor --help lists all"),
        ("version --zzz", "unknown flag --zzz; raypod version --help lists all"),
        ("lr-range --updatse 5", "unknown flag --updatse; did you mean --updates?; raypod lr-range --help lists all"),
        ("train --epohcs 3", "unknown flag --epohcs; did you mean --epochs?; raypod train --help lists all"),
        ("report nowhere --output x else", "nowhere does not exist"),  # flags and words in any order
        ("mointor", "unknown command mointor; did you mean monitor?; raypod --help describes them"),
    ],
)
def test_a_misspelt_word_names_the_nearest(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr() == ("", f"raypod: error: {message}\n")
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: raypod COMMAND")


INLINE = "--fleet inline --device emulated --model tiny --run-dir run"
MISTAKES = {
    "compare": "RUN",
    "compare a": "two different runs",
    "compare a none": "none",
    "completion bsah": "completion bsah: no such shell; did you mean bash?",
    **{
        f"{command} file:///store": f"{command} file:///store: the command reads a folder of this host, not a URL; `ray"
        for command in ("status", "attach", "stop", "logs", "monitor", "dashboard")
    },
    "status s3://key:secret@bucket/run": "status s3://...: a URL holds no credentials",
    "dashboard": "dashboard runs: the folder does not exist",
    "dashboard missing": "dashboard missing: the folder does not exist; give the folder that holds the runs",
    "dashboard file": "dashboard file: is not a folder; give the folder that holds the runs",
    "dashboard . --port 70000": "--port 70000: must be a port number",
    "dashboard . --port x": "--port x: must be a port number",
    "dashboard . --port {port}": "--port {port}: Address already in use; choose another port",
    "dashboard . --open": "unknown flag --open",
    "logs logged --instance 2": "--instance 2: the run has the instances 0, 1",
    "logs logged --instance 1-0": "--instance 1-0: must be numbers or ranges",
    "logs logged --instance a": "--instance a: must be",
    "logs logged --instance 0-99999999999": "too many",
    "logs logged --tail -1": "--tail -1: must be a number of lines",
    "logs logged --since soon": "--since soon: must be an age",
    "logs logged --events updates": "no kind of event",
    "logs logged --cluster /nothing.yaml": "cannot read the cluster file",
    "logs logged --colour": "unknown flag --colour",
    "logs logged/logs": "not the folder of a run or a launch: it has no plan.json",
    "logs logged/nowhere": "does not exist",
    'doctor --program "a \'b"': "",
    "doctor --program=": "",
    "doctor --program a --timeout 0": "",
    f"lr-range {INLINE} --lr-schedule step": "omit --lr-schedule",
    f"lr-range {INLINE} --resume runs/x": "lr-range begins at the first update: omit --resume",
    f"lr-range {INLINE} run.resume=runs/x": "lr-range begins at the first update: omit --resume",
    f"lr-range {INLINE} --detach": "omit --detach",
    f"lr-range {INLINE} --updatse 5": "did you mean --updates?",
    "monitor nothing-here": "monitor nothing-here: the run folder does not exist",
    "monitor .": "monitor .: the folder holds no run",
    "monitor --cluster nothing.yaml": "cannot read the cluster file nothing.yaml",
    "monitor --interval 0": "--interval 0: must be from 0.1 to 60 seconds",
    "monitor --interval nan": "--interval nan: must be",
    "monitor --follow": "--follow needs --json",
    "monitor --once --json": "use one of them",
    "monitor . --cluster x": "RUN and --cluster exclude each other",
    "monitor --bad": "unknown flag --bad",
    "report": "the following arguments are required",
    "report missing": "missing does not exist",
    "report parent": "is no run folder",
    "report {long}": "File name too long",
    "status {long}": "File name too long",
    "train --fleet inline --run-dir run --resume {long}": "File name too long",
    "report a --output .": "is a folder",
    "report a --output ''": "--output is empty; name a file",
    "report a --output none/report.html": "cannot write none/report.html",
    f"train {INLINE} --tracker mlflow": "pip install 'raypod[mlflow]'",
    f"train {INLINE} --tracker tensorboard --tracker wandb": "pip install 'raypod[wandb]'",
    f"train {INLINE} --tracker mlfow": "known are tensorboard, mlflow, wandb, or module:Class",
    f"train {INLINE} --tracker mlflow,mlflow": "listed twice",
    f"train {INLINE} --tracker no_such_module:Tracker": "run.trackers = 'no_such_module:Tracker'",
    f"train {INLINE} --tracker-artifacts some": "run.tracker_artifacts",
    f"train {INLINE} --detach-as ray-job": "--fleet inline does not use Ray",
    f"train {INLINE} --detach-as nohup": "invalid choice",
    "train --fleet inline --run-dir run --batch-sice 3": "",
    f"train --run-dir run --replicas 6 --num-instances 4 --cluster {ROOT}/cluster/pod16.yaml": "",
    "train --fleet inline --run-dir run --dataset digitz": "",
    "train --fleet inline --run-dir run --model resnet9": "",
    "train --fleet inline --run-dir run --batch-size 5000": "",
    "train --fleet inline --run-dir run --device ipu": "",
    "train --fleet inline --run-dir run --collectives horovod": "Horovod with torch support is not installed",
    "train --run-dir run --collectives horovod": "Horovod with torch support is not installed",
    "train --fleet inline --run-dir run --resume /nowhere": "",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(line: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    found, run = importlib.util.find_spec, RunFolder(tmp_path / "logged")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("mlflow", "wandb") else found(name))
    monkeypatch.chdir(tmp_path)
    for instance in (0, 1):
        run.log(instance, "a line\n", 110)
    for name in ("a", "b", "parent/one"):
        write_run(tmp_path / name)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(shlex.split(line.format(port=port, long=300 * "x"))) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines()), sorted(tmp_path.rglob("*"))) == ("", 1, before)
    assert err.startswith("raypod: error: ")
    assert MISTAKES[line].format(port=port) in err


@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_a_reader_that_ends_early_is_no_traceback(processes: None, flags: List[str]) -> None:
    line = [sys.executable, *flags, "-m", "raypod", "files", "pod64"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize(
    "words",
    [
        *("status {}", "stop {}", "logs {}", "logs {} --events all", "report {}", "verify-data {}", "evaluate {}"),
        *("average {}", "train --resume {} --dry-run", "monitor {} --once", "attach {}"),
    ],
)
def test_deeply_nested_files_of_a_run_folder_are_damaged_files(words: str, tmp_path: Path, capfd: Any) -> None:
    folder = tmp_path / "run"
    write_run(folder)
    deep = "[" * 5_000 + "]" * 5_000
    checkpoint = folder / "checkpoints" / "update-00000020"
    checkpoint.mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "logs" / "coordinator.log").touch()
    for path in (checkpoint / "manifest.json", *folder.glob("*.json"), *folder.glob("*.jsonl")):
        path.write_text(f'{{"event": {deep}}}\n')
    (folder / "ledger.jsonl").write_text(deep)
    code = main(words.format(folder).split())
    assert code in (0, 1, 2)
    (folder / "config.yaml").write_text(f"task: {deep}\n")
    assert main(words.format(folder).split()) == code or words.startswith("train")
    capfd.readouterr()


@pytest.mark.parametrize("module", ["raypod.train", "raypod.launch"])
def test_an_interrupt_of_the_imports_of_a_module_is_one_line(processes: None, module: str) -> None:
    code = (
        "import runpy, sys\n"
        "class Interrupt:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'raypod.plan.placement': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt)\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "raypod: interrupted\n")


ROWS = [("host", "IPUs"), ("a", "0..15"), ("long-name", "16")]


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no"), 2), (RunError("no"), 1), (KeyboardInterrupt(), 130)])
def test_an_error_is_one_line_and_an_exit_code(error: BaseException, code: int, capsys: Any) -> None:
    def command() -> NoReturn:
        raise error

    assert report_errors(command) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_warning_of_raypod_is_one_line_and_others_have_their_place(capsys: Any) -> None:
    own, before = str(ROOT / "raypod" / "training" / "data" / "feed.py"), warnings.formatwarning

    def command() -> int:
        for category, place in ((RuntimeWarning, own), (RuntimeWarning, "mine.py"), (FutureWarning, own)):
            sys.stderr.write(warnings.formatwarning(category("read\nagain"), category, place, 7))
        return 0

    assert report_errors(command) == 0
    line, *others = capsys.readouterr().err.splitlines()
    assert line == "raypod: warning: read again"
    assert [each for each in others if "Warning" in each] == [
        "mine.py:7: RuntimeWarning: read",
        f"{own}:7: FutureWarning: read",
    ]
    assert warnings.formatwarning is before


def test_an_error_that_a_full_disk_does_not_take_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> NoReturn:
        raise Preempted("the machine is taken away", 99)

    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stderr", full)
        assert report_errors(command) == 99
        full.flush()  # as Python does at its end, which would change the exit code


@pytest.mark.parametrize(
    ("encoding", "errors"), [("utf-8", "strict"), ("ascii", "strict"), ("ascii", "surrogateescape")]
)
def test_names_that_the_encoding_does_not_have_are_printed(monkeypatch: Any, encoding: str, errors: str) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding, errors))

    def command() -> int:
        print("caf\udce9 2 × 3")  # noqa: T201
        return 0

    assert report_errors(command) == 0
    assert written.getvalue().endswith(b" 3\n")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_error_shows_bytes_that_are_not_utf8_as_messages_do(monkeypatch: Any, encoding: str) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(written, encoding, "backslashreplace"))

    def command() -> int:
        raise ConfigError("caf\udce9 does not exist")

    assert report_errors(command) == 2
    assert written.getvalue().endswith(b"caf\\xe9 does not exist\n")


def test_texts_with_foreign_bytes_and_plurals() -> None:
    assert as_utf8("caf\udce9 é \ud800") == "caf\\xe9 é \\ud800"
    assert summarize_exception(OSError("caf\udce9")) == "OSError: caf\\xe9"
    assert [counted(number, "host") for number in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]


def test_a_wrong_flag_is_a_config_error() -> None:
    parser = FlagParser(prog="test")
    parser.add_argument("--count", type=int)
    with pytest.raises(ConfigError, match=r"--count: invalid int value: 'x' \(test --help lists all flags\)"):
        parser.parse_args(["--count", "x"])


def test_similar_names_are_suggested() -> None:
    assert nearest("spead", ["spread", "speed", "other"], count=2) == ["spread", "speed"]
    assert suggestion("spead", ["speed", "other"]) == "; did you mean speed?"
    assert suggestion("zzz", ["speed", "other"]) == "; known: speed, other"
    assert nearest("--lr", ["--lrs", "--learning-rate"], count=2) == ["--learning-rate", "--lrs"]
    assert nearest("lr", ["lrs", "speed"]) == ["lrs"], "a command without that flag"


def test_a_table_has_aligned_columns_of_which_the_last_is_folded() -> None:
    assert format_table(ROWS) == ["host       IPUs", "a          0..15", "long-name  16"]
    assert format_table(ROWS[:2], least_widths=(6,), separator=" ") == ["host   IPUs", "a      0..15"]
    edge = "+------+-------+"
    assert format_table(ROWS[:2], boxed=True) == [edge, "| host | IPUs  |", edge, "| a    | 0..15 |", edge]
    path = "/a/path/that-is-longer-than-the/terminal"
    rows = [("a", "b", "one two three four five"), ("aa", "bb", path), ("", "", "")]
    lines = ["a   b   one two three four", "        five", f"aa  bb  {path}", ""]
    assert format_table(rows, width=28) == lines
    assert format_table(rows, width=1) == format_table(rows, width=28)  # no column is narrower than a few words
    assert format_table(rows) == format_table(rows, width=80)


def every_class(base: type = errors.RaypodError) -> list[type]:
    return [base, *(each for child in base.__subclasses__() for each in every_class(child))]


EXAMPLES = {
    errors.DataUnreadable: errors.DataUnreadable(3, "h1", 60.0, "OSError: [Errno 116] Stale file handle"),
    errors.InstanceFailed: errors.InstanceFailed(3, "h1", "it died", "logs/instance-3.log"),
    errors.FunctionFailed: errors.FunctionFailed(3, "h1", "ValueError: x", "", "Traceback"),
    errors.ProgramFailed: errors.ProgramFailed(3, "h1", "exit code 4", "logs/instance-3.log", 4),
    FleetBroken: FleetBroken((), "rank 1 has lost rank 0"),
    errors.CollectiveBroken: errors.CollectiveBroken(1, "the barrier: lost the connection"),
    errors.DeviceFailed: errors.DeviceFailed(1, "the call: RecoverableError", "IPU_RESET"),
    errors.HostLost: errors.HostLost("h1", (2, 3), "no answer", "logs"),
    errors.PeerLost: errors.PeerLost(1, "h2", 0, "h1", "it closed the connection"),
    errors.WaitTimedOut: errors.WaitTimedOut("the actors", 5.0, "run.start_timeout_s"),
    errors.CheckpointDamaged: errors.CheckpointDamaged("checkpoints/update-00000044", "it ends too early"),
    errors.CheckpointNotSaved: errors.CheckpointNotSaved("checkpoints/update-00000044", "No space left", "make room"),
    errors.LossNotFinite: errors.LossNotFinite(float("inf"), 43, 44, "go on from update-00000022"),
    errors.WeightsDiffer: errors.WeightsDiffer({0: "aa", 1: "bb"}),
    errors.LeaseHeld: errors.LeaseHeld("runs/a", "pid 7 on host h1", "--take-over ends it"),
    errors.FolderLost: errors.FolderLost("runs/a"),
    errors.LeaseLost: errors.LeaseLost("runs/a", "pid 8 on host h2"),
}


@pytest.mark.parametrize("kind", every_class(), ids=lambda kind: kind.__name__)
def test_every_error_can_be_pickled_and_has_an_exit_code(kind: type) -> None:
    error = EXAMPLES.get(kind) or kind("what happened")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (kind, str(error), vars(error))
    of_program = kind is errors.ProgramFailed
    assert error.exit_code == (4 if of_program else 2 if issubclass(kind, errors.UserError) else 1)


def test_an_exception_is_summarized_in_one_line() -> None:
    text = "instance 3 on host h1 failed: it died; its log: logs/instance-3.log"
    assert str(EXAMPLES[errors.InstanceFailed]) == text
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File x\n"
    for error, summary in (
        (ValueError("no sample\n  7"), "ValueError: no sample 7"),
        (pickle.PicklingError("x"), "_pickle.PicklingError: x"),
        (ValueError(f"{text}ValueError: no sample 7\n"), "ValueError: no sample 7 (in DataLoader worker process 0)"),
    ):
        assert errors.summarize_exception(error) == summary


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "raypod.bash"
    code = (
        "import sys; from raypod.__main__ import main; main(['completion', 'bash']); "
        "print(sorted({'torch', 'ray'} & set(sys.modules)), file=sys.stderr)"
    )
    with file.open("wb") as out:
        words = [sys.executable, "-c", code]
        ended = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, timeout=60, check=True)
    assert ended.stderr == b"[]\n"
    return file


_COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
name=$(complete -p raypod); name=${name#*-F }
${name% *} raypod "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf "%s\\n" "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("raypod tr", ["train"]),
        ("raypod train --num-i", ["--num-instances", "--num-ipus"]),
        ("raypod train --precision ", ["16.16", "16.32", "32.32"]),
        ("raypod train --data-dir fo", ["folder"]),
        ("raypod train --cluster fi", ["file.yaml"]),
        ("raypod plan --js", ["--json"]),
        ("raypod launch --print-topology ", ["yes", "no"]),
        ("raypod report fo", ["folder"]),
    ],
)
def test_bash_completes(processes: None, line: str, offered: List[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.yaml").touch()
    shell = ["bash", "--norc", "-c", _COMPLETE, "bash", str(script), *line.split(" ")]
    ended = subprocess.run(shell, stdout=subprocess.PIPE, cwd=str(tmp_path), timeout=30, check=True)
    assert ended.stdout.decode().split() == offered
