"""`popdist.tensorflow`: refused. The emulation has PopTorch's part of PopDist only (contract section 6.1)."""

from __future__ import annotations

raise ImportError(
    "popdist.tensorflow needs TensorFlow for the IPU, which the emulated SDK does not have: it runs PopTorch "
    "programs only"
)
