"""`raypod.from_parquet`, `from_hf` and `from_ray_data`, and `raypod pack` of folders of tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

import raypod
from raypod import train
from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.training.data import shards
from raypod.training.data.packed_samples import Form, decode
from raypod.training.data.tables import splits_in
from tests.support.refused import refused

pa = pytest.importorskip("pyarrow", reason="needs the package pyarrow")
from pyarrow import parquet  # noqa: E402 - after it was found

TASK = """
import raypod
from tests.support.regression import Regression
class Task(Regression):
    def datasets(self):
        splits = (raypod.from_parquet(f"tables/{split}-*.parquet", ["x", "y"]) for split in ("train", "test"))
        return tuple(splits)
"""
X = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
INLINE = ["--fleet", "inline", "--device", "emulated", "--num-instances", "1", "--replicas", "2", "--epochs", "2"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("tables").mkdir()
    (tmp_path / "task_of_tables.py").write_text(TASK)


def table(first: int, end: int, **columns: Any) -> Any:
    rows = X[first:end]
    return pa.table({"x": list(rows), "y": rows[:, 0], "text": ["a"] * len(rows), **columns})


def write_parquet() -> None:
    """Write 24 training rows, in two files and several row groups, and 6 test rows."""
    for name, first, end in (("train-0", 0, 10), ("train-1", 10, 24), ("test-0", 24, 30)):
        parquet.write_table(table(first, end), f"tables/{name}.parquet", row_group_size=4)


def save(folder: str, content: Any) -> None:
    """Write a table as `save_to_disk` of Hugging Face's datasets does, in two files."""
    Path(folder).mkdir(parents=True)
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    for number, name in enumerate(names):
        with pa.OSFile(f"{folder}/{name}", "wb") as file, pa.ipc.new_stream(file, content.schema) as stream:
            stream.write_table(content.slice(number * 5, 5 if number == 0 else None))
    Path(f"{folder}/state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def hash_of(*words: str) -> Any:
    run = f"run{len(list(Path().iterdir()))}"
    assert train.main([*INLINE, "--task", "task_of_tables:Task", *words, "--run-dir", run]) == 0
    return json.loads(Path(run, "summary.json").read_text())["weights_sha256"]


def test_parquet_files_train_the_same_as_a_data_set_as_shards_and_as_a_saved_folder() -> None:
    write_parquet()
    expected = hash_of()
    assert main(["pack", "tables", "packed", "--columns", "x,y"]) == 0
    assert hash_of("--data-dir", "packed") == expected
    save("saved/train", table(0, 24))
    save("saved/test", table(24, 30))
    Path("saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert main(["pack", "--columns", "x,y", "saved", "other"]) == 0
    assert hash_of("--data-dir", "other") == expected


def test_few_pages_of_a_saved_folder_are_in_memory_while_it_is_packed() -> None:
    save("saved", pa.table({"x": list(np.zeros((400, 8192), dtype=np.float32))}))
    splits, size = splits_in(Path("saved"), None, Path()), 400 * 8192 * 4
    assert splits is not None
    assert sum(float(splits[0][row]["x"][0]) for row in range(400)) == 0
    lines = Path("/proc/self/smaps").read_text().splitlines()
    mapped = [number for number, line in enumerate(lines) if line.endswith(".arrow")]
    found = [next(line for line in lines[number:] if line.startswith("Rss:")) for number in mapped]
    assert len(found) == 2
    assert sum(int(line.split()[1]) for line in found) * 1024 < size / 4


def test_rows_of_all_kinds_of_columns() -> None:
    nested = pa.array(np.arange(60).reshape(10, 3, 2).tolist(), pa.list_(pa.list_(pa.int64())))
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(40, dtype=np.int16)), 4)
    ragged: List[List[float]] = [[0.5] * (1 + each % 3) for each in range(10)]
    content = pa.table({"nested": nested, "fixed": fixed, "ragged": ragged, "flag": [True, False] * 5})
    save("saved", content)
    rows = raypod.from_hf("saved")
    sliced = raypod.from_hf(FakeDataset(content.slice(3, 4)))
    assert (len(rows), len(sliced), list(rows[0])) == (10, 4, ["nested", "fixed", "ragged", "flag"])
    for index in range(10):
        for found in (rows[index], *([sliced[index - 3]] if 3 <= index < 7 else [])):
            assert np.array_equal(found["nested"], np.arange(60).reshape(10, 3, 2)[index])
            assert np.array_equal(found["fixed"], np.arange(40).reshape(10, 4)[index])
            assert (found["fixed"].dtype, found["ragged"].tolist()) == (np.int16, ragged[index])
            assert (found["flag"].shape, bool(found["flag"])) == ((), index % 2 == 0)
    assert rows.fingerprint != sliced.fingerprint == raypod.from_hf(FakeDataset(content.slice(3, 4))).fingerprint


class FakeDataset:
    """A `datasets.Dataset`."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def with_format(self, name: str) -> Any:
        assert name == "arrow"
        return _Rows(self.content)


class _Rows:
    def __init__(self, content: Any) -> None:
        self._content = content

    def __getitem__(self, index: Any) -> Any:
        assert index == slice(None)
        return self._content


FakeDataset.__module__, FakeDataset.__name__ = "datasets.arrow_dataset", "Dataset"


def test_columns_and_files_that_cannot_be_used() -> None:
    for columns, words in (
        ({}, "the column 'text' holds string, and samples are numbers: omit it with `columns`"),
        ({"y": [1.0, None, 2.0]}, "the column 'y' has 1 missing values: fill them"),
        ({"x": [[1.0], [None], [2.0]]}, "the column 'x' has missing values in its lists"),
        ({"text": [[[1], [1, 2]]] * 3}, "the column 'text' has nested lists of different lengths: pad them"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            raypod.from_hf(FakeDataset(table(0, 3, **columns)))[0]
        assert "\n" not in str(caught.value)
    write_parquet()
    Path("bad.parquet").write_text("no table")
    parquet.write_table(pa.table({"z": [1]}), "tables/train-2.parquet")
    Path("dict/train").mkdir(parents=True)
    Path("dict/dataset_dict.json").write_text("{}")
    Path("dict/train/state.json").write_text('{"_data_files": [{"filename": "none.arrow"}]}')
    for call, words in (
        (lambda: raypod.from_parquet("none"), "none is no Parquet file, and no folder of some"),
        (lambda: raypod.from_parquet("bad.parquet"), "cannot read bad.parquet: "),
        (lambda: raypod.from_parquet("tables/train*"), "train-2.parquet has other columns than .*train-0.parquet"),
        (lambda: raypod.from_parquet("tables/test-0.parquet", ["w"]), "has no column 'w'|No match for.*w|cannot read"),
        (lambda: raypod.from_hf("tables"), "tables is no folder of save_to_disk: it has no state.json"),
        (lambda: raypod.from_hf("dict"), "dict is a DatasetDict: name the folder of one of its splits, train"),
        (lambda: raypod.from_hf("dict/train"), "cannot read dict/train: .*none.arrow.*; save it again"),
        (lambda: raypod.from_hf([1]), "from_hf needs a datasets.Dataset, or the folder .*, not a list"),
        (lambda: raypod.from_ray_data([1]), "from_ray_data needs a ray.data.Dataset, not a list"),
    ):
        assert "\n" not in refused(words, call)


def test_parquet_files_that_are_larger_than_the_memory_are_streamed(run_python: Any) -> None:
    rows = np.random.default_rng(0).normal(size=(4000, 10_000)).astype(np.float32)
    for name, first, end in (("train-0", 0, 2000), ("train-1", 2000, 3990), ("test-0", 3990, 4000)):
        values = pa.FixedSizeListArray.from_arrays(pa.array(rows[first:end].reshape(-1)), 10_000)
        flags = pa.array([bool(each % 3) for each in range(first, end)])
        size = 400 if name == "train-0" else 2000
        parquet.write_table(pa.table({"x": values, "flag": flags}), f"tables/{name}.parquet", row_group_size=size)
    # The greatest memory of the process before and after, in kB: 160 MB of rows, in several parts.
    program = """
import resource
from raypod.__main__ import main
from raypod.training.data import packed_samples, packing, tables
import pyarrow.ipc, pyarrow.parquet, torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(["pack", "tables", "packed"]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    more_kb = int(run_python(program).splitlines()[-1])
    assert more_kb < 110_000
    assert main(["pack", "--verify", "packed"]) == 0
    index = shards.read_index(Path("packed"))
    arrays = shards.read_arrays(Path("packed"), index)
    files = shards.PackedFiles(Path("packed"), *shards.columns_of(index, "train", arrays))
    form = Form("dict", index.fields)
    for sample in (0, 399, 400, 1999, 2000, 3989):
        found = decode(files.read(sample), form)
        assert np.array_equal(found["x"], rows[sample])
        assert bool(found["flag"]) == bool(sample % 3)


def test_tables_that_cannot_be_streamed_are_one_line(capsys: Any) -> None:
    write_parquet()
    parquet.write_table(table(0, 3).drop(["y"]), "tables/train-2.parquet")
    Path("images/train/cat").mkdir(parents=True)
    cases = [
        (["images", "new", "--columns", "x"], "--columns has no effect on images, which has no tables: omit it"),
        (["tables", "new", "--columns", "x,y"], "tables/train-2.parquet has other columns than tables/train-0.parquet"),
        (["tables", "new", "--columns", "z"], "tables/train-0.parquet has no column 'z'; it has x, y, text"),
        (["tables", "new", "--columns", "x"], ""),
        (["tables", "new", "--columns", "x"], "new exists; choose another folder, or remove it"),
        (["tables", "none/new", "--columns", "x"], "cannot copy the rows of tables/train.* to none: No such file or"),
    ]
    for words, message in cases:
        assert main(["pack", *words]) == (2 if message else 0)
        lines = capsys.readouterr().err.splitlines()
        assert (len(lines) == 1 and re.search(message, lines[0])) or not message, lines
