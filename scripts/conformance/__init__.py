"""Runs the tests of PopTorch and of Horovod against the emulated SDK; `scripts/poptorch_conformance.py` is the command."""
