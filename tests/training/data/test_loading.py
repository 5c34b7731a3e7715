"""The order of samples, their loading in the background, samples that are left out, and `Task.collate`."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Tuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import raypod
from raypod.__main__ import main
from raypod.errors import ConfigError
from raypod.plan import layout
from raypod.plan.plan import Geometry, Plan
from raypod.plan.resolve import from_values
from raypod.runs import ledger
from raypod.training import data as datasets
from raypod.training.data import arrays, loading
from raypod.training.data.arrays import load_mapped
from raypod.training.data.feed import Feed
from raypod.training.data.images import ImageSource
from raypod.training.data.loaders import SampleLoader
from raypod.training.data.loading import SeededSamples, map_ahead, prefetch, reading, timed
from raypod.training.data.order import augmentation_integers, call_positions, epoch_order, in_place_of, sample_seeds
from raypod.training.data.read_failures import ReadFailed
from raypod.training.data.samples import SampleSource
from tests.support import image_folders
from tests.support.bounded import wait_until
from tests.support.image_folders import config
from tests.support.refused import refused

WORDS = [{"tokens": torch.arange(1, 2 + index % 5), "label": torch.tensor(index % 2)} for index in range(64)]


def test_an_epoch_visits_every_sample_once_and_the_next_takes_the_place_of_one_that_is_left_out() -> None:
    for samples in (1, 2, 1437, 10000):
        assert sorted(epoch_order(42, 3, samples)) == list(range(samples))
    assert not np.array_equal(epoch_order(1, 0, 500), epoch_order(1, 1, 500))
    assert not np.array_equal(epoch_order(1, 0, 500), epoch_order(2, 0, 500))
    assert epoch_order(42, 0, 10).tolist() == [2, 9, 7, 6, 5, 8, 4, 3, 0, 1]  # with every version of NumPy
    order = np.array([3, 0, 4, 1, 2])
    assert in_place_of((), order, 5) is order
    assert in_place_of((1, 4), order, 5).tolist() == [3, 0, 0, 2, 2]
    assert in_place_of((1, 2, 3), order, 5).tolist() == [4, 0, 4, 4, 4]


sizes = st.builds(
    lambda micro, accumulation, iterations, local, instances: Geometry(
        local * instances, instances, 1, micro, accumulation, iterations
    ),
    *(st.integers(1, 4) for _ in range(5)),
)


def slow_positions(geometry: Geometry, instance: int, call: int) -> list[int]:
    """Compute the positions one sample at a time."""
    positions = []
    for iteration in range(geometry.device_iterations):
        update = call * geometry.device_iterations + iteration
        for step in range(geometry.gradient_accumulation):
            for replica in geometry.replicas_of(instance):
                for place in range(geometry.micro_batch_size):
                    micro_batch = (update * geometry.gradient_accumulation + step) * geometry.total_replicas + replica
                    positions.append(micro_batch * geometry.micro_batch_size + place)
    return positions


@settings(deadline=None, derandomize=True)
@given(sizes, st.integers(0, 3))
def test_positions_are_laid_out_by_update_step_replica_and_micro_batch(geometry: Geometry, call: int) -> None:
    found = [call_positions(geometry, instance, call).tolist() for instance in range(geometry.num_instances)]
    assert found == [slow_positions(geometry, instance, call) for instance in range(geometry.num_instances)]
    first = call * geometry.samples_per_call
    assert sorted(sum(found, [])) == list(range(first, first + geometry.samples_per_call))


def test_random_numbers_are_a_function_of_seed_epoch_and_sample() -> None:
    samples = np.array([5, 900, 5])
    drawn = augmentation_integers(1, 2, samples, bounds=3, draws=4)
    assert drawn[0].tolist() == drawn[2].tolist()
    assert drawn[1].tolist() == augmentation_integers(1, 2, np.array([900]), 3, 4)[0].tolist()
    many = augmentation_integers(1, 2, np.arange(3000), 3, 1)
    assert np.bincount(many.ravel()).tolist() == pytest.approx([1000, 1000, 1000], abs=120)
    keys = [(epoch, sample) for epoch in range(3) for sample in range(1000)]
    seeds = sample_seeds(1, keys)
    assert len(set(seeds)) == 3000
    assert seeds[1234:1236] == [*sample_seeds(1, keys[1234:1235]), *sample_seeds(1, keys[1235:1236])]
    assert all(0 <= seed < 2**31 for seed in seeds)


class Drawing:
    """Samples that draw from three generators; the third one cannot be read."""

    def __getitem__(self, sample: int) -> Tuple[float, float, float]:
        found = torch.rand(1).item(), float(np.random.random()), random.random()
        if sample == 3:
            raise OSError("the disk is gone")
        return found


def test_a_batch_has_the_random_numbers_of_its_samples_and_the_generators_are_restored() -> None:
    samples, keys = SeededSamples(Drawing(), 1), [(0, 1), (2, 1), (0, 2)]

    def states() -> List[Any]:
        return [torch.get_rng_state().tolist(), list(np.random.get_state()[1]), random.getstate()]

    before = states()
    batch = samples.__getitems__(keys)
    assert batch == [samples[key] for key in keys]
    assert len({value for _, values in batch for value in values}) == 9
    with pytest.raises((ReadFailed, OSError), match="the disk is gone"):
        samples.__getitems__([(0, 1), (0, 3)])
    assert states() == before


def no_interrupt() -> None:
    raise AssertionError("nothing is blocked")


def numbers(last: int, made: List[int]) -> Iterator[int]:
    for number in range(last):
        made.append(number)
        yield number
    raise OSError("the disk is gone")


def test_prefetch_keeps_the_order_fills_its_queue_in_advance_and_raises_at_the_position() -> None:
    made: List[int] = []
    taken = prefetch(numbers(6, made), 2, no_interrupt)
    assert next(taken) == 0
    assert wait_until(lambda: made == [0, 1, 2, 3])  # two in the queue, and the thread holds a third
    assert [next(taken) for _ in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)
    assert list(prefetch(iter(range(3)), 1, no_interrupt)) == [0, 1, 2]


def test_map_ahead_keeps_the_order_raises_an_error_at_its_position_and_ends_its_threads() -> None:
    def make(number: int) -> int:
        time.sleep(0.002 * (number % 3))  # later requests finish earlier
        return number * number

    for workers in (1, 3):
        assert list(map_ahead(make, iter(range(20)), workers, depth=workers)) == [each * each for each in range(20)]
    before = threading.active_count()
    taken = map_ahead(lambda number: 6 // number, iter([3, 0, 1]), workers=1, depth=2)
    assert next(taken) == 2
    with pytest.raises(ZeroDivisionError):
        next(taken)
    assert threading.active_count() == before


def test_waits_are_timed_and_closing_ends_the_prefetch_thread_and_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    active, closed = [], []

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        active.append(True)
        yield
        active.pop()

    def batches() -> Iterator[bool]:
        try:
            while True:
                yield bool(active)
        finally:
            closed.append(True)

    taken = timed(batches(), waiting)
    assert next(taken)[0]
    assert not active
    taken.close()
    assert closed
    before = threading.active_count()
    taken = timed(prefetch(iter(range(1000)), 1, no_interrupt))
    next(taken)
    taken.close()
    assert threading.active_count() == before
    clock = iter([1.0, 1.5, 7.0, 9.0, 10.0])
    monkeypatch.setattr(loading, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert list(timed(iter("ab"))) == [("a", 0.5), ("b", 2.0)]


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"x": "a"}, "the entry 'x' of training sample 3 is a str"),
        ({"x": np.array(["a"])}, "the entry 'x' of training sample 3 is a ndarray"),
        ({"x": None}, "the entry 'x' of training sample 3 is a NoneType"),
        (
            {"x": np.zeros(3)},
            r"training samples 0 and 3 cannot be combined to a batch: 'x': \[2\] and \[3\]; resize or pad",
        ),
        ({"y": np.zeros(2)}, "samples 0 and 3 cannot be combined to a batch: their keys are x and y"),
    ],
)
def test_the_error_of_an_odd_sample_of_a_task_has_its_index(odd: Any, message: str) -> None:
    source = SampleSource("own", ([*[{"x": np.zeros(2)}] * 3, odd], None), seed=0)

    def check(sample: Any, index: int) -> None:
        source.check_sample(sample, f"training sample {index}")

    loader = SampleLoader(source.train, 0, 0, source.to_device_format, check)
    refused(message, list, loader.load([(0, np.arange(4))]))


def test_a_mapped_file_that_is_truncated_is_an_error_instead_of_a_sigbus(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(arrays, "_mapped", weakref.WeakKeyDictionary())  # later tests read samples, too
    file = tmp_path / "images.npy"
    np.save(str(file), np.zeros(10_000))
    array = load_mapped(file)
    with reading():
        assert array[-1] == 0
    with file.open("rb+") as opened:
        opened.truncate(4096)
    message = f"truncated from 80128 to 4096 bytes while the run uses it: '{file}'"
    with pytest.raises(ReadFailed, match=message), reading():
        pytest.fail("the samples were read")


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


def test_a_run_continues_without_an_image_that_cannot_be_read(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
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


def test_the_first_sample_may_be_left_out_and_samples_that_do_not_exist_are_an_error(tmp_path: Path, make: Any) -> None:
    folder = image_folders.write(tmp_path)
    (folder / "train" / "cat" / "a.JPEG").write_bytes(b"no image")
    plan = make(data=config(folder, leave_out=[0, 1]).data.model_dump(), training={"batch_size": 2})
    images, labels = ImageSource(plan.config, datasets.load(plan.config)).first_batch(42)
    assert (tuple(images.shape), labels.tolist()) == ((1, 3, 224, 224), [0])
    for value, words in (
        ("1437", "--leave-out 1437: the train split has 1437 samples, numbered from 0 to 1436; name some of them"),
        ("0,test:360", "--leave-out 0,test:360: the test split has 360 samples, numbered from 0 to 359"),
        ([f"test:{index}" for index in range(360)], "the test split has 360 samples"),
        ("x", "write the numbers of samples, as in 17,208,test:3"),
        ("3,3", "3 is listed twice"),
    ):
        refused(words, make, data={"leave_out": value})


def kind(module: str, name: str, **attributes: Any) -> Any:
    """Return an object of a package that is not installed."""
    methods = {"__len__": lambda _: 1, "__getitem__": lambda _, index: {"x": [1.0]}, "__module__": module}
    return type(name, (), {**methods, **attributes})()


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(WORDS)


def test_samples_are_padded_to_the_smallest_length_that_holds_all_and_known_lengths_are_not_loaded() -> None:
    pad = raypod.pad_collate(32, 4, 8, value={"tokens": -1}, mask="mask")
    source = SampleSource("t", (WORDS, WORDS[:3]), 0, 0, pad)
    assert source.names == ("tokens", "label", "mask")
    sample = source.train[2]
    assert sample["tokens"].tolist() == [1, 2, 3, -1, -1, -1, -1, -1]
    assert (sample["mask"].tolist(), sample["label"].shape) == ([1.0] * 3 + [0.0] * 5, ())
    source.check_batches(0)
    only_first = raypod.pad_collate(2, fields=[0])
    assert [each.tolist() for each in only_first([(torch.ones(1), torch.ones(3))])] == [[[1, 0]], [[1, 1, 1]]]

    class Known(List[Any]):
        lengths = (3, 5)

        def __getitem__(self, index: Any) -> Any:
            loaded.append(index)
            return torch.ones(self.lengths[index])

    loaded: List[int] = []
    pad = raypod.pad_collate(4, 6, 8).for_splits({"training": Known([0, 1])}, 0)
    assert (loaded, pad([torch.ones(5)]).shape) == ([], (1, 6))


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (kind("pandas", "DataFrame"), "`raypod.Arrays(x=frame"),
        (kind("pandas.core.frame", "DataFrame"), "`raypod.Arrays(x=frame"),
        (DataLoader(WORDS), "`loader.dataset`"),  # type: ignore[arg-type]
        (Stream(), "`list(dataset)`"),
        (Stream(), "`raypod pack FOLDER OUT`"),
        (kind("ray.data.dataset", "MaterializedDataset"), "`raypod.from_ray_data(dataset)`"),
        (kind("datasets.dataset_dict", "DatasetDict"), '`raypod.from_hf(data["train"])`'),
        (kind("datasets.arrow_dataset", "Dataset", format={"type": None}), "`raypod.from_hf(dataset)`"),
        (kind("datasets.iterable_dataset", "IterableDataset"), "without `streaming=True`, and return `raypod.from_hf("),
        (kind("datasets.dataset_dict", "IterableDatasetDict"), "without `streaming=True`"),
        (object(), "no __len__ or __getitem__"),
    ],
)
def test_other_kinds_of_data_are_named_with_their_way(split: Any, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SampleSource("t", (split, None), 0)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_data_sets_of_images_name_the_way_of_other_kinds_of_data(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "loaders.py").write_text(
        "from torch.utils.data import DataLoader\ndef load(data_dir):\n    return DataLoader([(0, 0)]), [], 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="loaders:load: the train split is a DataLoader, .* `loader.dataset`"):
        datasets.load(from_values({"data": {"dataset": "loaders:load"}}))


def test_ray_data_becomes_arrays_in_the_order_of_its_blocks_and_tables_need_their_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = SimpleNamespace(preserve_order=False)

    class Blocks:
        context = SimpleNamespace(execution_options=options)

        def iter_batches(self, batch_size: None, batch_format: str) -> Any:
            assert (batch_format, options.preserve_order) == ("numpy", True)
            rows = np.empty(2, dtype=object)
            rows[:] = [np.zeros(3), np.ones(3)]
            return iter([{"x": rows, "y": np.arange(2)}, {"x": np.full((1, 3), last), "y": np.array(last_y)}])

    last, last_y = 2.0, [2]
    found = raypod.from_ray_data(Blocks())
    assert found.fields["x"].tolist() == [[0] * 3, [1] * 3, [2] * 3]
    assert (found.fields["y"].tolist(), options.preserve_order) == ([0, 1, 2], False)
    last_y = ["a"]  # type: ignore[list-item]
    refused("from_ray_data: the column 'y' holds <U21: drop it, or make numbers of it", raypod.from_ray_data, Blocks())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for function in (raypod.from_hf, raypod.from_parquet):
        refused(r"from_\w+ needs the package pyarrow, .* pip install 'raypod\[hf\]'", function, "x")


def test_what_cannot_be_padded_is_one_line() -> None:
    long = [*WORDS, {"tokens": torch.arange(9), "label": torch.tensor(0)}]
    words = r"task t: training sample 64: its length is 9, and the longest length .* is 8"
    refused(words, SampleSource, "t", (long, None), 0, 0, raypod.pad_collate(4, 8))
    with pytest.raises(ConfigError, match="collate has no effect on Arrays"):
        SampleSource("t", (raypod.Arrays(x=[1.0]), None), 0, 0, raypod.pad_collate(4))
    refused("positive integers", raypod.pad_collate, 0)
    refused("collate = raypod.pad_collate", SampleSource("t", (WORDS, None), 0).check_batches, 0)
    names: Any
    for names in ({"fields": ["token"]}, {"value": {"token": -1}}):
        with pytest.raises(ConfigError, match="a sample has no entry 'token'; its entries are 'tokens', 'label'"):
            SampleSource("t", (WORDS, WORDS[:3]), 0, 0, raypod.pad_collate(8, **names))
    method = type("Own", (), {"collate": lambda samples: samples})().collate
    with pytest.raises(ConfigError, match="task t: collate must take one argument, the samples: write a method"):
        SampleSource("t", (WORDS, WORDS[:3]), 0, 0, method)


class Parity(raypod.Task):
    collate = raypod.pad_collate(4, 8, mask="mask")

    def datasets(self) -> Any:
        return WORDS, WORDS[:8]

    def network(self, first_batch: Any) -> nn.Module:
        return nn.Embedding(8, 2)

    def logits(self, network: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (network(tokens) * mask.unsqueeze(2)).sum(dim=1) / mask.sum(dim=1, keepdim=True)

    def training_outputs(self, network: Any, *_: Any, **batch: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(self.logits(network, batch["tokens"], batch["mask"]), batch["label"]), {}

    def evaluation_outputs(self, network: Any, *_: Any, **batch: torch.Tensor) -> Dict[str, Any]:
        logits = self.logits(network, batch["tokens"], batch["mask"])
        return {"loss": (nn.functional.cross_entropy(logits, batch["label"], reduction="none"), 1)}


@pytest.mark.parametrize("workers", [0, 1])
def test_ragged_samples_train_alike_for_any_size_of_the_calls(tmp_path: Path, workers: int, processes: None) -> None:
    """The same samples per update, in calls of one and of two updates."""
    hashes = set()
    for iterations in (1, 2):
        flags: Dict[str, Any] = {"device_iterations": iterations, "num_workers": workers, "updates": 4, "epochs": 2}
        flags.update(fleet="inline", device="emulated", replicas=2, batch_size=4, lr_schedule="constant")
        result = raypod.fit(Parity, run_dir=tmp_path / str(iterations), progress=False, warmup_updates=0, **flags)
        hashes.add(result.summary["weights_sha256"])
        assert json.loads((result.run_dir / "summary.json").read_text())["test_loss"] > 0
    assert len(hashes) == 1


class Rare(List[Any]):
    """Samples of one length, but for one that the evenly spaced ones leave out."""

    odd = 617

    def __getitem__(self, index: Any) -> Any:
        self.append(index)
        if index == 3:
            raise OSError("damaged")
        return {"x": torch.ones(9 if index == self.odd else 5)}

    def __len__(self) -> int:
        return 1000


def test_a_rare_sample_of_another_length_is_found_before_the_run_by_a_search_with_a_limit() -> None:
    with pytest.raises(ConfigError, match=r"training samples 0 and 617 cannot be combined .*: 'x': \[5\] and \[9\]"):
        SampleSource("t", (Rare(), None), 0).check_batches(0, clock=lambda: 0.0)
    ticks = iter(range(100))
    split = Rare()
    SampleSource("t", (split, None), 0).check_batches(0, clock=lambda: next(ticks) / 8)
    assert len(set(list.__iter__(split))) < 40


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (lambda samples: {"x": samples[0]["x"][None]}, r"\[9\]; the task's `collate` must return the same shapes and"),
        (raypod.pad_collate(9, fields=()), "its pad_collate pads the first dimension of the entries in `fi"),
    ],
)
def test_samples_that_differ_after_collate_are_its_mistake(collate: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        SampleSource("t", (Rare(), None), 0, 0, collate).check_batches(0, clock=lambda: 0.0)
    assert "raypod.pad_collate(64" not in str(raised.value)


@pytest.mark.parametrize(
    ("odd", "difference"),
    [
        ({"tokens": torch.ones(9), "label": torch.tensor(0)}, r"'tokens': \[5\] and \[9\]"),
        ({"tokens": torch.ones(5), "label": torch.tensor(True)}, "'label': torch.int64 and torch.bool"),
    ],
)
@pytest.mark.parametrize("is_test", [False, True])
def test_a_call_whose_samples_all_have_another_shape_names_them(
    make: Callable[..., Plan], odd: Any, difference: str, is_test: bool
) -> None:
    plan = make(training={"batch_size": 1}, pod={"replicas": 1, "num_instances": 1})
    segment, samples = plan.next_segment(0), [{"tokens": torch.ones(5), "label": torch.tensor(0)}] * 1437
    order = epoch_order(plan.config.training.seed, 0, len(samples))
    found = 9 if is_test else int(order[2])
    samples[found] = odd
    feed = Feed(plan, plan.placement.instances[0], SampleSource("t", (samples, samples[:20]), 0))
    split, first = ("test", 0) if is_test else ("training", int(order[0]))
    message = rf"^{split} samples {first} and {found} have different shapes or types: {difference}; .*pad_collate"
    with contextlib.closing(feed), pytest.raises(ConfigError, match=message):
        list(feed.evaluation_calls() if is_test else feed.calls(segment))
