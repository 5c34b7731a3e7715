"""The commands `raypod train` with the inline fleet, `raypod lr-range` and `raypod compile`."""

from __future__ import annotations

import csv
import json
import math
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, List

import poptorch
import pytest
import torch

from raypod import train
from raypod.__main__ import main
from raypod.cli.lr_range import curve, suggested
from raypod.cli.table import COMMANDS
from raypod.errors import WeightsDiffer
from raypod.events import EvaluationDone, Event, RunEnded, UpdateDone
from raypod.plan.learning_rate import range_factor
from raypod.plan.plan import Plan
from raypod.runs.metrics import MetricsAggregator
from raypod.runs.run_state import StateFile
from raypod.runtime.coordinator import coordinator
from raypod.runtime.workers.inline import InlineFleet
from raypod.system import sdk
from raypod.training.checkpoint import resume, writer

INLINE = {"run": {"fleet": "inline", "device": "emulated"}}


def command(tmp_path: Path, *flags: str) -> tuple[int, Path]:
    folder = tmp_path / "run"
    inline = ["--fleet", "inline", "--device", "emulated", "--run-dir", str(folder)]
    return train.main([*inline, *flags]), folder


def summary_of(folder: Path) -> Dict[str, Any]:
    found: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_evaluations_during_the_run_do_not_change_the_weights(tmp_path: Path, capsys: Any) -> None:
    flags = ("--epochs", "3", "--batch-size", "64", "--model", "tiny")
    code, folder = command(tmp_path / "evaluated", *flags, "--evaluate-every", "1")
    assert code == 0
    summary = summary_of(folder)
    assert [each["epoch"] for each in summary["evaluations"]] == [1, 2, 3]
    assert summary["evaluations"][-1]["accuracy"] == summary["test_accuracy"]
    out = capsys.readouterr().out
    assert "[Epoch 02] test loss: " in out
    assert out.count("test loss") == 2
    _, other = command(tmp_path / "other", *flags)
    assert summary_of(other)["weights_sha256"] == summary["weights_sha256"]


def test_the_files_of_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, folder = command(tmp_path, "--updates", "46", "--eight-bit-io", "--async-dataloader", "--model", "tiny")
    assert code == 0
    summary = summary_of(folder)
    assert 0 <= summary["data_wait_share"] < 1
    keys = "epochs loss accuracy test_accuracy samples_per_s seconds_to_first_update weights_sha256 restarts topology"
    assert set(keys.split()) <= set(summary)
    assert (summary["updates"], summary["device"]) == (46, "emulated")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, 47))
    assert json.loads((folder / "plan.json").read_text())["total_updates"] == 46
    assert {"config.yaml", "logs", "checkpoints"} <= {path.name for path in folder.iterdir()}
    out = capsys.readouterr().out
    assert "[Epoch 01] loss: " in out
    assert "Test accuracy: " in out


def test_a_run_resumes_before_a_damaged_checkpoint_and_names_lost_lines(tmp_path: Path, capsys: Any) -> None:
    flat = ("--lr-schedule", "constant", "--checkpoint-every", "10 updates", "--model", "tiny")
    _, folder = command(tmp_path, *flat, "--updates", "24")
    weights = folder / "checkpoints" / "update-00000024" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for name in ("ledger.jsonl", "metrics.jsonl"):
        (folder / name).write_bytes(b"".join((folder / name).read_bytes().splitlines(True)[:11]))
    _, whole = command(tmp_path / "whole", *flat, "--updates", "30")
    capsys.readouterr()
    assert command(tmp_path, *flat, "--updates", "30", "--resume", str(folder))[0] == 0
    out = capsys.readouterr().out
    assert "warning: " in out
    assert "update-00000024 is damaged: weights.safetensors has" in out
    assert "resuming from update-00000020" in out
    lost = "warning: ledger.jsonl ends after update 10 and metrics.jsonl ends after update 11, before update-00000020"
    assert lost in " ".join(out.split())
    assert summary_of(whole)["weights_sha256"] == summary_of(folder)["weights_sha256"]


def test_a_resumed_run_has_the_settings_of_the_first_one_to_compare(tmp_path: Path, capsys: Any) -> None:
    flags = ("--lr-schedule", "constant", "--model", "tiny", "--checkpoint-every", "2 updates")
    _, first = command(tmp_path / "first", *flags, "--updates", "2")
    _, second = command(tmp_path / "second", *flags, "--updates", "4", "--resume", str(first))
    capsys.readouterr()
    assert main(["compare", str(first), str(second)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("training.", "run."))]
    assert [line.split()[0] for line in lines] == ["training.updates", "run.resume"]


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_again(tmp_path: Path, capsys: Any) -> None:
    flags = ("--lr-schedule", "constant", "--model", "tiny", "--checkpoint-every", "2 updates", "--updates", "6")
    _, folder = command(tmp_path, *flags)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "state": "running", "exit_code": None}))
    shutil.rmtree(folder / "checkpoints")
    capsys.readouterr()
    assert command(tmp_path, *flags)[0] == 0
    line = f"raypod: warning: {folder} has none of the checkpoints that it wrote: the interrupted run begins again"
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_inline_run_with_a_checkpoint(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = StateFile.on_event

    def raise_in_update_4(self: StateFile, event: Event) -> None:
        handle(self, event)
        if isinstance(event, UpdateDone) and event.update == 4:
            signal.raise_signal(number)

    monkeypatch.setattr(StateFile, "on_event", raise_in_update_4)
    code, folder = command(tmp_path, "--epochs", "400", "--num-instances", "1", "--model", "tiny")
    assert code == 130
    summary = summary_of(folder)
    assert summary["interrupted"]
    assert 4 <= summary["updates"] < 100
    assert (folder / "checkpoints" / "LATEST").read_text().strip() == f"update-{summary['updates']:08d}"
    assert f"Interrupted after update {summary['updates']}; continue with --resume" in capsys.readouterr().out


def test_different_initial_weights_are_an_error(make: Callable[..., Plan]) -> None:
    plan = make(**INLINE, pod={"num_instances": 1})
    fleet: Any = InlineFleet(plan)
    fleet.call = lambda method, *_: ["aa" * 32, "bb" * 32] if method == "seed_weights" else [None]
    with pytest.raises(WeightsDiffer, match="instance 1"):
        list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)))


def test_a_run_on_synthetic_data_of_the_device_has_no_losses_and_does_not_stop(tmp_path: Path) -> None:
    flags = ("--updates", "2", "--model", "tiny", "--synthetic-data-on-device", "--num-instances", "1")
    code, folder = command(tmp_path, *flags)
    assert code == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [None, None]


def test_a_data_set_without_a_test_split_is_not_evaluated(make: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "only_training.py").write_text(
        "import torch\n\n\ndef make(folder):\n"
        "    return [(torch.full((1, 8, 8), float(i)), i % 2) for i in range(8)], [], 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"data": {"dataset": "only_training:make"}, "training": {"batch_size": 2, "model": "tiny", "epochs": 1}}
    plan = make(**own, **INLINE, pod={"num_instances": 1, "replicas": 1})
    events = list(coordinator.run(plan, InlineFleet(plan), MetricsAggregator(plan, 0.0)))
    assert isinstance(events[-1], RunEnded)
    assert not any(isinstance(event, EvaluationDone) for event in events)


def test_verify_data_over_two_generations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify_two_generations(tmp_path, capsys)


def test_verify_data_of_own_data_that_workers_load(
    processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger_data.py").write_text(
        "import torch\n\n\ndef make(folder):\n"
        "    return [(torch.full((1, 8, 8), float(i)), i % 2) for i in range(200)], [], 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    verify_two_generations(tmp_path, capsys, "--dataset", "ledger_data:make", "--num-workers", "1")


def verify_two_generations(tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> None:
    constant = ("--lr-schedule", "constant", "--checkpoint-every", "2 updates", "--model", "tiny", *flags)
    command(tmp_path, *constant, "--updates", "3")
    run = tmp_path / "run"
    command(tmp_path, *constant, "--updates", "8", "--resume", str(run / "checkpoints" / "update-00000002"))
    assert main(["verify-data", str(run)]) == 0
    out = capsys.readouterr().out
    assert "generation 2 began after update 2: 1 superseded" in out
    assert "proved: 8 updates" in out
    updates = [json.loads(line)["update"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert updates == list(range(1, 9))
    whole = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    for lines_kept in (4, 9):  # only the first generation; the second one without its end
        (run / "ledger.jsonl").write_text("".join(whole[:lines_kept]))
        assert main(["verify-data", str(run)]) == 1
        out = capsys.readouterr().out
        assert "update-00000008 (generation 2) is newer" in out
        assert "metrics.jsonl reaches update 8" in out


def test_a_model_that_an_ipu_rejects_ends_a_strict_run_with_one_line(tmp_path: Path, capsys: Any) -> None:
    code, folder = command(tmp_path, "--strict", "--model", "tests.api.test_planning:reads_a_value")
    assert code == 1
    (line,) = capsys.readouterr().err.splitlines()
    log_file = folder / "logs" / "instance-0.log"
    assert "raypod: error: instance 0 on host localhost failed: poptorch.errors.Error: aten::item" in line
    assert line.endswith(f"its log: {log_file}")
    assert "Traceback" in log_file.read_text()


def test_a_run_that_fails_says_how_it_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "unsteady_data.py").write_text(
        "import torch\n\nreads = []\n\nclass Samples(list):\n"
        "    def __getitem__(self, index):\n"
        "        reads.append(index)\n"
        "        if len(reads) == 150:\n"
        "            raise ValueError('no such sample')\n"
        "        return list.__getitem__(self, index)\n\n"
        "def make(folder):\n"
        "    return Samples((torch.full((1, 8, 8), float(i)), i % 2) for i in range(200)), [], 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = ("--dataset", "unsteady_data:make", "--model", "tiny", "--updates", "8")
    code, folder = command(tmp_path, *flags)
    found = capsys.readouterr()
    assert (code, "ValueError: no such sample" in found.err) == (1, True)
    newest = resume.newest_valid(folder / "checkpoints")[0]
    assert f"update {newest.update} is saved in {newest.path.name}: continue with --resume {folder}" in found.out
    assert command(tmp_path, *flags, "--resume", str(folder))[0] == 0


def test_verify_data_detects_another_sample_order(tmp_path: Path) -> None:
    _, folder = command(tmp_path, "--updates", "2", "--model", "tiny")
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("seed: 42", "seed: 43"))
    assert main(["verify-data", str(folder)]) == 1


def test_a_nonfinite_loss_ends_the_run_and_keeps_the_checkpoints_before(tmp_path: Path, capsys: Any) -> None:
    flags = ["--learning-rate", "1e30", "--lr-schedule", "constant", "--warmup-updates", "0", "--model", "tiny"]
    flags += ["--checkpoint-every", "1 updates", "--precision", "32.32", "--updates", "40"]
    code, folder = command(tmp_path, *flags)
    assert code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "the loss became" in line
    assert "between update" in line
    good = resume.newest_valid(folder / "checkpoints")[0]
    if good is not None:
        assert all(bool(torch.isfinite(value).all()) for value in writer.load_checkpoint(good.path)["weights"].values())
    code, _ = command(tmp_path / "on", *flags, "--on-nonfinite", "continue")
    assert code == 0
    assert capsys.readouterr().out.count("warning: the loss became") == 1


RANGE = ["--fleet", "inline", "--device", "emulated", "--model", "tiny"]


def test_a_tenth_of_the_best_rate_is_suggested_if_the_loss_falls() -> None:
    rates = [10 * range_factor(update, 61) for update in range(61)]
    assert (rates[0], rates[30], rates[-1]) == pytest.approx((1e-5, 1e-2, 10.0))
    losses = [2.3 - 2 / (1 + math.exp(-4 * (math.log10(rate) + 2))) + (rate if rate > 1 else 0) for rate in rates]
    found = suggested(curve(list(zip(rates, losses))))
    assert found is not None
    lowest = rates[losses.index(min(losses))]
    assert lowest / 10 <= found <= lowest / 3  # smoothing delays it
    assert suggested(curve([(10.0**-update, 1.0) for update in range(20)])) is None
    assert suggested(curve([(0.1, math.nan), (None, 1.0), (0.2, 1.0)])) is None


def test_the_command_writes_the_curve_and_prints_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["lr-range", *RANGE, "--updates", "60", "--batch-size", "32", "--run-dir", str(tmp_path / "run")]
    assert main(words) == 0
    *_, result, place = capsys.readouterr().out.splitlines()
    assert place == f"Curve: {tmp_path / 'run' / 'lr-range.csv'}"
    rows = list(csv.DictReader((tmp_path / "run" / "lr-range.csv").read_text().splitlines()))
    assert float(rows[0]["learning_rate"]) == pytest.approx(1e-5)
    assert float(rows[1]["learning_rate"]) == pytest.approx(1e-5 * 1e6 ** (1 / 59))
    assert 1e-3 < float(result.rpartition("--learning-rate ")[2]) < 1


COMPILE = ["--dataset", "synthetic", "--model", "tiny", "--samples", "64", "--batch-size", "2"]


def test_training_and_evaluation_are_compiled_without_a_device(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    types: List[Any] = []

    def offline(options: Any, ipu_version: int = 2) -> Any:
        types.append((ipu_version, options.replication_factor))
        return options.connectionType(poptorch.ConnectionType.Never)

    monkeypatch.setattr(poptorch.Options, "useOfflineIpuTarget", offline)
    assert COMMANDS["compile"].run([*COMPILE, "--device", "emulated", "--replicas", "4", "--num-instances", "2"]) == 0
    assert types == [(2, 2)] * 2
    text = capsys.readouterr().out
    assert "training compiled in " in text
    assert "evaluation compiled in " in text
    assert "IPU 0  [" in text
    assert text.rstrip().endswith("Executables are kept nowhere: the emulated SDK compiles at each start, in seconds")


def test_with_the_sdk_another_process_prints_the_estimate(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
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
    assert COMMANDS["compile"].run([*COMPILE, "--executable-cache-path", cache]) == 0
    assert [words[1:5] for words in started] == [["-m", "raypod", "plan", "--memory"]]
    assert set(paths) == {cache}
    assert capsys.readouterr().out.rstrip().endswith(f"Executables are kept in {cache}")
    assert COMMANDS["compile"].run([*COMPILE, "--executable-cache-path", cache]) == 2  # as the plan, which says why
    assert "compiled in " not in capsys.readouterr().out
