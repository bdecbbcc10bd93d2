"""Sessions with an upstream agent that requests permission in the middle of its answer, for each upstream.

The agent is the scripted peer of the upstream's own test; people are clients of a server in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import pytest

from midstream.agents.permission_rules import Ask, Rules
from midstream.agents.pool import Pooled
from midstream.agents.upstreams import Upstream
from midstream.client import Client, connect
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.runner import Runner, StopMode
from midstream.errors import AnswerMismatchError, DrainingError, QuestionClosedError
from midstream.history.messages import Outcome, UpstreamCall, UserMessage
from midstream.server.app import asgi
from midstream.session.call_references import CallRef
from midstream.session.calls import NO_DECISION_CONTENT, Choice
from midstream.session.questions import Question, questions_of
from midstream.session.records import (
    AnswerUsed,
    QuestionAsked,
    QuestionClosed,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
)
from midstream.session.turn.commands import Answer, Cancel, SendMessage
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import records_until_end
from tests.server.serving import served
from tests.spec import spec

LIMIT_S = 60.0
EDITED = '{"a":2}'


class PermissionPeer(Protocol):
    """The scripted peer of an upstream whose agents request permission."""

    is_fixed: bool
    """Whether its agents run the approved action, or nothing."""

    def with_permissions(self, rules: Rules) -> Upstream:
        """Return the upstream with these rules."""

    def request_change(self) -> None:
        """Let the next answer begin with a tool that changes something, `{"a":1}`, and needs permission."""

    def ran(self) -> list[object]:
        """Return the arguments with which its tools ran, in order."""


class Room:
    """A process with a session, as close as a test can have it."""

    def __init__(self, upstream: Upstream, memory: Memory) -> None:
        self.store = MemoryStore(memory)
        self.pool = Pooled(upstream, self.store)
        self.host = Host(Agent(self.pool), self.store)

    async def open(self) -> Room:
        await self.host.start()
        await self.host.wait_for_recovery()
        return self

    async def question_for(self, words: str = "one") -> tuple[Runner, Question]:
        """Send a message and return the question that follows."""
        runner = await self.host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of(words)))
        return runner, await self.question(runner)

    async def question(self, runner: Runner, *, after: Question | None = None) -> Question:
        """Wait for a question other than `after`."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                found = [
                    each
                    for each in questions_of("s", runner.state)
                    if after is None or each.call_id != after.call_id
                ]
                if found:
                    return found[0]
                await runner.wait(runner.newest.position)

    async def die(self) -> None:
        """Release everything at once, as a killed process does; the store keeps its contents."""
        await self.host._caretaker.stop()
        for runner in [await self.host.session("s")]:
            await runner.stop(StopMode.CLOSE, DrainingError("killed"))
        await self.pool.aclose()

    async def close(self) -> None:
        await self.host.stop(grace_s=0.0)
        await self.pool.aclose()


def answer(question: Question, choice: Choice, *, text: str = "", arguments: str | None = None) -> Answer:
    return Answer(
        CallRef(question.turn, question.response, question.call_id), question.digest, choice, text, arguments
    )


def tools_of(records: tuple[Record, ...]) -> list[UpstreamCall]:
    """Return the tool calls of the upstream agent in the whole response, with their outcomes."""
    responses = [each.body for each in records if isinstance(each, ResponseCompleted)]
    return [part for part in responses[-1].parts if isinstance(part, UpstreamCall)]


class PermissionContract:
    """The contract: subclass it with a fixture `permission_peer`."""

    @pytest.fixture
    def permission_peer(self) -> PermissionPeer:
        raise NotImplementedError

    @pytest.fixture
    async def room(self, permission_peer: PermissionPeer) -> AsyncIterator[Callable[[Rules], Room]]:
        memory = Memory()
        rooms: list[Room] = []

        def open_room(rules: Rules) -> Room:
            memory.living.clear()  # the earlier process is dead
            rooms.append(Room(permission_peer.with_permissions(rules), memory))
            return rooms[-1]

        yield open_room
        for each in rooms:
            await each.close()

    @spec("TURN-77", "TURN-81")
    async def test_a_later_client_answers_the_question_after_other_clients_lost_their_connections(
        self, permission_peer: PermissionPeer, tmp_path: Path
    ) -> None:
        permission_peer.request_change()
        store = MemoryStore()
        pool = Pooled(permission_peer.with_permissions(Rules(others=Ask("It changes something."))), store)
        async with served(asgi(Agent(pool), store=store)) as server, asyncio.timeout(LIMIT_S):

            def client(name: str) -> Client:
                return connect(server.url, state=tmp_path / f"{name}.db")

            for name in ("first", "second"):  # each client receives the question, then disconnects
                async with client(name) as reader:
                    events = reader.send("s", "one") if name == "first" else reader.follow("s", "0-0")
                    async for event in events:
                        if event.question is not None:
                            break
                    await events.aclose()
            async with client("third") as person:
                (question,) = await person.questions("s")
                assert (question.text, question.is_fixed) == (
                    "It changes something.",
                    permission_peer.is_fixed,
                )
                if permission_peer.is_fixed:
                    with pytest.raises(AnswerMismatchError):
                        await person.answer("s", question, "allow", arguments=EDITED)
                edited = None if permission_peer.is_fixed else EDITED
                await person.answer("s", question, "allow", arguments=edited)
                with pytest.raises(QuestionClosedError):
                    await person.answer("s", question, "deny")
                responses = []
                async for event in person.follow("s", "0-0"):
                    responses += [event.record] if isinstance(event.record, ResponseCompleted) else []
                    if event.is_end:
                        break
            (tool,) = tools_of(tuple(responses))
            assert tool.outcome is Outcome.OK
            assert permission_peer.ran() == [{"a": 1} if permission_peer.is_fixed else {"a": 2}]
        await pool.aclose()

    @spec("TURN-77", "TURN-80")
    async def test_a_denial_reaches_the_agent(
        self, permission_peer: PermissionPeer, room: Callable[[Rules], Room]
    ) -> None:
        here = await room(Rules(others=Ask())).open()
        permission_peer.request_change()
        runner, question = await here.question_for()
        await runner.submit(answer(question, Choice.DENY, text="not on a Sunday"))
        (denied,) = tools_of(await records_until_end(runner, after=0))
        assert denied.outcome is not Outcome.OK
        assert "not on a Sunday" in denied.content
        assert permission_peer.ran() == []

    @spec("TURN-77", "TURN-80")
    async def test_the_end_of_the_time_limit_reaches_the_agent(
        self, permission_peer: PermissionPeer, room: Callable[[Rules], Room]
    ) -> None:
        here = await room(Rules(others=Ask(answer_s=0.3))).open()
        permission_peer.request_change()
        runner = await here.host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("one")))
        (late,) = tools_of(await records_until_end(runner, after=0))
        assert late.outcome is not Outcome.OK
        assert NO_DECISION_CONTENT in late.content
        assert permission_peer.ran() == []

    @spec("TURN-80")
    async def test_a_cancel_ends_the_wait_and_the_next_message_gets_an_answer(
        self, permission_peer: PermissionPeer, room: Callable[[Rules], Room]
    ) -> None:
        here = await room(Rules(others=Ask())).open()
        permission_peer.request_change()
        runner, _ = await here.question_for()
        await runner.submit(Cancel())
        stopped = await records_until_end(runner, after=0)
        assert isinstance(stopped[-1], TurnEnded)
        assert stopped[-1].status is TurnStatus.CANCELLED
        assert [type(each) for each in stopped if isinstance(each, QuestionClosed | AnswerUsed)] == [
            QuestionClosed
        ]
        before = runner.newest.position
        await runner.submit(SendMessage(UserMessage.of("two")))
        ended = (await records_until_end(runner, after=before))[-1]
        assert isinstance(ended, TurnEnded)
        assert ended.status is TurnStatus.COMPLETED
        assert permission_peer.ran() == []

    @spec("TURN-79", "TURN-80")
    async def test_after_a_kill_during_the_wait_the_agent_requests_again_and_the_old_question_is_closed(
        self, permission_peer: PermissionPeer, room: Callable[[Rules], Room]
    ) -> None:
        first = await room(Rules(others=Ask())).open()
        permission_peer.request_change()
        _, old = await first.question_for()
        await first.die()
        permission_peer.request_change()
        second = await room(Rules(others=Ask())).open()
        runner = await second.host.session("s")
        question = await second.question(runner, after=old)
        with pytest.raises(QuestionClosedError):
            await runner.submit(answer(old, Choice.ALLOW))
        await runner.submit(answer(question, Choice.ALLOW))
        records = await records_until_end(runner, after=0)
        kinds = (QuestionAsked, QuestionClosed, AnswerUsed)
        assert [type(each) for each in records if isinstance(each, kinds)] == [
            QuestionAsked,
            QuestionClosed,
            QuestionAsked,
            AnswerUsed,
        ]
        (tool,) = tools_of(records)
        assert tool.outcome is Outcome.OK
        assert permission_peer.ran() == [{"a": 1}]
