"""Training in this process: the same program as under Ray, without it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
from bounded import wait_until
from torch.nn import functional

from raypod import datasets, train
from raypod.__main__ import main
from raypod.checkpoint import resume, writer
from raypod.coordinator import coordinator
from raypod.datasets.order import epoch_order
from raypod.datasets.transforms import gather
from raypod.errors import WeightsDiffer
from raypod.events import EvaluationDone, Event, RunEnded, UpdateDone
from raypod.fleet.inline import InlineFleet
from raypod.model import networks
from raypod.model.program import learning_rate
from raypod.plan.plan import Plan
from raypod.record.metrics import MetricsFold

INLINE = {"run": {"fleet": "inline", "device": "emulated"}}


def train_inline(plan: Plan) -> List[Event]:
    return list(coordinator.run(plan, InlineFleet(plan), MetricsFold(plan, 0.0)))


def final_weights(plan: Plan) -> Dict[str, torch.Tensor]:
    return writer.load_checkpoint(Path(plan.run_dir) / "checkpoints" / f"update-{plan.total_updates:08d}")["weights"]


def hand_written_loop(plan: Plan) -> Dict[str, torch.Tensor]:
    """The same training as a plain torch program: one network per replica for its statistics, gradients averaged."""
    geometry, config = plan.geometry, plan.config
    splits, order = datasets.load(config), epoch_order(config.training.seed, 0, plan.size.train_samples)
    torch.manual_seed(config.training.seed)
    network = networks.build_model(config, 1, 8, 10).train()
    decayed = [parameter for parameter in network.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in network.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": config.training.weight_decay}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=config.training.momentum)
    statistics = {name: value.clone() for name, value in network.named_buffers()}
    for update in range(plan.total_updates):
        first_of_call = update // geometry.device_iterations * geometry.device_iterations
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, first_of_call, plan.total_updates)
        optimizer.zero_grad()
        first = update * geometry.global_batch_size
        samples = order[first : first + geometry.global_batch_size]
        for number, micro_batch in enumerate(np.split(samples, len(samples) // geometry.micro_batch_size)):
            images, labels = gather(splits.train, micro_batch, splits.augmentation, (config.training.seed, 0))
            inputs = torch.from_numpy(images).float() / (255 * splits.std[0]) - splits.mean[0] / splits.std[0]
            if number % geometry.total_replicas == 0:  # global replica 0: its statistics are the ones that count
                network.load_state_dict(statistics, strict=False)
            loss = functional.cross_entropy(network(inputs), torch.from_numpy(labels))
            if number % geometry.total_replicas == 0:
                statistics = {name: value.clone() for name, value in network.named_buffers()}
            (loss / (geometry.total_replicas * geometry.gradient_accumulation)).backward()
        optimizer.step()
    network.load_state_dict(statistics, strict=False)
    return dict(network.state_dict())


@pytest.mark.parametrize(("replicas", "accumulation", "iterations"), [(1, 1, 1), (1, 3, 1), (4, 2, 2)])
def test_a_run_equals_a_hand_written_torch_loop(
    make: Callable[..., Plan], replicas: int, accumulation: int, iterations: int
) -> None:
    sizes = {"gradient_accumulation": accumulation, "device_iterations": iterations, "updates": 4}
    plan = make(training=sizes, pod={"replicas": replicas}, **INLINE)
    train_inline(plan)
    ours, expected = final_weights(plan), hand_written_loop(plan)
    assert list(ours) == list(expected)
    for name in expected:
        if "num_batches_tracked" not in name:  # integer buffers are constants on the IPU: contract, trap 53
            torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-5)


def sha256(plan: Plan) -> str:
    return next(event for event in train_inline(plan) if isinstance(event, RunEnded)).weights_sha256


def test_evaluating_on_the_way_changes_nothing_but_what_is_known(
    make: Callable[..., Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--epochs", "3", "--batch-size", "64", "--evaluate-every", "1")
    code, folder = command(tmp_path, *flags)
    assert code == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert [each["epoch"] for each in summary["evaluations"]] == [1, 2, 3]
    assert summary["evaluations"][-1]["accuracy"] == summary["test_accuracy"]
    out = capsys.readouterr().out
    assert "[Epoch 02] test loss: " in out
    assert out.count("test loss") == 2
    assert sha256(make(training={"epochs": 3, "batch_size": 64}, **INLINE)) == summary["weights_sha256"]


def test_another_seed_gives_other_weights(make: Callable[..., Plan]) -> None:
    hashes = [sha256(make(training={"updates": 2, "seed": seed}, **INLINE)) for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1]
    assert hashes[1] != hashes[2]


def test_device_iterations_do_not_change_the_weights(make: Callable[..., Plan]) -> None:
    flat = {"lr_schedule": "constant", "warmup_updates": 0, "updates": 4}
    hashes = {sha256(make(training={**flat, "device_iterations": n}, **INLINE)) for n in (1, 2, 4)}
    assert len(hashes) == 1


@pytest.mark.parametrize("precision", ["16.16", "16.32"])
def test_half_precision_trains(make: Callable[..., Plan], precision: str) -> None:
    plan = make(training={"precision": precision, "updates": 60, "learning_rate": 0.05}, **INLINE)
    losses = [event.loss for event in train_inline(plan) if hasattr(event, "samples_per_s")]
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])
    stored = final_weights(plan)["features.0.weight"]
    assert stored.dtype == (torch.float16 if precision == "16.16" else torch.float32)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_the_other_optimizers_train(make: Callable[..., Plan], optimizer: str) -> None:
    plan = make(training={"optimizer": optimizer, "learning_rate": 0.003, "updates": 60}, **INLINE)
    losses = [event.loss for event in train_inline(plan) if hasattr(event, "samples_per_s")]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_eight_bit_io_gives_the_same_weights(make: Callable[..., Plan]) -> None:
    hashes = {sha256(make(data={"eight_bit_io": on}, training={"updates": 2}, **INLINE)) for on in (False, True)}
    assert len(hashes) == 1


def test_images_are_enlarged_on_the_device_in_half_precision(make: Callable[..., Plan]) -> None:
    data = {"eight_bit_io": True, "image_size": 16}
    plan = make(data=data, training={"precision": "16.16", "updates": 2}, **INLINE)
    assert [event.loss for event in train_inline(plan) if isinstance(event, UpdateDone)] == pytest.approx(
        [2.3, 2.3], abs=0.4
    )


def command(tmp_path: Path, *flags: str) -> tuple[int, Path]:
    folder = tmp_path / "run"
    inline = ["--fleet", "inline", "--device", "emulated", "--run-dir", str(folder)]
    return train.main([*inline, *flags]), folder


def test_the_run_folder_holds_what_others_rely_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, folder = command(tmp_path, "--updates", "46", "--eight-bit-io", "--async-dataloader")
    assert code == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert 0 <= summary["data_wait_share"] < 1
    wanted = "updates epochs loss accuracy test_accuracy samples_per_s seconds_to_first_update weights_sha256 device "
    assert set((wanted + "restarts topology").split()) <= set(summary)
    assert (summary["updates"], summary["device"]) == (46, "emulated")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, 47))
    assert json.loads((folder / "plan.json").read_text())["total_updates"] == 46
    assert {"config.yaml", "logs", "checkpoints"} <= {path.name for path in folder.iterdir()}
    out = capsys.readouterr().out
    assert "[Epoch 01] loss: " in out
    assert "Test accuracy: " in out


def test_a_run_goes_on_where_it_stopped_bit_for_bit(tmp_path: Path) -> None:
    flat = ("--updates", "60", "--lr-schedule", "constant")
    _, whole = command(tmp_path / "whole", *flat)
    _, part = command(tmp_path / "part", "--updates", "30", *flat[2:])
    code, _ = command(tmp_path / "part", "--resume", str(part), *flat)
    assert code == 0
    summaries: List[Dict[str, Any]] = [json.loads((run / "summary.json").read_text()) for run in (whole, part)]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert len((part / "metrics.jsonl").read_text().splitlines()) == 60


def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(
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
    assert "going on from update-00000020" in out
    summaries = [json.loads((run / "summary.json").read_text()) for run in (whole, folder)]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]


def start_inline(folder: Path, *flags: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "raypod.train", "--fleet", "inline", "--num-instances", "1", "--device", "emulated"]
    pipe = subprocess.PIPE
    command = [*line, "--run-dir", str(folder / "run"), *flags]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_inline_run_with_a_checkpoint_and_130(tmp_path: Path, number: int) -> None:
    command = start_inline(tmp_path, "--epochs", "400")
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 3, 60)
    command.send_signal(number)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 130, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"]
    assert f"Interrupted after update {summary['updates']}; go on with --resume" in out


def test_weights_that_differ_at_the_start_are_told_by_instance(make: Callable[..., Plan]) -> None:
    plan = make(**INLINE, pod={"num_instances": 1})
    fleet = InlineFleet(plan)

    def call(method: str, *arguments: Any) -> List[Any]:
        return ["aa" * 32, "bb" * 32] if method == "seed_weights" else [None]

    fleet.call = call  # type: ignore[method-assign]
    with pytest.raises(WeightsDiffer, match="instance 1"):
        list(coordinator.run(plan, fleet, MetricsFold(plan, 0.0)))


def test_a_data_set_without_a_test_split_trains(
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
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("raypod: error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("flags", [[], ["--dataset", "ledger_data:make", "--num-workers", "1", "--model", "tiny"]])
def test_each_sample_once_is_proved_over_a_chain_of_resumes(
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
    for left in (4, 9):  # the first life alone; the second without its end
        (tmp_path / "run" / "ledger.jsonl").write_text("".join(whole[:left]))
        assert main(["verify-data", str(tmp_path / "run")]) == 1
        told = capsys.readouterr().out
        assert "update-00000008 (generation 2) was made later" in told
        assert "metrics.jsonl goes on to update 8" in told


def test_another_data_set_than_the_ledger_was_written_for_is_noticed(tmp_path: Path) -> None:
    _, folder = command(tmp_path, "--updates", "2")
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("seed: 42", "seed: 43"))
    assert main(["verify-data", str(folder)]) == 1


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--learning-rate", "1e30", "--lr-schedule", "constant", "--warmup-updates", "0", "--model", "tiny"]
    flags += ["--checkpoint-every", "1 updates", "--precision", "32.32", "--updates", "40"]
    code, folder = command(tmp_path, *flags)
    assert code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "the loss turned" in line
    assert "between update" in line
    good = resume.newest_good(folder / "checkpoints")[0]
    if good is not None:  # whatever is there is made of numbers
        assert all(bool(torch.isfinite(value).all()) for value in writer.load_checkpoint(good.path)["weights"].values())
    code, _ = command(tmp_path / "on", *flags, "--on-nonfinite", "continue")
    assert code == 0
    assert capsys.readouterr().out.count("warning: the loss turned") == 1
