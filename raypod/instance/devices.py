"""The wrapped models of an instance on its devices: they share them, so at most one is attached."""

from __future__ import annotations

from typing import Any, List, Sequence


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


def destroy(models: Sequence[Any]) -> None:
    """Release devices and executables."""
    for model in models:
        if model.isCompiled():
            model.destroy()
