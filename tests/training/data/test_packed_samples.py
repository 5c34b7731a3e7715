"""`raypod pack` of data sets and tasks of the user and of tars of others: the format, equal runs, mistakes."""

from __future__ import annotations

import io
import json
import re
import tarfile
import warnings
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from PIL import Image

from raypod import train
from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.system.remote.store import Store
from raypod.training.data import registry, shards
from raypod.training.data.loading import SeededSamples
from raypod.training.data.packed_samples import decode, encode, form_of
from raypod.training.tasks.registry import task_of_plan
from tests.support import ROOT
from tests.support.fed import equal, fed
from tests.support.refused import one_line
from tests.support.shard_threads import enter_folder

MODULE = """
import numpy as np, raypod, torch
from raypod.training.data import ArrayDataset
from torch import nn
X = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
IMAGES = np.random.default_rng(0).integers(0, 256, (50, 1, 8, 8), dtype=np.uint8)
def images(data_dir):
    return ArrayDataset(IMAGES[:40], np.arange(40) % 3), ArrayDataset(IMAGES[40:], np.arange(10) % 3), 3
def short(data_dir): return [(IMAGES[0], 5)], [], 3
class Rows:
    def __init__(self, rows): self.rows = rows
    def __len__(self): return len(self.rows)
    def __getitem__(self, index): return {"x": torch.from_numpy(self.rows[index]), "count": 3, "half": 0.5}
class Task(raypod.Task):
    defaults = {"training.batch_size": 2}
    def datasets(self): return Rows(X[:40]), Rows(X[40:])
    def network(self, first_batch): return nn.Linear(first_batch["x"].shape[1], 1)
    def training_outputs(self, network, x, count, half):
        return nn.functional.mse_loss(network(x).squeeze(1), x[:, 0] * half), {}
    def evaluation_outputs(self, network, x, count, half):
        return {"loss": ((network(x).squeeze(1) - x[:, 0] * half) ** 2, 1)}
class InMemory(Task):
    def datasets(self):
        half = np.full(50, 0.5)
        train = raypod.Arrays(x=X[:40], count=np.full(40, 3), half=half[:40])
        return train, raypod.Arrays(x=X[40:], count=np.full(10, 3), half=half[40:])
class Padded(Task):
    collate = raypod.pad_collate(4, 6, fields=["x"])
    def datasets(self):
        rows = [{"x": torch.from_numpy(row[: 2 + index % 4].copy()), "count": 3, "half": 0.5}
                for index, row in enumerate(X)]
        return rows[:40], rows[40:]
class Augmented(Task):
    def collate(self, samples):
        return {name: torch.as_tensor(value)[None] + float(np.random.rand()) for name, value in samples[0].items()}
class Draws(Task):
    def datasets(self): return Noisy(X), None
class Noisy(Rows):
    def __getitem__(self, index): return {"x": torch.rand(6), "count": 3, "half": 0.5}
class Uneven(Task):
    def datasets(self): return [{"x": torch.ones(6), "count": 3, "half": each} for each in (0.5, torch.ones(()))], None
class Named(Task):
    def datasets(self): return [{"x.y": torch.ones(6)}] * 3, None
class Halves(Task):
    def datasets(self): return [{"x": torch.ones(6, dtype=torch.bfloat16)}] * 3, None
class Fails(Task):
    def datasets(self): return Failing(X), None
class Failing(Rows):
    def __getitem__(self, index):
        if index == 5:
            raise KeyError("gone")
        return super().__getitem__(index)
class Empty(Task):
    def datasets(self): return [], None
from tests.support.regression import Regression
class Tars(Regression):
    def collate(self, samples):
        (sample,) = samples
        x = torch.from_numpy(sample["x.npy"].astype("float32")) + len(sample["txt"]) + sample["json"]["more"][0]
        return {"x": x[None], "y": torch.tensor([float(sample["cls"])])}
class Raw(Tars): collate = None
"""
INLINE = ["--fleet", "inline", "--device", "emulated", "--num-instances", "1", "--replicas", "2", "--epochs", "2"]
PNG = {"png": b"x", "cls": 1}
TASK = ["--task", "packed_modules:Task"]
COLUMNS = ["--columns", "x.npy,cls,txt,json"]
SIZES: Any = {"training": {"epochs": 2, "batch_size": 2}, "pod": {"replicas": 4, "num_instances": 1}}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder(tmp_path, "packed_modules", MODULE, monkeypatch)
    Path("tars").mkdir()


def pack(*words: str) -> Path:
    assert main(["pack", "--shard-size", "50kB", *words, "packed"]) == 0
    return Path("packed").resolve()


def hash_of(*words: str) -> Any:
    """Return the weights at the end of a run."""
    run = Path(f"run{len(list(Path().iterdir()))}")
    assert train.main([*INLINE, *words, "--run-dir", str(run)]) == 0
    return json.loads((run / "summary.json").read_text())["weights_sha256"]


@pytest.mark.parametrize(
    "sample",
    [
        torch.arange(6).reshape(2, 3).t(),
        (np.float32(2.5), 7, 0.1, True, torch.zeros(0, 3)),
        {"a": np.asfortranarray(np.eye(3, 2, dtype=np.float16)), "B-1": np.array([1 + 2j]), "c": np.array(3, ">i4")},
    ],
)
def test_a_sample_is_decoded_as_it_was_and_other_kinds_cannot_be_packed(sample: Any) -> None:
    form, data = form_of(sample), b""
    for _, file in encode(sample, form):
        data += bytes(-len(data) % 512 + 512 * bool(data)) + file
    found = decode(data, form)
    names = list(sample) if isinstance(sample, dict) else range(len(form.fields))
    if isinstance(sample, torch.Tensor):
        sample, found = [sample], [found]
    for name in names:
        assert type(found[name]) is (np.ndarray if isinstance(sample[name], np.generic) else type(sample[name]))
        assert np.asarray(found[name]).dtype == np.asarray(sample[name]).dtype
        assert np.array_equal(found[name], sample[name])
    for wrong, words in (({}, "an empty dict"), ({"x": "a"}, "'x' is a str"), ([np.array(["a"])], "array of <U1")):
        with pytest.raises(ConfigError, match=words):
            form_of(wrong)


def test_shards_are_read_with_tarfile_and_numpy_alone() -> None:
    folder = pack(*TASK)
    rows = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    index = json.loads((folder / "index.json").read_text())
    assert (index["structure"], [each["name"] for each in index["fields"]]) == ("dict", ["x", "count", "half"])
    found: Dict[str, np.ndarray] = {}
    for shard in index["train"]["shards"]:
        with tarfile.open(str(folder / shard["file"])) as tar:
            for member in tar.getmembers():
                found[member.name] = np.load(io.BytesIO(tar.extractfile(member).read()))  # type: ignore[union-attr]
    assert len(index["train"]["shards"]) > 1
    assert len(found) == 40 * 3
    for sample in range(40):
        assert np.array_equal(found[f"{sample:09d}.x.npy"], rows[sample])
        assert (found[f"{sample:09d}.count.npy"], found[f"{sample:09d}.half.npy"]) == (3, 0.5)
    columns = {name: np.load(str(folder / "index" / f"train_{name}.npy")) for name in shards.PLACES}
    with (folder / index["train"]["shards"][columns["shards"][7]]["file"]).open("rb") as file:
        file.seek(columns["offsets"][7])
        data = file.read(columns["sizes"][7])
    assert shards.checksum_of_sample(data) == columns["checksums"][7]
    page = ROOT / "docs" / "reference" / "data.md"
    documented: Dict[str, Any] = {}
    (block,) = re.findall(r"```python\n(import json\n.*?)```", page.read_text(), re.DOTALL)
    exec(block, documented)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the block leaves the index to the end of its function
        read = documented["read"](folder, "train", 7)
    assert (list(read), read["count"], read["half"]) == (["x", "count", "half"], 3, 0.5)
    assert np.array_equal(read["x"], rows[7])


@pytest.mark.parametrize("name", ["Task", "InMemory", "Padded", "images"])
def test_a_run_is_the_same_with_its_data_sets_and_with_shards(name: str) -> None:
    given, model = ["--task", f"packed_modules:{name}"], []
    if name == "images":
        given, model = ["--dataset", "packed_modules:images"], ["--model", "tiny", "--batch-size", "2"]
    folder, expected = pack(*given), hash_of(*given, *model)
    words = ["--dataset", "shards", *model] if model else given
    assert hash_of(*words, "--data-dir", str(folder)) == expected
    assert hash_of(*words, "--data-dir", f"file://{folder}", "--cache-size", "1GB") == expected
    assert main(["pack", "--verify", str(folder)]) == 0


@pytest.mark.parametrize("instances", [2, 4])
@pytest.mark.parametrize("name", ["Task", "Padded"])
def test_any_placement_feeds_the_same_from_a_url_in_windows(make: Any, instances: int, name: str) -> None:
    task = {"task": {"name": f"packed_modules:{name}"}}
    folder = pack("--task", f"packed_modules:{name}")
    expected = fed(make(**task, **SIZES, data={"data_dir": str(folder), "shuffle_window": 1}))
    sizes = {**SIZES, "pod": {"replicas": 4, "num_instances": instances}}
    plan = make(**task, **sizes, data={"data_dir": f"file://{folder}", "shuffle_window": 1})
    assert len(plan.dataset_size.shards) > 1
    assert equal(fed(plan), expected)
    assert not equal(fed(make(**task, **SIZES)), expected)


def test_a_plan_reads_the_index_of_a_url_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, reads, read = pack(*TASK), [], Store.read
    monkeypatch.setattr(Store, "read", lambda store, name: (reads.append(name), read(store, name))[1])
    make(task={"name": "packed_modules:Task"}, data={"data_dir": f"file://{folder}"})
    pack_images = ["--dataset", "packed_modules:images", "images"]
    assert main(["pack", *pack_images]) == 0
    make(data={"dataset": "shards", "data_dir": f"file://{Path('images').resolve()}"})
    assert reads == ["index.json"] * 2


def test_a_collate_function_augments_samples_of_shards_the_same_in_every_process(make: Any) -> None:
    task, folder = {"name": "packed_modules:Augmented"}, pack("--task", "packed_modules:Augmented")
    plans = [make(task=task, data=data) for data in ({}, {"data_dir": str(folder)})]
    (ours, theirs) = (SeededSamples(task_of_plan(plan).load().train, 1) for plan in plans)
    assert torch.equal(ours[2, 5][1]["x"], theirs[2, 5][1]["x"])
    assert not torch.equal(ours[2, 5][1]["x"], theirs[3, 5][1]["x"])


def test_a_changed_byte_is_named_with_its_sample(make: Any) -> None:
    folder = pack(*TASK)
    shard = folder / "train" / "00000.tar"
    content = bytearray(shard.read_bytes())
    content[512 + 130] ^= 1
    shard.write_bytes(bytes(content))
    source = task_of_plan(make(task={"name": "packed_modules:Task"}, data={"data_dir": str(folder)})).load()
    words = r"cannot read sample \d+ \(\S+00000.tar\): its bytes .*; copy .* --leave-out \d+"
    with pytest.raises(OSError, match=words):
        [source.train[index] for index in range(40)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("pack --task packed_modules:Draws new", "training sample 0: it draws random numbers, .* without its augm"),
        ("pack --task packed_modules:Uneven new", r"training sample 1: it is a dict of .*half \(tensor\), and the"),
        ("pack --task packed_modules:Named new", "training sample 0: the entry 'x.y' cannot be packed: names have"),
        ("pack --task packed_modules:Halves new", "training sample .*: the entry 'x' cannot be packed: .* convert"),
        ("pack --task packed_modules:Fails new", r"training sample 5: KeyError: 'gone' \(packed_modules.py:\d+"),
        ("pack --task packed_modules:Empty new", "packed_modules:Empty has no training samples"),
        ("pack --dataset packed_modules:short new", "found label 5, but labels of 3 classes .*training sample 0"),
        ("pack --dataset digits new", "digits is built in: name a data set or a task of your own, or pack a folder"),
        ("pack --task hf-causal-lm new", "hf-causal-lm: pack its text with --task language-model --text FILES"),
        ("pack --task packed_modules:Task --batch-size 4 new", "--batch-size has no effect on raypod pack: omit it"),
        ("pack --task packed_modules:Task pod.replicas=2 new", "--replicas has no effect on raypod pack: omit it"),
        ("pack --dataset packed_modules:images --no-augment new", "--augment has no effect on raypod pack: omit"),
        ("pack --task packed_modules:Task", "--dataset and --task take one folder, that of the shards"),
        ("pack --task packed_modules:Task packed", "packed exists; choose another folder, or remove it"),
        ("train --task packed_modules:Task --data-dir none", "--data-dir none has no index.json, which `raypod"),
        ("train --task packed_modules:Task --cache-size 1GB", "has no effect without --data-dir: omit it"),
        ("train --dataset shards --data-dir packed", "packed has no labelled images: .*--task module:Class, and"),
        ("train --dataset imagefolder --data-dir packed", "packed has no images of a folder: .*--dataset shards"),
        ("train --dataset shards", "--dataset shards needs --data-dir: the folder that contains what `raypod pack`"),
    ],
)
def test_what_cannot_be_packed_and_shards_that_do_not_fit_are_one_line(words: str, message: str, capsys: Any) -> None:
    pack(*TASK)
    assert re.search(message, one_line(capsys, main, words.replace("train ", f"train {' '.join(INLINE)} ").split()))
    assert not list(Path().glob("new*"))


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
    assert main(["pack", "tars", "packed", *COLUMNS]) == 0
    task = ["--task", "packed_modules:Tars", "--lr-schedule", "constant"]
    place = f"file://{Path('packed').resolve()}"
    whole = hash_of(*task, "--data-dir", "packed")
    assert hash_of(*task, "--data-dir", place, "--shuffle-window", "9") == whole
    index = json.loads(Path("packed/index.json").read_text())
    kinds = [each["kind"] for each in index["fields"]]
    assert (index["structure"], kinds) == ("members", ["array", "number", "text", "json"])
    plan = make(task={"name": "packed_modules:Tars"}, data={"data_dir": "packed"}, **SIZES)
    data = task_of_plan(plan).load().train
    found = sorted((float(data[index]["x"][0]), float(data[index]["y"])) for index in range(20))
    assert found == sorted((each + 10.0 * number + each + number, each % 5) for number in (0, 1) for each in range(10))
    expected = fed(plan)
    for instances in (2, 4):
        sizes = {**SIZES, "pod": {"replicas": 4, "num_instances": instances}}
        assert equal(fed(make(task={"name": "packed_modules:Tars"}, data={"data_dir": "packed"}, **sizes)), expected)
    assert train.main([*INLINE[:-2], *task, "--data-dir", "packed", "--epochs", "1", "--run-dir", "part"]) == 0
    assert train.main([*INLINE, "--resume", "part", "--run-dir", "rest"]) == 0
    assert json.loads(Path("rest/summary.json").read_text())["weights_sha256"] == whole


def test_a_window_of_a_shard_reads_a_tar_after_the_other(make: Any) -> None:
    write_rows()
    assert main(["pack", "tars", "packed", *COLUMNS]) == 0
    plan = make(task={"name": "packed_modules:Tars"}, data={"data_dir": "packed", "shuffle_window": 1}, **SIZES)
    rows = torch.stack([each.reshape(-1) for each in fed(plan)[::2]])
    assert plan.dataset_size.shards == (10, 10)
    first_epoch = rows[: len(rows) // 2].reshape(-1, 4)[:, 0]
    assert len({bool(each >= 21) for each in first_epoch[:8].tolist()}) <= 2
    assert shards.read_index(Path("packed")).fields[0].name == "x.npy"


@pytest.mark.parametrize(
    ("samples", "words", "message"),
    [
        ({"a": PNG, "b": {"png": b"x"}}, [], r"train.tar: the sample b needs an image and .cls, and"),
        ({"a": {**PNG, "cls": b"dog"}}, [], r"the sample a: its .cls is b'dog', and must be the number of a class"),
        ({"a": {"npy": b"x"}, "b": {"txt": b"x"}}, [], r"train.tar: the sample b has no .npy; it has .txt"),
        ({"a": {"npy": b"x"}}, ["--columns", "jpg"], r"train.tar: the sample a has no .jpg; it has .npy"),
        ({"a": {"npy": b"x"}}, ["--shard-size", "1MB"], r"--shard-size has no effect on tars, which are indexed where"),
        ({}, [], r"train.tar has no files of samples, as 000042.jpg and 000042.cls"),
    ],
)
def test_tars_that_cannot_be_used_are_one_line(samples: Any, words: List[str], message: str, capsys: Any) -> None:
    write("train.tar", samples)
    assert re.search(message, one_line(capsys, main, ["pack", "tars", "new", *words]))
    assert not list(Path().glob("new*"))


def test_a_truncated_a_compressed_and_a_moved_tar_are_one_line(capsys: Any) -> None:
    write_rows()
    assert main(["pack", "tars", "packed", *COLUMNS]) == 0
    data = Path("tars/train-1.tar").read_bytes()
    compressed = b"\x1f\x8b" + data[2:]
    for content, message in ((data[:6000], "train-1.tar"), (compressed, "as a tar file without compression")):
        Path("tars/train-1.tar").write_bytes(content)
        assert message in one_line(capsys, main, ["pack", "tars", "other"])
    Path("tars/train-1.tar").rename("tars/elsewhere.tar")
    assert train.main([*INLINE, "--task", "packed_modules:Tars", "--data-dir", "packed"]) == 2
    assert "the shard packed/train/00001.tar cannot be read: No such file" in capsys.readouterr().err


def test_a_sample_of_files_without_a_collate_function_names_the_hook(capsys: Any) -> None:
    write_rows()
    assert main(["pack", "tars", "packed", "--columns", "jpg"]) == 0
    line = one_line(capsys, train.main, [*INLINE, "--task", "packed_modules:Raw", "--data-dir", "packed"])
    assert "the entry 'jpg' of the first sample is a bytes: make a tensor of it in `collate`" in line
