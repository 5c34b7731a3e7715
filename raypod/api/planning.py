"""From a command line to a plan, and the plan with its pipeline as a table or as plain data.

`plan.tables` renders a plan without its pipeline and its memory, which require the model and therefore torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any, Callable, Dict, Optional, Sequence

from raypod.errors import ConfigError, DataMissing, SdkError, UserError
from raypod.plan import flags, learning_rate, resolve, tables
from raypod.plan.cluster import LOCAL, read_cluster
from raypod.plan.compatibility import check_copies
from raypod.plan.config import Config
from raypod.plan.plan import Plan, make_plan, window_of, with_splits
from raypod.runs import run_folder
from raypod.runs.lease import EXPIRES_AFTER_S
from raypod.runs.sinks import check_packages
from raypod.runs.upload import remote_run
from raypod.runtime.worker import collectives
from raypod.runtime.workers.choice import with_fleet
from raypod.system import sdk
from raypod.system.command_line import FlagParser, check_utf8, value_of, width_of
from raypod.system.process import environment_variables, release_freed_memory
from raypod.system.remote.backends import check_scheme
from raypod.system.sdk import activation
from raypod.system.urls import check_words, is_url
from raypod.training.tasks.registry import facts_of, schema_for, schema_of, task_of_plan

_STANDBY_BYTES = 100_000_000  # measured: PSS of 92 to 101 MB, with Python 3.8 and 3.11 and any model
_DATA_STEP = 20_000_000  # the resolution of the measured data: imports and reused memory move it by some MB

_SWITCHES = {
    "--dry-run": "print the plan and exit; nothing is written or downloaded",
    "--json": "print the plan as JSON",
    "--memory": "estimate the memory of each IPU, which imports torch and compiles the model of one replica",
    "--detach": "run in the background; control it with `raypod status|attach|stop RUN_FOLDER`",
    "--detach-as": "--detach, as a Ray job or as a process; default: a Ray job where Ray's job server runs",
    "--quiet": "print only warnings, errors and the result",
    "--verbose": "also print the options of the SDK, and of a training the instances and the versions",
    "--take-over": (
        "end the run that uses the run folder, also on another host, and continue it here; for a host that is lost, "
        f"wait until its lease has expired ({EXPIRES_AFTER_S:g} s after its last heartbeat) instead"
    ),
}

Run = Callable[[argparse.Namespace], int]
_LETTERS = {"--quiet": "-q", "--verbose": "-v"}
_DESCRIPTIONS = {
    "raypod train": (
        "Train a model on this host or on a pod. Without flags: a ResNet on digits, on two emulated instances."
    ),
    "raypod lr-range": (
        "Train for a few updates with a learning rate that grows by the same factor in each, from a millionth of "
        "--learning-rate [10] to that rate, and suggest a rate. --updates [100] is their number. The curve is "
        "lr-range.csv in the run folder [runs/TIME-lr-range]."
    ),
    "raypod plan": "Print what `raypod train` with the same flags would run where. Nothing is started or downloaded.",
    "raypod compile": (
        "Compile the training and the evaluation of `raypod train` with the same flags, without IPUs, into the "
        "executable cache, and print the estimate of the memory."
    ),
}


def parser(words: Sequence[str], prog: str, switches: Sequence[str], run: Run = lambda args: 0) -> FlagParser:
    """Return the parser of a command with the flags of a training.

    Args:
        words: the command line: its task, which can be that of a config, determines the flags.
        prog: the command's name in messages.
        switches: further boolean flags: any of those in `_SWITCHES`.
        run: see `FlagParser`.

    Raises:
        ConfigError: the task or the config cannot be read.
    """
    check_words(words)
    remote_run.take_resumed(value_of(words, "--resume", "run.resume"))
    parser = FlagParser(run, prog=prog, add_help=False, description=_DESCRIPTIONS[prog])
    groups = flags.add_flags(parser, schema_for(words))
    for switch in switches:
        names = [_LETTERS[switch], switch] if switch in _LETTERS else [switch]
        groups["output"].add_argument(*names, action="store_true", help=_SWITCHES[switch])
    if "--detach" in switches:
        groups["output"].add_argument("--detach-as", choices=("ray-job", "process"), help=_SWITCHES["--detach-as"])
        parser.add_argument("--lease", help=argparse.SUPPRESS)  # of the background process
    return parser


def plan_of(args: argparse.Namespace, on_config: Callable[[Config], None] = lambda config: None) -> Plan:
    """Return the plan of parsed flags.

    If the command is one that runs (`--dry-run` is a switch of it and is not given), the data set is downloaded where
    the config asks for it; otherwise a missing data set counts with its published size.

    Args:
        args: the flags of `parser`.
        on_config: called with the config before what takes long: data, a pipeline.

    Raises:
        UserError: the config, the cluster file or the data set is wrong.
    """

    def check(config: Config) -> None:
        check_compilation(config)
        on_config(config)

    return plan_from(*resolve.merge(args), getattr(args, "dry_run", True), check)


def plan_from(
    values: resolve.Values,
    source: str,
    is_dry: bool = False,
    on_config: Callable[[Config], None] = lambda config: None,
) -> Plan:
    """Return the plan of the values of a config, and download the data set where the config asks for it.

    Args:
        values: section -> key -> value.
        source: where the values come from, for messages.
        is_dry: download nothing; a missing data set counts with its published size.
        on_config: see `plan_of`.

    Raises:
        UserError: the config, the cluster file or the data set is wrong.
    """
    path = values.get("pod", {}).get("cluster")
    cluster = LOCAL if path is None else read_cluster(str(path))
    schema = schema_of(resolve.task_of_values(values))
    config = resolve.from_values(values, source, None if path is None else cluster.num_instances, schema)
    on_config(config)
    resume = config.run.resume
    if resume is not None and is_url(resume) and resolve.run_folder_of(resume) is None:  # that of a config file
        remote_run.take_resumed(resume)
    run_dir = run_folder.choose(config)
    check_copies(config, len(cluster.hosts))
    plan = with_fleet(make_plan(config, cluster, facts_of(config, is_dry), run_dir))
    plan = dataclasses.replace(plan, has_default_rate=resolve.has_default_rate(values, schema))
    window_of(plan)
    if ":" in config.training.lr_schedule:
        with sdk.importable(config.run.device):
            learning_rate.check_function(config, plan.total_updates, plan.updates_per_epoch)
    if plan.geometry.ipus_per_replica > 1:
        plan = with_splits(plan, _splits(plan) or ())
    return plan


def _splits(plan: Plan) -> Optional[Sequence[str]]:
    """Return the pipeline splits of the plan's model; see `pipeline.find_splits`."""
    # Imports torch, which the plan of a model on one IPU does not need.
    from raypod.training.models.memory_balance import splits_by_memory
    from raypod.training.models.pipeline import find_splits

    config = plan.config
    with sdk.importable(config.run.device):
        if config.training.pipeline_balance != "memory" or config.training.pipeline_splits:
            return find_splits(config, task_of_plan(plan))
    if config.run.fleet == "inline" and sdk.sdk_for_programs(config.run.device)[0].has_ipus:
        raise ConfigError(
            "--pipeline-balance memory needs the emulated SDK, and --fleet inline the other one in the same process: "
            "write the stages that `raypod plan` prints as --pipeline-splits"
        )
    return splits_by_memory(plan, task_of_plan(plan))


def check_compilation(config: Config) -> None:
    """Check that a training can be compiled, if the environment requests that of the emulated SDK.

    Raises:
        ConfigError: it computes in half.
        SdkError: this host, on which it runs, cannot compile, or the value of the variable is unknown.
    """
    is_local = config.pod.cluster is None
    if not sdk.compiles(config.run.device, is_local):
        return
    precision = config.training.precision
    if precision != "32.32":
        raise ConfigError(
            f"{activation.COMPILE}=1: --precision {precision} computes in half, which the compiled program cannot do; "
            "unset the variable, or use --precision 32.32"
        )
    missing = activation.missing_for_compilation() if is_local else ""
    if missing:
        raise SdkError(missing)


def check_host(plan: Plan) -> None:
    """Check what a run needs on this host, before anything is created.

    Raises:
        ConfigError: a package is missing, or a path is not UTF-8 and is sent to other processes by Ray.
        SdkError: this host is the pod, and the SDK or Horovod is missing, or a variable of the emulated SDK is wrong.
    """
    check_packages(plan.config)
    sdk.requests_compilation()
    if not plan.is_inline:
        sections = plan.config.model_dump(mode="python").items()
        texts = {f"{name}.{key}": value for name, section in sections for key, value in section.items()}
        check_utf8({**texts, "the run folder": plan.run_dir})
    if plan.config.run.storage_path is not None:
        check_scheme(plan.config.run.storage_path, "--storage-path")
    if plan.placement.cluster.is_local:
        sdk.sdk_for_programs(plan.config.run.device)
    if plan.is_inline or plan.placement.cluster.is_local:
        collectives.check_available(plan.config.run.collectives)


def needs_model(plan: Plan) -> bool:
    """Return whether a plan cannot be shown without its model: for the pipeline, or to check it in strict mode."""
    with environment_variables(activation.settings(strict=plan.config.run.strict)):
        return plan.geometry.ipus_per_replica > 1 or activation.is_strict()


def render_without_model(plan: Plan, is_verbose: bool = False) -> str:
    """Return `tables.render` for the terminal of stdout, and what shows the memory. Imports no torch."""
    table = tables.render(plan, width_of(sys.stdout), is_verbose)
    return f"{table}\n\n{'memory':>12}  --memory estimates it: it imports torch and compiles the model"


def render_with_pipeline(plan: Plan, is_verbose: bool = False) -> str:
    """Return `tables.render` as above, the pipeline if a replica has several IPUs, and the estimated memory."""
    from raypod.training.models.memory_balance import render_memory
    from raypod.training.models.pipeline_table import inspect_pipeline, render_pipeline, snapshot_bytes

    parts = [tables.render(plan, width_of(sys.stdout), is_verbose)]
    found = _inspected(plan, inspect_pipeline)
    if isinstance(found, str):
        return f"{parts[0]}\n\n{'memory':>12}  no estimate: {found}"
    if plan.geometry.ipus_per_replica > 1:
        parts.append(render_pipeline(found, plan.config.training.execution))
    parts.append(render_memory(found.memory))
    if plan.config.run.snapshot_every:
        size = snapshot_bytes(plan, found)
        parts[-1] += (
            f"\n{'host memory':>12}  {size / 1e6:.1f} MB of each host for the snapshots ({size} bytes, an estimate)"
        )
    if plan.config.run.standby:
        standby_size = _standby_bytes(plan)
        about = "no estimate for the standbys: their data is not on this host"
        if standby_size is not None:
            about = f"{standby_size / 1e6:.0f} MB of each host for the standbys ({standby_size} bytes, an estimate)"
        parts[-1] += f"\n{'host memory':>12}  {about}"
    return "\n\n".join(parts)


def _standby_bytes(plan: Plan) -> Optional[int]:
    """Return the memory of the standbys of a host; None if the data that they load is not on this one.

    Besides the data it is that of a process that a template has forked, whose pages they share.
    """
    import psutil

    release_freed_memory()  # data that is loaded into it would not count
    before = psutil.Process().memory_info()
    try:
        data = task_of_plan(plan).load()  # stays in memory until the measurement
    except DataMissing:
        return None
    after = psutil.Process().memory_info()
    del data
    loaded = (after.rss - after.shared) - (before.rss - before.shared)  # without what other processes map, too
    return plan.config.run.standby * (_STANDBY_BYTES + max(0, round(loaded / _DATA_STEP)) * _DATA_STEP)


def describe_with_pipeline(plan: Plan) -> Dict[str, Any]:
    """Return `tables.describe(plan)` with the estimated memory, and the pipeline if a replica has several IPUs."""
    from raypod.training.models.memory_balance import describe_memory
    from raypod.training.models.pipeline_table import describe_pipeline, inspect_pipeline, snapshot_bytes

    found = _inspected(plan, inspect_pipeline)
    if isinstance(found, str):
        return {**tables.describe(plan), "memory": {"error": found}}
    pipeline = {"pipeline": describe_pipeline(found)} if plan.geometry.ipus_per_replica > 1 else {}
    memory = describe_memory(found.memory)
    if plan.config.run.snapshot_every:
        memory["snapshot_bytes_per_host"] = snapshot_bytes(plan, found)
    if plan.config.run.standby:
        memory["standby_bytes_per_host"] = _standby_bytes(plan)
    return {**tables.describe(plan), **pipeline, "memory": memory}


def _inspected(plan: Plan, inspect: Callable[[Plan, Any], Any]) -> Any:
    """Return the pipeline of a plan; the reason if the model of a plan without pipeline cannot be compiled here.

    In strict mode that is an error, too: the run would end with it.
    """
    with environment_variables(activation.settings(strict=plan.config.run.strict)):
        try:
            return inspect(plan, task_of_plan(plan))
        except (UserError, ImportError) as error:  # the other numbers of a plan need no torch
            if plan.geometry.ipus_per_replica > 1 or activation.is_strict():
                raise
            return str(error)
