"""Failures to read samples that may pass."""

from __future__ import annotations


class ReadFailed(OSError):
    """Raised for samples that could not be read because of their disk or network. Worker processes raise it, too."""


class StillLoading(ReadFailed):
    """Raised for samples that arrive too slowly: they are waited for as long as they do."""
