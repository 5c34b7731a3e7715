"""The subcommands of `raypod`: their names, groups, descriptions, and where they are implemented."""

from __future__ import annotations

import importlib
from typing import Callable, Dict, NamedTuple, Sequence

from raypod.system.command_line import FlagParser


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        summary: one line for `raypod --help`.
        module, builder: the function that returns its parser, whose `run` is the command.
        has_task: whether the flags depend on the task of the command line, with which the parser is built.
        main: the function of the module that runs the words instead, where more than parsing comes before `run`.
    """

    summary: str
    module: str
    builder: str = "parser"
    has_task: bool = False
    main: str = ""

    def parser(self, words: Sequence[str] = ()) -> FlagParser:
        """Import the command and return the parser of a command line."""
        build: Callable[..., FlagParser] = getattr(importlib.import_module(self.module), self.builder)
        return build(words) if self.has_task else build()

    def run(self, words: Sequence[str]) -> int:
        """Import the command, run it and return its exit code."""
        if self.main:
            return int(getattr(importlib.import_module(self.module), self.main)(words))
        parser = self.parser(words)
        return parser.run(parser.parse_args(words))


GROUPS: Dict[str, Dict[str, Command]] = {
    "Run": {
        "train": Command("train a model on this host or on a pod", "raypod.train", has_task=True, main="command"),
        "launch": Command("start any program in every instance, as poprun does", "raypod.launch", main="main"),
        "lr-range": Command(
            "find a learning rate with a short training", "raypod.cli.lr_range", has_task=True, main="main"
        ),
        "compile": Command(
            "compile a training without a pod, and estimate its memory", "raypod.cli.compile", has_task=True
        ),
        "plan": Command(
            "print what a training would run where, and its memory",
            "raypod.cli.runs",
            "plan_parser",
            has_task=True,
        ),
    },
    "Pod": {
        "doctor": Command("check whether the hosts are ready for a run", "raypod.pod.doctor", has_task=True),
        "up": Command("start Ray on the hosts of a cluster file", "raypod.pod.up", "up_parser"),
        "down": Command("stop Ray on them", "raypod.pod.up", "down_parser"),
        "cluster-file": Command(
            "write the cluster file of the Ray cluster that runs here", "raypod.runtime.workers.ray_cluster_file"
        ),
        "bundle": Command("write a folder of wheels for hosts without an index", "raypod.pod.bundle"),
    },
    "Data": {
        "pack": Command(
            "pack images, a data set or the data of a task into large files", "raypod.cli.pack", has_task=True
        ),
    },
    "Watch and control": {
        "status": Command("print the state of a run", "raypod.cli.runs", "status_parser"),
        "attach": Command("print the output of a detached run until it ends", "raypod.cli.runs", "attach_parser"),
        "stop": Command("stop a run with a checkpoint", "raypod.cli.runs", "stop_parser"),
        "logs": Command("print the output of all instances and the events", "raypod.observe.logs.command"),
        "monitor": Command("show the pod and its runs live in the terminal", "raypod.observe.monitor.command"),
        "dashboard": Command("show the runs of a folder live in a browser", "raypod.observe.dashboard.command"),
        "report": Command("write an HTML page that shows and compares runs", "raypod.observe.report.command"),
        "compare": Command("print what differs between runs, and their results", "raypod.observe.report.compare"),
        "verify-data": Command("prove that each epoch used each sample once", "raypod.cli.runs", "verify_data_parser"),
    },
    "Use a trained model": {
        "evaluate": Command("evaluate a checkpoint", "raypod.api.inference.commands", "evaluate_parser"),
        "export": Command(
            "export it as safetensors, TorchScript or ONNX", "raypod.api.inference.commands", "export_parser"
        ),
        "average": Command("average the newest checkpoints", "raypod.api.inference.commands", "average_parser"),
        "predict": Command("classify images, or continue a text", "raypod.api.inference.commands", "predict_parser"),
    },
    "Other": {
        "files": Command("list or print the recipes and cluster files", "raypod.cli.runs", "files_parser"),
        "completion": Command("print the completion script of a shell", "raypod.cli.completion"),
        "version": Command("print the versions of raypod and of what it uses", "raypod.cli.runs", "version_parser"),
    },
}
COMMANDS: Dict[str, Command] = {name: command for group in GROUPS.values() for name, command in group.items()}
EXAMPLES = {
    "raypod train --epochs 5": "digits, two emulated instances",
    "raypod train --cluster pod64.yaml --detach": "on a pod, in the background",
    "raypod monitor": "what runs on this host",
}
