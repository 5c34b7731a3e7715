"""Fine-tune a small BERT or ViT with optimum-graphcore's `IPUTrainer`, from random weights on generated data.

`python scripts/optimum_finetune.py bert|vit [--steps N] [--ipus N]`, alone or under `raypod launch`.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any, Dict, Tuple

import torch
from optimum.graphcore import IPUConfig, IPUTrainer, IPUTrainingArguments
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 2}
TOKENS, WORDS, SIDE = 16, 64, 32


class Generated(torch.utils.data.Dataset):
    """`count` samples of two classes that a linear model can separate."""

    def __init__(self, kind: str, count: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.labels = torch.arange(count) % 2
        if kind == "bert":  # each class has words of its own
            words = torch.randint(0, WORDS // 2, (count, TOKENS), generator=random)
            self.inputs = {"input_ids": words + self.labels[:, None] * (WORDS // 2)}
            self.inputs["attention_mask"] = torch.ones(count, TOKENS, dtype=torch.long)
            self.inputs["token_type_ids"] = torch.zeros(count, TOKENS, dtype=torch.long)
        else:  # each class has a brightness of its own
            noise = torch.randn(count, 3, SIDE, SIDE, generator=random)
            self.inputs = {"pixel_values": noise + self.labels[:, None, None, None] * 2.0 - 1.0}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        # IPUTrainer samples from the whole data set; an instance's loader adds the start of its share to the indices.
        index %= len(self)
        return {"labels": self.labels[index], **{name: value[index] for name, value in self.inputs.items()}}


def model_of(kind: str) -> Any:
    """Return the model with random weights."""
    torch.manual_seed(0)
    if kind == "bert":
        return BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=TOKENS, **SMALL))
    return ViTForImageClassification(ViTConfig(image_size=SIDE, patch_size=8, **SMALL))


def accuracy(prediction: Tuple[Any, Any]) -> Dict[str, float]:
    """Return the share of correct predictions."""
    logits, labels = prediction
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("bert", "vit"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ipus", type=int, default=1, choices=(1, 2), help="IPUs per replica")
    flags = parser.parse_args()
    config = IPUConfig(
        layers_per_ipu=[2] if flags.ipus == 1 else [1, 1],
        ipus_per_replica=flags.ipus,
        gradient_accumulation_steps=4,
        enable_half_partials=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = IPUTrainingArguments(
            output_dir=folder,
            max_steps=flags.steps,
            learning_rate=2e-3,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            logging_steps=max(1, flags.steps // 5),
            save_strategy="no",
            report_to=[],
            fp32=True,
        )
        trainer = IPUTrainer(
            model=model_of(flags.model),
            ipu_config=config,
            args=arguments,
            train_dataset=Generated(flags.model, 128),
            eval_dataset=Generated(flags.model, 32),
            data_collator=default_data_collator,
            compute_metrics=accuracy,
            force_to_pipelined=True,
        )
        trainer.train()
        print(trainer.evaluate(), flush=True)


if __name__ == "__main__":
    main()
