"""The wrapped models of an instance on its devices, their compilation, and the folder of compiled executables.

Of the processes of a run, PopTorch lets the first one compile and the others wait: each appends a byte to a lock file,
and the last one removes it. It counts the processes of all hosts. A folder of one host never sees them all, so the file
remains, and at the next start no process is the first one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import poptorch
import torch

from raypod.errors import ConfigError
from raypod.plan import user_code
from raypod.plan.plan import Plan
from raypod.runtime.worker import collectives
from raypod.runtime.worker.replica_model import ReplicaModel
from raypod.system.companion import end_session
from raypod.system.log_files import last_line
from raypod.system.sdk import Sdk
from raypod.training.models import program
from raypod.training.tasks.registry import task_of_plan

# What PopTorch's compiler says of names that it does not have, or that have values of another type.
_REJECTED_OPTION = re.compile(r"Unknown (?:\w+ )?(?:option|pattern) '?([\w.]+)'?")


class CallGuard:
    """A context for calls: notes an error of the device, whose state is unknown from then on."""

    def __init__(self) -> None:
        self._error: Optional[BaseException] = None

    def __enter__(self) -> None:
        """Begin a call."""

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        """End a call. ConfigError if its compilation has rejected an option of the section `ipu` by its name."""
        rejected = _REJECTED_OPTION.search(str(error)) if error is not None else None
        if rejected is not None:
            raise ConfigError(f"--popart: the SDK rejects {rejected.group(1)}: {rejected.group(0)}") from error
        if error is not None and collectives.device_failure(error) is not None:
            self._error = error

    def check(self) -> None:
        """Raise the error of the device, if a call has ended with one."""
        if self._error is not None:
            raise self._error

    def destroy(self, models: Sequence[Any]) -> None:
        """Release devices and executables. The end of this process releases a device that has failed."""
        try:
            for model in models:
                if model.isCompiled():
                    model.destroy()
        except Exception:  # the SDK's: it reads the weights first
            if self._error is None:
                raise


def detach(models: Sequence[Any]) -> None:
    """Read the state of the attached model back, and release the devices."""
    for model in _attached(models):
        model.detachFromDevice()


def check_released(models: Sequence[Any], error: Exception) -> None:
    """Check that no model holds the devices after `error`, with which `detach` or what was before it has failed.

    Raises:
        RuntimeError: one does, so that none can be attached in this process.
    """
    if _attached(models):
        raise RuntimeError(
            f"the device cannot be released after a failed call: {' '.join(str(error).split())}"
        ) from error


def reset(command: str, recovery_action: str, timeout_s: float) -> str:
    """Run the user's command that resets devices of this host, which no process may hold.

    It has no input, the SDK's recovery action as RAYPOD_RECOVERY_ACTION, and writes into the log of this instance.

    Returns:
        Why it has failed, in one line; "" if its exit code is 0.
    """
    sys.stderr.write(f"reset of the devices ({recovery_action}): {command}\n")
    with subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "RAYPOD_RECOVERY_ACTION": recovery_action},
        start_new_session=True,
    ) as process:
        try:
            output = process.communicate(timeout=timeout_s)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            return f"not done within {timeout_s:g} s (run.reset_timeout_s)"
        finally:
            end_session(process)
    sys.stderr.write(output)
    last = last_line(output) or "no output"
    return f"exit code {process.returncode}: {last}" if process.returncode else ""


def _attached(models: Sequence[Any]) -> List[Any]:
    return [model for model in models if model.isCompiled() and model.isAttachedToDevice()]


_DIGEST = "0" * 16  # of samples, which the programs get as numbers


def compile_programs(plan: Plan, cache: Optional[str]) -> Iterator[Tuple[str, float]]:
    """Compile training and evaluation for `useOfflineIpuTarget`; yield the name of each and its seconds.

    The environment is that of instance 0. The data determines shapes and constants of the programs.

    Args:
        plan: the plan of the run.
        cache: the folder of executables; None for none.

    Raises:
        ConfigError: the data is missing, the SDK rejects an option, or the user's code fails.
    """
    with user_code.reported(plan.config.model_name), CallGuard():
        task = task_of_plan(plan)
        torch.manual_seed(plan.config.training.seed)
        model = ReplicaModel(plan, task, task.load().first_batch(plan.config.training.seed))
        options = program.training_options(plan, cache).useOfflineIpuTarget()
        training = poptorch.trainingModel(model.training_step, options, model.optimizer)
        batch = task.example(plan.geometry.combined_batch_size)
        yield "training", _seconds(training, (*batch, *model.call_words(0, _DIGEST)))
        training.destroy()
        if plan.dataset_size.test_samples:
            model.network.eval()
            options = program.inference_options(plan, cache).useOfflineIpuTarget()
            inference = poptorch.inferenceModel(model.evaluation_step, options)
            yield "evaluation", _seconds(inference, task.example(plan.geometry.evaluation_batch_size))
            inference.destroy()


def _seconds(model: Any, inputs: Tuple[Any, ...]) -> float:
    began = time.monotonic()
    model.compile(*inputs)
    return time.monotonic() - began


_LOCK = re.compile(r"[0-9a-f]{16,}\.lock")  # a hash of the model


def executable_folder(plan: Plan, sdk: Sdk) -> Optional[str]:
    """Return the folder of a run's executables on this host, created; None on the emulated SDK if none is chosen.

    By default it is of this user and this host: a home folder can be shared, and a lock between hosts cannot be relied
    upon. POPTORCH_CACHE_DIR takes precedence, as PopTorch reads it.
    """
    chosen = plan.config.pod.executable_cache_path or os.environ.get("POPTORCH_CACHE_DIR")
    if chosen or not sdk.has_ipus:
        return chosen
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "raypod" / "executables" / socket.gethostname()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(
            f"executables are not cached, so every process compiles: {folder} cannot be created ({error.strerror}); "
            "choose a folder with --executable-cache-path",
            stacklevel=2,
        )
        return None
    return str(folder)


def remove_stale_locks(folder: Optional[str]) -> None:
    """Remove the lock files that no process holds: one process of each host then compiles.

    Call it before the processes of a run meet, as they compile only afterwards.
    """
    for path in filter(lambda each: _LOCK.fullmatch(each.name), Path(folder).glob("*.lock") if folder else ()):
        # A process of another run holds it, another one of this run has removed it, or it is another user's.
        with contextlib.suppress(OSError), path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
