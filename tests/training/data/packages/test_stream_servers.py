"""Shards on a real S3 server, which is slow or loses its connections."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import pytest
import torch

from raypod.plan.plan import Plan
from raypod.system.remote.store import Store
from raypod.training import data as datasets
from raypod.training.data import packing
from raypod.training.data.feed import Feed
from raypod.training.data.images import ImageSource
from tests.support import image_folders
from tests.support.storage_servers import BUCKET, Proxy, create_bucket, s3_server, use_s3


def feed_of(plan: Plan, pause: Any = None) -> Feed:
    source = ImageSource(plan.config, datasets.load(plan.config))
    return Feed(plan, plan.placement.instances[0], source, pause or (lambda seconds: None))


def fed(feed: Feed, plan: Plan) -> List[torch.Tensor]:
    try:
        return [batch[0] for segment in plan.segments() for batch in feed.calls(segment)]
    finally:
        feed.close()


def test_shards_of_an_s3_server_survive_an_outage(make: Any, processes: None, tmp_path: Path, monkeypatch: Any) -> None:
    server = s3_server()
    server.start()
    create_bucket(server.port)
    proxy = Proxy(server.port)
    use_s3(monkeypatch, proxy.port)
    packed, url = tmp_path / "packed", f"s3://{BUCKET}/images"
    packing.pack(image_folders.write(tmp_path / "images"), packed, 1, lambda written, total: None)
    for file in packed.rglob("*"):
        if file.is_file():
            Store(url).write_bytes(str(file.relative_to(packed)), file.read_bytes())
    sizes: Any = {"training": {"batch_size": 1, "epochs": 1}, "pod": {"replicas": 2, "num_instances": 1}}
    data = {"dataset": "imagefolder", "image_size": 16, "shuffle_window": 3, "cache_dir": str(tmp_path / "cache")}
    local = make(data={**data, "data_dir": str(packed)}, **sizes)
    plan = make(data={**data, "data_dir": url}, **sizes)
    feed = feed_of(plan, lambda seconds: proxy.mend())
    proxy.cut()
    try:
        with pytest.warns(RuntimeWarning, match=rf"samples cannot be read and are read again .*{url}/train/"):
            found = fed(feed, plan)
    finally:
        proxy.stop()
        server.kill()
    expected = fed(feed_of(local), local)
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected))
