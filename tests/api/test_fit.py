"""`raypod.fit` and `raypod.stream` with the inline fleet: results, callbacks, early ends, errors, what they leave."""

from __future__ import annotations

import asyncio
import gc
import html
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import nn

import raypod
from raypod import train
from raypod.events import CheckpointSaved, EvaluationDone, RunEnded, RunStarted, UpdateDone
from tests.support import ROOT
from tests.support.bounded import COMMAND_S

QUICK: Dict[str, Any] = {"fleet": "inline", "device": "emulated", "model": "tiny", "replicas": 2, "batch_size": 4}
FLAT: Dict[str, Any] = {"lr_schedule": "constant", "warmup_updates": 0}


def fit(run_dir: Path, **flags: Any) -> raypod.Result:
    return raypod.fit(run_dir=run_dir, progress=False, **{**QUICK, **flags})


def stream(run_dir: Path, updates: int, callbacks: Any = ()) -> Any:
    return raypod.stream(run_dir=run_dir, updates=updates, callbacks=callbacks, **QUICK)


def stop_after_2(event: Any) -> Any:
    return raypod.STOP if isinstance(event, UpdateDone) and event.update == 2 else None


def state_of_process() -> Tuple[Any, ...]:
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
    threads = {thread.name for thread in threading.enumerate()}
    return dict(os.environ), list(sys.path), Path.cwd(), signals, threads, torch.get_num_threads()


def open_files() -> List[str]:
    """Return what the open descriptors lead to, without the numbers of sockets and pipes."""
    gc.collect()  # the traceback of a run that failed holds its files until then
    descriptors = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]  # without that of the folder
    return sorted(re.sub(r"\[\d+\]", "", os.readlink(file)) for file in descriptors)


def test_a_function_call_is_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"updates": torch.tensor(3), "learning_rate": torch.tensor(0.05)}  # as from a search space
    result = fit(tmp_path / "fit", seed=7, data_dir=None, **numbers)
    assert capsys.readouterr().out == ""
    flags = ["--fleet", "inline", "--device", "emulated", "--model", "tiny", "--replicas", "2", "--batch-size", "4"]
    flags += ["--updates", "3", "--seed", "7", "--learning-rate", str(numbers["learning_rate"].item())]
    assert train.main([*flags, "--run-dir", str(tmp_path / "command")]) == 0
    command = json.loads((tmp_path / "command" / "summary.json").read_text())
    assert result.run_dir == tmp_path / "fit"
    assert result.summary["weights_sha256"] == command["weights_sha256"]
    assert result.summary["test_accuracy"] == command["test_accuracy"]
    assert (result.interrupted, result.stop_cause) == (False, "")
    assert '"state": "done"' in (tmp_path / "fit" / "report.html").read_text()
    page = result._repr_html_()
    assert "done, 3 of 3 updates" in page
    assert f"<td>{result.summary['test_accuracy']:.4g}</td>" in page
    assert [name for name in ("loss", "accuracy") if f'aria-label="{name}"' in page] == ["loss", "accuracy"]
    report = Path(result.run_dir / "report.html")
    report.unlink()
    assert Path(result.report()) == report
    assert html.escape(report.read_text()) in result.report()._repr_html_()
    shown = capsys.readouterr().out
    raypod.fit(run_dir=tmp_path / "shown", **{**QUICK, "updates": 3})
    again = capsys.readouterr().out
    for line in ("replicas", "Test accuracy: ", "tiny"):
        assert line in shown
        assert line in again
    with pytest.raises(raypod.ConfigError, match="holds a run already"):
        fit(tmp_path / "fit", updates=1)


def test_the_metrics_are_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fit(tmp_path / "run", updates=3, async_dataloader=True)
    metrics = result.metrics
    if not isinstance(metrics, list):  # with pandas, a DataFrame
        assert list(metrics["update"]) == [1, 2, 3]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # without pandas
    assert [row["update"] for row in result.metrics] == [1, 2, 3]
    assert all(row["loss"] > 0 for row in result.metrics)
    assert [row["update"] for row in result.evaluations] == [3]


def test_a_config_is_a_path_a_dict_or_a_config_and_flags_replace_it(tmp_path: Path) -> None:
    sections = {"training": {"updates": 2, "seed": 3}}
    path = tmp_path / "config.yaml"
    path.write_text("training: {updates: 2, seed: 3}\n")
    training = type(raypod.Config().training)(updates=2, seed=3)
    hashes = {
        fit(tmp_path / str(number), config=config, seed=5).summary["weights_sha256"]
        for number, config in enumerate((sections, path, str(path), raypod.Config(training=training)))
    }
    assert len(hashes) == 1
    assert sections == {"training": {"updates": 2, "seed": 3}}
    other = fit(tmp_path / "other", config=sections)
    assert other.summary["updates"] == 2
    assert other.summary["weights_sha256"] not in hashes


class Misspelled:
    def on_updates_done(self, event: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_sice": 8}, "unknown flag batch_sice; did you mean batch_size?"),
        ({"lr": 0.1}, "unknown flag lr; did you mean learning_rate?"),
        ({"bs": 8}, "unknown flag bs; did you mean batch_size?"),
        ({"num_epochs": 8}, "unknown flag num_epochs; did you mean epochs?"),
        ({"xyzzy": 8}, "unknown flag xyzzy; raypod train --help-all lists all, here with underscores"),
        ({"callback": print}, "did you mean callbacks?"),
        ({"batch_size": 0}, "training.batch_size = 0: must be at least 1"),
        ({"replicas": 2, "num_replicas": 2}, "both given"),
        ({"cluster": "missing.yaml"}, "cannot read the cluster file missing.yaml"),
        ({"config": {"training": {"epoch": 1}}}, "did you mean training.epochs?"),
        ({"config": {"epochs": 1}}, "config['epochs'] is no section"),
        ({"config": {"training": 3}}, "a section is a dict of its keys"),
        ({"config": 3}, "pass a path, a dict of sections or a raypod.Config"),
        ({"config": "missing.yaml"}, "cannot read the config file missing.yaml"),
        ({"task": "image-clasification"}, "did you mean image-classification?"),
        ({"task": int}, "subclass of raypod.Task"),
        ({"callbacks": [3]}, "the callback int is neither callable nor"),
        ({"callbacks": [Misspelled()]}, "did you mean on_update_done?"),
        ({"callbacks": [Misspelled]}, "pass an object, Misspelled()"),
    ],
)
def test_a_wrong_request_is_an_exception_and_leaves_nothing(
    arguments: Dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(raypod.UserError) as caught:
        raypod.fit(progress=False, **{**({} if "num_replicas" in arguments else QUICK), **arguments})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_instance": 2}, "did you mean num_instances?"),
        ({"num_instances": 0}, "num_instances = 0: must be a positive whole number"),
        ({"num_instances": True}, "num_instances = True"),
        ({"num_instances": 2, "replicas": 3}, "3 replicas cannot be divided"),
        ({"device": "gpu"}, "use auto, ipu or emulated"),
        ({"collectives": "nccl"}, "must be one of auto, horovod, gloo"),
        ({"threads_per_replica": -1}, "threads_per_replica = -1"),
        ({"timeout_s": 0}, "timeout_s = 0: must be greater than 0"),
        ({"start_timeout_s": -1}, "start_timeout_s = -1: must be greater than 0"),
        ({"cluster": "missing.yaml"}, "cannot read the cluster file"),
    ],
)
def test_a_wrong_request_of_run_starts_nothing(arguments: Dict[str, Any], message: str) -> None:
    with pytest.raises(raypod.UserError) as caught:
        raypod.run(lambda: None, **arguments)
    assert message in str(caught.value)


def test_a_callback_gets_all_events_and_can_stop_the_run_which_continues_with_the_same_bits(tmp_path: Path) -> None:
    seen: List[Any] = []

    class Early:
        def on_update_done(self, event: UpdateDone) -> Any:
            return stop_after_2(event)

    part = fit(tmp_path / "part", updates=6, callbacks=[seen.append, Early()], **FLAT)
    assert part.interrupted
    assert part.stop_cause == "the callback Early requested it"
    assert part.summary["updates"] == 2
    assert [type(event) for event in (seen[0], seen[-1])] == [RunStarted, RunEnded]
    assert [event.update for event in seen if isinstance(event, UpdateDone)] == [1, 2]
    assert part.best_checkpoint == tmp_path / "part" / "checkpoints" / "update-00000002"
    rest = raypod.fit(resume=tmp_path / "part", progress=False)
    assert rest.summary["updates"] == 6
    assert rest.summary["weights_sha256"] == fit(tmp_path / "whole", updates=6, **FLAT).summary["weights_sha256"]


def test_an_exception_of_a_callback_is_raised_after_a_checkpoint(tmp_path: Path) -> None:
    def fail(event: Any) -> None:
        if stop_after_2(event):
            raise ZeroDivisionError("of the callback")

    with pytest.raises(ZeroDivisionError, match="of the callback"):
        fit(tmp_path / "run", updates=6, callbacks=fail)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["updates"] == 2
    assert (tmp_path / "run" / "checkpoints" / "update-00000002").is_dir()


def test_a_stream_yields_the_events_and_has_the_result(tmp_path: Path) -> None:
    events = stream(tmp_path / "run", 3)
    assert not (tmp_path / "run").exists()  # it starts with the first event
    kinds = [type(event) for event in events]
    assert (kinds[0], kinds.count(UpdateDone), kinds[-1]) == (RunStarted, 3, RunEnded)
    assert EvaluationDone in kinds
    rest = stream(tmp_path / "rest", 3)
    assert isinstance(next(rest), RunStarted)
    assert rest.result().summary["weights_sha256"] == events.result().summary["weights_sha256"]
    stopped = stream(tmp_path / "stopped", 6)
    for event in stopped:
        if isinstance(event, UpdateDone) and event.update == 3:
            stopped.stop("enough")
    assert (stopped.result().summary["updates"], stopped.result().stop_cause) == (3, "enough")


def test_a_stream_that_is_closed_early_saves_a_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path / "warm", updates=1)  # imports
    before = state_of_process()
    with stream(tmp_path / "run", 6) as events:
        for event in events:
            if stop_after_2(event):
                break
    by_callback = stream(tmp_path / "other", 6, callbacks=lambda event: stop_after_2(event) and by_callback.close())
    assert [event.update for event in by_callback if isinstance(event, UpdateDone)] == [1, 2]
    result = events.result()
    assert result.interrupted
    assert result.summary["updates"] == 2
    assert result.best_checkpoint == tmp_path / "run" / "checkpoints" / "update-00000002"
    assert state_of_process() == before
    never_started = stream(tmp_path / "none", 6)
    never_started.close()
    with pytest.raises(raypod.RunError, match="closed before the run started"):
        never_started.result()
    assert not (tmp_path / "none").exists()


def test_weights_are_loaded_into_a_module(tmp_path: Path) -> None:
    result = fit(tmp_path / "run", updates=4, checkpoint_every="2 updates")
    safetensors = pytest.importorskip("safetensors.torch", reason="reads the file independently")
    assert result.best_checkpoint is not None
    saved = safetensors.load_file(str(result.best_checkpoint / "weights.safetensors"))

    class Holder(nn.Module):
        def __init__(self, extra: int = 0) -> None:
            super().__init__()
            self.names = list(saved)
            for number, tensor in enumerate(saved.values()):
                self.register_buffer(f"t{number}", torch.zeros(tensor.shape[0] + extra, *tensor.shape[1:]))

        def state_dict(self, *_: Any, **__: Any) -> Any:
            return {name: getattr(self, f"t{number}") for number, name in enumerate(self.names)}

        def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
            for name, tensor in self.state_dict().items():
                tensor.copy_(state[name])

    module, other = Holder(), Holder()
    result.load_weights_into(module)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in module.state_dict().items())
    result.load_weights_into(other, tmp_path / "run" / "checkpoints" / "update-00000002")
    assert not all(torch.equal(tensor, saved[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(raypod.ConfigError, match="do not fit the module: .* in the module and .* in the checkpoint"):
        result.load_weights_into(Holder(extra=1))
    with pytest.raises(raypod.ConfigError, match="there is no checkpoint"):
        result.load_weights_into(module, tmp_path)
    file = result.best_checkpoint / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    for named in (None, file.parent):
        with pytest.raises(raypod.CheckpointDamaged, match="the SHA-256 of weights.safetensors does not match"):
            result.load_weights_into(other, named)
    assert not all(torch.equal(tensor, saved[name]) for name, tensor in other.state_dict().items())


def run_and_fail(folder: Path) -> None:
    fit(folder / "a", updates=2)
    with pytest.raises(raypod.RunError):
        fit(folder / "b", **{**FLAT, "updates": 20, "learning_rate": 1e30})  # not finite


@pytest.mark.usefixtures("processes")
def test_runs_leave_no_file_open(tmp_path: Path) -> None:
    # In a process of its own: where another test has joined a cluster, Ray opens and closes connections at any time.
    program = (
        "import sys; from pathlib import Path; from tests.api import test_fit as t; folder = Path(sys.argv[1])\n"
        "t.fit(folder / 'warm', updates=1); before = t.open_files(); t.run_and_fail(folder)\n"
        "assert t.open_files() == before, (before, t.open_files())"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=COMMAND_S)


def test_runs_leave_nothing_in_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path / "warm", updates=1)  # imports
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    before = state_of_process()
    run_and_fail(tmp_path)
    assert state_of_process() == before
    torch.set_num_threads(threads)
    assert '"state": "failed"' in (tmp_path / "b" / "report.html").read_text()
    events = stream(tmp_path / "run", 3)
    next(events)
    (tmp_path / "run" / "report.html").mkdir()  # a file cannot replace a folder
    *_, ended = events
    assert isinstance(ended, RunEnded)
    assert sum("the report was not written" in record.getMessage() for record in caplog.records) == 1


def test_a_run_in_another_thread_and_in_a_running_event_loop(tmp_path: Path) -> None:
    results: List[raypod.Result] = []
    thread = threading.Thread(target=lambda: results.append(fit(tmp_path / "thread", updates=2)))
    thread.start()
    thread.join(COMMAND_S)

    async def cell() -> None:
        results.append(fit(tmp_path / "loop", updates=2))

    asyncio.run(cell())
    assert [result.summary["updates"] for result in results] == [2, 2]


SCRIPT = """
import sys, time
import raypod

def slow(event):
    print(type(event).__name__, flush=True)
    time.sleep(0.05)

try:
    raypod.fit(fleet="inline", device="emulated", model="tiny", replicas=2, batch_size=4, run_dir="run", updates=400,
               progress=False, callbacks=slow)
except KeyboardInterrupt as interrupt:
    print(type(interrupt).__name__, interrupt.result.interrupted, interrupt.result.best_checkpoint, flush=True)
"""


@pytest.mark.usefixtures("processes")
def test_ctrl_c_saves_a_checkpoint_and_raises_keyboard_interrupt(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if line.startswith("UpdateDone"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read().splitlines()
        assert process.wait(COMMAND_S) == 0
    assert CheckpointSaved.__name__ in rest
    kind, interrupted, checkpoint = rest[-1].split()
    assert (kind, interrupted) == ("Interrupted", "True")
    assert Path(checkpoint, "weights.safetensors").is_file()
