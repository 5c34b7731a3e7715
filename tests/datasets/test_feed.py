from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Callable, List

import numpy as np
import pytest
import torch
from bounded import wait_until

from raypod import datasets
from raypod.datasets.feed import Feed
from raypod.datasets.images import ImageSource, input_shape
from raypod.datasets.order import epoch_order
from raypod.errors import ConfigError
from raypod.plan.plan import Plan
from raypod.plan.resolve import from_values

OWN = """
import pathlib, random, time
import numpy, torch

class Own:
    def __init__(self, samples, broken=None):
        self.samples, self.broken = samples, broken
    def __len__(self):
        return self.samples
    def __getitem__(self, index):
        if index == self.broken:
            raise OSError(f"image {index} is damaged")
        noise = torch.rand(1) + numpy.random.rand() + random.random()
        return torch.full((1, 4, 4), float(index)) + noise / 10, index % 3

class Blocks(Own):
    made = 0
    def __getitem__(self, index):
        self.made += 1
        if self.made > 4:
            time.sleep(8)
            pathlib.Path(self.folder, "waited").touch()
        return super().__getitem__(index)

def make(folder):
    return Own(40), Own(10), 3

def make_blocks(folder):
    Blocks.folder = folder
    return Blocks(40), Own(10), 3

def samples(folder):
    image = torch.zeros(1, 4, 4)
    sample = {
        "dict": {"image": image}, "list": ([0.0], 1), "flat": (image.flatten(), 1), "label": (image, 10),
        "negative": (image, -1), "float": (image, 0.5),
    }[folder]
    return [sample] * 40, []

def make_broken(folder):
    return Own(40, broken=7), Own(10), 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "feed_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "feed_own:make"


def source_of(plan: Plan) -> ImageSource:
    return ImageSource(plan.config, datasets.load(plan.config))


def feeds(plan: Plan) -> List[Feed]:
    source = source_of(plan)
    return [Feed(plan, spec, source) for spec in plan.placement.instances]


def calls(plan: Plan, leg: int = 0) -> List[List[Any]]:
    """Return the calls of a leg of each instance."""
    found = []
    for feed in feeds(plan):
        try:
            found.append(list(feed.calls(plan.legs()[leg])))
        finally:
            feed.close()
    return found


def test_a_call_has_the_combined_batch(make: Callable[..., Plan]) -> None:
    plan = make(training={"gradient_accumulation": 2, "device_iterations": 3})
    images, labels = calls(plan)[0][0]
    assert images.shape == (plan.geometry.combined_batch_size, 1, 8, 8)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)


def test_a_leg_feeds_the_samples_of_its_epochs_order(make: Callable[..., Plan]) -> None:
    plan = make(data={"augment": False})
    splits, order = datasets.load(plan.config), epoch_order(42, 1, 1437)
    fed = calls(plan, leg=1)
    first_update = torch.cat([fed[0][0][1], fed[1][0][1]])
    assert first_update.tolist() == splits.train.labels[order[:32]].tolist()


@pytest.mark.parametrize("section", [{}, {"async_dataloader": True}, {"num_workers": 2}])
def test_samples_do_not_depend_on_how_they_are_loaded(make: Callable[..., Plan], own: str, section: Any) -> None:
    """Their random numbers depend on (seed, epoch, sample), not on worker processes or instances."""
    expected = calls(make(data={"dataset": own}, training={"batch_size": 2}, pod={"num_instances": 1}))
    plan = make(data={"dataset": own, **section}, training={"batch_size": 2}, pod={"num_instances": 2})
    fed = calls(plan)
    for call in range(5):
        together = torch.cat([fed[0][call][0], fed[1][call][0]])
        assert torch.equal(together, expected[0][call][0])


def test_random_numbers_differ_between_epochs(make: Callable[..., Plan], own: str) -> None:
    plan = make(data={"dataset": own}, training={"batch_size": 2}, pod={"num_instances": 1})
    values = [torch.cat([images for images, _ in calls(plan, leg)[0]]).flatten() for leg in (0, 1)]
    assert not torch.equal(values[0].sort().values, values[1].sort().values)


def test_loading_does_not_draw_from_the_global_generator(make: Callable[..., Plan], own: str) -> None:
    plan = make(data={"dataset": own}, training={"batch_size": 2})
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    calls(plan)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("section", [{"async_dataloader": True}, {"num_workers": 1}])
def test_the_error_of_a_sample_is_raised(make: Callable[..., Plan], own: str, section: Any) -> None:
    plan = make(data={"dataset": "feed_own:make_broken", **section}, training={"batch_size": 2})
    with pytest.raises(OSError, match="image 7 is damaged"):
        calls(plan)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dict", r"a sample must be \(image, label\), but the first one is a dict"),
        ("list", "images must be torch tensors or NumPy arrays, but the first one is a list"),
        ("flat", r"images must be \[channels, height, width\], not \[16\]"),
        ("label", r"found label 10, but labels of 10 classes are 0 to 9; .*\(train, test, number of classes\)"),
        ("negative", "found label -1, but"),
        ("float", "labels must be integers"),
    ],
)
def test_invalid_samples_are_config_errors(make: Callable[..., Plan], own: str, kind: str, message: str) -> None:
    plan = make(data={"dataset": "feed_own:samples", "data_dir": kind}, training={"batch_size": 2})
    with pytest.raises(ConfigError, match=message):
        source_of(plan).first_batch(42)


def test_vision_transformers_need_square_images(make: Callable[..., Plan]) -> None:
    sections = {"dataset": "synthetic", "samples": 64, "image": "3x16x8"}
    plan = make(data=sections, training={"model": "vit_tiny", "batch_size": 2}, pod={"num_instances": 1})
    with pytest.raises(ConfigError, match="vit_tiny needs square images, not 16x8: add --resize 16"):
        input_shape(plan.config, source_of(plan).first_batch(42)[0])
    sections["image_size"] = 16  # type: ignore[assignment]
    plan = make(data=sections, training={"model": "vit_tiny", "batch_size": 2}, pod={"num_instances": 1})
    assert input_shape(plan.config, source_of(plan).first_batch(42)[0]) == (3, 16)


def test_images_with_the_channels_last_are_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    config = from_values({"data": {"dataset": "feed_own:data"}})
    with pytest.warns(
        UserWarning, match=r"feed_own:data: images of shape \[32, 16, 3\] are taken as \[channels, height"
    ):
        assert input_shape(config, torch.zeros(1, 32, 16, 3)) == (32, 16)
    recwarn.clear()
    for shape in ((3, 32, 3), (1, 4, 4), (32, 32, 32)):
        input_shape(config, torch.zeros(1, *shape))
    input_shape(from_values({}), torch.zeros(1, 32, 16, 3))
    assert not recwarn.list


def test_closing_in_the_middle_of_a_leg_leaves_no_workers(make: Callable[..., Plan], own: str) -> None:
    plan = make(data={"dataset": own, "async_dataloader": True, "num_workers": 2}, training={"batch_size": 2})
    feed = feeds(plan)[0]
    batches = feed.calls(plan.legs()[0])
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    feed.close()


@pytest.mark.parametrize("section", [{"num_workers": 2}, {"async_dataloader": True, "num_workers": 2}])
def test_closing_does_not_wait_for_a_slow_sample(
    make: Callable[..., Plan], own: str, section: Any, tmp_path: Path
) -> None:
    data = {"dataset": "feed_own:make_blocks", "data_dir": str(tmp_path), **section}
    plan = make(data=data, training={"batch_size": 2})
    feed = feeds(plan)[0]
    next(feed.calls(plan.legs()[0]))
    feed.close()
    assert not (tmp_path / "waited").exists()
    assert wait_until(lambda: "feed-ahead" not in {thread.name for thread in threading.enumerate()})


def test_an_interrupted_feed_yields_no_further_call(make: Callable[..., Plan], own: str) -> None:
    plan = make(data={"dataset": own}, training={"batch_size": 2})
    feed = feeds(plan)[0]
    fed = feed.calls(plan.legs()[0])
    next(fed)
    feed.interrupt()  # during a call: nothing waits for data now
    assert list(fed) == []
    feed.close()


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_evaluation_covers_the_test_split_once(make: Callable[..., Plan], instances: int) -> None:
    plan = make(training={"batch_size": 7}, pod={"num_instances": instances})
    splits = datasets.load(plan.config)
    shapes, labels = set(), []
    for feed in feeds(plan):
        for (images, wanted), valid in feed.evaluation_calls():
            shapes.add(tuple(images.shape))
            labels.extend(wanted[:valid].tolist())
    assert shapes == {(plan.geometry.evaluation_batch_size, 1, 8, 8)}
    assert sorted(labels) == sorted(splits.test.labels.tolist())


def test_evaluation_of_a_user_data_set_draws_the_same_numbers(make: Callable[..., Plan], own: str) -> None:
    passes = []
    for workers in (0, 2):
        section = {"dataset": own, "num_workers": workers}
        (feed,) = feeds(make(data=section, training={"batch_size": 2}, pod={"num_instances": 1}))
        for _ in range(2):
            passes.append(torch.cat([images[:valid] for (images, _), valid in feed.evaluation_calls()]))
        feed.close()
    assert all(torch.equal(passes[0], other) for other in passes[1:])
    assert len(set(passes[0][:, 0, 0, 0].frac().tolist())) == 10  # each sample draws its own number


def test_eight_bit_io_sends_uint8(make: Callable[..., Plan]) -> None:
    images, _ = calls(make(data={"eight_bit_io": True}))[0][0]
    assert images.dtype == torch.uint8


def test_eight_bit_io_needs_uint8(make: Callable[..., Plan], own: str) -> None:
    with pytest.raises(ConfigError, match="needs uint8 images"):
        calls(make(data={"dataset": own, "eight_bit_io": True}, training={"batch_size": 2}))


def test_images_are_normalized_on_the_host(make: Callable[..., Plan]) -> None:
    plan = make(data={"augment": False}, training={"batch_size": 100}, pod={"num_instances": 1})
    images = torch.cat([images for images, _ in calls(plan)[0]])
    assert (float(images.mean()), float(images.std())) == pytest.approx((0, 1), abs=0.05)
    assert np.isfinite(images.numpy()).all()


@pytest.mark.parametrize("eight_bit_io", [False, True])
def test_images_are_enlarged_on_the_host_or_with_eight_bit_io_on_the_device(
    make: Callable[..., Plan], eight_bit_io: bool
) -> None:
    plan = make(data={"image_size": 20, "eight_bit_io": eight_bit_io})
    (feed, _) = feeds(plan)
    assert source_of(plan).first_batch(42)[0].shape[1:] == ((1, 8, 8) if eight_bit_io else (1, 20, 20))
    assert input_shape(plan.config, source_of(plan).first_batch(42)[0]) == (1, 20)
    images, _ = next(iter(feed.calls(plan.legs()[0])))
    assert tuple(images.shape[1:]) == source_of(plan).first_batch(42)[0].shape[1:]
    feed.close()


def test_images_are_always_reduced_on_the_host(make: Callable[..., Plan]) -> None:
    plan = make(data={"image_size": 6, "eight_bit_io": True})
    assert source_of(plan).first_batch(42)[0].shape[1:] == (1, 6, 6)


def test_arrays_do_not_depend_on_async_loading(make: Callable[..., Plan]) -> None:
    expected = calls(make(), leg=1)
    assert all(
        torch.equal(ours[0], theirs[0])
        for one, other in zip(expected, calls(make(data={"async_dataloader": True, "num_workers": 3}), leg=1))
        for ours, theirs in zip(one, other)
    )


def test_resizing_needs_uint8(make: Callable[..., Plan], own: str) -> None:
    with pytest.raises(ConfigError, match="needs uint8 images"):
        calls(make(data={"dataset": own, "image_size": 8}, training={"batch_size": 2}))


@pytest.mark.parametrize("section", [{}, {"async_dataloader": True}])
def test_the_next_leg_is_loaded_in_advance(make: Callable[..., Plan], section: Any) -> None:
    plan = make(data=section, pod={"num_instances": 1})
    first, second = plan.legs()[:2]
    expected = calls(plan, leg=1)[0]
    (feed,) = feeds(plan)
    assert len(list(feed.calls(first))) == 44
    taken = list(feed.calls(second))
    assert all(torch.equal(ours, theirs) for pair in zip(taken, expected) for ours, theirs in zip(*pair))
    again = list(feed.calls(first))  # as after a repair: discards the batches loaded in advance
    assert not torch.equal(again[0][0], taken[0][0])
    feed.close()
