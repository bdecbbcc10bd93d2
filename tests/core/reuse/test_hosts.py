"""Hosts that do anything, and agents that remember: whoever answers knows every message, once and in order."""

from __future__ import annotations

import random

import pytest
from msgspec import Struct
from msgspec.structs import replace

from midstream.core.messages import Entry, Exchange, ToolSpec, UserMessage
from midstream.core.reuse.abilities import Abilities
from midstream.core.reuse.classification import Fork, Fresh, Kind, Resume, action, classify
from midstream.core.reuse.fingerprint import Outline
from midstream.core.reuse.records import (
    PoolRecord,
    answered,
    asked_again,
    asked_fork,
    asked_fresh,
    confirmed,
    decode,
    encode,
    noted,
)
from tests.core.reuse.sayings import replied, said, sent
from tests.spec import spec

TURNS = 60


class Mind(Struct):
    """What an agent was told: user texts and the ids of results; and what it waits for."""

    told: list[str]
    waits: tuple[str, ...] = ()


class Host:
    """A host with a conversation that it rewrites as it likes, over one key of a pool and an upstream."""

    def __init__(self, chance: random.Random, abilities: Abilities, ids: str) -> None:
        self.chance = chance
        self.abilities = abilities
        self.ids = ids
        """`own`: each call has its own id; `again`: each reply uses the same ones."""
        self.entries: list[Entry] = []
        self.system = "s0"
        self.tools: tuple[ToolSpec, ...] = ()
        self.words = 0
        self.calls = 0
        self.record: PoolRecord | None = None
        self.minds: dict[str, Mind] = {}
        self.marks: dict[str, Mind] = {}
        self.kinds: list[Kind] = []

    def turn(self) -> None:
        """Rewrite the conversation somehow, and ask."""
        self._rewrite()
        if self.chance.random() < 0.1:
            title = (said(f"title {self.chance.randrange(3)}"),)
            self._ask(sent(*title, system="title"), list(title))
        outline = sent(*self.entries, system=self.system, tools=self.tools)
        reply = self._ask(outline, self.entries)
        if reply is not None:
            self.entries.append(reply)
            if reply.results and self.chance.random() < 0.8:
                self.turn_with_results()

    def turn_with_results(self) -> None:
        reply = self._ask(sent(*self.entries, system=self.system, tools=self.tools), self.entries)
        if reply is not None:
            self.entries.append(reply)

    def _rewrite(self) -> None:
        chance, entries = self.chance, self.entries
        users = [at for at, entry in enumerate(entries) if isinstance(entry, UserMessage)]
        match chance.choices(
            ["say", "queue", "edit", "revert", "repeat", "compact", "system", "tools", "forget", "elsewhere"],
            [12, 2, 1, 1, 2, 1, 1, 1, 1, 1],
        )[0]:
            case "queue":
                entries.append(self._said())
            case "edit" if users:
                at = chance.choice(users)
                entries[at] = self._said()
                if chance.random() < 0.7:
                    del entries[at + 1 :]
                    return
            case "revert" if users:
                del entries[chance.choice(users) :]
            case "repeat" if users:
                del entries[users[-1] + 1 :]
                return
            case "compact" if users:
                keep = chance.choice(users)
                entries[:keep] = [said(f"summary {chance.randrange(2)}")]
            case "system":
                self.system = f"s{chance.randrange(3)}"
            case "tools":
                self.tools = () if self.tools else (ToolSpec("read"),)
            case "forget":  # what tools said before
                entries[:] = [replied() if isinstance(entry, Exchange) else entry for entry in entries]
            case "elsewhere":
                entries += [self._said(), replied(calls=["foreign"][: chance.randrange(2)])]
        entries.append(self._said())

    def _said(self) -> UserMessage:
        self.words += 1
        return said(f"word {self.chance.randrange(4)}")

    def _ask(self, outline: Outline, entries: list[Entry]) -> Exchange | None:
        """Do what a pool does, with a process that may die anywhere; return the reply of the agent, or None."""
        record = self.record if self.record is None else decode(encode(self.record))
        judged = classify(record, outline)
        self.kinds.append(judged.kind)
        chosen = action(judged, outline, record, self.abilities)
        texts = [entry.parts[0].text for entry in entries if isinstance(entry, UserMessage)]  # type: ignore[union-attr]
        agent = f"agent-{len(self.minds)}"
        match chosen:
            case Resume(delivery):
                assert record is not None
                agent, mind = record.agent, self.minds[record.agent]
                assert mind.waits == () or sorted(mind.waits) == sorted(delivery.results)
                assert mind.waits or not delivery.results
                mind.waits = ()
                new = texts[len(texts) - delivery.users :]
                pending = asked_again(record, outline, now=1.0)
            case Fork(mark, users):
                assert record is not None
                mind = self.minds[agent] = Mind(list(self.marks[mark.mark].told))
                new = texts[len(texts) - users :]
                pending = asked_fork(record, outline, mark.users, now=1.0)
            case Fresh():
                mind = self.minds[agent] = Mind([])
                new = texts
                pending = asked_fresh(outline, upstream="scripted", now=1.0)
        if isinstance(chosen, Fresh) and not chosen.is_pooled:
            self.record = None if record is None else noted(record, outline)
            return self._reply(mind, texts, new, calls=0)
        self.record = pending
        if self.chance.random() < 0.05:  # died before it was sent
            return None
        mind.told += new
        assert mind.told == texts
        if self.chance.random() < 0.05:  # died before the first event
            return None
        self.record = confirmed(pending, agent, now=2.0)
        if self.chance.random() < 0.05:  # died before the end
            return None
        calls = self.chance.choice([0, 0, 1, 2]) if self.abilities.takes_tools else 0
        reply = self._reply(mind, texts, [], calls)
        mark_id = f"mark-{len(self.marks)}"
        self.marks[mark_id] = Mind(list(mind.told))
        self.record = answered(self.record, agent=agent, mark=mark_id, open_calls=mind.waits, now=3.0)
        return reply

    def _reply(self, mind: Mind, texts: list[str], new: list[str], calls: int) -> Exchange:
        mind.told += new
        assert mind.told == texts
        self.calls += calls
        first = self.calls if self.ids == "own" else 0
        mind.waits = tuple(f"c{first + number}" for number in range(calls))
        return replied(calls=mind.waits)


ABLE = Abilities(takes_tools=True, can_reinstruct=True, can_retool=True, can_fork=True)


@spec("REUSE-18", "REUSE-21")
@pytest.mark.parametrize("ids", ["own", "again"])
@pytest.mark.parametrize(
    "abilities", [Abilities(), ABLE, replace(ABLE, takes_tools=False), replace(ABLE, can_fork=False)]
)
def test_the_agent_that_answers_knows_every_message_once_and_in_order(abilities: Abilities, ids: str) -> None:
    kinds: set[Kind] = set()
    for seed in range(20):
        host = Host(random.Random(seed), abilities, ids)
        for _ in range(TURNS):
            host.turn()
            if len(host.entries) > 40:
                host.entries.clear()
        kinds.update(host.kinds)
    assert kinds == set(Kind)
