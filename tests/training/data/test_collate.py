"""`Task.collate`, `pad_collate`, and the messages about other kinds of data."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import raypod
from raypod.errors import ConfigError
from raypod.plan.plan import Plan
from raypod.plan.resolve import from_values
from raypod.training import data as datasets
from raypod.training.data.feed import Feed
from raypod.training.data.order import epoch_order
from raypod.training.data.samples import SampleSource

WORDS = [{"tokens": torch.arange(1, 2 + index % 5), "label": torch.tensor(index % 2)} for index in range(64)]


def kind(module: str, name: str, **attributes: Any) -> Any:
    """Return an object of a package that is not installed."""
    methods = {"__len__": lambda _: 1, "__getitem__": lambda _, index: {"x": [1.0]}, "__module__": module}
    return type(name, (), {**methods, **attributes})()


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(WORDS)


def test_samples_are_padded_to_the_smallest_length_that_holds_all() -> None:
    pad = raypod.pad_collate(32, 4, 8, value={"tokens": -1}, mask="mask")
    source = SampleSource("t", (WORDS, WORDS[:3]), 0, 0, pad)
    assert source.names == ("tokens", "label", "mask")
    sample = source.train[2]
    assert sample["tokens"].tolist() == [1, 2, 3, -1, -1, -1, -1, -1]
    assert sample["mask"].tolist() == [1.0] * 3 + [0.0] * 5
    assert sample["label"].shape == ()
    source.check_batches(0)
    only_first = raypod.pad_collate(2, fields=[0])
    assert [each.tolist() for each in only_first([(torch.ones(1), torch.ones(3))])] == [[[1, 0]], [[1, 1, 1]]]


@pytest.mark.parametrize("names", [{"fields": ["token"]}, {"value": {"token": -1}}])
def test_an_entry_that_no_sample_has_is_an_error(names: Any) -> None:
    pad = raypod.pad_collate(8, **names)
    with pytest.raises(ConfigError, match="a sample has no entry 'token'; its entries are 'tokens', 'label'"):
        SampleSource("t", (WORDS, WORDS[:3]), 0, 0, pad)


def test_a_function_that_became_a_method_is_an_error() -> None:
    kind_of_task = type("Own", (), {"collate": lambda samples: samples})
    with pytest.raises(ConfigError, match="task t: collate must take one argument, the samples: write a method"):
        SampleSource("t", (WORDS, WORDS[:3]), 0, 0, kind_of_task().collate)


def test_known_lengths_are_not_loaded() -> None:
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


def test_ray_data_becomes_arrays_in_the_order_of_its_blocks() -> None:
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
    with pytest.raises(ConfigError, match="from_ray_data: the column 'y' holds <U21: drop it, or make numbers of it"):
        raypod.from_ray_data(Blocks())


def test_tables_without_their_package_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for function in (raypod.from_hf, raypod.from_parquet):
        with pytest.raises(ConfigError, match=r"from_\w+ needs the package pyarrow, .* pip install 'raypod\[hf\]'"):
            function("x")


def test_what_cannot_be_padded_is_one_line() -> None:
    long = [*WORDS, {"tokens": torch.arange(9), "label": torch.tensor(0)}]
    with pytest.raises(
        ConfigError, match=r"task t: training sample 64: its length is 9, and the longest length .* is 8"
    ):
        SampleSource("t", (long, None), 0, 0, raypod.pad_collate(4, 8))
    with pytest.raises(ConfigError, match="collate has no effect on Arrays"):
        SampleSource("t", (raypod.Arrays(x=[1.0]), None), 0, 0, raypod.pad_collate(4))
    with pytest.raises(ConfigError, match="positive integers"):
        raypod.pad_collate(0)
    with pytest.raises(ConfigError, match="collate = raypod.pad_collate"):
        SampleSource("t", (WORDS, None), 0).check_batches(0)


class Parity(raypod.Task):
    collate = raypod.pad_collate(4, 8, mask="mask")

    def datasets(self) -> Any:
        return WORDS, WORDS[:8]

    def network(self, first_batch: Any) -> nn.Module:
        return nn.Embedding(8, 2)

    def logits(self, network: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = (network(tokens) * mask.unsqueeze(2)).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return mean

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


def test_a_rare_sample_of_another_length_is_found_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"training samples 0 and 617 cannot be combined .*: 'x': \[5\] and \[9\]"):
        SampleSource("t", (Rare(), None), 0).check_batches(0, clock=lambda: 0.0)


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (lambda samples: {"x": samples[0]["x"][None]}, r"\[9\]; the task's `collate` must return the same shapes and"),
        (
            raypod.pad_collate(9, fields=()),
            "for all samples: its pad_collate pads the first dimension of the entries in `fi",
        ),
    ],
)
def test_samples_that_differ_after_collate_are_its_mistake(collate: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        SampleSource("t", (Rare(), None), 0, 0, collate).check_batches(0, clock=lambda: 0.0)
    assert "raypod.pad_collate(64" not in str(raised.value)


def test_the_search_for_odd_samples_has_a_limit() -> None:
    ticks = iter(range(100))
    split = Rare()
    SampleSource("t", (split, None), 0).check_batches(0, clock=lambda: next(ticks) / 8)
    assert len(set(list.__iter__(split))) < 40


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
