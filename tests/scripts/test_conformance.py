from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, List

import poptorch_conformance
import pytest
import torch
from conformance import (
    compare_options,
    expected,
    front_end_rows,
    front_end_runs,
    horovod,
    real_front_end,
    rules,
    runs,
    tables,
)
from conformance.clone import CloneError, extract
from conformance.front_end import device, session_options
from conformance.front_end.device import Device, Peers
from conformance.front_end.optimizers import DeviceOptimizer
from conformance.outcomes import EXCLUDED, FAILED, PASSED, SKIPPED, Outcome

from raypod.runtime.worker.collectives import caused_by_peer
from raypod.system.files import new_file
from raypod.training.checkpoint.tensors import write_tensors
from tests.support.modules import module_of

EXCLUDED_TEST = Outcome("test_ir", EXCLUDED, "reads the IR of PopART")
OUTCOMES = [Outcome("test_good", PASSED), Outcome("test_bad[a]", FAILED, "why"), EXCLUDED_TEST]
HELPERS = """
def read_ir(model):
    return model._debugGetPopartIR()

class LogChecker:
    pass
"""
TESTS = """
import helper_functions
import poptorch
import functools

def decorated(function):
    @functools.wraps(function)
    def wrapper(capfd):
        helper_functions.LogChecker(capfd)
        function()
    return wrapper

def test_plain():
    assert poptorch.poptorch_core.Error

def test_ir_of_a_helper(model):
    class Inner:
        def check(self):
            helper_functions.read_ir(model)
    Inner().check()

def test_core():
    poptorch.poptorch_core._throwTestError(1)

def test_log(capfd):
    helper_functions.LogChecker(capfd).assert_contains("x")

def test_pages():
    requests.get("x")

@decorated
def test_whose_decorator_prints():
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "helper_functions.py").write_text(HELPERS)
    (tmp_path / "some_tests.py").write_text(TESTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("some_tests")
    for name in ("some_tests", "helper_functions"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("test_plain", None),
        ("test_ir_of_a_helper", "reads the IR of PopART"),
        ("test_core", "calls the private C++ module"),
        ("test_log", "checks captured log lines"),
        ("test_pages", "downloads weights, data or pages"),
        ("test_whose_decorator_prints", None),
    ],
)
def test_the_source_of_a_test_decides_about_its_exclusion(module: Any, test: str, reason: str) -> None:
    folder = Path(module.__file__).parent
    assert rules.reason_of(getattr(module, test), [], folder) == reason
    assert rules.reason_of(module.test_plain, [getattr(module, test)], folder) == reason  # as a fixture


@pytest.mark.parametrize(
    ("listed", "unlisted", "passing", "idle"),
    [
        ([], ["a_test.py::test_bad[a]"], [], []),
        (["a_test.py::test_bad[*]"], [], [], []),
        (["a_test.py::*"], [], ["a_test.py::test_good"], []),
        (["a_test.py::test_bad[a]", "b_test.py::*"], [], [], ["b_test.py::*"]),
    ],
)
def test_outcomes_are_judged_against_the_list(listed: Any, unlisted: Any, passing: Any, idle: Any) -> None:
    entries = [expected.Entry([pattern], "because") for pattern in listed]
    suite = {"a_test.py": OUTCOMES}
    verdict = expected.judge(suite, entries, whole=True)
    assert (verdict.unlisted, verdict.passing, verdict.idle) == (unlisted, passing, idle)
    assert not expected.judge(suite, entries, whole=False).idle
    lines = list(tables.report("PopTorch", suite, verdict))
    assert lines[2].split()[:2] + lines[2].split()[-1:] == ["a_test.py", "3", "50.0"]
    assert "excluded: 1 of 3 semantic tests (33.3 %), limit: at most 15 %" in lines
    assert "  reads the IR of PopART: a_test.py::test_ir" in lines
    assert ("  because: a_test.py::test_bad[a]" in lines) is not bool(unlisted)


@pytest.mark.parametrize(
    ("passed", "failed", "excluded", "missed"),
    [
        (99, 1, 17, []),  # 17 of 117 are 14.5 %
        (98, 2, 17, ["less than 99 % passed"]),
        (99, 1, 18, ["more than 15 % are excluded"]),
    ],
)
def test_a_whole_run_has_limits(passed: int, failed: int, excluded: int, missed: List[str]) -> None:
    results = [PASSED] * passed + [FAILED] * failed + [EXCLUDED] * excluded + [SKIPPED] * 50
    outcomes = [Outcome(f"test_{number}_{result}", result) for number, result in enumerate(results)]
    suite = {"a_test.py": [*outcomes, *(Outcome(f"test_log_{number}", FAILED) for number in range(30))]}
    entries = [expected.Entry(["*_failed"], "known"), expected.Entry(["*_log_*"], "a log line", is_semantic=False)]
    verdict = expected.judge(suite, entries, whole=True)
    assert (verdict.missed, verdict.good) == (missed, not missed)
    assert expected.judge(suite, entries, whole=False).good
    report = "\n".join(tables.report("PopTorch", suite, verdict))
    assert f"({passed}.0 %), limit: at least 99 %" in report
    assert " %), limit: at most 15 %" in report
    assert report.splitlines()[2].split()[-4:] == [str(failed), "0", "30", f"{passed}.0"]
    assert "counted apart:\n  a log line: a_test.py::test_log_0, " in report
    assert all(f"  {line}" in report for line in missed)


@pytest.mark.parametrize(
    ("ranks", "result"),
    [
        ((PASSED, PASSED), PASSED),
        ((PASSED, SKIPPED), SKIPPED),
        ((SKIPPED, PASSED), SKIPPED),
        ((EXCLUDED, EXCLUDED), EXCLUDED),
        ((SKIPPED, FAILED), FAILED),
        ((PASSED, ""), FAILED),
    ],
)
def test_a_horovod_test_passes_if_it_passes_on_every_rank(ranks: List[str], result: str) -> None:
    assert horovod.combined("test", [Outcome("test", rank) for rank in ranks], "the end").result == result


def test_a_run_in_which_one_suite_selects_a_test_succeeds(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for name in ("poptorch", "horovod"):
        (tmp_path / f"{name}_expected.yaml").touch()
    monkeypatch.setattr(poptorch_conformance, "LISTS", tmp_path)
    monkeypatch.setattr(runs, "run", lambda clone, folder, options: {"a_test.py": [Outcome("test", PASSED)]})
    monkeypatch.setattr(horovod, "run", lambda clone, folder, options: {})
    assert poptorch_conformance.main(["clone", "--horovod-git", "other", "--only", "a_test"]) == 0
    assert poptorch_conformance.main(["--horovod-git", "other", "--only", "a_test"]) == 1
    assert "no test was selected" in capsys.readouterr().out


def test_an_entry_counts_in_its_environment_only(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text(
        "- {tests: a, reason: r, where: 'pytest>=1'}\n- {tests: [b], reason: r, where: 'pytest<1'}\n"
        "- {tests: c, reason: r, where: ['pytest>=1', 'no_such_package>0']}\n"
        "- {tests: [d, e], reason: r, semantic: false}\n"
        "- {tests: f, reason: r, where: [yaml, not no_such_package]}\n"  # its distribution is called PyYAML
    )
    entries = [(entry.patterns, entry.is_semantic) for entry in expected.read_list(path)]
    assert entries == [(["a"], True), (["d", "e"], False), (["f"], True)]
    path.write_text("- {tests: a}\n")
    with pytest.raises(expected.ListError, match="`reason`"):
        expected.read_list(path)


@pytest.fixture
def clone(processes: None, tmp_path: Path) -> Path:
    files: Dict[str, str] = {
        "tests/conftest.py": """
            def pytest_addoption(parser):
                parser.addoption("--extended-tests", action="store_true")
            """,
        "tests/first_test.py": """
            import os
            import poptorch
            def test_good(): assert poptorch
            def test_bad(): assert False
            def test_end(): os._exit(3)
            def test_interrupt(): raise KeyboardInterrupt
            def test_after(): pass
            def test_ir(): print(poptorch.model._debugGetPopartIR())
            """,
        "tests/gnn/test_second.py": "import no_such_library",
        "tests/gnn/test_third.py": "import json.no_such_module",
        "poptorch_geometric/python/__init__.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "clone" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    committed = ["-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "x"]
    for command in (["init", "-q"], ["add", "."], committed, ["clone", "-q", "--bare", ".", "../bare"]):
        subprocess.run(["git", *command], cwd=tmp_path / "clone", check=True)
    return tmp_path / "bare"


def test_the_tests_of_a_clone_run_in_child_processes(clone: Path, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    names = [f"first_test.py::test_{name}" for name in ("bad", "end", "interrupt")]
    listed = {"tests": [*names, "*test_third.py::(collection)"], "reason": "known"}
    (tmp_path / "poptorch_expected.yaml").write_text(json.dumps([listed]))
    monkeypatch.setattr(poptorch_conformance, "LISTS", tmp_path)
    sdk = tmp_path / "sdk" / "poptorch"  # without torch, whose import takes seconds
    sdk.mkdir(parents=True)
    (sdk / "__init__.py").touch()
    (sdk / "poptorch_core.py").touch()
    monkeypatch.setattr(runs, "SDK", sdk.parent)
    monkeypatch.setattr(runs, "LIBRARIES", ("json", "no_such_library"))
    assert poptorch_conformance.main([str(clone), "--show"]) == 1
    output = capfd.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if "_" in line.split("  ")[0]}
    assert rows["first_test.py"] == ["6", "0", "1", "5", "2", "3", "0", "0", "40.0"]
    assert rows["gnn/test_third.py"] == ["1", "0", "0", "1", "0", "1", "0", "0", "0.0"]  # json is installed
    assert "the library no_such_library is not installed: gnn/test_second.py" in output
    assert "the process ended: 3" in output
    assert "KeyboardInterrupt" in output
    assert "less than 99 % passed" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give GIT_DIR"),
        (["/no/such/folder"], "/no/such/folder: no such folder"),
        (["/", "-j", "0"], "are positive"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: List[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert poptorch_conformance.main(arguments) == 2
    error = capfd.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_folder_is_extracted_although_other_objects_are_missing(clone: Path, tmp_path: Path, processes: None) -> None:
    name = "HEAD:poptorch_geometric/python/__init__.py"
    blob = subprocess.check_output(["git", "rev-parse", name], cwd=clone, text=True)
    (clone / "objects" / blob[:2] / blob[2:].strip()).unlink()
    extract(clone, ["tests/gnn"], tmp_path / "copy")
    assert (tmp_path / "copy/tests/gnn/test_third.py").read_text() == "import json.no_such_module"
    with pytest.raises(CloneError, match=str(tmp_path)):
        extract(tmp_path, ["tests"], tmp_path)


OPTIONS = """
  registerSetter(bool_options, "use_model",
                 [&](bool value) {});
  registerSetter(
      uint64_options, "gradient_accumulation",
      [&](std::uint64_t value) {});
  registerSetter(container_options, "engineOptions", [&](const auto &p) {});
#define ADD_POPART_BOOL_OPTION(name) registerSetter(bool_options, #name, [&](bool value) {})
  ADD_POPART_ENUM_OPTION(autoRecomputation, RecomputationType);
  ADD_POPART_DOUBLE_OPTION(outlineThreshold);
  if (location_tensor == "location_weight") {}
  if (opt == "onChip") {}
"""
OPERATORS = """
TORCH_LIBRARY(poptorch, m) {
  m.def(OP_WITHOUT_OUTPUTS(
      "begin_ipu_block(int stage_id, "
      "int ipu_id) -> ()"));
  m.def("nop(Tensor self) -> Tensor");
}

TORCH_LIBRARY_IMPL(poptorch, CPU, m) {
  m.def("other() -> ()");
}
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FRONT_END_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FRONT_END_FOLDER", str(tmp_path))
    monkeypatch.setattr(Device, "_is_broken", False)


def test_options_have_the_names_and_types_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "source.cpp").write_text(OPTIONS)
    given = {"use_model": True, "gradient_accumulation": 2, "autoRecomputation": 1, "outlineThreshold": 1.0}
    given.update(engineOptions={"a": "b"}, location_weight={"onChip": 1}, ipuof_configs={})
    options = session_options.SessionOptions(tmp_path / "source.cpp")
    options.check(given)
    for wrong in (
        {"use_model": 1},
        {"unknown": True},
        {"gradient_accumulation": 2.0},
        {"location_weight": {"offChip": 1}},
    ):
        with pytest.raises(ValueError, match="(?i)unknown"):
            options.check(wrong)
    (tmp_path / "source.cpp").write_text(OPERATORS)
    schemas = session_options.operators(tmp_path / "source.cpp")
    assert schemas == ["begin_ipu_block(int stage_id, int ipu_id) -> ()", "nop(Tensor self) -> Tensor"]


def test_a_device_has_one_holder_and_works_after_the_reset_of_a_broken_partition(monkeypatch: Any) -> None:
    first, second = Device(0), Device(0)
    first.attach()
    with pytest.raises(device.Error, match="Failed to acquire device Id 0"):
        second.attach()
    first.detach()
    second.attach()
    with pytest.raises(device.Error, match="Already attached"):
        second.attach()
    second.detach()
    with pytest.raises(device.Error, match="already been detached"):
        second.detach()
    monkeypatch.setenv("FRONT_END_FAULT", "partition")
    for access in (lambda: Device.fail("instance 1 is lost"), Device(0).attach):
        with pytest.raises(device.RecoverableError) as raised:
            access()
        assert raised.value.recovery_action == "PARTITION_RESET"
    device.broken_partition().unlink()
    attached = Device(0)
    attached.attach()
    attached.detach()


@pytest.mark.parametrize("fault", ["raise", "unusable", "unrecoverable", "hang"])
def test_the_loss_of_a_peer_ends_the_call_as_the_fault_says(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONT_END_FAULT", fault)
    monkeypatch.setenv("FRONT_END_RECOVERY_ACTION", "PARTITION_RESET")
    for name in ("Error", "RecoverableError", "UnrecoverableError"):  # PopTorch exports those of its core
        monkeypatch.setattr(f"poptorch.{name}", getattr(device, name))
    with pytest.raises(device.Error) as raised:
        Device.fail("instance 1 is lost")
    assert caused_by_peer(raised.value)
    assert getattr(raised.value, "recovery_action", "") == ("PARTITION_RESET" if fault in ("raise", "unusable") else "")
    if fault in ("raise", "hang"):
        attached = Device(0)
        attached.attach()
        attached.detach()
    else:
        with pytest.raises(device.Error, match="error state"):
            Device(0).attach()


def test_sums_are_in_the_order_of_ranks_and_end_with_a_dead_peer(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("EMULATED_POD_RENDEZVOUS", "host:1")
    place = tmp_path / "host-1-training-0"
    place.mkdir()
    for step, value in ((1, 0.0), (2, 3.0)):
        torch.save([torch.full((1,), value)], place / f"1-{step}")
    peers = Peers(0, 2, "training")
    peers.load()
    assert peers.sum([torch.full((1,), 2.0)]) == [torch.full((1,), 5.0)]
    assert not (place / "0-1").exists(), "the sum before remains"
    monkeypatch.setenv("EMULATED_POD_RENDEZVOUS", "host:2")
    place = tmp_path / "host-2-training-0"
    place.mkdir()
    (place / "1.pid").write_text("999999999")
    with pytest.raises(device.RecoverableError, match="instance 1 is lost"):
        Peers(0, 2, "training").load()


@pytest.mark.parametrize(
    ("number", "torch_class"),
    [(1, torch.optim.SGD), (2, torch.optim.Adam), (3, torch.optim.AdamW), (5, torch.optim.RMSprop)],
)
def test_optimizers_update_as_those_of_torch(number: int, torch_class: Any) -> None:
    own, other = torch.tensor([1.0, -2.0]), torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    settings: Dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01}
    settings.update({"momentum": 0.9} if number in (1, 5) else {"betas": (0.9, 0.99)})
    settings.update({} if number == 1 else {"eps": 1e-6})
    expected = torch_class([other], **settings)
    group = {"learningRate": 0.1, "weightDecay": 0.01, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
    group.update({"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "alpha": 0.99})
    values = {
        "optimizer_type": number,
        "useTfVariant": False,
        "defaults": {"lossScaling": (1.0, True)},
        "groups": [{name: (value, False) for name, value in group.items()}],
    }
    optimizer = DeviceOptimizer(values, {0: ["w"]}, {"w": own})
    for gradient in (torch.tensor([0.5, 1.0]), torch.tensor([-1.0, 2.0])):
        other.grad = gradient.clone()
        expected.step()
        optimizer.step({"w": own}, {"w": gradient})
    torch.testing.assert_close(own, other.detach())


def test_mpi_is_initialized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    popdist = _popdist()
    with pytest.raises(RuntimeError, match="mpirun"):
        popdist.init()
    monkeypatch.setenv("FRONT_END_MPI", "1")
    popdist.init()
    with pytest.raises(RuntimeError, match="more than once"):
        popdist.init()
    popdist.finalizeBackend()
    with pytest.raises(RuntimeError, match="MPI_FINALIZE"):
        popdist.init()


def _popdist() -> Any:
    """The module, which is not the `popdist` of the emulated SDK."""
    path = Path(str(real_front_end.__file__)).parent / "front_end" / "popdist" / "__init__.py"
    return module_of(path, "front_end_popdist")


def test_a_row_counts_attaches_bytes_and_the_difference_of_weights(tmp_path: Path) -> None:
    run = _run(tmp_path, losses=[3.0, 2.0, 1.0])
    events = [{"event": "attach", "bytes": 0}, {"event": "execute", "bytes": 1000}, {"event": "attach", "bytes": 0}]
    (run.state / "log-1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    line = real_front_end.line("default", front_end_rows.Outcome(run, "", 2e-5))
    assert line.split()[1:] == ["0", "yes", "2e-05", "2", "1,000", "none"]
    first, second = (_run(tmp_path / name, losses=[]) for name in ("a", "b"))
    _write_weights(first, 4, [3.0, 4.5])
    _write_weights(second, 4, [3.0, 4.0])
    assert front_end_runs.difference(first, second) == pytest.approx(0.1)
    assert front_end_runs.difference(first, second, update=8) is None


def test_each_difference_of_session_options_needs_an_explanation() -> None:
    explained: Dict[str, Any] = dict.fromkeys(compare_options.EXPLAINED, 1)
    assert compare_options.report({**explained, "random_seed": 42}, {"random_seed": 42}) == 0
    assert compare_options.report({**explained, "random_seed": 42}, {"random_seed": 43}) == 1
    assert compare_options.report(explained, {"output_mode": 1}) == 1, "the explanation has no difference any more"


def test_options_are_kept_with_those_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path, losses=[])
    monkeypatch.setenv("FRONT_END_FOLDER", str(run.state))
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"opt.a": "1"}')
    device.keep_options({"patterns": {"TiedGather": True}, "engineOptions": {"opt.a": "0", "opt.b": "2"}}, {}, True)
    kept = {"patterns.TiedGather": True, "engineOptions.opt.a": "1", "engineOptions.opt.b": "2"}
    assert run.options() == kept


def _run(folder: Path, losses: Any) -> front_end_runs.Run:
    (folder / "run").mkdir(parents=True)
    (folder / "state").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps({"loss": loss}) + "\n" for loss in losses))
    return front_end_runs.Run(0, folder / "run", folder / "state", "")


def _write_weights(run: front_end_runs.Run, update: int, values: Any) -> None:
    folder = run.folder / "checkpoints" / f"update-{update:08d}"
    folder.mkdir(parents=True)
    with new_file(folder / "weights.safetensors") as file:
        write_tensors(file, {"w": torch.tensor(values)}, {})
