"""The host-side collectives between instances: whose they are, and where the instances meet.

The collectives are those of `horovod.torch`: the installed Horovod, or the emulated SDK's over gloo. Either way the
meeting point is a server on a port that the system chooses, which whoever starts the instances opens and keeps open.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, Dict

from raypod.errors import SdkError
from raypod.horovod_rendezvous import HorovodDoor
from raypod.host.interfaces import address_towards, interface_of

_JOIN_S = 60.0  # to reach the meeting point


def check_available(collectives: str) -> None:
    """`--collectives horovod` needs an installed Horovod.

    Raises:
        SdkError: it is not there.
    """
    if collectives == "horovod" and not uses_installed_horovod():
        raise SdkError("--collectives horovod: no Horovod with torch support is installed; use --collectives gloo")


def uses_installed_horovod() -> bool:
    """Whether `import horovod.torch` gives the installed Horovod (the emulated one defers to it)."""
    return importlib.util.find_spec("horovod.runner") is not None


def is_a_peers(error: BaseException) -> bool:
    """Whether an error of a collective or a call says that other instances are the cause: lost, failed or silent.

    By name, so that none of the modules that define them has to be there.
    """
    return any(kind.__name__ in _OF_PEERS for kind in type(error).__mro__)


# Of the emulated SDK's wires; of Horovod, real or emulated; of the real PopTorch, whose device ends with the others'.
_OF_PEERS = ("PeerFailed", "HorovodInternalError", "RecoverableError", "UnrecoverableError")


def abandon(reason: str) -> None:
    """End every wait of this process for other instances, from any thread, where the SDK can: the emulated one's."""
    wires: Any = sys.modules.get("_pod.wires")
    if wires is not None:
        wires.abandon_all(reason)


def part() -> None:
    """Let go of all connections to other instances that outlive `hvd.shutdown` and `popdist.finalizeBackend`: the
    emulated SDK's, for gradients. Who was idle when another instance was lost would go on with those to the lost.
    """
    wires: Any = sys.modules.get("_pod.wires")
    if wires is not None:
        wires.close()


class Rendezvous:
    """Where the instances of one fleet meet. Open for as long as the fleet lives, in any process of `address`.

    `environment` leads every instance there: EMULATED_POD_RENDEZVOUS, with the secret without which nobody is answered.
    A real Horovod goes through a door of its own host (`horovod_door`). Who an instance is among them says
    `environment.horovod_identity`; by which interface, `horovod_interface`.
    """

    def __init__(self, address: str, generation: int = 0) -> None:
        """Listen on `address`, a name or address of this host, and nowhere else.

        Each repair of a fleet makes another `generation`, whose instances meet anew.

        The emulated SDK must be importable (`sdk.select` or `sdk.offer_store`).
        OSError if the address cannot be resolved or listened on.
        """
        from _pod.store_server import StoreServer  # of the emulated SDK; it needs no torch

        self._store = StoreServer(address)
        self.environment: Dict[str, str] = {**self._store.environment, "EMULATED_POD_GENERATION": str(generation)}

    def close(self) -> None:
        """Close it; nobody can join any more."""
        self._store.close()


def horovod_door(rendezvous: Dict[str, str]) -> HorovodDoor:
    """The way of a real Horovod on this host to the others; `rendezvous` is the environment of a `Rendezvous`.

    RuntimeError if it does not answer, or has another secret.
    """
    from _pod.store_client import StoreClient

    host, _, port = rendezvous["EMULATED_POD_RENDEZVOUS"].rpartition(":")
    return HorovodDoor(StoreClient(host, int(port), rendezvous["EMULATED_POD_SECRET"], _JOIN_S))


def horovod_interface(rendezvous: str) -> Dict[str, str]:
    """HOROVOD_GLOO_IFACE, the interface by which this host reaches the address `rendezvous`; {} if none is found.

    Without it Horovod listens on whatever address this host's name resolves to. IPv4 only.
    """
    name = interface_of(address_towards(rendezvous))
    return {"HOROVOD_GLOO_IFACE": name} if name else {}
