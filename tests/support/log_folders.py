"""Run folders as a run writes them, for the tests of `raypod logs`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence

from raypod.__main__ import main
from raypod.plan import layout
from raypod.plan.cluster import LOCAL, Cluster
from raypod.runs.run_state import RunState
from raypod.system.process import process_start_ticks


class RunFolder:
    """A run with two instances whose coordinator is this process."""

    def __init__(self, path: Path, cluster: Cluster = LOCAL, run_dir: Optional[Path] = None) -> None:
        """`run_dir` is the path of the folder on the hosts."""
        self.path = path
        (path / "logs").mkdir(parents=True)
        hosts = [cluster.hosts[min(index, len(cluster.hosts) - 1)].name for index in range(2)]
        placed = [{"index": index, "host": host} for index, host in enumerate(hosts)]
        plan = {"cluster": dataclasses.asdict(cluster), "instances": placed}
        (path / "plan.json").write_text(json.dumps({**plan, "run_dir": str(run_dir or path)}))

    def log(self, instance: int, text: str, at_s: Optional[float] = None) -> None:
        """Append to the log of an instance at a time, and mark it."""
        append(self.path / "logs" / f"instance-{instance}.log", text, at_s)

    def event(self, unix_s: float, event: object, **fields: Any) -> None:
        with (self.path / "events.jsonl").open("a") as file:
            file.write(json.dumps({"unix_s": unix_s, "event": event, **fields}) + "\n")

    def placed(self, unix_s: float, event: str, hosts: Sequence[str], pids: Sequence[int]) -> None:
        named = enumerate(zip(hosts, pids))
        instances = [{"instance": each, "host": host, "pid": pid} for each, (host, pid) in named]
        self.event(unix_s, event, instances=instances)

    def state(self, exit_code: Optional[int] = None) -> None:
        """Write `state.json` of a run that runs in this process, or that has ended in another one."""
        ticks = process_start_ticks(os.getpid()) if exit_code is None else 1
        state = RunState(os.getpid(), ticks or 0, os.uname().nodename, "running", 7, 9, exit_code=exit_code)
        (self.path / layout.STATE).write_text(json.dumps(dataclasses.asdict(state)))


def append(path: Path, text: str, at_s: Optional[float] = None) -> None:
    with path.open("a") as file:
        file.write(text)
    if at_s is not None:
        os.utime(str(path), (at_s, at_s))
        with path.with_suffix(".times").open("a") as times:
            times.write(f"{at_s} {path.stat().st_size}\n")


def started(instance: int, pid: int, host: str) -> str:
    return f"instance {instance} of 2, pid {pid}: started on {host}\n"


class Following:
    """`raypod logs --follow` in this thread, and a run in another one.

    stdout is a file of its own: `capfd.readouterr()` reads and then truncates its file, and loses what another thread
    writes between the two.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run, self._file = run, run.path.parent / f"{run.path.name}.stdout"
        self._failures: List[BaseException] = []
        run.state()

    @property
    def out(self) -> str:
        return self._file.read_text() if self._file.exists() else ""

    def sees(self, text: str) -> bool:
        return text in self.out

    def __call__(self, steps: Callable[[], None], *flags: str) -> int:
        def work() -> None:
            try:
                steps()
            except BaseException as error:  # noqa: BLE001
                self._failures.append(error)
                self.run.state(exit_code=99)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            with self._file.open("w") as file, contextlib.redirect_stdout(file):
                code = main(["logs", str(self.run.path), "--follow", *flags])
        finally:
            thread.join()
        assert not self._failures, self._failures
        return code
