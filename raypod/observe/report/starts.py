"""The starts of a run and its instances: where the start-up time went, on which hosts, with which versions."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

STEP_OF_INSTANCES, PART_OF_IT = "start the instances", "in the instances: "
_MAX_STARTS = 40  # the first one and the newest ones


class Starts:
    """Folds the records of `events.jsonl` about starts and repairs."""

    def __init__(self) -> None:
        self.starts: List[Dict[str, Any]] = []
        self.facts: Dict[str, Any] = {"device": None, "device_line": None, "parameters": None, "raypod": None}
        self.has_summary = True  # that of the newest start: it has ended
        self._began_unix_s: Optional[float] = None
        self._instances: List[Dict[str, Any]] = []
        self._lost: Dict[int, int] = {}  # number of times, by instance

    def handle(self, record: Dict[str, Any]) -> None:
        """Add a record of the log."""
        name = record.get("event")
        if name == "process_started":
            self.has_summary = False
            self._began_unix_s = record.get("unix_s")
            self.facts["raypod"] = record.get("raypod", self.facts["raypod"])
        elif name == "run_started":
            self.facts.update({key: record.get(key) for key in ("device", "device_line", "parameters")})
            began_s = self._began_unix_s
            total_s = record["unix_s"] - began_s if began_s is not None and "unix_s" in record else None
            self._add(record, "resumed" if record.get("first_update") else "started", total_s, None)
        elif name == "run_ended":
            self.has_summary = True
        elif name == "repaired":
            self._add(record, "repaired", record.get("seconds"), record.get("lost"))
        elif name == "instance_lost" and isinstance(record.get("instance"), int):
            index = record["instance"]
            self._lost[index] = self._lost.get(index, 0) + 1

    def instances(self, planned: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
        """Return the instances of the newest generation, or the planned ones of a run that has not started."""
        actual = {each.get("instance"): each for each in self._instances}
        specs = {each.get("index"): each for each in planned}
        found = []
        for index in sorted({index for index in {*actual, *specs} if isinstance(index, int)}):
            started, spec = actual.get(index, {}), specs.get(index, {})
            replicas = [spec.get("replica_offset"), spec.get("local_replicas")]
            host = started.get("host") or spec.get("host")
            lost = self._lost.get(index, 0)
            found.append(
                {"instance": index, "host": host, "pid": started.get("pid"), "replicas": replicas, "lost": lost}
            )
        return found

    def versions(self) -> Dict[str, Dict[str, List[int]]]:
        """Return the instances that run each version of each package."""
        found: Dict[str, Dict[str, List[int]]] = {}
        for each in self._instances:
            versions = each.get("versions")
            for package, version in versions.items() if isinstance(versions, dict) else ():
                found.setdefault(str(package), {}).setdefault(str(version), []).append(each.get("instance", -1))
        return found

    def _add(self, record: Dict[str, Any], cause: str, total_s: Any, only: Any) -> None:
        instances = [each for each in record.get("instances") or () if isinstance(each, dict)]
        self._instances = instances or self._instances
        shown = [each for each in instances if not isinstance(only, list) or each.get("instance") in only]
        self.starts.append(
            {
                "generation": record.get("generation"),
                "cause": cause,
                "total_s": round(total_s, 3) if isinstance(total_s, (int, float)) else None,
                "steps": _with_parts_after_their_step(_steps(record.get("seconds"))),
                "instances": [[each.get("instance"), _steps(each.get("seconds"))] for each in shown],
            }
        )
        if len(self.starts) > _MAX_STARTS:
            del self.starts[1]


def _with_parts_after_their_step(steps: List[List[Any]]) -> List[List[Any]]:
    """Return the steps with those inside the instances after the step that contains them, if there is one."""
    parts = [step for step in steps if step[0].startswith(PART_OF_IT)]
    found: List[List[Any]] = []
    for step in steps:
        if step not in parts:
            found += [step, *parts] if step[0] == STEP_OF_INSTANCES else [step]
    return found if len(found) == len(steps) else steps


def _steps(seconds: Any) -> List[List[Any]]:
    """Return (name, seconds) of the steps of a start."""
    pairs = seconds.items() if isinstance(seconds, dict) else ()
    return [[str(name), round(value, 3)] for name, value in pairs if isinstance(value, (int, float))]
