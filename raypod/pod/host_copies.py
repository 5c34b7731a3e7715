"""Copies of runs on this host: list them, or make one the run folder that it was. `python3 host_copies.py VERB JSON`.

Runs over ssh on hosts without raypod: one file, Python 3.6, standard library. `runs/upload/copy_folder.py` writes
the copies. Prints one JSON object.

    list     the copies of all runs, and for the run folders of `run_dirs` ({folder: run id}) what they hold; those of
             `complete` are recorded if this host has nothing of them, and were recorded before if they are in `named`
    install  verify a copy, from the tar archive at standard input or in the folder `source`, and rename it to `run_dir`
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import IO, Any, Dict, List, Optional

FOLDER = "~/.raypod/copies"
_INDEX, _ENDED, _IDENTITY = "run.json", "ended", "copies.json"
_NAMED = "complete-elsewhere.json"  # beside the copies: runs that `raypod up` has named already
_FORMAT = 1
_NAME = re.compile(r"\d{6,}-\d{8,}$")
_PARTIAL = ".partial"
_CHUNK_BYTES = 1 << 20


class Damaged(Exception):
    """A copy that cannot be used: the message names the file."""


def copies(folder: Path) -> List[Dict[str, Any]]:
    """Return the copies of all runs: the path and the index of each, whether its run is complete, and a damage."""
    found = []
    for path in sorted(folder.glob("*/*")):
        if _NAME.match(path.name):
            try:
                index = _index(path)
                _check_sizes(path, index)
                is_complete = _text(path.parent / _ENDED) == path.name
                found.append({"path": str(path), "index": index, "is_complete": is_complete})
            except Damaged as error:
                found.append({"path": str(path), "damaged": str(error)})
    return found


def held(run_dir: Path, run_id: str) -> Dict[str, Any]:
    """Return what a run folder holds: `other` for something else than the run, and its newest checkpoint, if any."""
    if not run_dir.exists() or (run_dir.is_dir() and not any(run_dir.iterdir())):
        return {"other": False, "age": None}
    identity = _json(run_dir / _IDENTITY)
    if not isinstance(identity, dict) or identity.get("run_id") != run_id:
        return {"other": True, "age": None}
    ages = []
    for path in run_dir.glob("checkpoints/update-*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            text = (path / "manifest.json").read_bytes()
            manifest = json.loads(text.decode())
            is_intact = hashlib.sha256(text).hexdigest() in (path / "manifest.sha256").read_text()
            sizes = {name: record["size_bytes"] for name, record in manifest["files"].items()}
            if is_intact and all((path / name).stat().st_size == size for name, size in sizes.items()):
                ages.append([int(manifest["generation"]), int(manifest["update"])])
    return {"other": False, "age": max(ages) if ages else None}


def install(run_dir: Path, index: Dict[str, Any], source: Optional[str]) -> Dict[str, Any]:
    """Copy and verify the files of a copy, and rename their folder to `run_dir`; keep what is there under another name.

    Raises:
        Damaged: a file differs from its record.
        OSError: the folder cannot be written.
    """
    partial = run_dir.with_name(run_dir.name + _PARTIAL)
    shutil.rmtree(str(partial), ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with contextlib.ExitStack() as stack:
            stream = sys.stdin.buffer  # type: IO[bytes]
            if source is not None:
                tar = subprocess.Popen(["tar", "-C", source, "-cf", "-", "."], stdout=subprocess.PIPE)
                stack.enter_context(tar)
                assert tar.stdout is not None
                stream = tar.stdout
            _extract(stream, partial, index["files"])
    except BaseException:
        shutil.rmtree(str(partial), ignore_errors=True)
        raise
    moved = _make_room(run_dir)
    os.rename(str(partial), str(run_dir))  # noqa: PTH104 - as it is documented for Python 3.6
    _sync(run_dir.parent)
    return {"installed": str(run_dir), "moved": moved}


def _extract(stream: IO[bytes], partial: Path, records: Dict[str, Any]) -> None:
    """Write the files of an archive that have records, and verify them."""
    missing = dict(records)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name = os.path.normpath(member.name)
                record = missing.pop(name, None)
                if record is not None:  # everything else, as a name outside of the folder, is left out
                    content = archive.extractfile(member) if member.isfile() else None
                    _write(partial, name, content, record)
    except tarfile.TarError as error:
        raise Damaged(f"the archive ends early ({error})") from None
    if missing:
        raise Damaged(f"{sorted(missing)[0]} is missing")
    for folder in [*partial.rglob("*"), partial]:
        if folder.is_dir():
            _sync(folder)


def _write(partial: Path, name: str, content: Optional[IO[bytes]], record: Dict[str, Any]) -> None:
    if content is None:
        raise Damaged(f"{name} is no file")
    path, digest, size = partial / name, hashlib.sha256(), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        while True:
            data = content.read(_CHUNK_BYTES)
            if not data:
                break
            file.write(data)
            digest.update(data)
            size += len(data)
        file.flush()
        os.fsync(file.fileno())
    if size != record["size_bytes"]:
        raise Damaged("{} has {} bytes, expected {}".format(name, size, record["size_bytes"]))
    if digest.hexdigest() != record["sha256"]:
        raise Damaged(f"the SHA-256 of {name} does not match {_INDEX}")


def _make_room(run_dir: Path) -> Optional[str]:
    """Rename what has the name of the run folder; return its new name, None if there is nothing."""
    if not run_dir.exists():
        return None
    if run_dir.is_dir() and not any(run_dir.iterdir()):
        run_dir.rmdir()
        return None
    number = 1
    while run_dir.with_name(f"{run_dir.name}.before-{number}").exists():
        number += 1
    moved = run_dir.with_name(f"{run_dir.name}.before-{number}")
    os.rename(str(run_dir), str(moved))  # noqa: PTH104
    return str(moved)


def _index(path: Path) -> Dict[str, Any]:
    """Return the content of `run.json`. Damaged if it cannot be read."""
    index = _json(path / _INDEX)
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        raise Damaged(f"{_INDEX} cannot be read, or is of another format than {_FORMAT}")
    wanted: Dict[str, Any] = {
        "run_id": str,
        "run_dir": str,
        "checkpoint": str,
        "generation": int,
        "update": int,
        "files": dict,
    }
    for key, kind in [*wanted.items(), ("written_unix_s", (int, float))]:
        if not isinstance(index.get(key), kind):
            raise Damaged(f"{_INDEX} has no {key}")
    for name in index["files"]:
        if name != os.path.normpath(name) or Path(name).is_absolute() or name.startswith(".."):
            raise Damaged(f"{_INDEX} names a file outside of the copy: {name}")
    return index


def _check_sizes(path: Path, index: Dict[str, Any]) -> None:
    for name, record in sorted(index["files"].items()):
        try:
            size = (path / name).stat().st_size
        except OSError:
            raise Damaged(f"{name} is missing") from None
        if size != record["size_bytes"]:
            raise Damaged("{} has {} bytes, expected {}".format(name, size, record["size_bytes"]))


def _remember(path: Path, run_ids: List[str]) -> List[str]:
    """Add runs to a list in a file; return those that it had before."""
    known = _json(path)
    known = [each for each in known if isinstance(each, str)] if isinstance(known, list) else []
    new = sorted(set(run_ids) - set(known))
    if new:
        with contextlib.suppress(OSError):  # a full disk: they are named again the next time
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([*known, *new]))
    return known


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _sync(folder: Path) -> None:
    descriptor = os.open(str(folder), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(verb: str, settings: Dict[str, Any]) -> Dict[str, Any]:
    """Return the answer to a verb. An answer with `damaged` or `error` changed nothing."""
    if verb == "list":
        folder = Path(settings.get("folder", FOLDER)).expanduser()
        run_dirs = settings.get("run_dirs", {})
        runs = {run_dir: held(Path(run_dir), run_id) for run_dir, run_id in run_dirs.items()}
        elsewhere = [run_dirs[each] for each in settings.get("complete", []) if runs[each]["age"] is None]
        named = _remember(folder.parent / _NAMED, elsewhere)
        return {"copies": copies(folder), "runs": runs, "named": named}
    try:
        return install(Path(settings["run_dir"]), settings["index"], settings.get("source"))
    except Damaged as error:
        return {"installed": None, "damaged": str(error)}
    except OSError as error:
        return {"installed": None, "error": "{}: {}".format(error.filename or settings["run_dir"], error.strerror)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))  # noqa: T201 - the result
