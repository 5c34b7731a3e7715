"""The command line of `raypod pack`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Sequence

from raypod.cli import FlagParser, counted, show
from raypod.errors import ConfigError
from raypod.plan.values import parse_size

_DESCRIPTION = (
    "Pack a folder of images, train/CLASS/* and val/CLASS/* (or test/), into a few large tar files, for disks on which "
    "many small files are slow. Train with --dataset imagefolder --data-dir OUT."
)
_EPILOG = (
    "The tar files are WebDataset shards: 000000042.jpg and 000000042.cls are image and label of sample 42. OUT "
    "appears when it is complete; an interrupted command leaves at most OUT.partial, which the next one replaces."
)


def pack(argv: Sequence[str]) -> int:
    """Pack an image folder, or verify a packed one."""
    parser = FlagParser(prog="raypod pack", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("folder", metavar="FOLDER", help="the image folder; with --verify, the packed folder")
    parser.add_argument("out", metavar="OUT", nargs="?", help="folder of the shards, which must not exist")
    parser.add_argument(
        "--shard-size", metavar="SIZE", default="1GB", help="largest size of a shard, as 256MB [default: 1GB]"
    )
    parser.add_argument("--verify", action="store_true", help="compare every file of a packed folder with its checksum")
    args = parser.parse_args(argv)
    from tqdm import tqdm  # --help needs none of these

    from raypod.datasets import packing, shards

    folder = Path(args.folder).expanduser()
    try:
        shard_bytes = parse_size(args.shard_size)
    except ValueError as error:
        raise ConfigError(f"--shard-size {args.shard_size}: {error}") from None
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    bar: Any
    if args.verify:
        if args.out is not None:
            raise ConfigError("--verify takes one folder, the packed one")
        if not shards.is_packed(folder):
            raise ConfigError(f"{folder} has no {shards.INDEX}: `raypod pack` has not written it")
        index = shards.read_index(folder)
        total = sum(shard.bytes for shard in index.shards)
        with tqdm(total=total, unit="B", unit_scale=True, disable=None, file=sys.stderr) as bar:
            shards.verify(folder, index, bar.update)
        show(f"{folder}: {counted(len(index.shards), 'shard')}, {total / 1e9:.2f} GB, all checksums are right")
        return 0
    if args.out is None:
        raise ConfigError("the folder of the shards is missing: raypod pack FOLDER OUT")
    with tqdm(unit="image", disable=None, file=sys.stderr) as bar:

        def progress(written: int, total: int) -> None:
            bar.total = total
            bar.update(written - bar.n)

        found = packing.pack(folder, Path(args.out).expanduser(), shard_bytes, progress)
    show(
        f"{args.out}: {found.train} training and {found.test} test images in {counted(found.shards, 'shard')}, "
        f"{found.bytes / 1e9:.2f} GB"
    )
    for line in found.skipped:
        show(line)
    return 0
