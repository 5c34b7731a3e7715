"""The process that downloads shards for one instance: `python -m raypod.training.data.shard_process URL FOLDER BYTES`.

It is a process, not a thread: the storage libraries take the interpreter's lock and can hang, and an SDK that holds the
lock during its calls would stop them. It reads lines of JSON from its standard input, and ends with it:

    {"want": {"file": ..., "bytes": ..., "xxh3_128": ...}}    download a shard, after those wanted before, and keep it
    {"release": CHECKSUM}                                     it is not needed any more

and answers each `want`:

    {"done": CHECKSUM}
    {"failed": CHECKSUM, "cause": ..., "is_final": ...}       is_final: another attempt will not help
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Set

from raypod.errors import ConfigError
from raypod.system.files import parse_json
from raypod.system.remote.backends import OBJECT_STORES, check_scheme
from raypod.system.remote.errors import describe
from raypod.system.remote.store import Store
from raypod.system.urls import scheme_of
from raypod.training.data.shard_cache import DamagedShard, ShardCache
from raypod.training.data.shards import Shard

_AT_A_TIME = 4  # downloads


class Downloader:
    """Downloads the shards that are wanted; `answer` is called in threads."""

    def __init__(self, url: str, cache: ShardCache, answer: Callable[[Dict[str, Any]], object]) -> None:
        self._url, self._cache, self._answer = url, cache, answer
        self._wanted: Set[str] = set()
        self._shared = Store(url) if scheme_of(url) in OBJECT_STORES else None  # their libraries permit it
        self._of_thread = threading.local()

    def download(self, shard: Shard) -> None:
        """Download a shard that is still wanted, and answer."""
        if shard.xxh3_128 not in self._wanted:
            return
        try:
            self._cache.fetch(self._store(), shard, self._wanted)
        except Exception as error:  # noqa: BLE001 - storage libraries raise many exception types
            self._store().disconnect()
            is_final = isinstance(error, (DamagedShard, FileNotFoundError, PermissionError))
            cause = str(error) if isinstance(error, (DamagedShard, ConfigError)) else describe(error)
            self._answer({"failed": shard.xxh3_128, "cause": cause, "is_final": is_final})
        else:
            self._answer({"done": shard.xxh3_128})

    def follow(self, lines: Iterable[str], pool: ThreadPoolExecutor) -> None:
        """Obey lines until they end."""
        for line in lines:
            content = parse_json(line)
            if "want" in content:
                shard = Shard(**content["want"])
                self._wanted.add(shard.xxh3_128)
                pool.submit(self.download, shard)
            else:
                self._wanted.discard(content["release"])

    def _store(self) -> Store:
        if self._shared is not None:
            return self._shared
        if not hasattr(self._of_thread, "store"):
            self._of_thread.store = Store(self._url)
        store: Store = self._of_thread.store
        return store


def main() -> None:
    """Serve the process that has started this one."""
    url, folder, limit = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its instance
    cache, lock = ShardCache(Path(folder), int(limit)), threading.Lock()
    cache.remove_abandoned()
    check_scheme(url, "--data-dir", writes=False)  # imports the library, before a shard is wanted

    def answer(content: Dict[str, Any]) -> None:
        with lock:
            sys.stdout.write(json.dumps(content) + "\n")
            sys.stdout.flush()

    Downloader(url, cache, answer).follow(sys.stdin, ThreadPoolExecutor(_AT_A_TIME))
    os._exit(0)  # what is half downloaded is not needed any more


if __name__ == "__main__":
    main()
