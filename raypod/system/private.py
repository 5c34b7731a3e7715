"""Folders and files in a place where others can write, as /tmp: they count only if they belong to this user alone.

Who creates `/tmp/ray-root` before root does can replace the files and sockets in it, or link them to files of root.
`python3 private.py [--check] FOLDER...` creates the folders (not with --check) and exits with 1 if one must not be
used: the start commands of the cluster files run it on hosts that may lack raypod. It needs only Python 3.6.
"""

import contextlib
import os
import stat
import sys
from typing import Optional, Sequence

ROOT = 0


def make_private(path: str) -> str:
    """Create a folder, mode 0700, unless it exists. Return why it must not be used; "" if only this user can."""
    try:
        with contextlib.suppress(FileExistsError):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)  # noqa: PTH100, PTH103, PTH120
            os.mkdir(path, 0o700)  # noqa: PTH102
    except OSError as error:
        return f"{path}: {error.strerror}"
    return why_not_private(path, os.getuid())


def why_not_private(path: str, owner: int) -> str:
    """Return why a user (uid) must not use a folder, for a message; "" if only this user can, or if it is missing."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        kind = "symbolic link" if stat.S_ISLNK(found.st_mode) else "file"
        return f"{path} is a {kind} of uid {found.st_uid}, not a folder: remove it"
    if found.st_uid != owner:
        return f"{path} belongs to uid {found.st_uid}, not to {owner}: remove it"
    if mode & 0o077:
        return f"{path} is open to other users (mode {mode:04o}): check what is in it, then chmod 700 it, or remove it"
    return _why_replaceable(path, owner)


def _why_replaceable(path: str, owner: int) -> str:
    """Return which folder above lets others rename this one, and put another one in its place; "" if none does."""
    for start in (os.path.realpath(path), os.path.abspath(path)):  # noqa: PTH100 - for Python 3.6
        above = os.path.dirname(start)  # noqa: PTH120
        while True:
            found = os.lstat(above)
            if found.st_uid not in (ROOT, owner):
                return f"{path} is in {above}, which belongs to uid {found.st_uid}: use another folder"
            if not stat.S_ISLNK(found.st_mode) and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
                return f"{path} is in {above}, where every user can rename it: chmod +t {above}, or use another folder"
            if above == os.path.dirname(above):  # noqa: PTH120
                break
            above = os.path.dirname(above)  # noqa: PTH120
    return ""


def why_not_own(path: str) -> str:
    """Return why this user must not write into a folder, which others can read; "" if it may, or if it is missing.

    Another user who can write there can link the names of its files to files of this user.
    """
    try:
        for found in (os.lstat(path), os.stat(path)):  # noqa: PTH116 - for Python 3.6
            if found.st_uid not in (ROOT, os.getuid()):
                return f"{path} belongs to uid {found.st_uid}, not to {os.getuid()}"
    except OSError:
        return ""
    return f"every user can write into {path}" if found.st_mode & stat.S_IWOTH else ""


def read_file_of(path: str, owners: Sequence[int], most_bytes: int) -> Optional[bytes]:
    """Return the beginning of a regular file that one of these users (uids) owns, and that no other can write.

    None for anything else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in owners or found.st_mode & 0o022:
                return None
            return file.read(most_bytes)
    except OSError:
        return None


def main(words: Sequence[str]) -> int:
    """Check the folders, and create those that are missing."""
    is_check = words[:1] == ["--check"]
    folders = words[is_check:]
    found = [why_not_private(each, os.getuid()) if is_check else make_private(each) for each in folders]
    problems = [problem for problem in found if problem]
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
