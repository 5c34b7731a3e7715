"""Runs the tests of PopTorch and of Horovod against the emulated SDK, for `scripts/poptorch_conformance.py`."""
