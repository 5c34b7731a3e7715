"""A minimal gRPC client of a Ray cluster's GCS: does it respond, does it accept the token, which hosts are alive.

Ray's own client reports the reason of a refusal only in its log, after 20 s. The token, with which anyone can run
commands on the cluster, is sent only to a process of this user or of root: another user could listen on the port while
Ray does not run. This file needs only Python 3.6: it is sent to hosts that have neither Ray nor raypod, as `python3 -
ADDRESS SECONDS HOST... < gcs.py`, or as `python3 - --drivers ADDRESS < gcs.py`.
"""

import contextlib
import errno
import json
import os
import socket
import ssl
import struct
import sys
import time
from typing import Dict, Iterator, List, NamedTuple, Optional, Set, Tuple, Union

ANSWERED, REFUSED, SILENT, FOREIGN = "answered", "refused", "silent", "foreign"
_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_ALL_NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
_ALL_JOBS = "/ray.rpc.JobInfoGcsService/GetAllJobInfo"
_GET_VALUE = "/ray.rpc.InternalKVGcsService/InternalKVGet"
_OF_RAY = "_ray_internal_"  # begins the namespaces of Ray's own drivers, as of the dashboard
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 4, 6, 7, 8  # RFC 7540, section 6
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_LARGEST_WINDOW = 2**31 - 1
_UNAUTHENTICATED = 16  # grpc.StatusCode
_ALIVE = 0  # GcsNodeInfo.state
_ROOT = 0
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _ANY = 4, 20, 0xFFFFFFFF  # of linux/{netlink,sock_diag,inet_diag}.h
_OTHER_OWNER = "it is a process of uid "
_ACCEPT_POLL_S = 0.01
DRIVERS_S = 10.0  # a loaded head answers slowly


class Answer(NamedTuple):
    state: str
    detail: str
    body: bytes


def check(address: str, token: Optional[str] = None, timeout_s: float = 3.0, only_own: bool = False) -> Answer:
    """Return ANSWERED with the version of Ray in `detail`, REFUSED, or SILENT with the reason in `detail`.

    With a token or `only_own`, it is FOREIGN with the reason if it is no process of this user or of root.
    """
    answer = _call(address, _CHECK_ALIVE, token, timeout_s, only_own=only_own)
    if answer.state != ANSWERED:
        return answer
    texts = [value for number, value in _fields(answer.body) if number == 2]
    version = texts[0].decode(errors="replace") if texts and isinstance(texts[0], bytes) else ""
    return answer._replace(detail=version)


def alive_addresses(address: str, token: Optional[str] = None, timeout_s: float = 3.0) -> List[str]:
    """Return the addresses of the hosts that are alive according to the GCS. OSError if it does not respond."""
    found = []
    for number, node in _fields(_reply(address, _ALL_NODES, token, timeout_s)):
        if number == 2 and isinstance(node, bytes):  # GetAllNodeInfoReply.node_info_list
            fields = dict(_fields(node))
            if fields.get(7, _ALIVE) == _ALIVE:  # GcsNodeInfo.state; 2: .node_manager_address
                found.append(bytes(fields.get(2, b"")).decode(errors="replace"))
    return found


def drivers(address: str, token: Optional[str] = None, timeout_s: float = DRIVERS_S) -> List[Dict[str, object]]:
    """Return address, pid, command line and namespace of all programs that use the cluster. OSError as above."""
    found = []
    request = b"\x18\x01\x20\x01"  # GetAllJobInfoRequest.skip_...: the GCS need not ask every driver
    for number, job in _fields(_reply(address, _ALL_JOBS, token, timeout_s, request)):
        fields = dict(_fields(job)) if number == 2 and isinstance(job, bytes) else {2: 1}  # .job_info_list
        namespace = _text(dict(_fields(bytes(fields.get(6, b"")))).get(5))  # JobTableData.config.ray_namespace
        if fields.get(2) or namespace.startswith(_OF_RAY):  # JobTableData.is_dead
            continue
        host = _text(fields.get(4)) or _text(dict(_fields(bytes(fields.get(12, b"")))).get(2))  # .driver_address
        known = {"address": host, "pid": fields.get(5, 0), "namespace": namespace}  # type: Dict[str, object]
        found.append({**known, "entrypoint": _text(fields.get(9))})
    return found


def dashboard_address(address: str, token: Optional[str] = None, timeout_s: float = 3.0) -> str:
    """Return HOST:PORT of the dashboard according to the GCS; "" if it has none. OSError if it does not respond."""
    key = b"dashboard"  # InternalKVGetRequest.key, and .namespace
    request = b"".join(bytes([number << 3 | 2, len(key)]) + key for number in (1, 2))
    reply = dict(_fields(_reply(address, _GET_VALUE, token, timeout_s, request)))
    return _text(reply.get(2))  # InternalKVGetReply.value


def own_token() -> Optional[str]:
    """Return this user's token, from where Ray reads it; None if there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"].strip()
    try:
        with open(token_path()) as file:  # noqa: PTH123 - for Python 3.6
            return file.read().strip() or None
    except OSError:
        return None


def token_path() -> str:
    """Return the path of the token file, which may not exist."""
    return os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")  # noqa: PTH111


def distrust(connection: socket.socket, deadline: float) -> str:
    """Return why the process at the other end must not get the token; "" if it may.

    On this machine, the kernel's table of connections has the owner of the other end; this connection is looked up, not
    the port, which another process can take in the meantime. Another machine is trusted if a raylet of this user or of
    root, which knows the token, belongs to its cluster.
    """
    if isinstance(connection, ssl.SSLSocket):
        return ""  # a certificate has proved it
    there, here = connection.getpeername()[:2], connection.getsockname()[:2]
    if there[0] == here[0] or there[0].startswith("127."):
        owner = _owner(there, here)
        while owner is None:
            if time.monotonic() >= deadline:
                return "no process accepts the connection"
            time.sleep(_ACCEPT_POLL_S)
            owner = _owner(there, here)
        return "" if owner in (_ROOT, os.getuid()) else f"{_OTHER_OWNER}{owner}, not of {os.getuid()}"
    if there in _gcs_addresses():
        return ""
    return f"no Ray node of uid {os.getuid()} on this machine belongs to it; run this on one of its hosts"


def _owner(there: Tuple[str, int], here: Tuple[str, int]) -> Optional[int]:
    """Return the uid of the socket at the other end of a connection within this machine; None until it is accepted."""
    found = _looked_up(there, here) or _in_tables(there, here)
    return found[0] if found and found[1] else None


def _looked_up(there: Tuple[str, int], here: Tuple[str, int]) -> Optional[Tuple[int, int]]:
    """Return uid and inode of this end of a connection from the kernel's inet_diag, in microseconds.

    None if it finds no such connection, or is missing; the tables have the answer then, in milliseconds.
    """
    family = socket.AF_INET6 if ":" in there[0] else socket.AF_INET
    ends = [socket.inet_pton(family, end[0].partition("%")[0]) for end in (there, here)]
    request = struct.pack("=IHHII", 72, _SOCK_DIAG_BY_FAMILY, 1, 0, 0)  # nlmsghdr: length, type, NLM_F_REQUEST
    # inet_diag_req_v2: no extensions, all states; its inet_diag_sockid: any interface, no cookie.
    request += struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ANY)
    request += struct.pack(">HH16s16s", there[1], here[1], *ends) + struct.pack("=III", 0, _ANY, _ANY)
    with contextlib.suppress(OSError, AttributeError):  # no inet_diag, or no Linux
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.connect((0, 0))
            kernel.send(request)
            reply = kernel.recv(4096)
        if struct.unpack_from("=IH", reply)[1] == _SOCK_DIAG_BY_FAMILY:  # otherwise an error
            uid, inode = struct.unpack_from("=II", reply, 80)  # of inet_diag_msg, which ends with them
            return uid, inode
    return None


def _in_tables(there: Tuple[str, int], here: Tuple[str, int]) -> Optional[Tuple[int, int]]:
    """Return the same as `_looked_up` from the tables of all connections."""
    wanted = {_table_entry(there, is_mapped) + " " + _table_entry(here, is_mapped) for is_mapped in (False, True)}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{name}") as table:  # noqa: PTH123 - for Python 3.6
            for line in table:
                words = line.split()
                if len(words) > 9 and " ".join(words[1:3]) in wanted:
                    return int(words[7]), int(words[9])
    return None


def _table_entry(end: Tuple[str, int], is_mapped: bool) -> str:
    """Return an end of a connection as the kernel's tables have it; `is_mapped`: an IPv4 address as an IPv6 one."""
    if ":" in end[0]:
        packed = socket.inet_pton(socket.AF_INET6, end[0].partition("%")[0])
    else:
        packed = (bytes(10) + b"\xff\xff" if is_mapped else b"") + socket.inet_aton(end[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{end[1]:04X}"


def _gcs_addresses() -> Set[Tuple[str, int]]:
    """Return the GCS of every raylet on this machine whose process belongs to this user or to root."""
    trusted, found = {str(_ROOT), str(os.getuid())}, set()
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{pid}/cmdline") as file:  # noqa: PTH123
                words = file.read().split("\0")
            if not words[0].endswith("/raylet"):
                continue
            # Not the owner of the folder in /proc, which is root for a process that cannot be dumped.
            with open(f"/proc/{pid}/status") as file:  # noqa: PTH123
                uids = next(line.split()[1:] for line in file if line.startswith("Uid:"))
            if set(uids) <= trusted:
                for word in words:
                    host, _, port = word.partition("=")[2].rpartition(":")
                    if word.startswith("--gcs-address="):
                        found.add((socket.gethostbyname(host), int(port)))
    return found


def _reply(address: str, method: str, token: Optional[str], timeout_s: float, message: bytes = b"") -> bytes:
    """Return the reply to a call. OSError if the GCS does not respond."""
    answer = _call(address, method, token, timeout_s, message)
    if answer.state == ANSWERED:
        return answer.body
    failure = {REFUSED: "refused the request", FOREIGN: "gets no token"}.get(answer.state, "did not answer")
    raise OSError(f"the GCS at {address} {failure}: {answer.detail}")


def _call(
    address: str, method: str, token: Optional[str], timeout_s: float, message: bytes = b"", only_own: bool = False
) -> Answer:
    """Perform one unary call over a new connection."""
    host, _, port = address.rpartition(":")
    headers = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", address)]
    headers += [("te", "trailers"), ("content-type", "application/grpc")]
    if token:
        headers.append(("authorization", "Bearer " + token))
    deadline = time.monotonic() + timeout_s
    settings = struct.pack(">HI", 4, _LARGEST_WINDOW)  # initial window: the reply of a thousand hosts exceeds 64 KiB
    request = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings)
    request += _frame(_WINDOW, 0, 0, struct.pack(">I", _LARGEST_WINDOW - 65535))
    request += _frame(_HEADERS, _END_HEADERS, 1, b"".join(_literal(name, value) for name, value in headers))
    request += _frame(_DATA, _END_STREAM, 1, struct.pack(">BI", 0, len(message)) + message)  # not compressed
    try:
        with _connect(host, int(port), timeout_s) as connection:
            cause = distrust(connection, deadline) if token or only_own else ""
            if cause:
                return Answer(FOREIGN, cause, b"")
            connection.sendall(request)
            return _answer(connection, deadline)
    except socket.timeout:
        return Answer(SILENT, f"no answer within {timeout_s:g} s", b"")
    except (OSError, ValueError) as error:
        return Answer(SILENT, str(getattr(error, "strerror", None) or error), b"")


def _connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect, with mutual TLS if the environment enables it for Ray."""
    connection = socket.create_connection((host, port), timeout=timeout_s)
    if not _uses_tls():
        return connection
    try:
        context = ssl.create_default_context(cafile=os.environ.get("RAY_TLS_CA_CERT"))
        context.load_cert_chain(os.environ.get("RAY_TLS_SERVER_CERT", ""), os.environ.get("RAY_TLS_SERVER_KEY"))
        context.set_alpn_protocols(["h2"])
        return context.wrap_socket(connection, server_hostname=host)
    except OSError:  # ssl.SSLError is one
        connection.close()
        raise


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0") not in ("", "0")


def _answer(connection: socket.socket, deadline: float) -> Answer:
    body = b""
    for kind, flags, stream, payload in _frames(connection, deadline):
        if kind == _SETTINGS and not flags & _ACK:
            connection.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            connection.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY:
            break
        elif kind == _DATA and stream == 1:
            body += payload
        elif kind == _HEADERS and stream == 1 and flags & _END_STREAM:
            status = _header(payload, b"grpc-status")
            detail = _header(payload, b"grpc-message").decode(errors="replace")
            if status == b"0":
                return Answer(ANSWERED, detail, body[5:])
            is_refusal = status == b"%d" % _UNAUTHENTICATED
            if not detail:
                code = status.decode(errors="replace")
                detail = f"gRPC status {code}" if code else "the server uses HTTP/2 but is not a GCS"
            return Answer(REFUSED if is_refusal else SILENT, detail, b"")
    if _uses_tls():
        return Answer(
            SILENT, "the server closed the connection: does it accept the certificate RAY_TLS_SERVER_CERT?", b""
        )
    return Answer(SILENT, "the server does not use gRPC without TLS (does it use TLS, or is it not Ray?)", b"")


def _frames(connection: socket.socket, deadline: float) -> Iterator[Tuple[int, int, int, bytes]]:
    """Yield type, flags, stream and payload of every frame, until the connection is closed."""
    data = b""
    while True:
        while len(data) >= 9 and len(data) >= 9 + int.from_bytes(data[:3], "big"):
            end = 9 + int.from_bytes(data[:3], "big")
            yield data[3], data[4], int.from_bytes(data[5:9], "big"), data[9:end]
            data = data[end:]
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        piece = connection.recv(1 << 16)
        if not piece:
            return
        data += piece


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """Encode a header field without indexing and Huffman code (RFC 7541, section 6.2.2); both below 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _header(payload: bytes, name: bytes) -> bytes:
    """Return the value of a header that gRPC servers send as a literal; b"" if it is missing."""
    before, found, after = payload.partition(bytes([len(name)]) + name)
    return after[1 : 1 + after[0]] if found and after else b""


def _fields(message: bytes) -> Iterator[Tuple[int, Union[int, bytes]]]:
    """Yield number and value of the varint and bytes fields of a protobuf message; skip fixed-width fields."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
        elif tag & 7 == 2:
            length, at = _varint(message, at)
            yield tag >> 3, message[at : at + length]
            at += length
        else:
            at += 8 if tag & 7 == 1 else 4


def _text(value: Union[int, bytes, None]) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def _varint(message: bytes, at: int) -> Tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if not byte & 128:
            return value, at


def wait_for_hosts(address: str, within_s: float, hosts: List[str]) -> Dict[str, object]:
    """Wait until all hosts (names or addresses) are alive; return the missing ones and the last error of the GCS."""
    deadline = time.monotonic() + within_s
    while True:
        detail = ""
        try:
            alive = set(alive_addresses(address, own_token()))
        except OSError as error:
            alive, detail = set(), str(error)
        missing = [host for host in hosts if not alive & {host, _resolved(host)}]
        if not missing or time.monotonic() >= deadline:
            return {"missing": missing, "error": detail}
        time.sleep(0.5)


def driver_report(address: str) -> Dict[str, object]:
    """Return the drivers of the cluster, why they are unknown, and whether it `runs`: a process listens on its port.

    `foreign`: that process is another user's.
    """
    try:
        return {"drivers": drivers(address, own_token()), "error": "", "runs": True, "foreign": False}
    except OSError as error:
        is_refused = str(error).endswith(os.strerror(errno.ECONNREFUSED))
        problem = "" if is_refused else str(error)
        return {"drivers": [], "error": problem, "runs": not is_refused, "foreign": _OTHER_OWNER in problem}


def _resolved(host: str) -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(host)
    return host


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    result = driver_report(rest[0]) if first == "--drivers" else wait_for_hosts(first, float(rest[0]), rest[1:])
    print(json.dumps(result))  # noqa: T201 - the result
