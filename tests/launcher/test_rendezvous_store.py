"""The store at which launched instances meet, on the address and the port that were chosen before it ran."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed
from bounded import wait_until

from raypod.launcher import rendezvous_store


def answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False


def test_the_store_takes_over_the_port_that_was_kept_for_it_and_answers_on_one_address() -> None:
    if "master_listen_fd" not in (torch.distributed.TCPStore.__init__.__doc__ or ""):
        pytest.skip("this torch listens on all addresses")
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        store = subprocess.Popen([sys.executable, str(Path(rendezvous_store.__file__)), "127.0.0.1", str(port)])
        try:
            assert wait_until(lambda: answers("127.0.0.1", port), 60)
            assert not answers("127.0.0.2", port)
        finally:
            store.terminate()
            store.wait(10)
