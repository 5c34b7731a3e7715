"""User code that ends its process or never returns, and data that cannot be read."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from raypod.errors import DataUnreadable
from raypod.plan.plan import Plan
from raypod.training.checkpoint import resume
from raypod.training.data.order import call_positions, epoch_order
from tests.support.faulty_runs import Outcome, assert_undisturbed, run
from tests.support.fragile_runs import fail, plan_of

# Ray's own code leaves sockets and files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")


def test_user_code_that_ends_its_process_or_never_returns(session: Any, folder: Path, undisturbed: Outcome) -> None:
    plan = plan_of(folder, "dies", stuck_after_s=3, report_timeout_s=30)
    faults = ["model-throws", "optimizer-dies", "model-loops"]
    outcome = run(plan, [(4 + 5 * number, fail(folder, failure)) for number, failure in enumerate(faults)])
    assert_undisturbed(plan, outcome, undisturbed)
    assert outcome.lost == [(1, kind) for kind in ("died", "died", "stuck")]
    threw, died, loops = outcome.losses
    assert threw.cause.startswith("its process died: ")
    assert threw.cause.endswith("(what(): the device is gone)")
    assert "what()" not in died.cause
    assert "s while its threads use CPU time)" in loops.cause
    assert {repair.seeded_from for repair in outcome.repairs} == {"instance 0"}


def test_data_that_cannot_be_read_costs_no_state(session: Any, folder: Path, undisturbed: Outcome) -> None:
    """An exception in all instances, then an outage of their disk that passes, then one that does not."""
    plan = plan_of(folder, "unreadable", checkpoint_every="60 updates", read_retry_s=60, max_restarts=1)
    outage = folder / "outage"
    order = epoch_order(plan.config.training.seed, 0, plan.dataset_size.train_samples)
    for instance in (0, 1):
        first_sample = order[call_positions(plan.geometry, instance, 16)][0]
        (folder / f"raises-at-{first_sample}").touch()

    def begin_an_outage(plan: Plan) -> None:
        outage.touch()
        threading.Timer(2.0, outage.unlink).start()

    outcome = run(plan, [(20, begin_an_outage)])
    assert_undisturbed(plan, outcome, undisturbed)
    assert sorted(outcome.lost) == [(0, "raised"), (1, "raised")]
    assert all("no such sample" in loss.cause for loss in outcome.losses)
    (repair,) = outcome.repairs
    assert Path(repair.seeded_from).name == f"update-{repair.update:08d}"
    assert repair.update == 16
    lasting = plan_of(folder, "lasting", checkpoint_every="60 updates", read_retry_s=0.5)
    with pytest.raises(DataUnreadable, match="cannot read samples for 0.5 s"):
        run(lasting, [(4, lambda plan: outage.touch())])
    outage.unlink()
    resumed = plan_of(folder, "lasting", resume=lasting.run_dir)
    assert resume.find_checkpoint(resumed).checkpoint.update >= 4
    assert run(resumed).sha256 == undisturbed.sha256
