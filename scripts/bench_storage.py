"""The cost of mirroring a run to a remote storage: images/s with and without the mirror, within the same runs.

    python scripts/bench_storage.py [--rounds 3] [--updates 1200] [--block 40] [--storage-path URL] [train flags]

In every other block of updates the process of the mirror is stopped (SIGSTOP). Each block has one checkpoint, so both
kinds do the same except for the mirror; what the mirror missed while it was stopped it does in the next block, so `on`
has twice the work of a usual run. `median` and `mean` compare the durations of blocks, on/off - 1. `mirror CPU` is the
CPU time of its process as a share of the time of the run, without the start of its interpreter. The default storage
is a temporary folder; with the inline fleet the run has one process, and the mirror takes what it leaves of the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from raypod.events import UpdateDone
from raypod.runs.upload import mirror_record
from raypod.runs.upload.mirror import Mirror

_RUN_S = 900.0  # bound of one run
_TICKS_S = os.sysconf("SC_CLK_TCK")


class Blocks:
    """Stops the process of the mirror in every other block of updates, and measures all of them."""

    def __init__(self, block: int) -> None:
        self.blocks_s: Dict[bool, List[float]] = {True: [], False: []}  # by whether the mirror runs
        self._block, self._updates, self._began_s = block, 0, 0.0
        self._cpu_began_s, self._cpu_s, self._measured_s = 0.0, 0.0, 0.0
        self._mirror: Optional[Mirror] = None
        self._is_on = True

    def install(self) -> None:
        """Replace the handler of the mirror."""
        handle = Mirror.on_event

        def measured(mirror: Mirror, event: Any) -> None:
            self._mirror = mirror
            handle(mirror, event)
            if isinstance(event, UpdateDone):
                self._count()

        Mirror.on_event = measured  # type: ignore[method-assign]

    def _count(self) -> None:
        self._updates += 1
        if self._updates % self._block:
            return
        now_s = time.perf_counter()
        if self._updates > 2 * self._block:  # the first ones include the compilation and the start of the mirror
            self.blocks_s[self._is_on].append(now_s - self._began_s)
            self._measured_s += now_s - self._began_s
            self._cpu_s = self._mirror_cpu_s() - self._cpu_began_s
        else:
            self._cpu_began_s = self._mirror_cpu_s()
        self._is_on = not self._is_on
        process = self._mirror._process.process if self._mirror else None
        assert process is not None, "the mirror has no process"
        os.kill(process.pid, signal.SIGCONT if self._is_on else signal.SIGSTOP)
        self._began_s = time.perf_counter()

    def resume(self) -> None:
        """Let the mirror run."""
        process = self._mirror._process.process if self._mirror else None
        if process is not None:
            os.kill(process.pid, signal.SIGCONT)

    def _mirror_cpu_s(self) -> float:
        process = self._mirror._process.process if self._mirror else None
        assert process is not None, "the mirror has no process"
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_S

    def result(self) -> List[float]:
        """Return the number of blocks, ms per block on and off, and the shares."""
        on_s, off_s = self.blocks_s[True], self.blocks_s[False]
        median = statistics.median(on_s) / statistics.median(off_s) - 1
        mean = statistics.mean(on_s) / statistics.mean(off_s) - 1
        blocks_ms = [1e3 * statistics.median(each) for each in (on_s, off_s)]
        return [len(on_s) + len(off_s), *blocks_ms, median, mean, self._cpu_s / self._measured_s]


def run(folder: Path, block: int, flags: List[str]) -> int:
    """Run a training in this process, and write the result beside its folder."""
    from raypod import train

    blocks = Blocks(block)
    blocks.install()
    finish = Mirror.__exit__

    def resumed(mirror: Mirror, *error: Any) -> None:
        blocks.resume()
        finish(mirror, *error)

    Mirror.__exit__ = resumed  # type: ignore[method-assign,assignment]
    code = train.main([*flags, "--run-dir", str(folder)])
    found = mirror_record.read(folder)
    content = {"result": blocks.result(), "checkpoints": found.checkpoints, "bytes": found.uploaded_bytes}
    folder.with_name("blocks.json").write_text(json.dumps(content))
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--block", type=int, default=40, help="updates of a block, and between checkpoints")
    parser.add_argument("--storage-path", metavar="URL")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # in a process of its own
    args, flags = parser.parse_known_args()
    flags = ["--fleet", "inline", "--replicas", "2", "--epochs", "100", "--lr-schedule", "constant", *flags]
    flags += ["--updates", str(args.updates), "--checkpoint-every", f"{args.block} updates"]
    if args.folder:
        return run(args.folder, args.block, [*flags, "--storage-path", args.storage_path])
    print("| round | blocks | ms, mirror on | ms, off | median | mean | mirror CPU | checkpoints | MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as parent:
            folder, url = Path(parent, f"run-{number}"), args.storage_path or f"file://{parent}/store"
            own = ["--folder", str(folder), "--storage-path", url, "--block", str(args.block)]
            command = [sys.executable, __file__, *own, "--updates", str(args.updates), *flags[:-4]]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=_RUN_S)
            found = json.loads((Path(parent) / "blocks.json").read_text())
        rows.append([*found["result"], found["checkpoints"], found["bytes"] / 1e6])
        print(f"| {number + 1} | {_cells(*rows[-1])}", flush=True)
    print(f"| median | {_cells(*(statistics.median(column) for column in zip(*rows)))}")
    return 0


def _cells(*values: float) -> str:
    count, on_ms, off_ms, median, mean, cpu, checkpoints, megabytes = values
    shares = f"{median:+.2%} | {mean:+.2%} | {cpu:.2%}"
    return f"{count:.0f} | {on_ms:.1f} | {off_ms:.1f} | {shares} | {checkpoints:.0f} | {megabytes:.1f} |"


if __name__ == "__main__":
    sys.exit(main())
