"""raypod: PyTorch training on Graphcore IPU-PODs under Ray; without IPUs, on an emulated SDK."""

__version__ = "0.1.0"
