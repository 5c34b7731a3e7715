"""The record of a process whose interpreter lock is held, as another process reads it."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from raypod.system import activity_record
from raypod.system.activity_record import Activity, ActivityRecord, Identity
from tests.support import ROOT
from tests.support.bounded import wait_until

HOLDS = """
import ctypes, threading, time
from raypod.system.activity_record import ActivityRecord

def hold_the_lock():
    print(*record.identity, flush=True)
    while True:  # a signal ends the sleep
        ctypes.PyDLL(None).sleep(60)

record = ActivityRecord()
record.write("in call 3", time.monotonic() - 5, 2, 0.5, threading.get_native_id())
hold_the_lock()
"""


def test_a_process_that_holds_its_interpreter_lock_is_observed_until_it_is_stopped(processes: None) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            identity = Identity(*map(int, process.stdout.readline().split()))
            found = activity_record.read(identity)
            assert found is not None
            assert (found.name, found.calls, found.slowest_call_s) == ("in call 3", 2, 0.5)
            assert found.duration_s > 5
            assert found.cpu_s > 0
            first, second = activity_record.stacks(identity), activity_record.stacks(identity)
            assert first.count("in hold_the_lock") == second.count("in hold_the_lock") == 1
            process.send_signal(signal.SIGSTOP)
            assert wait_until(lambda: activity_record.read(identity) is None)
            other = identity._replace(start_ticks=identity.start_ticks - 1)
            assert (activity_record.read(other), activity_record.stacks(other)) == (None, "")
        finally:
            process.kill()
    assert (activity_record.read(identity), activity_record.stacks(identity)) == (None, "")


def test_a_record_that_is_being_written_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    record = ActivityRecord()
    faulthandler.unregister(signal.SIGUSR2)
    assert activity_record.read(record.identity) is None  # nothing is written yet
    record.write("saving", time.monotonic(), 0, None, 1)
    whole = bytes(record._map)
    record._map[0:1] = bytes([whole[0] ^ 1])
    reads = []

    def path(*arguments: Any) -> Any:
        reads.append(arguments)
        if len(reads) == 3:
            record._map[:] = whole
        return original(*arguments)

    original = activity_record.path_of
    monkeypatch.setattr(activity_record, "path_of", path)
    found = activity_record.read(record.identity)
    assert isinstance(found, Activity)
    assert (found.name, found.calls, found.slowest_call_s, found.cpu_s, len(reads)) == ("saving", 0, None, 0.0, 3)
    for each in (record._map, record._file, record._stacks):
        each.close()
