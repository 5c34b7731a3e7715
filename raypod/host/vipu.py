"""The partition of a launch, by the `vipu` command line tool (contract section 9), and the variables that lead there.

Which commands exist is known; how they print what they find, and how they are told which controller to ask, is
inferred [I] and marked so. Every command has a bound, and one that fails is told with its output.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import time
from typing import Dict, List, Optional, Tuple

from raypod.errors import ClusterError

_PAUSE_S = 1.0  # between two attempts to make a partition


@dataclasses.dataclass(frozen=True)
class Controller:
    """The V-IPU controller; host and port are told to the tool only if somebody chose them."""

    host: str
    port: int
    timeout_s: int
    is_chosen: bool = False


@dataclasses.dataclass(frozen=True)
class Wish:
    """The partition that a launch needs, and what may be done for it."""

    name: str
    size: int  # IPUs, a power of two
    gcds: int  # graph compile domains: one per instance
    allocation: Optional[str] = None
    sync_type: Optional[str] = None
    may_resize: bool = False
    reset: Optional[bool] = None  # None: where it is not reconfigurable
    attempts: int = 1


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition as `vipu get partition` describes it; None where it does not say."""

    name: str
    size: Optional[int] = None
    gcds: Optional[int] = None
    is_reconfigurable: bool = False


@dataclasses.dataclass(frozen=True)
class Ready:
    """A partition that can be used: its GCDs, and whether this launch made it."""

    gcds: int
    is_ours: bool


class Vipu:
    """The tool, for one controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def prepare(self, wish: Wish) -> Ready:
        """See that the partition is there, fits and is fresh.

        Raises:
            ClusterError: it does not fit and may not be resized, or the tool failed.
        """
        found = self.find(wish.name)
        if found is None:
            self._create(wish)
            return Ready(wish.gcds, is_ours=True)
        if not _fits(found, wish):
            if not wish.may_resize:
                raise ClusterError(
                    f"partition {found.name} has {_told(found.size)} IPUs in {_told(found.gcds)} GCDs, and "
                    f"{wish.size} IPUs in {wish.gcds} are needed; --update-partition=yes makes it again"
                )
            self.remove(wish.name)
            self._create(wish)
            return Ready(wish.gcds, is_ours=False)  # somebody else wanted one of that name
        if wish.reset if wish.reset is not None else not found.is_reconfigurable:
            self.run("reset", "partition", wish.name)
        return Ready(found.gcds or (1 if found.is_reconfigurable else wish.gcds), is_ours=False)

    def find(self, name: str) -> Optional[Partition]:
        """The partition of that name, if there is one."""
        if name not in partition_names(self.run("list", "partitions")):
            return None
        return parse_partition(name, self.run("get", "partition", name))

    def remove(self, name: str) -> None:
        """Remove a partition."""
        self.run("remove", "partition", name)

    def run(self, *words: str) -> str:
        """Run the tool; its output. ClusterError, with that output, if it fails or is not there."""
        where = []
        if self._controller.is_chosen:  # [I] else the tool's own configuration says which
            where = ["--api-host", self._controller.host, "--api-port", str(self._controller.port)]
        command = ["vipu", *where, *words]
        said = " ".join(command)
        if shutil.which("vipu") is None:
            raise ClusterError(
                f"{said}: vipu is not installed here; leave out the partition options, or add it to PATH"
            )
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=self._controller.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            bound = f"{self._controller.timeout_s} s (--vipu-server-timeout)"
            raise ClusterError(f"{said}: no answer within {bound}") from None
        output = done.stdout.decode(errors="replace")
        if done.returncode:
            raise ClusterError(f"{said}: exit code {done.returncode}: {' '.join(output.split())}")
        return output

    def _create(self, wish: Wish) -> None:
        for attempt in range(1, wish.attempts + 1):
            try:
                self.run(*creation(wish))
                return
            except ClusterError as error:
                if attempt == wish.attempts:
                    tried = f" (attempt {attempt} of {wish.attempts})" if wish.attempts > 1 else ""
                    raise ClusterError(f"{error}{tried}") from None
            time.sleep(_PAUSE_S)


def creation(wish: Wish) -> Tuple[str, ...]:
    """The words that make a partition. One GCD makes it reconfigurable, several sync as one job [I]."""
    words: List[str] = ["create", "partition", wish.name, "--size", str(wish.size)]
    if wish.gcds > 1:
        words += ["--num-gcds", str(wish.gcds), "--gcd-sync-replicas", str(wish.gcds)]
    elif wish.sync_type is None:
        words.append("--reconfigurable")
    if wish.allocation:
        words += ["--allocation", wish.allocation]
    if wish.sync_type:
        words += ["--sync-type", wish.sync_type]
    return tuple(words)


def partition_names(listing: str) -> List[str]:
    """The first column of `vipu list partitions` [I]: names, without the head of the table and its rules."""
    rows = [re.split(r"[|\s]+", line.strip(" |"))[0] for line in listing.splitlines()]
    return [row for row in rows if re.fullmatch(r"[\w.\-]*\w[\w.\-]*", row) and row.lower() != "partition"]


def parse_partition(name: str, description: str) -> Partition:
    """`vipu get partition`: lines of a name and a value, between them a bar or a colon [I]."""
    values = _values(description)
    reconfigurable = values.get("reconfigurable", "").lower() in ("yes", "true", "1")
    return Partition(
        name,
        _number(values, ("size", "ipus", "numberofipus", "numipus")),
        _number(values, ("gcds", "numgcds", "numberofgcds")),
        reconfigurable or "reconfigurable" in values.get("type", "").lower(),
    )


def state_of(description: str) -> str:
    """The state that `vipu get partition` tells [I: under one of these names]; "" if it tells none."""
    values = _values(description)
    return next((values[key] for key in ("state", "partitionstate", "status") if values.get(key)), "")


def _values(description: str) -> Dict[str, str]:
    """By name, in small letters alone."""
    values: Dict[str, str] = {}
    for line in description.splitlines():
        key, _, value = re.sub(r"[|:]", "\0", line.strip(" |"), count=1).partition("\0")
        values[re.sub(r"[^a-z]", "", key.lower())] = value.strip()
    return values


def _fits(partition: Partition, wish: Wish) -> bool:
    """A reconfigurable partition serves every smaller job: its processes share one GCD by device ids (section 9)."""
    if partition.is_reconfigurable:
        return partition.size is None or partition.size >= wish.size
    return partition.size in (None, wish.size) and partition.gcds in (None, wish.gcds)


def _number(values: Dict[str, str], names: Tuple[str, ...]) -> Optional[int]:
    for name in names:
        found = re.match(r"\d+", values.get(name, ""))
        if found:
            return int(found.group())
    return None


def _told(number: Optional[int]) -> str:
    return "an unknown number of" if number is None else str(number)
