"""Data loading on the host (contract section 1.9)."""
