"""The arithmetic of a training on the inline fleet: equal to plain torch, for every size and precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import torch
from poptorch import device_mode
from torch.nn import functional

from raypod import train
from raypod.events import RunEnded, UpdateDone
from raypod.plan.learning_rate import learning_rate
from raypod.plan.plan import Plan
from raypod.runtime.workers.inline import InlineFleet
from raypod.training import data as datasets
from raypod.training.checkpoint import writer
from raypod.training.data.order import epoch_order
from raypod.training.data.transforms import gather
from raypod.training.models import networks
from tests.support.scripted_runs import events_of, of, only

INLINE = {"run": {"fleet": "inline", "device": "emulated"}}


def final_weights(plan: Plan) -> Dict[str, torch.Tensor]:
    return writer.load_checkpoint(Path(plan.run_dir) / "checkpoints" / f"update-{plan.total_updates:08d}")["weights"]


def sha256(plan: Plan) -> str:
    return only(events_of(plan, InlineFleet(plan)), RunEnded).weights_sha256


def plain_torch_loop(plan: Plan) -> Dict[str, torch.Tensor]:
    """Run the same training in plain torch: gradients averaged over replicas, statistics of replica 0."""
    geometry, config = plan.geometry, plan.config
    splits, order = datasets.load(config), epoch_order(config.training.seed, 0, plan.dataset_size.train_samples)
    torch.manual_seed(config.training.seed)
    network = networks.build_model(config, 1, 8, 10).train()
    decayed = [parameter for parameter in network.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in network.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": config.training.weight_decay}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=config.training.momentum)
    statistics = {name: value.clone() for name, value in network.named_buffers()}
    for update in range(plan.total_updates):
        first_of_call = update // geometry.device_iterations * geometry.device_iterations
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, first_of_call, plan.total_updates)
        optimizer.zero_grad()
        first = update * geometry.global_batch_size
        samples = order[first : first + geometry.global_batch_size]
        for number, micro_batch in enumerate(np.split(samples, len(samples) // geometry.micro_batch_size)):
            images, labels = gather(splits.train, micro_batch, splits.augmentation, (config.training.seed, 0))
            inputs = torch.from_numpy(images).float() / (255 * splits.std[0]) - splits.mean[0] / splits.std[0]
            if number % geometry.total_replicas == 0:  # global replica 0, whose statistics are saved
                network.load_state_dict(statistics, strict=False)
            loss = functional.cross_entropy(network(inputs), torch.from_numpy(labels))
            if number % geometry.total_replicas == 0:
                statistics = {name: value.clone() for name, value in network.named_buffers()}
            (loss / (geometry.total_replicas * geometry.gradient_accumulation)).backward()
        optimizer.step()
    network.load_state_dict(statistics, strict=False)
    return dict(network.state_dict())


@pytest.mark.parametrize(("replicas", "accumulation", "iterations"), [(1, 1, 1), (1, 3, 1), (4, 2, 2)])
def test_it_equals_a_plain_loop(make: Callable[..., Plan], replicas: int, accumulation: int, iterations: int) -> None:
    sizes = {"gradient_accumulation": accumulation, "device_iterations": iterations, "updates": 4}
    plan = make(training=sizes, pod={"replicas": replicas}, **INLINE)
    events_of(plan, InlineFleet(plan))
    ours, expected = final_weights(plan), plain_torch_loop(plan)
    assert list(ours) == list(expected)
    for name in expected:
        if "num_batches_tracked" not in name:  # integer buffers are constants on the IPU
            torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-5)


def test_the_weights_depend_on_the_seed_and_not_on_device_iterations_or_eight_bit_io(make: Callable[..., Plan]) -> None:
    def digest(eight_bit_io: bool = False, **training: int) -> str:
        flat = {"lr_schedule": "constant", "warmup_updates": 0, "updates": 4, **training}
        return sha256(make(data={"eight_bit_io": eight_bit_io}, training=flat, **INLINE))

    first = digest(seed=1)
    changed = [digest(seed=1), digest(True, seed=1), digest(seed=1, device_iterations=2)]
    assert [*changed, digest(seed=1, device_iterations=4)] == [first] * 4
    assert digest(seed=2) != first


def test_images_are_resized_on_the_device_in_half_precision(make: Callable[..., Plan]) -> None:
    data = {"eight_bit_io": True, "image_size": 16}
    plan = make(data=data, training={"precision": "16.16", "updates": 2}, **INLINE)
    losses = [event.loss for event in of(events_of(plan, InlineFleet(plan)), UpdateDone)]
    assert losses == pytest.approx([2.3, 2.3], abs=0.4)


IMAGES = ["--dataset", "synthetic", "--samples", "32", "--image", "1x8x8", "--model"]
TEXT = ["--task", "language-model", "--sequence-length", "8", "--optimizer", "adamw", "--text"]


def weights_of(folder: Path, *flags: str) -> str:
    inline = ["--fleet", "inline", "--device", "emulated", "--replicas", "2", "--batch-size", "2", "--updates", "1"]
    assert train.main([*inline, *flags, "--run-dir", str(folder)]) == 0
    summary: Dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return str(summary["weights_sha256"])


def uncast(mode: Any, func: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """Call a layer's function with its operands as they are: torch converts those of different dtypes to float32."""
    return func(*args, **kwargs)


@pytest.mark.parametrize("flags", [[*IMAGES, "resnet8", "--norm", "frozen"], [*IMAGES, "vit_tiny"], TEXT])
def test_layers_that_cast_their_weights_and_those_that_do_not_train_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: List[str]
) -> None:
    if flags is TEXT:
        (tmp_path / "text.txt").write_text("one two three " * 40)
        flags = [*flags, str(tmp_path / "text.txt")]
    flags = [*flags, "--precision", "16.32"]
    with caplog.at_level("WARNING", "poptorch"):
        cast = weights_of(tmp_path / "cast", *flags, "--strict")
    assert "operands in half and in float32" not in caplog.text
    layers = device_mode._functions(device_mode._LAYER_NAMES)
    monkeypatch.setattr(device_mode, "_HANDLERS", {**device_mode._HANDLERS, **dict.fromkeys(layers, uncast)})
    monkeypatch.setattr(device_mode, "_weights_like_input", uncast)
    assert weights_of(tmp_path / "uncast", *flags) == cast
