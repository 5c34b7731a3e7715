"""MosaicML Streaming on the samples of bench_streaming.py, which runs this with an interpreter that has it.

bench_streaming_peer.py write FOLDER URL SHARD_BYTES
bench_streaming_peer.py read URL CACHE WINDOW FIRST SAMPLES LIMIT
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from streaming import MDSWriter, StreamingDataset  # mosaicml-streaming


def write(folder: str, url: str, shard_bytes: str) -> None:
    """Write the files of a folder as shards."""
    with MDSWriter(out=url, columns={"image": "bytes"}, size_limit=int(shard_bytes), hashes=["xxh3_128"]) as output:
        for file in sorted(Path(folder).iterdir()):
            output.write({"image": file.read_bytes()})


def read(url: str, cache: str, window: str, first: str, samples: str, limit: str) -> Any:
    """Read the samples of an epoch from position `first` on; return their number, seconds, and when the first came."""
    began = time.perf_counter()
    data = StreamingDataset(
        remote=url,
        local=cache,
        shuffle=True,
        shuffle_seed=42,
        shuffle_algo="py1br",
        shuffle_block_size=int(window) * int(samples) // 20,
        batch_size=32,
        validate_hash="xxh3_128",
    )
    if int(first):
        data.load_state_dict(
            {
                "epoch": 0,
                "sample_in_epoch": int(first),
                "num_canonical_nodes": data.num_canonical_nodes or 1,
                "shuffle_seed": 42,
                "initial_physical_nodes": 1,
            }
        )
    count, first_at = 0, 0.0
    for _ in data:
        first_at = first_at or time.time()
        count += 1
        if count >= int(limit):
            break
    return count, time.perf_counter() - began, first_at


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    if command == "write":
        write(*words)
    else:
        print(json.dumps(read(*words)))
        sys.stdout.flush()
