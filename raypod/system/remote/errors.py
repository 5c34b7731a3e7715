"""Errors of a remote storage in one line, without credentials."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any, Dict, Iterator

from raypod.errors import summarize_exception
from raypod.system.redaction import Redaction

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|PASSPHRASE", re.IGNORECASE)
_MAX_TEXT = 400  # characters of an error


class StorageError(OSError):
    """Raised if the storage does not hold what was written, or if another run has the place."""


def describe(error: BaseException) -> str:
    """Return an error in one line without credentials."""
    text = summarize_exception(error)
    if isinstance(error, StorageError):
        text = " ".join(str(error).split())
    elif not str(error):
        text = type(error).__name__
    text = secrets().clean(text)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def secrets() -> Redaction:
    """Return what removes the credentials that the backends read: environment variables and their files."""
    return Redaction({**os.environ, **_of_files()})


def _of_files() -> Dict[str, str]:
    """Return the secrets of the files of credentials, by names that `Redaction` recognizes."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises without a home folder
    found: Dict[str, str] = {}
    aws = [os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials"]
    aws.append(os.environ.get("AWS_CONFIG_FILE") or home / ".aws" / "config")
    for name in aws:
        parser = configparser.RawConfigParser()
        with contextlib.suppress(OSError, configparser.Error, UnicodeDecodeError):
            parser.read_string(Path(name).read_text())
        for section in parser.sections():
            found.update(_named(dict(parser[section]), len(found)))
    google = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    own = Path(os.environ.get("FSSPEC_CONFIG_DIR") or home / ".config" / "fsspec")
    for path in [*([Path(google)] if google else []), *(sorted(own.glob("*.json")) if own.is_dir() else [])]:
        with contextlib.suppress(OSError, ValueError):
            found.update(_named(dict(_flat("", json.loads(path.read_text()))), len(found)))
    return found


def _named(entries: Dict[str, Any], offset: int) -> Dict[str, str]:
    values = [str(value) for name, value in entries.items() if _SECRET.search(name)]
    return {f"SECRET_{offset + number}": value for number, value in enumerate(values)}


def _flat(name: str, content: Any) -> Iterator[Any]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _flat(str(key), value)
    else:
        yield name, content
