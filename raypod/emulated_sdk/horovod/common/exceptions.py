"""The exceptions of `horovod.common`."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: the ranks disagree, a rank is lost or does not respond, or Horovod is not initialized."""
