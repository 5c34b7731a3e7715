"""The text of a language model: its files, those that are held out, and their bytes or tokens. Imports no torch."""

from __future__ import annotations

import collections
import dataclasses
import os
import sysconfig
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Deque, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from raypod.errors import ConfigError, DataMissing
from raypod.plan.user_code import reported
from raypod.system.files import looked_in

if TYPE_CHECKING:
    import numpy as np  # imported where it is used: a plan of another task needs no NumPy

BYTES = 256  # vocabulary without a tokenizer
MAX_DEFAULT_MB = 8.0  # of the standard library
_END = 0  # the byte after each file
_END_TOKENS = ("<|endoftext|>", "</s>", "[SEP]", "<eos>")
_SUFFIXES = (".txt", ".md", ".rst", ".py")
# Not the same on all hosts with the same interpreter: installed packages, and files that the installation generates.
_NOT_PORTABLE = ("site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py", "_sysconfigdata", "config-")
# Tables of character sets, which are half of some samples of the text, and parts that some distributions leave out.
_LEFT_OUT = (
    *("encodings", "test", "tests", "idlelib", "idle_test", "turtledemo", "tkinter"),
    *("lib2to3", "ensurepip", "distutils"),
)


class Piece(NamedTuple):
    """The bytes of a file from `start` to `stop`, exclusive."""

    path: Path
    start: int
    stop: int


class Pieces(NamedTuple):
    """The text of the splits."""

    train: List[Piece]
    test: List[Piece]


@dataclasses.dataclass(frozen=True)
class Text:
    """The tokens of a split.

    Attributes:
        tokens: uint8 [tokens] without a tokenizer, else another type of integers.
        sizes: integers [tokens], the bytes of each token; None if a token is a byte.
        starts: int64 [files], where the tokens of each file begin.
    """

    tokens: np.ndarray
    sizes: Optional[np.ndarray]
    starts: np.ndarray


def find_pieces(text: Optional[Sequence[str]], held_out: float, max_mb: Optional[float]) -> Pieces:
    """Return the pieces of both splits, in an order that depends on the names of the files alone.

    Whole files are held out, as many as fit into the fraction; if none fits, the end of each file.

    Args:
        text: files and folders; None: the source text of the standard library.
        held_out: fraction of the bytes in the test split.
        max_mb: megabytes of text that are used at most; None: `MAX_DEFAULT_MB` of the standard library, all other text.

    Raises:
        DataMissing: there are no text files.
    """
    found = _standard_library() if text is None else [file for each in text for file in _files_of(each)]
    if text is None and max_mb is None:
        max_mb = MAX_DEFAULT_MB
    files = [Piece(path, 0, path.stat().st_size) for _, path in sorted(found, key=lambda each: _rank(each[0]))]
    files = list(_cut(files, None if max_mb is None else int(max_mb * 1e6)))
    if not files:
        raise DataMissing(f"the text files in {', '.join(text or ())} are empty")
    test = _that_fit(files, int(held_out * sum(each.stop for each in files)))
    if test:
        return Pieces([each for each in files if each not in test], test)
    cuts = [each.stop - int(held_out * each.stop) for each in files]
    return Pieces(
        [Piece(path, 0, cut) for (path, _, _), cut in zip(files, cuts)],
        [Piece(path, cut, stop) for (path, _, stop), cut in zip(files, cuts) if cut < stop],
    )


def _rank(name: str) -> Tuple[int, str]:
    """Return a key that sorts files in an arbitrary order, so that a part of them is a sample."""
    return zlib.crc32(os.fsencode(name)), name


def _cut(files: Sequence[Piece], max_bytes: Optional[int]) -> Iterator[Piece]:
    """Yield the files that are not empty, up to a number of bytes."""
    left = max_bytes
    for path, start, stop in files:
        taken = stop if left is None else min(stop, left)
        if taken:
            yield Piece(path, start, taken)
        left = None if left is None else left - taken


def _that_fit(files: Sequence[Piece], max_bytes: int) -> List[Piece]:
    """Return the files that fit into a number of bytes, in their order."""
    found, left = [], max_bytes
    for each in files:
        if each.stop <= left:
            found.append(each)
            left -= each.stop
    return found


def _standard_library() -> List[Tuple[str, Path]]:
    """Return the Python files of the running interpreter's standard library with their names."""
    root = Path(sysconfig.get_paths()["stdlib"])  # that of the base interpreter in a virtual environment
    found = _in_folder(root, (".py",))
    if not found:
        raise DataMissing(
            f"this Python has no source files of its standard library in {root}; use --text FILE_OR_FOLDER"
        )
    return [(name, path) for name, path in found if not any(map(_is_left_out, name.split("/")))]


def _is_left_out(part: str) -> bool:
    return part.startswith(_NOT_PORTABLE) or part in _LEFT_OUT


def _files_of(given: str) -> List[Tuple[str, Path]]:
    """Return a file, or the text files of a folder, with names that are the same on every host."""
    path = Path(given).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if not path.exists():
        raise DataMissing(f"--text {given} does not exist{looked_in(path)}")
    found = _in_folder(path, _SUFFIXES)
    if not found:
        raise DataMissing(f"--text {given} has no text files ({', '.join(_SUFFIXES)})")
    return found


def _in_folder(root: Path, suffixes: Tuple[str, ...]) -> List[Tuple[str, Path]]:
    """Return the files of a folder and its subfolders, without hidden ones."""
    paths = ((path.relative_to(root), path) for path in root.rglob("*") if path.suffix in suffixes and path.is_file())
    return [(name.as_posix(), path) for name, path in paths if not any(part.startswith(".") for part in name.parts)]


class Tokenizer:
    """A tokenizer file of the package `tokenizers`.

    Args:
        path: the file.
        flag: what names it, for messages.
        end: the token that ends a file; default: one of those with which tokenizers end a text.

    Attributes:
        end: the token that ends a file.
        vocabulary: number of tokens, with that one.

    Raises:
        ConfigError: the package is not installed, or the file cannot be used.
    """

    def __init__(self, path: str, flag: str = "--tokenizer", end: Optional[str] = None) -> None:
        try:
            import tokenizers  # an optional package
        except ImportError:
            raise ConfigError(
                f"{flag} needs the package tokenizers, which is not installed: pip install 'raypod[tokenizers]'"
            ) from None
        file = Path(path).expanduser()
        if not file.is_file():
            raise DataMissing(f"{flag} {path} does not exist{looked_in(file)}")
        with reported(f"{flag} {path}"):  # the package raises Exception itself
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        known = [ids[token] for token in (end, *_END_TOKENS) if token in ids]
        self.end = known[0] if known else max(ids.values(), default=-1) + 1
        self.vocabulary = max([*ids.values(), self.end]) + 1

    def encodes_as(self, other: Tokenizer) -> bool:
        """Return whether another tokenizer has the same tokens for every text."""
        return bool(self._tokenizer.to_str() == other._tokenizer.to_str())

    def number_of(self, token: str) -> Optional[int]:
        """Return the number of a token; None for one that it does not have."""
        found: Optional[int] = self._tokenizer.token_to_id(token)
        return found

    def padded(self, texts: Sequence[Any], length: int, padding: Optional[str]) -> List[Any]:
        """Return the encodings of texts, or of lists of words, cut and padded to a length, with the special tokens."""
        number = 0 if padding is None else self.number_of(padding) or 0
        self._tokenizer.enable_truncation(max_length=length)
        self._tokenizer.enable_padding(length=length, pad_id=number, pad_token=padding or "[PAD]")
        try:
            are_words = bool(texts) and not isinstance(texts[0], str)
            return list(self._tokenizer.encode_batch(list(texts), is_pretokenized=are_words))
        finally:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()

    def tokens_of(self, text: str) -> List[int]:
        """Return the tokens of a text, without one that ends it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(tokens)))

    def encode(self, piece: Piece) -> Tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a piece, int32, and the bytes of each, int64. A token ends the piece: one byte."""
        import numpy as np

        text = _read(piece).decode("utf-8", errors="replace")
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        before = _bytes_before(text)
        of_tokens = before[np.array([stop for _, stop in encoded.offsets], dtype=np.int64)]
        # Tokens that share the bytes of a character have its end, so that sums over tokens are sums over bytes.
        ends = np.append(np.maximum.accumulate(of_tokens), before[-1] + 1)
        return np.array([*encoded.ids, self.end], dtype=np.int32), np.diff(ends, prepend=0)


def _bytes_before(text: str) -> np.ndarray:
    """Return the number of bytes before each character of a text, and of all: int64 [characters + 1]."""
    import numpy as np

    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def random_text(tokens: int, vocabulary: int, seed: Tuple[int, ...]) -> Text:
    """Return so many random tokens, each of one byte."""
    import numpy as np

    drawn = np.random.Generator(np.random.PCG64(seed)).integers(0, vocabulary, tokens, dtype=np.int32)
    return Text(drawn, None, np.zeros(1, np.int64))


def encoded_pieces(
    pieces: Sequence[Piece], tokenizer: Optional[Tokenizer]
) -> Iterator[Tuple[np.ndarray, Optional[np.ndarray]]]:
    """Yield the tokens of each piece, and their bytes; without a tokenizer its bytes, a byte 0, and None."""
    import numpy as np

    for piece in pieces:
        if tokenizer is None:
            yield np.frombuffer(_read(piece) + bytes([_END]), dtype=np.uint8), None
        else:
            yield tokenizer.encode(piece)


def encode(pieces: Sequence[Piece], tokenizer: Optional[Tokenizer]) -> Text:
    """Return the tokens of the pieces, as `encoded_pieces`, one after the other."""
    import numpy as np

    found = list(encoded_pieces(pieces, tokenizer))
    kinds = (np.uint8, np.uint8) if tokenizer is None else (np.int32, np.int64)
    tokens, sizes = (
        np.concatenate([np.empty(0, kind), *(each for each in column if each is not None)])
        for kind, column in zip(kinds, zip(*found) if found else ((), ()))
    )
    starts = np.cumsum([0, *(len(each) for each, _ in found)], dtype=np.int64)[:-1]
    return Text(tokens, None if tokenizer is None else sizes, starts)


def tokens_of(text: str, tokenizer: Optional[Tokenizer]) -> List[int]:
    """Return the tokens of a text; without a tokenizer its bytes."""
    return list(text.encode()) if tokenizer is None else tokenizer.tokens_of(text)


def text_of(tokens: Sequence[int], tokenizer: Optional[Tokenizer]) -> str:
    """Return the text of tokens, up to the one that ends a file."""
    end = _END if tokenizer is None else tokenizer.end
    kept = list(tokens[: tokens.index(end)] if end in tokens else tokens)
    return bytes(kept).decode("utf-8", errors="replace") if tokenizer is None else tokenizer.text_of(kept)


def tokens_of_pieces(pieces: Sequence[Piece], tokenizer: Optional[Tokenizer]) -> List[int]:
    """Return the number of tokens of each piece; without a tokenizer, no file is read."""
    if tokenizer is not None:
        return [len(tokens) for tokens, _ in encoded_pieces(pieces, tokenizer)]
    return [each.stop - each.start + 1 for each in pieces]


def num_windows(tokens: int, length: int) -> int:
    """Return the number of windows of `length` predicted tokens; the first token of a text is not predicted."""
    return max(0, (tokens - 1) // length)


class Sequences(NamedTuple):
    """The sequences of a text that are packed into windows, and the window of each (see `pack_sequences`).

    Attributes:
        first: int64 [sequences], the place of the first token.
        sizes: int64 [sequences], the number of predicted tokens; a sequence has one more.
        windows: int64 [sequences], not in order.
    """

    first: np.ndarray
    sizes: np.ndarray
    windows: np.ndarray

    @property
    def num_windows(self) -> int:
        """The number of windows."""
        return int(self.windows.max()) + 1 if len(self.windows) else 0


def pack_sequences(tokens_of_files: Sequence[int], length: int) -> Sequences:
    """Pack files into windows of `length` predicted tokens.

    A file is a sequence; a longer one is several, of which each begins with the last token of the one before. In the
    order of the text, each gets the window with the least room that is enough, of those the first, or else a new one.
    """
    import numpy as np

    counts = np.asarray(tokens_of_files, dtype=np.int64)
    predicted = np.maximum(counts - 1, 0)
    parts = -(-predicted // length)
    files = np.repeat(np.arange(len(counts)), parts)
    offsets = (np.arange(len(files)) - np.repeat(np.cumsum(parts) - parts, parts)) * length
    sizes = np.minimum(length, predicted[files] - offsets)
    return Sequences((np.cumsum(counts) - counts)[files] + offsets, sizes, _best_fit(sizes, length))


def _best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    import numpy as np

    windows, count = np.empty(len(sizes), dtype=np.int64), 0
    with_room: List[Deque[int]] = [collections.deque() for _ in range(length)]
    rooms = 0  # bit r: there are windows with room for r tokens
    for each, size in enumerate(sizes.tolist()):
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            window = with_room[room].popleft()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, window, count = length, count, count + 1
        windows[each] = window
        if room > size:
            with_room[room - size].append(window)
            rooms |= 1 << (room - size)
    return windows


def _read(piece: Piece) -> bytes:
    try:
        with piece.path.open("rb") as file:
            file.seek(piece.start)
            content = file.read(piece.stop - piece.start)
    except OSError as error:
        raise ConfigError(f"cannot read {piece.path}: {error.strerror}") from None
    if len(content) != piece.stop - piece.start:
        raise ConfigError(f"{piece.path} has become shorter while it was read")
    return content
