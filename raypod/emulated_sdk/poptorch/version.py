"""The SDK version whose API this is."""

from __future__ import annotations

VERSION = "3.4.0"
