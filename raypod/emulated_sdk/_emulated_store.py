"""The store at which a pod's processes meet, as torch knows stores: Gloo lays its wires by it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, List, Optional, Union

import torch.distributed
from _emulated_store_client import StoreClient
from _emulated_store_protocol import PeerFailed

_c10d: Any = torch.distributed  # whose stubs lack half of what its documentation names


class Store(_c10d.Store):  # type: ignore[misc]
    """What all versions of torch ask of a `torch.distributed.Store`, over one `StoreClient`.

    C++ keeps only its own half of it alive: whoever hands it to a process group keeps it as long as the group.
    Every method raises PeerFailed if the store is gone.
    """

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self.client = client

    def set(self, key: str, value: Union[str, bytes]) -> None:
        """Keep a value."""
        self.client.set(key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there; PeerFailed if that takes longer than `timeout`."""
        value = self.client.get(key)
        if value is None:
            self.wait([key])
            value = self.client.get(key)
        return value or b""

    def add(self, key: str, amount: int) -> int:
        """Add to a number; the sum."""
        return self.client.add(key, amount)

    def check(self, keys: List[str]) -> bool:
        """Whether all keys are there."""
        return self.client.has(keys)

    def compare_set(self, key: str, expected: Union[str, bytes], desired: Union[str, bytes]) -> bytes:
        """Keep `desired` if the value is `expected`; the value then."""
        return self.client.swap(key, _bytes(expected), _bytes(desired))

    def wait(self, keys: List[str], timeout: Optional[timedelta] = None) -> None:
        """Return once all keys are there; PeerFailed if that takes longer than `timeout`."""
        within_s = (self.timeout if timeout is None else timeout).total_seconds()
        missing = self.client.wait(keys, within_s)
        if missing:
            told = "gave up waiting" if self.client.given_up.is_set() else f"waited {within_s:g} s"
            raise PeerFailed(f"{told} for {', '.join(missing)} in the store")

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return self.client.delete(key)

    def num_keys(self) -> int:
        """How many keys there are."""
        return self.client.count()

    def clone(self) -> Store:
        """Itself: several threads may use it."""
        return self


def _bytes(value: Union[str, bytes]) -> bytes:
    return value.encode() if isinstance(value, str) else value
