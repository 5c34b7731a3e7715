"""`raypod pack` of WebDataset tars of others: they stay where they are, and train like other shards."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from PIL import Image

from raypod import train
from raypod.__main__ import main
from raypod.training.data import registry, shards
from raypod.training.tasks.registry import task_of_plan
from tests.support.fed import equal, fed
from tests.support.shard_threads import enter_folder

MODULE = """
import torch
from tests.support.regression import Regression
class Task(Regression):
    def collate(self, samples):
        (sample,) = samples
        x = torch.from_numpy(sample["x.npy"].astype("float32")) + len(sample["txt"]) + sample["json"]["more"][0]
        return {"x": x[None], "y": torch.tensor([float(sample["cls"])])}
class Raw(Task):
    collate = None
"""
INLINE = ["--fleet", "inline", "--device", "emulated", "--replicas", "2", "--epochs", "2"]
SIZES: Any = {"training": {"epochs": 2, "batch_size": 2}, "pod": {"replicas": 4, "num_instances": 1}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder(tmp_path, "tar_modules", MODULE, monkeypatch)
    Path("tars").mkdir()


def encoded(value: Any) -> bytes:
    file = io.BytesIO()
    if isinstance(value, Image.Image):
        value.save(file, "PNG")
    elif isinstance(value, np.ndarray):
        np.save(file, value)
    else:
        file.write(value if isinstance(value, bytes) else json.dumps(value).encode())
    return file.getvalue()


def write(name: str, samples: Dict[str, Dict[str, Any]], form: int = tarfile.PAX_FORMAT) -> None:
    """Write a tar as webdataset's writer does, whose times have fractions: further headers of PAX."""
    with tarfile.open(f"tars/{name}", "w", format=form) as tar:
        tar.addfile(tarfile.TarInfo("__about__.txt"))
        for key, files in samples.items():
            for suffix, value in files.items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.mtime, data = 1.5 if form == tarfile.PAX_FORMAT else 1, encoded(value)  # type: ignore[assignment]
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def write_images() -> List[Dict[str, Any]]:
    """Write 24 training images in three tars of different formats, and 6 test images; return them in order."""
    generator, found = np.random.default_rng(0), []
    for number, name in enumerate(["a-train-0.tar", "a-train-1.tar", "a-train-2.tar", "a-val-0.tar"]):
        form = tarfile.GNU_FORMAT if number == 1 else tarfile.PAX_FORMAT
        samples = {}
        for each in range(6 if number == 3 else 8):
            image = Image.fromarray(generator.integers(0, 256, (40, 40, 3), dtype=np.uint8))
            key = f"{'long/' * 30 if each == 3 else ''}s{number}{each}"
            samples[key] = {"json": {"id": each}, "png": image, "cls": (number + each) % 3}
        write(name, samples, form)
        found += list(samples.values())
    return found


def write_rows() -> None:
    for number, name in enumerate(["train-0.tar", "train-1.tar", "test.tar"]):
        samples = {}
        for each in range(10):
            values = np.arange(4, dtype=np.int16) + each + 10 * number
            samples[f"k{each}"] = {"X.npy": values, "jpg": b"\xff" * 700, "cls": each % 5, "txt": b"x" * each}
            samples[f"k{each}"]["json"] = {"more": [number]}
        write(name, samples)


def hash_of(*words: str) -> Any:
    run = f"run{len(list(Path().iterdir()))}"
    assert train.main([*INLINE, *words, "--run-dir", run]) == 0
    return json.loads(Path(run, "summary.json").read_text())["weights_sha256"]


def test_images_of_others_train_as_those_of_a_folder_and_stay_where_they_are(make: Any, capsys: Any) -> None:
    images = write_images()
    assert main(["pack", "tars", "packed"]) == 0
    assert "24 training and 6 test samples in 4 shards" in capsys.readouterr().out
    assert {each.resolve().parent.name for each in Path("packed/train").iterdir()} == {"tars"}
    written = [each for each in Path("packed").rglob("*") if each.is_file() and not each.is_symlink()]
    assert sum(each.stat().st_size for each in written) < 10_000
    assert main(["pack", "--verify", "packed"]) == 0
    plan = make(data={"dataset": "imagefolder", "data_dir": "packed", "image_size": 32}, **SIZES)
    splits = registry.load(plan.config)
    assert (splits.classes, splits.names) == (3, ("0", "1", "2"))
    ours = sorted((splits.train.files.read(index), int(splits.train[index][1])) for index in range(24))
    assert ours == sorted((encoded(each["png"]), each["cls"]) for each in images[:24])
    assert [splits.test.files.read(index) for index in range(6)] == [encoded(each["png"]) for each in images[24:]]
    words = ["--dataset", "imagefolder", "--image-size", "32", "--model", "tiny", "--batch-size", "2"]
    expected = hash_of(*words, "--data-dir", "packed")
    place = f"file://{Path('packed').resolve()}"
    assert hash_of(*words, "--data-dir", place, "--shuffle-window", "3") == expected
    data = {"dataset": "imagefolder", "image_size": 32, "shuffle_window": 1}
    fed_by_one = fed(make(data={**data, "data_dir": "packed"}, **SIZES))
    for instances in (2, 4):
        sizes = {**SIZES, "pod": {"replicas": 4, "num_instances": instances}}
        assert equal(fed(make(data={**data, "data_dir": place}, **sizes)), fed_by_one)


def test_files_of_samples_are_values_for_the_collate_function_of_a_task(make: Any) -> None:
    write_rows()
    assert main(["pack", "tars", "packed", "--columns", "x.npy,cls,txt,json"]) == 0
    task = ["--task", "tar_modules:Task", "--lr-schedule", "constant"]
    place = f"file://{Path('packed').resolve()}"
    whole = hash_of(*task, "--data-dir", "packed")
    assert hash_of(*task, "--data-dir", place, "--shuffle-window", "9") == whole
    index = json.loads(Path("packed/index.json").read_text())
    assert (index["structure"], [each["kind"] for each in index["fields"]]) == (
        "members",
        ["array", "number", "text", "json"],
    )
    plan = make(task={"name": "tar_modules:Task"}, data={"data_dir": "packed"}, **SIZES)
    data = task_of_plan(plan).load().train
    found = sorted((float(data[index]["x"][0]), float(data[index]["y"])) for index in range(20))
    assert found == sorted((each + 10.0 * number + each + number, each % 5) for number in (0, 1) for each in range(10))
    expected = fed(plan)
    for instances in (2, 4):
        sizes = {**SIZES, "pod": {"replicas": 4, "num_instances": instances}}
        assert equal(fed(make(task={"name": "tar_modules:Task"}, data={"data_dir": "packed"}, **sizes)), expected)
    assert train.main([*INLINE[:-2], *task, "--data-dir", "packed", "--epochs", "1", "--run-dir", "part"]) == 0
    assert train.main([*INLINE, "--resume", "part", "--run-dir", "rest"]) == 0
    assert json.loads(Path("rest/summary.json").read_text())["weights_sha256"] == whole


def test_a_window_of_a_shard_reads_a_tar_after_the_other(make: Any) -> None:
    write_rows()
    assert main(["pack", "tars", "packed", "--columns", "x.npy,cls,txt,json"]) == 0
    plan = make(task={"name": "tar_modules:Task"}, data={"data_dir": "packed", "shuffle_window": 1}, **SIZES)
    rows = torch.stack([each.reshape(-1) for each in fed(plan)[::2]])
    assert plan.dataset_size.shards == (10, 10)
    first_epoch = rows[: len(rows) // 2].reshape(-1, 4)[:, 0]
    assert len({bool(each >= 21) for each in first_epoch[:8].tolist()}) <= 2
    assert shards.read_index(Path("packed")).fields[0].name == "x.npy"


@pytest.mark.parametrize(
    ("samples", "words", "message"),
    [
        (
            {"a": {"png": b"x", "cls": 1}, "b": {"png": b"x"}},
            [],
            r"train.tar: the sample b needs an image and .cls, and",
        ),
        (
            {"a": {"png": b"x", "cls": b"dog"}},
            [],
            r"the sample a: its .cls is b'dog', and must be the number of a class",
        ),
        ({"a": {"npy": b"x"}, "b": {"txt": b"x"}}, [], r"train.tar: the sample b has no .npy; it has .txt"),
        ({"a": {"npy": b"x"}}, ["--columns", "jpg"], r"train.tar: the sample a has no .jpg; it has .npy"),
        ({"a": {"npy": b"x"}}, ["--shard-size", "1MB"], r"--shard-size has no effect on tars, which are indexed where"),
        ({}, [], r"train.tar has no files of samples, as 000042.jpg and 000042.cls"),
    ],
)
def test_tars_that_cannot_be_used_are_one_line(samples: Any, words: List[str], message: str, capsys: Any) -> None:
    write("train.tar", samples)
    assert main(["pack", "tars", "packed", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line
    assert not list(Path().glob("packed*"))


def test_a_truncated_a_compressed_and_a_moved_tar_are_one_line(capsys: Any) -> None:
    write_rows()
    assert main(["pack", "tars", "packed", "--columns", "x.npy,cls,txt,json"]) == 0
    data = Path("tars/train-1.tar").read_bytes()
    for content, message in (
        (data[:6000], "train-1.tar"),
        (b"\x1f\x8b" + data[2:], "as a tar file without compression"),
    ):
        Path("tars/train-1.tar").write_bytes(content)
        capsys.readouterr()
        assert main(["pack", "tars", "other"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    Path("tars/train-1.tar").rename("tars/elsewhere.tar")
    assert train.main([*INLINE, "--task", "tar_modules:Task", "--data-dir", "packed"]) == 2
    assert "the shard packed/train/00001.tar cannot be read: No such file" in capsys.readouterr().err


def test_a_sample_of_files_without_a_collate_function_names_the_hook(capsys: Any) -> None:
    write_rows()
    assert main(["pack", "tars", "packed", "--columns", "jpg"]) == 0
    assert train.main([*INLINE, "--task", "tar_modules:Raw", "--data-dir", "packed"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the entry 'jpg' of the first sample is a bytes: make a tensor of it in `collate`" in line
