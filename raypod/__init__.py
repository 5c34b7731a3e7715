"""raypod: PyTorch training on Graphcore IPU-PODs under Ray, and on an emulated pod where there is none."""

__version__ = "0.1.0"
