"""Makes the packages of `scripts/` importable."""

from __future__ import annotations

import sys

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
