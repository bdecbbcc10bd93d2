"""The HTTP endpoints: sessions as JSON, commands by POST, events by server-sent events.

`HttpEndpoints` are ordinary requests; `EventsEndpoint` is the stream protocol's way down for clients without a
WebSocket, as a plain ASGI callable.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from typing import Annotated, cast
from urllib.parse import urlencode

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.errors import (
    DrainingError,
    EventGoneError,
    MalformedFrameError,
    NotFoundError,
    RecoveringError,
    SessionNotFoundError,
    WrongSecretError,
)
from midstream.protocol.frames import AnswerPayload, EventId, Number, Open, decode_client, encode
from midstream.protocol.open_fields import merge_open_fields
from midstream.protocol.server_stream import FrameEncoding, answer_of
from midstream.protocol.sse import event_of_frame, events_of_records
from midstream.server.api.langgraph_threads import ThreadNotes
from midstream.server.api.problems import RecoveryProgress, problem_of, response_of
from midstream.server.api.request_bodies import body_of, optional
from midstream.server.api.session_snapshot import (
    SNAPSHOT_BYTES_MAX,
    SessionSnapshot,
    body_within,
    snapshot_of,
)
from midstream.server.auth.caller import Caller, visitor_of
from midstream.server.auth.principals import Action
from midstream.server.auth.unlocking import secrets_in, unlock_at_once, wait_for_refusal_interval
from midstream.server.transports.connection import Connection, Connections, FrameTransport
from midstream.server.transports.stream_headers import connection_name_of, open_of
from midstream.session.blobs import is_digest
from midstream.session.child_names import PART_MARK
from midstream.session.journal_reading import salvage
from midstream.session.questions import Question, questions_of
from midstream.session.records import OPEN_STATUSES, Record, SessionStatus, is_pruned
from midstream.session.records import encode as encode_record
from midstream.session.turn.commands import Cancel, Resume, Withdraw
from midstream.store.contract import ListPlace, SessionInfo, StoredRecord, is_session
from midstream.version import __version__

CURSOR_MARK = "~"
"""Stands between the time and the id of a session in the cursor of a listing."""
CURSOR = rf"[0-9]{{1,12}}\.[0-9]{{1,9}}{CURSOR_MARK}[!-~]{{1,512}}"
LIST_PAGE = 200
"""Sessions of a listing that are read at once."""
QUESTIONS_MAX = 500
"""Open questions in one answer; no person decides about more at a time."""
RECORDS_PER_READ = 1000
"""Records of an export that are in memory at a time."""

SSE = FrameEncoding(event_of_frame, events_of_records)
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    # A proxy that stores, compresses or buffers would hold the words back.
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]
SSE_PREAMBLE = b"retry: 1000\n\n"
"""Milliseconds after which a browser makes a cut connection again; its own default is three times as long."""


UNKNOWN = "midstream.cut"
"""Part of no body: Starlette's `BaseHTTPMiddleware` ends one well after an exception, and not after such a message."""


class StreamCutError(Exception):
    """Raised out of an event stream so that the ASGI server resets the connection.

    A body must not end cleanly before the turn has: the client would take that for the end (STREAM-27).
    """


class SessionLine(Struct, frozen=True):
    """One session of a listing; times in seconds since 1970."""

    id: str
    title: str
    status: SessionStatus
    turns: int
    created_at: float
    updated_at: float


class SessionPage(Struct, frozen=True):
    """Part of a listing, last changed first. `next` is the query of the next page, or null at the end."""

    sessions: list[SessionLine]
    next: str | None


class QuestionPage(Struct, frozen=True):
    """Open questions, the oldest first; `is_complete` unless more than `QUESTIONS_MAX` are open."""

    questions: list[Question]
    is_complete: bool


class SessionsQuery(Struct, frozen=True):
    """The part of a listing; `children=0` leaves out the sessions of sub-agents."""

    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    q: str = ""
    children: Annotated[int, Meta(ge=0, le=1)] = 1
    after: Annotated[str, Meta(pattern=f"^{CURSOR}$")] | UnsetType = UNSET


class QuestionsQuery(Struct, frozen=True):
    """The only session, with its sub-agents, whose questions are wanted."""

    session: str | UnsetType = UNSET


class RecordsQuery(Struct, frozen=True):
    """The part of a journal: `after` is a position, or an event id."""

    after: Annotated[str, Meta(pattern="^([0-9]{1,18}-)?[0-9]{1,18}$")] = "0"
    limit: Number | UnsetType = UNSET


class TurnQuery(Struct, frozen=True):
    """The only turn that a command is meant for."""

    turn: Number | UnsetType = UNSET


class MessageQuery(Struct, frozen=True):
    """The only queued message that a command is meant for."""

    number: Number | UnsetType = UNSET


class Health(Struct, frozen=True):
    """The process serves."""

    status: str
    version: str


class Readiness(Struct, frozen=True):
    """The server takes new work; `failed` recoveries, and `streams` that are open."""

    status: str
    failed: int
    streams: int


class CommandAnswer(Struct, frozen=True):
    """The newest event after a command was appended, and whether a turn runs."""

    event_id: str
    is_running: bool


class JournalLine(Struct, frozen=True):
    """One record of a journal, or null where it cannot be read."""

    id: str
    record: Record | None


class StreamEvent(Struct, frozen=True):
    """One server-sent event; `data` is a frame or a record as JSON."""

    event: str
    data: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/json"})]
    id: str | UnsetType = UNSET


class HttpEndpoints:
    """The requests with one answer."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections

    async def health(self, _: Request) -> Health:
        """Return that the process serves, and its version."""
        return Health("ok", __version__)

    async def ready(self, _: Request) -> Readiness | Response:
        """Return that the server takes new work: not while interrupted turns are recovered, nor while it drains."""
        recovery = self._host.recovery
        if self._host.is_draining:
            raise DrainingError("this server is shutting down; send new work to another one")
        if not recovery.is_done:
            message = f"{recovery.done} of {recovery.total} interrupted turns were examined"
            problem = problem_of(RecoveringError(message))
            return response_of(replace(problem, recovering=RecoveryProgress(recovery.done, recovery.total)))
        return Readiness("ready", recovery.failed, len(self._connections))

    async def sessions(self, request: Request, query: SessionsQuery) -> SessionPage:
        """List sessions, last changed first."""
        wanted = query.q.strip().casefold()
        lines: list[SessionLine] = []
        visitor = visitor_of(request.scope)
        async for line in self._lines_for(visitor, _place_of(query, visitor)):
            is_meant = wanted in line.id.casefold() or wanted in line.title.casefold()
            if not is_meant or not (query.children or PART_MARK not in line.id):
                continue
            if len(lines) == query.limit:
                kept = {
                    name: value for name, value in request.query_params.items() if name in ("q", "children")
                }
                after = f"{lines[-1].updated_at!r}{CURSOR_MARK}{lines[-1].id}"
                following = urlencode({"limit": query.limit, **kept, "after": after})
                return SessionPage(lines, f"?{following}")
            lines.append(line)
        return SessionPage(lines, None)

    async def _lines_for(self, visitor: Caller, after: ListPlace | None) -> AsyncIterator[SessionLine]:
        """Iterate over the sessions behind a place, a page at a time: what was listed is not read again."""
        visible = await visitor.visible_sessions()
        while True:
            count = 0
            async for info in self._host.store.list(of=visible, after=after, limit=LIST_PAGE):
                count += 1
                after = ListPlace(info.mark.at, info.session)
                if is_session(info.session) and await self._may_list(visitor, info.session):
                    status = SessionStatus.LOCKED if self._host.is_locked(info) else info.mark.status
                    yield _line_of(info, visitor.public_name(info.session), status)
            if count < LIST_PAGE:
                return

    async def _may_list(self, visitor: Caller, session: str) -> bool:
        """Whether a caller may see that a session exists: a stranger not one that requires a secret."""
        locks = self._host.locks
        if locks is not None and not visitor.is_known and await locks.escrow.holds(session):
            return False
        return await visitor.may_list(session)

    async def questions(self, request: Request, query: QuestionsQuery) -> QuestionPage:
        """List the open questions, the oldest first; `session` selects one session and its sub-agents.

        Of sessions that only their clients can open, those are left out that the secret of the request does not.
        """
        visitor, asked_at = visitor_of(request.scope), self._host.world.monotonic()
        named = None if query.session is UNSET else visitor.public_name(query.session)
        found: list[Question] = []
        async for info in self._host.store.list(of=await visitor.visible_sessions()):
            if info.mark.status not in OPEN_STATUSES:
                continue
            name = visitor.public_name(info.session)
            is_asked_for = named is None or name == named or name.startswith(named + PART_MARK)
            if not (is_asked_for and await visitor.may_list(info.session)):
                continue
            shown = secrets_in(request)
            with (
                suppress(WrongSecretError),
                await unlock_at_once(self._host, info.session, shown, Action.READ),
            ):
                found += questions_of(name, await self._host.glance(info.session))
        if self._host.locks is not None and not found:
            await wait_for_refusal_interval(self._host.world, asked_at)
        found.sort(key=lambda question: question.asked_at)
        return QuestionPage(found[:QUESTIONS_MAX], is_complete=len(found) <= QUESTIONS_MAX)

    async def show(self, request: Request) -> SessionSnapshot:
        """Return a session's transcript, and the event to follow it from."""
        session_id = request.path_params["session_id"]
        runner = await self._host.session(session_id)
        name = visitor_of(request.scope).public_name(session_id)
        waits_for = self._host.waits_for(runner)
        return snapshot_of(name, runner.state, str(runner.newest), waits_for)

    async def records(self, request: Request, query: RecordsQuery) -> Response:
        """Export a session's records, one JSON object in each line."""
        session_id = request.path_params["session_id"]
        after = EventId.parse(query.after if "-" in query.after else f"0-{query.after}").position
        info = await self._host.store.find(session_id)
        if info is None:
            raise SessionNotFoundError(f"no session {session_id!r}")
        if 0 < after < info.oldest:
            return await self._answer_gone(request, session_id)
        lines = self._lines(session_id, after, optional(query.limit), end=info.end)
        return StreamingResponse(lines, media_type="application/x-ndjson", headers=NO_STORE)

    async def _answer_gone(self, request: Request, session_id: str) -> Response:
        """Answer that events are no longer kept, with their snapshot, as a stream does (STREAM-63, 64)."""
        runner = await self._host.session(session_id)
        event_id, state = await runner.events.beginning()
        name, oldest = visitor_of(request.scope).public_name(session_id), event_id.position + 1
        message = f"events of session {name!r} before position {oldest} are no longer kept"
        snapshot = body_within(snapshot_of(name, state, str(event_id)), SNAPSHOT_BYTES_MAX)
        problem = problem_of(EventGoneError(message, oldest=oldest))
        return response_of(replace(problem, snapshot=msgspec.Raw(snapshot)))

    async def blob(self, request: Request) -> Response:
        """Return the text of a large result, which a record names by its digest."""
        session_id, digest = request.path_params["session_id"], request.path_params["digest"]
        body = await self._host.store.blob(session_id, digest) if is_digest(digest) else None
        if body is None:
            raise NotFoundError(f"session {session_id!r} has no such result")
        return Response(body, headers={**_AS_DATA, "etag": f'"{digest}"'}, media_type="text/plain")

    async def _lines(
        self, session_id: str, after: int, limit: int | None, *, end: int
    ) -> AsyncIterator[bytes]:
        """Yield lines, as far as the journal goes, and at least to `end`.

        Raises:
            StreamCutError: The session was deleted meanwhile, or pruned beyond what was sent.
        """
        left = limit
        while left is None or left > 0:
            most = RECORDS_PER_READ if left is None else min(left, RECORDS_PER_READ)
            page = await self._host.store.read(session_id, after=after, limit=most)
            if after and page and (page[0].position != after + 1 or is_pruned(page[0].body)):
                raise StreamCutError(EventGoneError.code)
            if not page:
                if after < end:
                    raise StreamCutError(SessionNotFoundError.code)
                return
            after = page[-1].position
            left = None if left is None else left - len(page)
            yield b"".join(
                b'{"id":"%d-%d","record":%b}\n' % (stored.epoch, stored.position, _json_of(stored))
                for stored in page
            )

    async def delete(self, request: Request) -> None:
        """Delete an idle session, with the sessions of its sub-agents."""
        session_id = request.path_params["session_id"]
        await self._host.delete(session_id)
        await ThreadNotes(self._host).delete(session_id)

    async def cancel(self, request: Request, query: TurnQuery) -> CommandAnswer:
        """Stop the running turn, if there is one; `turn` stops that turn and no later one."""
        runner = await self._host.session(request.path_params["session_id"])
        await runner.submit(Cancel(optional(query.turn)))
        return _answer_accepted(runner)

    async def answer(self, request: Request, body: AnswerPayload) -> CommandAnswer:
        """Answer the open question of a call: an approval, a question, or a call in doubt."""
        answer = await visitor_of(request.scope).attribute(answer_of(body))
        runner = await self._host.session(request.path_params["session_id"])
        await runner.submit(answer)
        return _answer_accepted(runner)

    async def resume(self, request: Request, query: TurnQuery) -> CommandAnswer:
        """Resume the last turn, which was interrupted or failed; `turn` resumes that one and no other."""
        turn = optional(query.turn)
        visitor_of(request.scope).count_command(Resume(turn))
        runner = await self._host.session(request.path_params["session_id"])
        await runner.submit(Resume(turn))
        return _answer_accepted(runner)

    async def withdraw(self, request: Request, query: MessageQuery) -> CommandAnswer:
        """Withdraw the queued message `number`, or all that wait."""
        runner = await self._host.session(request.path_params["session_id"])
        await runner.submit(Withdraw(optional(query.number)))
        return _answer_accepted(runner)


class SseTransport(FrameTransport):
    """Frames as server-sent events in the body of one answer; the way up is `POST …/commands`."""

    gap_s = 0.0
    is_full = False

    def __init__(self, receive: Receive, send: Send, *, ends_with_turn: bool) -> None:
        self.ends_with_turn = ends_with_turn
        self._receive = receive
        self._send = send
        self._preamble = SSE_PREAMBLE

    async def receive(self) -> bytes | None:
        """Wait until the client has gone: it sends nothing here."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        return None

    @override
    def send(self, frames: Sequence[bytes]) -> Awaitable[None]:
        body = b"".join((self._preamble, *frames)) if self._preamble else b"".join(frames)
        self._preamble = b""
        return self._send({"type": "http.response.body", "body": body, "more_body": True})


class EventsEndpoint:
    """Follow a session, or a stream, by server-sent events."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one reader. What is refused before the first event is an ordinary HTTP error.

        Raises:
            StreamCutError: The server ended it (draining, fenced, a store that fails), or another request of its client
                did (`close`); the body stays open-ended.
        """
        request = Request(scope, receive)
        opening, name = await opening_of(request), connection_name_of(request)
        session_id = scope["path_params"]["session_id"]
        settings = self._connections.choose_settings(session_id, name)
        stream = self._connections.stream(self._host, wire=SSE, settings=settings)
        transport = SseTransport(receive, send, ends_with_turn=bool(opening.stream))
        visitor = visitor_of(scope)
        with Connection(
            self._host, session_id, stream, transport, self._connections, visitor, name=name, request=request
        ) as connection:
            await connection.admit(encode(opening))
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            failure = await connection.run()
        if connection.is_gone:
            return
        if failure is not None or not connection.has_told_turn:
            with suppress(Exception):  # it is refused, or the reader of the body fails
                await send({"type": UNKNOWN})
            raise StreamCutError(failure.code if failure else "closed") from failure
        await send({"type": "http.response.body", "body": b""})


async def opening_of(request: Request) -> Open:
    """Return the `open` frame of a request: the body of a POST, or what the headers of a GET stand for (STREAM-37).

    Raises:
        MalformedFrameError: It is none; a header is too long, or is not a number, or contradicts the body.
        FrameTooLargeError, ConnectionLostError: As `body_of` does.
        UsageError: The query has another form.
        HTTPException: The request is neither a GET nor a POST.
    """
    if request.method == "POST":
        frame = decode_client(await body_of(request))
        if not isinstance(frame, Open):
            raise MalformedFrameError("the body of this request is one `open` frame")
        return merge_open_fields(open_of(request), frame)
    if request.method != "GET":
        raise HTTPException(405, headers={"allow": "GET, POST"})
    return open_of(request)


def _place_of(query: SessionsQuery, visitor: Caller) -> ListPlace | None:
    """Return the place in the listing behind which a page begins."""
    if query.after is UNSET:
        return None
    changed_at, _, session = query.after.partition(CURSOR_MARK)
    return ListPlace(float(changed_at), visitor.stored_name(session))


def _answer_accepted(runner: Runner) -> CommandAnswer:
    return CommandAnswer(str(runner.newest), runner.state.is_live)


def _line_of(info: SessionInfo, name: str, status: str) -> SessionLine:
    mark = info.mark
    return SessionLine(name, mark.title, cast("SessionStatus", status), mark.turns, info.created_at, mark.at)


def _json_of(stored: StoredRecord) -> bytes:
    """Return a record as JSON also where it is damaged: one bad line must not cost the others."""
    try:
        msgspec.json.decode(stored.body, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = salvage(stored.body)
        return b"null" if found is None else encode_record(found)
    return stored.body


_AS_DATA = {
    # What a tool returned may be anything: no browser shows it as a page, or runs it.
    "content-security-policy": "default-src 'none'; sandbox",
    "x-content-type-options": "nosniff",
    # It never changes; a session that is deleted should not stay in browsers for long.
    "cache-control": "private, max-age=86400, immutable",
}
NO_STORE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def json_response(value: object, *, status: int = 200) -> Response:
    """Return a value as a JSON answer that must not be cached."""
    return Response(msgspec.json.encode(value), status, headers=NO_STORE, media_type="application/json")
