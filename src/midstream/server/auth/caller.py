"""Questions of an endpoint about its caller: the same ones, with and without authentication."""

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

VISIT = "midstream.visit"
"""Where a scope has its visit."""


class Counters:
    """Counters of callers, against the limits of this server.

    Args:
        is_live: Whether a turn runs in a session that is awake here.
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
        """Counters that hold for all servers of a store, by the names of their limits."""
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
        """Charge the tokens of a session to this caller from now on, as the last one who sent a message there."""
        self._spenders[root_of(session)] = caller
        self._spenders.move_to_end(root_of(session))
        if len(self._spenders) > CALLERS_MAX:
            self._spenders.popitem(last=False)

    def on_forwarded(self, session: str, caller: str) -> None:
        """See `Charging.on_forwarded`: the turn runs here, so that it is counted here, and its tokens."""
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
    """Whether it has a name, which may become unwelcome."""
    caller: str
    """Under which name its turns are counted; "" is not counted."""

    def visit(self, session: str) -> None:
        """Take the session that a request is about from its body; what is required of the caller follows.

        Args:
            session: As the store names it.

        Raises:
            UnavailableError: The audit log cannot be written. Nothing was done.
        """

    def enter(self) -> None:
        """Count a connection of this caller.

        Raises:
            LimitReachedError: It has as many as it may. Nothing was counted.
        """

    def leave(self) -> None:
        """Count it no longer."""

    def count_frame(self) -> None:
        """Count a frame of a connection, as a request is counted.

        Raises:
            LimitReachedError: It came too soon. Nothing was counted.
        """

    async def require(self, action: Action) -> None:
        """Let something be done with the session, or raise.

        Raises:
            SessionNotFoundError: The session is none that this caller may see.
            AccessError: It may be seen, and this may not be done.
        """

    async def require_there(self, action: Action) -> None:
        """As `require`, for requests that begin no session: one that does not exist is refused as a foreign one is.

        Raises:
            SessionNotFoundError: The session is none that this caller may see, or is not there yet.
            AccessError: It may be seen, and this may not be done.
        """

    async def begin(self) -> None:
        """Let the caller speak, also in a session that is not there yet: it is theirs from now on.

        Raises:
            MidstreamError: As `require`.
            LimitReachedError: The caller has begun as many in this minute as it may.
        """

    def count_command(self, command: Command | None) -> None:
        """Count what a command costs.

        Raises:
            AccessError: Its message names a file of this machine, and it is not this machine's user.
            LimitReachedError: The caller may not spend more now. Nothing was counted.
        """

    async def attribute(self, answer: Answer) -> Answer:
        """Return an answer to a question with the name of the caller, and write it into the audit log.

        Raises:
            AccessError: The caller may not answer questions of this session.
        """

    async def visible_sessions(self) -> Collection[str] | None:
        """Return the sessions of the store that may be shown in a list, with their parts, and perhaps some more; None
        where any may be.
        """

    async def may_list(self, session: str) -> bool:
        """Whether a session of the store may be shown in a list."""

    def public_name(self, session: str) -> str:
        """Return the caller's name of a session of the store."""

    def stored_name(self, session: str) -> str:
        """Return the name in the store of a session that the caller names."""

    async def until_unwelcome(self) -> MidstreamError:
        """Wait until the caller may not stay any longer, and return why."""


class Stranger(Caller):
    """A caller without authentication: an application has authenticated it, or only this machine has access.

    Args:
        counters: Count the connections and the requests of each address; None counts nothing.
        address: The caller's; "" is not counted.
        trail: Where its acts are written.
    """

    is_known = False
    caller = ""

    def __init__(
        self, counters: Counters | None = None, address: str = "", trail: AuditTrail | None = None
    ) -> None:
        self._counters = counters
        self._address = address
        self._trail = trail or AuditTrail()

    @override
    def visit(self, session: str) -> None:
        self._trail.visit(session)

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

    async def require_there(self, action: Action) -> None:
        """Require that a session exists: a stranger may see every session."""

    async def begin(self) -> None:
        """See `Caller.begin`."""

    def count_command(self, command: Command | None) -> None:
        """See `Caller.count_command`. Without authentication no sender is the user of this machine."""
        if isinstance(command, SendMessage):
            refuse_local_files(command.message)

    @override
    async def attribute(self, answer: Answer) -> Answer:
        self._trail.note_answer(answer)
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
    async def until_unwelcome(self) -> MidstreamError:
        raise AssertionError("only who is known becomes unwelcome")


class LiveCallers:
    """Streams of authenticated principals, and the number of times that all of them were to be checked again."""

    def __init__(self) -> None:
        self.checks = 0
        self._callers: set[KnownCaller] = set()

    def __len__(self) -> int:
        return len(self._callers)

    def enter(self, caller: KnownCaller) -> None:
        """Take a stream in; it is checked at once where rights changed since it was authenticated."""
        self._callers.add(caller)
        if caller.checks != self.checks:
            caller.recheck()

    def leave(self, caller: KnownCaller) -> None:
        """Let a stream go. Harmless where it is not here."""
        self._callers.discard(caller)

    def recheck(self) -> None:
        """Let each stream check now whether it may go on."""
        self.checks += 1
        for caller in self._callers:
            caller.recheck()


class KnownCaller(Caller):
    """A request or a stream of an authenticated principal.

    Args:
        principal: Who.
        session: The session it is about, as the store names it; "" for none.
        connection: What it was known by; None where that was a ticket, which cannot be shown again.
        address: Where it came from; "" is not counted.
        living: Where it stands among the others while it is a stream.
        checks: Number of `living` when its authentication began.
        trail: Where its acts are written.
        recheck_s: Seconds between two looks at whether it may go on.
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
        self.caller = "" if principal.is_operator else principal.key
        """Under which name it is counted; "" is not counted."""
        self._connection = connection
        self._address = address
        self._authorizer = authorizer
        self._ownership = ownership
        self._counters = counters
        self._host = host
        self._living = living
        self.checks = checks
        self._trail = trail or AuditTrail()
        self._recheck_s = recheck_s
        self._began_at = host.world.now()
        self._must_look = asyncio.Event()
        self._does = {Action.READ}
        """What it was let in for, and must be allowed as long as it stays."""

    @override
    def visit(self, session: str) -> None:
        self.session = session
        self._trail.visit(session)

    @override
    def enter(self) -> None:
        self._counters.streams.take(self.caller)
        try:
            self._counters.addresses.take(self._address)
        except MidstreamError:
            self._counters.streams.free(self.caller)
            raise
        self._living.enter(self)

    @override
    def leave(self) -> None:
        self._living.leave(self)
        self._counters.streams.free(self.caller)
        self._counters.addresses.free(self._address)

    @override
    def count_frame(self) -> None:
        self._counters.requests.count(self.caller)

    async def require(self, action: Action) -> None:
        """See `Caller.require`. A session that does not exist yet may be begun by a caller that passes."""
        await self._authorizer.require(self.principal, self.session, action)
        self._does.add(action)

    @override
    async def require_there(self, action: Action) -> None:
        if await self._authorizer.require(self.principal, self.session, action) is AccessLevel.BEGIN:
            raise SessionNotFoundError(f"no session {self.session!r}")
        self._does.add(action)

    @override
    async def begin(self) -> None:
        verdict = await self._authorizer.require(self.principal, self.session, Action.SPEAK)
        self._does.add(Action.SPEAK)
        if verdict is not AccessLevel.BEGIN:
            return
        self._counters.sessions.count(self.caller)
        owner = await self._ownership.claim(self.session, self.principal)
        if (owner.tenant, owner.principal) != (self.principal.tenant, self.principal.id):
            raise SessionNotFoundError(f"no session {self.session!r}")

    @override
    def count_command(self, command: Command | None) -> None:
        if isinstance(command, SendMessage) and not self._is_local_user:
            refuse_local_files(command.message)
        if isinstance(command, SendMessage | Resume):
            self._counters.tokens.check(self.caller)
            self._counters.turns.begin(self.caller, self.session, self._host.is_live)
            self._counters.charge(self.session, self.caller)

    @override
    async def attribute(self, answer: Answer) -> Answer:
        await self._authorizer.require(self.principal, self.session, Action.APPROVE)
        answer = replace(answer, by=self.principal.name)
        self._trail.note_answer(answer)
        return answer

    @property
    def _is_local_user(self) -> bool:
        """Whether it is the operator, on this machine."""
        return self.principal.is_operator and not self._address

    async def visible_sessions(self) -> Collection[str] | None:
        """See `Caller.visible_sessions`. What an application decides about each is not known before it is asked."""
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
        verdict = await self._authorizer.verdict(self.principal, session, Action.READ)
        return AccessLevel.LOOK <= verdict <= AccessLevel.ALL

    @override
    def public_name(self, session: str) -> str:
        return name_outside(session, self.principal.tenant)

    @override
    def stored_name(self, session: str) -> str:
        return name_in_store(session, self.principal.tenant)

    def recheck(self) -> None:
        """Look now whether it may go on: something was revoked."""
        self._must_look.set()

    async def until_unwelcome(self) -> MidstreamError:
        """See `Caller.until_unwelcome`. What cannot be found out now ends it as well: it comes again and is asked."""
        while True:
            timer = self._recheck_later()
            try:
                await self._must_look.wait()
            finally:
                timer.cancel()
            self._must_look.clear()
            try:
                await self._require_still_welcome()
            except (SessionNotFoundError, AccessError) as error:
                if isinstance(error, UnauthorizedError):
                    return error
                return UnauthorizedError("what this stream does is no longer allowed")
            except MidstreamError as error:
                return error

    def _recheck_later(self) -> Cancellable:
        wait_s = self._recheck_s
        if self.principal.expires_at is not None:
            wait_s = min(wait_s, max(0.0, self.principal.expires_at - self._host.world.now()))
        return self._host.world.later(wait_s, self._must_look.set)

    async def _require_still_welcome(self) -> None:
        await self._authorizer.require_still(self.principal, self._began_at, self._host.world.now())
        if self._connection is not None:
            principal = await self._authorizer.principal_of(self._connection)
            if principal is None or principal.key != self.principal.key:
                raise UnauthorizedError("the credential of this connection is no longer valid")
            self.principal = principal
        for action in self._does:
            await self._authorizer.require(self.principal, self.session, action)


async def attribute(caller: Caller, received: Received) -> Received:
    """Return a client's command with the name of the caller, where it answers a question or opens a turn.

    Raises:
        AccessError: The caller may not answer questions of this session.
    """
    if isinstance(received.command, Answer):
        return replace(received, command=await caller.attribute(received.command))
    opens_turn = isinstance(received.command, SendMessage | Resume)
    return replace(received, caller=caller.caller) if opens_turn and caller.caller else received


def visitor_of(scope: Scope) -> Caller:
    """Return who visits."""
    visitor: Caller = scope.get(VISIT) or Stranger()
    return visitor


def visit_of(scope: Scope) -> KnownCaller:
    """Return the visit of an authenticated caller.

    Raises:
        UsageError: This server has no authentication.
    """
    visit = scope.get(VISIT)
    if not isinstance(visit, KnownCaller):
        raise UsageError("this server has no authentication, so it creates no credentials")
    return visit


def require_operator(scope: Scope, what: str) -> None:
    """Require the operator, where this server authenticates.

    Raises:
        AccessError: It is another principal.
    """
    visit = scope.get(VISIT)
    if isinstance(visit, KnownCaller) and not visit.principal.is_operator:
        raise AccessError(f"{what} of this server is for its operator only")
