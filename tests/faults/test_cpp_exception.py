"""An instance that ends by an uncaught C++ exception: its message is in the one-line cause."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import plan_for, run, send

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_the_cause_contains_the_message_of_the_exception_that_ended_the_process(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(str(Path(__file__).parent / "throwing.py"), str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    plan = plan_for(
        tmp_path, training={"model": "throwing:model", "warmup_updates": 1, "updates": 24}, pod={"num_instances": 2}
    )
    outcome = run(plan, [(4, lambda plan: Path("throw").touch()), (14, send(signal.SIGKILL, 1))])
    threw, killed = outcome.losses
    assert (threw.instance, threw.kind) == (killed.instance, killed.kind) == (1, "died")
    assert threw.cause.startswith("its process died: ")
    assert threw.cause.endswith("(what(): the device is gone)")
    assert "what()" not in killed.cause
