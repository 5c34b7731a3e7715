"""Shards at a URL: their order, what a host downloads, and what it does about a storage that fails."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import torch

from raypod import train
from raypod.__main__ import main
from raypod.errors import ConfigError, DataUnreadable, WaitTimedOut
from raypod.plan.plan import Plan
from raypod.plan.resolve import from_values
from raypod.runs import verify_data
from raypod.system import private
from raypod.system.files import file_lock
from raypod.system.remote.store import Store
from raypod.training import data as datasets
from raypod.training.data import packing, shard_stream
from raypod.training.data.feed import Feed
from raypod.training.data.images import ImageSource
from raypod.training.data.order import epoch_order, packed_order
from raypod.training.data.shard_cache import DamagedShard, ShardCache
from raypod.training.data.shards import Shard, read_index
from tests.support import image_folders
from tests.support.refused import one_line, refused
from tests.support.shard_threads import InThread

WINDOW = 3
ONE: Any = {"training": {"batch_size": 1, "epochs": 1}, "pod": {"replicas": 1, "num_instances": 1}}
FLAGS = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--replicas", "2", "--batch-size", "1"]


@dataclasses.dataclass
class Storage:
    """A folder in the role of a storage. `fault` gets the name of each file that is read, and may raise."""

    folder: Path
    fault: Callable[[str], object] = lambda name: None
    reads: List[str] = dataclasses.field(default_factory=list)

    @property
    def url(self) -> str:
        return f"file://{self.folder}"

    @property
    def shards_read(self) -> List[str]:
        return [name for name in self.reads if name.startswith("train/")]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 training images and two test images, each in a shard of its own."""
    folder = image_folders.write(tmp_path_factory.mktemp("images"))
    packing.pack(folder, folder / "packed", 1, lambda written, total: None)
    return folder / "packed"


@pytest.fixture
def storage(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    storage, download = Storage(packed), Store.download

    def observed(store: Store, name: str, target: Path, most_bytes: int) -> None:
        storage.reads.append(name)
        storage.fault(name)
        download(store, name, target, most_bytes)

    monkeypatch.setattr(Store, "download", observed)
    monkeypatch.setattr(shard_stream, "DownloadProcess", InThread)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return storage


def data_at(place: object, **data: object) -> Dict[str, object]:
    """Return the settings of the data at a place, in windows."""
    return {"dataset": "imagefolder", "data_dir": str(place), "image_size": 16, "shuffle_window": WINDOW, **data}


def feed_of(plan: Plan, instance: int = 0, pause: Callable[[float], object] = lambda seconds: None) -> Feed:
    return Feed(plan, plan.placement.instances[instance], ImageSource(plan.config, datasets.load(plan.config)), pause)


def fed(plan: Plan, **options: Any) -> List[Any]:
    """Return the images of each update of the whole run, of all instances in turn."""
    feeds = [feed_of(plan, instance, **options) for instance in range(plan.geometry.num_instances)]
    segments = plan.segments()
    try:
        streams = [[batch[0] for segment in segments for batch in feed.calls(segment)] for feed in feeds]
    finally:
        for feed in feeds:
            feed.close()
    return [torch.cat(images) for images in zip(*streams)]


def empty_cache(plan: Plan, least_bytes: int = 0) -> None:
    """Remove the shards of more bytes."""
    for file in (Path(plan.run_dir).parent / "cache").rglob("*"):
        if file.is_file() and len(file.name) == 32 and file.stat().st_size > least_bytes:
            file.unlink()


def equal(ours: List[Any], theirs: List[Any]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(*pair) for pair in zip(ours, theirs))


def test_a_window_has_whole_shards_and_as_many_as_there_are_have_the_order_of_no_window() -> None:
    shards = (7, 13, 1, 20, 9, 30, 20)
    shard_of = np.empty(100, dtype=np.int64)
    shard_of[packed_order(100)] = np.repeat(np.arange(7), shards)
    firsts = set()
    for epoch in range(5):
        order = epoch_order(3, epoch, 100, shards, 2)
        assert sorted(order) == list(range(100))
        seen = [list(dict.fromkeys(shard_of[order]))]  # shards in the order of their first sample
        ends = np.cumsum([sum(shards[each] for each in seen[0][first : first + 2]) for first in (0, 2, 4, 6)])
        for first, end in zip([0, *ends], ends):
            assert len(set(shard_of[order[first:end]])) <= 2
        firsts.add(tuple(sorted(set(shard_of[order[: ends[0]]]))))
        assert np.array_equal(epoch_order(3, epoch, 100, shards, 7), epoch_order(3, epoch, 100))
    assert len(firsts) > 1, "the shards are permuted"


@pytest.mark.parametrize("instances", [1, 2, 4])
def test_any_placement_feeds_the_samples_of_a_local_copy_and_downloads_a_shard_once(
    make: Any, storage: Storage, instances: int
) -> None:
    sizes: Any = {"training": {"batch_size": 1, "epochs": 3}, "pod": {"replicas": 4, "num_instances": instances}}
    plan = make(data=data_at(storage.url, cache_size="1MB"), **sizes)
    found = fed(plan)
    local = make(data=data_at(storage.folder), training=sizes["training"], pod={"replicas": 4, "num_instances": 1})
    assert equal(found, fed(local))
    assert not equal(found, fed(make(data=data_at(storage.folder, shuffle_window=None), **sizes)))
    index = read_index(storage.folder)
    assert sorted(storage.shards_read) == sorted(shard.file for shard in index.train.shards)


def test_the_cache_keeps_two_windows_and_a_shard_is_downloaded_once_per_epoch(make: Any, storage: Storage) -> None:
    shards = read_index(storage.folder)
    largest = sorted((shard.bytes for shard in shards.train.shards), reverse=True)
    needed = sum(largest[:2]) + sum(shard.bytes for shard in shards.test.shards)
    data = data_at(storage.url, shuffle_window=1, cache_size=f"{-(-needed // 1000)}kB")
    plan = make(data=data, training={"batch_size": 1, "epochs": 2}, pod={"replicas": 1, "num_instances": 1})
    feed = feed_of(plan)
    feed.close()
    cache = feed._source.train.files._downloads.cache
    limit, most = cache.limit_bytes, 0
    feed = feed_of(plan)
    for segment in plan.segments():
        for _ in feed.calls(segment):
            held = sum(file.stat().st_size for file in cache.folder.iterdir() if len(file.name) == 32)
            most = max(most, held)
    feed.close()
    assert most <= limit
    assert max(collections.Counter(storage.shards_read).values()) <= 2
    with pytest.raises(ConfigError, match=r"--cache-size 0.00 MB is too small for two windows of --shuffle-window 3"):
        datasets.dataset_size(from_values({"data": data_at(storage.url, cache_size="1kB")}))


def test_a_resumed_run_reads_the_same_samples_and_only_the_shards_that_they_need(make: Any, storage: Storage) -> None:
    plan = make(data=data_at(storage.url, shuffle_window=1, cache_size="1MB"), **ONE)
    whole = fed(plan)
    empty_cache(plan)
    storage.reads.clear()
    feed, (segment,) = feed_of(plan), plan.segments()
    rest = dataclasses.replace(segment, first_update=9, num_updates=segment.num_updates - 9)
    assert equal([images for images, _ in feed.calls(rest)], whole[9:])
    feed.close()
    order = epoch_order(plan.config.training.seed, 0, 12, plan.dataset_size.shards, 1)
    shard_of = datasets.load(plan.config).train.files._arrays["shards"]
    assert sorted(set(storage.shards_read)) == sorted({f"train/{shard_of[each]:05d}.tar" for each in order[9:]})


def test_the_test_split_and_single_samples_are_streamed_without_shards_of_the_training(
    make: Any, storage: Storage
) -> None:
    plan = make(data=data_at(storage.url), training={"batch_size": 1}, pod={"num_instances": 1})
    feed = feed_of(plan)
    labels = torch.cat([batch[1][:valid] for batch, valid in feed.evaluation_calls()])
    feed.close()
    assert (labels.tolist(), storage.shards_read) == ([0, 1], [])
    places = (storage.url, storage.folder)
    ours, local = (datasets.load(from_values({"data": data_at(place)})).train.files for place in places)
    assert [ours.read(index) for index in range(12)] == [local.read(index) for index in range(12)]
    assert storage.shards_read == []
    ours._process += 1  # a loader, which does not use the storage
    with pytest.raises(OSError, match="its shard was removed from the cache"):
        ours.read(0)
    assert f"({storage.url}/train/0000" in ours.name(0)


def test_the_process_that_downloads_begins_with_the_feed_unless_all_shards_are_here(
    make: Any, storage: Storage
) -> None:
    sizes: Any = {"training": {"batch_size": 1, "epochs": 1}, "pod": {"replicas": 2, "num_instances": 1}}
    plan = make(data=data_at(storage.url), **sizes)
    for is_here in (False, True):
        feed = feed_of(plan)
        downloads = feed._source.train.files._downloads
        assert (downloads._process is None) is is_here
        assert storage.shards_read == [] or is_here
        list(feed.calls(plan.segments()[0]))
        feed.close()


def test_the_process_that_downloads_imports_no_configuration(run_python: Callable[[str], str]) -> None:
    run_python("import sys, raypod.training.data.shard_process\nassert 'raypod.plan.config' not in sys.modules")


def test_an_outage_is_waited_for_and_one_that_lasts_ends_the_run(make: Any, storage: Storage) -> None:
    pauses: List[float] = []

    def refuse(name: str) -> None:
        if name.startswith("train/") and len(pauses) < 3:
            raise ConnectionRefusedError(111, "Connection refused")

    expected = fed(make(data=data_at(storage.folder), **ONE))
    plan = make(data=data_at(storage.url), **ONE)
    storage.fault = refuse
    with pytest.warns(RuntimeWarning, match=r"are read again .*: file://\S+/train/\d+.tar: .*Connection refused"):
        assert equal(fed(plan, pause=pauses.append), expected)
    empty_cache(plan)
    pauses.clear()
    plan = make(data=data_at(storage.url), run={"read_retry_s": 0}, **ONE)
    with pytest.raises(DataUnreadable, match=r"cannot read samples for 0 s .*\.tar: .*Connection refused"):
        fed(plan, pause=lambda seconds: None)


def test_a_slow_storage_is_waited_for_and_a_silent_one_is_an_outage(
    make: Any, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fed(make(data=data_at(storage.folder), **ONE))
    arrives = threading.Event()
    storage.fault = lambda name: arrives.wait(60) if name.startswith("train/") else None
    monkeypatch.setattr(shard_stream, "_WAIT_S", 0.0)
    plan = make(data=data_at(storage.url), **ONE)
    with pytest.warns(RuntimeWarning, match=r"waits for shards of file://\S+, which arrive more slowly than they are"):
        assert equal(fed(plan, pause=lambda seconds: arrives.set()), expected)
    arrives.clear()
    empty_cache(plan, 5000)
    monkeypatch.setattr(shard_stream, "_STALL_S", -1.0)
    end = InThread.end
    monkeypatch.setattr(InThread, "end", lambda self: (arrives.set(), end(self)))
    plan = make(data=data_at(storage.url), run={"read_retry_s": 0}, **ONE)
    with pytest.raises(DataUnreadable, match=r"no byte of file://\S+/train/\d+.tar has arrived for"):
        fed(plan)


def test_an_interrupted_feed_waits_for_no_shard_and_can_evaluate(make: Any, storage: Storage) -> None:
    plan = make(data=data_at(storage.url), training={"batch_size": 1}, pod={"replicas": 1, "num_instances": 1})
    feed, arrives = feed_of(plan), threading.Event()

    def block(name: str) -> None:
        if name.startswith("train/"):
            feed.interrupt()
            arrives.wait(60)

    storage.fault = block
    assert list(feed.calls(plan.segments()[0])) == []
    arrives.set()
    assert sum(valid for _, valid in feed.evaluation_calls()) == 2
    feed.close()


def test_a_damaged_shard_is_downloaded_again_and_then_named(make: Any, storage: Storage, monkeypatch: Any) -> None:
    download, damages = Store.download, [1]

    def damaging(store: Store, name: str, target: Path, most_bytes: int) -> None:
        download(store, name, target, most_bytes)
        if name.startswith("train/") and damages:
            damages.pop()
            target.write_bytes(b"damaged")

    monkeypatch.setattr(Store, "download", damaging)
    expected = fed(make(data=data_at(storage.folder), **ONE))
    plan = make(data=data_at(storage.url), **ONE)
    assert equal(fed(plan), expected)
    assert max(collections.Counter(storage.shards_read).values()) == 2
    feed = feed_of(plan)
    feed.close()
    cached = feed._source.train.files._downloads.cache.path(read_index(storage.folder).train.shards[0])
    cached.unlink()
    damages += [1, 1]
    words = r"the shard file://\S+/train/00000.tar: its checksum is \w+, expected \w+, al.* \(7 bytes, expected \d+\);"
    with pytest.raises(ConfigError, match=words):
        fed(plan)
    assert not cached.exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:600]), "it ends before byte [0-9]+, expected [0-9]+ bytes"),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "the bytes of sample [01] have changed since it"),
        (Path.unlink, "FileNotFoundError"),
    ],
    ids=["truncated", "changed", "missing"],
)
def test_a_sample_of_a_damaged_shard_is_an_error_of_the_shard(
    packed: Path, tmp_path: Path, storage: Storage, damage: Any, words: str
) -> None:
    storage.folder = Path(shutil.copytree(str(packed), str(tmp_path / "copy")))
    damage(storage.folder / "val" / "00000.tar")
    images = datasets.load(from_values({"data": data_at(storage.url)})).test
    index = int(np.flatnonzero(images.files._arrays["shards"] == 0)[0])
    message = refused(f"^cannot use the shard {storage.url}/val/00000.tar: {words}", images.__getitem__, index)
    assert message.endswith("; upload it again, or see whether this host may read it")


def test_what_a_disk_has_changed_is_downloaded_again(make: Any, storage: Storage) -> None:
    plan = make(data=data_at(storage.url), **ONE)
    expected = fed(plan)
    files = datasets.load(plan.config).train.files
    path = Path(files._paths[0])
    path.write_bytes(bytes(path.stat().st_size))
    storage.reads.clear()
    with pytest.warns(RuntimeWarning, match="its bytes in the shard have changed since it was packed, by this disk"):
        assert equal(fed(plan), expected)
    assert storage.shards_read == ["train/00000.tar"]


def test_a_shard_gets_its_name_while_nobody_counts_the_files(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a listing misses it under both names, and the cache gets larger than its limit."""
    shard, rename, renamed = read_index(storage.folder).train.shards[0], Path.rename, []

    def checked(path: Path, target: Path) -> None:
        with pytest.raises(WaitTimedOut), file_lock(path.parent / "lock", 0, ""):
            pass
        renamed.append(rename(path, target))

    monkeypatch.setattr(Path, "rename", checked)
    cache = ShardCache(tmp_path / "shards", shard.bytes)
    assert (cache.fetch(Store(storage.url), shard), cache.has(shard), len(renamed)) == (shard.bytes, True, 1)


def test_processes_of_a_host_download_a_shard_once_and_remove_what_was_needed_longest_ago(
    storage: Storage, tmp_path: Path
) -> None:
    one, two, three, four = read_index(storage.folder).train.shards[:4]
    cache = ShardCache(tmp_path / "shards", one.bytes + two.bytes + max(three.bytes, four.bytes))
    (cache.folder / "train").mkdir(parents=True)  # what is not of the cache stays
    for name in ("index.json", "mine.partial"):
        (cache.folder / name).write_bytes(bytes(one.bytes))
    with ThreadPoolExecutor(4) as pool:
        fetched = list(pool.map(lambda _: cache.fetch(Store(storage.url), one, ()), range(4)))
    assert sorted(fetched) == [0, 0, 0, one.bytes]
    for age, shard in ((10, two), (20, three)):
        cache.fetch(Store(storage.url), shard)
        os.utime(str(cache.path(shard)), (1000 - age, 1000 - age))
    cache.fetch(Store(storage.url), four, {three.xxh3_128})
    assert [cache.has(each) for each in (one, two, three, four)] == [True, False, True, True]
    (cache.folder / f"{'0' * 32}.5.partial").touch()  # of a process that was killed
    cache.remove_abandoned()
    assert [path.name for path in cache.folder.glob("*.partial")] == ["mine.partial"]
    assert all((cache.folder / name).exists() for name in ("index.json", "train"))
    with pytest.raises(DamagedShard):
        cache.fetch(Store(storage.url), Shard(file=one.file, bytes=one.bytes, xxh3_128="0" * 32))


def test_a_cache_into_which_others_can_write_is_refused(storage: Storage, tmp_path: Path, monkeypatch: Any) -> None:
    """Otherwise they link its files to those of this user."""
    folder = tmp_path / "cache" / "raypod" / "shards"
    before = os.umask(0)
    try:
        datasets.load(from_values({"data": data_at(storage.url)})).train[0]
    finally:
        os.umask(before)
    assert datasets.dataset_size(from_values({"data": data_at(storage.url)}))
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=f"--cache-dir .*: every user can write into {folder}; choose another folder"):
        datasets.dataset_size(from_values({"data": data_at(storage.url)}))
    folder.chmod(0o755)
    monkeypatch.setattr(private, "ROOT", 1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match=f"{folder} belongs to uid .*, not to 12345"):
        datasets.dataset_size(from_values({"data": data_at(storage.url)}))


@pytest.mark.parametrize(("inside", "cause"), [("", "Not a directory"), ("shards", "File exists")])
def test_a_cache_that_cannot_be_written_is_no_fault_of_the_data(
    storage: Storage, tmp_path: Path, inside: str, cause: str
) -> None:
    place = tmp_path / "place"
    (place / inside).parent.mkdir(exist_ok=True)
    (place / inside).write_text("a file")
    data = from_values({"data": data_at(storage.url, cache_dir=str(place))})
    message = refused(f"cannot write shards to {place}/shards .* with --cache-dir", datasets.load, data)
    assert cause in message
    assert storage.reads == []


def test_a_run_is_that_of_a_local_copy_and_its_ledger_proves_it(storage: Storage, tmp_path: Path, capsys: Any) -> None:
    def run(name: str, *words: str) -> Tuple[str, Path]:
        flags = [*FLAGS, "--dataset", "imagefolder", "--image-size", "16", "--run-dir", str(tmp_path / name), *words]
        assert train.main(flags) == 0
        return capsys.readouterr().out, tmp_path / name

    window = ("--shuffle-window", str(WINDOW), "--epochs", "2")
    _, streamed = run("streamed", "--data-dir", storage.url, *window)
    _, local = run("local", "--data-dir", str(storage.folder), *window)
    summaries = [json.loads((each / "summary.json").read_text()) for each in (streamed, local)]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert main(["verify-data", str(streamed)]) == 0
    order = verify_data.order_of(streamed)
    assert (len(order.shards), order.window) == (len(read_index(storage.folder).train.shards), WINDOW)
    with pytest.raises(AssertionError):
        run("other", "--resume", str(streamed), "--shuffle-window", "2")
    assert "shuffle_window" in capsys.readouterr().err
    longer = ("--epochs", "3", "--resume-anyway", "total_updates")
    _, resumed = run("resumed", "--resume", str(streamed), "--data-dir", str(storage.folder), *longer)
    assert verify_data.order_of(resumed) == order
    assert main(["evaluate", str(streamed), "--data-dir", str(storage.folder.parent)]) == 0  # images without shards


def test_the_plan_names_the_window_and_the_cache(storage: Storage, tmp_path: Path, capsys: Any) -> None:
    flags = [*FLAGS, "--dataset", "imagefolder", "--data-dir", storage.url, "--dry-run"]
    assert train.main([*flags, "--shuffle-window", "2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    count = len(read_index(storage.folder).train.shards)
    assert f"{count + 2} shards (" in out
    assert f"at {storage.url}; each host keeps up to 50GB of them in {tmp_path}/cache/raypod/shards" in out
    assert f"shuffled in windows of 2 of {count} shards, 0.0" in out
    assert train.main(flags) == 0
    assert "shuffled as a whole: the window is 16 shards" in " ".join(capsys.readouterr().out.split())
    assert storage.reads == [], "a plan reads the index only"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data-dir", "file://{none}"], "there is no file://.*none/index.json: --data-dir needs the URL of what"),
        (["--data-dir", "foo://bucket/x"], "--data-dir foo://bucket/x: unknown scheme"),
        (["--data-dir", "s3://key:secret@bucket/x"], "--data-dir s3://...: a URL holds no credentials"),
        (["--data-dir", "{images}", "--shuffle-window", "2"], "--shuffle-window 2: .* has no shards; omit it, or pack"),
        (["--data-dir", "{packed}", "--cache-size", "many"], "cache.size.* expected a size such as 256MB or 1GB"),
        (["--dataset", "digits", "--cache-size", "2GB"], "--cache-size 2GB has no effect without --dataset imagef"),
        (["--dataset", "digits", "--samples", "9"], "--samples 9 has no effect without --dataset synthetic: omit it"),
        (["--dataset", "digits", "--classes", "9"], "--classes 9 has no effect without --dataset synthetic or module"),
        (["--dataset", "digits", "--shuffle-window", "2"], "--shuffle-window 2 has no effect without --dataset imagef"),
    ],
)
def test_wrong_settings_are_one_line(storage: Storage, words: Any, message: str, capsys: Any) -> None:
    places = {"none": storage.folder / "none", "images": storage.folder.parent, "packed": storage.folder}
    flags = [*FLAGS, "--dry-run", "--dataset", "imagefolder", *(word.format(**places) for word in words)]
    assert re.search(message, one_line(capsys, train.main, flags))


def test_the_process_downloads_and_ends(make: Any, storage: Storage, processes: Any, monkeypatch: Any) -> None:
    monkeypatch.undo()
    data = data_at(storage.url, cache_dir=str(Path(make().run_dir).parent / "cache"), num_workers=1)
    sizes: Any = {"training": {"batch_size": 2, "epochs": 1}, "pod": {"replicas": 2, "num_instances": 1}}
    plan = make(data=data, **sizes)
    feed = feed_of(plan)
    images = [batch[0] for segment in plan.segments() for batch in feed.calls(segment)]
    process = feed._source.train.files._downloads._process
    assert process.is_running()
    feed.close()
    assert not process.is_running()
    assert equal(images, fed(make(data=data_at(storage.folder), **sizes)))
