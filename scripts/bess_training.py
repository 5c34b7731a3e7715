"""Train a small knowledge graph embedding with bess-kge on generated triples: `python scripts/bess_training.py`.

The entities are sharded over 4 replicas and exchanged by PopART's collectives, the negative scores are L1 distances of
the operator of poptorch-experimental-addons, and the pattern of bess-kge's library is on.
"""

from __future__ import annotations

import numpy as np
import poptorch
import torch
from besskge.batch_sampler import RigidShardedBatchSampler
from besskge.bess import EmbeddingMovingBessKGE
from besskge.dataset import KGDataset
from besskge.loss import LogSigmoidLoss
from besskge.negative_sampler import RandomShardedNegativeSampler
from besskge.scoring import TransE
from besskge.sharding import PartitionedTripleSet, Sharding

SEED, SHARDS, ENTITIES, RELATIONS, TRIPLES, EPOCHS = 0, 4, 200, 5, 4000, 8


def generated() -> KGDataset:
    """Return a graph whose relation r leads from each entity to the one 7 x r further."""
    random = np.random.default_rng(SEED)
    heads, relations = random.integers(ENTITIES, size=TRIPLES), random.integers(RELATIONS, size=TRIPLES)
    triples = np.stack([heads, relations, (heads + 7 * relations) % ENTITIES], axis=1).astype(np.int32)
    return KGDataset(
        n_entity=ENTITIES,
        n_relation_type=RELATIONS,
        entity_dict=None,
        relation_dict=None,
        type_offsets=None,
        triples={"train": triples},
        original_triple_ids={"train": np.arange(TRIPLES)},
        neg_heads=None,
        neg_tails=None,
    )


def main() -> None:
    """Train and print the loss of each epoch."""
    torch.manual_seed(SEED)
    sharding = Sharding.create(ENTITIES, SHARDS, seed=SEED)
    triples = PartitionedTripleSet.create_from_dataset(generated(), "train", sharding, partition_mode="ht_shardpair")
    negatives = RandomShardedNegativeSampler(
        n_negative=8,
        sharding=sharding,
        seed=SEED,
        corruption_scheme="t",
        local_sampling=False,
        flat_negative_format=True,
    )
    sampler = RigidShardedBatchSampler(
        partitioned_triple_set=triples, negative_sampler=negatives, shard_bs=64, batches_per_step=2, seed=SEED
    )
    options = poptorch.Options().deviceIterations(2).showCompilationProgressBar(False)
    options.replication_factor = SHARDS
    options._Popart.setPatterns({"RemoveAllReducePattern": True})
    score = TransE(
        negative_sample_sharing=True, scoring_norm=1, sharding=sharding, n_relation_type=RELATIONS, embedding_size=32
    )
    loss = LogSigmoidLoss(margin=6.0, negative_adversarial_sampling=True)
    model = EmbeddingMovingBessKGE(negative_sampler=negatives, score_fn=score, loss_fn=loss)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.02)
    training = poptorch.trainingModel(model, options, optimizer)
    training.entity_embedding.replicaGrouping(
        poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup
    )
    loader = sampler.get_dataloader(options=options, shuffle=True)
    for epoch in range(EPOCHS):
        losses = []
        for batch in loader:
            mask = batch.pop("triple_mask")
            result = training(**{name: value.flatten(end_dim=1) for name, value in batch.items()})
            losses.append(float(result["loss"].sum()) / mask[-1].numel())
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}", flush=True)


if __name__ == "__main__":
    main()
