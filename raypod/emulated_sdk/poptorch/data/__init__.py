"""Data loading on the host."""
