"""Extracts folders of a commit of a Git clone, bare or not."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from typing import List


class CloneError(Exception):
    """The folder is no clone, or the clone lacks what is asked for."""


def extract(git_dir: Path, paths: List[str], folder: Path, commit: str = "HEAD") -> None:
    """Writes the files under `paths` of the clone's `commit` to `folder`."""
    if not git_dir.is_dir():
        raise CloneError(f"{git_dir}: no such folder")
    command = ["git", "-C", str(git_dir), "-c", f"safe.directory={git_dir.resolve()}", "archive", commit, *paths]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        message = archive.stderr.decode(errors="replace").strip().splitlines()
        raise CloneError(f"{git_dir}: {message[-1] if message else 'git archive failed'}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder)
