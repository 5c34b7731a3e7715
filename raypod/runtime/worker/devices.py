"""The wrapped models of an instance on its devices: they share them, so at most one is attached."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any, List, Optional, Sequence

from raypod.errors import ConfigError
from raypod.runtime.worker import collectives
from raypod.system.companion import end_session
from raypod.system.last_line import last_line

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
