"""What a failed collective raises, under the name that programs catch (contract section 8)."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: the ranks do not agree, one is lost or silent, or Horovod is not initialized."""
