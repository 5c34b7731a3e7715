"""Runs the tests of PopTorch and of Horovod on the emulated SDK, and raypod on the front end of PopTorch itself."""
