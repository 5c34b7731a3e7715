"""The process that downloads shards, as a thread, and a working directory in which it is used."""

from __future__ import annotations

import json
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, Optional

import pytest

from raypod.training.data import shard_process, shard_stream
from raypod.training.data.shard_cache import ShardCache


class InThread:
    """The process that downloads, as a thread."""

    def __init__(self, url: str, cache: ShardCache) -> None:
        self._lines: queue.Queue[Optional[str]] = queue.Queue()
        self._answers: queue.Queue[Optional[Dict[str, Any]]] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, args=(url, cache), daemon=True)
        self._thread.start()

    def _serve(self, url: str, cache: ShardCache) -> None:
        cache.remove_abandoned()
        with ThreadPoolExecutor(4) as pool:
            shard_process.Downloader(url, cache, self._answers.put).follow(iter(self._lines.get, None), pool)

    def send(self, content: Dict[str, Any]) -> None:
        self._lines.put(json.dumps(content))

    def answers(self) -> Iterator[Dict[str, Any]]:
        return iter(self._answers.get, None)  # type: ignore[return-value]

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        self._lines.put(None)
        self._thread.join(60)
        self._answers.put(None)


def enter_folder(folder: Path, module: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a folder with a module that can be imported and a cache of its own; downloads run in threads."""
    (folder / f"{module}.py").write_text(code)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(shard_stream, "DownloadProcess", InThread)
