"""Write the files of exported and averaged weights: complete or absent."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Iterator, Mapping

import torch

from raypod.checkpoint import tensors
from raypod.errors import ConfigError
from raypod.host.files import new_file, sync_file, sync_folder


@contextlib.contextmanager
def completed(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which gets the name `path` at the end of the context; an exception removes it.

    It can become a file, or a folder of files.

    Raises:
        ConfigError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        for each in sorted(partial.iterdir()) if partial.is_dir() else [partial]:
            sync_file(each)
        if partial.is_dir():
            sync_folder(partial)
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(str(partial), ignore_errors=True)  # which leaves a file
        with contextlib.suppress(OSError):
            partial.unlink()


def write_safetensors(path: Path, weights: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, which must not exist, as other programs read it. OSError if that fails."""
    with new_file(path) as file:
        tensors.write_tensors(file, weights, {"format": "pt", **metadata})
