"""`popdist.tensorflow`: raises ImportError. The emulated SDK implements PopDist for PopTorch only."""

from __future__ import annotations

raise ImportError(
    "popdist.tensorflow needs TensorFlow for the IPU, which the emulated SDK does not have: it runs PopTorch"
    " programs only"
)
