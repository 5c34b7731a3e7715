"""`popdist.popart`: raises ImportError. The emulated SDK implements PopDist for PopTorch only."""

from __future__ import annotations

raise ImportError("popdist.popart needs PopART, which the emulated SDK does not have: it runs PopTorch programs only")
