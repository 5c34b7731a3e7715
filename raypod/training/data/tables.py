"""Tables of other libraries as map-style data sets: Parquet files, folders and data sets of Hugging Face, Ray Data.

`raypod.from_parquet`, `raypod.from_hf` and `raypod.from_ray_data`; `raypod pack` uses the first two. The files of a
folder that `save_to_disk` has written are memory-mapped, and read with pyarrow alone.
"""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np

from raypod.errors import ConfigError, DataMissing
from raypod.system.files import looked_in, parse_json
from raypod.training.data.arrays import fingerprint_of_bytes, fingerprint_of_values

PathLike = Union[str, "os.PathLike[str]"]
_INSTALL = "pip install 'raypod[hf]'"
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # of a folder that `save_to_disk` has written
# Names of the training and of the test split; the first one that exists.
SPLIT_NAMES = (("train",), ("test", "validation", "val"))
_HASHED_ROWS = 1024  # of a table, evenly spaced
_RELEASED_READS = 32  # of rows of a column, after which the pages of a mapped file leave the memory of the process
_BATCH_BYTES, _MOST_ROWS, _BUFFER_BYTES = 1 << 25, 1 << 16, 1 << 20  # of what is read of Parquet files at a time
_Reader = Callable[[int, int], np.ndarray]  # the rows from a first one to another one, exclusive


class Table:
    """A map-style data set of the rows of an Arrow table: dicts of NumPy arrays, by the names of the columns.

    Numbers are arrays of no dimension, lists of one, nested lists of several; lists of a column may differ in length.

    Args:
        name: of the table, for messages.
        table: the table.
        columns: that are used; None: all.
        on_read: called before a row of a column is read.

    Attributes:
        fingerprint: hash of up to 1,024 rows, by which instances compare their data.

    Raises:
        ConfigError: a column does not exist, has missing values, or holds no numbers.
    """

    def __init__(
        self,
        name: str,
        table: Any,
        columns: Optional[Sequence[str]] = None,
        on_read: Optional[Callable[[], object]] = None,
    ) -> None:
        known = list(table.column_names)
        _check_columns(name, known, columns)
        self._length = int(table.num_rows)
        self._columns = {column: _Column(name, column, table.column(column), on_read) for column in columns or known}
        if not self._columns:
            raise ConfigError(f"{name} has no columns")
        rows = range(0, self._length, -(-self._length // _HASHED_ROWS) or 1)
        contents = [fingerprint_of_bytes(*(column[row] for row in rows)) for column in self._columns.values()]
        self.fingerprint = fingerprint_of_values(self._length, *self._columns, *contents)

    draws_from_torch_only = True  # see `SeededSamples`: rows draw nothing

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Dict[str, np.ndarray]:
        """Return the row `index`."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        return {name: column[index] for name, column in self._columns.items()}


def _check_columns(name: str, known: Sequence[str], columns: Optional[Sequence[str]]) -> None:
    for column in columns or ():
        if column not in known:
            raise ConfigError(f"{name} has no column {column!r}; it has {', '.join(known)}")


class _Column:
    """The rows of a column, in its chunks."""

    def __init__(self, table: str, name: str, column: Any, on_read: Optional[Callable[[], object]]) -> None:
        self._on_read = on_read
        self._named = f"{table}: the column {name!r}"
        if column.null_count:
            raise ConfigError(f"{self._named} has {column.null_count} missing values: fill them, or omit the column")
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._ends = np.cumsum([len(chunk) for chunk in chunks])
        self._readers = [self._reader(chunk) for chunk in chunks]

    def __getitem__(self, row: int) -> np.ndarray:
        if self._on_read is not None:
            self._on_read()
        chunk = int(np.searchsorted(self._ends, row, side="right"))
        first = row - (int(self._ends[chunk - 1]) if chunk else 0)
        found: np.ndarray = self._readers[chunk](first, first + 1)[0]
        return np.array(found)  # a copy: files that are memory-mapped are read-only

    def _reader(self, array: Any) -> _Reader:
        """Return a function of the rows of an array of Arrow. ConfigError if it holds no numbers."""
        import pyarrow as pa
        from pyarrow import types

        if isinstance(array, pa.ExtensionArray):  # as tensors
            array = array.storage
        if array.null_count:
            raise ConfigError(f"{self._named} has missing values in its lists: fill them, or omit the column")
        kind = array.type
        if types.is_boolean(kind):  # a bit each
            return lambda first, end: array.slice(first, end - first).to_numpy(zero_copy_only=False)
        if types.is_integer(kind) or types.is_floating(kind):
            values = array.to_numpy(zero_copy_only=False)
            return lambda first, end: values[first:end]
        if types.is_fixed_size_list(kind):
            size, inner, offset = kind.list_size, self._reader(array.values), array.offset
            ends = (offset + np.arange(len(array) + 1)) * size
        elif types.is_list(kind) or types.is_large_list(kind):
            ends, inner = array.offsets.to_numpy(), self._reader(array.values)
        else:
            raise ConfigError(
                f"{self._named} holds {kind}, and samples are numbers: omit it with `columns`, or make numbers of it"
            )
        return lambda first, end: self._lists(inner, ends[first : end + 1])

    def _lists(self, inner: _Reader, ends: np.ndarray) -> np.ndarray:
        """Return lists that begin and end at positions of inner rows, as one array."""
        lengths = np.diff(ends)
        if not (lengths == lengths[0]).all():
            raise ConfigError(f"{self._named} has nested lists of different lengths: pad them")
        rows = inner(int(ends[0]), int(ends[-1]))
        return rows.reshape(len(lengths), int(lengths[0]), *rows.shape[1:])


def from_parquet(paths: Union[PathLike, Sequence[PathLike]], columns: Optional[Sequence[str]] = None) -> Table:
    """Return the rows of Parquet files as a map-style data set of dicts of NumPy arrays.

    The columns are in the memory of each process. `raypod pack` streams them, and a run on its shards reads only those.

    Args:
        paths: a file, a folder, a pattern as "data/train-*.parquet", or a list of them; the rows have the order of the
            files' names.
        columns: those that are used; None: all. They hold numbers, or lists of them.

    Raises:
        ConfigError: pyarrow is not installed, a file cannot be read, or a column cannot be used.
        DataMissing: there is no such file.
    """
    pa = _pyarrow("from_parquet")
    from pyarrow import parquet

    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    files = [file for each in given for file in _parquet_files(Path(each).expanduser())]
    tables = []
    for file in files:
        with _readable(file):
            tables.append(parquet.ParquetFile(str(file)).read(columns=None if columns is None else list(columns)))
    return Table(", ".join(map(str, given)), _joined(pa, files, tables), columns)


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # those of pyarrow are among them
        raise ConfigError(f"cannot read {file}: {' '.join(str(error).split())}") from None


class _MappedFiles:
    """Files that are mapped into memory, of which few pages stay in that of the process."""

    def __init__(self) -> None:
        self._mapped: List[mmap.mmap] = []
        self._reads = 0

    def add(self, file: Any) -> mmap.mmap:
        """Map an open file. ValueError if it is empty."""
        self._mapped.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return self._mapped[-1]

    def on_read(self) -> None:
        """Release all pages after some reads; they come back from the page cache, or the disk."""
        self._reads += 1
        if self._reads % _RELEASED_READS == 0:
            for each in self._mapped:
                each.madvise(mmap.MADV_DONTNEED)


def streamed_parquet(pattern: Path, columns: Optional[Sequence[str]], folder: Path) -> Table:
    """Return what `from_parquet` does, for tables that are larger than the memory.

    A batch of rows after the other is copied, uncompressed, into a file in `folder`. It has no name: it is gone with
    the process. ConfigError also if it cannot be written.
    """
    pa = _pyarrow("from_parquet")
    name = str(pattern)
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(dir=str(folder)))
            writer: Any = None
            for batch in _batches(pa, _parquet_files(pattern), columns):
                if writer is None:
                    Table(name, pa.Table.from_batches([batch]), columns)  # checked before the others are copied
                    writer = stack.enter_context(pa.ipc.new_file(file, batch.schema))
                writer.write_batch(batch)
            if writer is None:
                return from_parquet(pattern, columns)  # without rows
            writer.close()
            file.flush()
            pages = _MappedFiles()
            return Table(name, pa.ipc.open_file(pa.py_buffer(pages.add(file))).read_all(), columns, pages.on_read)
    except OSError as error:
        raise ConfigError(f"cannot copy the rows of {name} to {folder}: {error.strerror or error}") from None


def _batches(pa: Any, files: Sequence[Path], columns: Optional[Sequence[str]]) -> Iterator[Any]:
    from pyarrow import parquet

    first: Any = None
    for file in files:
        with _readable(file):
            source = parquet.ParquetFile(str(file), buffer_size=_BUFFER_BYTES, pre_buffer=False)
            if first is None:
                _check_columns(str(file), source.schema_arrow.names, columns)
            known = source.schema_arrow.names  # a chosen column may be missing in a further file
            fields = pa.schema([source.schema_arrow.field(name) for name in columns or known if name in known])
            first = first or fields
            if not fields.equals(first):
                raise ConfigError(f"{file} has other columns than {files[0]}")
            for group in range(source.num_row_groups):
                rows = _rows_of_batch(source.metadata.row_group(group))
                yield from source.iter_batches(rows, row_groups=[group], columns=fields.names, use_threads=False)


def _rows_of_batch(group: Any) -> int:
    return max(1, min(_MOST_ROWS, _BATCH_BYTES * int(group.num_rows) // max(1, int(group.total_byte_size))))


def _parquet_files(path: Path) -> List[Path]:
    # Not `Path.glob`, whose pattern must not be absolute.
    found = sorted(path.glob("*.parquet") if path.is_dir() else map(Path, glob.glob(str(path))))  # noqa: PTH207
    if not found:
        raise DataMissing(f"{path} is no Parquet file, and no folder of some{looked_in(path)}")
    return found


def _joined(pa: Any, files: Sequence[Path], tables: Sequence[Any]) -> Any:
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid:
        other = next(file for file, table in zip(files, tables) if not table.schema.equals(tables[0].schema))
        raise ConfigError(f"{other} has other columns than {files[0]}") from None


def from_hf(data: Any, columns: Optional[Sequence[str]] = None) -> Table:
    """Return a data set of Hugging Face as a map-style data set of dicts of NumPy arrays.

    Args:
        data: a `datasets.Dataset`, or the folder that its `save_to_disk` has written, which is memory-mapped and needs
            pyarrow alone.
        columns: as of `from_parquet`.

    Raises:
        ConfigError: pyarrow is not installed, a file cannot be read, or a column cannot be used.
        DataMissing: there is no such folder.
    """
    _pyarrow("from_hf")
    if not isinstance(data, (str, os.PathLike)):
        return Table("the data set", _arrow_of(data), columns)
    return _saved(Path(data).expanduser(), columns)


def _saved(folder: Path, columns: Optional[Sequence[str]], pages: Optional[_MappedFiles] = None) -> Table:
    """Return `from_hf` of a folder; with `pages`, few of its pages stay in the memory of the process."""
    pa = _pyarrow("from_hf")
    if not is_saved(folder):
        raise DataMissing(f"{folder} is no folder of save_to_disk: it has no {_STATE}{looked_in(folder)}")
    if not (folder / _STATE).is_file():
        splits = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))
        raise ConfigError(f"{folder} is a DatasetDict: name the folder of one of its splits, {splits}")
    try:
        files = [folder / each["filename"] for each in parse_json((folder / _STATE).read_text())["_data_files"]]
        with contextlib.ExitStack() as stack:
            opened = [
                pa.memory_map(str(file))
                if pages is None
                else pa.py_buffer(pages.add(stack.enter_context(file.open("rb"))))
                for file in files
            ]
        tables = [pa.ipc.open_stream(each).read_all() for each in opened]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {folder}: {' '.join(str(error).split())}; save it again") from None
    return Table(str(folder), _joined(pa, files, tables), columns, None if pages is None else pages.on_read)


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of Hugging Face has written a folder."""
    return any((folder / name).is_file() for name in (_STATE, _SPLITS))


def _arrow_of(data: Any) -> Any:
    from raypod.training.data.user_dataset import is_of_hf, way_to_use  # imports torch

    if not is_of_hf(data, "Dataset"):
        way = way_to_use(data) or f"a {type(data).__name__}"
        raise ConfigError(f"from_hf needs a datasets.Dataset, or the folder that save_to_disk has written, not {way}")
    return data.with_format("arrow")[:]


def from_ray_data(data: Any) -> Any:
    """Return a data set of Ray Data as `raypod.Arrays`, in memory; the rows keep the order of its blocks.

    Raises:
        ConfigError: it is none of Ray Data, is empty, or a column holds no numbers of one shape.
    """
    from raypod.training.data.samples import Arrays  # imports torch

    if not hasattr(data, "iter_batches"):
        raise ConfigError(f"from_ray_data needs a ray.data.Dataset, not a {type(data).__name__}")
    with _in_order(data):
        batches = list(data.iter_batches(batch_size=None, batch_format="numpy"))
    if not batches:
        raise ConfigError("from_ray_data: the data set is empty")
    return Arrays(**{name: _stacked(name, [batch[name] for batch in batches]) for name in batches[0]})


@contextlib.contextmanager
def _in_order(data: Any) -> Iterator[None]:
    """Let Ray Data keep the order of blocks, so that every instance gets the same samples."""
    module = sys.modules.get("ray.data")  # the data set exists, so it is imported
    contexts = [getattr(data, "context", None), module and module.DataContext.get_current()]
    options = [context.execution_options for context in contexts if context is not None]
    kept = [each.preserve_order for each in options]
    for each in options:
        each.preserve_order = True
    try:
        yield
    finally:
        for each, value in zip(options, kept):
            each.preserve_order = value


def _stacked(name: str, parts: Sequence[Any]) -> np.ndarray:
    try:
        rows = np.concatenate([np.stack(list(part)) if part.dtype == object else part for part in parts])
    except ValueError:
        raise ConfigError(
            f"from_ray_data: the rows of {name!r} differ in shape: pad them, or drop the column"
        ) from None
    if rows.dtype.kind not in "biufc":
        raise ConfigError(f"from_ray_data: the column {name!r} holds {rows.dtype}: drop it, or make numbers of it")
    return rows


def splits_in(folder: Path, columns: Optional[Sequence[str]], room: Path) -> Optional[Tuple[Table, Any]]:
    """Return the training and the test split of a folder of `save_to_disk` or of Parquet files; None for another one.

    The rows of Parquet files are copied to a file without a name in the folder `room`.

    A split of Hugging Face is a folder; one of Parquet files a folder, or files whose names begin with that of the
    split. The test split is `test`, or else `validation` or `val`; it may be missing.

    Raises:
        ConfigError: as `from_hf` and `from_parquet`.
    """
    if (folder / _STATE).is_file():
        return _saved(folder, columns, _MappedFiles()), []
    if (folder / _SPLITS).is_file():
        found = [next((folder / name for name in names if is_saved(folder / name)), None) for names in SPLIT_NAMES]
        if found[0] is None:
            raise ConfigError(f"{folder} has no split train: pack the folder of one of its splits")
        tables = [_saved(each, columns, _MappedFiles()) for each in found if each is not None]
        return tables[0], tables[1] if len(tables) > 1 else []
    train, test = (_parquet_pattern(folder, names) for names in SPLIT_NAMES)
    if train is None:
        return None
    return streamed_parquet(train, columns, room), [] if test is None else streamed_parquet(test, columns, room)


def _parquet_pattern(folder: Path, names: Sequence[str]) -> Optional[Path]:
    for name in names:
        for pattern in (f"{name}/*.parquet", f"{name}*.parquet"):
            if next(folder.glob(pattern), None) is not None:
                return Path(glob.escape(str(folder))) / pattern
    return None


def _pyarrow(function: str) -> Any:
    """Return pyarrow. ConfigError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise ConfigError(f"{function} needs the package pyarrow, which is not installed: {_INSTALL}") from None
    return pyarrow
