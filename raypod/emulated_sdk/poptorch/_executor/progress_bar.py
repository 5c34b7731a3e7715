"""The progress bar of a compilation."""

from __future__ import annotations

from typing import Any, Optional

from tqdm import tqdm

_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"  # as the SDK's: percents have no rate


class ProgressBar:
    """Called with the progress so far and the total; draws on stderr."""

    def __init__(self) -> None:
        self._bar: Optional[Any] = None

    def __call__(self, progress: int, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, desc="Graph compilation", bar_format=_FORMAT)
        self._bar.update(progress - self._bar.n)
        if progress >= total:
            self._bar.close()
            self._bar = None
