"""The predictions for the samples of a test split: their order, and the files that hold them."""

from __future__ import annotations

import csv
import importlib
import io
from pathlib import Path
from typing import Dict, Iterator, Mapping, Sequence, Tuple

import numpy as np

from raypod.errors import ConfigError
from raypod.plan.metric import SAMPLE
from raypod.system.files import replace_file

PARQUET = ".parquet"


def in_sample_order(parts: Sequence[Mapping[str, np.ndarray]]) -> Dict[str, np.ndarray]:
    """Return the predictions of all instances, in the order of the samples: the same for every placement."""
    full = [part for part in parts if len(part[SAMPLE])]
    order = np.argsort(np.concatenate([part[SAMPLE] for part in full]), kind="stable")
    return {name: np.concatenate([part[name] for part in full])[order] for name in full[0]}


def check_format(path: Path) -> None:
    """Raise ConfigError if a file of predictions needs a package that is not installed."""
    if path.suffix == PARQUET:
        try:
            importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise ConfigError(
                f"--predictions {path} needs pyarrow, which is not installed: pip install pyarrow, or name a .csv file"
            ) from None


def write(path: Path, predictions: Mapping[str, np.ndarray]) -> None:
    """Write a row per sample: Parquet if the file is named so, else CSV. OSError as from the disk."""
    columns = dict(_columns(predictions))
    if path.suffix == PARQUET:
        buffer, table = io.BytesIO(), importlib.import_module("pyarrow").table(columns)
        importlib.import_module("pyarrow.parquet").write_table(table, buffer)
        replace_file(path, buffer.getvalue())
        return
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    rows.writerows(zip(*(column.tolist() for column in columns.values())))
    replace_file(path, text.getvalue().encode())


def _columns(predictions: Mapping[str, np.ndarray]) -> Iterator[Tuple[str, np.ndarray]]:
    """Yield a column per number of a sample: `sample`, `label`, `classes_0`, `classes_1`, ...; arrays are flattened."""
    for name, array in predictions.items():
        flat = array.reshape(len(array), -1)
        if array.ndim == 1:
            yield name, array
        else:
            yield from ((f"{name}_{number}", flat[:, number]) for number in range(flat.shape[1]))
