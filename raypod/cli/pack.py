"""The command line of `raypod pack`."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple

from raypod.errors import ConfigError
from raypod.plan import flags, resolve, user_code
from raypod.plan.config import HF_CAUSAL_LM, HF_MASKED_LM, IMAGE_TASKS, LANGUAGE_MODEL, Config
from raypod.plan.values import parse_size
from raypod.system import sdk
from raypod.system.command_line import FlagParser, counted, show

_USAGE = (
    "raypod pack [--shard-size SIZE] [--columns NAMES] FOLDER OUT\n"
    "       raypod pack [--shard-size SIZE] --dataset MODULE:FUNCTION [--data-dir DIR] OUT\n"
    "       raypod pack [--shard-size SIZE] --task MODULE:CLASS [options of the task] OUT\n"
    "       raypod pack --task language-model --text FILES [--tokenizer FILE] [--held-out FRACTION] [--max-mb MB] OUT\n"
    "       raypod pack --verify OUT"
)
_DESCRIPTION = (
    "Pack data into a few large files, for disks on which many small files are slow, and for object stores. A folder "
    "of images, train/CLASS/* and val/CLASS/* (or test/): train with --dataset imagefolder --data-dir OUT. A folder of "
    "Parquet files, train*.parquet and test*.parquet, or one that save_to_disk of Hugging Face's datasets has written: "
    "with a --task of your own and --data-dir OUT. A folder of WebDataset tars, which are not copied: OUT has links to "
    "them, and an index. A data set of your own, as --dataset of train: with --dataset shards --data-dir OUT. The data "
    "sets of a task, as --task of train: with the same --task and --data-dir OUT. A text for --task language-model, "
    "which is tokenized once, and mapped into memory: with --task language-model --data-dir OUT."
)
_EPILOG = (
    "The tar files are WebDataset shards: 000000042.jpg and 000000042.cls are image and label of sample 42, or "
    "000000042.x.npy its entry x. OUT appears when it is complete; an interrupted command leaves at most OUT.partial, "
    "which the next one replaces."
)
_OF_TRAIN = ("--dataset", "--task", "--config")  # with one of these, the data is that of a training
_SHARD_SIZE = "1GB"
# The keys of a training that decide what is packed: of a text, of labelled images, and of a task with all its options.
_OF_TEXT = ("task.name", "task.text", "task.tokenizer", "task.held_out", "task.max_mb")
_OF_IMAGES = ("data.dataset", "data.data_dir", "data.classes", "task.name", "run.device")
_OF_TASK = (*("data.data_dir", "data.cache_dir", "data.cache_size"), "training.seed", "run.device")


def parser(words: Sequence[str]) -> FlagParser:
    """Return the parser of a command line: the data of a folder, or with one of `_OF_TRAIN` that of a training."""
    is_of_train = any(word.partition("=")[0] in _OF_TRAIN for word in words) and not {"-h", "--help"} & set(words)
    run = _pack_training if is_of_train else _pack_folder
    parser = FlagParser(run, prog="raypod pack", usage=_USAGE, description=_DESCRIPTION, epilog=_EPILOG)
    if is_of_train:
        from raypod.training.tasks.registry import schema_for

        flags.add_flags(parser, schema_for(words))
    else:
        parser.add_argument("words", nargs="*", metavar="FOLDER OUT", help="the data, and the folder of the shards")
        parser.add_argument(
            "--columns",
            metavar="NAMES",
            help="columns of tables, or files of samples in tars, as x,label [default: all]",
        )
        parser.add_argument("--dataset", metavar="MODULE:FUNCTION", help="data set of your own, as of raypod train")
        parser.add_argument("--task", metavar="MODULE:CLASS", help="task of your own, as of raypod train")
        parser.add_argument("--data-dir", metavar="DIR", help="what the data set, or the task, reads")
    parser.add_argument(
        "--shard-size", metavar="SIZE", help=f"largest size of a shard, as 256MB [default: {_SHARD_SIZE}]"
    )
    parser.add_argument("--verify", action="store_true", help="compare every file of a packed folder with its checksum")
    return parser


def _pack_training(args: Namespace) -> int:
    words = [word for word in args.overrides if "=" not in word]
    args.overrides = [word for word in args.overrides if "=" in word]
    if len(words) != 1 or args.verify:
        raise ConfigError("--dataset and --task take one folder, that of the shards: raypod pack --task mine:Task OUT")
    config, target = resolve.resolve(args), Path(words[0]).expanduser()
    if config.task.name in (HF_CAUSAL_LM, HF_MASKED_LM):
        raise ConfigError(
            f"--task {config.task.name}: pack its text with --task {LANGUAGE_MODEL} --text FILES --tokenizer "
            "FOLDER/tokenizer.json, without --model"
        )
    is_image_task, is_text = config.task.name in IMAGE_TASKS, config.task.name == LANGUAGE_MODEL
    effective = _OF_IMAGES if is_image_task else _OF_TEXT if is_text else _OF_TASK
    for name in resolve.given_values(args):
        if name not in effective and (is_image_task or is_text or not name.startswith("task.")):
            raise ConfigError(f"--{name.partition('.')[2].replace('_', '-')} has no effect on raypod pack: omit it")
    if not is_text:
        return _pack_samples(config, target, _size_of(args.shard_size))
    if args.shard_size is not None:
        raise ConfigError("--shard-size has no effect on a text, which has no shards: omit it")
    return _pack_text(config, target)


def _pack_folder(args: Namespace) -> int:
    from raypod.training.data import packing, shards  # --help needs none of these
    from raypod.training.data.tables import splits_in

    shard_bytes = _size_of(args.shard_size)
    folder = _folder_of(args)
    if args.verify:
        if len(args.words) != 1:
            raise ConfigError("--verify takes one folder, the packed one")
        if not shards.is_packed(folder):
            raise ConfigError(f"{folder} has no {shards.INDEX}: `raypod pack` has not written it")
        return _verify(folder)
    if len(args.words) != 2:
        raise ConfigError("the folder of the shards is missing: raypod pack FOLDER OUT")
    target = Path(args.words[1]).expanduser()
    packing.check_target(target)
    columns = args.columns and args.columns.split(",")
    tables = None if shards.is_packed(folder) else splits_in(folder, columns, target.parent)
    if tables is None and _pack_tars(folder, columns, target, args.shard_size):
        return 0
    if tables is None and columns:
        raise ConfigError(f"--columns has no effect on {folder}, which has no tables: omit it")
    with _progress("image" if tables is None else "row") as progress:
        if tables is None:
            found = packing.pack(folder, target, shard_bytes, progress)
        else:
            splits = packing.splits_of(*tables)
            found = packing.pack_samples(str(folder), splits, (), target, shard_bytes, progress)
    _show_packed(target, found, "images" if tables is None else "samples")
    return 0


def _folder_of(args: Namespace) -> Path:
    if args.data_dir is not None:
        raise ConfigError(
            f"--data-dir {args.data_dir} has no effect without --dataset or --task; to pack that folder itself: raypod "
            f"pack {args.data_dir} OUT"
        )
    if not args.words:
        raise ConfigError("the data is missing: raypod pack FOLDER OUT")
    folder = Path(args.words[0]).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder")
    return folder


def _pack_tars(folder: Path, columns: Optional[Sequence[str]], target: Path, shard_size: Optional[str]) -> bool:
    """Index the tars of others in a folder; return whether it has some."""
    from raypod.training.data import foreign_tars, image_folder, shards

    if shards.is_packed(folder) or image_folder.has_classes(folder):
        return False
    tars = foreign_tars.tars_in(folder)
    if tars is None:
        return False
    if shard_size is not None:
        raise ConfigError("--shard-size has no effect on tars, which are indexed where they are: omit it")
    with _progress("B") as progress:
        found = foreign_tars.index_tars(str(folder), tars, columns, target, progress)
    _show_packed(target, found, "samples")
    return True


def _pack_samples(config: Config, target: Path, shard_bytes: int) -> int:
    """Pack the data sets of a training."""
    from raypod.training.data import packing
    from raypod.training.tasks.registry import task_of  # imports torch

    name = config.data.dataset if config.task.name in IMAGE_TASKS else config.task.name
    if ":" not in name:
        raise ConfigError(f"{name} is built in: name a data set or a task of your own, or pack a folder")
    with sdk.importable(config.run.device), user_code.reported(name):
        splits, classes = _samples_of(task_of(config), name)
    with _progress("sample") as progress:
        found = packing.pack_samples(name, splits, classes, target, shard_bytes, progress)
    _show_packed(target, found, "images" if config.task.name in IMAGE_TASKS else "samples")
    return 0


def _pack_text(config: Config, target: Path) -> int:
    from raypod.training.data import packed_text, packing
    from raypod.training.tasks.language_facts import LanguageOptions, pieces_of

    packing.check_target(target)
    options = LanguageOptions.model_validate(config.task.options)
    name = ", ".join(options.text or ["the standard library of Python"])
    with _progress("B") as progress:
        found = packed_text.pack_text(name, pieces_of(options), options.tokenizer, target, progress)
    units = "bytes" if options.tokenizer is None else "tokens"
    show(f"{target}: {found.train} training and {found.test} test {units}, {found.bytes / 1e9:.2f} GB")
    return 0


def _samples_of(task: Any, name: str) -> Tuple[Any, Tuple[str, ...]]:
    """Return what is packed of a task, and the names of the classes of images."""
    from raypod.training.data.packing import splits_of

    source = task.load()
    if not len(source.train):
        raise ConfigError(f"{name} has no training samples")
    train, test = (getattr(split, "uncollated", split) for split in (source.train, source.test))
    classes = tuple(task.class_names()) if task.config.task.name in IMAGE_TASKS else ()
    return splits_of(train, test, source.check_sample), classes


def _verify(folder: Path) -> int:
    from tqdm import tqdm

    from raypod.training.data import shards

    index = shards.read_index(folder)
    total = sum(shard.bytes for shard in index.shards)
    bar: Any
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, file=sys.stderr) as bar:
        shards.verify(folder, index, bar.update)
    show(f"{folder}: {counted(len(index.shards), 'shard')}, {total / 1e9:.2f} GB, all checksums are right")
    return 0


def _size_of(given: Optional[str]) -> int:
    text = _SHARD_SIZE if given is None else given
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--shard-size {text}: {error}") from None


@contextlib.contextmanager
def _progress(unit: str) -> Iterator[Callable[[int, int], object]]:
    """Show a bar; yield a function of what is done and of all."""
    from tqdm import tqdm

    bar: Any
    with tqdm(unit=unit, disable=None, file=sys.stderr) as bar:

        def progress(written: int, total: int) -> None:
            bar.total = total
            bar.update(written - bar.n)

        yield progress


def _show_packed(target: Path, found: Any, samples_are: str) -> None:
    show(
        f"{target}: {found.train} training and {found.test} test {samples_are} in {counted(found.shards, 'shard')}, "
        f"{found.bytes / 1e9:.2f} GB"
    )
    for line in found.skipped:
        show(line)
