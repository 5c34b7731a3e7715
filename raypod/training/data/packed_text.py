"""A text that was tokenized once: .npy files, which a host maps into memory, and an index as that of `shards`.

    index.json             of `shards`, with `text`
    train/tokens.npy       uint8 [tokens] without a tokenizer; otherwise uint16, or int32 for a large vocabulary
    train/sizes.npy        uint32 [tokens], the bytes of each token; only with a tokenizer
    train/starts.npy       int64 [files], where the tokens of each file begin
    train/tokenizer.json   the tokenizer
    val/...                likewise, without a tokenizer

A run computes the same with it as with the files of the text. At a URL, a host downloads the files of a split whole.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
from numpy.lib import format as npy

from raypod.errors import ConfigError, DataMissing
from raypod.plan.config import LANGUAGE_MODEL, STREAM_WINDOW, Config
from raypod.system.files import new_file, sync_folder
from raypod.system.urls import is_url
from raypod.training.data import packing, shards
from raypod.training.data.arrays import load_mapped
from raypod.training.data.corpus import BYTES, Piece, Pieces, Text, Tokenizer, encoded_pieces
from raypod.training.data.shard_stream import Packed, StreamedShards
from raypod.training.data.shards import Shard, SplitIndex, TextIndex

_HEADER_BYTES = 128  # of a .npy file of one dimension
_TOKENIZER = "tokenizer.json"
_MOST_UINT16 = 1 << 16


def pack_text(
    name: str, pieces: Pieces, tokenizer: Optional[str], target: Path, on_bytes: Callable[[int, int], object]
) -> packing.Packed:
    """Tokenize a text into the new folder `target`; one file of the text is in memory at a time.

    Args:
        name: of the text, for messages.
        pieces: of both splits.
        tokenizer: its file; None: a token is a byte.
        target: the folder.
        on_bytes: called with (bytes of the text read so far, all).

    Raises:
        ConfigError: as `packing.packed_folder`, or a file cannot be read.
    """
    found = None if tokenizer is None else Tokenizer(tokenizer)
    total, done = sum(each.stop - each.start for split in pieces for each in split), 0

    def progress(piece: Piece) -> None:
        nonlocal done
        done += piece.stop - piece.start
        on_bytes(done, total)

    with packing.packed_folder(name, target) as folder:
        written = {
            split: _write_split(folder / shards.SPLITS[split], of_split, found, progress)
            for split, of_split in zip(shards.SPLITS, pieces)
        }
        stored = None
        if tokenizer is not None:
            stored = folder / shards.SPLITS["train"] / _TOKENIZER
            with new_file(stored) as file:
                file.write(Path(tokenizer).expanduser().read_bytes())
        texts = [_mapped({file.name: file for file in files}) for _, files in written.values()]
        splits = {
            split: SplitIndex(samples=count, shards=tuple(_listed(folder, file) for file in files))
            for split, (count, files) in written.items()
        }
        from raypod.training.data.text import hash_of  # imports torch

        described = TextIndex(
            vocabulary=BYTES if found is None else found.vocabulary,
            tokenizer=stored and _listed(folder, stored),
            sha256=hash_of(*texts),
        )
        return packing.write_index(folder, {"classes": (), "text": described, "arrays": {}, **splits})


def _write_split(
    folder: Path, pieces: List[Piece], tokenizer: Optional[Tokenizer], on_piece: Callable[[Piece], None]
) -> Tuple[int, List[Path]]:
    """Write the files of a split; return its number of tokens, and the files."""
    folder.mkdir()
    kind = "uint8" if tokenizer is None else "uint16" if tokenizer.vocabulary <= _MOST_UINT16 else "int32"
    starts, count, has_sizes = [], 0, tokenizer is not None
    with contextlib.ExitStack() as stack:
        tokens = stack.enter_context(_GrowingArray(folder / "tokens.npy", kind).written())
        sizes = stack.enter_context(_GrowingArray(folder / "sizes.npy", "uint32").written()) if has_sizes else None
        for piece, (found, of_tokens) in zip(pieces, encoded_pieces(pieces, tokenizer)):
            starts.append(count)
            count += len(found)
            tokens.append(found)
            if sizes is not None and of_tokens is not None:
                sizes.append(of_tokens)
            on_piece(piece)
    with _GrowingArray(folder / "starts.npy", "int64").written() as array:
        array.append(np.array(starts, dtype=np.int64))
    sync_folder(folder)
    return count, [folder / f"{each}.npy" for each in ("tokens", *["sizes"] * has_sizes, "starts")]


class _GrowingArray:
    """A .npy file of one dimension, to which rows are appended."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind, self._count = path, np.dtype(kind).newbyteorder("<"), 0

    @contextlib.contextmanager
    def written(self) -> Iterator[_GrowingArray]:
        """Create the file; its header is written at the end of the block."""
        with new_file(self._path) as self._file:
            self._file.write(bytes(_HEADER_BYTES))
            yield self
        header = io.BytesIO()
        described = {"descr": npy.dtype_to_descr(self._kind), "fortran_order": False, "shape": (self._count,)}
        npy.write_array_header_1_0(header, described)
        assert len(header.getvalue()) == _HEADER_BYTES
        with self._path.open("r+b") as file:
            file.write(header.getvalue())
            file.flush()
            os.fsync(file.fileno())

    def append(self, rows: np.ndarray) -> None:
        """Append rows. OSError as from the file system."""
        self._count += len(rows)
        self._file.write(np.ascontiguousarray(rows, dtype=self._kind).data if len(rows) else b"")


def _listed(folder: Path, file: Path) -> Shard:
    place = f"{file.parent.name}/{file.name}"
    return Shard(file=place, bytes=file.stat().st_size, xxh3_128=shards.checksum_of(folder / place))


def _mapped(files: Dict[str, Path]) -> Text:
    try:
        columns = {name[: -len(".npy")]: load_mapped(path) for name, path in files.items()}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the packed text: {error}; copy it again, or pack again") from None
    return Text(columns["tokens"], columns.get("sizes"), columns["starts"])


class PackedText:
    """A text that `raypod pack` has written.

    Attributes:
        index: what it contains.
        content: `text.hash_of` its splits.
    """

    def __init__(self, packed: Packed, text: TextIndex) -> None:
        self._packed, self._text, self.index, self.content = packed, text, packed.index, text.sha256

    def tokenizer(self) -> Optional[Tokenizer]:
        """Return the tokenizer; None if tokens are bytes."""
        stored = self._text.tokenizer
        return None if stored is None else Tokenizer(str(self._packed.file(stored)), "--data-dir")

    def texts(self) -> Tuple[Text, Text]:
        """Return the tokens of both splits, memory-mapped. ConfigError if they cannot be read."""
        train, test = (
            _mapped({Path(each.file).name: self._packed.file(each) for each in split.shards})
            for split in (self.index.train, self.index.test)
        )
        return train, test

    def tokens_of_files(self) -> Tuple[List[int], List[int]]:
        """Return the number of tokens of each file of the text, of both splits."""
        found = []
        for split in (self.index.train, self.index.test):
            (starts,) = [each for each in split.shards if each.file.endswith("starts.npy")]
            found.append(np.diff(np.append(load_mapped(self._packed.file(starts)), split.samples)).tolist())
        return found[0], found[1]

    def __str__(self) -> str:
        return str(self._packed)

    @property
    def has_tokenizer(self) -> bool:
        """Whether tokens are those of a tokenizer; otherwise bytes."""
        return self._text.tokenizer is not None

    def note(self) -> str:
        """Return a line for the plan."""
        tokens = f"{self.index.train.samples} + {self.index.test.samples} {'tokens' if self.has_tokenizer else 'bytes'}"
        return f"packed text of {tokens}, {shards.shown_bytes(shards.bytes_of(self.index))}, at {self._packed}"


def opened(config: Config) -> PackedText:
    """Return the text that `raypod pack` has written at `data.data_dir`.

    Raises:
        DataMissing: there is none.
        ConfigError: it is damaged, or no text, or a setting has no effect on it.
    """
    data, place = config.data, str(config.data.data_dir)
    if data.shuffle_window not in (None, STREAM_WINDOW):
        raise ConfigError(
            f"--shuffle-window {data.shuffle_window} has no effect on a text, whose order is of all: omit it"
        )
    if is_url(place):
        packed: Packed = StreamedShards(config)
    else:
        folder = Path(place).expanduser()
        if not shards.is_packed(folder):
            raise DataMissing(
                f"--data-dir {place} has no {shards.INDEX}, which `raypod pack --task {LANGUAGE_MODEL}` writes; a "
                "text that is not packed has the flag --text"
            )
        if data.cache_dir is not None:
            raise ConfigError(f"--cache-dir has no effect on the folder {place}: omit it")
        packed = shards.PackedFolder(folder)
    if packed.index.text is None:
        raise ConfigError(f"{packed} has no text: `raypod pack --task {LANGUAGE_MODEL}` writes one")
    return PackedText(packed, packed.index.text)
