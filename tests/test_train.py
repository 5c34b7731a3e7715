"""The command `raypod train` with the inline fleet: its files, signals, errors and resumes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from bounded import COMMAND_S, wait_until
from torch import nn

from raypod import train
from raypod.__main__ import main
from raypod.checkpoint import resume, writer
from raypod.coordinator import coordinator
from raypod.errors import WeightsDiffer
from raypod.events import EvaluationDone, Event, RunEnded
from raypod.fleet.inline import InlineFleet
from raypod.plan.plan import Plan
from raypod.record.metrics import MetricsAggregator

INLINE = {"run": {"fleet": "inline", "device": "emulated"}}


def train_inline(plan: Plan) -> List[Event]:
    return list(coordinator.run(plan, InlineFleet(plan), MetricsAggregator(plan, 0.0)))


def command(tmp_path: Path, *flags: str) -> tuple[int, Path]:
    folder = tmp_path / "run"
    inline = ["--fleet", "inline", "--device", "emulated", "--run-dir", str(folder)]
    return train.main([*inline, *flags]), folder


def test_evaluations_during_the_run_do_not_change_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--epochs", "3", "--batch-size", "64")
    code, folder = command(tmp_path / "evaluated", *flags, "--evaluate-every", "1")
    assert code == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert [each["epoch"] for each in summary["evaluations"]] == [1, 2, 3]
    assert summary["evaluations"][-1]["accuracy"] == summary["test_accuracy"]
    out = capsys.readouterr().out
    assert "[Epoch 02] test loss: " in out
    assert out.count("test loss") == 2
    _, other = command(tmp_path / "other", *flags)
    assert json.loads((other / "summary.json").read_text())["weights_sha256"] == summary["weights_sha256"]


def test_the_files_of_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, folder = command(tmp_path, "--updates", "46", "--eight-bit-io", "--async-dataloader")
    assert code == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert 0 <= summary["data_wait_share"] < 1
    keys = "updates epochs loss accuracy test_accuracy samples_per_s seconds_to_first_update weights_sha256 device "
    assert set((keys + "restarts topology").split()) <= set(summary)
    assert (summary["updates"], summary["device"]) == (46, "emulated")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, 47))
    assert json.loads((folder / "plan.json").read_text())["total_updates"] == 46
    assert {"config.yaml", "logs", "checkpoints"} <= {path.name for path in folder.iterdir()}
    out = capsys.readouterr().out
    assert "[Epoch 01] loss: " in out
    assert "Test accuracy: " in out


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    flat = ("--updates", "60", "--lr-schedule", "constant")
    _, whole = command(tmp_path / "whole", *flat)
    _, part = command(tmp_path / "part", "--updates", "30", *flat[2:])
    code, _ = command(tmp_path / "part", "--resume", str(part), *flat)
    assert code == 0
    summaries: List[Dict[str, Any]] = [json.loads((run / "summary.json").read_text()) for run in (whole, part)]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert len((part / "metrics.jsonl").read_text().splitlines()) == 60


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = ("--lr-schedule", "constant", "--checkpoint-every", "10 updates")
    _, folder = command(tmp_path, *flat, "--updates", "24")
    weights = folder / "checkpoints" / "update-00000024" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    _, whole = command(tmp_path / "whole", *flat, "--updates", "30")
    capsys.readouterr()
    assert command(tmp_path, *flat, "--updates", "30", "--resume", str(folder))[0] == 0
    out = capsys.readouterr().out
    assert "warning: " in out
    assert "update-00000024 is damaged: weights.safetensors has" in out
    assert "resuming from update-00000020" in out
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole, folder)]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]


def start_inline(folder: Path, *flags: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "raypod.train", "--fleet", "inline", "--num-instances", "1", "--device", "emulated"]
    pipe = subprocess.PIPE
    command = [*line, "--run-dir", str(folder / "run"), *flags]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_inline_run_with_a_checkpoint_and_exit_code_130(tmp_path: Path, number: int) -> None:
    command = start_inline(tmp_path, "--epochs", "400")
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 3, 60)
    command.send_signal(number)
    out, err = command.communicate(timeout=COMMAND_S)
    assert command.returncode == 130, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"]
    assert f"Interrupted after update {summary['updates']}; continue with --resume" in out


def test_different_initial_weights_are_an_error(make: Callable[..., Plan]) -> None:
    plan = make(**INLINE, pod={"num_instances": 1})
    fleet = InlineFleet(plan)

    def call(method: str, *arguments: Any) -> List[Any]:
        return ["aa" * 32, "bb" * 32] if method == "seed_weights" else [None]

    fleet.call = call  # type: ignore[method-assign]
    with pytest.raises(WeightsDiffer, match="instance 1"):
        list(coordinator.run(plan, fleet, MetricsAggregator(plan, 0.0)))


def test_a_data_set_without_a_test_split_is_not_evaluated(
    make: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_training.py").write_text(
        "import torch\n\n\ndef make(folder):\n"
        "    return [(torch.full((1, 8, 8), float(i)), i % 2) for i in range(8)], [], 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"data": {"dataset": "only_training:make"}, "training": {"batch_size": 2, "model": "tiny", "epochs": 1}}
    plan = make(**own, **INLINE, pod={"num_instances": 1, "replicas": 1})
    events = train_inline(plan)
    assert isinstance(events[-1], RunEnded)
    assert not any(isinstance(event, EvaluationDone) for event in events)


def test_a_used_run_folder_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("precious\n")
    assert command(tmp_path, "--updates", "1")[0] == 2
    assert "holds a run already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--batch-sice", "3"],
        ["--replicas", "6", "--num-instances", "4"],
        ["--dataset", "digitz"],
        ["--model", "resnet9"],
        ["--batch-size", "5000"],
        ["--device", "ipu"],
        ["--collectives", "horovod"],
        ["--resume", "/nowhere"],
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(flags: List[str], tmp_path: Path) -> None:
    fleet = [] if "--num-instances" in flags else ["--fleet", "inline"]
    line = [sys.executable, "-m", "raypod.train", *fleet, "--run-dir", str(tmp_path / "run"), *flags]
    done = subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("raypod: error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("flags", [[], ["--dataset", "ledger_data:make", "--num-workers", "1", "--model", "tiny"]])
def test_verify_data_over_two_generations(
    flags: List[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger_data.py").write_text(
        "import torch\n\n\ndef make(folder):\n"
        "    return [(torch.full((1, 8, 8), float(i)), i % 2) for i in range(200)], [], 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    constant = ("--lr-schedule", "constant", "--checkpoint-every", "2 updates", *flags)
    command(tmp_path, *constant, "--updates", "3")
    command(
        tmp_path, *constant, "--updates", "8", "--resume", str(tmp_path / "run" / "checkpoints" / "update-00000002")
    )
    assert main(["verify-data", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "generation 2 began after update 2: 1 superseded" in out
    assert "proved: 8 updates" in out
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, 9))
    whole = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines(keepends=True)
    for lines_kept in (4, 9):  # only the first generation; the second one without its end
        (tmp_path / "run" / "ledger.jsonl").write_text("".join(whole[:lines_kept]))
        assert main(["verify-data", str(tmp_path / "run")]) == 1
        out = capsys.readouterr().out
        assert "update-00000008 (generation 2) is newer" in out
        assert "metrics.jsonl reaches update 8" in out


def test_a_model_that_an_ipu_rejects_ends_a_strict_run_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = command(tmp_path, "--strict", "--model", f"{__name__}:reads_a_value")
    assert code == 1
    (line,) = capsys.readouterr().err.splitlines()
    log_file = folder / "logs" / "instance-0.log"
    assert "raypod: error: instance 0 on host localhost failed: poptorch.errors.Error: aten::item" in line
    assert line.endswith(f"its log: {log_file}")
    assert "Traceback" in log_file.read_text()


def reads_a_value(channels: int, classes: int) -> nn.Module:
    class ReadsAValue(nn.Linear):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits = super().forward(images.flatten(1))
            return logits if logits.sum() < 1e9 else logits + 1

    return ReadsAValue(64 * channels, classes)


def test_verify_data_detects_another_sample_order(tmp_path: Path) -> None:
    _, folder = command(tmp_path, "--updates", "2")
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("seed: 42", "seed: 43"))
    assert main(["verify-data", str(folder)]) == 1


def test_a_nonfinite_loss_ends_the_run_and_keeps_the_checkpoints_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
