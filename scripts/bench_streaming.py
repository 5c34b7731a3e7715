"""Measure data at a URL: `python scripts/bench_streaming.py shuffle`, `... speed --peer PYTHON`, and `... disk`.

`shuffle` compares the windows of `--shuffle-window` with a full shuffle on the digits in 50 shards, which are sorted by
class, or mixed as `raypod pack` mixes them: the rank correlation between the places in an epoch of samples that are
neighbours in the shards (0: a full shuffle; 1: the order of the shards), and the test accuracy of a small network after
`--epochs` epochs, mean and standard deviation over `--seeds` seeds. The same network learns from all.

`speed` reads the same samples (random bytes, not decoded) from a local S3 server (moto, behind a proxy that counts
bytes), in one process: raypod, and MosaicML Streaming under the interpreter PYTHON, which has mosaicml-streaming. Both
shuffle, and have an empty cache at first: samples/s of the first epoch, without the imports; seconds from the start of
a process that resumes in the middle of an epoch with an empty cache until its first sample; and bytes read. Rounds
alternate; medians with the extremes.

`disk` reads and decodes generated JPEG files (make_imagenet.py) in one process, for two epochs, with simplejpeg: from
the S3 server, and from a folder of this host as a URL (file://), each time with an empty cache of the same size, into
which half of the shards fit. It also shows the CPU time per image of the process that reads and decodes, of the process
that downloads for it, from its start, and of the server, which a storage elsewhere would not take from this host.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np  # noqa: E402 - needs the path above

from raypod.plan.resolve import from_values  # noqa: E402
from raypod.system.files import FilePart  # noqa: E402
from raypod.system.usage import cpu_seconds_of  # noqa: E402
from raypod.training import data as datasets  # noqa: E402
from raypod.training.data import packing  # noqa: E402
from raypod.training.data.order import epoch_order, packed_order  # noqa: E402

SHARDS, SEED, BATCH = 50, 42, 32
PEER = str(ROOT / "scripts" / "bench_streaming_peer.py")
RUN_S = 500.0
URL = "s3://bucket"


def counts_of(samples: int) -> Tuple[int, ...]:
    """Return the numbers of samples of the shards, as equal as they can be."""
    return tuple(len(part) for part in np.array_split(np.arange(samples), SHARDS))


def neighbours(order: np.ndarray) -> float:
    """Return the correlation of the places in an epoch of samples that are neighbours in the shards."""
    places = np.empty(len(order))
    places[order] = np.arange(len(order))
    in_shards = places[packed_order(len(order))]
    return float(np.corrcoef(in_shards[:-1], in_shards[1:])[0, 1])


def accuracy(images: Any, labels: Any, tests: Any, orders: Sequence[np.ndarray], seed: int) -> float:
    """Train a network of two layers, and return its accuracy on the test images."""
    import torch

    torch.manual_seed(seed)
    network = torch.nn.Sequential(torch.nn.Linear(images.shape[1], 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.03, momentum=0.9)
    for order in orders:
        for first in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[first : first + BATCH].copy()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return float((network(tests[0]).argmax(1) == tests[1]).float().mean())


def shuffle(args: argparse.Namespace) -> None:
    """Print the table of the windows."""
    import torch

    splits = datasets.load(from_values({"data": {"dataset": "digits"}}))
    images, tests = (
        torch.from_numpy(each.images.reshape(len(each), -1).astype("float32") / 255)
        for each in (splits.train, splits.test)
    )
    labels, test_labels = (torch.from_numpy(each.labels.astype("int64")) for each in (splits.train, splits.test))
    count = len(labels)
    by_class = np.argsort(splits.train.labels, kind="stable")
    sorted_place = np.empty(count, dtype=np.int64)  # of the sample that `epoch_order` takes to be at a place
    sorted_place[packed_order(count)] = by_class
    print(f"{count} samples in {SHARDS} shards, {args.epochs} epochs, {args.seeds} seeds")
    print("window  neighbours  accuracy, sorted by class  accuracy, as raypod pack")
    for window in (1, 2, 4, 8, 16, 32, SHARDS):
        correlation, found = [], {True: [], False: []}  # type: ignore[var-annotated]
        for seed in range(1, args.seeds + 1):  # with 0 the first epoch has the order of the shards
            orders = [epoch_order(seed, epoch, count, counts_of(count), window) for epoch in range(args.epochs)]
            correlation += [neighbours(order) for order in orders]
            for is_sorted in (True, False):
                fed = [sorted_place[order] if is_sorted else order for order in orders]
                found[is_sorted].append(accuracy(images, labels, (tests, test_labels), fed, seed))
        shown = [f"{100 * np.mean(each):.2f} +- {100 * np.std(each):.2f} %" for each in (found[True], found[False])]
        print(f"{window:6}  {np.mean(correlation):10.3f}  {shown[0]:>25}  {shown[1]:>24}", flush=True)


@dataclasses.dataclass
class Samples:
    """Random samples, in a packed folder and for the peer."""

    folder: Path
    count: int
    bytes: int

    def write(self, shard_bytes: int) -> Path:
        """Write an image folder whose files are random bytes, and pack it."""
        generator = np.random.default_rng(SEED)
        for split, count in (("train", self.count), ("val", 1)):
            (self.folder / "images" / split / "one").mkdir(parents=True)
            for number in range(count):
                (self.folder / "images" / split / "one" / f"{number:06d}.jpg").write_bytes(generator.bytes(self.bytes))
        packing.pack(self.folder / "images", self.folder / "packed", shard_bytes, lambda written, total: None)
        return self.folder / "packed"


def read(
    url: str,
    cache: str,
    window: int,
    first: int,
    limit: int,
    cache_size: str = "50GB",
    epochs: int = 1,
    decodes: bool = False,
) -> Tuple[int, float, float, float, float]:
    """Read the samples of epochs from position `first` on.

    Returns:
        Their number, seconds, when the first came, and CPU seconds of this process and of the one that downloads.
    """
    import s3fs  # noqa: F401
    import torch

    import raypod.training.data.image_decoders  # noqa: F401 - imports torchvision

    torch.set_num_threads(1)
    began, began_cpu = time.perf_counter(), time.process_time()
    data = {"dataset": "imagefolder", "data_dir": url, "cache_dir": cache, "shuffle_window": window}
    config = from_values({"data": {**data, "cache_size": cache_size, "jpeg_decoder": "simplejpeg"}})
    train = datasets.load(config).train
    files = train.files
    files.begin()  # as `Feed` does
    size = datasets.dataset_size(config)
    orders = [epoch_order(SEED, epoch, size.train_samples, size.shards, window)[first:] for epoch in range(epochs)]
    calls: Iterator[Any] = iter(
        [(epoch, order[at : at + BATCH]) for epoch, order in enumerate(orders) for at in range(0, len(order), BATCH)]
    )
    get = train.__getitem__ if decodes else files.read
    count, first_at = 0, 0.0
    for _, samples in files.prepared(calls, 2):
        for sample in samples:
            get(int(sample))
            first_at = first_at or time.time()
            count += 1
        if count >= limit:
            break
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    files.close()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return count, seconds, first_at, cpu_s, ended.ru_utime + ended.ru_stime


@contextlib.contextmanager
def s3_server() -> Iterator[Any]:
    """Run an S3 server, which the environment names; yield it."""
    from tests.support import storage_servers as servers

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends on SIGTERM, too
    server = servers.s3_server()
    server.start()
    servers.create_bucket(server.port)
    os.environ.update(
        AWS_ACCESS_KEY_ID=servers.KEY_ID, AWS_SECRET_ACCESS_KEY=servers.SECRET, AWS_DEFAULT_REGION="us-east-1"
    )
    use_port(server.port)
    try:
        yield server
    finally:
        server.kill()


def use_port(port: int) -> None:
    """Let the environment name the server at a port."""
    os.environ.update(dict.fromkeys(("AWS_ENDPOINT_URL", "S3_ENDPOINT_URL"), f"http://127.0.0.1:{port}"))


def speed(args: argparse.Namespace) -> None:
    """Print the rates of raypod and of the peer."""
    from tests.support.storage_servers import Proxy

    with s3_server() as server, tempfile.TemporaryDirectory() as folder:
        proxy = Proxy(server.port)
        use_port(proxy.port)
        packed = Samples(Path(folder), args.samples, args.sample_bytes).write(args.shard_bytes)
        upload(packed, f"{URL}/raypod")
        peer(args, "write", str(packed.parent / "images" / "train" / "one"), f"{URL}/mosaic", str(args.shard_bytes))
        measure(args, URL, folder, proxy)


def disk(args: argparse.Namespace) -> None:
    """Print the rates of the S3 server and of the local disk, their ratio, and CPU times."""
    import make_imagenet

    with s3_server() as server, tempfile.TemporaryDirectory() as folder:
        packed = Path(folder, "packed")
        make_imagenet.write(Path(folder, "images"), args.images, 10, 10, SEED, 2)
        packing.pack(Path(folder, "images"), packed, args.shard_bytes, lambda written, total: None)
        upload(packed, f"{URL}/raypod")
        half = sum(each.stat().st_size for each in packed.rglob("*.tar")) // 2
        urls = {"s3": f"{URL}/raypod", "disk": f"file://{packed}"}
        found: Dict[str, List[Tuple[float, ...]]] = {name: [] for name in urls}
        for number in range(args.rounds):
            for name, url in urls.items():
                words = [url, f"{folder}/cache-{name}-{number}", str(args.window), "0", "--limit", str(2 * args.images)]
                words += ["--cache-size", f"{half // 1000}KB", "--epochs", "2", "--decode"]
                before_s = cpu_seconds_of(server.pid) or 0.0
                done = run([sys.executable, __file__, "read", *words])
                server_s = (cpu_seconds_of(server.pid) or 0.0) - before_s
                count, seconds, _, *cpu_s = json.loads(done.strip().splitlines()[-1])
                found[name].append((count / seconds, *(1e3 * each / count for each in (*cpu_s, server_s))))
                print(f"round {number + 1}, {name}: {count / seconds:.0f} images/s", flush=True)
    print("       images/s, and CPU ms per image: reads and decodes, downloads, server")
    for name, rows in found.items():
        print(f"{name:6} {'   '.join(spread(each) for each in zip(*rows))}")
    print(f"ratio  {spread([s3[0] / local[0] for s3, local in zip(found['s3'], found['disk'])])}")


def spread(values: Sequence[float]) -> str:
    """Return the median with the extremes."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} - {max(values):.3g})"


def measure(args: argparse.Namespace, url: str, folder: str, proxy: Any) -> None:
    """Print the table: in each round both read an epoch, and half of one, in new processes with empty caches."""
    found: Dict[str, List[Tuple[float, float, float, float]]] = {"raypod": [], "MosaicML Streaming": []}
    for number in range(args.rounds):
        for name in found:
            row: List[float] = []
            for first in (0, args.samples // 2):
                cache, before = f"{folder}/cache-{name[0]}-{number}-{first}", proxy.forwarded_bytes
                words = [f"{url}/{'raypod' if name == 'raypod' else 'mosaic'}", cache, str(args.window), str(first)]
                limit, began = args.samples if first == 0 else 1, time.time()
                if name == "raypod":
                    done = run([sys.executable, __file__, "read", *words, "--limit", str(limit)])
                else:
                    done = peer(args, "read", *words, str(args.samples), str(limit))
                count, seconds, first_at = json.loads(done.strip().splitlines()[-1])[:3]
                row += [count / seconds, (proxy.forwarded_bytes - before) / 1e6] if first == 0 else [first_at - began]
            found[name].append((row[0], row[1], row[2], 0.0))
            print(f"round {number + 1}, {name}: {row[0]:.0f} samples/s, {row[1]:.1f} MB, {row[2]:.2f} s", flush=True)
    for name, rows in found.items():
        rates, sizes, resumes, _ = zip(*rows)
        print(
            f"{name:20} {statistics.median(rates):8.0f} samples/s ({min(rates):.0f}-{max(rates):.0f})   "
            f"{statistics.median(sizes):6.1f} MB   resume {statistics.median(resumes):.2f} s "
            f"({min(resumes):.2f}-{max(resumes):.2f})"
        )


def upload(folder: Path, url: str) -> None:
    """Upload a folder."""
    from raypod.system.remote.store import Store

    store = Store(url)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with file.open("rb") as source:
                store.write(str(file.relative_to(folder)), FilePart(source, file.stat().st_size))


def peer(args: argparse.Namespace, *words: str) -> str:
    """Run the script of the peer."""
    return run([args.peer, PEER, *words])


def run(command: List[str]) -> str:
    """Return the output of a command."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=RUN_S).stdout


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shuffled = commands.add_parser("shuffle")
    shuffled.add_argument("--seeds", type=int, default=10)
    shuffled.add_argument("--epochs", type=int, default=5)
    measured = commands.add_parser("speed")
    measured.add_argument("--peer", required=True, help="the interpreter that has mosaicml-streaming")
    measured.add_argument("--samples", type=int, default=20_000)
    measured.add_argument("--sample-bytes", type=int, default=20_000)
    measured.add_argument("--shard-bytes", type=int, default=4_000_000)
    measured.add_argument("--window", type=int, default=4)
    measured.add_argument("--rounds", type=int, default=3)
    local = commands.add_parser("disk")
    local.add_argument("--images", type=int, default=4_000)
    local.add_argument("--shard-bytes", type=int, default=10_000_000)
    local.add_argument("--window", type=int, default=4)
    local.add_argument("--rounds", type=int, default=5)
    reads = commands.add_parser("read")
    for name in ("url", "cache"):
        reads.add_argument(name)
    for name in ("window", "first"):
        reads.add_argument(name, type=int)
    reads.add_argument("--limit", type=int, required=True)
    reads.add_argument("--cache-size", default="50GB")
    reads.add_argument("--epochs", type=int, default=1)
    reads.add_argument("--decode", action="store_true")
    args = parser.parse_args()
    if args.command == "read":
        words = args.url, args.cache, args.window, args.first, args.limit
        print(json.dumps(read(*words, args.cache_size, args.epochs, args.decode)))
    else:
        {"shuffle": shuffle, "speed": speed, "disk": disk}[args.command](args)


if __name__ == "__main__":
    main()
