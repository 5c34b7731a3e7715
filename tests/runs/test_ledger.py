"""The ledger, and the proof of verify-data from it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Callable, List

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypod.__main__ import main
from raypod.events import CallDone
from raypod.plan import layout
from raypod.plan.plan import Geometry, Plan
from raypod.runs import ledger
from raypod.runs.ledger import CallRecord, GenerationStarted, Ledger, Line
from raypod.runs.verify_data import Order, check_ledger
from raypod.system.command_line import counted
from raypod.training.data.order import call_positions, epoch_order, samples_digest

SEED = 5


def generation_lines(
    order: Order, generation: int, instances: int, first_update: int, end_update: int, fewer: int = 1
) -> List[Line]:
    """The lines of one generation without faults, with the replicas divided by `fewer`."""
    planned = order.geometry
    sizes = (planned.total_replicas // fewer, planned.gradient_accumulation * fewer) if fewer > 1 else ()
    started = GenerationStarted(generation, first_update, instances, *sizes)
    geometry = started.geometry(planned)
    per_epoch = geometry.updates_per_epoch(order.train_samples)
    lines: List[Line] = [started]
    for update in range(first_update, end_update, geometry.device_iterations):
        epoch, in_epoch = divmod(update, per_epoch)
        samples = epoch_order(order.seed, epoch, order.train_samples)
        call = in_epoch // geometry.device_iterations
        of = (samples[call_positions(geometry, instance, call)] for instance in range(instances))
        position = in_epoch * geometry.global_batch_size
        digests = dict(enumerate(map(samples_digest, of)))
        lines.append(CallRecord(generation, update, epoch, position, geometry.samples_per_call, digests))
    return lines


def order_with(**sizes: int) -> Order:
    values = {"micro_batch_size": 2, "gradient_accumulation": 1, "device_iterations": 1, "total_replicas": 4}
    train_samples = sizes.pop("train_samples", 50)
    return Order(Geometry(**{**values, "num_instances": 1, "ipus_per_replica": 1, **sizes}), SEED, train_samples)


@given(
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    iterations=st.integers(1, 3),
    replicas=st.sampled_from([1, 2, 4, 6, 8]),
    spare=st.integers(0, 40),
    generations=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=4),
)
@settings(max_examples=80, deadline=None)
def test_any_chain_of_resumes_on_any_topology_is_proved(
    micro: int, accumulation: int, iterations: int, replicas: int, spare: int, generations: List[Any]
) -> None:
    sizes = {"micro_batch_size": micro, "gradient_accumulation": accumulation, "device_iterations": iterations}
    per_call = micro * accumulation * iterations * replicas
    order = order_with(**sizes, total_replicas=replicas, train_samples=2 * per_call + spare)
    divisors = [n for n in (1, 2, 3, 4, 6, 8) if replicas % n == 0]
    lines: List[Line] = []
    done = 0
    for generation, (back, forward, which) in enumerate(generations, start=1):
        first = max(0, done - back * iterations)
        done = first + forward * iterations
        lines += generation_lines(order, generation, divisors[which % len(divisors)], first, done)
    verdict = check_ledger(order, lines, [])
    assert verdict.is_proved, verdict.lines
    assert f"proved: {counted(done, 'update')}, " in verdict.lines[-1]


ORDER = order_with(num_instances=2)
WHOLE = generation_lines(ORDER, 1, 2, 0, 14)  # 6 updates an epoch


def changed(place: int, **values: Any) -> List[Line]:
    lines = list(WHOLE)
    lines[place] = dataclasses.replace(lines[place], **values)
    return lines


FAULTS = {
    "updates 4 to 4 are not in the ledger": WHOLE[:4] + WHOLE[5:],
    "update 4 is recorded twice": WHOLE[:5] + WHOLE[4:],
    "update 3: instance 1 gathered samples that differ": changed(3, digests={0: WHOLE[3].digests[0], 1: "00"}),
    "update 3: instance 1 reported no digest": changed(3, digests={0: WHOLE[3].digests[0]}),
    r"\(epoch, position, count\) \(0, 99, 8\), not \(0, 16, 8\)": changed(3, position=99),
    "the ledger has no calls": WHOLE[:1],
}


@pytest.mark.parametrize("message", list(FAULTS))
def test_a_fault_is_reported_with_its_place(message: str) -> None:
    verdict = check_ledger(ORDER, FAULTS[message], [])
    assert not verdict.is_proved
    assert re.search(message, "\n".join(verdict.lines))


def test_each_epoch_is_reported_with_its_left_out_samples_and_superseded_calls_do_not_count() -> None:
    seen = [f"epoch {epoch}: {n} of 48 samples seen exactly once" for epoch, n in ((1, 48), (2, 48), (3, 16))]
    proved = "proved: 14 updates, every sample at most once in each epoch and exactly once in each whole one"
    lines = check_ledger(ORDER, WHOLE, []).lines
    assert lines == (*(f"{line}; 2 left out, less than a call" for line in seen), proved)
    resumed = WHOLE + generation_lines(ORDER, 2, 4, 10, 20)
    verdict = check_ledger(ORDER, resumed, [])
    assert verdict.lines[0] == "generation 2 began after update 10: 4 superseded"
    assert verdict.is_proved
    del resumed[-11]  # without the line of the second generation, updates are duplicated
    assert not check_ledger(ORDER, resumed, []).is_proved


def test_a_generation_with_fewer_replicas_is_proved_and_one_with_another_global_batch_is_not() -> None:
    lines = [*generation_lines(ORDER, 1, 2, 0, 7), *generation_lines(ORDER, 2, 1, 6, 12, fewer=2)]
    lines += generation_lines(ORDER, 3, 2, 12, 18)
    verdict = check_ledger(ORDER, lines, [])
    assert verdict.is_proved, verdict.lines
    assert verdict.lines[:2] == (
        "generation 2 began after update 6: 1 superseded; 2 replicas x accumulation 2",
        "generation 3 began after update 12: 0 superseded; 4 replicas x accumulation 1",
    )
    lines[8] = dataclasses.replace(lines[8], replicas=None)
    assert not check_ledger(ORDER, lines, []).is_proved
    started = GenerationStarted(1, 0, 2, replicas=2, gradient_accumulation=1)
    verdict = check_ledger(ORDER, [started, *WHOLE[1:]], [])
    assert not verdict.is_proved
    assert "update 1 is of generation 1, whose updates have 4 samples, not 8" in verdict.lines[0]


def test_a_truncated_line_does_not_affect_the_others(make: Callable[..., Plan], tmp_path: Path) -> None:
    plan = make()
    for generation in (1, 2):
        file = Ledger(plan)
        file.begin(generation, generation - 1)
        file.write(CallDone(generation - 1, ((0, "aa"), (1, "bb"))))
        file.sync()
        file.close()
        path = Path(plan.run_dir) / layout.LEDGER
        path.write_bytes(path.read_bytes() + b'{"generation": 2, "upd')
    lines, unreadable = ledger.read(path)
    assert lines == [
        GenerationStarted(1, 0, 2, 4, 1),
        CallRecord(1, 0, 0, 0, 32, {0: "aa", 1: "bb"}),
        GenerationStarted(2, 1, 2, 4, 1),
        CallRecord(2, 1, 0, 32, 32, {0: "aa", 1: "bb"}),
    ]
    assert (unreadable, ledger.last_generation(plan.run_dir)) == ([3, 6], 2)


def test_a_folder_without_a_ledger_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(["verify-data", str(tmp_path)]), main(["verify-data", str(tmp_path / "nowhere")])) == (2, 2)
    assert main(["verify-data"]) == 2
    (tmp_path / layout.LEDGER).write_text(json.dumps({"generation": 1}))
    assert main(["verify-data", str(tmp_path)]) == 2
    (tmp_path / "plan.json").touch()
    capsys.readouterr()
    assert main(["verify-data", str(tmp_path)]) == 2
    assert f"{tmp_path}/plan.json, from which the order of the samples follows, is damaged: " in capsys.readouterr().err
