"""Checkpoints: a folder `checkpoints/update-00000440/` of a run folder, whole or absent.

Its tensors are in safetensors files, whose loading executes nothing, and `manifest.json` says where in the run it was
taken, what must be the same to go on from there, and the size and sha256 of every file. Written beside under another
name, flushed to the disk, renamed; `LATEST` names the newest one and is written last.
"""
