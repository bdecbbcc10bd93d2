"""Authorizer: the one place that decides about a caller, for a request as for a stream that lives for hours.

A credential is looked for in this order: a ticket, a viewer's pass, a cookie of ours, then whatever the application's
`authenticate` finds. Somebody who may not even see a session is told that there is none.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec.structs import replace
from starlette.requests import HTTPConnection

from midstream.core.parts import root_of
from midstream.errors import AccessError, SessionNotFoundError, UnauthorizedError
from midstream.server.access import Access, bearer_token, settled
from midstream.server.guards import page_of
from midstream.server.passes import Kind, Pass, Passes, key_of
from midstream.server.rights import Owner, Rights, is_of_tenant, name_in_store
from midstream.server.subjects import Action, Subject
from midstream.store.contract import Store

COOKIE = "midstream"
HOST_COOKIE = f"__Host-{COOKIE}"
"""Over HTTPS: no other host or path can have set it."""


class Verdict(IntEnum):
    """How much somebody may do with a session."""

    NOTHING = 0
    """For them it is not there."""
    LOOK = 1
    ALL = 2
    BEGIN = 3
    """It is nobody's, and not there: who begins it owns it."""


class Judge:
    """Decide who asks and what they may do."""

    def __init__(self, access: Access, store: Store, rights: Rights, passes: Passes) -> None:
        self._access = access
        self._store = store
        self._rights = rights
        self._passes = passes

    async def subject_of(self, connection: HTTPConnection) -> Subject | None:
        """Return who asks, by anything but a ticket; None for a stranger.

        Raises:
            UnauthorizedError: A pass was shown that is not, or no longer, good.
        """
        token = bearer_token(connection)
        if token.startswith(f"{Kind.VIEWER.value}-"):
            return await self._by_pass(Kind.VIEWER, token)
        subject = await settled(self._access.authenticate(connection))
        if subject is None and not token and (kept := cookie_of(connection)):
            return await self._by_pass(Kind.COOKIE, kept)
        return subject

    async def by_ticket(self, ticket: str, connection: HTTPConnection, session: str) -> Subject:
        """Use a ticket up and return whose it was.

        Raises:
            UnauthorizedError: It is none, was used, came late, or is for another session or page.
        """
        taken = await self._passes.take(Kind.TICKET, ticket)
        asked = (name_in_store(session, taken.subject.tenant), page_of(connection.scope))
        if asked != (taken.session, taken.origin):
            raise UnauthorizedError("this ticket is for another session or page")
        await self._require_still_good(taken)
        if taken.action == Action.READ:  # good for looking, whoever asked for it
            return replace(taken.subject, session=root_of(taken.session))
        return taken.subject

    async def by_link(self, word: str) -> Subject:
        """Use a link to log in with up and return whom it is for.

        Raises:
            UnauthorizedError: It is none, was used, or came late.
        """
        taken = await self._passes.take(Kind.LOGIN, word)
        await self._require_not_locked_out(taken.subject, taken.issued_at)
        return taken.subject

    @property
    def asks_application(self) -> bool:
        """Whether an application decides, and not the rows of owners."""
        return self._access.authorize is not None

    async def verdict(self, subject: Subject, session: str, action: Action) -> Verdict:
        """Say how much a subject may do with a session of the store; `action` is what it is about to do."""
        if not is_of_tenant(session, subject.tenant) or (
            subject.session and subject.session != root_of(session)
        ):
            return Verdict.NOTHING
        owner = await self._rights.owner_of(session)
        if owner is not None and owner.tenant != subject.tenant and not _runs_everything(subject):
            return Verdict.NOTHING
        if owner is not None and subject.claim not in ("", owner.claim):
            return Verdict.NOTHING  # it may look at a session that had this name before
        verdict = await self._verdict(subject, session, owner)
        if self._access.authorize is not None:
            told = await self._as_told(subject, session, action, owner)
            verdict = verdict if verdict is Verdict.BEGIN and told is Verdict.ALL else told
        return min(verdict, Verdict.LOOK) if subject.session else verdict

    async def require(self, subject: Subject, session: str, action: Action) -> Verdict:
        """Return the verdict where it allows the action.

        Raises:
            SessionNotFoundError: The subject may not see it.
            AccessError: It may look, and no more.
        """
        verdict = await self.verdict(subject, session, action)
        if verdict is Verdict.NOTHING:
            raise SessionNotFoundError(f"there is no session {session!r}")
        if verdict is Verdict.LOOK and action is not Action.READ:
            raise AccessError("you may look at this session, and no more")
        return verdict

    async def require_still(self, subject: Subject, since: float, now: float) -> None:
        """Look whether a subject that came at `since` (seconds since 1970) may still be here.

        Raises:
            UnauthorizedError: Its credential has ended, or it was locked out.
        """
        if subject.expires_at is not None and subject.expires_at <= now:
            raise UnauthorizedError("the credential of this connection has ended: show a new one")
        if subject.via and not await self._passes.has(subject.via):
            raise UnauthorizedError("what this connection was let in by is no longer good")
        await self._require_not_locked_out(subject, since)

    async def _verdict(self, subject: Subject, session: str, owner: Owner | None) -> Verdict:
        if owner is None and await self._store.find(root_of(session)) is None:
            return Verdict.BEGIN
        if subject.is_operator:
            return Verdict.ALL
        if owner is None:
            return Verdict.NOTHING
        if subject.session or subject.id in owner.readers:
            return Verdict.LOOK
        return Verdict.ALL if subject.id == owner.subject else Verdict.NOTHING

    async def _as_told(self, subject: Subject, session: str, action: Action, owner: Owner | None) -> Verdict:
        authorize = self._access.authorize
        assert authorize is not None
        if await settled(authorize(subject, action, session, owner)):
            return Verdict.LOOK if action is Action.READ else Verdict.ALL
        may_look = action is not Action.READ and await settled(
            authorize(subject, Action.READ, session, owner)
        )
        return Verdict.LOOK if may_look else Verdict.NOTHING

    async def _by_pass(self, kind: Kind, word: str) -> Subject:
        shown = await self._passes.show(kind, word)
        await self._require_still_good(shown)
        return replace(shown.subject, expires_at=shown.expires_at, via=key_of(word))

    async def _require_still_good(self, shown: Pass) -> None:
        """Let what was issued for a cookie, or for a viewer's pass, be good no longer than that is."""
        if shown.subject.via and not await self._passes.has(shown.subject.via):
            raise UnauthorizedError(f"what this {shown.kind.value} was issued for is no longer good")
        await self._require_not_locked_out(shown.subject, shown.issued_at)

    async def _require_not_locked_out(self, subject: Subject, since: float) -> None:
        if await self._rights.locked_out_at(subject) >= since:
            raise UnauthorizedError("this subject was locked out: show a new credential")


def _runs_everything(subject: Subject) -> bool:
    return subject.is_operator and not subject.tenant


def has_shown_something(connection: HTTPConnection) -> bool:
    """Whether a request came with a credential, good or not."""
    return "authorization" in connection.headers or bool(cookie_of(connection))


def cookie_of(connection: HTTPConnection) -> str:
    """Return the value of our cookie, "" where there is none."""
    return connection.cookies.get(HOST_COOKIE) or connection.cookies.get(cookie_name(connection)) or ""


def cookie_name(connection: HTTPConnection) -> str:
    """Return the name of our cookie: without TLS it has the port in it, since browsers mix up the ports of a host."""
    if connection.url.scheme in {"https", "wss"}:
        return HOST_COOKIE
    return f"{COOKIE}-{connection.url.port or 80}"
