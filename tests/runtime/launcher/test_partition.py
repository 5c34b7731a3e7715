"""The V-IPU partition of a launch, with a fake `vipu` tool, whose behaviour is inferred."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import psutil
import pytest

from raypod.errors import ClusterError, RunError
from raypod.plan.cluster import LOCAL
from raypod.plan.placement import Sizes, place
from raypod.runtime.launcher.options import parse
from raypod.runtime.launcher.programs import partition
from raypod.system.signals import abort
from raypod.system.vipu import Controller, Vipu
from tests.support.fake_vipu import FakeVipu

NAMED = ("--vipu-partition", "p")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVipu]:
    made = FakeVipu(monkeypatch)
    monkeypatch.setattr("raypod.system.vipu._RETRY_S", 0.0)
    yield made
    assert all(process.is_awaited for process in made.processes)


def use(*words: str, has_ipus: bool = True, **caller: str) -> Dict[int, Dict[str, str]]:
    """Return the environments of 4 instances with 8 replicas of 2 IPUs."""
    request, _ = parse(["--num-replicas", "8", "--num-instances", "4", "--ipus-per-replica", "2", *words, "program"])
    with partition(request, place(LOCAL, Sizes(8, 4, 2)), has_ipus, caller, lambda _: None) as environment:
        return environment


def test_a_missing_partition_is_created_and_removed(tool: FakeVipu) -> None:
    found = use(*NAMED, "--vipu-allocation", "a", "--sync-type", "ST_POD_NATIVE_DEFAULT")
    assert tool.changes == [
        "create partition p --size 16 --num-gcds 4 --gcd-sync-replicas 4 --allocation a"
        " --sync-type ST_POD_NATIVE_DEFAULT",
        "remove partition p",
    ]
    assert [each["IPUOF_VIPU_API_GCD_ID"] for each in found.values()] == ["0", "1", "2", "3"]
    assert {each["IPUOF_VIPU_API_PARTITION_ID"] for each in found.values()} == {"p"}
    names = ("HOST", "PORT", "TIMEOUT")
    assert [found[0][f"IPUOF_VIPU_API_{name}"] for name in names] == ["localhost", "8090", "120"]
    assert '"instanceSize":"4"' in found[0]["POPLAR_TARGET_OPTIONS"]


@pytest.mark.parametrize(
    ("existing", "words", "verbs", "gcd_ids"),
    [
        ((16, 4, False), (), ["reset"], {"0", "1", "2", "3"}),
        ((16, 4, False), ("--reset-partition=no",), [], {"0", "1", "2", "3"}),
        ((64, 1, True), (), [], {"0"}),  # a larger reconfigurable one is used as it is
        ((64, 1, True), ("--reset-partition=yes",), ["reset"], {"0"}),
        ((8, 4, False), ("--update-partition=yes",), ["remove", "create"], {"0", "1", "2", "3"}),
        (None, ("--remove-partition=no",), ["create"], {"0", "1", "2", "3"}),
    ],
)
def test_an_existing_partition_is_kept(
    tool: FakeVipu, existing: Any, words: Tuple[str, ...], verbs: List[str], gcd_ids: Any
) -> None:
    if existing is not None:
        tool.partitions["p"] = existing
    found = use(*NAMED, *words)
    assert tool.verbs == verbs
    assert {each["IPUOF_VIPU_API_GCD_ID"] for each in found.values()} == gcd_ids
    assert list(tool.partitions) == ["p"]


def test_a_partition_that_does_not_fit_is_not_changed(tool: FakeVipu) -> None:
    tool.partitions["p"] = (8, 4, False)
    with pytest.raises(ClusterError, match=r"p has 8 IPUs in 4 GCDs, and 16 IPUs in 4 .*--update-partition=yes"):
        use(*NAMED)
    assert tool.changes == []


def test_creation_is_attempted_as_often_as_requested(tool: FakeVipu) -> None:
    tool.failures = ["no IPUs are free"] * 2
    use(*NAMED, "--vipu-partition-attempts", "3")
    assert tool.verbs == ["create"] * 3 + ["remove"]
    tool.failures = ["no IPUs are\nfree"]
    with pytest.raises(ClusterError, match=r"vipu create partition p .*: exit code 1: no IPUs are free$"):
        use(*NAMED)


def test_a_chosen_controller_is_passed_to_the_tool(tool: FakeVipu) -> None:
    found = use(*NAMED, "--vipu-server-host", "10.1.2.3", "--vipu-server-timeout", "7")
    assert all(each.startswith("--api-host 10.1.2.3 --api-port 8090 ") for each in tool.commands)
    assert found[3]["IPUOF_VIPU_API_HOST"] == "10.1.2.3"
    assert set(tool.timeouts) == {7}


@pytest.mark.parametrize(
    ("verb", "raised", "match", "verbs"),
    [
        ("list", subprocess.TimeoutExpired("vipu", 1), r"no answer within 120 s \(--vipu-server-timeout\)", []),
        ("create", subprocess.TimeoutExpired("vipu", 1), "create partition p .*no answer", ["create", "remove"]),
        ("create", KeyboardInterrupt(), "^$", ["create", "remove"]),
    ],
)
def test_a_creation_that_is_completed_without_an_answer_is_undone(
    tool: FakeVipu, verb: str, raised: BaseException, match: str, verbs: List[str]
) -> None:
    tool.raised[verb] = raised
    with pytest.raises(KeyboardInterrupt if isinstance(raised, KeyboardInterrupt) else ClusterError, match=match):
        use(*NAMED)
    assert tool.verbs == verbs
    assert not tool.partitions


@pytest.mark.usefixtures("processes")
def test_a_tool_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vipu").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    (tmp_path / "vipu").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ClusterError, match="no answer within 1 s"):
        Vipu(Controller("localhost", 8090, 1)).run("list", "partitions")
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_process_that_aborts_removes_its_partition(
    tool: FakeVipu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_exit: List[Any] = []

    def leave(code: int) -> None:
        at_exit.append((code, tool.verbs))
        raise SystemExit

    monkeypatch.setattr("os._exit", leave)
    request, _ = parse([*NAMED, "program"])
    with pytest.raises(SystemExit), partition(request, place(LOCAL, Sizes(1, 1, 1)), True, {}, lambda _: None):
        abort(RunError("the head is lost"))
    assert at_exit == [(1, ["create", "remove"])]
    assert capsys.readouterr().err == "raypod: error: the head is lost\n"


@pytest.mark.parametrize(
    ("words", "has_ipus", "said"),
    [
        ((*NAMED, "--offline-mode"), True, ["(--offline-mode): --vipu-partition"]),
        (
            (*NAMED, "--sync-type", "S"),
            False,
            ["(the programs run on the emulated SDK): --vipu-partition, --sync-type"],
        ),
        ((), True, []),
    ],
)
def test_a_partition_that_is_not_used_is_not_created(
    tool: FakeVipu, words: Tuple[str, ...], has_ipus: bool, said: List[str]
) -> None:
    lines: List[str] = []
    request, _ = parse([*words, "program"])
    with partition(request, place(LOCAL, Sizes(1, 1, 1)), has_ipus, {}, lines.append) as environment:
        assert environment == {}
    assert tool.commands == []
    assert lines == [f"partition options have no effect {each}" for each in said]


def test_the_partition_of_the_callers_environment_is_used_and_kept(tool: FakeVipu) -> None:
    tool.partitions["mine"] = (16, 4, False)
    found = use(IPUOF_VIPU_API_PARTITION_ID="mine", POPLAR_TARGET_OPTIONS="{}")
    assert tool.changes == ["reset partition mine"]
    assert found[1]["POPLAR_TARGET_OPTIONS"] == "{}"


def test_a_missing_tool_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="vipu is not installed here"):
        use(*NAMED)
