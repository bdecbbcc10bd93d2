"""The caller of an endpoint, with one interface with and without authentication."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from msgspec.structs import replace
from starlette.requests import HTTPConnection
from starlette.types import Scope
from typing_extensions import override

from midstream.agents.attachments import refuse_local_files
from midstream.engine.host import Host
from midstream.environment import Cancellable, World
from midstream.errors import AccessError, MidstreamError, SessionNotFoundError, UnauthorizedError, UsageError
from midstream.server.auth.audit_trail import AuditTrail
from midstream.server.auth.authorizer import AccessLevel, Authorizer
from midstream.server.auth.ownership import Ownership, name_in_store, name_outside
from midstream.server.auth.principals import Action, Principal
from midstream.server.limits import CALLERS_MAX, HOUR_S, CallerSlots, Limits, Rate, RunningTurns
from midstream.server.node_reporting import FleetCounter
from midstream.session.child_names import root_of
from midstream.session.records import Record, ResponseCompleted
from midstream.session.session import Received
from midstream.session.turn.commands import Answer, Command, Resume, SendMessage

CALLER = "midstream.caller"
"""Key of the caller in an ASGI scope."""


class Counters:
    """Counters of the limits of callers.

    Args:
        is_live: Returns whether a turn runs in a session that is in memory here.
    """

    def __init__(
        self, limits: Limits, world: World, is_live: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._is_live = is_live
        self.requests = Rate(limits.requests_per_minute, "requests", world)
        self.refusals = Rate(limits.refusals_per_minute, "wrong credentials", world)
        self.sessions = Rate(limits.sessions_begun_per_minute, "new sessions", world)
        self.tokens = Rate(limits.tokens_per_principal_hour_max, "tokens", world, within_s=HOUR_S)
        self._spenders: OrderedDict[str, str] = OrderedDict()
        self.turns = RunningTurns(limits.turns_per_principal_max, world)
        self.streams = CallerSlots(limits.streams_per_principal_max, "streams")
        self.addresses = CallerSlots(limits.connections_per_address_max, "connections of this address")

    @property
    def of_fleet(self) -> dict[str, FleetCounter]:
        """Counters that all servers of a store share, by the names of their limits."""
        return {
            "requests": self.requests,
            "refusals": self.refusals,
            "sessions": self.sessions,
            "tokens": self.tokens,
            "turns": self.turns,
            "streams": self.streams,
            "addresses": self.addresses,
        }

    def charge(self, session: str, caller: str) -> None:
        """Charge the tokens of a session to this caller, its latest sender, from now on."""
        self._spenders[root_of(session)] = caller
        self._spenders.move_to_end(root_of(session))
        if len(self._spenders) > CALLERS_MAX:
            self._spenders.popitem(last=False)

    def on_forwarded(self, session: str, caller: str) -> None:
        """See `Charging.on_forwarded`: count the turn and its tokens at the server that runs it."""
        self.turns.add(caller, session, self._is_live)
        self.charge(session, caller)

    def on_append(self, session: str, records: Sequence[Record]) -> None:
        """See `Observer.on_append`: count tokens."""
        for record in records:
            if isinstance(record, ResponseCompleted) and (usage := record.body.usage) is not None:
                caller = self._spenders.get(root_of(session), "")
                self.tokens.add(caller, usage.input_tokens + usage.output_tokens)


class Caller(Protocol):
    """Caller of an endpoint."""

    is_known: bool
    """Whether the caller is an authenticated principal, whose access may end."""
    counted_name: str
    """Name under which its turns are counted; "" is not counted."""
    trail: AuditTrail
    """Entries of the request in the audit log."""

    def set_session(self, session: str) -> None:
        """Set the session of a request whose body contains it, before `require`.

        Args:
            session: Stored name of the session.

        Raises:
            UnavailableError: The audit log cannot be written. Nothing was done.
        """

    def enter(self) -> None:
        """Count a connection of this caller.

        Raises:
            LimitReachedError: The limit of connections is reached. Nothing was counted.
        """

    def leave(self) -> None:
        """Stop counting the connection."""

    def count_frame(self) -> None:
        """Count a frame like a request.

        Raises:
            LimitReachedError: The limit of requests is reached. Nothing was counted.
        """

    async def require(self, action: Action) -> None:
        """Require the right to an action on the session.

        Raises:
            SessionNotFoundError: The caller has no right on the session.
            AccessError: The caller has other rights only.
        """

    async def require_existing(self, action: Action) -> None:
        """Require the right to an action on an existing session.

        Raises:
            SessionNotFoundError: The session does not exist, or the caller has no right on it.
            AccessError: The caller has other rights only.
        """

    async def begin(self) -> None:
        """Require the right to send commands. The caller becomes the owner of a session that does not exist yet.

        Raises:
            MidstreamError: As `require`.
            LimitReachedError: The limit of new sessions is reached.
        """

    def count_command(self, command: Command | None) -> None:
        """Count a command against the limits of turns and tokens.

        Raises:
            AccessError: The message refers to a local file, and the caller is not the user of this machine.
            LimitReachedError: A limit is reached. Nothing was counted.
        """

    async def attribute(self, answer: Answer) -> Answer:
        """Return an answer to a question with the name of the caller, and log it in the audit log.

        Raises:
            AccessError: The caller may not answer questions of this session.
        """

    async def visible_sessions(self) -> Collection[str] | None:
        """Return candidates for a list of sessions, without sub-agents' sessions; None if any session may be listed."""

    async def may_list(self, session: str) -> bool:
        """Return whether a list may contain a session (stored name)."""

    def public_name(self, session: str) -> str:
        """Return the caller's name for a stored name of a session."""

    def stored_name(self, session: str) -> str:
        """Return the stored name for the caller's name of a session."""

    async def until_unauthorized(self) -> MidstreamError:
        """Wait until the caller loses its access, and return the reason."""


class UnauthenticatedCaller(Caller):
    """A caller without authentication: an outer application authenticates, or only this machine has access.

    Args:
        counters: Counters of connections and requests by address; None counts nothing.
        address: Address of the caller; "" is not counted.
        trail: Audit trail of the request.
    """

    is_known = False
    counted_name = ""

    def __init__(
        self, counters: Counters | None = None, address: str = "", trail: AuditTrail | None = None
    ) -> None:
        self._counters = counters
        self._address = address
        self.trail = trail or AuditTrail()

    @override
    def set_session(self, session: str) -> None:
        self.trail.set_session(session)

    @override
    def enter(self) -> None:
        if self._counters is not None:
            self._counters.addresses.take(self._address)

    @override
    def leave(self) -> None:
        if self._counters is not None:
            self._counters.addresses.free(self._address)

    @override
    def count_frame(self) -> None:
        if self._counters is not None:
            self._counters.requests.count(self._address)

    async def require(self, action: Action) -> None:
        """See `Caller.require`."""

    async def require_existing(self, action: Action) -> None:
        """Do nothing: a caller without authentication may access all sessions."""

    async def begin(self) -> None:
        """See `Caller.begin`."""

    def count_command(self, command: Command | None) -> None:
        """See `Caller.count_command`. Without authentication no sender is the user of this machine."""
        if isinstance(command, SendMessage):
            refuse_local_files(command.message)

    @override
    async def attribute(self, answer: Answer) -> Answer:
        self.trail.note_answer(answer)
        return answer

    @override
    async def visible_sessions(self) -> Collection[str] | None:
        return None

    @override
    async def may_list(self, session: str) -> bool:
        return True

    @override
    def public_name(self, session: str) -> str:
        return session

    @override
    def stored_name(self, session: str) -> str:
        return session

    @override
    async def until_unauthorized(self) -> MidstreamError:
        raise AssertionError("only an authenticated caller can lose its access")


class LiveCallers:
    """Open streams of authenticated principals, and a number that grows with each order to check all of them."""

    def __init__(self) -> None:
        self.checks = 0
        self._callers: set[KnownCaller] = set()

    def __len__(self) -> int:
        return len(self._callers)

    def enter(self, caller: KnownCaller) -> None:
        """Add a stream. It is checked at once if rights have changed since its authentication."""
        self._callers.add(caller)
        if caller.checks != self.checks:
            caller.recheck()

    def leave(self, caller: KnownCaller) -> None:
        """Remove a stream. Idempotent."""
        self._callers.discard(caller)

    def recheck(self) -> None:
        """Order all streams to check their access now."""
        self.checks += 1
        for caller in self._callers:
            caller.recheck()


class KnownCaller(Caller):
    """A request or a stream of an authenticated principal.

    Args:
        principal: The principal.
        session: Stored name of the session; "" for none.
        connection: The request with the credential; None for a ticket, which is valid only once.
        address: Address of the caller; "" is not counted.
        living: All open streams of principals.
        checks: `living.checks` when the authentication began.
        trail: Audit trail of the request.
        recheck_s: Seconds between two checks of its access.
    """

    is_known = True

    def __init__(
        self,
        principal: Principal,
        session: str,
        connection: HTTPConnection | None,
        address: str,
        *,
        authorizer: Authorizer,
        ownership: Ownership,
        counters: Counters,
        host: Host,
        living: LiveCallers,
        checks: int = 0,
        trail: AuditTrail | None = None,
        recheck_s: float,
    ) -> None:
        self.principal = principal
        self.session = session
        self.counted_name = "" if principal.is_operator else principal.key
        """Name under which it is counted; "" is not counted."""
        self._connection = connection
        self._address = address
        self._authorizer = authorizer
        self._ownership = ownership
        self._counters = counters
        self._host = host
        self._living = living
        self.checks = checks
        self.trail = trail or AuditTrail()
        self._recheck_s = recheck_s
        self._began_at = host.world.now()
        self._must_check = asyncio.Event()
        self._actions = {Action.READ}
        """Actions that were permitted, and are checked again while the stream is open."""

    @override
    def set_session(self, session: str) -> None:
        self.session = session
        self.trail.set_session(session)

    @override
    def enter(self) -> None:
        self._counters.streams.take(self.counted_name)
        try:
            self._counters.addresses.take(self._address)
        except MidstreamError:
            self._counters.streams.free(self.counted_name)
            raise
        self._living.enter(self)

    @override
    def leave(self) -> None:
        self._living.leave(self)
        self._counters.streams.free(self.counted_name)
        self._counters.addresses.free(self._address)

    @override
    def count_frame(self) -> None:
        self._counters.requests.count(self.counted_name)

    async def require(self, action: Action) -> None:
        """See `Caller.require`. It also permits to begin a session that does not exist yet."""
        await self._authorizer.require(self.principal, self.session, action)
        self._actions.add(action)

    @override
    async def require_existing(self, action: Action) -> None:
        if await self._authorizer.require(self.principal, self.session, action) is AccessLevel.BEGIN:
            raise SessionNotFoundError(f"no session {self.session!r}")
        self._actions.add(action)

    @override
    async def begin(self) -> None:
        level = await self._authorizer.require(self.principal, self.session, Action.SEND)
        self._actions.add(Action.SEND)
        if level is not AccessLevel.BEGIN:
            return
        self._counters.sessions.count(self.counted_name)
        owner = await self._ownership.claim(self.session, self.principal)
        if (owner.tenant, owner.principal) != (self.principal.tenant, self.principal.id):
            raise SessionNotFoundError(f"no session {self.session!r}")

    @override
    def count_command(self, command: Command | None) -> None:
        if isinstance(command, SendMessage) and not self._is_local_user:
            refuse_local_files(command.message)
        if isinstance(command, SendMessage | Resume):
            self._counters.tokens.check(self.counted_name)
            self._counters.turns.begin(self.counted_name, self.session, self._host.awake.is_live)
            self._counters.charge(self.session, self.counted_name)

    @override
    async def attribute(self, answer: Answer) -> Answer:
        await self._authorizer.require(self.principal, self.session, Action.APPROVE)
        answer = replace(answer, by=self.principal.name)
        self.trail.note_answer(answer)
        return answer

    @property
    def _is_local_user(self) -> bool:
        return self.principal.is_operator and not self._address

    async def visible_sessions(self) -> Collection[str] | None:
        """See `Caller.visible_sessions`. An application's `authorize` decides about each session in `may_list`."""
        if self.principal.session:
            return [self.principal.session]
        sees_all = self.principal.is_operator or self.principal.is_approver
        if sees_all or self._authorizer.is_application_decided:
            return None
        return await self._ownership.sessions_of(self.principal)

    @override
    async def may_list(self, session: str) -> bool:
        if Action.READ not in self.principal.scope.actions:
            return False
        level = await self._authorizer.level_of(self.principal, session, Action.READ)
        return AccessLevel.READ <= level <= AccessLevel.FULL

    @override
    def public_name(self, session: str) -> str:
        return name_outside(session, self.principal.tenant)

    @override
    def stored_name(self, session: str) -> str:
        return name_in_store(session, self.principal.tenant)

    def recheck(self) -> None:
        """Check the access of the stream now."""
        self._must_check.set()

    async def until_unauthorized(self) -> MidstreamError:
        """See `Caller.until_unauthorized`. A failed check also ends it: the client reconnects and authenticates."""
        while True:
            timer = self._recheck_later()
            try:
                await self._must_check.wait()
            finally:
                timer.cancel()
            self._must_check.clear()
            try:
                await self._require_access()
            except (SessionNotFoundError, AccessError) as error:
                if isinstance(error, UnauthorizedError):
                    return error
                return UnauthorizedError("this stream is no longer allowed")
            except MidstreamError as error:
                return error

    def _recheck_later(self) -> Cancellable:
        wait_s = self._recheck_s
        if self.principal.expires_at is not None:
            wait_s = min(wait_s, max(0.0, self.principal.expires_at - self._host.world.now()))
        return self._host.world.later(wait_s, self._must_check.set)

    async def _require_access(self) -> None:
        await self._authorizer.require_valid(self.principal, self._began_at, self._host.world.now())
        if self._connection is not None:
            principal = await self._authorizer.principal_of(self._connection)
            if principal is None or principal.key != self.principal.key:
                raise UnauthorizedError("the credential of this connection is no longer valid")
            self.principal = principal
        for action in self._actions:
            await self._authorizer.require(self.principal, self.session, action)


async def attribute(caller: Caller, received: Received) -> Received:
    """Add the name of the caller to a command that answers a question or opens a turn.

    Raises:
        AccessError: The caller may not answer questions of this session.
    """
    if isinstance(received.command, Answer):
        return replace(received, command=await caller.attribute(received.command))
    opens_turn = isinstance(received.command, SendMessage | Resume)
    return replace(received, caller=caller.counted_name) if opens_turn and caller.counted_name else received


def caller_of(scope: Scope) -> Caller:
    """Return the caller of a request."""
    caller: Caller = scope.get(CALLER) or UnauthenticatedCaller()
    return caller


def known_caller_of(scope: Scope) -> KnownCaller:
    """Return the authenticated caller of a request.

    Raises:
        UsageError: This server has no authentication.
    """
    caller = scope.get(CALLER)
    if not isinstance(caller, KnownCaller):
        raise UsageError("this server has no authentication, so it creates no credentials")
    return caller


def require_operator(scope: Scope, what: str) -> None:
    """Require an operator of all tenants, on a server with authentication.

    Raises:
        AccessError: The caller is another principal, such as an operator of one tenant.
    """
    caller = scope.get(CALLER)
    if isinstance(caller, KnownCaller) and (not caller.principal.is_operator or caller.principal.tenant):
        raise AccessError(f"{what} of this server is for its operator only")
