"""The HTTP endpoints: sessions as JSON, commands by POST, events by server-sent events.

`HttpEndpoints` serves ordinary requests. `EventsEndpoint` sends the frames of the stream protocol to clients without a
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
from midstream.protocol.open_frame import merge_open_fields
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
from midstream.server.auth.caller import Caller, caller_of
from midstream.server.auth.principals import Action
from midstream.server.auth.session_unlocking import secrets_in, unlock_at_once, wait_for_refusal_interval
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
"""Separates the time and the id of a session in the cursor of a listing."""
CURSOR = rf"[0-9]{{1,12}}\.[0-9]{{1,9}}{CURSOR_MARK}[!-~]{{1,512}}"
LIST_PAGE = 200
"""Sessions of one read for a listing."""
QUESTIONS_MAX = 500
"""Greatest number of open questions in one answer."""
RECORDS_PER_READ = 1000
"""Records of one read for an export."""

SSE = FrameEncoding(event_of_frame, events_of_records)
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    # A proxy that stores, compresses or buffers would delay events.
    (b"cache-control", b"no-store, no-transform"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]
SSE_PREAMBLE = b"retry: 1000\n\n"
"""Reconnects a browser after 1000 ms; the default of browsers is three times as long."""


UNKNOWN = "midstream.cut"
"""Message type that ends no body. Starlette's `BaseHTTPMiddleware` ends a body cleanly after an exception, but not
after an unknown message."""


class StreamCutError(Exception):
    """Raised out of an event stream so that the ASGI server resets the connection.

    A body must not end cleanly before its turn: the client would assume the end of the turn (STREAM-27).
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
    """Part of a listing, newest change first. `next` is the query of the next page, or null at the end."""

    sessions: list[SessionLine]
    next: str | None


class QuestionPage(Struct, frozen=True):
    """Open questions, oldest first; `is_complete` unless more than `QUESTIONS_MAX` are open."""

    questions: list[Question]
    is_complete: bool


class SessionsQuery(Struct, frozen=True):
    """The requested part of a listing; `children=0` omits the sessions of sub-agents."""

    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    q: str = ""
    children: Annotated[int, Meta(ge=0, le=1)] = 1
    after: Annotated[str, Meta(pattern=f"^{CURSOR}$")] | UnsetType = UNSET


class QuestionsQuery(Struct, frozen=True):
    """The session, with its sub-agents, whose questions are requested; all by default."""

    session: str | UnsetType = UNSET


class RecordsQuery(Struct, frozen=True):
    """The requested part of a journal: `after` is a position or an event id."""

    after: Annotated[str, Meta(pattern="^([0-9]{1,18}-)?[0-9]{1,18}$")] = "0"
    limit: Number | UnsetType = UNSET


class TurnQuery(Struct, frozen=True):
    """The turn to which a command is limited."""

    turn: Number | UnsetType = UNSET


class MessageQuery(Struct, frozen=True):
    """The queued message to which a command is limited."""

    number: Number | UnsetType = UNSET


class Health(Struct, frozen=True):
    """Answer of a running process."""

    status: str
    version: str


class Readiness(Struct, frozen=True):
    """Answer of a server that accepts new work: `failed` recoveries, and open `streams`."""

    status: str
    failed: int
    streams: int


class CommandAnswer(Struct, frozen=True):
    """The newest event after the append of a command, and whether a turn runs."""

    event_id: str
    is_running: bool


class JournalLine(Struct, frozen=True):
    """One record of a journal; null if it cannot be read."""

    id: str
    record: Record | None


class StreamEvent(Struct, frozen=True):
    """One server-sent event; `data` is a frame or a record as JSON."""

    event: str
    data: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/json"})]
    id: str | UnsetType = UNSET


class HttpEndpoints:
    """Endpoints with one answer."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections

    async def health(self, _: Request) -> Health:
        """Return the version of a running process."""
        return Health("ok", __version__)

    async def ready(self, _: Request) -> Readiness | Response:
        """Return whether the server accepts new work: it does not during recovery and while it drains."""
        recovery = self._host.recovery
        if self._host.is_draining:
            raise DrainingError("this server is shutting down; send new work to another one")
        if not recovery.is_done:
            message = f"{recovery.done} of {recovery.total} interrupted turns were recovered"
            problem = problem_of(RecoveringError(message))
            return response_of(replace(problem, recovering=RecoveryProgress(recovery.done, recovery.total)))
        return Readiness("ready", recovery.failed, len(self._connections))

    async def sessions(self, request: Request, query: SessionsQuery) -> SessionPage:
        """List sessions, newest change first."""
        wanted = query.q.strip().casefold()
        lines: list[SessionLine] = []
        caller = caller_of(request.scope)
        async for line in self._lines_for(caller, _place_of(query, caller)):
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

    async def _lines_for(self, caller: Caller, after: ListPlace | None) -> AsyncIterator[SessionLine]:
        """Yield the sessions after a place in the listing, with one read for each page."""
        visible = await caller.visible_sessions()
        while True:
            count = 0
            async for info in self._host.store.list(of=visible, after=after, limit=LIST_PAGE):
                count += 1
                after = ListPlace(info.mark.at, info.session)
                if is_session(info.session) and await self._may_list(caller, info.session):
                    status = SessionStatus.LOCKED if self._host.is_locked(info) else info.mark.status
                    yield _line_of(info, caller.public_name(info.session), status)
            if count < LIST_PAGE:
                return

    async def _may_list(self, caller: Caller, session: str) -> bool:
        """Return whether a caller may list a session. Without authentication, sessions with a secret are not listed."""
        locks = self._host.locks
        if locks is not None and not caller.is_known and await locks.escrow.holds(session):
            return False
        return await caller.may_list(session)

    async def questions(self, request: Request, query: QuestionsQuery) -> QuestionPage:
        """List the open questions, oldest first; `session` selects one session and its sub-agents.

        Sessions with encryption by their clients are left out, unless the secret of the request opens them.
        """
        caller, asked_at = caller_of(request.scope), self._host.world.monotonic()
        named = None if query.session is UNSET else caller.public_name(query.session)
        found: list[Question] = []
        async for info in self._host.store.list(of=await caller.visible_sessions()):
            if info.mark.status not in OPEN_STATUSES:
                continue
            name = caller.public_name(info.session)
            is_selected = named is None or name == named or name.startswith(named + PART_MARK)
            if not (is_selected and await caller.may_list(info.session)):
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
        """Return a session's transcript, and the event id from which to follow it."""
        session_id = request.path_params["session_id"]
        runner = await self._host.session(session_id)
        name = caller_of(request.scope).public_name(session_id)
        waits_for = self._host.awake.waits_for(runner)
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
        """Refuse a request for pruned events, with their snapshot, as streams do (STREAM-63, 64)."""
        runner = await self._host.session(session_id)
        event_id, state = await runner.events.beginning()
        name, oldest = caller_of(request.scope).public_name(session_id), event_id.position + 1
        message = f"events of session {name!r} before position {oldest} are no longer kept"
        snapshot = body_within(snapshot_of(name, state, str(event_id)), SNAPSHOT_BYTES_MAX)
        problem = problem_of(EventGoneError(message, oldest=oldest))
        return response_of(replace(problem, snapshot=msgspec.Raw(snapshot)))

    async def blob(self, request: Request) -> Response:
        """Return the text of a large result by its digest."""
        session_id, digest = request.path_params["session_id"], request.path_params["digest"]
        body = await self._host.store.blob(session_id, digest) if is_digest(digest) else None
        if body is None:
            raise NotFoundError(f"session {session_id!r} does not have this result")
        return Response(body, headers={**_AS_DATA, "etag": f'"{digest}"'}, media_type="text/plain")

    async def _lines(
        self, session_id: str, after: int, limit: int | None, *, end: int
    ) -> AsyncIterator[bytes]:
        """Yield the records of a journal as lines, at least to `end`.

        Raises:
            StreamCutError: The session was deleted meanwhile, or records that were not sent yet were pruned.
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
        """Stop the running turn, if any; with `turn`, stop only that turn."""
        runner = await self._host.session(request.path_params["session_id"])
        await runner.submit(Cancel(optional(query.turn)))
        return _answer_accepted(runner)

    async def answer(self, request: Request, body: AnswerPayload) -> CommandAnswer:
        """Answer the open question of a call: an approval, a question, or a call in doubt."""
        answer = await caller_of(request.scope).attribute(answer_of(body))
        runner = await self._host.session(request.path_params["session_id"])
        await runner.submit(answer)
        return _answer_accepted(runner)

    async def resume(self, request: Request, query: TurnQuery) -> CommandAnswer:
        """Resume the last turn, which was interrupted or failed; with `turn`, resume only that turn."""
        turn = optional(query.turn)
        caller_of(request.scope).count_command(Resume(turn))
        runner = await self._host.session(request.path_params["session_id"])
        await runner.submit(Resume(turn))
        return _answer_accepted(runner)

    async def withdraw(self, request: Request, query: MessageQuery) -> CommandAnswer:
        """Withdraw the queued message `number`, or all queued messages."""
        runner = await self._host.session(request.path_params["session_id"])
        await runner.submit(Withdraw(optional(query.number)))
        return _answer_accepted(runner)


class SseTransport(FrameTransport):
    """Transport of frames as server-sent events in one answer; clients send frames with `POST …/commands`."""

    gap_s = 0.0
    is_full = False

    def __init__(self, receive: Receive, send: Send, *, ends_with_turn: bool) -> None:
        self.ends_with_turn = ends_with_turn
        self._receive = receive
        self._send = send
        self._preamble = SSE_PREAMBLE

    async def receive(self) -> bytes | None:
        """Wait until the client disconnects; it sends no frames here."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        return None

    @override
    def send(self, frames: Sequence[bytes]) -> Awaitable[None]:
        body = b"".join((self._preamble, *frames)) if self._preamble else b"".join(frames)
        self._preamble = b""
        return self._send({"type": "http.response.body", "body": body, "more_body": True})


class EventsEndpoint:
    """Endpoint of server-sent events for a session or a stream."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one reader. A refusal before the first event is an ordinary HTTP error.

        Raises:
            StreamCutError: The server (draining, fencing, a failing store) or a `close` of the client ended the body
                early.
        """
        request = Request(scope, receive)
        opening, name = await opening_of(request), connection_name_of(request)
        session_id = scope["path_params"]["session_id"]
        settings = self._connections.choose_settings(session_id, name)
        stream = self._connections.stream(self._host, wire=SSE, settings=settings)
        transport = SseTransport(receive, send, ends_with_turn=bool(opening.stream))
        caller = caller_of(scope)
        with Connection(
            self._host, session_id, stream, transport, self._connections, caller, name=name, request=request
        ) as connection:
            await connection.admit(encode(opening))
            await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
            failure = await connection.run()
        if connection.is_gone:
            return
        if failure is not None or not connection.has_sent_turn:
            with suppress(Exception):  # the message is refused, or the send fails
                await send({"type": UNKNOWN})
            raise StreamCutError(failure.code if failure else "closed") from failure
        await send({"type": "http.response.body", "body": b""})


async def opening_of(request: Request) -> Open:
    """Return the `open` frame of a request, from the body of a POST or the headers of a GET (STREAM-37).

    Raises:
        MalformedFrameError: The frame or a header is invalid, or a header contradicts the body.
        FrameTooLargeError, ConnectionLostError: As in `body_of`.
        UsageError: The query is invalid.
    """
    if request.method == "POST":
        frame = decode_client(await body_of(request))
        if not isinstance(frame, Open):
            raise MalformedFrameError("the body of this request must be one `open` frame")
        return merge_open_fields(open_of(request), frame)
    return open_of(request)


def _place_of(query: SessionsQuery, caller: Caller) -> ListPlace | None:
    if query.after is UNSET:
        return None
    changed_at, _, session = query.after.partition(CURSOR_MARK)
    return ListPlace(float(changed_at), caller.stored_name(session))


def _answer_accepted(runner: Runner) -> CommandAnswer:
    return CommandAnswer(str(runner.newest), runner.state.is_live)


def _line_of(info: SessionInfo, name: str, status: str) -> SessionLine:
    mark = info.mark
    return SessionLine(name, mark.title, cast("SessionStatus", status), mark.turns, info.created_at, mark.at)


def _json_of(stored: StoredRecord) -> bytes:
    """Return a record as JSON; a damaged record becomes null."""
    try:
        msgspec.json.decode(stored.body, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = salvage(stored.body)
        return b"null" if found is None else encode_record(found)
    return stored.body


_AS_DATA = {
    # A tool result may contain anything: browsers must not render or execute it.
    "content-security-policy": "default-src 'none'; sandbox",
    "x-content-type-options": "nosniff",
    # A result never changes, but a deleted session should not stay in browser caches for long.
    "cache-control": "private, max-age=86400, immutable",
}
NO_STORE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def json_response(value: object, *, status: int = 200) -> Response:
    """Return a JSON answer that must not be cached."""
    return Response(msgspec.json.encode(value), status, headers=NO_STORE, media_type="application/json")
