"""Limits of callers: named limits, and the counters that keep them.

A caller is a principal where one is known, else an address. Addresses of this machine are not counted: behind them
are the person who runs the server, or a proxy with all callers behind it (whose callers have addresses of their own
where the proxy is trusted). An operator is not counted either.

Servers that share a store report their counts to one another (`node_reporting.py`). So a limit holds for all of them
together, up to what the others let pass since they were read last: 2.5 s at most.
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

CONNECTIONS_MAX = 5000
"""Open streams of one process: about 160 MiB of connection state, and below usual limits of open files."""
CALLERS_MAX = 10_000
"""Callers whose rates are kept, about 2 MiB; beyond it the one with the oldest request is evicted."""
MINUTE_S = 60.0
HOUR_S = 3600.0
REPORTED_MAX = 256
"""Callers whose counts are reported to other servers, for each limit; those that have used up most of it."""
STARTING_S = 5.0
"""Seconds in which a turn that was just asked for counts as running."""


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of what callers may do. 0 is no limit.

    Those of one caller hold for all servers of a store together, `connections_max` and `header_bytes_max` for each
    process. What the others have counted is known up to 2.5 s late: N servers let pass at most what N - 1 of them do
    within 2.5 s more than the limit, and later so much less.

    Args:
        connections_max: Streams open at once, of all callers.
        connections_per_address_max: Streams open at once from one address that is not this machine's.
        streams_per_principal_max: Streams and readers that one principal has open at once.
        turns_per_principal_max: Sessions in which a turn of one principal runs at once: each costs money.
        tokens_per_principal_hour_max: Tokens, in and out, that models have counted for one principal within an hour;
            with so many it opens no further turn. Off by default: what is too much depends on the deployment.
        sessions_begun_per_minute: Sessions that one principal may begin.
        requests_per_minute: Requests and handshakes of one caller.
        refusals_per_minute: Wrong credentials from one address before it has to wait.
        header_bytes_max: Bytes of all headers of a request; uvicorn itself takes 64 KiB.
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


class Rate:
    """How much each caller did lately: a bucket each, which holds `most` and runs out evenly over `within_s` seconds.

    Servers that share a store have a part of the bucket each. Together the parts run out as fast as one bucket: each by
    its share of what is in all of them.

    Args:
        most: How much a caller may do within `within_s`; 0 for no limit.
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
        self.hurry: Callable[[], None] | None = None
        """See `FleetCounter.hurry`."""

    def add(self, caller: str, amount: int = 1) -> None:
        """Count what a caller did; "" is not counted."""
        if self._most and caller:
            level = self._own_level_of(caller) + amount
            self._levels[caller] = (level, self._world.monotonic())
            if self.hurry is not None and 2 * level >= self._most:
                self.hurry()
            self._levels.move_to_end(caller)
            if len(self._levels) > CALLERS_MAX:
                self._levels.popitem(last=False)

    def check(self, caller: str, amount: int = 1) -> None:
        """Look whether a caller may do this much more.

        Raises:
            LimitReachedError: Not now. Nothing was counted.
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
            LimitReachedError: Not now. Nothing was counted.
        """
        self.check(caller)
        self.add(caller)

    def own_counts(self) -> dict[str, float]:
        """See `FleetCounter.own_counts`."""
        levels = {caller: self._own_level_of(caller) for caller in self._levels}
        return _reported({caller: round(level, 2) for caller, level in levels.items() if level > 0})

    def set_elsewhere(self, counts: Mapping[str, float]) -> None:
        """See `FleetCounter.set_elsewhere`."""
        now = self._world.monotonic()
        if counts or self._elsewhere:  # up to here the old shares hold
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
        """Return what is left of a part that was filled to `level` at a time, beside what is in the other parts."""
        if level <= 0:
            return 0.0
        share = level / (level + beside)
        return max(0.0, level - (self._world.monotonic() - at) * share * self._most / self._within_s)


class CallerSlots:
    """How many of something each caller has at once.

    Args:
        most: How many one caller may have; 0 for no limit.
        what: What is counted, for the message.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._taken: Counter[str] = Counter()
        self._elsewhere: Mapping[str, float] = {}
        self.hurry: Callable[[], None] | None = None
        """See `FleetCounter.hurry`."""

    def take(self, caller: str) -> None:
        """Take a place; "" is not counted.

        Raises:
            LimitReachedError: The caller has as many as it may. Nothing was taken.
        """
        if not caller:
            return
        other = self._elsewhere.get(digest_of_caller(caller), 0.0) if self._elsewhere else 0.0
        if self._most and self._taken.get(caller, 0) + other >= self._most:
            raise LimitReachedError(f"{self._most} {self._what} are open, the limit for one caller")
        self._taken[caller] += 1
        if self.hurry is not None and 2 * self._taken[caller] >= self._most > 0:
            self.hurry()

    def own_counts(self) -> dict[str, float]:
        """See `FleetCounter.own_counts`."""
        return _reported(self._taken)

    def set_elsewhere(self, counts: Mapping[str, float]) -> None:
        """See `FleetCounter.set_elsewhere`."""
        self._elsewhere = counts

    def free(self, caller: str) -> None:
        """Give a place back."""
        if self._taken[caller] > 1:
            self._taken[caller] -= 1
        else:
            del self._taken[caller]


class RunningTurns:
    """In how many sessions a turn of each principal runs.

    Args:
        most: How many may; 0 for no limit.
    """

    def __init__(self, most: int, world: World) -> None:
        self._most = most
        self._world = world
        self._asked_at: dict[str, dict[str, float]] = {}
        self._is_live: Callable[[str], bool] = lambda _: False
        self._elsewhere: dict[str, set[str]] = {}
        self.hurry: Callable[[], None] | None = None
        """See `FleetCounter.hurry`."""

    def begin(self, caller: str, session: str, is_live: Callable[[str], bool]) -> None:
        """Count a turn that a caller is about to open.

        Raises:
            LimitReachedError: It has as many running as it may. Nothing was counted.
        """
        if not self._most or not caller:
            return
        self._is_live = is_live
        now = self._world.monotonic()
        asked = self._asked_at.pop(caller, {})
        running = {name: at for name, at in self._running(asked).items() if name != session}
        others: set[str] = set()
        if self._elsewhere:  # a session in which the caller has used two servers counts once
            here = {digest_of_caller(name) for name in (*running, session)}
            others = self._elsewhere.get(digest_of_caller(caller), set()) - here
        is_over = len(running) + len(others) >= self._most
        if not is_over or session in asked:
            running[session] = now
        if running:
            self._asked_at[caller] = running
        if is_over and session not in asked:
            message = f"turns run in {self._most} sessions of one caller, the limit for one caller"
            raise LimitReachedError(message, retry_after_s=STARTING_S)
        if self.hurry is not None and 2 * len(running) >= self._most:
            self.hurry()

    def add(self, caller: str, session: str, is_live: Callable[[str], bool]) -> None:
        """Count a turn that is about to be opened here; the server that its command came to has checked the limit."""
        if self._most and caller:
            self._is_live = is_live
            running = self._running(self._asked_at.get(caller, {}))
            self._asked_at[caller] = {**running, session: self._world.monotonic()}
            if self.hurry is not None and 2 * len(self._asked_at[caller]) >= self._most:
                self.hurry()

    def _running(self, asked: Mapping[str, float]) -> dict[str, float]:
        now = self._world.monotonic()
        return {name: at for name, at in asked.items() if now < at + STARTING_S or self._is_live(name)}

    def own_counts(self) -> dict[str, float]:
        """See `FleetCounter.own_counts`: a count for each pair of a caller and a session."""
        pairs = {
            f"{digest_of_caller(caller)} {digest_of_caller(name)}": 1.0
            for caller, asked in self._asked_at.items()
            for name in self._running(asked)
        }
        return dict([*pairs.items()][:CALLERS_MAX])

    def set_elsewhere(self, counts: Mapping[str, float]) -> None:
        """See `FleetCounter.set_elsewhere`."""
        self._elsewhere = {}
        for pair in counts:
            caller, _, session = pair.partition(" ")
            self._elsewhere.setdefault(caller, set()).add(session)


def _reported(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the greatest counts, by the digests of their callers."""
    greatest = sorted(counts.items(), key=lambda pair: pair[1], reverse=True)[:REPORTED_MAX]
    return {digest_of_caller(caller): count for caller, count in greatest if count > 0}


@lru_cache(CALLERS_MAX)
def digest_of_caller(name: str) -> str:
    """Return what stands for a caller or a session in reports to other servers."""
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).hexdigest()


def address_of(scope: Scope) -> str:
    """Return the address a request came from; "" where it is this machine's, or no address."""
    client = scope.get("client")
    return counted_address(client[0]) if client else ""


@lru_cache(CALLERS_MAX)
def counted_address(host: str) -> str:
    """Return the address that limits are counted for; "" where it is this machine's, or no address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped  # how a socket for both families names an IPv4 client
    if address.is_loopback:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        # One customer of a provider has at least a /64, and a new address whenever it likes.
        return str(ipaddress.ip_network((address, 64), strict=False).network_address)
    return str(address)
