"""The job server of the Ray cluster that a run would join: submit, inspect and stop Ray jobs by its REST API.

Not by Ray's JobSubmissionClient, whose requests have no time limit, and which imports Ray.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any, Dict, NamedTuple, Optional

from raypod.errors import ClusterError, RunError
from raypod.plan.cluster import Cluster
from raypod.runtime.workers import gcs, ray_admission
from raypod.runtime.workers.ray_session import running_cluster
from raypod.system.interfaces import interface_addresses
from raypod.system.retries import constant, retried

_TIMEOUT_S, _SUBMIT_S = 10.0, 30.0
_READY_WITHIN_S, _POLL_S = 90.0, 0.5  # on a busy host
_NOT_READY = "No available agent"  # of the head, which starts after the job server
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_LONGEST_CAUSE = 300


class Job(NamedTuple):
    """What the server reports of a job."""

    status: str  # PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED
    message: str
    exit_code: Optional[int]

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended."""
        return self.status in _ENDED


class _OwnConnection(http.client.HTTPConnection):
    """A connection to a process that may get the token."""

    def connect(self) -> None:
        super().connect()
        cause = gcs.distrust(self.sock, time.monotonic() + _TIMEOUT_S)
        if cause:
            raise ConnectionError(f"the process there gets no token: {cause}")


class _OwnHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_OwnConnection, request)


class JobServer:
    """A job server at `url` of the cluster whose GCS is at `cluster`; all requests have a time limit."""

    def __init__(self, url: str, cluster: str, token: Optional[str] = None) -> None:
        self.url, self.cluster = url, cluster
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        # A proxy of the environment is for other hosts than that of the server.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _OwnHandler())

    def check(self) -> None:
        """Raise RunError if no job server responds."""
        if "ray_version" not in self._request("GET", "/api/version"):
            raise RunError(f"{self.url} is no job server")

    def submit(self, submission_id: str, entrypoint: str, variables: Dict[str, str]) -> None:
        """Submit a job. `variables` are those of its supervisor and of its process.

        Raises:
            RunError: the server does not accept it.
        """
        job = {"submission_id": submission_id, "entrypoint": entrypoint, "runtime_env": {"env_vars": variables}}
        deadline = time.monotonic() + _READY_WITHIN_S

        def is_not_ready(error: Exception) -> bool:
            return isinstance(error, RunError) and _NOT_READY in str(error) and time.monotonic() <= deadline

        retried(lambda: self._request("POST", "/api/jobs/", job, _SUBMIT_S), constant(_POLL_S), is_not_ready)

    def job(self, submission_id: str) -> Job:
        """Return a job. RunError if the server does not know it."""
        found = self._request("GET", f"/api/jobs/{submission_id}")
        return Job(str(found.get("status")), str(found.get("message") or ""), found.get("driver_exit_code"))

    def stop(self, submission_id: str) -> None:
        """Request the end of a job. RunError if the server does not know it."""
        self._request("POST", f"/api/jobs/{submission_id}/stop")

    def _request(
        self, method: str, path: str, content: Optional[Dict[str, Any]] = None, timeout_s: float = _TIMEOUT_S
    ) -> Dict[str, Any]:
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, body, self._headers, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = " ".join(error.read().decode(errors="replace").split())[-_LONGEST_CAUSE:]
            raise RunError(f"the job server at {self.url} answered {error.code}: {text}") from None
        except (OSError, ValueError) as error:  # urllib.error.URLError is an OSError
            cause = getattr(error, "reason", None) or error
            raise RunError(
                f"no job server responds at {self.url}: {getattr(cause, 'strerror', None) or cause}"
            ) from None
        return found if isinstance(found, dict) else {}


def find_job_server(cluster: Cluster) -> JobServer:
    """Return the job server of the cluster that a run on `cluster` joins; its jobs run on this host.

    Raises:
        ClusterError: there is none, or its jobs would run on another host. The message is the reason.
    """
    address = running_cluster(cluster.gcs_address)
    if address is None:
        raise ClusterError("no Ray cluster runs on this host")
    variables = ray_admission.join_environment(address)
    head = address.rpartition(":")[0]
    if not head.startswith("127.") and head not in {"localhost", *interface_addresses().values()}:
        raise ClusterError(f"the head of the Ray cluster is another host, {head}")
    token = gcs.own_token() if variables["RAY_AUTH_MODE"] == "token" else None
    try:
        dashboard = gcs.dashboard_address(address, token)
        if not dashboard:
            raise ClusterError(f"the Ray cluster at {address} has no dashboard; it needs raypod[pod]")
        server = JobServer(f"http://{dashboard}", address, token)
        server.check()
    except (OSError, RunError) as error:
        raise ClusterError(f"{error}; a job server needs raypod[pod] and the dashboard") from None
    return server
