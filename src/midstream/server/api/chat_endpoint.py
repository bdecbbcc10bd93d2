"""The chats of AI SDK clients: `useChat` and `WorkflowChatTransport` against the sessions of this server.

A chat is the session of its id. A POST begins a turn, or brings what the open turn waits for; the body of the answer is
one run of it (see `dialects.ui_message_stream`). A GET reads a run from any chunk, or the newest turn as a whole.
Nothing of a chat is kept beside its journal, so that any server of the store continues any stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from midstream.dialects.ui_message_stream import RUN_MARK
from midstream.dialects.ui_messages import (
    ChatRequest,
    answered_calls,
    find_change,
    messages_of,
    next_answer,
    read_chat_request,
)
from midstream.engine.conversation import follow_pages
from midstream.engine.host import Host
from midstream.engine.journal import require_session_id
from midstream.engine.runner import Runner
from midstream.errors import (
    EventGoneError,
    FrameTooLargeError,
    JournalMovedError,
    SessionBusyError,
    SessionNotFoundError,
    UnavailableError,
    UsageError,
)
from midstream.protocol.frames import FRAME_BYTES_MAX, secret_digest_of
from midstream.server.api.chat_stream import ChatRun, ChatStream
from midstream.server.api.http_endpoints import NO_STORE
from midstream.server.api.request_bodies import BODY_BYTES_MAX, body_of, decode_query
from midstream.server.api.turn_stopping import stop_turn
from midstream.server.auth.caller import Caller, visitor_of
from midstream.server.auth.principals import Action
from midstream.server.auth.unlocking import secrets_in, stream_digest_of, unlock
from midstream.server.transports.connection import Connections
from midstream.session.journal_reading import JournalReader
from midstream.session.records import TurnStatus
from midstream.session.session import Received, Session
from midstream.session.turn.commands import Answer, CallFinished, SendMessage
from midstream.session.turn.states import Idle

CHAT_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of a request: it has all messages of the chat. What is new of them has at most those of a frame."""
STREAM_PREFIX = "chat-"
"""Begins the names of the streams that chats open in their sessions."""
REPEATED_S = 5.0
"""Seconds after the end of a turn in which an equal request is a repetition where it may also be a new wish: to make an
answer once more. A request with a new message is a repetition for ever, as that has an id of its own."""
SUBMITS_MAX = 8
"""Comparisons of one chat with a session that others change meanwhile."""
ANSWERS_MAX = 256
"""Results and decisions in one request."""
_PLACE_CHARS_MAX = 40


class ChatEvent(Struct, frozen=True):
    """One server-sent event; `data` is a chunk of the UI message stream, version 1, and `[DONE]` at the end."""

    event: str
    data: str


class ChatMessages(Struct, frozen=True):
    """The messages of a chat, as `useChat` takes them."""

    id: str
    messages: list[dict[str, msgspec.Raw]]


class StreamQuery(Struct, frozen=True):
    """The first chunk that is wanted, counted from 0; below 0 from the end."""

    startIndex: Annotated[int, Meta(ge=-(10**9), le=10**9)] = 0  # noqa: N815 - its name in the protocol


class ChatPost:
    """Begin a turn of a chat, or bring what its open turn waits for."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a chat's messages; the answer streams one message (AI SDK, UI message stream v1).

        Raises:
            MidstreamError: It is refused; an ordinary HTTP error.
        """
        request = Request({**scope, BODY_BYTES_MAX: bytes_max_of(scope)}, receive)
        asked = read_chat_request(await body_of(request))
        visitor = visitor_of(scope)
        chat = asked.chat or self._host.world.new_id("chat")
        session = visitor.stored_name(chat)
        visitor.visit(session)
        await visitor.begin()
        with await unlock(self._host, session, secrets_in(request), Action.SPEAK, begins=True) as held:
            runner = await self._host.session(session, create=True)
            runner.attach()
            try:
                if asked.is_answer:
                    run = await self._answer(runner, asked, visitor, chat)
                else:
                    secret_digest = stream_digest_of(held) or secret_digest_of(_secret_of(asked))
                    run = await self._begin(runner, asked, visitor, chat, secret_digest)
            finally:
                runner.detach()
            await ChatStream(self._host, self._connections, run, visitor).serve(receive, send)

    # --- a new turn -------------------------------------------------------------------------------------------

    async def _begin(
        self, runner: Runner, asked: ChatRequest, visitor: Caller, chat: str, secret_digest: str
    ) -> ChatRun:
        for _ in range(SUBMITS_MAX):
            name, run = self._find_repeated(runner, asked, chat)
            if run is not None:
                return run
            if runner.state.is_live:
                await stop_turn(runner)
            state = runner.state
            change = find_change(state.history.entries, asked.messages)
            size = len(msgspec.json.encode((change.message, change.before)))
            if size > FRAME_BYTES_MAX:
                raise FrameTooLargeError(f"what is new of this chat has {FRAME_BYTES_MAX} bytes at most")
            command = SendMessage(
                change.message, asked.tools, keep=change.keep, before=change.before, turns=state.turns
            )
            visitor.count_command(command)
            with suppress(SessionBusyError, JournalMovedError):
                end = await runner.submit(Received(name, secret_digest, 0, asked.digest, command))
                await runner.wait(end - 1)
        raise UnavailableError("other requests of this chat are too many: retry", retry_after_s=1.0)

    def _find_repeated(self, runner: Runner, asked: ChatRequest, chat: str) -> tuple[str, ChatRun | None]:
        """Return the stream of a request, and its first run where an equal request has begun it."""
        state, number = runner.state, 0
        while (known := state.streams.get(name := f"{STREAM_PREFIX}{asked.digest}-{number}")) is not None:
            if known.turn and self._is_repetition(state, known.turn, asked):
                return name, ChatRun(runner.session_id, chat, known.turn, known.since, 0)
            number += 1
        return name, None

    def _is_repetition(self, state: Session, turn: int, asked: ChatRequest) -> bool:
        if turn < state.turns:
            return not asked.is_regenerated
        ended = state.last_turn
        if not isinstance(state.turn, Idle) or ended is None or ended.turn != turn:
            return True
        is_kept = ended.status is TurnStatus.COMPLETED and not asked.is_regenerated
        return is_kept or self._host.world.now() - ended.at < REPEATED_S

    # --- answers to an open turn ------------------------------------------------------------------------------

    async def _answer(self, runner: Runner, asked: ChatRequest, visitor: Caller, chat: str) -> ChatRun:
        message = asked.messages[-1]
        if not runner.state.turns:
            raise UsageError("this chat has no turn to go on with; its last message is to be a user's")
        for _ in range(ANSWERS_MAX):
            command = next_answer(runner.state, message)
            if command is None or (isinstance(command, CallFinished) and not _is_of_chat(runner.state)):
                break
            if isinstance(command, Answer):
                command = await visitor.attribute(command)
            end = await runner.submit(command)
            await runner.wait(end - 1)
        place = await find_turn(self._host, runner, chat, runner.state.turns)
        if place is None:
            raise EventGoneError("the turn of this chat is no longer kept", oldest=runner.newest.position)
        shown, _ = await place.written(runner)
        runs = [shown.answered[each] for each in answered_calls(message) if each in shown.answered]
        return msgspec.structs.replace(place, run=max(runs, default=shown.run))


class ChatReader:
    """Read a run of a chat again, or its newest turn."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a run from its chunk `startIndex` on, or the newest turn of a chat; 204 where there is none any more.

        Raises:
            MidstreamError: It is refused; an ordinary HTTP error.
        """
        request = Request(scope, receive)
        query = decode_query(request, StreamQuery)
        chat, _, place = scope["path_params"]["run"].partition(RUN_MARK)
        visitor = visitor_of(scope)
        async with opened(self._host, visitor, request, chat) as runner:
            run = None if runner is None else await self._find(runner, chat, place)
            if run is None:
                await Response(status_code=204, headers=NO_STORE)(scope, receive, send)
                return
            stream = ChatStream(self._host, self._connections, run, visitor)
            await stream.serve(receive, send, start=query.startIndex)

    async def _find(self, runner: Runner, chat: str, place: str) -> ChatRun | None:
        turn, _, run = place.partition(".")
        if not place:
            return await find_turn(self._host, runner, chat, runner.state.turns)
        if not (turn.isdecimal() and run.isdecimal() and len(place) <= _PLACE_CHARS_MAX):
            return None
        found = await find_turn(self._host, runner, chat, int(turn))
        return None if found is None else msgspec.structs.replace(found, run=int(run))


class ChatHistory:
    """The messages of a chat."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def chat_messages(self, request: Request) -> ChatMessages:
        """Return the messages of a chat, for `useChat` to begin with; none where it is not there yet."""
        chat = request.path_params["chat"]
        async with opened(self._host, visitor_of(request.scope), request, chat) as runner:
            messages = [] if runner is None else messages_of(chat, runner.state)
        return ChatMessages(chat, messages)


@asynccontextmanager
async def opened(host: Host, visitor: Caller, request: Request, chat: str) -> AsyncIterator[Runner | None]:
    """Open the session of a chat for reading; None where it is not there, or another's, which look the same.

    Raises:
        UsageError: The name has another form.
        MidstreamError: The caller may not read it.
    """
    require_session_id(chat)
    session = visitor.stored_name(chat)
    visitor.visit(session)
    runner: Runner | None = None
    try:
        await visitor.require_there(Action.READ)
        held = await unlock(host, session, secrets_in(request), Action.READ)
        runner = await host.session(session)
    except SessionNotFoundError:
        yield None
        return
    with held:
        yield runner


async def find_turn(host: Host, runner: Runner, chat: str, turn: int) -> ChatRun | None:
    """Return where a turn is read from its beginning; None where it is not there, or was pruned."""
    if not 0 < turn <= runner.state.turns:
        return None
    streams = runner.state.streams.values()
    after = next((each.since for each in streams if each.turn == turn), None)
    try:
        if after is None:  # a message without a stream, or of a stream that is not kept
            reader, after = JournalReader(), runner.events.pruned_to.position
            async with aclosing(follow_pages(host, runner.session_id, after)) as pages:
                async for page in pages:
                    for stored in page:
                        record = reader.read(stored.body)
                        if getattr(record, "turn", 0) == turn:
                            return ChatRun(runner.session_id, chat, turn, stored.position - 1, None)
                    if not page:
                        return None
        await runner.read(after=after, limit=1)
    except EventGoneError:
        return None
    return ChatRun(runner.session_id, chat, turn, after, None)


def bytes_max_of(scope: Scope) -> int:
    """Return the bytes of a body; a caller that is not known yet has less."""
    most: int = scope.get(BODY_BYTES_MAX, FRAME_BYTES_MAX)
    return CHAT_BYTES_MAX if most == FRAME_BYTES_MAX else most


def _secret_of(asked: ChatRequest) -> str:
    """Return what the stream of a request is opened with: any server derives it from an equal request."""
    digest = hashlib.blake2b(msgspec.json.encode(asked.messages), digest_size=32, person=b"midstream-chat")
    return digest.hexdigest()


def _is_of_chat(state: Session) -> bool:
    """Whether a chat opened the newest turn: tools of other clients are theirs."""
    streams = state.streams.items()
    return any(each.turn == state.turns and name.startswith(STREAM_PREFIX) for name, each in streams)
