"""The storage of `chaos.py --storage`: an S3 server that is killed and started again, and what it has in the end."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
import threading
from pathlib import Path
from typing import Iterator, List

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from raypod.plan.layout import EVALUATIONS, METRICS  # noqa: E402
from raypod.system.process import environment_variables  # noqa: E402
from raypod.training.checkpoint.storage import checkpoints_folder, list_checkpoints  # noqa: E402
from tests.support.storage_servers import (  # noqa: E402 - the checkout's own
    BUCKET,
    KEY_ID,
    SECRET,
    create_bucket,
    s3_server,
)

URL = f"s3://{BUCKET}/chaos"
_MIRRORED = ("config.yaml", METRICS, EVALUATIONS, "ledger.jsonl")
_UP_S, _DOWN_S = (6.0, 20.0), (2.0, 10.0)


class KilledServer:
    """An S3 server (moto's), which forgets everything when it is killed, at random times until `settle`."""

    def __init__(self, seed: int) -> None:
        self.kills = 0
        self._server, self._random, self._is_settled = s3_server(), random.Random(seed), threading.Event()
        self._thread = threading.Thread(target=self._run, name="faults of the storage", daemon=True)

    def settle(self) -> None:
        """Let the server run from now on."""
        self._is_settled.set()
        self._thread.join()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the server, with its credentials in the environment."""
        port = self._server.port
        keys = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
        with environment_variables({"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", **keys}):
            self._start()
            self._thread.start()
            try:
                yield
            finally:
                self.settle()
                self._server.kill()

    def differences(self, run_dir: Path) -> List[str]:
        """Return what the storage lacks of a run: its newest checkpoint, or the content of a file."""
        import fsspec

        newest = list_checkpoints(checkpoints_folder(run_dir))[0][0].path
        files = [*(run_dir / name for name in _MIRRORED), *sorted(newest.iterdir())]
        store, wrong = fsspec.filesystem("s3"), []
        for file in files:
            name = f"{BUCKET}/chaos/{run_dir.name}/{file.relative_to(run_dir)}"
            if not store.exists(name):
                wrong.append(f"the storage has no {file.relative_to(run_dir)}")
            elif store.cat_file(name) != file.read_bytes():
                wrong.append(f"the storage has another {file.relative_to(run_dir)}")
        return wrong

    def _run(self) -> None:
        while not self._is_settled.wait(self._random.uniform(*_UP_S)):
            self._server.kill()
            self.kills += 1
            print("  the storage server is killed", flush=True)
            self._is_settled.wait(self._random.uniform(*_DOWN_S))
            self._start()

    def _start(self) -> None:
        self._server.start()
        create_bucket(self._server.port)


def missing_packages() -> List[str]:
    """Return the packages that the server and its clients need and that are not installed."""
    return [name for name in ("moto", "s3fs", "boto3") if importlib.util.find_spec(name) is None]
