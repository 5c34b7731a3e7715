"""`raypod compile`: programs without a device, and the folder of their executables."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, List

import poptorch
import pytest

from raypod.cli.table import COMMANDS
from raypod.system import sdk

FLAGS = ["--dataset", "synthetic", "--model", "tiny", "--samples", "64", "--batch-size", "2"]


def test_training_and_evaluation_are_compiled_without_a_device(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    types: List[Any] = []

    def offline(options: Any, ipu_version: int = 2) -> Any:
        types.append((ipu_version, options.replication_factor))
        return options.connectionType(poptorch.ConnectionType.Never)

    monkeypatch.setattr(poptorch.Options, "useOfflineIpuTarget", offline)
    assert COMMANDS["compile"].run([*FLAGS, "--device", "emulated", "--replicas", "4", "--num-instances", "2"]) == 0
    assert types == [(2, 2)] * 2
    text = capsys.readouterr().out
    assert "training compiled in " in text
    assert "evaluation compiled in " in text
    assert "IPU 0  [" in text
    assert text.rstrip().endswith("Executables are kept nowhere: the emulated SDK compiles at each start, in seconds")


def test_on_a_host_with_the_sdk_another_process_prints_the_estimate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: List[List[str]] = []
    paths: List[Any] = []
    installed = sdk.Sdk("ipu", "the SDK")
    monkeypatch.setattr(sdk, "sdk_for_programs", lambda device: (installed, ()))
    monkeypatch.setattr(sdk, "select_offline", lambda: installed)
    codes = [0, 2]

    def start(words: List[str], check: bool, timeout: float) -> Any:
        started.append(words)
        return subprocess.CompletedProcess(words, codes.pop(0))

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(poptorch.Options, "enableExecutableCaching", lambda options, path: paths.append(path))
    cache = str(tmp_path / "cache")
    assert COMMANDS["compile"].run([*FLAGS, "--executable-cache-path", cache]) == 0
    assert [words[1:5] for words in started] == [["-m", "raypod", "plan", "--memory"]]
    assert set(paths) == {cache}
    assert capsys.readouterr().out.rstrip().endswith(f"Executables are kept in {cache}")
    assert COMMANDS["compile"].run([*FLAGS, "--executable-cache-path", cache]) == 2  # as the plan, which says why
    assert "compiled in " not in capsys.readouterr().out
