"""Permission requests of upstream agents to the people of the session, while the agent waits.

The question is in the journal before it is shown, and the use of the answer before the agent receives it.
`session/turn/approvals.py` decides both; this module has the waiting agents.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from midstream.engine.watchdog import Watch
from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.history.messages import storable
from midstream.session.calls import DENIED_CONTENT, NO_DECISION_CONTENT, Choice
from midstream.session.permissions import Allowed, Ask, Decision, Permission, Person
from midstream.session.session import Session
from midstream.session.turn.commands import PermissionRequested, PermissionWithdrawn, UseAnswer
from midstream.session.turn.pending import AnswerAgent, CallModel
from midstream.session.turn.states import AgentQuestion, AwaitingModel

ARGUMENTS_CHARS_MAX = 256 * 1024
"""Characters of arguments that a person can be shown. A request with longer arguments is refused."""
NOT_ASKED = (
    "No person was asked, because the turn was stopped or continues at another server. This was not done."
)
TOO_LONG = (
    f"This is longer than a person can be shown ({ARGUMENTS_CHARS_MAX} characters), so no person was asked and it "
    "was not done. Do less at once."
)


class QuestionJournal(Protocol):
    """Journal of an agent's questions: the session's runner."""

    async def show(self, command: PermissionRequested) -> None:
        """Journal an agent's question, and wait for the append.

        Raises:
            MidstreamError: The question was refused, or the session has failed. Nothing was written.
        """

    async def append_first(self, command: UseAnswer | PermissionWithdrawn) -> None:
        """Journal a command before the act that it announces; its decision may end pending work.

        Raises:
            MidstreamError: The command was refused, or the session has failed. Nothing was written.
        """

    def note(self, command: PermissionWithdrawn) -> None:
        """Journal a command soon."""

    async def confirm(self) -> None:
        """Check that no other node claimed the session while this process was frozen; otherwise cancel the task."""


class AgentQuestions:
    """Open questions of upstream agents of one session in this process."""

    def __init__(self, world: World, notes: QuestionJournal) -> None:
        self._world = world
        self._notes = notes
        self._waiting: dict[tuple[CallModel, str], asyncio.Future[Decision]] = {}

    def person(self, pending_work: CallModel, watch: Watch) -> Person:
        """Return the callback with which an agent asks a person. While it waits, its silence is not measured."""

        async def request(permission: Permission, terms: Ask) -> Decision:
            return await self._request_permission(pending_work, watch, permission, terms)

        return request

    async def deliver_decision(self, pending_work: AnswerAgent, session: Session) -> None:
        """Give the agent the decision, after its use was journaled."""
        waiting = next(
            (each for (_, name), each in self._waiting.items() if name == pending_work.question_id), None
        )
        try:
            if waiting is None:  # the agent has stopped waiting
                await self._notes.append_first(
                    PermissionWithdrawn(pending_work.ref, pending_work.question_id)
                )
                return
            await self._notes.append_first(UseAnswer(pending_work.ref, pending_work.question_id))
        except MidstreamError:
            return  # the attempt has ended, and with it the waiting agent
        # As before a tool (TURN-53): a node that has claimed the session asks again itself.
        await self._notes.confirm()
        if not waiting.done():
            waiting.set_result(_decision_of(_question(session, pending_work.question_id)))

    def end(self, pending_work: CallModel) -> None:
        """End the waits of an attempt that has ended."""
        for (attempt, _), waiting in self._waiting.items():
            if attempt == pending_work and not waiting.done():
                waiting.set_result(NOT_ASKED)

    async def _request_permission(
        self, pending_work: CallModel, watch: Watch, permission: Permission, terms: Ask
    ) -> Decision:
        if len(permission.arguments) > ARGUMENTS_CHARS_MAX:
            return TOO_LONG
        question_id = self._world.new_id("leave")
        request = PermissionRequested(
            pending_work.ref,
            question_id,
            storable(permission.tool),
            storable(permission.arguments),
            terms.text,
            terms.answer_s,
            permission.is_fixed,
            permission.is_vague,
            terms.approvers,
        )
        decided: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[pending_work, question_id] = decided
        try:
            with watch.pause():
                await self._notes.show(request)
                return await decided
        except MidstreamError:
            return NOT_ASKED
        except asyncio.CancelledError:
            self._notes.note(PermissionWithdrawn(pending_work.ref, question_id))
            raise
        finally:
            del self._waiting[pending_work, question_id]


def _question(session: Session, question_id: str) -> AgentQuestion:
    assert isinstance(session.turn, AwaitingModel)
    return next(each for each in session.turn.questions if each.id == question_id)


def _decision_of(question: AgentQuestion) -> Decision:
    match question.choice:
        case Choice.ALLOW:
            return Allowed(question.edited)
        case None:
            return NO_DECISION_CONTENT
        case _:
            remark = f" They said: {question.words}" if question.words else ""
            return f"{DENIED_CONTENT}{remark}"
