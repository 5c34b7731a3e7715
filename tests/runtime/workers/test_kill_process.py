"""A frozen process, which Ray cannot end, is killed, but no other process with its pid."""

from __future__ import annotations

import signal
import subprocess
import sys

from raypod.runtime.workers.ray_replace import kill_process
from raypod.system.activity_record import Identity
from raypod.system.process import process_start_ticks


def test_a_frozen_process_is_killed_but_no_other_process_with_its_pid(processes: None) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        ticks = process_start_ticks(process.pid)
        assert ticks is not None
        process.send_signal(signal.SIGSTOP)
        kill_process(Identity(process.pid, ticks - 1, 0, 0))
        assert process.poll() is None
        kill_process(Identity(process.pid, ticks, 0, 0))
        assert process.wait(10) == -signal.SIGKILL
    kill_process(Identity(process.pid, ticks, 0, 0))  # it has ended; nothing happens
