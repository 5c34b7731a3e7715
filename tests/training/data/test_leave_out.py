"""Samples that are left out: what takes their place, what the ledger records, and a run that continues without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
import torch

from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.plan import layout
from raypod.plan.plan import Plan
from raypod.plan.resolve import from_values
from raypod.runs import ledger
from raypod.training import data as datasets
from raypod.training.data.feed import Feed
from raypod.training.data.images import ImageSource
from raypod.training.data.order import epoch_order, in_place_of
from tests.support import image_folders
from tests.support.image_folders import config


def test_the_next_sample_takes_the_place_of_one_that_is_left_out() -> None:
    order = np.array([3, 0, 4, 1, 2])
    assert in_place_of((), order, 5) is order
    assert in_place_of((1, 4), order, 5).tolist() == [3, 0, 0, 2, 2]
    assert in_place_of((1, 2, 3), order, 5).tolist() == [4, 0, 4, 4, 4]


def fed(plan: Plan) -> List[List[int]]:
    """The labels of the training samples of the first epoch, and those of the test samples."""
    source = ImageSource(plan.config, datasets.load(plan.config))
    training, test = [], []
    for spec in plan.placement.instances:
        feed = Feed(plan, spec, source)
        training.append(torch.stack([labels for _, labels in feed.calls(plan.segments()[0])]))
        test += [label for (_, labels), valid in feed.evaluation_calls() for label in labels[:valid].tolist()]
        feed.close()
    return [torch.cat(training, dim=1).flatten().tolist(), sorted(test)]


@pytest.mark.parametrize("instances", [1, 2])
def test_an_epoch_and_an_evaluation_without_some_samples(make: Any, instances: int) -> None:
    pod = {"replicas": 2, "num_instances": instances}
    splits = datasets.load(from_values({}))
    left = epoch_order(42, 0, 1437)[[5, 700]].tolist()
    training, test = fed(make(data={"leave_out": [*left, "test:7"]}, pod=pod))
    expected, every_test = fed(make(pod=pod))
    for position, sample in ((5, left[0]), (700, left[1])):
        expected[position] = int(splits.train.labels[(sample + 1) % 1437])
    assert training == expected
    every_test.remove(int(splits.test.labels[7]))
    assert test == every_test


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("1437", "--leave-out 1437: the train split has 1437 samples, numbered from 0 to 1436; name some of them"),
        ("0,test:360", "--leave-out 0,test:360: the test split has 360 samples, numbered from 0 to 359"),
        ([f"test:{index}" for index in range(360)], "the test split has 360 samples"),
        ("x", "write the numbers of samples, as in 17,208,test:3"),
        ("3,3", "3 is listed twice"),
    ],
)
def test_samples_that_do_not_exist_are_an_error(make: Any, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(data={"leave_out": value})


def test_a_run_continues_without_an_image_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(image_folders.write(tmp_path / "data").parent)
    names = sorted(Path("data/train/cat").iterdir()) + sorted(Path("data/train/dog").iterdir())
    damaged = int(epoch_order(42, 0, 12)[7])  # of update 4
    names[damaged].write_bytes(b"no image")
    Path("data/val/dog/a.JPEG").write_bytes(b"no image")
    flags = ["--dataset", "imagefolder", "--data-dir", "data", "--image-size", "16", "--model", "tiny"]
    flags += ["--batch-size", "2", "--epochs", "2", "--checkpoint-every", "1 update", "--warmup-updates", "2"]
    command = ["train", *flags, "--replicas", "1", "--num-instances", "1", "--fleet", "inline", "--run-dir", "run"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert f"{names[damaged]}: Pillow does not recognize its format; replace it (a run that resumes then needs" in error
    assert f"leave it out with --leave-out {damaged}" in error
    assert main(["train", "--resume", "run", "--leave-out", str(damaged)]) == 1
    error = capsys.readouterr().err
    assert "data/val/dog/a.JPEG: Pillow does not recognize its format" in error
    assert "leave it out with --leave-out test:1" in error
    assert main(["train", "--resume", "run", "--leave-out", f"{damaged},test:1"]) == 0
    assert "of 1 images" in capsys.readouterr().out
    lines, unreadable = ledger.read(Path("run") / layout.LEDGER)
    begun = [line for line in lines if isinstance(line, ledger.GenerationStarted)]
    assert ([line.left_out for line in begun], unreadable) == ([(), (damaged,), (damaged,)], [])
    assert main(["verify-data", "run"]) == 0
    out = capsys.readouterr().out
    assert f"generation 2 leaves out samples {damaged}: the next one is in each place" in out
    assert "epoch 1: 12 of 12 samples seen exactly once" in out
    assert "exactly once in each whole one, except those left out and in their places" in out


def test_the_first_sample_may_be_left_out(tmp_path: Path, make: Any) -> None:
    folder = image_folders.write(tmp_path)
    (folder / "train" / "cat" / "a.JPEG").write_bytes(b"no image")
    plan = make(data=config(folder, leave_out=[0, 1]).data.model_dump(), training={"batch_size": 2})
    images, labels = ImageSource(plan.config, datasets.load(plan.config)).first_batch(42)
    assert (tuple(images.shape), labels.tolist()) == ((1, 3, 224, 224), [0])
