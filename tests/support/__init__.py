"""What several tests share: polling, fakes, servers, user programs with faults, and data."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
