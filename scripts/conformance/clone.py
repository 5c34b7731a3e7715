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
    """Writes the folders `paths` of the clone's `commit` to `folder`."""
    if not git_dir.is_dir():
        raise CloneError(f"{git_dir}: no such folder")
    git = ["git", "-C", str(git_dir), "-c", f"safe.directory={git_dir.resolve()}", "archive"]
    for path in paths:  # by the tree of each folder, as `git archive COMMIT PATH` needs the files outside of it, too
        archive = subprocess.run([*git, f"--prefix={path}/", f"{commit}:{path}"], capture_output=True, check=False)
        if archive.returncode:
            message = archive.stderr.decode(errors="replace").strip().splitlines()
            raise CloneError(f"{git_dir}: {message[-1] if message else 'git archive failed'}")
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder)
