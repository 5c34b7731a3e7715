"""A decoder whose embedding, output layer and loss are computed in parts, or share their weights."""

from __future__ import annotations

from typing import Any, Dict

import poptorch
import pytest
import torch

from raypod.api.planning import plan_from
from raypod.errors import ConfigError
from raypod.training.models import program
from raypod.training.models.decoder import SIZES, Decoder
from raypod.training.models.pipeline_table import inspect_pipeline
from raypod.training.tasks.registry import facts_of, task_of

GENERATED = {"name": "language-model", "generated_windows": 64, "vocabulary": 90, "sequence_length": 16}


def plan(task: Dict[str, Any], **sections: Any) -> Any:
    return plan_from({"task": {**GENERATED, **task}, **sections}, "the test", is_dry=True)


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(1)
    return Decoder(SIZES["tiny"], 96, 16, **options)


def test_an_embedding_and_an_output_layer_in_parts_have_the_bits_of_whole_ones() -> None:
    tokens = torch.arange(32).view(2, 16) * 3
    results = []
    for parts in (1, 4):
        network = decoder(parts=parts)
        program.split_products(network)
        logits = network(tokens)
        logits.square().sum().backward()
        gradients = [network.embedding.tokens.weight.grad, network.head.weight.grad]
        results.append([logits, *gradients])
    for whole, part in zip(*results):
        assert part is not None
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(decoder().embedding.tokens(tokens), decoder(parts=4).embedding.tokens(tokens))


def test_the_output_layer_is_a_serialized_product_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def product(lhs: torch.Tensor, rhs: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append((options["factor"], options["mode"], tuple(rhs.shape)))
        return lhs @ rhs

    monkeypatch.setattr(poptorch, "serializedMatMul", product)
    network = decoder(parts=4)
    program.split_products(network)
    network(torch.zeros(1, 16, dtype=torch.int32))
    assert calls == [(4, poptorch.MatMulSerializationMode.OutputChannels, (128, 96))]


def test_tied_embeddings_are_one_parameter_with_weight_decay() -> None:
    config = plan({"tied_embeddings": True, "serialize": 4}).config
    task = task_of(config)
    network = task.network(task.example(1))
    assert network.head.weight is network.embedding.tokens.weight
    assert network.head.weight.shape == (96, 128)  # 90 tokens, in a multiple of 32
    decayed, others = task.parameter_groups(network, 0.1)
    assert any(each is network.head.weight for each in decayed["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(list(network.parameters()))


def test_the_loss_in_parts_is_the_mean_over_all_tokens() -> None:
    logits, targets = torch.randn(2, 10, 7), torch.randint(0, 7, (2, 10))
    whole = program.mean_loss(logits, targets, None)
    torch.testing.assert_close(program.mean_loss(logits, targets, 4), whole)


def test_generated_windows_are_random_tokens_of_the_seed() -> None:
    config = plan({}).config
    sources = [task_of(config).load() for _ in range(2)]
    assert sources[0].fingerprint == sources[1].fingerprint
    assert (len(sources[0].train), len(sources[0].test)) == (64, 3)
    assert facts_of(config).size.train_samples == 64
    tokens = sources[0].train.text.tokens
    assert 80 < tokens.max() < 90
    for options in ({"text": "."}, {"tokenizer": "x"}):
        with pytest.raises(ConfigError, match="has no effect on --generated-windows"):
            plan(options)
    with pytest.raises(ConfigError, match="--vocabulary 90 has no effect without --generated-windows"):
        plan({"generated_windows": None, "text": "."})


def test_the_estimate_of_a_tied_decoder_in_parts() -> None:
    pod = {"ipus_per_replica": 4, "replicas": 1, "num_instances": 1}
    training = {"layers_per_ipu": "0,1,1,0", "gradient_accumulation": 9, "batch_size": 1, "precision": "16.16"}
    found = []
    for options in ({}, {"serialize": 8, "loss_tokens": 4}):
        task = {"vocabulary": 4096, "tied_embeddings": True, "sequence_length": 32, **options}
        made = plan(task, training=training, pod=pod)
        assert made.pipeline_splits == ("blocks.0", "blocks.1", "norm", "head=0")
        inspected = inspect_pipeline(made, task_of(made.config))
        assert [stage.ipu for stage in inspected.stages] == [0, 1, 2, 3, 0]
        assert sum(stage.parameters for stage in inspected.stages) == sum(
            each.numel() for each in task_of(made.config).network(task_of(made.config).example(1)).parameters()
        )
        found.append(inspected.memory[0].activations)
    assert found[1] < 0.7 * found[0]
