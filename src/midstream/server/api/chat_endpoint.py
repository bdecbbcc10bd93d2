"""Chats of AI SDK clients: `useChat` and `WorkflowChatTransport` on sessions of this server.

A chat is the session with its id. A POST begins a turn, or answers the open turn with results and decisions. Its answer
is one run of the turn (see `dialects.ui_message_stream`). A GET reads a run from any chunk, or the whole newest turn.
All state of a chat is in its journal, so that any server of the store can continue a stream.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from midstream.dialects.run_fold import RunFold
from midstream.dialects.ui_message_stream import RUN_MARK, SUB_AGENT_MARK
from midstream.dialects.ui_messages import (
    ChatRequest,
    answered_calls,
    answers_in,
    messages_of,
    next_answer,
    read_chat_request,
)
from midstream.engine.conversation import kept_records
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.errors import EventGoneError, UsageError
from midstream.protocol.frames import secret_digest_of
from midstream.server.api.chat_stream import ChatRun, ChatStream
from midstream.server.api.http_endpoints import NO_STORE
from midstream.server.api.opened_sessions import opened_existing_session, opened_session
from midstream.server.api.request_bodies import MESSAGES_BYTES_MAX, body_of
from midstream.server.api.run_folds import RunFolds
from midstream.server.api.turn_requests import find_or_begin, stop_turn, submit, submit_resent
from midstream.server.auth.caller import Caller, caller_of
from midstream.server.auth.principals import Action
from midstream.server.transports.connection import Connections
from midstream.session.records import TurnStatus
from midstream.session.session import Received, Session
from midstream.session.turn.commands import Answer, CallFinished
from midstream.session.turn.states import Idle

STREAM_PREFIX = "chat-"
"""Prefix of the stream keys of chats."""
REPEATED_S = 5.0
"""Seconds after the end of a turn in which an equal regenerate request counts as a repetition. A request with a message
is identified by the message's id, without a time limit."""
ANSWERS_MAX = 256
"""Greatest number of results and decisions in one request."""
_PLACE_CHARS_MAX = 40


class ChatEvent(Struct, frozen=True):
    """One server-sent event; `data` is a chunk of the UI message stream, version 1, and `[DONE]` at the end."""

    event: str
    data: str


class ChatMessages(Struct, frozen=True):
    """The messages of a chat in the form of `useChat`."""

    id: str
    messages: list[dict[str, msgspec.Raw]]


class StreamQuery(Struct, frozen=True):
    """The first requested chunk, from 0; a negative number counts from the end."""

    startIndex: Annotated[int, Meta(ge=-(10**9), le=10**9)] = 0  # noqa: N815 - its name in the protocol


class ChatEndpoint:
    """Endpoints of chats."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections
        self._folds = RunFolds(host, RunFold)

    async def chat(self, request: Request, send: Send) -> None:
        """Begin a turn of a chat, or send results and decisions to its open turn."""
        chat_request = read_chat_request(await body_of(request, MESSAGES_BYTES_MAX))
        caller = caller_of(request.scope)
        chat = chat_request.chat or self._host.world.new_id("chat")
        async with opened_session(self._host, request, chat, Action.SEND, begins=True) as (runner, secret):
            if chat_request.is_answer:
                run = await self._answer(runner, chat_request, caller, chat)
            else:
                secret = secret or secret_digest_of(_secret_of(chat_request))
                run = await self._begin(runner, chat_request, caller, chat, secret)
            await ChatStream(self._host, self._connections, run, caller).serve(request.receive, send)

    async def chat_stream(self, request: Request, query: StreamQuery, send: Send) -> None:
        """Read a run of a chat again, or its newest turn."""
        chat, _, place = request.path_params["run"].partition(RUN_MARK)
        async with opened_existing_session(self._host, request, chat) as runner:
            run = None if runner is None else await self._find(runner, chat, place)
            if run is None:
                await Response(status_code=204, headers=NO_STORE)(request.scope, request.receive, send)
                return
            stream = ChatStream(self._host, self._connections, run, caller_of(request.scope))
            await stream.serve(request.receive, send, start=query.startIndex)

    async def chat_messages(self, request: Request) -> ChatMessages:
        """Return the messages of a chat as initial messages of `useChat`; none if the chat does not exist yet."""
        chat = request.path_params["chat"]
        async with opened_existing_session(self._host, request, chat) as runner:
            messages = [] if runner is None else messages_of(chat, runner.state)
        return ChatMessages(chat, messages)

    async def _find(self, runner: Runner, chat: str, place: str) -> ChatRun | None:
        turn, _, run = place.partition(".")
        if not place:
            return await find_turn(runner, chat, runner.state.turns)
        if not (turn.isdecimal() and run.isdecimal() and len(place) <= _PLACE_CHARS_MAX):
            return None
        found = await find_turn(runner, chat, int(turn))
        return None if found is None else msgspec.structs.replace(found, run=int(run))

    # --- a new turn -------------------------------------------------------------------------------------------

    async def _begin(
        self, runner: Runner, chat_request: ChatRequest, caller: Caller, chat: str, secret_digest: str
    ) -> ChatRun:
        async def find() -> ChatRun | None:
            return self._find_repeated(runner, chat_request, chat)[1]

        async def begin() -> None:
            name, _ = self._find_repeated(runner, chat_request, chat)
            if runner.state.is_live:
                await stop_turn(runner)
            received = Received(name, secret_digest, 0, chat_request.digest, None)
            await submit_resent(runner, caller, received, chat_request.messages, chat_request.tools)

        return await find_or_begin(find, begin)

    def _find_repeated(
        self, runner: Runner, chat_request: ChatRequest, chat: str
    ) -> tuple[str, ChatRun | None]:
        """Return the stream key of a request, and its first run if an equal request has begun it."""
        state, number = runner.state, 0
        while (
            known := state.streams.get(name := f"{STREAM_PREFIX}{chat_request.digest}-{number}")
        ) is not None:
            if known.turn and self._is_repetition(state, known.turn, chat_request):
                return name, ChatRun(runner.session_id, chat, known.turn, known.since, 0)
            number += 1
        return name, None

    def _is_repetition(self, state: Session, turn: int, chat_request: ChatRequest) -> bool:
        if turn < state.turns:
            return not chat_request.is_regenerated
        ended = state.last_turn
        if not isinstance(state.turn, Idle) or ended is None or ended.turn != turn:
            return True
        is_kept = ended.status is TurnStatus.COMPLETED and not chat_request.is_regenerated
        return is_kept or self._host.world.now() - ended.at < REPEATED_S

    # --- answers to an open turn ------------------------------------------------------------------------------

    async def _answer(self, runner: Runner, chat_request: ChatRequest, caller: Caller, chat: str) -> ChatRun:
        message = chat_request.messages[-1]
        if not runner.state.turns:
            raise UsageError(
                "this chat has no open turn; the last message of the request must be a user message"
            )
        if any(each.startswith(SUB_AGENT_MARK) for each in answered_calls(message)):
            await self._answer_below(runner, chat_request, caller, chat)
        for _ in range(ANSWERS_MAX):
            command = next_answer(runner.state, message)
            if command is None or (isinstance(command, CallFinished) and not _is_of_chat(runner.state)):
                break
            if isinstance(command, Answer):
                command = await caller.attribute(command)
            await submit(runner, command)
        place = await find_turn(runner, chat, runner.state.turns)
        if place is None:
            raise EventGoneError("the turn of this chat is no longer kept", oldest=runner.newest.position)
        shown, _ = await place.written(runner)
        runs = [shown.answered[each] for each in answered_calls(message) if each in shown.answered]
        return msgspec.structs.replace(place, run=max(runs, default=shown.run))

    async def _answer_below(
        self, runner: Runner, chat_request: ChatRequest, caller: Caller, chat: str
    ) -> None:
        """Answer the questions of the chat and of its sub-agents, all at once: the answers begin one run together."""
        fold = await self._folds.now(runner, chat)
        given = answers_in(fold.questions, chat_request.messages[-1])
        answers = [(question, await caller.attribute(answer)) for question, answer in given[:ANSWERS_MAX]]
        sending = (self._folds.answer(runner, chat, question, answer) for question, answer in answers)
        for outcome in await asyncio.gather(*sending, return_exceptions=True):
            if outcome is not None:
                raise outcome


async def find_turn(runner: Runner, chat: str, turn: int) -> ChatRun | None:
    """Return a whole turn of a chat; None if it does not exist, or was pruned."""
    if not 0 < turn <= runner.state.turns:
        return None
    streams = runner.state.streams.values()
    after = next((each.since for each in streams if each.turn == turn), None)
    try:
        if after is None:  # the message has no stream, or its stream is no longer kept
            async for stored, record in kept_records(runner, runner.events.pruned_to.position):
                if getattr(record, "turn", 0) == turn:
                    return ChatRun(runner.session_id, chat, turn, stored.position - 1, None)
            return None
        await runner.read(after=after, limit=1)
    except EventGoneError:
        return None
    return ChatRun(runner.session_id, chat, turn, after, None)


def _secret_of(chat_request: ChatRequest) -> str:
    """Return the stream secret of a request; all servers derive the same one from equal requests."""
    digest = hashlib.blake2b(
        msgspec.json.encode(chat_request.messages), digest_size=32, person=b"midstream-chat"
    )
    return digest.hexdigest()


def _is_of_chat(state: Session) -> bool:
    """Return whether a chat opened the newest turn. Tool calls of other clients are not answered by a chat."""
    streams = state.streams.items()
    return any(each.turn == state.turns and name.startswith(STREAM_PREFIX) for name, each in streams)
