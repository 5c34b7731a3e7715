"""`raypod evaluate`: the evaluation of the training, bit for bit, and what cannot be evaluated."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
from trained_runs import train_inline

from raypod.__main__ import main
from raypod.checkpoint import storage
from raypod.errors import ConfigError
from raypod.record import run_state
from raypod.trained.evaluate import evaluate


def evaluations(run: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


def tree(folder: Path) -> Dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_result_is_that_of_the_training(digits_run: Path) -> None:
    before = tree(digits_run)
    last = evaluations(digits_run)[-1]
    # The same checkpoint by its default, name, update and path, on another placement.
    for checkpoint, changes in ((None, {}), ("22", {"replicas": 4}), ("update-00000022", {"replicas": 1})):
        found = evaluate(digits_run, checkpoint, **changes)
        assert {name: found[name] for name in ("samples", "loss", "accuracy", "update")} == {
            name: last[name] for name in ("samples", "loss", "accuracy", "update")
        }
    summary = json.loads((digits_run / "summary.json").read_text())
    assert found["weights_sha256"] == summary["weights_sha256"]
    assert tree(digits_run) == before


def test_the_best_checkpoint_is_that_with_the_best_accuracy(digits_run: Path) -> None:
    kept = {each.update: each for each in storage.list_checkpoints(digits_run / "checkpoints")[0]}
    tested = {update: each.manifest.tested for update, each in kept.items() if each.manifest.tested}
    assert len(tested) == 2
    best = max(tested, key=lambda update: tested[update]["accuracy"])
    found = evaluate(digits_run, "best")
    assert found["update"] == best
    assert found["loss"] == tested[best]["loss"]


def test_a_pipeline_in_half_precision_is_evaluated_as_in_its_training(half_run: Path) -> None:
    (last,) = evaluations(half_run)
    found = evaluate(half_run / "checkpoints" / "update-00000002")
    assert (found["loss"], found["accuracy"]) == (last["loss"], last["accuracy"])


def test_the_moving_average_is_evaluated_as_in_its_training(tmp_path: Path) -> None:
    run = train_inline(tmp_path / "run", "--replicas", "1", "--updates", "6", "--ema", "0.5")
    (last,) = evaluations(run)
    found, trained = evaluate(run), evaluate(run, ema=False)
    summary = json.loads((run / "summary.json").read_text())
    assert (found["loss"], found["weights_sha256"]) == (last["loss"], summary["ema_sha256"])
    assert (trained["loss"] != last["loss"], trained["weights_sha256"]) == (True, summary["weights_sha256"])


def test_output_is_a_line_json_or_a_file(digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert main(["evaluate", str(digits_run), "--json", "--output", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads(file.read_text()) == found
    assert main(["evaluate", str(digits_run), "training.batch_size=16"]) == 0
    assert f"accuracy {found['accuracy']:.2f} % (360 images of digits, emulated)" in capsys.readouterr().out


def test_another_data_set_of_the_same_shape_and_classes(digits_run: Path) -> None:
    found = evaluate(digits_run, dataset="synthetic", image="1x8x8", samples=256)
    assert found["dataset"] == "synthetic"
    assert found["samples"] != evaluations(digits_run)[-1]["samples"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "synthetic"], "features.0.weight is [16, 3, 3, 3] in the model and [16, 1, 3, 3]"),
        (
            ["--dataset", "synthetic", "--image", "1x8x8", "--classes", "5"],
            "head.weight is [5, 64] in the model and [10, 64]",
        ),
        (["--dataset", "cifar10"], "--data-dir"),
        (["--data-dir", "/images"], "--data-dir has no effect on --dataset digits"),
        (["--checkpoint", "update-1"], "there is no such checkpoint or file"),
        (["--checkpoint", "7"], "update-00000022"),
        (["--learning-rate", "1"], "unknown flag --learning-rate"),
        (["training.learning_rate=1"], "training.learning_rate cannot be changed here"),
        (["--batch-size", "0"], "training.batch_size"),
        (["--output", "/no/such/folder/x.json"], "does not exist"),
        (["--ema"], "no moving average"),
    ],
)
def test_wrong_requests(digits_run: Path, fails: Callable[[List[str]], str], flags: List[str], message: str) -> None:
    assert message in fails(["evaluate", str(digits_run), *flags])


def test_what_is_no_run(tmp_path: Path, fails: Callable[[List[str]], str]) -> None:
    assert "there is no such run folder" in fails(["evaluate", str(tmp_path / "no")])
    assert "is not a run folder" in fails(["evaluate", str(tmp_path)])
    for command in ("evaluate", "predict"):
        assert "the following arguments are required: RUN (" in fails([command])


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(str(run), str(folder / "copy")))


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "manifest.json"])
def test_a_damaged_checkpoint(digits_run: Path, tmp_path: Path, fails: Callable[[List[str]], str], name: str) -> None:
    run = copied(digits_run, tmp_path)
    file = run / "checkpoints" / "update-00000022" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    assert f"{file.parent} is damaged: the SHA-256 of {name} does not match" in fails(["evaluate", str(run)])


def test_a_run_without_checkpoints(digits_run: Path, tmp_path: Path, fails: Callable[[List[str]], str]) -> None:
    run = copied(digits_run, tmp_path)
    shutil.rmtree(str(run / "checkpoints"))
    assert "contains no checkpoint" in fails(["evaluate", str(run)])
    assert "contains no checkpoint" in fails(["evaluate", str(run), "--checkpoint", "best"])


def test_a_run_that_trains(digits_run: Path, tmp_path: Path) -> None:
    run = copied(digits_run, tmp_path)
    state = run_state.read(run)
    assert state is not None
    parent = os.getppid()
    ticks = run_state.process_start_ticks(parent) or 0
    running = dataclasses.replace(state, state="running", exit_code=None, pid=parent, started_ticks=ticks)
    (run / run_state.NAME).write_text(json.dumps(dataclasses.asdict(running)))
    with pytest.raises(ConfigError, match="is still training .*--checkpoint last"):
        evaluate(run)
    assert evaluate(run, "last")["update"] == 22
