"""Limits of connections below ASGI: their number, and the bytes of incomplete requests.

A peer that sends no complete request occupies a descriptor and memory before any authentication. Peers of this machine
and trusted proxies are not counted by address, because they have many clients. A few descriptors are reserved for peers
of this machine, so that the operator can always connect.
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
    """Limits of connections, regardless of their requests.

    Args:
        connections_max: Open connections; fewer if the process may open fewer files.
        per_address_max: Open connections of one address, except this machine's.
        held_bytes_max: Bytes of all requests with incomplete headers.
        held_bytes_per_address_max: The same for one address, except this machine's.
        reserved: Further connections, for peers of this machine only.

    Raises:
        UsageError: A limit is below 1.
    """

    connections_max: int = 8192
    per_address_max: int = 256
    held_bytes_max: int = 32 * 1024 * 1024
    held_bytes_per_address_max: int = 1024 * 1024
    reserved: int = 32

    def __post_init__(self) -> None:
        if any(getattr(self, name) < 1 for name in self.__struct_fields__):
            raise UsageError("each limit of raw connections must be 1 or more")


class _Peer(Struct):
    address: str
    held: int = 0


class RawConnections:
    """Counts the connections of one server.

    Args:
        limits: Limits of the connections.
        trusted: Addresses and networks of proxies, which are not counted by address; `*` means all.
        descriptors: Limit of open files of the process; by default the system's limit.
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
        """Count a connection from an address; return False, and count nothing, if a limit is reached."""
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
        """Stop counting a connection. Idempotent."""
        self.hold(connection, 0)
        peer = self._peers.pop(connection, None)
        if peer is not None:
            self._counts[peer.address] -= 1
            if not self._counts[peer.address]:
                del self._counts[peer.address]

    def hold(self, connection: object, size: int) -> bool:
        """Set the number of held bytes of a connection; return False if a limit is exceeded."""
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
    """Return the networks of an entry for trusted proxies, as uvicorn parses it; empty for a host name."""
    try:
        return tuple(ipaddress.ip_network(each) for each in (_ALL if trusted == "*" else (trusted,)))
    except ValueError:
        return ()


def _descriptors() -> int | None:
    """Return this process's limit of open files; None without a limit."""
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most
