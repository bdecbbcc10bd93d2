"""Faults of a pooled upstream in all situations, with the required results, as data and as a test suite.

`MATRIX` has a `Case` for each situation and each fault that can occur in it. An upstream's own tests run it against its
real software, with the scripted other end that `midstream.testing.upstream_contract` requires:

    class TestMyUpstreamPooled(PoolContract):
        @pytest.fixture
        def peer(self, tmp_path: Path) -> Peer:
            return MyPeer(tmp_path)

In each case, the last agent finally has each message of the client application exactly once, in order.
"""
# ruff: noqa: D102 - tests: names state what they check

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import pytest
from msgspec import Struct

from midstream.agents.agent_runs import SilenceLimits
from midstream.agents.pool import Pooled, PoolLimits
from midstream.agents.upstreams import Upstream
from midstream.environment import World
from midstream.errors import ModelError
from midstream.history.messages import History, Response, Step, Text, UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.store.contract import KeyValue
from midstream.store.memory import Memory, MemoryStore

LIMIT_S = 60.0
"""Seconds after which an expected answer counts as missing."""
PATIENCE_S = 30.0
"""Permitted seconds of an agent's silence. Tests of a silence do not really wait for them."""
NAMING_S = 0.1
"""Seconds for an agent's events before its silence; one without events counts as mute, which is correct."""
PAUSE_S = 1.0
"""Seconds that do not count as silence: the pool's pause before a retry."""
LOOK_S = 0.005
"""Seconds between two checks for arrived messages."""
TOKEN = re.compile(r"\bword-\d+\b")


class PoolSituation(StrEnum):
    """Situation of a client application at its request."""

    FIRST = "first"
    """No earlier message."""
    CONTINUED = "continued"
    """One more message, in the same process."""
    RESTARTED = "restarted"
    """One more message, in another process."""
    QUEUED = "queued"
    """Two more successive messages."""
    EDITED = "edited"
    """The last message was replaced."""
    REPEATED = "repeated"
    """The last answer is requested again."""
    REBASED = "rebased"
    """One more message, and another system prompt."""


class UpstreamFault(StrEnum):
    """Fault of the upstream in that situation."""

    NONE = "none"
    EXPIRED = "expired"
    """It has lost all its conversations."""
    ENDED = "ended"
    """Its processes have ended since the last message."""
    BUSY = "busy"
    """The conversation is in another run."""
    WRONG_ID = "wrong-id"
    """It opens an empty conversation instead of resuming, without an error."""
    SILENT = "silent"
    """It takes the message and sends no text."""
    MUTE = "mute"
    """It takes the message and sends no event at all."""
    LOST = "lost"
    """It takes the message, and it or its connection dies before it reports that."""
    DIES = "dies"
    """Its answer ends after the first text."""
    KEY_REFUSED = "key-refused"
    """The credential is refused."""


class Case(Struct, frozen=True):
    """One cell of the matrix.

    Args:
        is_answered: Whether the request is answered; otherwise it fails with a `ModelError`, and is repeated. With
            `SILENT` and `LOST` this depends on the upstream.
        is_replayed: Whether a fresh agent gets the whole transcript before the answer, if the upstream can neither fork
            nor accept other instructions. With `KEY_REFUSED` and `LOST` this is not defined.
    """

    situation: PoolSituation
    fault: UpstreamFault
    is_answered: bool
    is_replayed: bool

    @property
    def replays_max(self) -> int:
        """Greatest number of full replays: one for the situation, and one for the fault."""
        return (self.situation in _REPLAYED) + (self.fault is not UpstreamFault.NONE)


_REPLAYED = {PoolSituation.EDITED, PoolSituation.REPEATED, PoolSituation.REBASED}
"""Situations in which a fresh agent gets everything, unless the upstream can fork or accept other instructions."""
_TOUCHES_RESUMED = {
    UpstreamFault.EXPIRED,
    UpstreamFault.ENDED,
    UpstreamFault.BUSY,
    UpstreamFault.WRONG_ID,
}
"""Faults that need an agent with a conversation."""


_BEGUN_ANEW = {
    UpstreamFault.EXPIRED,
    UpstreamFault.WRONG_ID,
    UpstreamFault.SILENT,
    UpstreamFault.MUTE,
    UpstreamFault.LOST,
    UpstreamFault.DIES,
}


def _case(situation: PoolSituation, fault: UpstreamFault) -> Case:
    is_fresh = situation is PoolSituation.FIRST or situation in _REPLAYED
    is_felt = not is_fresh if fault in _TOUCHES_RESUMED else True
    # The answer to the first of two messages is not shown, so it may end early unnoticed.
    is_seen = situation is not PoolSituation.QUEUED
    is_answered = fault is not UpstreamFault.KEY_REFUSED and not (fault is UpstreamFault.DIES and is_seen)
    is_begun_anew = is_felt and fault in _BEGUN_ANEW
    is_replayed = situation in _REPLAYED or (is_begun_anew and situation is not PoolSituation.FIRST)
    return Case(situation, fault, is_answered, is_replayed)


def _can_occur(situation: PoolSituation, fault: UpstreamFault) -> bool:
    if fault is UpstreamFault.WRONG_ID:
        return situation is PoolSituation.RESTARTED  # the only resumption
    if fault is UpstreamFault.ENDED:
        return situation in {PoolSituation.CONTINUED, PoolSituation.EDITED}  # an agent is open
    return not (fault in _TOUCHES_RESUMED and situation is PoolSituation.FIRST)


MATRIX: tuple[Case, ...] = tuple(
    _case(situation, fault)
    for situation in PoolSituation
    for fault in UpstreamFault
    if _can_occur(situation, fault)
)
"""Every situation with every fault that can occur in it."""


class TakenMessage(Protocol):
    """A user's message that reached the peer."""

    @property
    def agent(self) -> str:
        """The conversation of the message."""

    @property
    def text(self) -> str:
        """Its whole text."""


class PoolPeer(Protocol):
    """The used methods of `midstream.testing.upstream_contract.UpstreamPeer`."""

    @property
    def lacks(self) -> frozenset[str]:
        """Traits that this kind of upstream cannot have: "busy", "echo", "process" and "verify" are used."""

    def upstream(self) -> Upstream:
        """Return another upstream for this peer, as another process would create it."""

    def messages(self) -> Sequence[TakenMessage]:
        """Return all received messages, in order."""

    def expire(self, agent: str) -> None:
        """Delete a conversation."""

    def end_processes(self) -> None:
        """End the processes that upstreams of this peer have started."""

    def be_busy(self, agent: str) -> None:
        """Refuse messages to a conversation until its run is ended with `is_forced`."""

    def hang(self) -> None:
        """Take the next message, name the conversation, and then be silent."""

    def echo_wrong_id(self) -> None:
        """Open another, empty conversation at the next resumption."""

    def hang_unopened(self) -> None:
        """Take the next message, and send no event."""

    def die_unopened(self) -> None:
        """Take the next message, and fail before any output."""

    def die_mid_stream(self) -> None:
        """End the next answer after its first text."""

    def refuse_key(self) -> None:
        """Refuse the credential from now on."""

    def accept_key(self) -> None:
        """Accept the credential again."""


class _FastWorld(World):
    """The real world, in which a test can advance time; a pause before a retry takes no time."""

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._passing = asyncio.Event()

    def monotonic(self) -> float:
        return super().monotonic() + self._passed_s

    async def sleep(self, seconds: float) -> None:
        if seconds <= PAUSE_S:
            self.let_pass(seconds)
            await super().sleep(0)
            return
        until = self.monotonic() + seconds
        while (left_s := until - self.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._passing.wait()

    def let_pass(self, seconds: float) -> None:
        self._passed_s += seconds
        self._passing.set()
        self._passing = asyncio.Event()


class _Host:
    """A client application with one conversation and a pool, and its second process."""

    def __init__(self, peer: PoolPeer, kv: KeyValue) -> None:
        self.peer = peer
        self.world = _FastWorld()
        self.kv = kv
        self.history = History()
        self.system = ""
        self.answer = ""
        """The last answer: the peer answers with all messages that its agent received."""
        self.pools: list[Pooled] = []
        self.pool = self.start()
        self._words = 0

    def start(self) -> Pooled:
        limits = PoolLimits(silence=SilenceLimits(idle_s=PATIENCE_S, tool_s=PATIENCE_S))
        self.pools.append(Pooled(self.peer.upstream(), self.kv, limits=limits, world=self.world))
        return self.pools[-1]

    def word(self) -> UserMessage:
        self._words += 1
        return UserMessage.of(f"say word-{self._words}")

    def then(self, *messages: UserMessage) -> None:
        for message in messages:
            self.history = self.history.then(message)

    async def send(self) -> None:
        """Request an answer to the history, and append it."""
        request = ModelRequest(self.system, self.history, session="s")
        words, is_whole = "", False
        async with asyncio.timeout(LIMIT_S):
            async for event in self.pool.stream(request):
                if isinstance(event, TextDelta):
                    words += event.text
                is_whole = is_whole or isinstance(event, Finished)
        assert is_whole
        self.answer = words
        # Not the text: it would be sent again with the next transcript, and count twice.
        self.history = self.history.then(Step(Response((Text("noted"),))))

    async def close(self) -> None:
        for pool in self.pools:
            await pool.aclose()


class PoolContract:
    """Tests of a pool over your upstream. Define a fixture `peer`, which returns a new `PoolPeer`."""

    pytestmark = pytest.mark.asyncio

    @pytest.mark.parametrize("case", MATRIX, ids=lambda case: f"{case.situation}-{case.fault}")
    async def test_each_message_arrives_once_whatever_goes_wrong(self, peer: PoolPeer, case: Case) -> None:
        _needs(peer, case.fault)
        store = MemoryStore(Memory())
        await store.open()
        host = _Host(peer, store)
        try:
            await _arrive(host, case.situation)
            _break(host, case)
            await _recover_after(host, case)
        finally:
            await host.close()


async def _recover_after(host: _Host, case: Case) -> None:
    """Request until there is an answer, and check the messages; the next turn must not need a replay."""
    before = len(host.peer.messages())
    if case.fault in (UpstreamFault.SILENT, UpstreamFault.MUTE):
        async with asyncio.TaskGroup() as silence:
            silence.create_task(_silence(host, before))
            is_answered = await _is_answered(host)
    else:
        is_answered = await _is_answered(host)
    # A peer that names its conversation with the first text has sent output before its silence: then an error is
    # correct.
    assert is_answered == case.is_answered or case.fault in (UpstreamFault.SILENT, UpstreamFault.LOST)
    if case.fault is UpstreamFault.KEY_REFUSED:
        host.peer.accept_key()
    if not is_answered:
        await host.send()
    _check(host, before, case)
    host.then(host.word())
    again = len(host.peer.messages())
    await host.send()
    assert len(host.peer.messages()) == again + 1
    _check_messages(host)


async def _silence(host: _Host, before: int) -> None:
    """Advance time beyond the permitted silence, after an agent that will not answer has the message."""
    real = World()
    async with asyncio.timeout(LIMIT_S):
        while len(host.peer.messages()) == before:
            await real.sleep(LOOK_S)
    await real.sleep(NAMING_S)
    host.world.let_pass(PATIENCE_S)


async def _is_answered(host: _Host) -> bool:
    try:
        await host.send()
    except ModelError:
        return False
    return True


async def _arrive(host: _Host, situation: PoolSituation) -> None:
    host.then(host.word())
    if situation is PoolSituation.FIRST:
        return
    await host.send()
    host.then(host.word())
    await host.send()
    match situation:
        case PoolSituation.CONTINUED:
            host.then(host.word())
        case PoolSituation.RESTARTED:
            await host.pool.aclose()
            host.pool = host.start()
            host.then(host.word())
        case PoolSituation.QUEUED:
            host.then(host.word(), host.word())
        case PoolSituation.EDITED:
            host.history = History(host.history.entries[:-2])
            host.then(host.word())
        case PoolSituation.REPEATED:
            host.history = History(host.history.entries[:-1])
        case PoolSituation.REBASED:
            host.system = "Be brief."
            host.then(host.word())


def _break(host: _Host, case: Case) -> None:
    agents = {message.agent for message in host.peer.messages()}
    match case.fault:
        case UpstreamFault.NONE:
            pass
        case UpstreamFault.EXPIRED:
            for agent in agents:
                host.peer.expire(agent)
        case UpstreamFault.ENDED:
            host.peer.end_processes()
        case UpstreamFault.BUSY:
            for agent in agents:
                host.peer.be_busy(agent)
        case UpstreamFault.WRONG_ID:
            host.peer.echo_wrong_id()
        case UpstreamFault.SILENT:
            host.peer.hang()
        case UpstreamFault.MUTE:
            host.peer.hang_unopened()
        case UpstreamFault.LOST:
            host.peer.die_unopened()
        case UpstreamFault.DIES:
            host.peer.die_mid_stream()
        case UpstreamFault.KEY_REFUSED:
            host.peer.refuse_key()


def _needs(peer: PoolPeer, fault: UpstreamFault) -> None:
    lacking = {
        UpstreamFault.BUSY: "busy",
        UpstreamFault.ENDED: "process",
        UpstreamFault.WRONG_ID: "echo",
        UpstreamFault.KEY_REFUSED: "verify",
    }.get(fault)
    if lacking in peer.lacks:
        pytest.skip(f"this kind of upstream has no {lacking}")


def _check(host: _Host, before: int, case: Case) -> None:
    """Check the messages since the fault."""
    tokens = [token for message in host.peer.messages()[before:] for token in TOKEN.findall(message.text)]
    replays = tokens.count("word-1")
    _check_messages(host)
    if case.situation is PoolSituation.FIRST:  # the message is the whole conversation
        return
    assert replays <= case.replays_max
    if case.fault is UpstreamFault.ENDED and case.situation is PoolSituation.CONTINUED:
        assert not replays  # it is resumed by its id
    can = host.peer.upstream().abilities
    if not (
        can.can_fork or can.can_reinstruct or case.fault in (UpstreamFault.KEY_REFUSED, UpstreamFault.LOST)
    ):
        assert bool(replays) == case.is_replayed


def _check_messages(host: _Host) -> None:
    """Check that the last agent got each message once, in order."""
    wanted = [
        token
        for entry in host.history.entries
        if isinstance(entry, UserMessage)
        for token in TOKEN.findall(str(entry.parts))
    ]
    assert TOKEN.findall(host.answer) == wanted
