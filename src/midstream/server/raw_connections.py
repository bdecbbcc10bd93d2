"""Limits of connections before their requests are authenticated: their number, and the bytes that wait.

A peer that sends no whole request costs a descriptor and the bytes of its headers, and no credential stops it. The
limits here stand below ASGI. Peers of this machine and trusted proxies are not counted by address: they have many
clients. A few descriptors are reserved for peers of this machine, so that the operator can still connect when others
have taken the rest.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection

from msgspec import Struct

from midstream.errors import UsageError
from midstream.server.limits import counted_address

_ALL = ("0.0.0.0/0", "::/0")
PROCESS_DESCRIPTORS = 128
"""Descriptors for the store, agents, models and log files of a process."""


class RawLimits(Struct, frozen=True):
    """Limits of connections, whatever comes over them.

    Args:
        connections_max: Connections open at once; fewer where the process may open fewer files.
        per_address_max: Of one address that is not this machine's.
        held_bytes_max: Bytes of all requests whose headers are not complete.
        held_bytes_per_address_max: Of one address that is not this machine's.
        reserved: Further connections that only peers of this machine get.

    Raises:
        UsageError: One is below 1.
    """

    connections_max: int = 8192
    per_address_max: int = 256
    held_bytes_max: int = 32 * 1024 * 1024
    held_bytes_per_address_max: int = 1024 * 1024
    reserved: int = 32

    def __post_init__(self) -> None:
        if any(getattr(self, name) < 1 for name in self.__struct_fields__):
            raise UsageError("each limit of raw connections is 1 or more")


class _Peer(Struct):
    address: str
    held: int = 0


class RawConnections:
    """The connections of one server, counted.

    Args:
        limits: Their limits.
        trusted: Addresses and networks of proxies with many clients each, which are not counted by address; `*` is all.
        descriptors: How many files the process may have open; by default what the system allows.
    """

    def __init__(
        self, limits: RawLimits, *, trusted: Collection[str] = (), descriptors: int | None = None
    ) -> None:
        self._limits = limits
        self._trusted = [_network(each) for each in trusted]
        files = descriptors if descriptors is not None else _descriptors()
        room = limits.connections_max if files is None else files - PROCESS_DESCRIPTORS - limits.reserved
        self._most = max(1, min(limits.connections_max, room))
        self._peers: dict[object, _Peer] = {}
        self._counts: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._held_in_all = 0

    def __len__(self) -> int:
        return len(self._peers)

    def enter(self, connection: object, host: str) -> bool:
        """Count a connection from an address. Where it returns False there is no room, and nothing was counted."""
        address = counted_address(host)
        most = self._most if address else self._most + self._limits.reserved
        if len(self._peers) >= most:
            return False
        if self._is_trusted(host):
            address = ""
        if address and self._counts[address] >= self._limits.per_address_max:
            return False
        self._peers[connection] = _Peer(address)
        self._counts[address] += 1
        return True

    def leave(self, connection: object) -> None:
        """Count a connection no longer. Again is harmless."""
        self.hold(connection, 0)
        peer = self._peers.pop(connection, None)
        if peer is not None:
            self._counts[peer.address] -= 1
            if not self._counts[peer.address]:
                del self._counts[peer.address]

    def hold(self, connection: object, size: int) -> bool:
        """Note how many bytes of a connection wait. Where it returns False they are too many together."""
        peer = self._peers.get(connection)
        if peer is None:
            return True
        change, peer.held = size - peer.held, size
        self._held_in_all += change
        if not peer.address:
            return self._held_in_all <= self._limits.held_bytes_max
        self._held[peer.address] += change
        if not self._held[peer.address]:
            del self._held[peer.address]
        is_small = self._held[peer.address] <= self._limits.held_bytes_per_address_max
        return is_small and self._held_in_all <= self._limits.held_bytes_max

    def _is_trusted(self, host: str) -> bool:
        if not self._trusted:
            return False
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for networks in self._trusted for network in networks)


def _network(trusted: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """Return the networks that uvicorn reads a name of trusted proxies as; none where it is another name."""
    try:
        return tuple(ipaddress.ip_network(each) for each in (_ALL if trusted == "*" else (trusted,)))
    except ValueError:
        return ()


def _descriptors() -> int | None:
    """Return how many files this process may have open; None where there is no limit."""
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most
