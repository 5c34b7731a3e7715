"""Strict mode: what an IPU rejects and the emulation runs is a warning, with EMULATED_POD_STRICT=1 an Error.

For `raypod doctor --program` it is a finding (`findings.py`).
"""

from __future__ import annotations

from _pod.activation import STRICT, is_strict

from poptorch import findings
from poptorch.environment import logger
from poptorch.errors import Error

__all__ = ["STRICT", "is_strict", "reject"]


def reject(message: str, what: str = "model") -> None:
    """Warn that an IPU rejects the model; in strict mode raise Error. `what` names the subject among findings."""
    if findings.is_active():
        findings.add(findings.TROUBLE, what, message)
    elif is_strict():
        raise Error(message)
    logger.warning("%s An IPU rejects this model; %s=1 makes it an Error here.", message, STRICT)
