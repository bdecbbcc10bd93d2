"""The suite for pooled upstreams, on the scripted one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import Struct

from midstream.agents.upstreams import UpstreamEvent
from midstream.models.responses import Finished, TextDelta
from midstream.testing.pool_contract import MATRIX, PoolContract, PoolPeer, PoolSituation, UpstreamFault
from midstream.testing.scripted_upstream import (
    AgentConversation,
    ScriptedUpstream,
    Trouble,
    UpstreamMemory,
    words_of,
)


class RecordedAnswer(Struct, frozen=True):
    agent: str
    text: str


def whole_conversation(talk: AgentConversation) -> list[UpstreamEvent]:
    """Answer as every peer does."""
    return [TextDelta("told: "), TextDelta(talk.words), Finished()]


class ScriptedPeer:
    """The shared parts of several scripted upstreams."""

    lacks: frozenset[str] = frozenset({"process"})

    def __init__(self) -> None:
        self.memory = UpstreamMemory()
        self.upstreams: list[ScriptedUpstream] = []
        self.is_key_good = True

    def upstream(self) -> ScriptedUpstream:
        made = ScriptedUpstream(self.memory, answer=whole_conversation)
        made.is_key_good = self.is_key_good
        self.upstreams.append(made)
        return made

    def messages(self) -> Sequence[RecordedAnswer]:
        return [RecordedAnswer(agent, words_of(message)) for agent, message in self.memory.arrived]

    def expire(self, agent: str) -> None:
        self.memory.expire(agent)

    def end_processes(self) -> None:
        raise AssertionError("there are none")

    def be_busy(self, agent: str) -> None:
        if agent in self.memory.talks:
            self.memory.talks[agent].is_wedged = True

    def hang(self) -> None:
        self._next(Trouble.HANGS_OPENED)

    def hang_unopened(self) -> None:
        self._next(Trouble.HANGS_TAKEN)

    def die_unopened(self) -> None:
        self._next(Trouble.ACK_LOST)

    def echo_wrong_id(self) -> None:
        self._next(Trouble.NEW_CHAT)

    def die_mid_stream(self) -> None:
        self._next(Trouble.DIES_SPEAKING)

    def refuse_key(self) -> None:
        self._next(Trouble.UNAUTHENTICATED)

    def accept_key(self) -> None:
        """The key was refused once."""

    def _next(self, trouble: Trouble) -> None:
        self.upstreams[-1].troubles.append(trouble)


class TestScriptedPooled(PoolContract):
    @pytest.fixture
    def peer(self) -> PoolPeer:
        return ScriptedPeer()


def test_the_matrix_is_complete() -> None:
    cells = [(case.situation, case.fault) for case in MATRIX]
    of_agents_with_a_past = {UpstreamFault.EXPIRED, UpstreamFault.BUSY, UpstreamFault.WRONG_ID}
    of_open_agents = {PoolSituation.CONTINUED, PoolSituation.EDITED}
    assert set(cells) == {
        (situation, fault)
        for situation in PoolSituation
        for fault in UpstreamFault
        if fault is not UpstreamFault.WRONG_ID or situation is PoolSituation.RESTARTED
        if fault not in of_agents_with_a_past or situation is not PoolSituation.FIRST
        if fault is not UpstreamFault.ENDED or situation in of_open_agents
    }
    assert len(cells) == len(set(cells)) == 57
