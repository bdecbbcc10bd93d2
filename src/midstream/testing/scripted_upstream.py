"""An upstream that keeps its conversations in memory, and fails on request."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct, field
from typing_extensions import override

from midstream.agents.prior_transcript import DONE
from midstream.agents.upstream_abilities import Abilities
from midstream.agents.upstreams import (
    Marked,
    MessageDropped,
    MessageTaken,
    Setup,
    UpstreamAgent,
    UpstreamEvent,
    UpstreamMessage,
)
from midstream.environment import World
from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelRejectedError,
    ModelUnavailableError,
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
)
from midstream.history.messages import Step, Text, Usage, UserMessage
from midstream.models.responses import Finished, TextDelta, UpstreamCallStarted

RETRY_AFTER_S = 2.0
"""Requested wait of a rate limit."""


class Trouble(StrEnum):
    """Faults that can happen with one message, or with opening the agent for it."""

    GONE_AT_OPEN = "gone_at_open"
    """The conversation does not exist, which shows when it is resumed."""
    GONE = "gone"
    """The conversation does not exist, which shows when a message is sent."""
    FAILED = "failed"
    """The run fails without any output, as with dead agents of some upstreams."""
    UNAVAILABLE = "unavailable"
    """The connection is refused."""
    ACK_LOST = "ack_lost"
    """The connection is lost after the message arrived, before the upstream reported that."""
    RATE_LIMIT = "rate_limit"
    """It requests a retry after `RETRY_AFTER_S`."""
    BUSY = "busy"
    """The agent is in another run, until that is ended with `is_forced`."""
    HANGS = "hangs"
    """The message is not taken, and no event comes."""
    HANGS_TAKEN = "hangs_taken"
    """The message is taken without a report, and no event comes."""
    HANGS_OPENED = "hangs_opened"
    """The message is taken, and then no event comes."""
    HANGS_SPEAKING = "hangs_speaking"
    """No event comes after the first text."""
    HANGS_IN_TOOL = "hangs_in_tool"
    """A tool of the upstream never ends."""
    DIES_OPENED = "dies_opened"
    """The run fails after the message was taken, before the first text."""
    OUTAGE_OPENED = "outage_opened"
    """The provider behind the agent fails after the message was taken, before the first text."""
    DIES_SPEAKING = "dies_speaking"
    """The run fails after the first text."""
    CUT = "cut"
    """The answer ends without `Finished`."""
    NEW_CHAT = "new_chat"
    """It begins an empty conversation instead of continuing, which shows only in its ids."""
    UNAUTHENTICATED = "unauthenticated"
    """It reports that the key is wrong; for the truth, see `ScriptedUpstream.is_key_good`."""
    REJECTED = "rejected"
    """It refuses the request."""
    OVERFLOW = "overflow"
    """The conversation is too long."""
    FILTERED = "filtered"
    """A filter refuses the request."""


class ReceivedMessage(Struct, frozen=True):
    """One message that an agent took."""

    message: UpstreamMessage
    setup: Setup
    key: str


class AgentConversation(Struct):
    """A conversation: the messages for its agent, in order, and the responses."""

    name: str
    messages: list[ReceivedMessage] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    run: int = 0
    """Number of the current run; 0 without one."""
    unacked: set[str] = field(default_factory=set)
    """Keys of messages that were taken without a report; a repetition is not taken again."""
    is_wedged: bool = False
    """Whether a run without a reader occupies it."""

    @property
    def words(self) -> str:
        """All its messages, as text."""
        return "\n".join(words_of(received.message) for received in self.messages)


class UpstreamMemory:
    """Shared memory of upstreams: one service for several processes."""

    def __init__(self) -> None:
        self.talks: dict[str, AgentConversation] = {}
        self.forgotten: list[str] = []
        """Agents that were deleted on request."""
        self.arrived: list[tuple[str, UpstreamMessage]] = []
        """Every taken message with its agent, in order, including those of deleted agents."""
        self.numbers = itertools.count(1)
        self._talk_numbers = itertools.count(1)
        self.wrongs: list[str] = []
        """Errors of the caller: a message to a busy agent, or a key for two messages."""
        self._keys: dict[str, tuple[str, str]] = {}

    def check_key(self, key: str, agent: str, words: str) -> None:
        """Record an error if a key is used for another message or another agent."""
        if self._keys.setdefault(key, (agent, words)) != (agent, words):
            self.wrongs.append(f"key {key!r} stands for two things")

    def begin(self) -> AgentConversation:
        """Begin an empty conversation."""
        talk = AgentConversation(f"agent-{next(self._talk_numbers)}")
        self.talks[talk.name] = talk
        return talk

    def expire(self, agent: str) -> None:
        """Delete a conversation silently."""
        self.talks.pop(agent, None)


Answer = Callable[[AgentConversation], Sequence[UpstreamEvent]]
"""Answer of an agent, by its messages."""


def answers_by_number(talk: AgentConversation) -> Sequence[UpstreamEvent]:
    """Answer with the number of taken messages, in two pieces; the tokens are the characters of the last message.

    An agent with a cut answer of its own continues after the first piece.
    """
    words = words_of(talk.messages[-1].message)
    begun = [] if DONE in words else [TextDelta("answer ")]
    return [*begun, TextDelta(str(len(talk.messages))), Finished(usage=Usage(len(words), 2))]


class ScriptedUpstream:
    """A stateful upstream in this process, for tests of pools.

    Args:
        memory: Its conversations; several upstreams with the same memory are one service.
        answer: The answer of its agents to a message, without `MessageTaken`.
        identity, abilities, name: See `Upstream`.
        troubles: The faults for the next messages, in order; None for no fault.
        world: Its `sleep` lets other tasks run between two events.
        drops: Whether its agents remove a message whose answer is not complete.
    """

    def __init__(
        self,
        memory: UpstreamMemory | None = None,
        *,
        answer: Answer = answers_by_number,
        identity: Mapping[str, str] | None = None,
        abilities: Abilities = Abilities(),  # noqa: B008 - frozen
        name: str = "scripted",
        troubles: Iterable[Trouble | None] = (),
        world: World = World(),
        drops: bool = False,
    ) -> None:
        self.memory = UpstreamMemory() if memory is None else memory
        self.name = name
        self.identity: Mapping[str, str] = dict(identity or {})
        self.abilities = abilities
        self.answer = answer
        self.troubles: deque[Trouble | None] = deque(troubles)
        self.world = world
        self.drops = drops
        self.is_key_good = True
        self.opened: list[str] = []
        """The opened agents so far: the id of a resumed one, or "" for a fresh one."""
        self.sends: list[ReceivedMessage] = []
        """Every sent message, taken or not, including repetitions."""
        self.live = 0
        """Agents that are open now."""
        self.live_max = 0
        """Greatest number of agents that were open at once."""
        self.is_closed = False

    async def open(self, setup: Setup, *, resume: str = "") -> ScriptedAgent:
        """See `Upstream.open`."""
        if resume and (resume not in self.memory.talks or self._has_next(Trouble.GONE_AT_OPEN)):
            raise UpstreamGoneError(f"no agent {resume!r}")
        self.opened.append(resume)
        return ScriptedAgent(self, setup, resume)

    async def fork(self, setup: Setup, *, agent: str, mark: str) -> ScriptedAgent:
        """See `ForkingUpstream.fork`; a mark is the number of taken messages before it."""
        origin = self.memory.talks.get(agent)
        if origin is None:
            raise UpstreamGoneError(f"no agent {agent!r}")
        talk = self.memory.begin()
        talk.messages += origin.messages[: int(mark)]
        talk.responses += origin.responses[: int(mark)]
        self.opened.append(f"{agent}@{mark}")
        return ScriptedAgent(self, setup, talk.name, came_from=agent)

    async def verify(self) -> bool:
        """See `Upstream.verify`."""
        return self.is_key_good

    async def delete(self, agent: str) -> None:
        """Delete a conversation."""
        self.memory.forgotten.append(agent)
        self.memory.expire(agent)

    async def aclose(self) -> None:
        """See `Upstream.aclose`."""
        self.is_closed = True

    def next_trouble(self) -> Trouble | None:
        """Return and remove the fault for the next message."""
        return self.troubles.popleft() if self.troubles else None

    def _has_next(self, trouble: Trouble) -> bool:
        if self.troubles and self.troubles[0] is trouble:
            self.troubles.popleft()
            return True
        return False


class ScriptedAgent(UpstreamAgent):
    """One conversation, created by `ScriptedUpstream`."""

    def __init__(
        self, upstream: ScriptedUpstream, setup: Setup, resumed: str, *, came_from: str = ""
    ) -> None:
        self._upstream = upstream
        self._setup = setup
        self._name = resumed
        self._came_from = came_from or resumed
        self._is_open = True
        self._has_spoken = False
        self._number = next(upstream.memory.numbers)
        upstream.live += 1
        upstream.live_max = max(upstream.live_max, upstream.live)

    @override
    async def send(
        self, outgoing: UpstreamMessage, *, key: str, is_forced: bool = False
    ) -> AsyncGenerator[UpstreamEvent, None]:
        received = ReceivedMessage(outgoing, self._setup, key)
        self._upstream.sends.append(received)
        memory, trouble = self._upstream.memory, self._upstream.next_trouble()
        memory.check_key(key, self._came_from or f"fresh-{self._number}", words_of(outgoing))
        await self._upstream.world.sleep(0)
        resumed = self._came_from
        if self._name and self._name not in memory.talks:
            raise UpstreamGoneError(f"no agent {self._name!r}")
        if trouble is Trouble.NEW_CHAT and resumed:
            self._name, resumed = "", ""
        talk = memory.talks[self._name] if self._name else memory.begin()
        if talk.run:
            memory.wrongs.append(f"{talk.name} was spoken to while it spoke")
        await _refuse(trouble, talk, is_forced=is_forced)
        if key not in talk.unacked:
            talk.messages.append(received)
            memory.arrived.append((talk.name, outgoing))
        talk.unacked.discard(key)
        if trouble is Trouble.ACK_LOST:
            talk.unacked.add(key)
            self._name = self._came_from and talk.name
            raise ModelUnavailableError("the connection broke")
        if trouble is Trouble.HANGS_TAKEN:
            self._name = self._came_from and talk.name
            await asyncio.Event().wait()
        talk.run = run = next(memory.numbers)
        try:
            self._name = self._came_from = talk.name
            # Some software reports the resumed id only after a resumption, not between messages.
            resumed = "" if self._has_spoken else resumed
            yield MessageTaken(talk.name, resumed, is_provisional=self._upstream.drops)
            self._has_spoken = True
            if trouble is Trouble.OUTAGE_OPENED:
                if self._upstream.drops:
                    talk.messages.remove(received)
                    yield MessageDropped()
                raise ModelUnavailableError("the provider is overloaded")
            async for event in self._answer(talk, trouble):
                if talk.run != run:
                    raise UpstreamFailedError("another run took its place")
                yield event
        finally:
            talk.run = 0 if talk.run == run else talk.run

    async def _answer(
        self, talk: AgentConversation, trouble: Trouble | None
    ) -> AsyncGenerator[UpstreamEvent, None]:
        if trouble is Trouble.HANGS_OPENED:
            await asyncio.Event().wait()
        if trouble is Trouble.DIES_OPENED:
            raise UpstreamFailedError("the run ended with status 'error'")
        if trouble is Trouble.HANGS_IN_TOOL:
            yield UpstreamCallStarted("call", "build", "{}")
            await asyncio.Event().wait()
        words: list[str] = []
        for event in self._upstream.answer(talk):
            await self._upstream.world.sleep(0)
            if isinstance(event, Finished):
                if trouble is Trouble.CUT:
                    return
                talk.responses.append("".join(words))
                if self._upstream.abilities.can_fork:
                    yield Marked(str(len(talk.messages)))
            yield event
            if isinstance(event, TextDelta):
                words.append(event.text)
                if trouble is Trouble.HANGS_SPEAKING:
                    await asyncio.Event().wait()
                if trouble is Trouble.DIES_SPEAKING:
                    raise UpstreamFailedError("the run ended with status 'error'")

    @override
    async def aclose(self) -> None:
        if self._is_open:
            self._is_open = False
            self._upstream.live -= 1


async def _refuse(trouble: Trouble | None, talk: AgentConversation, *, is_forced: bool) -> None:
    """Apply a fault before a message is taken."""
    if trouble is Trouble.BUSY:
        talk.is_wedged = True
    if is_forced:
        talk.is_wedged, talk.run = False, 0
    if trouble is Trouble.HANGS:
        await asyncio.Event().wait()
    if talk.is_wedged or talk.run:
        raise UpstreamBusyError(f"agent {talk.name!r} is in another run")
    if trouble in _REFUSALS:
        refusal = _REFUSALS[trouble]()
        raise refusal


_REFUSALS: dict[Trouble | None, Callable[[], ModelError]] = {
    Trouble.GONE: lambda: UpstreamGoneError("no such agent"),
    Trouble.FAILED: lambda: UpstreamFailedError("the run ended with status 'error'"),
    Trouble.UNAVAILABLE: lambda: ModelUnavailableError("the connection was refused"),
    Trouble.RATE_LIMIT: lambda: ModelUnavailableError("too many requests", retry_after_s=RETRY_AFTER_S),
    Trouble.UNAUTHENTICATED: lambda: ModelAccessError("unauthenticated"),
    Trouble.REJECTED: lambda: ModelRejectedError("tool_use ids were found without tool_result blocks"),
    Trouble.OVERFLOW: lambda: ContextOverflowError("too long"),
    Trouble.FILTERED: lambda: ModelFilteredError("refused by a filter"),
}


def words_of(outgoing: UpstreamMessage) -> str:
    """Return all text of a message, with its earlier history and its results."""
    entries = [*(outgoing.before.entries if outgoing.before else ()), outgoing.message]
    lines: list[str] = [result.content for result in outgoing.results]
    for entry in entries:
        match entry:
            case UserMessage():
                lines += [part.text for part in entry.parts if isinstance(part, Text)]
            case Step():
                lines += [entry.response.text, *(result.content for result in entry.results)]
    return "\n".join(line for line in lines if line)
