"""The commands of the pages that launch programs, in one Ray cluster: not every launch starts its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.repository.test_documented_blocks import LAUNCHES
from tests.support.documented import execute
from tests.support.ray_cluster import ray_cluster


@pytest.mark.skipif(sys.version_info < (3, 9), reason="the same code as on newer versions")
@pytest.mark.filterwarnings("ignore")  # Ray's own code leaves sockets and files to the garbage collector
def test_the_commands_of_the_pages_that_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_cluster(("",), num_cpus=4) as started:
        for number, page in enumerate(LAUNCHES):
            (tmp_path / str(number)).mkdir()
            monkeypatch.chdir(tmp_path / str(number))
            execute(page, started.cluster.address)
