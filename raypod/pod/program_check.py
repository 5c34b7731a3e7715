"""`raypod doctor --program COMMAND`: run a program on the emulated SDK until the end of its first call.

The SDK writes what an IPU would refuse, or what it cannot know itself, to a file (`poptorch.findings`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

from raypod.errors import ConfigError
from raypod.plan.environment import join_path
from raypod.pod.findings import OK, TROUBLE, WARN, Finding, counts_of, table_rows
from raypod.runtime.launcher.host_process import HostProcess
from raypod.runtime.launcher.records import Program, ProgramEnd
from raypod.runtime.launcher.supervision import Signals
from raypod.system import command_line as cli
from raypod.system.log_files import LastLine
from raypod.system.sdk import activation, sdk_for_programs

TIMEOUT_S = 300.0
_GRACE_S = 10.0  # for a program to clean up after its call, and again after SIGTERM
_IPUS = "64"  # that the SDK reports; a program may check them before it starts
_POLL_S = 0.1


@dataclasses.dataclass
class Outcome:
    """What a program did.

    Attributes:
        findings: what the SDK recorded; `host` is the place in the program.
        events: the last events of the SDK by name: "compilation", "call", "end".
        end: how the program ended; None if it was ended for its time.
        last_line: of its output.
    """

    findings: List[Finding] = dataclasses.field(default_factory=list)
    events: Dict[str, Dict[str, Any]] = dataclasses.field(default_factory=dict)
    end: Optional[ProgramEnd] = None
    last_line: str = ""


def check_program(command: str, timeout_s: float) -> List[Finding]:
    """Run a command as a program, and return the findings.

    Raises:
        ConfigError: there is no such program, or it ended without a call or a compilation of a model.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--program {command}: {error}") from None
    if not words:
        raise ConfigError("--program is empty: give a command, as in --program 'python main.py'")
    if not 0 < timeout_s < float("inf"):
        raise ConfigError(f"--timeout {timeout_s:g}: must be a positive number of seconds")
    with Signals().handled(), tempfile.TemporaryDirectory(prefix="raypod-doctor-") as folder:
        outcome = _run(words, Path(folder), timeout_s)
    return conclude(outcome, timeout_s)


def _run(words: Sequence[str], folder: Path, timeout_s: float) -> Outcome:
    """Run the program until it ends, at most for a time, and end all processes that it leaves."""
    file, log, temporary = folder / "findings", folder / "output", folder / "tmp"
    temporary.mkdir()
    log.touch()
    program = Program(0, tuple(words), _environment(file, temporary), str(Path.cwd()), reads_stdin=False)
    last_line, outcome, process = LastLine(log), Outcome(), HostProcess()
    ends_at_s = time.monotonic() + timeout_s
    try:
        process.start([program], _GRACE_S)
        with log.open("ab", buffering=0) as output:
            while outcome.end is None and time.monotonic() < ends_at_s:
                report = process.read(_POLL_S)
                for _, _, data in report.chunks:
                    output.write(data)
                outcome.end = next(iter(report.ends), None)
                if "end" not in outcome.events:
                    _read(file, outcome)
                    if "end" in outcome.events:  # the program cleans up
                        ends_at_s = min(ends_at_s, time.monotonic() + _GRACE_S)
            for _, _, data in process.read(0.0).chunks:
                output.write(data)
    finally:
        process.close()
    _read(file, outcome)
    outcome.last_line = last_line.read() or ""
    return outcome


def _environment(file: Path, temporary: Path) -> Dict[str, str]:
    paths = sdk_for_programs("emulated")[1]
    return {
        **activation.settings(ipus=_IPUS),
        **os.environ,
        # As raypod launch: Python programs run with this interpreter; its environment may not be activated.
        "PATH": join_path(str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)),
        "PYTHONPATH": join_path(*paths, os.environ.get("PYTHONPATH", "")),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(temporary),
        **activation.settings(strict=True, findings=str(file)),
    }


def _read(file: Path, outcome: Outcome) -> None:
    outcome.findings, outcome.events = [], {}
    lines = file.read_text().splitlines() if file.exists() else []
    for line in map(json.loads, lines):
        if "event" in line:
            outcome.events[line["event"]] = line
            continue
        outcome.findings += _findings(line)


def _findings(line: Dict[str, Any]) -> Iterator[Finding]:
    """Yield the finding of a line of the file for each of its places: "module, file:line", "file:line" or "module"."""
    for place in line["places"] or [""]:
        module, separator, where = place.rpartition(", ")
        text = f"{line['text']} (in {module})" if separator else line["text"]
        yield Finding(line["level"], where, line["what"], text)


def conclude(outcome: Outcome, timeout_s: float) -> List[Finding]:
    """Return all findings about what a program did, those that prevent a run first.

    Raises:
        ConfigError: nothing is known, as the program ended before a model was compiled.
    """
    events, end = outcome.events, outcome.end
    if not events:
        raise ConfigError(f"--program: {_without_call(outcome, timeout_s)}")
    found = list(outcome.findings)
    if "end" in events:
        found.append(_call(events["end"], events["call"]["limit_s"]))
    elif end is None:
        what = "call" if "call" in events else "compilation"
        text = f"not finished after {timeout_s:g} s: what would follow is not checked"
        found.append(Finding(WARN, "", what, text, "use fewer samples, or --timeout S"))
    elif not any(each.level == TROUBLE and each.what in events for each in found):
        if "call" in events or end.exit_code:
            text = f"the program ended before the end of its first call ({end.cause}): {outcome.last_line}"
            found.append(Finding(TROUBLE, "", "call" if "call" in events else "program", text))
        else:
            found.append(Finding(OK, "", "call", "the program compiles a model, and makes no call"))
    order = (TROUBLE, WARN, OK)
    return sorted(dict.fromkeys(found), key=lambda each: order.index(each.level))


def _without_call(outcome: Outcome, timeout_s: float) -> str:
    end = outcome.end
    if end is None:
        return f"no call of a PopTorch model within {timeout_s:g} s; --timeout S allows more"
    if end.cause.startswith("cannot start"):
        return end.cause
    if end.exit_code:
        return f"the program failed before its first call ({end.cause}): {outcome.last_line}"
    return "the program ended without a call of a PopTorch model"


def _call(end: Dict[str, Any], limit_s: float) -> Finding:
    """Return the finding about the duration of the first call."""
    text = (
        f"micro-batches: {end['micro_batches']}; {end['call_s']:.1f} s on this CPU, after a compilation of "
        f"{end['compile_s']:.1f} s; the time on an IPU is not known"
    )
    if end["call_s"] < limit_s:
        return Finding(OK, "", "call", f"{text}, the limit there is {limit_s:g} s")
    remedy = "use fewer device iterations, or raise target.hostSyncTimeout of POPLAR_ENGINE_OPTIONS"
    return Finding(WARN, "", "call", f"{text}; an IPU ends calls of more than {limit_s:g} s", remedy)


def render(findings: Sequence[Finding], width: Optional[int] = None) -> str:
    """Return the findings as a table with a summary line; `width` of a terminal folds longer ones."""
    rows = table_rows(findings, "where", lambda places: cli.shortened([place for place in places if place]))
    verdict = "not ready" if any(each.level == TROUBLE for each in findings) else "no trouble found"
    return "\n".join([*cli.format_table(rows, width=width), "", f"{verdict}: {counts_of(findings)}"])
