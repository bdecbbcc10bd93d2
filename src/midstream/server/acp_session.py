"""Serves one session to an editor over the Agent Client Protocol: updates from its journal, prompts, permissions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from midstream.dialects.acp_prompts import choice_in, message_of, permission_request, stream_of, text_of
from midstream.dialects.acp_stream import AcpFold, AcpUpdates, usage_json
from midstream.engine.conversation import PAGE_RECORDS, follow_pages, pause_after
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.errors import MidstreamError, QuestionClosedError, SessionBusyError
from midstream.extras import extra
from midstream.history.messages import UserMessage
from midstream.protocol.frames import digest_of, secret_digest_of
from midstream.session.calls import Choice, QuestionKind
from midstream.session.journal_reading import JournalReader
from midstream.session.questions import Question
from midstream.session.records import (
    ChildDelta,
    MessageWithdrawn,
    QuestionAsked,
    Record,
    TurnEnded,
    TurnStatus,
)
from midstream.session.session import Received
from midstream.session.turn.commands import Answer, Cancel, Command, SendMessage, WhenBusy, Withdraw
from midstream.store.contract import StoredRecord

with extra("acp"):
    from acp import RequestError

Json = dict[str, Any]

_INTERNAL = -32603
_PAUSED = TurnEnded(0, TurnStatus.COMPLETED, 0.0)
"""The result of a prompt whose turn waits for the text of the next prompt."""
_log = logging.getLogger(__name__)


class AcpClient(Protocol):
    """The editor's end of the connection."""

    async def send_request(self, method: str, params: Any = None) -> Any:  # noqa: ANN401 - any JSON
        """Send a request, and return the answer."""

    async def send_notification(self, method: str, params: Any = None) -> None:  # noqa: ANN401 - any JSON
        """Send a notification."""


class AcpSession:
    """Sends the updates of a session, and accepts prompts and answers. Call `open`, then `show`."""

    def __init__(self, host: Host, session_id: str, client: AcpClient) -> None:
        self._host = host
        self._id = session_id
        self._client = client
        self._reader = JournalReader()
        self._updates = AcpUpdates(AcpFold(session_id))
        self._position = 0
        self._is_there = False
        """Whether the session has a journal, which its first message creates."""
        self._prompts: dict[str, asyncio.Future[TurnEnded | None]] = {}
        """Prompts that wait for the end of their turns, by stream; the result is None if the message was withdrawn."""
        self._sending = asyncio.Lock()
        """Held while a prompt is submitted, so that a later cancel finds the turn of the prompt."""
        self._sent_questions: set[tuple[Any, ...]] = set()
        self._words_wanted: Question | None = None
        """The open question that the next prompt answers."""
        self._following: asyncio.Task[None] | None = None
        self._failure: RequestError | None = None
        """The error that ended the updates. The editor must load the session again."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Read the session to its end. When this returns, the turn of a dead process is being resumed.

        Raises:
            MidstreamError: The session cannot be read.
        """
        runner = await self._host.session(self._id, create=True)
        beginning, state = await runner.events.beginning()
        self._updates, self._position = AcpUpdates(AcpFold(self._id, state)), beginning.position
        self._is_there = runner.newest.position > 0
        while page := await runner.read(after=self._position, limit=PAGE_RECORDS):
            for stored in page:
                self._updates.take(self._reader.read(stored.body), epoch=stored.epoch)
                self._position = stored.position

    async def show(self, *, with_past: bool) -> None:
        """Follow the session; `with_past` sends the earlier updates first."""
        for update in self._updates.replay() if with_past else ():
            await self._send(update)
        await self._ask()
        self._follow()

    def stop(self) -> None:
        """Stop sending updates. The turn continues."""
        for task in [*self._tasks, *([self._following] if self._following else [])]:
            task.cancel()
        self._fail(RequestError(_INTERNAL, "the session was closed here"))

    async def prompt(self, blocks: list[Json], key: str) -> Json:
        """Send a message, and return the result when its turn has ended.

        Args:
            blocks: Content of the message.
            key: Idempotency key of the prompt: a repetition waits for the same turn. "" for a new prompt.

        Raises:
            MidstreamError: The message was refused, and not sent.
            RequestError: The turn failed, or the session is closed.
        """
        message = message_of(blocks)
        if self._failure is not None:
            raise self._failure
        async with self._sending:
            ended = await self._reply(text_of(message))
            if ended is None:
                ended = await self._submit_message(
                    message, stream_of(key or self._host.world.new_id("prompt"))
                )
        return self._result(await asyncio.shield(ended))

    async def cancel(self) -> None:
        """Stop the open turn, and withdraw the queued prompts of this client."""
        async with self._sending:
            if not self._is_there:
                return
            runner = await self._host.session(self._id)
            for queued in runner.state.queue:
                if queued.stream in self._prompts:
                    await self._submit(Withdraw(queued.number))
            if runner.state.is_live:
                await self._submit(Cancel(runner.state.turns))

    # --- prompts ----------------------------------------------------------------------------------------------

    async def _submit_message(self, message: UserMessage, stream: str) -> asyncio.Future[TurnEnded | None]:
        """Send a message once: its stream identifies a repetition."""
        ended = self._prompts.setdefault(stream, asyncio.get_running_loop().create_future())
        if stream not in self._updates.turns:
            self._updates.own.add(stream)
        digest = digest_of(msgspec.json.encode(message))
        command = SendMessage(message, when_busy=WhenBusy.QUEUE)
        try:
            runner = await self._submit(Received(stream, secret_digest_of(stream), 0, digest, command))
        except MidstreamError:
            self._prompts.pop(stream, None)
            raise
        self._is_there = True
        self._follow()
        turn, now = runner.state.streams[stream].turn, self._updates.fold.session
        if turn and now.turns >= turn and (now.turns > turn or not now.is_live) and stream in self._prompts:
            self._end(stream, self._updates.ended.get(turn) or TurnEnded(turn, TurnStatus.COMPLETED, 0.0))
        return ended

    async def _reply(self, words: str) -> asyncio.Future[TurnEnded | None] | None:
        """Answer the open question that waits for text; return None if no such question is open."""
        question, self._words_wanted = self._words_wanted, None
        if question is None:
            return None
        name = f"answer-{question.call_id}"
        self._updates.own.add(question.call_id)
        self._updates.turns[name] = self._updates.fold.session.turns
        ended = self._prompts[name] = asyncio.get_running_loop().create_future()
        try:
            await self._answer(question, Choice.RESPOND, words)
        except QuestionClosedError:
            self._prompts.pop(name, None)
            return None
        return ended

    def _result(self, ended: TurnEnded | None) -> Json:
        if ended is None:
            return {"stopReason": "cancelled"}
        if ended.status in (TurnStatus.FAILED, TurnStatus.INTERRUPTED):
            words = ended.message or f"the turn was {ended.status.value}"
            raise RequestError(_INTERNAL, words, {"code": ended.code, "status": ended.status.value})
        if ended is _PAUSED:
            return {"stopReason": "end_turn"}
        reason = self._updates.stop_reason(ended.turn)
        usage = self._updates.usage.get(ended.turn)
        return {"stopReason": reason, **({"usage": usage_json(usage)} if usage else {})}

    async def _submit(self, command: Command | Received, session_id: str = "") -> Runner:
        """Submit a command, and return the runner that has it. Retries while the session moves or its store is busy."""
        failures = 0
        while True:
            try:
                runner = await self._host.session(session_id or self._id, create=not self._is_there)
                runner.attach()
                try:
                    end = await runner.submit(command)
                    await runner.wait(end - 1)  # if another process owns the session
                    return runner
                finally:
                    runner.detach()
            except MidstreamError as error:
                failures += 1
                if isinstance(error, SessionBusyError):
                    raise
                await pause_after(self._host, error, failures)

    # --- updates ----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        self._updates.replay()
        if self._following is None and self._is_there:
            self._following = self._host.world.spawn(self._read_on(), name=f"acp {self._id}")

    async def _read_on(self) -> None:
        try:
            async with aclosing(follow_pages(self._host, self._id, self._position)) as pages:
                async for page in pages:
                    for stored in page:
                        await self._take(stored)
        except MidstreamError as error:
            self._fail(RequestError(_INTERNAL, error.message, {"code": error.code}))
        except ConnectionError:
            _log.info("the editor has disconnected", extra={"session": self._id})

    async def _take(self, stored: StoredRecord) -> None:
        record = self._reader.read(stored.body)
        for update in self._updates.take(record, epoch=stored.epoch):
            await self._send(update)
        self._position = stored.position
        self._settle(record)
        if isinstance(record, QuestionAsked | ChildDelta):
            await self._ask()

    def _settle(self, record: Record) -> None:
        """Complete the prompts whose turns have ended."""
        match record:
            case TurnEnded():
                self._words_wanted = None
                for stream in [*self._prompts]:
                    if self._updates.turns.get(stream) == record.turn:
                        self._end(stream, record)
            case MessageWithdrawn() if record.stream in self._prompts:
                self._end(record.stream, None)
            case _:
                pass

    def _end(self, stream: str, ended: TurnEnded | None) -> None:
        waiting = self._prompts.pop(stream)
        if not waiting.done():
            waiting.set_result(ended)

    def _fail(self, error: RequestError) -> None:
        self._failure = error
        for waiting in self._prompts.values():
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # marks the exception as retrieved, for futures without a waiter
        self._prompts.clear()

    async def _send(self, update: Json) -> None:
        await self._client.send_notification("session/update", {"sessionId": self._id, "update": update})

    # --- questions --------------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        """Send the editor the open questions that it has not received yet."""
        for question in self._updates.fold.questions:
            place = (question.session, question.turn, question.response, question.call_id, question.asked_at)
            if place in self._sent_questions:
                continue
            self._sent_questions.add(place)
            if question.kind is QuestionKind.QUESTION:
                await self._request_text(question)
            else:
                self._spawn(self._request(question))

    async def _request_text(self, question: Question) -> None:
        """Let the next prompt answer a question: the protocol has no other way to send text."""
        if question.session:
            block = {"type": "text", "text": question.text or question.name}
            await self._send({"sessionUpdate": "agent_message_chunk", "content": block})
        self._words_wanted = question
        turn = self._updates.fold.session.turns
        for stream in [*self._prompts]:
            if self._updates.turns.get(stream) == turn:
                self._end(stream, _PAUSED)

    async def _request(self, question: Question) -> None:
        turn = self._updates.fold.session.turns
        name = f"{question.session}-{question.call_id}"
        if not question.session:
            name = self._updates.call_name(question.call_id)
        try:
            answer = await self._client.send_request(
                "session/request_permission", permission_request(self._id, question, name)
            )
        except (RequestError, ConnectionError) as error:
            _log.info("the editor did not decide: %s", error, extra={"session": self._id})
            return
        choice = choice_in(question, answer)
        try:
            if choice is None:
                await self._submit(Cancel(turn))
            else:
                await self._answer(question, choice)
        except MidstreamError as error:  # another client decided, or the question expired
            _log.info("the editor's decision came too late: %s", error.message, extra={"session": self._id})

    async def _answer(self, question: Question, choice: Choice, words: str = "") -> None:
        await self._submit(Answer(question.ref, question.digest, choice, words), question.session)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._host.world.spawn(work, name=f"acp question {self._id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
