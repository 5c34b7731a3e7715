"""Partitions, against a stand-in for the `vipu` tool. Its behaviour is inferred from the contract, section 9 [I]."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from raypod.errors import ClusterError
from raypod.launcher.options import parse
from raypod.launcher.partition import partition
from raypod.plan.cluster import LOCAL
from raypod.plan.placement import place

STAND_IN = Path(__file__).resolve().parent / "vipu_stand_in.py"


class Tool:
    """The stand-in on the PATH: its partitions, and the commands that it was given."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        script = folder / "vipu"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} {folder} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def have(self, name: str, size: int, gcds: int = 1, reconfigurable: bool = False) -> None:
        (self._folder / f"{name}.partition").write_text(f"{size} {gcds} {int(reconfigurable)}")

    def fail(self, times: int, text: str) -> None:
        (self._folder / "fail").write_text(f"{times}\n{text}")

    @property
    def commands(self) -> List[str]:
        log = self._folder / "commands"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def changes(self) -> List[str]:
        return [each for each in self.commands if each.split()[0] not in ("list", "get")]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Tool(tmp_path)


def use(*words: str, has_ipus: bool = True, **caller: str) -> Dict[int, Dict[str, str]]:
    """The environments of 4 instances with 8 replicas of 2 IPUs, the reference arrangement of section 6.3."""
    request, _ = parse(["--num-replicas", "8", "--num-instances", "4", "--ipus-per-replica", "2", *words, "program"])
    said: List[str] = []
    with partition(request, place(LOCAL, 8, 4, 2), has_ipus, caller, said.append) as environment:
        return environment


def test_a_partition_is_made_and_removed(tool: Tool) -> None:
    found = use("--vipu-partition", "p", "--vipu-allocation", "a", "--sync-type", "ST_POD_NATIVE_DEFAULT")
    assert tool.changes == [
        "create partition p --size 16 --num-gcds 4 --gcd-sync-replicas 4 --allocation a"
        " --sync-type ST_POD_NATIVE_DEFAULT",
        "remove partition p",
    ]
    assert [each["IPUOF_VIPU_API_GCD_ID"] for each in found.values()] == ["0", "1", "2", "3"]
    assert {each["IPUOF_VIPU_API_PARTITION_ID"] for each in found.values()} == {"p"}
    assert found[0]["IPUOF_VIPU_API_HOST"] == "localhost"
    assert (found[0]["IPUOF_VIPU_API_PORT"], found[0]["IPUOF_VIPU_API_TIMEOUT"]) == ("8090", "120")
    assert '"instanceSize":"4"' in found[0]["POPLAR_TARGET_OPTIONS"]


def test_one_that_is_there_is_reset_and_stays(tool: Tool) -> None:
    tool.have("p", 16, 4)
    use("--vipu-partition", "p")
    assert tool.changes == ["reset partition p"]


def test_it_is_not_reset_where_that_is_not_wanted(tool: Tool) -> None:
    tool.have("p", 16, 4)
    use("--vipu-partition", "p", "--reset-partition=no")
    assert tool.changes == []


def test_a_larger_reconfigurable_one_is_shared_by_device_ids(tool: Tool) -> None:
    tool.have("p", 64, 1, reconfigurable=True)
    found = use("--vipu-partition", "p")
    assert tool.changes == []
    assert {each["IPUOF_VIPU_API_GCD_ID"] for each in found.values()} == {"0"}


def test_one_that_does_not_fit_is_resized_only_when_told(tool: Tool) -> None:
    tool.have("p", 8, 4)
    with pytest.raises(ClusterError, match=r"p has 8 IPUs in 4 GCDs, and 16 IPUs in 4 .*--update-partition=yes"):
        use("--vipu-partition", "p")
    use("--vipu-partition", "p", "--update-partition=yes")
    assert [each.split()[0] for each in tool.changes] == ["remove", "create"]


def test_one_that_was_made_stays_when_told(tool: Tool) -> None:
    use("--vipu-partition", "p", "--remove-partition=no")
    assert [each.split()[0] for each in tool.changes] == ["create"]


def test_it_is_tried_as_often_as_told(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypod.host.vipu._PAUSE_S", 0.0)
    tool.fail(2, "no IPUs are free")
    use("--vipu-partition", "p", "--vipu-partition-attempts", "3")
    assert [each.split()[0] for each in tool.changes] == ["create"] * 3 + ["remove"]


def test_a_failure_is_told_with_the_output_of_the_tool(tool: Tool) -> None:
    tool.fail(1, "no IPUs are\nfree")
    with pytest.raises(ClusterError, match=r"vipu create partition p .*: exit code 1: no IPUs are free"):
        use("--vipu-partition", "p")


def test_a_controller_that_was_chosen_is_told_to_the_tool(tool: Tool) -> None:
    found = use("--vipu-partition", "p", "--vipu-server-host", "10.1.2.3")
    assert {each.split(" list ")[0] for each in tool.commands if " list " in each} == {
        "--api-host 10.1.2.3 --api-port 8090"
    }
    assert found[3]["IPUOF_VIPU_API_HOST"] == "10.1.2.3"


def test_a_controller_that_does_not_answer_is_waited_for_within_its_bound(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "hang").write_text("30")
    with pytest.raises(ClusterError, match=r"no answer within 1 s \(--vipu-server-timeout\)"):
        use("--vipu-partition", "p", "--vipu-server-timeout", "1")


@pytest.mark.parametrize("words", [("--offline-mode",), ()])
def test_nothing_is_touched_offline_or_emulated(tool: Tool, words: Any) -> None:
    assert use("--vipu-partition", "p", *words, has_ipus=bool(words)) == {}
    assert tool.commands == []


def test_without_options_the_callers_own_environment_stands(tool: Tool) -> None:
    assert use() == {}
    assert tool.commands == []


def test_the_callers_own_partition_is_used_and_stays(tool: Tool) -> None:
    tool.have("mine", 16, 4)
    found = use(IPUOF_VIPU_API_PARTITION_ID="mine", POPLAR_TARGET_OPTIONS="{}")
    assert tool.changes == ["reset partition mine"]
    assert found[1]["POPLAR_TARGET_OPTIONS"] == "{}"


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="vipu is not installed here"):
        use("--vipu-partition", "p")
