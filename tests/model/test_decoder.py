from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypod.model.decoder import SIZES, Attention, Decoder, DecoderSize

SMALL = DecoderSize(2, 2, 8)


def decoder(length: int = 6, dropout: float = 0.0) -> Decoder:
    torch.manual_seed(0)
    return Decoder(SMALL, 11, length, dropout).eval()


def test_a_token_changes_no_logits_before_it() -> None:
    tokens = torch.randint(0, 11, (3, 6))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = decoder()(tokens), decoder()(changed)
    assert before.shape == (3, 6, 11)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(dim=2).any()


def test_tokens_may_be_int32_and_sequences_shorter() -> None:
    tokens = torch.randint(0, 11, (3, 6))
    torch.testing.assert_close(decoder()(tokens[:, :3].int()), decoder()(tokens)[:, :3])


def test_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    attention, hidden = Attention(SMALL, 0.0), torch.randn(3, 5, 8)
    query, key, value = (each.reshape(3, 5, 2, 4).transpose(1, 2) for each in attention.qkv(hidden).split(8, dim=2))
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    expected = attention.out(mixed.transpose(1, 2).reshape(3, 5, 8))
    torch.testing.assert_close(attention(hidden), expected)


def test_the_initial_loss_is_that_of_a_guess_and_residual_branches_are_scaled() -> None:
    torch.manual_seed(0)
    network = Decoder(SIZES["tiny"], 256, 32)
    tokens = torch.randint(0, 256, (4, 33))
    loss = functional.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)
    for name, parameter in network.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm" in name and "weight" in name)))
        else:
            is_residual = name.endswith(("attention.out.weight", "down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / (math.sqrt(4) if is_residual else 1), rel=0.1)


def test_dropout_is_active_in_training_only() -> None:
    network, tokens = decoder(dropout=0.5), torch.randint(0, 11, (3, 6))
    assert torch.equal(network(tokens), network(tokens))
    network.train()
    assert not torch.equal(network(tokens), network(tokens))


def test_the_sizes_are_those_of_the_help_text() -> None:
    # GPT-2 has 124 million parameters, of which its output layer shares 50,257 x 768 with the embedding.
    shapes = [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,), (3072, 768), (768,), *[(768,)] * 4]
    expected = 12 * sum(math.prod(shape) for shape in shapes) + 2 * 768 + (50257 * 2 + 1024) * 768
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.init, "normal_", lambda tensor, **_: tensor)  # drawing 163 million numbers takes seconds
        network = Decoder(SIZES["gpt2"], 50257, 1024)
    assert sum(parameter.numel() for parameter in network.parameters()) == expected
    assert [(size.layers, size.width) for size in SIZES.values()] == [(2, 128), (6, 384), (12, 768)]
