"""Limits of callers, and the counters that enforce them.

A caller is a principal if one is known, else an address. Addresses of this machine are not counted: they belong to the
operator, or to a proxy of all callers. Requests through a trusted proxy have the address of their caller. Operators are
not counted either.

Servers that share a store report their counts to each other (`node_reporting.py`), so a limit applies to all of them
together. Reports are at most 2.5 s old.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache

from msgspec import Struct
from starlette.types import Scope

from midstream.environment import World
from midstream.errors import LimitReachedError
from midstream.number_checks import require_count

CONNECTIONS_MAX = 5000
"""Open streams of one process: about 160 MiB of connection state, and below usual limits of open files."""
CALLERS_MAX = 10_000
"""Callers whose rates are kept, about 2 MiB; then the caller with the oldest request is evicted."""
MINUTE_S = 60.0
HOUR_S = 3600.0
REPORTED_MAX = 256
"""Callers whose counts are reported to other servers, for each limit: those with the greatest counts."""
STARTING_S = 5.0
"""Seconds for which a requested turn counts as running before it is opened."""


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of callers. 0 means no limit.

    Limits of one caller apply to all servers of a store together; `connections_max` and `header_bytes_max` apply to
    each process. Counts of the other servers are up to 2.5 s old. So N servers may exceed a limit by what N - 1 of them
    admit in 2.5 s; they admit that much less later.

    Args:
        connections_max: Open streams of all callers.
        connections_per_address_max: Open streams of one address, except this machine's.
        streams_per_principal_max: Open streams and readers of one principal.
        turns_per_principal_max: Sessions with a running turn of one principal: each costs money.
        tokens_per_principal_hour_max: Input and output tokens of one principal within an hour. At the
            limit, its new turns are refused. Off by default: the right limit depends on the deployment.
        sessions_begun_per_minute: Sessions that one principal may begin.
        requests_per_minute: Requests and handshakes of one caller.
        refusals_per_minute: Wrong credentials per minute from one address; then it must wait.
        header_bytes_max: Bytes of all headers of a request; uvicorn itself permits 64 KiB.

    Raises:
        UsageError: A limit is negative, or no integer.
    """

    connections_max: int = CONNECTIONS_MAX
    connections_per_address_max: int = 100
    streams_per_principal_max: int = 50
    turns_per_principal_max: int = 20
    tokens_per_principal_hour_max: int = 0
    sessions_begun_per_minute: int = 60
    requests_per_minute: int = 1200
    refusals_per_minute: int = 20
    header_bytes_max: int = 16 * 1024

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            require_count(name, getattr(self, name))


class Rate:
    """Rate limit with a leaky bucket for each caller. A bucket holds `most` and drains evenly in `within_s` seconds.

    Each server of a store has a part of the bucket. The parts together drain as fast as one bucket: each part in
    proportion to its level.

    Args:
        most: Limit for one caller within `within_s`; 0 for no limit.
        what: What is counted, for the message.
    """

    def __init__(self, most: int, what: str, world: World, *, within_s: float = MINUTE_S) -> None:
        self._most = most
        self._what = what
        self._world = world
        self._within_s = within_s
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._elsewhere: Mapping[str, float] = {}
        self._elsewhere_at = 0.0
        self.on_half_used: Callable[[], None] | None = None
        """See `FleetCounter.on_half_used`."""

    def add(self, caller: str, amount: int = 1) -> None:
        """Count `amount` for a caller; "" is not counted."""
        if self._most and caller:
            level = self._own_level_of(caller) + amount
            self._levels[caller] = (level, self._world.monotonic())
            if self.on_half_used is not None and 2 * level >= self._most:
                self.on_half_used()
            self._levels.move_to_end(caller)
            if len(self._levels) > CALLERS_MAX:
                self._levels.popitem(last=False)

    def check(self, caller: str, amount: int = 1) -> None:
        """Check that `amount` more is within the limit of a caller.

        Raises:
            LimitReachedError: The limit is reached. Nothing was counted.
        """
        if not self._most or not caller:
            return
        over = self._level_of(caller) + amount - self._most
        if over <= 0:
            return
        period = "hour" if self._within_s == HOUR_S else "minute"
        message = f"more than {self._most} {self._what} in one {period}"
        raise LimitReachedError(message, retry_after_s=over * self._within_s / self._most)

    def count(self, caller: str) -> None:
        """Check, then add one.

        Raises:
            LimitReachedError: The limit is reached. Nothing was counted.
        """
        self.check(caller)
        self.add(caller)

    def own_counts(self) -> dict[str, float]:
        """See `FleetCounter.own_counts`."""
        levels = {caller: self._own_level_of(caller) for caller in self._levels}
        return _reported({caller: round(level, 2) for caller, level in levels.items() if level > 0})

    def set_other_counts(self, counts: Mapping[str, float]) -> None:
        """See `FleetCounter.set_other_counts`."""
        now = self._world.monotonic()
        if counts or self._elsewhere:  # the old shares apply until now
            levels = {caller: (self._own_level_of(caller), now) for caller in self._levels}
            self._levels.update(levels)
        self._elsewhere, self._elsewhere_at = counts, now

    def _level_of(self, caller: str) -> float:
        own, other = self._own_level_of(caller), self._other_of(caller)
        return own + self._left_of(other, self._elsewhere_at, beside=own)

    def _own_level_of(self, caller: str) -> float:
        return self._left_of(*self._levels.get(caller, (0.0, 0.0)), beside=self._other_of(caller))

    def _other_of(self, caller: str) -> float:
        return self._elsewhere.get(digest_of_caller(caller), 0.0) if self._elsewhere else 0.0

    def _left_of(self, level: float, at: float, *, beside: float) -> float:
        """Return the current level of a part with `level` at time `at`; `beside` is the level of all other parts."""
        if level <= 0:
            return 0.0
        share = level / (level + beside)
        return max(0.0, level - (self._world.monotonic() - at) * share * self._most / self._within_s)


class CallerSlots:
    """Limit of things that each caller has open at the same time.

    Args:
        most: Limit for one caller; 0 for no limit.
        what: What is counted, for the message.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._taken: Counter[str] = Counter()
        self._elsewhere: Mapping[str, float] = {}
        self.on_half_used: Callable[[], None] | None = None
        """See `FleetCounter.on_half_used`."""

    def take(self, caller: str) -> None:
        """Take a slot; "" is not counted.

        Raises:
            LimitReachedError: The limit of the caller is reached. No slot was taken.
        """
        if not caller:
            return
        other = self._elsewhere.get(digest_of_caller(caller), 0.0) if self._elsewhere else 0.0
        if self._most and self._taken.get(caller, 0) + other >= self._most:
            raise LimitReachedError(f"{self._most} {self._what} are open, the limit for one caller")
        self._taken[caller] += 1
        if self.on_half_used is not None and 2 * self._taken[caller] >= self._most > 0:
            self.on_half_used()

    def own_counts(self) -> dict[str, float]:
        """See `FleetCounter.own_counts`."""
        return _reported(self._taken)

    def set_other_counts(self, counts: Mapping[str, float]) -> None:
        """See `FleetCounter.set_other_counts`."""
        self._elsewhere = counts

    def free(self, caller: str) -> None:
        """Return a slot."""
        if self._taken[caller] > 1:
            self._taken[caller] -= 1
        else:
            del self._taken[caller]


class RunningTurns:
    """Limit of sessions with a running turn, for each principal.

    Args:
        most: Limit for one principal; 0 for no limit.
    """

    def __init__(self, most: int, world: World) -> None:
        self._most = most
        self._world = world
        self._asked_at: dict[str, dict[str, float]] = {}
        self._is_live: Callable[[str], bool] = lambda _: False
        self._elsewhere: dict[str, set[str]] = {}
        self.on_half_used: Callable[[], None] | None = None
        """See `FleetCounter.on_half_used`."""

    def begin(self, caller: str, session: str, is_live: Callable[[str], bool]) -> None:
        """Count a turn that a caller is about to open.

        Raises:
            LimitReachedError: The limit of the caller is reached. Nothing was counted.
        """
        if not self._most or not caller:
            return
        self._is_live = is_live
        now = self._world.monotonic()
        times = self._asked_at.pop(caller, {})
        running = {name: at for name, at in self._running(times).items() if name != session}
        others: set[str] = set()
        if self._elsewhere:  # a session that is counted at two servers counts once
            here = {digest_of_caller(name) for name in (*running, session)}
            others = self._elsewhere.get(digest_of_caller(caller), set()) - here
        is_over = len(running) + len(others) >= self._most
        if not is_over or session in times:
            running[session] = now
        if running:
            self._asked_at[caller] = running
        if is_over and session not in times:
            message = f"turns run in {self._most} sessions of one caller, the limit for one caller"
            raise LimitReachedError(message, retry_after_s=STARTING_S)
        if self.on_half_used is not None and 2 * len(running) >= self._most:
            self.on_half_used()

    def add(self, caller: str, session: str, is_live: Callable[[str], bool]) -> None:
        """Count a turn that is about to be opened here. The server that received its command has checked the limit."""
        if self._most and caller:
            self._is_live = is_live
            running = self._running(self._asked_at.get(caller, {}))
            self._asked_at[caller] = {**running, session: self._world.monotonic()}
            if self.on_half_used is not None and 2 * len(self._asked_at[caller]) >= self._most:
                self.on_half_used()

    def _running(self, times: Mapping[str, float]) -> dict[str, float]:
        now = self._world.monotonic()
        return {name: at for name, at in times.items() if now < at + STARTING_S or self._is_live(name)}

    def own_counts(self) -> dict[str, float]:
        """See `FleetCounter.own_counts`; there is a count for each pair of caller and session."""
        pairs = {
            f"{digest_of_caller(caller)} {digest_of_caller(name)}": 1.0
            for caller, times in self._asked_at.items()
            for name in self._running(times)
        }
        return dict([*pairs.items()][:CALLERS_MAX])

    def set_other_counts(self, counts: Mapping[str, float]) -> None:
        """See `FleetCounter.set_other_counts`."""
        self._elsewhere = {}
        for pair in counts:
            caller, _, session = pair.partition(" ")
            self._elsewhere.setdefault(caller, set()).add(session)


def _reported(counts: Mapping[str, float]) -> dict[str, float]:
    greatest = sorted(counts.items(), key=lambda pair: pair[1], reverse=True)[:REPORTED_MAX]
    return {digest_of_caller(caller): count for caller, count in greatest if count > 0}


@lru_cache(CALLERS_MAX)
def digest_of_caller(name: str) -> str:
    """Return the digest of a caller or a session for reports to other servers."""
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).hexdigest()


def address_of(scope: Scope) -> str:
    """Return the counted address of a request; "" for this machine, or without an address."""
    client = scope.get("client")
    return counted_address(client[0]) if client else ""


@lru_cache(CALLERS_MAX)
def counted_address(host: str) -> str:
    """Return the address for which limits are counted; "" for this machine, or for another text."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped  # a dual-stack socket maps the addresses of IPv4 clients
    if address.is_loopback:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        # One customer of a provider has at least a /64, and can change its address at any time.
        return str(ipaddress.ip_network((address, 64), strict=False).network_address)
    return str(address)
