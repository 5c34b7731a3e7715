"""A server in this process in place of one on another host, with requests that can be lost or damaged."""

from __future__ import annotations

import pickle
from typing import Any, Callable, List, Optional, Tuple

Request = Tuple[str, Tuple[Any, ...]]
Fault = Callable[[int, Request], Optional[Request]]  # from the number of a request and the request to what arrives


def unchanged(number: int, request: Request) -> Request:
    """Return the request: no fault."""
    return request


class DirectServer:
    """Calls the methods of `served` at once. `methods` are those that were requested; `fault` can change requests."""

    def __init__(self, served: Any, fault: Fault = unchanged) -> None:
        self._served, self._fault = served, fault
        self.methods: List[str] = []

    def request(self, method: str, *arguments: Any) -> Any:
        """See `Server.request`."""
        self.methods.append(method)
        arrived = self._fault(len(self.methods), (method, pickle.loads(pickle.dumps(arguments))))
        if arrived is None:
            return None, None
        try:
            return getattr(self._served, arrived[0])(*arrived[1]), None
        except Exception as error:  # noqa: BLE001 - the caller gets it from `result`
            return None, error

    def result(self, handle: Any, timeout_s: float) -> Any:
        """See `Server.result`."""
        value, error = handle
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """See `Server.close`."""
