"""The layout of a run folder: one table of its files, with what writes each of them and what is done with it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Tuple

from typing_extensions import Literal

CONFIG, SEAL, PLAN = "config.yaml", "config.seal", "plan.json"
METRICS, EVALUATIONS, LEDGER, EVENTS = "metrics.jsonl", "evaluations.jsonl", "ledger.jsonl", "events.jsonl"
STATE, SUMMARY, TEST, REPORT, PROFILE = "state.json", "summary.json", "test.json", "report.html", "profile.json"
STORAGE, COPIES = "storage.json", "copies.json"  # the identity of the run on a storage, and on other hosts
LAUNCH, LAUNCH_OPTIONS, TOKEN_FILE = "launch.json", "launch.yaml", "status-token"
CHECKPOINTS, LOGS, TENSORBOARD, MEDIA = "checkpoints", "logs", "tensorboard", "media"  # folders
TRACKERS = "trackers"  # a folder, too

Use = Literal[
    "mark",  # a folder with it is that of a run
    "launch",  # a folder with it is that of a launch
    "resume",  # a run resumes from it: it goes to a storage and to other hosts with each checkpoint
    "copy",  # to other hosts as it is, with each checkpoint
    "mirror",  # to a storage
    "undo",  # put back, or removed, when a command ends before the first update of its run
    "show",  # read by the report and the dashboard
]


class RunFile(NamedTuple):
    """A file, or a folder of files."""

    name: str
    writer: str  # the module of raypod
    uses: Tuple[Use, ...] = ()


# In the order in which files are copied: a line of the ledger is written before that of the metrics.
TABLE = (
    RunFile(CONFIG, "runs/run_folder", ("resume", "copy", "undo", "show")),
    RunFile(SEAL, "runs/run_folder", ("resume", "copy", "undo")),
    RunFile(PLAN, "runs/run_folder", ("mark", "resume", "copy", "undo", "show")),
    RunFile(METRICS, "runs/sinks", ("mark", "resume", "copy", "show")),
    RunFile(EVALUATIONS, "runs/sinks", ("resume", "copy", "undo", "show")),
    RunFile(LEDGER, "runs/ledger", ("resume", "copy")),
    RunFile(EVENTS, "runs/event_log", ("mark", "resume", "copy", "undo", "show")),
    RunFile(STATE, "runs/run_state", ("mark", "resume", "undo", "show")),
    RunFile(COPIES, "runs/upload/copies", ("copy",)),
    RunFile(STORAGE, "runs/upload/mirror_record", ("copy", "undo")),
    RunFile(REPORT, "observe/report/command", ("mirror",)),
    RunFile(PROFILE, "runs/profile", ("mirror",)),
    RunFile(LAUNCH, "observe/status/launch_status", ("launch", "mirror")),
    RunFile(TEST, "runs/sinks", ("mirror", "show")),
    RunFile(SUMMARY, "runs/run_folder", ("show",)),  # goes to a storage last, with the counts of the mirror
    RunFile(LAUNCH_OPTIONS, "launch", ("launch",)),
    RunFile(TOKEN_FILE, "observe/status/endpoint"),
    RunFile(CHECKPOINTS, "training/checkpoint/storage"),
    RunFile(LOGS, "runs/run_folder"),
    RunFile(TENSORBOARD, "runs/sinks"),
    RunFile(MEDIA, "runs/media"),
    RunFile(TRACKERS, "observe/trackers/companions"),
)
MIRRORED_FOLDERS = (LOGS, TENSORBOARD, MEDIA)  # as a whole; checkpoints are mirrored one by one


def names(*uses: Use) -> Tuple[str, ...]:
    """Return the names of the files that have one of these uses, in the order of the table."""
    return tuple(file.name for file in TABLE if set(uses) & set(file.uses))


def is_run_folder(folder: Path, launches: bool = False) -> bool:
    """Return whether a folder is that of a training run, or also of a launch."""
    marks = names("mark", "launch") if launches else names("mark")
    return any((folder / name).is_file() for name in marks)
