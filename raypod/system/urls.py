"""URLs of remote storage: what is one, and the rule that it holds no credentials. Does not import fsspec."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional, Sequence
from urllib.parse import urlsplit

from raypod.errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(://|::)")
_CHECKPOINT = re.compile(r"(?P<run>.+)/checkpoints/(?P<name>update-\d+)$")
# A user in the URLs of these is the identifier of a key; in those of others, as sftp and abfs, it belongs there.
_KEYS_ONLY = ("s3", "s3a", "gs", "gcs")
_PLACES = (
    "a URL holds no credentials: the storage library reads them from its own places, as environment variables, "
    "~/.aws/credentials, application default credentials, or ~/.ssh"
)


class RunUrl(NamedTuple):
    """The URL of a run on a remote storage, and the name of the checkpoint if it was that of one."""

    run: str
    checkpoint: Optional[str] = None

    @property
    def name(self) -> str:
        return self.run.rpartition("/")[2]


def is_url(text: str) -> bool:
    """Return whether a path is a URL."""
    return _SCHEME.match(text) is not None


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lower case."""
    found = _SCHEME.match(url)
    return found.group(1).lower() if found else ""


def check_url(url: str, setting: str) -> str:
    """Return a URL without trailing slashes. ConfigError if it is none, or holds credentials; they are not shown.

    `setting` begins the message, as in --storage-path.
    """
    if not is_url(url):
        folder = f", or file://{url} for a folder" if url.startswith("/") else ""
        raise ConfigError(f"{setting} {url}: write a URL, as in s3://bucket/prefix{folder}")
    _check_credentials(url, setting)
    if "::" in url:
        raise ConfigError(f"{setting} {url}: chained URLs are not supported")
    rest = url.partition("://")[2].rstrip("/")
    if not rest or (scheme_of(url) == "file" and not rest.startswith("/")):
        hint = "file:///mnt/store" if scheme_of(url) == "file" else f"{scheme_of(url)}://bucket/prefix"
        raise ConfigError(f"{setting} {url}: the URL names no folder; write it as in {hint}")
    return url.rstrip("/")


def check_local(place: str, command: str) -> None:
    """Raise ConfigError if the folder that a command reads is a URL."""
    if is_url(place):
        _check_credentials(place, command)
        raise ConfigError(
            f"{command} {place}: the command reads a folder of this host, not a URL; `raypod report URL` shows a "
            "stored run"
        )


def check_words(words: Sequence[str]) -> None:
    """Raise ConfigError if a word of a command line is a URL with credentials, before another message shows it."""
    before = ""
    for word in words:
        flag, equals, value = word.partition("=")
        if is_url(word):
            _check_credentials(word, before if before.startswith("-") else "the command line:")
        elif equals and is_url(value):
            _check_credentials(value, flag)
        before = word


def _check_credentials(url: str, setting: str) -> None:
    shown = f"{scheme_of(url)}://..."
    for part in url.split("::"):
        try:
            parts = urlsplit(part)
            has_secret = parts.password is not None or (parts.username is not None and scheme_of(part) in _KEYS_ONLY)
            _ = parts.port
        except ValueError as error:
            raise ConfigError(f"{setting} {shown}: {str(error).partition(':')[0]}") from None
        if has_secret or "?" in part:
            raise ConfigError(f"{setting} {shown}: {_PLACES}")


def run_url(url: str) -> RunUrl:
    """Return the run that a URL without trailing slashes names, itself or by one of its checkpoints."""
    found = _CHECKPOINT.match(url)
    return RunUrl(found.group("run"), found.group("name")) if found else RunUrl(url)
