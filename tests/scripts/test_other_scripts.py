"""`scripts/dev`, chaos, published programs, what measures, CIFAR-10 from a server, and the sweep of the API."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import io
import os
import pickle
import re
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import api_sweep
import bench_half
import bench_recovery
import chaos
import make_cifar
import numpy as np
import psutil
import pytest
import run_published_programs as script
import simulate_pod
import startup_table
import torch
from bench_recovery import Line
from chaos_faults import Fault, FaultInjector
from conformance import api_probe
from simulate_pod import Costs, Pod

from raypod.errors import ConfigError
from raypod.events import Repaired, UpdateDone
from raypod.plan.config import Config
from raypod.plan.resolve import from_values
from raypod.system import torchvision_import
from raypod.training.data import cache, cifar
from tests.support import ROOT
from tests.support.bounded import wait_until
from tests.support.run_folders import write_run

SCRIPT = ROOT / "scripts" / "dev"


def dev(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    options: Any = {"cwd": folder, "env": {**os.environ, "VIRTUAL_ENV": sys.prefix}, "timeout": 60}
    return subprocess.run([str(SCRIPT), *words], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("words", [(), ("tests",), ("--help",)])
def test_an_unknown_command_lists_all_commands(processes: None, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = dev(*words, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    listed = re.findall(r"^ *scripts/dev (\w+)", done.stderr, re.MULTILINE)
    assert list(dict.fromkeys(listed)) == re.findall(r"^(\w+)\) ", SCRIPT.read_text(), re.MULTILINE)


def test_tests_run_in_the_active_environment_and_in_the_checkout(processes: None, tmp_path: Path) -> None:
    done = dev("test", "-q", "-p", "no:xdist", "--collect-only", "tests/repository/test_scheduling.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/repository/test_scheduling.py::" in done.stdout


def repaired(update: int) -> Repaired:
    return Repaired((0, 1), ("a", "b"), "a checkpoint", update, 1.0, 1, 2)


def test_device_faults_last_until_a_repair_and_repeated_updates_count(
    make: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    device_fault = tmp_path / "device-fault"
    faults = FaultInjector(make(), 1, device_fault)
    monkeypatch.setattr(faults, "_fault", Fault("device", "training", (1,), 0, 0.0))
    monkeypatch.setattr(faults, "_send", lambda number, instance: device_fault.read_text() == "unusable")
    faults._send_fault()
    assert faults.injected == {("device", ""): 1}
    faults.handle(repaired(3), may_begin=False)
    assert not device_fault.exists()
    done = [UpdateDone(update, 1, {"loss": 1.0}, 8 * update, 1.0, 1.0) for update in (1, 2, 3)]
    events = [*done[:2], repaired(2), *done[2:], repaired(1), repaired(1)]  # an update is recorded once
    assert chaos.rollbacks(events) == [(3, 1)]


def test_every_row_is_in_the_documentation():
    documented = re.findall(r"^\| `([\w.-]+)` \|", (ROOT / "docs/reference/programs.md").read_text(), re.MULTILINE)
    assert documented == [program.name for program in script.programs()]


@pytest.mark.parametrize(
    ("output", "code", "result"),
    [
        ("loss: 2.0,\rloss: 1.5,\n", 0, "loss 2 -> 1.5 (falls; 2 values)"),
        ("loss: 1.5,\nloss: 2.0,\n", 0, "failed: loss 1.5 -> 2 (does not fall; 2 values)"),
        ("loss: 2e+01,\nloss: .5E-1,\n", 0, "loss 20 -> 0.05 (falls; 2 values)"),
        ("loss: 2.0.,\nloss: 3.,\nloss: 1,\n", 0, "loss 3 -> 1 (falls; 2 values)"),
        ("loss: 2.0,\nloss: nan,\nloss: 1.0,\n", 0, "failed: loss 2 -> 1 (not finite; 3 values)"),
        ("loss: 2.0,\nloss: -inf,\n", 0, "failed: loss 2 -> -inf (not finite; 2 values)"),
        ("done\n", 0, "failed: no loss in its output"),
        ("loss: 2.0,\nValueError: no\n\n", 1, "failed with exit code 1: ValueError: no"),
    ],
)
def test_the_result_of_a_run_is_its_losses_or_its_last_line(output, code, result):
    program = script.Program("name", "examples", "folder", "train.py", loss="loss: LOSS,")
    assert script.result_of(program, output, code) == result


def test_torchvision_reads_the_generated_mnist(tmp_path):
    torchvision_import.install()
    datasets = pytest.importorskip("torchvision.datasets")
    script.write_mnist(tmp_path, train=20, test=4)
    image, label = datasets.FashionMNIST(tmp_path, train=True)[19]
    assert (image.size, 0 <= label < 10) == ((28, 28), True)


def test_a_program_without_its_clone_is_not_run_and_unknown_names_are_refused(tmp_path: Any, capsys: Any) -> None:
    program = script.Program("name", "examples", "folder", "train.py")
    assert script.Workspace(tmp_path, {}).run(program, 1.0) == "not run: no clone of examples is given"
    for name, message in (("mnits", "'mnits'; did you mean mnist"), ("xyz", "or optimum-vit-2-instances?")):
        with pytest.raises(SystemExit) as refusal:
            script.main(["mnist", name])
        assert refusal.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no-such-package", "pytest"])
def test_a_program_without_its_package_is_not_run(tmp_path, name):
    program = script.Program("name", "raypod", ".", "train.py", requires=f"{name}==0.0.1")
    assert script.Workspace(tmp_path, {}).run(program, 1.0).startswith(f"not run: needs {name}==0.0.1, found ")


@pytest.mark.parametrize("repository", ["examples", "optimum"])
def test_a_folder_that_is_no_clone_is_the_result_of_the_row(processes, tmp_path, repository):
    program = script.Program("name", "examples", "folder", "train.py")
    result = script.Workspace(tmp_path, {"examples": tmp_path, repository: tmp_path}).run(program, 1.0)
    assert result.startswith(f"failed: {tmp_path}: fatal: ")


def test_the_timeout_ends_a_program_that_ignores_sigterm(processes, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "GRACE_S", 0.1)
    (tmp_path / "stuck.py").write_text(
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child:\n    pathlib.Path('pid').write_text(str(child))\n"
        "time.sleep(60)\n"
    )
    program = script.Program("name", "raypod", str(tmp_path), "stuck.py")
    assert script.Workspace(tmp_path, {}).run(program, 0.5) == "failed: not finished after 0.5 s"
    child = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


FREE = Costs(stage_s=0.0, exchange_s=0.0, report_s=1e-4, driver_s=2e-4, report_bytes=1000.0, latency_s=0.0)


def test_a_pod_transfers_at_the_speed_of_its_links_and_shared_cores_take_turns() -> None:
    pod = Pod(hosts=2, per_host=1, gbit=8.0, efficiency=1.0)  # 1 GB/s
    chunk_s = simulate_pod.CHUNK_BYTES / 1e9
    assert simulate_pod.seeding_s(pod, FREE, 1e9) == pytest.approx(1.0 + chunk_s)
    assert simulate_pod.exchange_s(pod, FREE, 1e9) == pytest.approx(1.0)  # half of it, to and fro
    few, many = (simulate_pod.seeding_s(Pod(hosts, 1, 8.0, 0, 1.0), FREE, 1e9) for hosts in (2, 66))
    assert many - few == pytest.approx(64 * simulate_pod.CHUNK_BYTES / 1e9)
    size = 1e9
    for per_host in (1, 4, 16):
        pod = Pod(hosts=16, per_host=per_host, gbit=100.0)
        assert simulate_pod.sent_by_a_host(pod, size) == pytest.approx(2 * 15 / 16 * size)
    assert simulate_pod.sent_by_a_host(Pod(1, 16, 100.0), size) == 0
    costs = Costs(stage_s=1e-9, exchange_s=1e-9, report_s=0.0, driver_s=0.0, report_bytes=0.0, latency_s=0.0)
    shared, own = Pod(8, 1, 0.0, cores_of_all=2), Pod(8, 1, 0.0)
    for seconds_of, turns in ((simulate_pod.exchange_s, 4), (simulate_pod.seeding_s, 7)):
        assert seconds_of(shared, costs, 1e9) == pytest.approx(turns * seconds_of(own, costs, 1e9), rel=0.01)


def test_a_model_of_half_precision_is_known_and_its_errors_are_in_units_of_the_last_place(capsys: Any) -> None:
    with pytest.raises(SystemExit) as refusal:
        bench_half.main(["--models", "bert"])
    assert refusal.value.code == 2
    assert "invalid choice: 'bert'" in capsys.readouterr().err
    expected = [torch.tensor([1.5, 0.0]), torch.tensor([4.0])]
    found = [torch.tensor([1.5, 2.0**-10]), torch.tensor([4.0 - 2.0**-7])]
    assert bench_half.summary(found, expected) == "1 / 1 / 2"


def test_what_a_kill_costs_survivors_and_those_that_go_back_to_a_checkpoint() -> None:
    together = [Line(rank, update, rank, float(update), update - 1, 2) for update in (1, 2, 3) for rank in (0, 1)]
    ended_with_victim, alone = Line(0, 4, 0, 10.1, 3, 2), [Line(0, 5, 0, 11.0, 5, 1), Line(0, 6, 0, 11.1, 6, 1)]
    lines = [*together, ended_with_victim, *alone]  # the batch at 4 was in an update that is not committed
    assert bench_recovery.find_whole(lines, {1}) is None
    lines += [Line(1, 7, 2, 13.0, 3, 2), Line(0, 7, 0, 12.9, 7, 2)]
    assert bench_recovery.find_whole(lines, {1}) == 7
    assert bench_recovery.result_of(lines, 10.0, 7) == (1.0, 3.0, (1 + 4) * bench_recovery.BATCH, 0)
    old = [Line(rank, update, rank, float(update), update - 1, 2) for update in (1, 2, 3, 4) for rank in (0, 1)]
    new = [Line(rank, update, 2 + rank, 17.0 + update, update - 1, 2) for update in (3, 4, 5) for rank in (0, 1)]
    assert bench_recovery.find_whole([*old, *new[:4]], {0, 1}) is None
    assert bench_recovery.find_whole([*old, *new], {0, 1}) == 5
    assert bench_recovery.result_of([*old, *new], 10.0, 5) == (12.0, 12.0, 0, 2)


def test_the_start_up_time_of_a_run_is_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write_run(tmp_path / "a")
    monkeypatch.setattr(sys, "argv", ["startup_table.py", str(tmp_path / "a")])
    assert startup_table.main() == 0
    lines = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    rows = {name: cells for _, name, *cells, _ in lines}
    assert (rows["step"], rows["start the instances"]) == (["a"], ["4.00 s"])
    assert (rows["everything else"], rows["total"]) == (["1.00 s"], ["5.00 s"])
    assert rows["until the first update"] == ["6.50 s"]
    (tmp_path / "a" / "events.jsonl").write_text("")
    assert startup_table.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no run_started" in line


NAME = "cifar-10-python.tar.gz"


class Archive(NamedTuple):
    content: bytes
    source: Path  # the folder that it contains


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    folder = make_cifar.write(tmp_path_factory.mktemp("source"), train=50, test=10, classes=10)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        packed.add(str(folder), arcname=folder.name)
    return Archive(buffer.getvalue(), folder)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves an archive as the path says: /whole, /cut, /stalled, /unknown-length or /missing."""

    content = b""
    released = threading.Event()

    def do_GET(self) -> None:
        way = self.path.split("/")[1]
        if way == "missing":
            self.send_error(404)
            return
        self.send_response(200)
        if way != "unknown-length":
            self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        sent = self.content if way == "whole" else self.content[: len(self.content) // 2]
        self.wfile.write(sent)
        if way == "stalled":
            self.wfile.flush()
            self.released.wait(30)

    def log_message(self, *words: Any) -> None: ...


@pytest.fixture
def url(archive: Archive) -> Iterator[str]:
    Handler.content = archive.content
    Handler.released.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Handler.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return from_values({"data": {"dataset": "cifar10", "data_dir": str(tmp_path), "download": True}})


def served(monkeypatch: pytest.MonkeyPatch, url: str, md5: str) -> None:
    published = dataclasses.replace(cifar.CIFAR10.archive, url=f"{url}/{NAME}", md5=md5)
    replaced = dataclasses.replace(cifar.CIFAR10, archive=published)
    monkeypatch.setattr("raypod.training.data.cifar.CIFAR10", replaced)


def test_the_files_are_downloaded_unpacked_and_read(
    archive: Archive, url: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(monkeypatch, f"{url}/whole", hashlib.md5(archive.content).hexdigest())
    splits = cifar.CIFAR10.load(config)
    folder = tmp_path / "cifar-10-batches-py"
    for file in archive.source.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert (len(splits.train), len(splits.test), splits.classes) == (50, 10, 10)
    assert cifar.CIFAR10.archive.name == NAME
    batch = pickle.loads((archive.source / "test_batch").read_bytes())
    assert np.array_equal(np.asarray(splits.test.images).reshape(10, -1), batch["data"])
    assert not [*tmp_path.glob(".partial*")]


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("cut", r"ended the connection after \d+ of \d+ bytes|IncompleteRead"),
        ("unknown-length", "its MD5 checksum is"),
        ("stalled", "timed out"),
        ("missing", "HTTP Error 404: Not Found"),
        ("whole", f"expected {cifar.CIFAR10.archive.md5}"),  # another archive than the published one
    ],
)
def test_a_server_that_fails_is_one_line(
    way: str, cause: str, archive: Archive, url: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    md5 = cifar.CIFAR10.archive.md5 if way == "whole" else hashlib.md5(archive.content).hexdigest()
    served(monkeypatch, f"{url}/{way}", md5)
    monkeypatch.setattr(cache, "_READ_TIMEOUT_S", 0.3)
    with pytest.raises(ConfigError, match=cause) as caught:
        cifar.CIFAR10.load(config)
    assert "\n" not in str(caught.value)
    assert f"copy the file to this host and unpack it in {tmp_path}" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [f".{NAME}.lock"]


def test_a_generated_batch_may_be_empty(tmp_path: Path) -> None:
    folder = make_cifar.write(tmp_path, train=4, test=2, classes=10)
    batches = [pickle.loads((folder / f"data_batch_{number}").read_bytes()) for number in range(1, 6)]
    assert [batch["data"].shape for batch in batches].count((0, 3072)) == 1


OK, OTHER = {"value": ["self", {"x": "1"}], "warned": False}, {"value": ["self", {}], "warned": False}
ERROR = {"error": ["ValueError"], "core": False, "text": "", "warned": False}
OF_CORE = {**ERROR, "core": True}


@pytest.mark.parametrize(
    ("real", "emulated", "verdict"),
    [
        (OK, OK, "same"),
        (ERROR, ERROR, "same"),
        (ERROR, {**ERROR, "error": ["TypeError"]}, "message"),
        (OK, ERROR, "message"),
        (OK, {**OTHER, "warned": True}, "message"),
        (OF_CORE, OK, "core"),
        (OK, OTHER, "silent"),
        (ERROR, OK, "silent"),
    ],
)
def test_a_verdict_is_silent_only_without_an_exception_or_a_warning(real: Any, emulated: Any, verdict: str) -> None:
    assert api_sweep.judge(real, emulated) == verdict


def test_the_pages_of_calls_name_the_kinds_that_differ_and_no_silent_entry() -> None:
    calls = [api_sweep.Call("nop()", "tensor", kind, ERROR, emulated) for kind, emulated in (("0", ERROR), ("1", OK))]
    assert "| `nop(tensor)` | 2 | 2 |  |  | `1` |" in api_sweep.page(calls)
    rows = [line for line in api_sweep.PAGE.read_text().splitlines() if line.startswith("| `")]
    assert rows
    assert all(line.endswith("|  |") for line in rows)


def test_the_probe_observes_results_changes_of_state_and_errors() -> None:
    (subject,) = (each for each in api_probe.subjects() if each.name == "Options.deviceIterations")
    found: Any = {(name, kind): outcome for name, kind, outcome in api_probe.calls(subject)}
    assert found["", ""]["value"] == ["self", {"device_iterations": "2"}]
    assert found["device_iterations", "3"]["value"] == ["self", {"device_iterations": "3"}]
    assert found["device_iterations", "'x'"]["error"][0] == "AssertionError"
