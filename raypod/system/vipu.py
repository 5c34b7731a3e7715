"""Partitions of IPUs, through the `vipu` command line tool.

The commands are documented. The format of their output and the options that select the controller are inferred: the
SDK's documentation does not state them; each such place is marked "inferred". Every command has a timeout.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from typing import Dict, List, Optional, Tuple

from raypod.errors import ClusterError
from raypod.system.retries import constant, retried

_RETRY_S = 1.0  # between two attempts to create a partition


@dataclasses.dataclass(frozen=True)
class Controller:
    """The V-IPU controller. Its address is passed to the tool only if the user or the cluster file sets it."""

    host: str
    port: int
    timeout_s: int
    is_chosen: bool = False


@dataclasses.dataclass(frozen=True)
class PartitionRequest:
    """The partition that a launch needs, and what may be done to get it."""

    name: str
    size: int  # IPUs, a power of two
    gcds: int  # graph compile domains: one per instance
    allocation: Optional[str] = None
    sync_type: Optional[str] = None
    may_resize: bool = False
    reset: Optional[bool] = None  # None: reset it unless it is reconfigurable
    attempts: int = 1


@dataclasses.dataclass(frozen=True)
class Partition:
    """A partition as `vipu get partition` describes it; None for what the output does not contain."""

    name: str
    size: Optional[int] = None
    gcds: Optional[int] = None
    is_reconfigurable: bool = False


@dataclasses.dataclass(frozen=True)
class ReadyPartition:
    """A partition that can be used."""

    gcds: int
    is_new: bool  # no partition of that name existed before this launch


class _NoAnswer(ClusterError):
    """Raised if the controller has not answered in time; it may still execute the command."""


class Vipu:
    """Runs the tool for one controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def prepare(self, request: PartitionRequest) -> ReadyPartition:
        """Create the partition, or reset or resize an existing one.

        Raises:
            ClusterError: it does not fit and may not be resized, or the tool failed.
        """
        found = self.find(request.name)
        if found is None:
            self._create(request)
            return ReadyPartition(request.gcds, is_new=True)
        if not _fits(found, request):
            if not request.may_resize:
                raise ClusterError(
                    f"partition {found.name} has {_count(found.size)} IPUs in {_count(found.gcds)} GCDs, and "
                    f"{request.size} IPUs in {request.gcds} are needed; --update-partition=yes recreates it"
                )
            self.remove(request.name)
            self._create(request)
            return ReadyPartition(request.gcds, is_new=False)  # one of that name existed, so one must remain
        if request.reset if request.reset is not None else not found.is_reconfigurable:
            self.run("reset", "partition", request.name)
        return ReadyPartition(found.gcds or (1 if found.is_reconfigurable else request.gcds), is_new=False)

    def find(self, name: str) -> Optional[Partition]:
        """Return the partition of that name; None if there is none."""
        if name not in partition_names(self.run("list", "partitions")):
            return None
        return parse_partition(name, self.run("get", "partition", name))

    def remove(self, name: str) -> None:
        self.run("remove", "partition", name)

    def run(self, *words: str) -> str:
        """Run the tool and return its output.

        Raises:
            ClusterError: the tool is not installed, fails (the message contains its output) or exceeds the timeout.
        """
        options = []
        if self._controller.is_chosen:  # inferred options; without them the tool uses its own configuration
            options = ["--api-host", self._controller.host, "--api-port", str(self._controller.port)]
        command = ["vipu", *options, *words]
        text = " ".join(command)
        if shutil.which("vipu") is None:
            raise ClusterError(f"{text}: vipu is not installed here; omit the partition options, or add it to PATH")
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must not end the removal of a partition
        ) as process:
            try:
                output = process.communicate(timeout=self._controller.timeout_s)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:
                bound = f"{self._controller.timeout_s} s (--vipu-server-timeout)"
                raise _NoAnswer(f"{text}: no answer within {bound}") from None
            finally:
                process.kill()
                process.wait()  # after KeyboardInterrupt, `with` does not
        if process.returncode:
            raise ClusterError(f"{text}: exit code {process.returncode}: {' '.join(output.split())}")
        return output

    def _create(self, request: PartitionRequest) -> None:
        last = request.attempts
        try:
            retried(lambda: self._create_or_undo(request), constant(_RETRY_S), _is_refused, last)
        except ClusterError as error:
            raise ClusterError(f"{error} (attempt {last} of {last})" if last > 1 else str(error)) from None

    def _create_or_undo(self, request: PartitionRequest) -> None:
        """Create the partition; remove it if the creation is interrupted or unanswered, and was completed."""
        try:
            self.run(*create_arguments(request))
        except (KeyboardInterrupt, _NoAnswer):
            if request.name in partition_names(self.run("list", "partitions")):
                self.remove(request.name)
            raise


def _is_refused(error: Exception) -> bool:
    return isinstance(error, ClusterError)


def create_arguments(request: PartitionRequest) -> Tuple[str, ...]:
    """Return the arguments of `vipu` that create a partition.

    Inferred: one GCD makes it reconfigurable, and several GCDs synchronize their replicas as one job.
    """
    words: List[str] = ["create", "partition", request.name, "--size", str(request.size)]
    if request.gcds > 1:
        words += ["--num-gcds", str(request.gcds), "--gcd-sync-replicas", str(request.gcds)]
    elif request.sync_type is None:
        words.append("--reconfigurable")
    if request.allocation:
        words += ["--allocation", request.allocation]
    if request.sync_type:
        words += ["--sync-type", request.sync_type]
    return tuple(words)


def partition_names(listing: str) -> List[str]:
    """Return the first column of `vipu list partitions` without the header and the rules (inferred format)."""
    rows = [re.split(r"[|\s]+", line.strip(" |"))[0] for line in listing.splitlines()]
    return [row for row in rows if re.fullmatch(r"[\w.\-]*\w[\w.\-]*", row) and row.lower() != "partition"]


def parse_partition(name: str, description: str) -> Partition:
    """Parse `vipu get partition`: lines of a key and a value, separated by a bar or a colon (inferred format)."""
    values = _values(description)
    reconfigurable = values.get("reconfigurable", "").lower() in ("yes", "true", "1")
    return Partition(
        name,
        _number(values, ("size", "ipus", "numberofipus", "numipus")),
        _number(values, ("gcds", "numgcds", "numberofgcds")),
        reconfigurable or "reconfigurable" in values.get("type", "").lower(),
    )


def parse_state(description: str) -> str:
    """Return the state in the output of `vipu get partition` (inferred keys); "" if there is none."""
    values = _values(description)
    return next((values[key] for key in ("state", "partitionstate", "status") if values.get(key)), "")


def _values(description: str) -> Dict[str, str]:
    """Values by key; keys are reduced to their letters in lower case."""
    values: Dict[str, str] = {}
    for line in description.splitlines():
        key, _, value = re.sub(r"[|:]", "\0", line.strip(" |"), count=1).partition("\0")
        values[re.sub(r"[^a-z]", "", key.lower())] = value.strip()
    return values


def _fits(partition: Partition, request: PartitionRequest) -> bool:
    """Whether a partition can run a job. In a reconfigurable one smaller jobs share the one GCD by device ids."""
    if partition.is_reconfigurable:
        return partition.size is None or partition.size >= request.size
    return partition.size in (None, request.size) and partition.gcds in (None, request.gcds)


def _number(values: Dict[str, str], names: Tuple[str, ...]) -> Optional[int]:
    for name in names:
        found = re.match(r"\d+", values.get(name, ""))
        if found:
            return int(found.group())
    return None


def _count(number: Optional[int]) -> str:
    return "an unknown number of" if number is None else str(number)
