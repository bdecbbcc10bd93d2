"""One turn of a pool: the messages for its agent, and its progress."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from midstream.agents.agent_failures import FailureSituation, is_in_doubt
from midstream.agents.own_tool_calls import AnswerCalls, OwnCalls, with_own_calls
from midstream.agents.pool_entries import Claim
from midstream.agents.prior_transcript import (
    DONE,
    TranscriptBudget,
    after_cut,
    after_unrecorded,
    is_cut,
    join_cut_answers,
    prepend_transcript,
    without_cut_answers,
)
from midstream.agents.reuse_classification import (
    Action,
    Classification,
    Fork,
    Fresh,
    RequestRelation,
    ResumeAgent,
)
from midstream.agents.upstreams import Abilities, Setup, UpstreamAgent, UpstreamMessage
from midstream.errors import ModelError
from midstream.history.messages import (
    Entry,
    File,
    History,
    Step,
    Text,
    Thinking,
    ToolResult,
    Usage,
    UserMessage,
)
from midstream.models.fingerprint import LINK_BYTES, Outline
from midstream.models.responses import ModelRequest
from midstream.session.records import ReuseDecision

REBUILT_NOTE = "[The agent no longer had this conversation; a new agent received all of it.]\n\n"
"""Beginning of the model's thinking that readers see when a fresh agent got the transcript."""


class AgentOrigin(StrEnum):
    """The origin of a turn's agent."""

    RESUMED = "resumed"
    FORKED = "forked"
    FRESH = "fresh"
    ASIDE = "aside"
    """A fresh agent without a record."""


class End(StrEnum):
    """The end of a turn."""

    WHOLE = "whole"
    FAILED = "failed"
    STOPPED = "stopped"
    """The turn had no reader any more."""


class TurnReport(Struct, frozen=True):
    """Outcome of one turn, for logs, counters and tests. It contains no text of the conversation.

    Args:
        kind, why: The classification, and the reason.
        way: Origin of the agent that answered, or was to answer.
        agent: Its id; "" if it never had one.
        common, new: User messages of this conversation in the record, and the others.
        sends: Messages sent, including retries.
        replays: Whole transcripts sent to fresh agents.
        rebuilt: Why a fresh agent replaced one with the conversation: an error's code, "phase" (a run died), "stale"
            (older than the upstream's retention), "unechoed" (it does not send the resumed id), or "".
        error: The code of the turn's error, or "".
        usage: Tokens of this turn's messages, as far as the upstream reports them; None if it reports none.
        field, index: The first difference, or the beginning of the new part, and the number of its user message from 0.
    """

    session: str
    kind: RequestRelation
    why: str
    way: AgentOrigin
    end: End
    agent: str = ""
    common: int = 0
    new: int = 0
    sends: int = 0
    replays: int = 0
    rebuilt: str = ""
    error: str = ""
    usage: Usage | None = None
    field: str = ""
    index: int | None = None

    @property
    def line(self) -> str:
        """The report as one line for a log."""
        cells = [
            f"session={self.session or '-'}",
            f"kind={self.kind.value} ({self.why})",
            f"way={self.way.value}",
            f"end={self.end.value}",
            f"agent={self.agent or '-'}",
            f"users={self.common}+{self.new}",
            f"sends={self.sends} replays={self.replays}",
            f"rebuilt={self.rebuilt}" if self.rebuilt else "",
            f"error={self.error}" if self.error else "",
            f"tokens={_describe_usage(self.usage)}",
        ]
        return " ".join(filter(None, cells))


def _describe_usage(usage: Usage | None) -> str:
    if usage is None:
        return "unknown"
    written = f", {usage.cache_write_tokens} written" if usage.cache_write_tokens else ""
    return f"{usage.input_tokens} in ({usage.cached_tokens} cached{written}), {usage.output_tokens} out"


class CurrentAgent:
    """The agent that a turn uses now.

    Args:
        name: The id for resuming it; "" if it has none yet.
        nonce: A unique part of the idempotency keys of its messages.
    """

    def __init__(self, name: str = "", nonce: str = "") -> None:
        self.name = name
        self.nonce = nonce
        self.agent: UpstreamAgent | None = None
        """The agent, while it is open."""
        self.was_used = False
        """Whether the open agent got a message before."""
        self.taken = 0
        """Messages that it took in this turn."""
        self.is_confirmed = False
        """Whether it took the last message."""
        self.is_provisional = False
        """Whether it may remove the message if the answer is not complete."""
        self.is_spoiled = False
        """Whether the open agent must not be used again in this process."""
        self.mark = ""
        """The point to fork from that it named last."""


class MessageQueue:
    """The messages for the current agent, in order. Only the answer to the last one is shown."""

    def __init__(self, sends: list[UpstreamMessage]) -> None:
        self.sends = sends
        self.delivered = 0
        """Messages with a complete answer."""
        self.is_taken = False
        """Whether the agent has taken the current message."""
        self.repeats = 0
        self.is_forced = False

    @property
    def is_last(self) -> bool:
        """Whether the answer to the current message is shown."""
        return self.delivered == len(self.sends) - 1


class TurnTotals:
    """The counts of one turn, and how it ended."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.sends = 0
        self.replays = 0
        self.end = End.STOPPED
        self.error = ""
        self.rebuilt = ""
        """Why a fresh agent replaced an earlier one; see `TurnReport`."""
        self.was_perhaps_taken = False
        """Whether the earlier agent may have taken the message."""

    def count(self, usage: Usage | None) -> Usage | None:
        """Add the tokens of one answer and return the sum; None if none were reported."""
        if usage is not None:
            self.usage = usage if self.usage is None else self.usage + usage
        return self.usage


class PoolTurn:
    """The state of one turn, which `agents.pool` advances.

    Args:
        claim: The claim of the session's record; None for a turn that leaves no trace.
    """

    def __init__(
        self,
        request: ModelRequest,
        outline: Outline,
        judged: Classification,
        action: Action,
        setup: Setup,
        claim: Claim | None,
    ) -> None:
        self.request = request
        self.outline = outline
        self.judged = judged
        self.action = action
        self.setup = setup
        self.claim = claim
        self.current = CurrentAgent()
        self.delivery = MessageQueue([])
        self.totals = TurnTotals()
        self.idle_s = 0.0
        """Seconds of silence of the resumed agent before this turn."""
        self.has_spoken = False
        """Whether readers have a part of the answer, so that nothing may be repeated."""
        self.is_answered = False
        self._had_taken_nothing = self.has_taken_nothing = True
        """Whether the agent certainly has the same memory as before this turn."""
        self.calls: list[str] = []
        """Tools of the client application that the answer requests, by call id."""
        self.first_error: ModelError | None = None
        """The error of the agent that a fresh one replaced."""
        self.unneeded: set[str] = set()
        """Agents that will not be resumed any more."""
        self.kept_calls: tuple[AnswerCalls, ...] = ()
        """Earlier own calls of agents in this conversation, which the request lacks."""
        self.own_calls: OwnCalls | None = None
        """The agent's own calls in this turn; None if the application keeps them."""

    @property
    def is_pooled(self) -> bool:
        """Whether this turn writes the session's record."""
        return self.claim is not None and not self.claim.is_lost

    @property
    def is_remembering(self) -> bool:
        """Whether the agent has a memory from before this turn."""
        return not isinstance(self.action, Fresh)

    @property
    def situation(self) -> FailureSituation:
        """State of the turn for decisions about failures."""
        return FailureSituation(
            is_remembering=self.is_remembering,
            is_taken=self.delivery.is_taken,
            has_spoken=self.has_spoken,
            repeats=self.delivery.repeats,
            is_forced=self.delivery.is_forced,
            is_replacement=self.first_error is not None,
            is_retried=self.request.is_resent,
            was_whole=self._was_whole,
            idle_s=self.idle_s,
        )

    @property
    def _was_whole(self) -> bool:
        match self.action:
            case ResumeAgent():
                record = self.claim.found.record if self.claim is not None else None
                return record is not None and record.is_whole
            case Fork():
                return True  # a mark is the end of a complete answer
            case Fresh():
                return False

    @property
    def _is_perhaps_acted_on(self) -> bool:
        """Whether an earlier agent may have begun to act on the messages, in this turn or in a run without an end."""
        before = self.claim.found.record if self.claim is not None else None
        if self.totals.was_perhaps_taken or before is None:
            return self.totals.was_perhaps_taken
        is_of_dead_run = bool(before.run) and self.judged.common == before.fingerprint.count
        # The record of a refused message is that of the answer before it.
        is_of_cut_answer = not before.is_whole and not before.is_refused
        return is_of_dead_run or (is_of_cut_answer and self.judged.kind is RequestRelation.REPEAT)

    @property
    def way(self) -> AgentOrigin:
        """The origin of the agent."""
        match self.action:
            case ResumeAgent():
                return AgentOrigin.RESUMED
            case Fork():
                return AgentOrigin.FORKED
            case Fresh():
                return AgentOrigin.FRESH if self.claim is not None else AgentOrigin.ASIDE

    def begin(self, nonce: str, abilities: Abilities, budget: TranscriptBudget) -> None:
        """Select the messages for the action; called again for a fresh agent after a failure.

        Args:
            nonce: A unique key for an agent without an id.
        """
        match self.action:
            case ResumeAgent():
                assert self.claim is not None
                assert self.claim.found.record is not None
                name = self.claim.found.record.agent
                self.current = CurrentAgent(name, nonce=name)
                delivery = self.action.delivery
                sends = _messages_of(self.request.history, delivery.users, delivery.results, budget)
                if self.claim.found.record.is_refused:
                    sends = _join(sends)
            case Fork():
                self.current = CurrentAgent(self.action.mark.agent, nonce)
                sends = _messages_behind_mark(self.request.history, self.action.users, budget)
            case Fresh():
                self.current = CurrentAgent("", nonce)
                history = with_own_calls(self.request.history, self.kept_calls)
                sends = [_message_with_transcript(history, abilities, budget)]
                self.totals.replays += len(history.entries) > 1
        self._send_cut_answer(sends, budget)
        if self._is_perhaps_acted_on and not abilities.takes_tools:
            sends[-1] = replace(sends[-1], message=after_unrecorded(sends[-1].message))
        sends[-1] = replace(sends[-1], settings=self.request.settings)
        self.delivery = MessageQueue(sends)

    def _send_cut_answer(self, sends: list[UpstreamMessage], budget: TranscriptBudget) -> None:
        """Add the cut answer that the request lacks to the messages for an agent that is not fresh."""
        last = self.kept_calls[-1] if self.kept_calls else None
        if isinstance(self.action, Fresh) or last is None or last.is_whole or sends[0].results:
            return
        if (
            isinstance(self.action, Fork)
            and without_cut_answers(self.request.history) != self.request.history
        ):
            return  # the request has it
        users = self.outline.fingerprint.users
        new = self.action.delivery.users if isinstance(self.action, ResumeAgent) else self.action.users
        known = len(users) - LINK_BYTES * new
        if users.endswith(last.link):  # the same message is sent again
            place = -1
        elif users[:known].endswith(last.link):
            place = 0
        else:
            return
        outgoing = sends[place]
        sends[place] = replace(outgoing, message=after_cut(last.step, outgoing.message, budget))

    def begin_send(self) -> None:
        """Record that the agent's state is uncertain from now on."""
        self._had_taken_nothing, self.has_taken_nothing = self.has_taken_nothing, False

    def take_back_send(self) -> None:
        """Record that the agent refused the message."""
        self.has_taken_nothing = self._had_taken_nothing

    def note_dropped(self) -> None:
        """Record that the agent has removed the message again."""
        self.take_back_send()
        self.current.taken -= 1
        self.current.is_confirmed = False

    def begin_again(self, error: ModelError) -> None:
        """Replace an agent that failed with `error` by a fresh one."""
        was_sent = not self.has_taken_nothing
        self.totals.was_perhaps_taken = self.delivery.is_taken or (was_sent and is_in_doubt(error))
        self.action = Fresh(is_pooled=True)
        self.has_taken_nothing = False
        self.first_error = error
        self.totals.rebuilt = error.code

    def key(self) -> str:
        """Return the idempotency key of the current message, which is the same for each try with this agent."""
        users = self.outline.fingerprint.users
        to_come = len(self.delivery.sends) - 1 - self.delivery.delivered
        sent = users[: len(users) - to_come * LINK_BYTES]
        results = "\0".join(result.call_id for result in self.delivery.sends[self.delivery.delivered].results)
        body = f"{self.request.session}\0{self.current.nonce}\0{results}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(sent[-LINK_BYTES:] + body, digest_size=LINK_BYTES).hexdigest()

    def report(self) -> TurnReport:
        """Return the report of this turn."""
        return TurnReport(
            self.request.session,
            self.judged.kind,
            self.judged.reason.words,
            self.way,
            self.totals.end,
            self.current.name,
            self.judged.common,
            self.judged.new,
            self.totals.sends,
            self.totals.replays,
            self.totals.rebuilt,
            self.totals.error,
            self.totals.usage,
            self.judged.reason.field,
            self.judged.reason.index,
        )

    def judgement(self) -> ReuseDecision:
        """Return the current decision, for readers."""
        reason = self.judged.reason
        return ReuseDecision(
            self.judged.kind.value,
            reason.words,
            self.way.value,
            reason.field,
            reason.index,
            self.judged.common,
            self.judged.new,
            self.totals.rebuilt,
        )


def _messages_of(
    history: History, users: int, results: Sequence[str], budget: TranscriptBudget
) -> list[UpstreamMessage]:
    """Return the last user messages one by one; the first one has the results of these calls.

    If the answer before them was cut, the first one begins with its content.
    """
    entries = history.entries
    first = len(entries) - users
    messages = [entry for entry in entries[first:] if isinstance(entry, UserMessage)]
    answers = _results(entries[first - 1] if first else None, results)
    opening, *others = messages or [UserMessage(())]
    last = entries[first - 1] if first else None
    if isinstance(last, Step) and is_cut(last):
        opening = after_cut(_without_note(last), opening, budget)
    return [UpstreamMessage(opening, answers), *map(UpstreamMessage, others)]


def _messages_behind_mark(history: History, users: int, budget: TranscriptBudget) -> list[UpstreamMessage]:
    """Return the messages for a fork: one by one, or joined if answers between them were cut."""
    joined = join_cut_answers(history, users, budget)
    return _messages_of(history, users, (), budget) if joined is None else [UpstreamMessage(joined)]


def _join(sends: list[UpstreamMessage]) -> list[UpstreamMessage]:
    """Join several messages: the answers to all but the last are not needed."""
    parts: list[Text | File] = []
    for outgoing in sends:
        if parts and outgoing.message.parts:
            parts.append(Text("\n\n"))
        parts += outgoing.message.parts
    return [replace(sends[0], message=UserMessage(tuple(parts)))]


def _results(last: Entry | None, wanted: Sequence[str]) -> tuple[ToolResult, ...]:
    if not wanted or not isinstance(last, Step):
        return ()
    return tuple(result for result in last.results if result.call_id in wanted)


def _message_with_transcript(
    history: History, abilities: Abilities, budget: TranscriptBudget
) -> UpstreamMessage:
    """Return the messages for a fresh agent: the whole transcript, and the message to answer."""
    before = without_notes(history)
    last = before.entries[-1] if before.entries else None
    message = last if isinstance(last, UserMessage) else UserMessage(())
    if isinstance(last, UserMessage):
        before = History(before.entries[:-1])
    if abilities.takes_history:
        if before.entries and is_cut(before.entries[-1]):
            message = UserMessage((Text(DONE + "\n\n"), *message.parts))
        return UpstreamMessage(message, before=before)
    return UpstreamMessage(
        prepend_transcript(before, message, takes_files=abilities.takes_files, budget=budget)
    )


def without_notes(history: History) -> History:
    """Return a history without the notes that this pool had shown in it."""
    return History(
        tuple(entry if isinstance(entry, UserMessage) else _without_note(entry) for entry in history.entries)
    )


def _without_note(entry: Step) -> Step:
    if not entry.response.parts:
        return entry
    first = entry.response.parts[0]
    if not isinstance(first, Thinking) or not first.text.startswith(REBUILT_NOTE.rstrip()):
        return entry
    text = first.text.removeprefix(REBUILT_NOTE.rstrip()).lstrip("\n")
    rest = entry.response.parts[1:]
    kept = (replace(first, text=text), *rest) if text or first.signature else rest
    return replace(entry, response=replace(entry.response, parts=kept))
