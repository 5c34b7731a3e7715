"""The warnings of a training that diverges."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List

import pytest

from raypod.events import CallReport, EvaluationReport, InstanceWarned, UpdateDone
from raypod.plan.plan import Plan
from raypod.runs.event_text import text_of
from raypod.runtime.workers.scripted import ScriptedFleet
from tests.support.scripted_runs import events_of, of

WAY_ON = "`raypod lr-range` with the same flags suggests a learning rate"


class WithLosses(ScriptedFleet):
    """A fleet whose loss is a function of the update, and of the test split a number."""

    def __init__(self, plan: Plan, loss: Callable[[int], float], test_loss: float = 1.0) -> None:
        super().__init__(plan)
        self._loss, self._test_loss = loss, test_loss

    def call(self, method: str, *arguments: Any) -> List[Any]:
        if method != "evaluate":
            return super().call(method, *arguments)
        sums = (((self._test_loss,), (1.0,)), ((1.0,), (1.0,)))
        return [EvaluationReport(index, 1, (*sums[0], *sums[1])) for index in self._instances]

    def _report(self, instance: int, update: int) -> CallReport:
        of_replica = (self._loss(update + 1), 1.0, 1.0, 1.0)
        return CallReport(instance, update, ((of_replica,) * self._plan.geometry.local_replicas,))


def warned(make: Callable[..., Plan], loss: Callable[[int], float], test_loss: float = 1.0, **sections: Any) -> Any:
    """Return the updates and the warnings of a run of 40 updates, in their order."""
    sections["training"] = {
        "updates": 40,
        "lr_schedule": "constant",
        "warmup_updates": 0,
        **sections.get("training", {}),
    }
    plan = make(**sections)
    return of(events_of(plan, WithLosses(plan, loss, test_loss)), (UpdateDone, InstanceWarned))  # type: ignore[arg-type]


def texts_of(events: List[Any]) -> Dict[int, str]:
    """Return the warnings by the update before each."""
    return {events[n - 1].update: each.text for n, each in enumerate(events) if isinstance(each, InstanceWarned)}


def test_a_loss_far_above_its_start_is_one_warning_that_names_update_and_rate(make: Callable[..., Plan]) -> None:
    events = warned(make, lambda update: 2.0 if update < 11 else 9.0, training={"learning_rate": 0.25})
    found = texts_of(events)
    text = f"the loss is 9 at update 16 (learning rate 0.25), after 2 at the start: it diverges; {WAY_ON}"
    assert found == {16: text}
    event = next(each for each in events if isinstance(each, InstanceWarned))
    assert text_of(line_of_event(event)) == f"instance warned: {text}"


def line_of_event(event: InstanceWarned) -> Dict[str, Any]:
    return {"event": "instance_warned", "instance": event.instance, "text": event.text, "log_file": event.log_file}


@pytest.mark.parametrize("loss", [lambda n: 2.0 + n / 20, lambda n: 90.0 if n % 3 == 0 else 2.0, lambda n: n - 20.0])
def test_other_losses_are_none(make: Callable[..., Plan], loss: Callable[[int], float]) -> None:
    assert texts_of(warned(make, loss)) == {}


def test_a_range_test_of_the_rate_has_no_warning(make: Callable[..., Plan]) -> None:
    schedule = {"lr_schedule": "raypod.cli.lr_range:factor"}
    assert texts_of(warned(make, lambda update: 2.0 ** (update / 4), training=schedule)) == {}


def test_a_loss_that_is_not_finite_names_its_consequence_once(make: Callable[..., Plan]) -> None:
    found = texts_of(warned(make, lambda n: math.nan if n > 6 else 1.0, run={"on_nonfinite": "continue"}))
    (text,) = found.values()
    assert list(found) == [7]
    assert text.startswith("the loss became nan at update 7 (learning rate ")
    assert text.endswith(f"); the run continues (--on-nonfinite continue); {WAY_ON}")


def test_a_metric_of_the_test_split_that_is_not_finite_is_named_once(make: Callable[..., Plan]) -> None:
    training = {"evaluate_every": 1, "learning_rate": 0.25, "updates": 20}
    (text,) = texts_of(warned(make, lambda n: 1.0, math.nan, training=training)).values()
    assert text.startswith("loss is nan on the test split after update ")
    assert "(learning rate 0.25): no sample counts in it, or a value is not finite" in text
