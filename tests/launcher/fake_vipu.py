"""A fake `vipu` tool: it keeps partitions as files of a folder and logs its commands.

Arguments: the folder, then those of the tool. The output format is inferred: the documentation of V-IPU does not state
it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import List


def main(folder: Path, words: List[str]) -> int:
    with (folder / "commands").open("a") as log:
        log.write(" ".join(words) + "\n")
    hang(folder / "hang")
    while words[0].startswith("--"):
        words = words[2:]
    verb, kind, *names = words
    file = folder / f"{names[0] if names else ''}.partition"
    if verb == "create":
        times, _, text = (folder / "fail").read_text().partition("\n") if (folder / "fail").exists() else ("0", "", "")
        if int(times):
            (folder / "fail").write_text(f"{int(times) - 1}\n{text}")
            print(text)
            return 1
        values = dict(zip(names[1::2], names[2::2]))
        file.write_text(f"{values['--size']} {values.get('--num-gcds', 1)} {int('--reconfigurable' in names)}")
        hang(folder / "hang_after_create")
    elif verb == "list":
        print("-" * 40, "\n Partition | Size | State", "\n" + "-" * 40)
        for each in sorted(folder.glob("*.partition")):
            print(f" {each.stem:<9} | {each.read_text().split()[0]:>4} | ACTIVE")
    elif not file.exists():
        print(f"{kind} {names[0]} not found")
        return 1
    elif verb == "remove":
        file.unlink()
    elif verb == "get":
        size, gcds, reconfigurable = file.read_text().split()
        print("-" * 40, f"\n Partition      | {names[0]}", "\n" + "-" * 40)
        print(f" Size           | {size}\n GCDs           | {gcds}")
        print(f" Reconfigurable | {'yes' if reconfigurable == '1' else 'no'}")
    return 0


def hang(seconds: Path) -> None:
    """Sleep as long as a file says, if there is one."""
    if seconds.exists():
        time.sleep(float(seconds.read_text()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
