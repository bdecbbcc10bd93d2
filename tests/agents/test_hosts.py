"""Random requests of client applications, and agents with a memory: the agent has every message once, in order."""

from __future__ import annotations

import random

import pytest
from msgspec import Struct
from msgspec.structs import replace

from midstream.agents.pool_records import (
    PoolRecord,
    confirm,
    create_fork,
    create_fresh,
    create_resumed,
    decode,
    encode,
    with_answer,
    with_side_call,
)
from midstream.agents.reuse_classification import (
    Action,
    Delivery,
    Fork,
    Fresh,
    RequestRelation,
    ResumeAgent,
    action,
    classify,
)
from midstream.agents.upstream_abilities import Abilities
from midstream.history.messages import Entry, Step, Text, ToolSpec, UserMessage
from midstream.models.fingerprint import Outline
from tests.agents.reuse_examples import outline_of, step_of, user_message
from tests.search import tried
from tests.spec import spec

TURNS = 60


class AgentMemory(Struct):
    """The view of what an agent received, under which model; and the response whose results it waits for."""

    received: list[str]
    model: str
    waits: Step | None = None


def view(entries: list[Entry]) -> list[str]:
    """Return the part of a conversation that an agent must have: user texts, and the steps of others between them."""
    received: list[str] = []
    for entry in entries:
        if isinstance(entry, UserMessage):
            received += [part.text for part in entry.parts if isinstance(part, Text)]
        elif entry.response.text.startswith("foreign"):
            received.append(entry.response.text)
    return received


class RandomApplication:
    """A client application with a conversation that it rewrites at random, over one key of a pool and an upstream."""

    def __init__(self, chance: random.Random, abilities: Abilities, ids: str) -> None:
        self.chance = chance
        self.abilities = abilities
        self.ids = ids
        """`own`: each call has its own id; `again`: each response uses the same ids."""
        self.entries: list[Entry] = []
        self.system = "s0"
        self.tools: tuple[ToolSpec, ...] = ()
        self.model = "m0"
        self.words = 0
        self.calls = 0
        self.record: PoolRecord | None = None
        self.minds: dict[str, AgentMemory] = {}
        self.marks: dict[str, AgentMemory] = {}
        self.kinds: list[RequestRelation] = []

    def turn(self) -> None:
        """Rewrite the conversation at random and request an answer; usually answer the tool calls."""
        self._rewrite()
        if self.chance.random() < 0.1:
            title: list[Entry] = [user_message(f"title {self.chance.randrange(3)}")]
            self._ask(title, "title")
        response = self._ask(self.entries, self.system)
        while response is not None:
            self.entries.append(response)
            if not response.results or self.chance.random() < 0.2:
                return
            response = self._ask(self.entries, self.system)

    def _rewrite(self) -> None:
        chance, entries = self.chance, self.entries
        users = [at for at, entry in enumerate(entries) if isinstance(entry, UserMessage)]
        results = [at for at, entry in enumerate(entries) if isinstance(entry, Step) and entry.results]
        match chance.choices(list(REWRITES), list(REWRITES.values()))[0]:
            case "queue":
                entries.append(self._new_message())
            case "edit" if users:
                at = chance.choice(users)
                entries[at] = self._new_message()
                if chance.random() < 0.7:
                    del entries[at + 1 :]
                    return
            case "revert" if users:
                del entries[chance.choice(users) :]
            case "repeat" if users:
                del entries[users[-1] + 1 :]
                return
            case "repeat results" if results:
                del entries[results[-1] + chance.randrange(2) :]
                return
            case "compact" if users:
                entries[: chance.choice(users)] = [self._new_message()]
            case "system":
                self.system = f"s{chance.randrange(3)}"
            case "model":
                self.model = f"m{chance.randrange(2)}"
            case "tools":
                self.tools = () if self.tools else (ToolSpec("read"),)
            case "forget":  # results of tools before this point
                entries[:] = [entry if view([entry]) else step_of() for entry in entries]
            case "elsewhere":
                entries += [self._new_message(), self._foreign(chance.randrange(2))]
            case "answered elsewhere" if users:
                del entries[users[-1] + 1 :]
                entries.append(self._foreign(1))
                if chance.random() < 0.3:
                    return
        entries.append(self._new_message())

    def _foreign(self, calls: int) -> Step:
        """Return a step of another model. Its bare text in place of ours may be ours, rewritten: it is not detected."""
        self.words += 1
        return step_of(f"foreign {self.words}", calls=[f"foreign-{self.words}"][:calls])

    def _new_message(self) -> UserMessage:
        self.words += 1
        return user_message(f"word {self.words}")

    def _ask(self, entries: list[Entry], system: str) -> Step | None:
        """Do what a pool does, with a process that may die anywhere; return the response of the agent, or None."""
        outline = outline_of(*entries, system=system, tools=self.tools, identity={"model": self.model})
        record = self.record if self.record is None else decode(encode(self.record))
        judged = classify(record, outline)
        self.kinds.append(judged.kind)
        chosen = action(judged, outline, record, self.abilities)
        agent, mind, new, pending = self._open(chosen, record, outline, view(entries))
        if isinstance(chosen, ResumeAgent) and mind.waits is not None:
            assert mind.waits is entries[len(entries) - 1 - chosen.delivery.users]
            assert chosen.delivery.results == tuple(result.call_id for result in mind.waits.results)
        elif isinstance(chosen, ResumeAgent):
            assert chosen.delivery.results == ()
        if isinstance(chosen, Fresh) and not chosen.is_pooled:
            self.record = None if record is None else with_side_call(record, outline)
            return step_of()
        self.record = pending
        if self.chance.random() < 0.05:  # died before the message was sent
            return None
        mind.waits = None
        mind.received += new
        assert mind.received == view(entries)
        assert mind.model == self.model
        if self.chance.random() < 0.05:  # died before the first event
            return None
        self.record = confirm(pending, agent, now=2.0)
        if self.chance.random() < 0.05:  # died before the end
            return None
        return self._response(agent, mind)

    def _open(
        self, chosen: Action, record: PoolRecord | None, outline: Outline, received: list[str]
    ) -> tuple[str, AgentMemory, list[str], PoolRecord]:
        """Return the agent, its memory, the new messages, and the record before them."""
        fresh = f"agent-{len(self.minds)}"
        match chosen:
            case ResumeAgent(delivery):
                assert record is not None
                new = received[len(received) - delivery.users :]
                return record.agent, self.minds[record.agent], new, create_resumed(record, outline, now=1.0)
            case Fork(mark, users):
                assert record is not None
                origin = self.marks[mark.mark]
                mind = self.minds[fresh] = AgentMemory(list(origin.received), origin.model)
                return (
                    fresh,
                    mind,
                    received[len(received) - users :],
                    create_fork(record, outline, mark.users, now=1.0),
                )
            case Fresh():
                mind = self.minds[fresh] = AgentMemory([], self.model)
                return fresh, mind, received, create_fresh(outline, upstream="scripted", now=1.0)

    def _response(self, agent: str, mind: AgentMemory) -> Step:
        count = self.chance.choice([0, 0, 1, 2]) if self.abilities.takes_tools else 0
        self.calls += count
        first = self.calls if self.ids == "own" else 0
        calls = tuple(f"c{first + number}" for number in range(count))
        response = step_of(calls=calls)
        mind.waits = response if calls else None
        mark = f"mark-{len(self.marks)}"
        self.marks[mark] = AgentMemory(list(mind.received), mind.model)
        assert self.record is not None
        self.record = with_answer(self.record, agent=agent, mark=mark, open_calls=calls, now=3.0)
        return response


REWRITES = {
    "send": 14,
    "queue": 2,
    "edit": 1,
    "revert": 1,
    "repeat": 2,
    "repeat results": 1,
    "compact": 1,
    "system": 1,
    "model": 1,
    "tools": 1,
    "forget": 1,
    "elsewhere": 1,
    "answered elsewhere": 1,
}
"""The rewrites of a client application before its request, and how often each happens."""
ABLE = Abilities(takes_tools=True, can_reinstruct=True, can_retool=True, can_fork=True)


@spec("REUSE-18", "REUSE-21")
@pytest.mark.parametrize("ids", ["own", "again"])
@pytest.mark.parametrize(
    "abilities", [Abilities(), ABLE, replace(ABLE, takes_tools=False), replace(ABLE, can_fork=False)]
)
def test_the_answering_agent_has_every_message_once_and_in_order(abilities: Abilities, ids: str) -> None:
    kinds: set[RequestRelation] = set()
    for seed in range(tried(20)):
        host = RandomApplication(random.Random(seed), abilities, ids)
        for _ in range(TURNS):
            host.turn()
            if len(host.entries) > 40:
                host.entries.clear()
        kinds.update(host.kinds)
    assert kinds == set(RequestRelation)


@spec("REUSE-29")
def test_a_conversation_without_faults_sends_each_user_message_once() -> None:
    host = RandomApplication(random.Random(0), Abilities(), "own")
    for turn in range(50):
        host.entries.append(user_message(f"question {turn}"))
        outline = outline_of(*host.entries, identity={"model": "m0"})
        chosen = action(classify(host.record, outline), outline, host.record, host.abilities)
        assert chosen == (ResumeAgent(Delivery(1)) if turn else Fresh(is_pooled=True))
        asked = (
            create_fresh(outline, upstream="scripted", now=1.0)
            if host.record is None
            else create_resumed(host.record, outline, now=1.0)
        )
        host.record = confirm(asked, "agent-1", now=2.0)
        host.entries.append(step_of())
