"""The host-side collectives between instances: whose they are, and where the instances meet.

The collectives are those of `horovod.torch`: the installed Horovod, or the emulated SDK's over gloo. Either way the
meeting point is a server that the first instance opens on a port the system chooses, and keeps open.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Dict

from raypod.errors import SdkError
from raypod.plan import Plan


def check_available(collectives: str) -> None:
    """`--collectives horovod` needs an installed Horovod.

    Raises:
        SdkError: it is not there.
    """
    if collectives == "horovod" and not uses_installed_horovod():
        raise SdkError("--collectives horovod: no Horovod with torch support is installed; use --collectives gloo")


def uses_installed_horovod() -> bool:
    """Whether `import horovod.torch` gives the installed Horovod (the emulated one defers to it)."""
    import horovod

    return importlib.util.find_spec("horovod.runner") is not None and hasattr(horovod, "__version__")


class Rendezvous:
    """Where the instances of one fleet meet. Open in the first instance for as long as the fleet lives."""

    def __init__(self, plan: Plan, address: str) -> None:
        import _emulated_pod  # of the emulated SDK: the wires that stand in for IPU-Links

        self._store: Any
        self._store, where = _emulated_pod.open_rendezvous(address)
        self.environment: Dict[str, str] = {"EMULATED_POD_RENDEZVOUS": where}
        self._server: Any = None
        if plan.config.run.collectives != "gloo" and uses_installed_horovod():
            self._server = self._open_horovod(plan, address)

    def _open_horovod(self, plan: Plan, address: str) -> Any:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        hosts = ",".join(f"{host.name}:{len(plan.instances_on(index))}" for index, host in enumerate(plan.hosts))
        server = RendezvousServer(verbose=0)
        port = server.start()
        server.init(get_host_assignments(parse_hosts(hosts), plan.geometry.num_instances))
        self.environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = address
        self.environment["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
        return server

    def close(self) -> None:
        """Close the servers; nobody can join any more."""
        if self._server is not None:
            self._server.stop()
        self._store = None
