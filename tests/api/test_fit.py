"""`raypod.fit` and `raypod.stream` with the inline fleet: results, callbacks and their media, ends, errors."""

from __future__ import annotations

import asyncio
import errno
import gc
import html
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Dict, List, Tuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import raypod
from raypod import train
from raypod.api import training
from raypod.api.media import logging_to
from raypod.errors import CheckpointNotSaved, ConfigError, FolderLost, RunError
from raypod.events import CheckpointSaved, EvaluationDone, RunEnded, RunStarted, UpdateDone
from raypod.plan.layout import MEDIA
from raypod.runs import run_state, verify_data
from raypod.runs.media import LIST, Media, MediaFolder
from raypod.runs.upload.mirror import Mirror
from raypod.runtime.coordinator import kept_state
from raypod.system.companion import Companion
from raypod.training.checkpoint import storage
from tests.support import ROOT
from tests.support.bounded import COMMAND_S
from tests.support.refused import refused

QUICK: Dict[str, Any] = {"fleet": "inline", "device": "emulated", "model": "tiny", "replicas": 2, "batch_size": 4}
FLAT: Dict[str, Any] = {"lr_schedule": "constant", "warmup_updates": 0}
URL = "file:///store"
RUN = {**QUICK, "lr_schedule": "constant", "progress": False, "checkpoint_every": "2 updates", "save_retry_s": 0}
RUN["max_unsaved"] = "1 checkpoint"
FLAGS = {"model": "tiny", "fleet": "inline", "device": "emulated", "replicas": 2, "lr_schedule": "constant"}


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
    assert (result.run_dir, result.summary["weights_sha256"]) == (tmp_path / "fit", command["weights_sha256"])
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
        assert all(line in each for each in (shown, again)), line
    refused("holds a run already", fit, tmp_path / "fit", updates=1)


def test_the_metrics_are_a_table_also_of_a_run_in_another_thread_or_a_running_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: List[raypod.Result] = []
    thread = threading.Thread(target=lambda: results.append(fit(tmp_path / "a", updates=3, async_dataloader=True)))
    thread.start()
    thread.join(COMMAND_S)

    async def cell() -> None:
        results.append(fit(tmp_path / "loop", updates=3, async_dataloader=True))

    asyncio.run(cell())
    for result in results:
        metrics = result.metrics
        if not isinstance(metrics, list):  # with pandas, a DataFrame
            assert list(metrics["update"]) == [1, 2, 3]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # without pandas
    for result in results:
        assert [row["update"] for row in result.metrics] == [1, 2, 3]
        assert all(row["loss"] > 0 for row in result.metrics)
        assert [row["update"] for row in result.evaluations] == [3]
    assert len(results) == 2


def test_a_config_is_a_path_a_dict_or_a_config_and_flags_replace_it(tmp_path: Path) -> None:
    sections = {"training": {"updates": 2, "seed": 3}}
    path = tmp_path / "config.yaml"
    path.write_text("training: {updates: 2, seed: 3}\n")
    training = type(raypod.Config().training)(updates=2, seed=3)
    hashes = {
        fit(tmp_path / str(number), config=config, seed=5).summary["weights_sha256"]
        for number, config in enumerate((sections, path, str(path), raypod.Config(training=training)))
    }
    assert (len(hashes), sections) == (1, {"training": {"updates": 2, "seed": 3}})
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
    assert (part.stop_cause, part.summary["updates"]) == ("the callback Early requested it", 2)
    assert [type(event) for event in (seen[0], seen[-1])] == [RunStarted, RunEnded]
    assert [event.update for event in seen if isinstance(event, UpdateDone)] == [1, 2]
    assert part.best_checkpoint == tmp_path / "part" / "checkpoints" / "update-00000002"
    rest = raypod.fit(resume=tmp_path / "part", progress=False)
    assert rest.summary["updates"] == 6
    assert rest.summary["weights_sha256"] == fit(tmp_path / "whole", updates=6, **FLAT).summary["weights_sha256"]

    def fail(event: Any) -> None:
        if stop_after_2(event):
            raise ZeroDivisionError("of the callback")

    with pytest.raises(ZeroDivisionError, match="of the callback"):  # after a checkpoint
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
    refused("there is no checkpoint", result.load_weights_into, module, tmp_path)
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
    command = [sys.executable, "script.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
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


@pytest.fixture
def rescued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The storage: a mirror renames the folder that it gets to this one."""
    store = tmp_path / "store"

    class DirectMirror(Mirror):
        def _finish(self) -> bool:
            self._process.folder.rename(store)
            return True

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(kept_state, "_OTHER_DISKS", ())
    monkeypatch.setattr(Companion, "start", lambda mirror: None)
    monkeypatch.setattr(training, "Mirror", DirectMirror)
    return store


def ended_by(kind: type, folder: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> Tuple[RunError, List[int]]:
    """Train until the run folder is `lost` or its disk full after 4 updates; return the error and all updates."""
    new_checkpoint, updates = storage.new_checkpoint, []

    def on_event(event: Any) -> None:
        if isinstance(event, UpdateDone):
            updates.append(event.update)
        if isinstance(event, UpdateDone) and event.update == 4:
            if kind is FolderLost:
                folder.rename(folder.with_name("moved"))
            else:
                monkeypatch.setattr(storage, "new_checkpoint", full_disk)

    def full_disk(checkpoints: Path, update: int) -> ContextManager[Path]:
        if folder in checkpoints.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return new_checkpoint(checkpoints, update)

    with pytest.raises(kind) as caught:
        raypod.fit(run_dir=folder, updates=20, callbacks=on_event, **{**RUN, **flags})
    return caught.value, updates


@pytest.mark.parametrize("kind", [FolderLost, CheckpointNotSaved])
def test_the_newest_state_is_saved_on_the_storage(kind: type, rescued: Path, tmp_path: Path, monkeypatch: Any) -> None:
    error, updates = ended_by(kind, tmp_path / "run", monkeypatch, storage_path=URL)
    newest = updates[-1]
    assert f"the state of update {newest} is saved: continue on another disk with --resume {URL}/run" in str(error)
    assert storage.latest_name(rescued) == f"update-{newest:08d}"
    assert run_state.is_unfinished(rescued)
    assert not list((tmp_path / "tmp").iterdir())
    assert kind is not FolderLost or not (tmp_path / "run").exists()
    result = raypod.fit(resume=rescued, updates=20, **{**RUN, "storage_path": None})
    undisturbed = raypod.fit(run_dir=tmp_path / "undisturbed", updates=20, **RUN)
    assert result.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert verify_data.verify(rescued).is_proved


def fit_logging(folder: Path, callbacks: Any, **flags: Any) -> raypod.Result:
    return raypod.fit(run_dir=folder, callbacks=callbacks, progress=False, **{**FLAGS, "updates": 6, **flags})


def listed(folder: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in (folder / MEDIA / LIST).read_text().splitlines()]


def log_all(event: Any) -> None:
    if isinstance(event, UpdateDone) and event.update % 2 == 0:
        raypod.log_image("samples/first", torch.full((3, 4, 5), event.update / 10))
        raypod.log_text("note", f"update **{event.update}**")
    if isinstance(event, (RunStarted, EvaluationDone, RunEnded)):
        raypod.log_text("note", type(event).__name__)


def pixels_of(image: Any) -> np.ndarray:
    found: List[bytes] = []
    with logging_to(lambda kind, name, content: found.append(content)):
        raypod.log_image("x", image)
    return np.asarray(Image.open(io.BytesIO(found[0])))


def test_files_and_tensorboard_have_what_callbacks_log(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    fit_logging(run, log_all, tracker="tensorboard", checkpoint_every="4 updates")
    texts = [line for line in listed(run) if line["kind"] == "text"]
    own = [(update, f"update **{update}**") for update in (2, 4, 6)]
    assert [(line["update"], (run / MEDIA / line["file"]).read_text()) for line in texts] == [
        (0, "RunStarted"),
        *own,
        (6, "EvaluationDone"),
        (6, "RunEnded"),
    ]
    images = {line["update"]: run / MEDIA / line["file"] for line in listed(run) if line["kind"] == "image"}
    assert sorted(images) == [2, 4, 6]
    assert (np.asarray(Image.open(images[4])) == 102).all()
    fit_logging(run, log_all, resume=str(run / "checkpoints/update-00000004"), updates=8)
    assert [line["update"] for line in listed(run) if line["kind"] == "image"] == [2, 4, 6, 8]
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    shown = [(each.step, each.width, each.height) for each in events.Images("samples/first")]
    assert shown == [(update, 5, 4) for update in (2, 4, 6, 8)]
    assert events.Tensors("note/text_summary")[1].tensor_proto.string_val == [b"update **2**"]


def test_tensorboard_has_the_hyperparameters(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    fit_logging(tmp_path / "run", (), tensorboard=True, learning_rate=0.25)
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    kind = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    plugins = {name: metadata.plugin_data for name, metadata in events.summary_metadata.items()}
    found = {name: kind.FromString(each.content) for name, each in plugins.items() if each.plugin_name == "hparams"}
    assert sorted(found) == ["_hparams_/experiment", "_hparams_/session_end_info", "_hparams_/session_start_info"]
    hparams = found["_hparams_/session_start_info"].session_start_info.hparams
    assert hparams["training.learning_rate"].number_value == 0.25
    assert hparams["training.model"].string_value == "tiny"
    assert "training.betas" not in hparams, "without an effect"
    metrics = {each.name.tag for each in found["_hparams_/experiment"].experiment.metric_infos}
    assert {"training/loss", "test/accuracy", "test/top5_accuracy"} <= metrics <= set(events.Tags()["scalars"])


def test_trackers_get_media_once_in_the_order_of_steps(tmp_path: Path, monkeypatch: Any, processes: None) -> None:
    monkeypatch.setenv("FAKE_TRACKER", str(tmp_path / "fake.jsonl"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = {"tracker": ["tests.support.fake_tracker:Fake", "tests.support.fake_tracker:WithMedia"]}
    run = tmp_path / "run"
    fit_logging(run, log_all, checkpoint_every="4 updates", **flags)
    fit_logging(run, log_all, resume=str(run / "checkpoints/update-00000004"), updates=8, **flags)
    lines = [json.loads(line) for line in (tmp_path / "fake.jsonl").read_text().splitlines()]
    media = [line for line in lines if "media" in line]
    assert [line["step"] for line in media if line["media"] == "samples/first"] == [2, 4, 6, 8]
    notes = [line["text"] for line in media if line["media"] == "note" and line["step"] == 6]
    assert notes == ["update **6**", "EvaluationDone", "RunEnded"]
    assert {line["size"] for line in media if "size" in line} == {(run / MEDIA / listed(run)[1]["file"]).stat().st_size}
    of_one = [line["step"] for line in lines if line.get("of") == "WithMedia" and "step" in line]
    assert of_one == sorted(of_one), "W&B accepts no earlier step"
    assert not [line for line in lines if line.get("values") == {}]


def test_what_a_callback_logs_wrongly_is_one_line(tmp_path: Path) -> None:
    refused(r"raypod.log_text is for the callbacks of raypod.fit and raypod.stream", raypod.log_text, "a", "b")
    wrong: List[Any] = [
        (lambda: raypod.log_image("x", "a.png"), "a str is no image"),
        (lambda: raypod.log_image("x", np.zeros((2, 3, 4, 5))), r"with 1, 3 or 4 channels, not \[2, 3, 4, 5\]"),
        (lambda: raypod.log_image("x", np.zeros((5, 4, 2))), r"not \[5, 4, 2\]"),
        (lambda: raypod.log_image("x", np.full((4, 4), 256)), "not int64 from 256 to 256"),
        (lambda: raypod.log_image("x", np.zeros((1, 5000))), "1 to 4096 pixels per side, not 5000 x 1"),
        (lambda: raypod.log_image(" ", np.zeros((4, 4))), "the name is a text that is not empty, not ' '"),
        (lambda: raypod.log_text("x", 3), "a text is a str, not a int"),  # type: ignore[arg-type]
        (lambda: raypod.log_text("x", "y" * (1 << 21)), "the text has 2097152 bytes; at most 1048576 are kept"),
    ]
    for call, words in wrong:
        with logging_to(lambda *media: None), pytest.raises(ConfigError, match=words):
            call()
    refused("a text is a str", fit_logging, tmp_path / "run", lambda event: wrong[6][0](), updates=2)
    assert (tmp_path / "run" / "summary.json").exists(), "the run has ended with a checkpoint"
    assert not (tmp_path / "run" / MEDIA).exists()


@pytest.mark.parametrize(
    ("make", "shape", "value"),
    [
        (lambda: np.full((4, 5), 7, dtype=np.uint8), (4, 5), 7),
        (lambda: np.full((4, 5), 7), (4, 5), 7),
        (lambda: np.full((1, 4, 5), 1.0), (4, 5), 255),
        (lambda: np.full((4, 5, 3), 0.2), (4, 5, 3), 51),
        (lambda: torch.full((4, 6, 5), 0.2, dtype=torch.bfloat16, requires_grad=True), (6, 5, 4), 51),
        (lambda: torch.ones(3, 4, 3, dtype=torch.bool), (4, 3, 3), 255),
        (lambda: Image.new("P", (5, 4)), (4, 5, 3), 0),
        (lambda: SimpleNamespace(savefig=lambda file, format: Image.new("L", (2, 2), 9).save(file, format)), (2, 2), 9),
    ],
)
def test_images_of_every_form(make: Callable[[], Any], shape: Any, value: int) -> None:
    pixels = pixels_of(make())
    assert pixels.shape == shape
    assert (pixels == value).all()
    with pytest.warns(RuntimeWarning, match="clipped to 0..1, and NaN is 0"):
        assert pixels_of(np.array([[-1.0, np.nan], [0.2, 3.0]])).tolist() == [[0, 0], [51, 255]]


def test_a_disk_that_fails_is_one_warning(tmp_path: Path) -> None:
    warnings: List[str] = []
    (tmp_path / MEDIA).write_text("no folder")
    folder = MediaFolder(tmp_path, 0, warnings.append)
    for update in (1, 2):
        folder.add(Media("text", "a/b", update, b"x"))
    folder.close()
    (warning,) = warnings
    assert warning.startswith(f"cannot write {tmp_path / MEDIA}/00000001-a_b-")
