"""A tracker that appends what it gets to the file FAKE_TRACKER, as lines of JSON.

While the file FAKE_TRACKER_AWAY exists, it fails with the secret FAKE_API_KEY; with FAKE_TRACKER_HANGS it hangs.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from raypod.observe.trackers.tracker import Point, RunFacts, Steps


class Fake:
    """See `raypod.observe.trackers.tracker.Tracker`."""

    def write(self, **content: Any) -> None:
        with Path(os.environ["FAKE_TRACKER"]).open("a") as file:
            file.write(json.dumps(content) + "\n")

    def open(self, facts: RunFacts, run_id: Optional[str]) -> str:
        self.write(opened=run_id, parameters=facts.parameters)
        return run_id or "first"

    def recorded(self) -> Optional[Steps]:
        return None

    def log(self, points: List[Point]) -> None:
        if "FAKE_TRACKER_HANGS" in os.environ:
            time.sleep(600)
        if os.path.exists(os.environ.get("FAKE_TRACKER_AWAY", "")):  # noqa: PTH110 - "" is no path
            print("request with", os.environ["FAKE_API_KEY"], flush=True)
            raise RuntimeError(f"the server is away from {os.environ['FAKE_API_KEY']}")
        for point in points:
            self.write(step=point.step, values=point.values)

    def add_artifact(self, path: Path, name: str) -> None:
        self.write(artifact=name, exists=path.exists())

    def close(self, end: str, facts: Dict[str, str]) -> None:
        self.write(closed=end, facts=facts)


class WithMedia(Fake):
    """Records pictures and texts, too."""

    def write(self, **content: Any) -> None:
        super().write(of="WithMedia", **content)

    def log_image(self, name: str, path: Path, step: int) -> None:
        self.write(media=name, step=step, size=path.stat().st_size)

    def log_text(self, name: str, text: str, step: int) -> None:
        self.write(media=name, step=step, text=text)
