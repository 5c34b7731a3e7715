"""The batches that an instance feeds: their samples, formats, random numbers, errors, and the end of their loading."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, List

import pytest
import torch
from poptorch.executor import compile_context

from raypod.errors import ConfigError, DataUnreadable
from raypod.plan.plan import Plan
from raypod.plan.resolve import from_values
from raypod.training import data as datasets
from raypod.training.data.feed import Feed
from raypod.training.data.images import ImageSource, input_shape
from raypod.training.data.order import epoch_order
from tests.support.bounded import wait_until
from tests.support.refused import refused

OWN = """
import pathlib, random, time
import numpy, torch
class Own:
    def __init__(self, samples, broken=None): self.samples, self.broken = samples, broken
    def __len__(self): return self.samples
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
class Unstable(Own):
    def __getitem__(self, index):
        if index == 7 and pathlib.Path(self.broken, "outage").exists():
            try:
                raise OSError(116, "Stale file handle")
            except OSError as error:
                raise OSError(f"cannot read image {index}: {error}") from error
        return Own.__getitem__(self, index)
def make(folder): return Own(40), Own(10), 3
def make_unstable(folder): return Unstable(40, folder), Unstable(10, folder), 3
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
class Odd(Own):
    odd = None
    def __getitem__(self, index):
        image, label = torch.zeros(1, 4, 4), 1
        if index == 7:
            return {
                "uint16": (image.numpy().astype("uint16"), 1), "int64": (image.long(), 1), "text": (image, "cat"),
                "no label": (image, None), "no image": (None, 1), "larger": (torch.zeros(1, 4, 5), 1),
                "label": (image, 3), "half": (image, 0.5), "several": (image, torch.tensor([1, 2])),
            }[self.odd]
        return image, label
def odd(folder):
    Odd.odd = folder
    return Odd(40), Odd(10), 3
def arrays(folder):
    from raypod.training.data import ArrayDataset
    images, labels = numpy.zeros((6, 1, 4, 4)), numpy.arange(6)
    wide = images.astype("uint16")
    wide[3] = 256
    found = {
        "float": (images, labels), "wide": (wide, labels), "flat": (images[0].astype("uint8"), labels),
        "short": (images.astype("uint8"), labels[:5]), "text": (images.astype("uint8"), labels.astype(str)),
        "label": (images.astype("uint8"), labels + 1), "good": (wide % 256, labels),
    }[folder]
    return ArrayDataset(*found), ArrayDataset(*found), 6
def make_broken(folder): return Own(40, broken=7), Own(10), 3
"""
SMALL = {"batch_size": 2}
ONE: Any = {"num_instances": 1}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "feed_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "feed_own:make"


def source_of(plan: Plan) -> ImageSource:
    return ImageSource(plan.config, datasets.load(plan.config))


def first_of(plan: Plan) -> torch.Tensor:
    return source_of(plan).first_batch(42)[0]


def feeds(plan: Plan) -> List[Feed]:
    source = source_of(plan)
    return [Feed(plan, spec, source) for spec in plan.placement.instances]


def calls(plan: Plan, segment: int = 0) -> List[List[Any]]:
    """Return the calls of a segment of each instance."""
    found = []
    for feed in feeds(plan):
        try:
            found.append(list(feed.calls(plan.segments()[segment])))
        finally:
            feed.close()
    return found


def test_a_call_has_the_combined_batch_and_a_segment_the_samples_of_its_epochs_order(make: Any) -> None:
    plan = make(training={"gradient_accumulation": 2, "device_iterations": 3})
    images, labels = calls(plan)[0][0]
    assert images.shape == (plan.geometry.combined_batch_size, 1, 8, 8)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert calls(make(data={"eight_bit_io": True}))[0][0][0].dtype == torch.uint8
    plan = make(data={"augment": False}, training={"batch_size": 100}, pod=ONE)
    images = torch.cat([images for images, _ in calls(plan)[0]])
    assert (float(images.mean()), float(images.std())) == pytest.approx((0, 1), abs=0.05)
    plan = make(data={"augment": False})
    splits, order = datasets.load(plan.config), epoch_order(42, 1, 1437)
    fed = calls(plan, segment=1)
    first_update = torch.cat([fed[0][0][1], fed[1][0][1]])
    assert first_update.tolist() == splits.train.labels[order[:32]].tolist()


def check_samples(make: Any, own: str, **section: Any) -> None:
    """Their random numbers depend on (seed, epoch, sample), not on worker processes or instances."""
    expected = calls(make(data={"dataset": own}, training=SMALL, pod=ONE))
    fed = calls(make(data={"dataset": own, **section}, training=SMALL, pod={"num_instances": 2}))
    for call in range(5):
        assert torch.equal(torch.cat([fed[0][call][0], fed[1][call][0]]), expected[0][call][0])


def test_samples_do_not_depend_on_the_instances(make: Any, own: str) -> None:
    check_samples(make, own)


@pytest.mark.parametrize("section", [{"async_dataloader": True}, {"num_workers": 2}])
def test_samples_do_not_depend_on_worker_processes(make: Any, own: str, section: Any, processes: None) -> None:
    check_samples(make, own, **section)


@pytest.mark.parametrize("is_own", [False, True])
def test_no_thread_loads_for_an_sdk_that_holds_the_interpreter_lock(
    make: Any, own: str, monkeypatch: pytest.MonkeyPatch, is_own: bool, processes: None
) -> None:
    section = {"dataset": own} if is_own else {}
    plan = make(data={**section, "async_dataloader": True}, training=SMALL, pod=ONE)
    (expected,), source = calls(plan), source_of(plan)
    makers = []
    finish, gather = source.to_device_format, source.gather
    monkeypatch.setattr(source, "to_device_format", lambda batch: (*finish(batch), torch.tensor([os.getpid()])))
    monkeypatch.setattr(source, "gather", lambda *call: (*gather(*call), torch.tensor([os.getpid()])))
    feed = Feed(plan, plan.placement.instances[0], source, in_processes=True)
    threads = {thread.name for thread in threading.enumerate()}
    for batch, same in zip(feed.calls(plan.segments()[0]), expected):
        assert all(torch.equal(each, other) for each, other in zip(batch, same))
        makers.append(int(batch[-1]))
    for batch, _ in feed.evaluation_calls():
        makers.append(int(batch[-1]))
    assert not [name for name in {each.name for each in threading.enumerate()} - threads if name.startswith("feed")]
    assert os.getpid() not in makers
    feed.close()


def check_during_a_compilation(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches are made, although torch's factory functions raise an Error in the threads of the feed."""
    monkeypatch.setenv("EMULATED_POD_STRICT", "1")
    (expected,), (feed,) = calls(plan), feeds(plan)
    batches = feed.calls(plan.segments()[0])
    fed = [next(batches)]
    with compile_context.replaced(), ThreadPoolExecutor(1) as pool:
        fed += pool.submit(list, batches).result()
    feed.close()
    assert all(torch.equal(each, other) for batch, same in zip(fed, expected) for each, other in zip(batch, same))


@pytest.mark.parametrize("section", [{}, {"image_size": 12}])
def test_batches_are_made_while_a_model_compiles(make: Any, monkeypatch: pytest.MonkeyPatch, section: Any) -> None:
    check_during_a_compilation(make(data=section, pod=ONE), monkeypatch)


def test_samples_of_worker_processes_are_combined_while_a_model_compiles(
    make: Any, own: str, monkeypatch: pytest.MonkeyPatch, processes: None
) -> None:
    data = {"dataset": own, "async_dataloader": True}
    check_during_a_compilation(make(data=data, training=SMALL, pod=ONE), monkeypatch)


def test_random_numbers_differ_between_epochs_and_are_not_those_of_torch(make: Any, own: str) -> None:
    plan = make(data={"dataset": own}, training=SMALL, pod=ONE)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    values = [torch.cat([images for images, _ in calls(plan, segment)[0]]).flatten() for segment in (0, 1)]
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(values[0].sort().values, values[1].sort().values)


@pytest.mark.parametrize("section", [{"async_dataloader": True}, {"num_workers": 1}])
def test_the_error_of_a_sample_is_raised_and_that_of_an_odd_one_has_its_index(
    make: Any, own: str, section: Any, processes: None
) -> None:
    with pytest.raises(OSError, match="image 7 is damaged"):
        calls(make(data={"dataset": "feed_own:make_broken", **section}, training=SMALL))
    data = {"dataset": "feed_own:odd", "data_dir": "int64", **section}
    with pytest.raises(ConfigError, match="^feed_own:odd: images must be uint8.* training sample 7; .*in DataLoader"):
        calls(make(data=data, training=SMALL))


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
def test_invalid_samples_are_config_errors(make: Any, own: str, kind: str, message: str) -> None:
    refused(message, first_of, make(data={"dataset": "feed_own:samples", "data_dir": kind}, training=SMALL))


ODD = {
    "uint16": "not uint16 as that of training sample 7; convert them in your data set",
    "int64": "not int64 as that of training sample 7; convert them",
    "text": "labels must be integers, one per image, not str as that of training sample 7",
    "no label": "labels must be integers, one per image, not NoneType as that of training sample 7",
    "no image": "torch tensors or NumPy arrays, but training sample 7 is a NoneType",
    "larger": r"training samples \d+ and \d+ cannot be combined to a batch: "
    r"entry 0: \[1, 4, \d\] and \[1, 4, \d\]; resize or",
    "label": r"found label 3, but labels of 3 classes are 0 to 2; .*\(the label of training sample 7\)",
    "half": r"labels must be integers, one per image, not float as that of training sample 7",
    "several": r"labels must be integers, one per image, not tensor\(\[1, 2\]\) as that of training sample 7",
}


def test_the_error_of_an_odd_sample_has_its_index(make: Any, own: str) -> None:
    for kind in list(ODD):
        refused(ODD[kind], calls, make(data={"dataset": "feed_own:odd", "data_dir": kind}, training=SMALL))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("float", "float64 images; those of an ArrayDataset are uint8"),
        ("wide", "uint16 images, and sample 3 is not within 0..255"),
        ("flat", r"images \[1, 4, 4\] and labels \[6\]"),
        ("short", r"images \[6, 1, 4, 4\] and labels \[5\]"),
        ("label", "label 6 in sample 5, but labels of 6 classes are 0 to 5"),
        ("text", "labels of type <U21; they must be integers"),
    ],
)
def test_arrays_that_would_become_other_images_are_errors(own: str, kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"feed_own:arrays: the train split has {message}"):
        datasets.load(from_values({"data": {"dataset": "feed_own:arrays", "data_dir": kind}}))
    assert len(datasets.load(from_values({"data": {"dataset": "feed_own:arrays", "data_dir": "good"}})).train) == 6


@pytest.mark.parametrize("section", [{"num_workers": 2}, {"async_dataloader": True, "num_workers": 2}])
def test_closing_does_not_wait(make: Any, own: str, section: Any, tmp_path: Path, processes: None) -> None:
    data = {"dataset": "feed_own:make_blocks", "data_dir": str(tmp_path), **section}
    plan = make(data=data, training=SMALL)
    feed = feeds(plan)[0]
    next(feed.calls(plan.segments()[0]))
    feed.close()
    assert not (tmp_path / "waited").exists()
    assert wait_until(lambda: "feed-ahead" not in {thread.name for thread in threading.enumerate()})


class Outage:
    """Takes the place of the pauses between attempts to read a sample."""

    def __init__(self, folder: Path) -> None:
        self._file, self._left = folder / "outage", 0

    def begin(self, pauses: int) -> None:
        self._file.touch()
        self._left = pauses

    def pause(self, seconds: float) -> None:
        self._left -= 1
        assert self._left >= 0
        if not self._left:
            self._file.unlink()


@pytest.mark.parametrize("section", [{}, {"num_workers": 2}, {"async_dataloader": True}])
def test_samples_are_read_again_after_an_outage_of_their_disk(
    make: Any, own: str, tmp_path: Path, section: Any, processes: None
) -> None:
    data = {"dataset": "feed_own:make_unstable", "data_dir": str(tmp_path), **section}
    plan = make(data=data, training=SMALL, pod=ONE)
    expected = calls(plan)[0]
    outage = Outage(tmp_path)
    outage.begin(pauses=3)
    feed = Feed(plan, plan.placement.instances[0], source_of(plan), outage.pause)
    with pytest.warns(RuntimeWarning, match="samples cannot be read and are read again .*Stale file handle"):
        found = list(feed.calls(plan.segments()[0]))
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for ours, theirs in zip(found, expected) for pair in zip(ours, theirs))
    outage.begin(pauses=1)
    with pytest.warns(RuntimeWarning, match="samples cannot be read"):
        tested = [labels[:valid] for (_, labels), valid in feed.evaluation_calls()]
    assert torch.cat(tested).tolist() == [index % 3 for index in range(10)]
    feed.close()


def test_an_outage_that_lasts_is_an_error_that_is_no_fault_of_the_instance(make: Any, own: str, tmp_path: Path) -> None:
    data = {"dataset": "feed_own:make_unstable", "data_dir": str(tmp_path)}
    plan = make(data=data, training=SMALL, pod=ONE, run={"read_retry_s": 0})
    Outage(tmp_path).begin(pauses=1)
    (feed,) = feeds(plan)
    cause = r"for 0 s \(run.read_retry_s\): OSError: cannot read image 7: .*Stale file handle"
    with pytest.raises(DataUnreadable, match=f"instance 0 on host .* cannot read samples {cause}"):
        list(feed.calls(plan.segments()[0]))


def test_an_interrupted_feed_yields_no_further_call_and_8_bit_io_and_resizing_need_uint8(make: Any, own: str) -> None:
    plan = make(data={"dataset": own}, training=SMALL)
    feed = feeds(plan)[0]
    fed = feed.calls(plan.segments()[0])
    next(fed)
    feed.interrupt()  # during a call: nothing waits for data now
    assert list(fed) == []
    feed.close()
    section: Any
    for section in ({"eight_bit_io": True}, {"image_size": 8}):
        refused("needs uint8 images", calls, make(data={"dataset": own, **section}, training=SMALL))


def test_evaluation_covers_the_test_split_once(make: Any) -> None:
    for instances in (1, 2, 4):
        plan = make(training={"batch_size": 7}, pod={"num_instances": instances})
        shapes, labels = set(), []
        for feed in feeds(plan):
            for (images, wanted), valid in feed.evaluation_calls():
                shapes.add(tuple(images.shape))
                labels.extend(wanted[:valid].tolist())
        assert shapes == {(plan.geometry.evaluation_batch_size, 1, 8, 8)}
        assert sorted(labels) == sorted(datasets.load(plan.config).test.labels.tolist())


def test_evaluation_of_a_user_data_set_draws_the_same_numbers(make: Any, own: str, processes: None) -> None:
    passes = []
    for workers in (0, 2):
        (feed,) = feeds(make(data={"dataset": own, "num_workers": workers}, training=SMALL, pod=ONE))
        for _ in range(2):
            passes.append(torch.cat([images[:valid] for (images, _), valid in feed.evaluation_calls()]))
        feed.close()
    assert all(torch.equal(passes[0], other) for other in passes[1:])
    assert len(set(passes[0][:, 0, 0, 0].frac().tolist())) == 10  # each sample draws its own number


def test_with_eight_bit_io_the_device_enlarges_images_of_the_shape_of_the_networks_input(
    make: Any, recwarn: pytest.WarningsRecorder
) -> None:
    for size, eight_bit_io, sent in ((20, False, (1, 20, 20)), (20, True, (1, 8, 8)), (6, True, (1, 6, 6))):
        plan = make(data={"image_size": size, "eight_bit_io": eight_bit_io})
        assert (first_of(plan).shape[1:], input_shape(plan.config, first_of(plan))) == (sent, (1, size))
        assert calls(plan)[0][0][0].shape[1:] == sent
    sections = {"dataset": "synthetic", "samples": 64, "image": "3x16x8"}
    training = {"model": "vit_tiny", "batch_size": 2}
    plan = make(data=sections, training=training, pod=ONE)
    refused("vit_tiny needs square images, not 16x8: add --resize 16", input_shape, plan.config, first_of(plan))
    plan = make(data={**sections, "image_size": 16}, training=training, pod=ONE)
    assert input_shape(plan.config, first_of(plan)) == (3, 16)
    config = from_values({"data": {"dataset": "feed_own:data"}})
    with pytest.warns(UserWarning, match=r"feed_own:data: .* shape \[32, 16, 3\] are taken as \[channels, height"):
        assert input_shape(config, torch.zeros(1, 32, 16, 3)) == (32, 16)
    recwarn.clear()
    for shape in ((3, 32, 3), (1, 4, 4), (32, 32, 32)):
        input_shape(config, torch.zeros(1, *shape))
    input_shape(from_values({}), torch.zeros(1, 32, 16, 3))
    assert not recwarn.list


@pytest.mark.parametrize("section", [{}, {"async_dataloader": True, "num_workers": 3}])
def test_the_next_segment_is_loaded_in_advance(make: Any, section: Any) -> None:
    first, second = make(pod=ONE).segments()[:2]
    expected = calls(make(pod=ONE), segment=1)[0]
    (feed,) = feeds(make(data=section, pod=ONE))
    assert len(list(feed.calls(first))) == 44
    taken = list(feed.calls(second))
    assert all(torch.equal(ours, theirs) for pair in zip(taken, expected) for ours, theirs in zip(*pair))
    again = list(feed.calls(first))  # as after a repair: discards the batches loaded in advance
    assert not torch.equal(again[0][0], taken[0][0])
    feed.close()
