"""`raypod compile`: compile the programs of a training for a target without IPUs, into the executable cache."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from typing import Optional, Sequence

from raypod.api import planning
from raypod.errors import ConfigError, WaitTimedOut
from raypod.plan.plan import Plan
from raypod.runtime.worker.environment import instance_environment
from raypod.system import sdk, torchvision_import
from raypod.system.command_line import FlagParser, show, tell
from raypod.system.process import environment_variables


def parser(words: Sequence[str]) -> FlagParser:
    """Return the parser of a command line."""
    return planning.parser(words, "raypod compile", ["--verbose"], run)


def run(args: Namespace) -> int:
    """Print the plan with the estimate of the memory, and compile training and evaluation of one instance."""
    plan = planning.plan_of(args)
    found, training = sdk.sdk_for_programs(plan.config.run.device)[0], plan.config.training
    if found.has_ipus and training.pipeline_balance == "memory" and not training.pipeline_splits:
        raise ConfigError(
            "--pipeline-balance memory has used the emulated SDK in this process, which can use no other one then: use "
            f"--pipeline-splits {','.join(plan.pipeline_splits)}"
        )
    if found.has_ipus:
        code = _print_estimate(args.argv, plan.config.run.report_timeout_s)
        if code:
            return code
    else:
        show(planning.render_with_pipeline(plan, args.verbose))
    environment = instance_environment(plan, plan.placement.instances[0])
    environment.pop("PYTHONPATH")
    with environment_variables(environment):
        torchvision_import.install()
        cache = _compile(plan, sdk.select_offline() if found.has_ipus else sdk.select("emulated"))
    where = f"in {cache}" if found.has_ipus else "nowhere: the emulated SDK compiles at each start, in seconds"
    show(f"Executables are kept {where}")
    return 0


def _print_estimate(argv: Sequence[str], timeout_s: float) -> int:
    """Print the plan in a process of its own, which uses the emulated SDK: a process has one SDK. Return its exit code.

    Raises:
        WaitTimedOut: the process has not ended; it is killed.
    """
    try:
        command = [sys.executable, "-m", "raypod", "plan", "--memory", *argv]
        return subprocess.run(command, check=False, timeout=timeout_s).returncode
    except subprocess.TimeoutExpired:
        raise WaitTimedOut("the estimate of the memory", timeout_s, "run.report_timeout_s") from None


def _compile(plan: Plan, selected: sdk.Sdk) -> Optional[str]:
    """Compile with the selected SDK; return the folder of the executables."""
    from raypod.runtime.worker import devices

    cache = devices.executable_folder(plan, selected)
    for name, seconds in devices.compile_programs(plan, cache):
        tell(f"{name} compiled in {seconds:.1f} s")
    return cache
