"""An instance's process keeps the memory that it frees."""

from __future__ import annotations

from typing import Callable

PROGRAM = """
import resource, threading
from raypod.host import process

told = process.keep_freed_memory() if {keep} else None
import torch  # noqa: E402


def step():
    activations = [torch.empty(2 << 20).fill_(1.0) for _ in range(12)]


def steps():
    for _ in range(16):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step()
    print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def test_blocks_that_come_again_are_faulted_in_once(run_python: Callable[[str], str]) -> None:
    told, kept = run_python(PROGRAM.format(keep=True)).split()
    if told == "False":  # another C library
        return
    _, given_back = run_python(PROGRAM.format(keep=False)).split()
    assert 2 * int(kept) < int(given_back)
