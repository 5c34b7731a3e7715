"""The wrapped models of an instance on its devices: they share them, so at most one is attached."""

from __future__ import annotations

from typing import Any, Sequence


def detach(models: Sequence[Any]) -> None:
    """Read the state of the attached model back, and release the devices."""
    for model in models:
        if model.isCompiled() and model.isAttachedToDevice():
            model.detachFromDevice()


def destroy(models: Sequence[Any]) -> None:
    """Release devices and executables."""
    for model in models:
        if model.isCompiled():
            model.destroy()
