"""An instance's process reuses the memory that it frees; the start time identifies a process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Callable

from raypod.host.process import process_age_s, process_start_ticks

PROGRAM = """
import resource, threading
from raypod.host import process

supported = process.keep_freed_memory() if {keep} else None
import torch  # noqa: E402


def step():
    activations = [torch.empty(2 << 20).fill_(1.0) for _ in range(12)]


def steps():
    for _ in range(16):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        step()
    print(supported, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def test_repeated_allocations_cause_fewer_page_faults(run_python: Callable[[str], str]) -> None:
    supported, kept = run_python(PROGRAM.format(keep=True)).split()
    if supported == "False":  # another C library
        return
    _, returned = run_python(PROGRAM.format(keep=False)).split()
    assert 2 * int(kept) < int(returned)


def test_a_process_has_start_ticks_until_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = process_start_ticks(child.pid)
    assert ticks is not None
    assert ticks >= (process_start_ticks(os.getpid()) or 0)
    child.communicate(b"\n", timeout=30)
    assert process_start_ticks(child.pid) is None
    assert process_age_s() > 0
