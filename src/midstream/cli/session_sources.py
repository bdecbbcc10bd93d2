"""Sources of `midstream sessions`: a store, which a server may use at the same time, or a server."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar
from urllib.parse import quote, urlsplit

import click
import msgspec
from msgspec import Struct
from typing_extensions import override

from midstream.cli import Invocation
from midstream.cli.session_secret import FILE_VARIABLE, delete_secret, read_secrets
from midstream.client.transports import base_url, problem_in, refusal_of
from midstream.environment import World
from midstream.errors import (
    ConnectionLostError,
    KeyMissingError,
    MidstreamError,
    NotFoundError,
    ProtocolError,
    SessionLockedError,
    SessionNotFoundError,
    UnauthorizedError,
    UsageError,
)
from midstream.local_keys import headers_for
from midstream.paths import Paths
from midstream.protocol.frames import EventId
from midstream.session.child_names import PART_MARK
from midstream.session.questions import Question, questions_of
from midstream.session.records import OPEN_STATUSES, decode
from midstream.session.session import Session, evolve
from midstream.store.blocking_reads import ENCRYPTED_MARKS
from midstream.store.contract import SessionInfo, is_session
from midstream.store.guard.store_marker import refuse_encrypted
from midstream.store.key_location import KeyLocation
from midstream.store.node_reports import NODES, NodeLine, lines_of
from midstream.store.store_registry import open_store, read_store

T = TypeVar("T")

PAGE = 200
"""Sessions or records of one read."""
CANDIDATES_MAX = 5
"""Sessions that the message about an ambiguous prefix lists."""
ANSWER_S = 30.0
"""Time limit of one answer of a server, in seconds."""


class ListedSession(Struct, frozen=True):
    """One session of a listing, as in the server's HTTP interface; times in seconds since 1970."""

    id: str
    title: str
    status: str
    turns: int
    created_at: float
    updated_at: float


class ExportLine(Struct, frozen=True):
    """One record of an export: its event id, its JSON, and the large result to which it refers."""

    id: str
    record: msgspec.Raw
    whole: str | msgspec.UnsetType = msgspec.UNSET


class SessionExportLine(ExportLine, frozen=True, kw_only=True):
    """One record of an export of all sessions."""

    session: str


class Source(Protocol):
    """Interface of a source of sessions."""

    def list(self) -> Iterator[ListedSession]:
        """Yield the sessions, newest change first."""

    def find_unlisted(self, session: str) -> ListedSession | None:  # noqa: ARG002 - most sources list all
        """Return a session that the list omits, by its whole id. By default the list has all.

        Raises:
            WrongSecretError: There is no such session, or the secret does not open it.
        """
        return None

    def records(self, session: str) -> Iterator[ExportLine]:
        """Yield a session's records from the first.

        Raises:
            SessionNotFoundError: The session does not exist.
        """

    def questions(self, session: str | None) -> Sequence[Question]:
        """Return open questions, oldest first: of all sessions, or of one session and its sub-agents."""

    def blob(self, session: str, digest: str) -> bytes | None:
        """Return a large result of a session by its digest, or None."""

    def nodes(self) -> Sequence[NodeLine]:
        """Return the servers that share the store, oldest first.

        Raises:
            KeyMissingError: The store is encrypted, and its keys were not given.
        """

    def delete(self, session: str) -> None:
        """Delete a session permanently.

        Raises:
            SessionNotFoundError: The session does not exist.
            SessionBusyError, LeaseHeldError: A process runs the session. Nothing was changed.
        """


def resolve(source: Source, name: str) -> ListedSession:
    """Return the session for `name`: an id, a unique beginning of one, or `-` for the last changed session.

    Sessions of sub-agents match only if the name contains their mark.

    Raises:
        SessionNotFoundError: No session matches.
        UsageError: Several sessions match.
        WrongSecretError: See `Source.find_unlisted`.
    """
    begins: list[ListedSession] = []
    for line in source.list():
        if PART_MARK in line.id and PART_MARK not in name:
            continue  # a sub-agent's session must be named explicitly
        if name in ("-", line.id):
            return line
        if line.id.startswith(name):
            begins.append(line)
    if len(begins) > 1:
        named = ", ".join(repr(line.id) for line in begins[:CANDIDATES_MAX])
        more = ", ..." if len(begins) > CANDIDATES_MAX else ""
        raise UsageError(f"{name!r} is ambiguous: {named}{more}; give more of the id")
    if not begins and name != "-" and (unlisted := source.find_unlisted(name)) is not None:
        return unlisted
    if not begins:
        missing = "there are no sessions" if name == "-" else f"no session {name!r}"
        raise SessionNotFoundError(missing)
    return begins[0]


class StoreSource(Source):
    """A store, read without a server. Only `delete` opens it for writing.

    Args:
        named: URL of the store, or path of a SQLite file.
        key_file: The operator's keys of an encrypted store.
    """

    def __init__(self, named: str | Path, key_file: KeyLocation | None = None) -> None:
        self._named = named
        self._key_file = key_file

    @override
    def list(self) -> Iterator[ListedSession]:
        with read_store(self._named, key_file=self._key_file) as store:
            yield from (_line_of(line) for line in store.list() if is_session(line.session))

    @override
    def records(self, session: str) -> Iterator[ExportLine]:
        with read_store(self._named) as store:
            if store.find(session) is None:
                raise SessionNotFoundError(f"no session {session!r}")
            is_locked = store.is_under_client_key(session)
        with read_store(self._named, key_file=None if is_locked else self._key_file) as store:
            after = 0
            while page := store.read(session, after=after, limit=PAGE):
                after = page[-1].position
                for stored in page:
                    if stored.body[:1] in ENCRYPTED_MARKS:
                        raise _unreadable(session, is_locked=is_locked)
                    yield ExportLine(f"{stored.epoch}-{stored.position}", msgspec.Raw(stored.body))

    @override
    def questions(self, session: str | None) -> Sequence[Question]:
        found: list[Question] = []
        for line in self.list():
            is_meant = session is None or line.id == session or line.id.startswith(session + PART_MARK)
            if line.status in OPEN_STATUSES and is_meant:
                found += questions_of(line.id, self._fold(line.id))
        return sorted(found, key=lambda question: question.asked_at)

    def _fold(self, session: str) -> Session:
        state = Session()
        for line in self.records(session):
            state = evolve(state, decode(bytes(line.record)), epoch=EventId.parse(line.id).epoch)
        return state

    @override
    def blob(self, session: str, digest: str) -> bytes | None:
        with read_store(self._named, key_file=self._key_file) as store:
            return store.blob(session, digest)

    @override
    def nodes(self) -> Sequence[NodeLine]:
        with read_store(self._named, key_file=self._key_file) as store:
            if self._key_file is None:
                store.ask(refuse_encrypted)  # the reports are encrypted, too
            return lines_of(store.kv_list(NODES), now=World().now())

    @override
    def delete(self, session: str) -> None:
        if not asyncio.run(self._delete(session)):
            raise SessionNotFoundError(f"no session {session!r}")

    async def _delete(self, session: str) -> bool:
        store = open_store(self._named)
        await store.open()
        try:
            return await store.delete(session)
        finally:
            await store.close()


def with_whole(source: Source, session: str, line: ExportLine) -> ExportLine:
    """Return a line with the large result to which its record refers, if it exists."""
    try:
        named = msgspec.json.decode(line.record, type=_Naming).result.blob
    except msgspec.DecodeError:  # not a record of a result, or unreadable: export it unchanged
        return line
    body = source.blob(session, named) if named else None
    return line if body is None else ExportLine(line.id, line.record, body.decode())


class _Named(Struct, frozen=True):
    blob: str = ""


class _Naming(Struct, frozen=True):
    result: _Named = _Named()


def _unreadable(session: str, *, is_locked: bool) -> MidstreamError:
    name, ask = repr(session), "use its server with --url"
    if not is_locked:
        brought = f"give the key file with --key-file, or {ask}"
        return KeyMissingError(f"session {name} is encrypted under a key of its server's operator: {brought}")
    brought = f"{FILE_VARIABLE} may name a file with the secret"
    return SessionLockedError(f"session {name} is encrypted under its client's secret: {ask} ({brought})")


def _line_of(info: SessionInfo) -> ListedSession:
    mark = info.mark
    return ListedSession(info.session, mark.title, mark.status, mark.turns, info.created_at, mark.at)


class _Page(Struct, frozen=True):
    sessions: list[ListedSession]
    next: str | None


class _Questions(Struct, frozen=True):
    questions: tuple[Question, ...]


class _RunningTurn(Struct, frozen=True):
    turn: int


class _QueuedMessage(Struct, frozen=True):
    number: int


class SessionNow(Struct, frozen=True):
    """State of a session: the required part of a snapshot."""

    event_id: str
    status: str
    waiting_on: str
    turns: int
    last: str
    running: _RunningTurn | None
    queue: tuple[_QueuedMessage, ...] = ()
    is_resumable: bool = False


class CommandResult(Struct, frozen=True):
    """State of a session after a server executed a command."""

    event_id: str
    is_running: bool


class _Health(Struct, frozen=True):
    status: str


class _Issued(Struct, frozen=True):
    token: str


class IssuedCredential(Struct, frozen=True):
    """A credential that a server issued; times in seconds since 1970."""

    id: str
    kind: str
    principal: str
    issued_by: str
    issued_at: float
    used_at: float
    ends_at: float
    expires_at: float
    parent: str
    session: str


class IssuedCredentials(Struct, frozen=True):
    """Credentials, newest write first; `is_complete` if the list is complete."""

    credentials: list[IssuedCredential]
    is_complete: bool


class _Count(Struct, frozen=True):
    count: int


class _Nodes(Struct, frozen=True):
    nodes: tuple[NodeLine, ...]


class ServerSource(Source):
    """A running server, over its HTTP interface.

    Raises:
        UsageError: `url` is not of the form `http://host:port`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(base_url(url))
        assert parts.hostname is not None, "`base_url` has checked the address"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.url = url
        """The given URL."""
        self._connection = kind(parts.hostname, parts.port, timeout=ANSWER_S)
        self._path = parts.path
        self._places = _places()

    @override
    def list(self) -> Iterator[ListedSession]:
        query: str | None = f"?limit={PAGE}"
        while query is not None:
            page = self._read(self._request("GET", f"/v1/sessions{query}").read(), _Page)
            yield from page.sessions
            query = page.next

    @override
    def find_unlisted(self, session: str) -> ListedSession | None:
        # Without authentication, a server lists no sessions that are encrypted under their clients' secrets.
        try:
            now = self.snapshot(session)
        except SessionNotFoundError:
            return None
        return ListedSession(session, "", now.status, now.turns, 0.0, 0.0)

    @override
    def records(self, session: str) -> Iterator[ExportLine]:
        with self._request_of(session, "GET", "/records") as answer:
            for line in iter(answer.readline, b""):
                yield self._read(line, ExportLine)

    @override
    def questions(self, session: str | None) -> Sequence[Question]:
        if session is None:
            return self._read(self._request("GET", "/v1/questions").read(), _Questions).questions
        path, shown = f"/v1/questions?session={quote(session, safe='')}", self._secret_of(session)
        return self._read(self._request("GET", path, shown=shown).read(), _Questions).questions

    def snapshot(self, session: str) -> SessionNow:
        """Return the current state of a session.

        Raises:
            SessionNotFoundError: The session does not exist.
        """
        return self._read(self._request_of(session, "GET").read(), SessionNow)

    def send_command(
        self, session: str, what: str, *, number: tuple[str, int] | None = None, body: bytes = b""
    ) -> CommandResult:
        """Send a command to a session: `answer`, `resume`, `cancel` or `withdraw`.

        Args:
            number: Name and value of a number in the query.

        Raises:
            MidstreamError: The server refused it. Nothing was changed.
        """
        query = f"?{number[0]}={number[1]}" if number else ""
        return self._read(self._request_of(session, "POST", f"/{what}{query}", body).read(), CommandResult)

    @override
    def blob(self, session: str, digest: str) -> bytes | None:
        try:
            return self._request_of(session, "GET", f"/blobs/{digest}").read()
        except NotFoundError:
            return None

    @override
    def delete(self, session: str) -> None:
        self._request_of(session, "DELETE").read()
        delete_secret(self.url, session, self._places)

    @override
    def nodes(self) -> Sequence[NodeLine]:
        return self._read(self._request("GET", "/v1/nodes").read(), _Nodes).nodes

    def login_link(self) -> str:
        """Return a one-time login code for a browser.

        Raises:
            NotFoundError: The server runs without authentication.
            UnauthorizedError: The server does not accept the credentials of this user.
        """
        return self._read(self._request_access("POST", "/v1/login-links"), _Issued).token

    def credentials(self) -> IssuedCredentials:
        """Return the credentials that this user's principal may revoke.

        Raises:
            NotFoundError: The server runs without authentication.
            UnauthorizedError: The server does not accept the credentials of this user.
        """
        return self._read(self._request_access("GET", "/v1/access"), IssuedCredentials)

    def revoke(self, credential: str) -> int:
        """Revoke a credential with all derived ones; return the number.

        Raises:
            NotFoundError: The id is unknown.
        """
        try:
            answer = self._request("DELETE", f"/v1/access/{quote(credential, safe='')}").read()
        except NotFoundError:
            self.credentials()  # raises where the server has no credentials at all
            raise
        return self._read(answer, _Count).count

    def revoke_all(self, principal: str | None) -> int:
        """Revoke all credentials of a principal, by default this user's own; return the number.

        Raises:
            AccessError: Only an operator may revoke those of another principal.
        """
        query = "" if principal is None else f"?principal={quote(principal, safe='')}"
        return self._read(self._request_access("DELETE", f"/v1/access{query}"), _Count).count

    def _request_access(self, method: str, path: str) -> bytes:
        try:
            return self._request(method, path).read()
        except NotFoundError as error:
            raise NotFoundError(
                f"the server at {self.url} issues no credentials: it runs without authentication (--no-auth). "
                "Use it without a token or a login"
            ) from error

    def greet(self) -> None:
        """Check that a midstream server answers.

        Raises:
            ConnectionLostError: No server answers.
            MidstreamError: Another server answers.
        """
        try:
            self._read(self._request("GET", "/health").read(), _Health)
        except (
            NotFoundError,
            UnauthorizedError,
        ) as error:  # a midstream server answers this path without credentials
            raise ProtocolError(f"the server at {self.url} does not serve midstream at this path") from error

    def _request_of(
        self, session: str, method: str, what: str = "", body: bytes = b""
    ) -> http.client.HTTPResponse:
        path = f"/v1/sessions/{quote(session, safe='')}{what}"
        return self._request(method, path, body, shown=self._secret_of(session))

    def _secret_of(self, session: str) -> Mapping[str, str]:
        return read_secrets(self.url, session, self._places).headers

    def _request(
        self, method: str, path: str, body: bytes = b"", *, shown: Mapping[str, str] = MappingProxyType({})
    ) -> http.client.HTTPResponse:
        try:
            # One connection for each request: none needs closing later, and the server proves its identity for each.
            credential = headers_for(self.url, self._places)
            headers = {"connection": "close", "x-midstream": "cli", **credential, **shown}
            self._connection.request(method, self._path + path, body=body or None, headers=headers)
            answer = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ConnectionLostError(f"no answer from {self.url} ({type(error).__name__})") from error
        if http.client.MULTIPLE_CHOICES <= answer.status < http.client.BAD_REQUEST:
            raise ProtocolError(
                f"{self.url} redirects to another address, which is not followed: give the address of the server itself"
            )
        if answer.status >= http.client.BAD_REQUEST:
            body_of_refusal = answer.read()
            if problem_in(body_of_refusal) is None:
                raise ProtocolError(f"{self.url} does not answer like a midstream server")
            raise refusal_of(answer.status, body_of_refusal)
        return answer

    def _read(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ProtocolError(f"{self.url} does not answer like a midstream server") from error


def _places() -> Paths | None:
    """Return the folders of the current command, which depend on `--home`."""
    context = click.get_current_context(silent=True)
    invocation = context.find_object(Invocation) if context else None
    return invocation.places if invocation else None
