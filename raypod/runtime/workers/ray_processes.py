"""The processes of a local Ray session: each leads a session (setsid) of its own, and a reaper kills what they leave.

A signal to this process's group (`timeout`, a job manager, a terminal) then reaches only this process, which stops the
run in order. If this process is killed, Ray's agents and workers would continue for minutes; the reaper kills them.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import time
from typing import Any, Dict, Iterator

from raypod.runtime.workers import ray_reaper
from raypod.runtime.workers.ray_template import Template, replaced
from raypod.system.process import script_command

_REAPER_S = 10.0  # longer than the reaper takes
_RAY_WAITS_S = 30.0
_LOOK_S = 0.02


class RayProcesses:
    """Starts the reaper, which kills the processes of the Ray session upon `close` or the end of this process.

    With `has_template`, the workers of the session are forked from a template.
    """

    def __init__(self, has_template: bool) -> None:
        null = subprocess.DEVNULL
        self._reaper = subprocess.Popen(
            script_command(str(ray_reaper.__file__)),
            stdin=subprocess.PIPE,
            stdout=null,
            stderr=null,
            cwd="/",
            start_new_session=True,
        )
        self._template = Template(start_new_session=True) if has_template else None
        if self._template is not None:
            self._register(self._template.pid)

    @contextlib.contextmanager
    def started_by(self, services: Any) -> Iterator[None]:
        """Within this context, `ray._private.services` starts each process in a session of its own."""
        before = services.ConsolePopen

        def start(*arguments: Any, **options: Any) -> Any:
            process = before(*arguments, **options, start_new_session=True)
            self._register(process.pid)
            return process

        template = self._template.used_by(services) if self._template else contextlib.nullcontext()
        with replaced(services, ConsolePopen=start), template:
            yield

    def close(self) -> None:
        """Kill what is left of the Ray session, and wait for the reaper, for at most 10 s."""
        if self._template is not None:
            self._template.close()
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that the kernel cannot end; the reaper waits
            self._reaper.wait(_REAPER_S)

    def _register(self, pid: int) -> None:
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(f"{pid}\n".encode())
        self._reaper.stdin.flush()


@contextlib.contextmanager
def only_needed(ray: Any) -> Iterator[None]:
    """Start none of the Python processes of Ray's head that a local session has no use for.

    These are the autoscaler, the log monitor (logs are not sent to the driver), and the dashboard's server, for whose
    start `ray.init` waits even without a dashboard. They take 1.4 core-seconds while the workers import torch.
    """
    with replaced(
        ray._private.node.Node,
        start_monitor=lambda self: None,
        start_log_monitor=lambda self: None,
        start_api_server=lambda self, **options: setattr(self, "_webui_url", ""),
    ):
        yield


@contextlib.contextmanager
def patient(services: Any, seconds: float) -> Iterator[None]:
    """Let Ray wait for its raylet for some time, at least for the 30 s after which it gives up by itself.

    Ray waits in C++ for `RAY_raylet_start_wait_time_s`, during which no signal is handled, and repeats that. There it
    looks once per second, so that it often waits a second too long: it is asked when the raylet is known.
    """
    names = [name for name in ("get_node", "wait_for_node") if hasattr(services, name)]  # the second one until 2.10
    before = {name: getattr(services, name) for name in names}

    def get_node(address: str, *more: Any) -> Any:
        deadline = time.monotonic() + seconds
        if hasattr(services, "_get_gcs_client_options"):
            _wait_for_raylet(services, address, deadline)
        while True:
            try:
                return before["get_node"](address, *more)
            except RuntimeError:  # the raylet is not known yet
                if time.monotonic() > deadline:
                    raise

    patient_ones: Dict[str, Any] = {}
    if "get_node" in before:
        patient_ones["get_node"] = get_node
    if "wait_for_node" in before:
        timeout_s = max(_RAY_WAITS_S, seconds)
        patient_ones["wait_for_node"] = functools.partial(before["wait_for_node"], timeout=timeout_s)
    with replaced(services, **patient_ones):
        yield


def _wait_for_raylet(services: Any, address: str, deadline: float) -> None:
    state = services.ray._private.state.GlobalState()
    state._initialize_global_state(services._get_gcs_client_options(address))
    while not state.node_table() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
