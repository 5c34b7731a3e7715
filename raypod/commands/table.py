"""The subcommands of `raypod`: their names, groups, descriptions, and where they are implemented."""

from __future__ import annotations

import importlib
from typing import Callable, Dict, NamedTuple, Sequence


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        summary: one line for `raypod --help`.
        module, function: what runs it. The function takes the words after the subcommand and returns the exit code.
    """

    summary: str
    module: str
    function: str

    def run(self, argv: Sequence[str]) -> int:
        """Import the command and run it."""
        command: Callable[[Sequence[str]], int] = getattr(importlib.import_module(self.module), self.function)
        return command(argv)


GROUPS: Dict[str, Dict[str, Command]] = {
    "Run": {
        "train": Command("train a model on this host or on a pod", "raypod.train", "command"),
        "launch": Command("start any program in every instance, as poprun does", "raypod.launch", "main"),
        "lr-range": Command("find a learning rate with a short training", "raypod.commands.lr_range", "lr_range"),
        "compile": Command(
            "compile a training without a pod, and estimate its memory", "raypod.commands.compile", "main"
        ),
        "plan": Command("print what a training would run where, and its memory", "raypod.commands.runs", "plan"),
    },
    "Pod": {
        "doctor": Command("check whether the hosts are ready for a run", "raypod.pod.doctor", "doctor"),
        "up": Command("start Ray on the hosts of a cluster file", "raypod.pod.up", "up"),
        "down": Command("stop Ray on them", "raypod.pod.up", "down"),
        "cluster-file": Command(
            "write the cluster file of the Ray cluster that runs here", "raypod.fleet.ray_cluster_file", "write"
        ),
        "bundle": Command("write a folder of wheels for hosts without an index", "raypod.pod.bundle", "bundle"),
    },
    "Data": {
        "pack": Command(
            "pack images, a data set or the data of a task into large files", "raypod.commands.pack", "pack"
        ),
    },
    "Watch and control": {
        "status": Command("print the state of a run", "raypod.commands.runs", "status"),
        "attach": Command("print the output of a detached run until it ends", "raypod.commands.runs", "attach"),
        "stop": Command("stop a run with a checkpoint", "raypod.commands.runs", "stop"),
        "logs": Command("print the output of all instances and the events", "raypod.logs.command", "main"),
        "monitor": Command("show the pod and its runs live in the terminal", "raypod.monitor.command", "main"),
        "dashboard": Command("show the runs of a folder live in a browser", "raypod.dashboard.command", "main"),
        "report": Command("write an HTML page that shows and compares runs", "raypod.report.command", "report"),
        "compare": Command("print what differs between runs, and their results", "raypod.report.compare", "compare"),
        "verify-data": Command("prove that each epoch used each sample once", "raypod.commands.runs", "verify_data"),
    },
    "Use a trained model": {
        "evaluate": Command("evaluate a checkpoint", "raypod.trained.commands", "evaluate"),
        "export": Command("export it as safetensors, TorchScript or ONNX", "raypod.trained.commands", "export"),
        "average": Command("average the newest checkpoints", "raypod.trained.commands", "average"),
        "predict": Command("classify images, or continue a text", "raypod.trained.commands", "predict"),
    },
    "Other": {
        "files": Command("list or print the recipes and cluster files", "raypod.commands.files", "files"),
        "completion": Command("print the completion script of a shell", "raypod.commands.completion", "completion"),
        "version": Command("print the versions of raypod and of what it uses", "raypod.commands.runs", "version"),
    },
}
COMMANDS: Dict[str, Command] = {name: command for group in GROUPS.values() for name, command in group.items()}
EXAMPLES = {
    "raypod train --epochs 5": "digits, two emulated instances",
    "raypod train --cluster pod64.yaml --detach": "on a pod, in the background",
    "raypod monitor": "what runs on this host",
}
