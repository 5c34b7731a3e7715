"""Tests of launcher/partition with a fake `vipu` tool.

The behaviour of the fake is inferred: the documentation of V-IPU does not state how the tool prints partitions.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from raypod.errors import ClusterError
from raypod.launcher.options import parse
from raypod.launcher.partition import partition
from raypod.plan.cluster import LOCAL
from raypod.plan.placement import Sizes, place

FAKE_VIPU = Path(__file__).resolve().parent / "fake_vipu.py"


class Tool:
    """The fake tool on the PATH: its partitions, and the commands that it received."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        script = folder / "vipu"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE_VIPU} {folder} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def add(self, name: str, size: int, gcds: int = 1, reconfigurable: bool = False) -> None:
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
    """Return the environments of 4 instances with 8 replicas of 2 IPUs."""
    request, _ = parse(["--num-replicas", "8", "--num-instances", "4", "--ipus-per-replica", "2", *words, "program"])
    with partition(request, place(LOCAL, Sizes(8, 4, 2)), has_ipus, caller, lambda _: None) as environment:
        return environment


def test_a_missing_partition_is_created_and_removed(tool: Tool) -> None:
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


def test_an_existing_partition_is_reset_and_kept(tool: Tool) -> None:
    tool.add("p", 16, 4)
    use("--vipu-partition", "p")
    assert tool.changes == ["reset partition p"]


def test_reset_can_be_disabled(tool: Tool) -> None:
    tool.add("p", 16, 4)
    use("--vipu-partition", "p", "--reset-partition=no")
    assert tool.changes == []


def test_a_larger_reconfigurable_partition_is_used_as_it_is(tool: Tool) -> None:
    tool.add("p", 64, 1, reconfigurable=True)
    found = use("--vipu-partition", "p")
    assert tool.changes == []
    assert {each["IPUOF_VIPU_API_GCD_ID"] for each in found.values()} == {"0"}


def test_a_partition_that_does_not_fit_is_resized_only_with_the_option(tool: Tool) -> None:
    tool.add("p", 8, 4)
    with pytest.raises(ClusterError, match=r"p has 8 IPUs in 4 GCDs, and 16 IPUs in 4 .*--update-partition=yes"):
        use("--vipu-partition", "p")
    use("--vipu-partition", "p", "--update-partition=yes")
    assert [each.split()[0] for each in tool.changes] == ["remove", "create"]


def test_removal_can_be_disabled(tool: Tool) -> None:
    use("--vipu-partition", "p", "--remove-partition=no")
    assert [each.split()[0] for each in tool.changes] == ["create"]


def test_creation_is_attempted_as_often_as_requested(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypod.host.vipu._RETRY_S", 0.0)
    tool.fail(2, "no IPUs are free")
    use("--vipu-partition", "p", "--vipu-partition-attempts", "3")
    assert [each.split()[0] for each in tool.changes] == ["create"] * 3 + ["remove"]


def test_a_failure_includes_the_output_of_the_tool(tool: Tool) -> None:
    tool.fail(1, "no IPUs are\nfree")
    with pytest.raises(ClusterError, match=r"vipu create partition p .*: exit code 1: no IPUs are free"):
        use("--vipu-partition", "p")


def test_a_chosen_controller_is_passed_to_the_tool(tool: Tool) -> None:
    found = use("--vipu-partition", "p", "--vipu-server-host", "10.1.2.3")
    assert {each.split(" list ")[0] for each in tool.commands if " list " in each} == {
        "--api-host 10.1.2.3 --api-port 8090"
    }
    assert found[3]["IPUOF_VIPU_API_HOST"] == "10.1.2.3"


def test_a_controller_that_does_not_answer_times_out(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "hang").write_text("30")
    with pytest.raises(ClusterError, match=r"no answer within 1 s \(--vipu-server-timeout\)"):
        use("--vipu-partition", "p", "--vipu-server-timeout", "1")


def test_a_creation_that_is_completed_without_an_answer_is_undone(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "hang_after_create").write_text("30")
    with pytest.raises(ClusterError, match=r"create partition p .*no answer within 2 s"):
        use("--vipu-partition", "p", "--vipu-server-timeout", "2")
    assert [each.split()[0] for each in tool.changes] == ["create", "remove"]


def test_an_interrupted_creation_is_undone(tool: Tool, tmp_path: Path) -> None:
    (tmp_path / "hang_after_create").write_text("6")
    interrupt = f"while [ ! -e {tmp_path}/p.partition ]; do sleep 0.05; done; kill -INT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", interrupt]), pytest.raises(KeyboardInterrupt):
        use("--vipu-partition", "p")
    assert [each.split()[0] for each in tool.changes] == ["create", "remove"]


ABORT = """
from raypod.errors import RunError
from raypod.host.abort import abort
from raypod.launcher.options import parse
from raypod.launcher.partition import partition
from raypod.plan.cluster import LOCAL
from raypod.plan.placement import Sizes, place
request, _ = parse(["--vipu-partition", "p", "program"])
with partition(request, place(LOCAL, Sizes(1, 1, 1)), True, {}, print):
    abort(RunError("the head is lost"))
"""


def test_a_process_that_aborts_removes_its_partition(tool: Tool) -> None:
    done = subprocess.run([sys.executable, "-c", ABORT], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"raypod: error: the head is lost\n")
    assert [each.split()[0] for each in tool.changes] == ["create", "remove"]


@pytest.mark.parametrize("words", [("--offline-mode",), ()])
def test_the_tool_is_not_run_offline_or_on_the_emulated_sdk(tool: Tool, words: Any) -> None:
    assert use("--vipu-partition", "p", *words, has_ipus=bool(words)) == {}
    assert tool.commands == []


def test_options_of_a_partition_that_is_not_used_are_named() -> None:
    request, _ = parse(["--vipu-partition", "p", "--sync-type", "ST_POD_NATIVE_DEFAULT", "program"])
    lines: List[str] = []
    with partition(request, place(LOCAL, Sizes(1, 1, 1)), False, {}, lines.append):
        pass
    assert lines == [
        "partition options have no effect (the programs run on the emulated SDK): --vipu-partition, --sync-type"
    ]


def test_without_partition_options_no_variable_is_set(tool: Tool) -> None:
    assert use() == {}
    assert tool.commands == []


def test_the_partition_of_the_callers_environment_is_used_and_kept(tool: Tool) -> None:
    tool.add("mine", 16, 4)
    found = use(IPUOF_VIPU_API_PARTITION_ID="mine", POPLAR_TARGET_OPTIONS="{}")
    assert tool.changes == ["reset partition mine"]
    assert found[1]["POPLAR_TARGET_OPTIONS"] == "{}"


def test_a_missing_tool_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="vipu is not installed here"):
        use("--vipu-partition", "p")
