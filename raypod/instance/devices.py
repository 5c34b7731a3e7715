"""The wrapped models of an instance on its devices: they share them, so at most one is attached."""

from __future__ import annotations

import re
from typing import Any, List, Optional, Sequence

from raypod.errors import ConfigError
from raypod.instance import collectives

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


def _attached(models: Sequence[Any]) -> List[Any]:
    return [model for model in models if model.isCompiled() and model.isAttachedToDevice()]
