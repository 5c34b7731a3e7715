"""The core for PopTorch's front end, without a clone: `scripts/conformance/real_front_end.py` runs raypod on it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from conformance import compare_options, front_end_rows, front_end_runs, real_front_end
from conformance.front_end import device, session_options
from conformance.front_end.device import Device, Peers
from conformance.front_end.optimizers import DeviceOptimizer

from raypod.runtime.worker.collectives import caused_by_peer
from raypod.system.files import new_file
from raypod.training.checkpoint.tensors import write_tensors
from tests.support.modules import module_of

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


def test_the_sum_of_instances_is_in_the_order_of_ranks_and_ends_with_a_dead_peer(
    tmp_path: Path, monkeypatch: Any
) -> None:
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
