"""Three ways to ask an agent that remembers, over the same hosts: always fresh, the original's rules, and ours.

The original is the session reuse of the Cursor provider that midstream's grew out of, written here from its own words:
the system prompt and the user messages are hashed, an attachment by its media type, the record is made before
anything is sent.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from msgspec import Struct

from midstream.agents.abilities import Abilities
from midstream.agents.pool_records import (
    PoolRecord,
    confirm,
    create_fork,
    create_fresh,
    create_resumed,
    with_answer,
    with_side_call,
)
from midstream.agents.reuse_classification import Fork, Fresh, ResumeAgent, action, classify
from midstream.history.messages import Entry, File, History, Step, Text, UserMessage
from midstream.models.fingerprint import outline


class Request(Struct):
    """What a host asks. `is_failing`: the upstream fails for good and hears nothing."""

    system: str
    entries: tuple[Entry, ...]
    is_failing: bool = False


class Told(Struct):
    """What a request sent upstream: how many bytes, and whether whoever answered knew the conversation."""

    sent: int
    is_right: bool


class Contestant(Protocol):
    """A way to ask."""

    def ask(self, request: Request) -> Told:
        """Ask and count."""


def said_bytes(message: UserMessage) -> int:
    """Return how much a message is."""
    return sum(len(part.text if isinstance(part, Text) else part.data or "") for part in message.parts)


def transcript_bytes(entries: tuple[Entry, ...]) -> int:
    """Return how much a replay is: all that was said, and of each result as much as a replay shows."""
    count = 0
    for entry in entries:
        if isinstance(entry, UserMessage):
            count += said_bytes(entry)
        else:
            count += len(entry.response.text) + sum(
                min(len(result.content), 2000) for result in entry.results
            )
    return count


def _users(entries: tuple[Entry, ...]) -> list[UserMessage]:
    return [entry for entry in entries if isinstance(entry, UserMessage)]


class AlwaysFresh:
    """A fresh agent and the whole transcript each turn."""

    def ask(self, request: Request) -> Told:
        """Ask and count."""
        return Told(transcript_bytes(request.entries), is_right=True)


class Original:
    """The rules of the original, with what was found wrong in them."""

    def __init__(self) -> None:
        self._record: tuple[str, list[str]] | None = None
        self._mind: list[UserMessage] = []

    def ask(self, request: Request) -> Told:
        """Ask and count."""
        users, before = _users(request.entries), self._record
        hashes = [self._hash(message) for message in users]
        if before is not None and before[0] != request.system:  # a side call, for ever
            return Told(transcript_bytes(request.entries), is_right=True)
        self._record = (request.system, hashes)  # before anything is sent
        new = len(hashes) - len(before[1]) if before is not None else 0
        tail = request.entries[-new:] if new > 0 else ()
        is_known = before is not None and hashes[: len(before[1])] == before[1]
        if new > 0 and is_known and not any(isinstance(entry, Step) for entry in tail):
            sent = sum(said_bytes(message) for message in users[-new:])
            if not request.is_failing:
                self._mind += users[-new:]
        else:
            sent = transcript_bytes(request.entries)
            self._mind = [] if request.is_failing else list(users)
        return Told(sent, is_right=request.is_failing or self._mind == users)

    def _hash(self, message: UserMessage) -> str:
        tokens = [part.media_type if isinstance(part, File) else part.text for part in message.parts]
        return hashlib.sha256("\n".join(tokens).encode()).hexdigest()


class Ours:
    """The rules of `docs/spec/reuse.md`, over an upstream with these abilities."""

    def __init__(self, abilities: Abilities) -> None:
        self._abilities = abilities
        self._record: PoolRecord | None = None
        self._minds: dict[str, list[UserMessage]] = {}

    def ask(self, request: Request) -> Told:
        """Ask and count."""
        users = _users(request.entries)
        asked = outline(request.system, (), (), {}, History(request.entries))
        record = self._record
        chosen = action(classify(record, asked), asked, record, self._abilities)
        agent = f"agent-{len(self._minds)}"
        match chosen:
            case ResumeAgent(delivery):
                assert record is not None
                agent = record.agent
                known, count = self._minds[agent], delivery.users
                self._record = create_resumed(record, asked, now=0.0)
            case Fork(mark, count):
                assert record is not None
                known = self._minds[mark.agent][: mark.users]
                self._record = create_fork(record, asked, mark.users, now=0.0)
            case Fresh(is_pooled):
                if not is_pooled:
                    self._record = None if record is None else with_side_call(record, asked)
                    return Told(transcript_bytes(request.entries), is_right=True)
                known, count = [], len(users)
                self._record = create_fresh(asked, upstream="bench", now=0.0)
        new = users[len(users) - count :]
        is_replay = isinstance(chosen, Fresh)
        sent = transcript_bytes(request.entries) if is_replay else sum(map(said_bytes, new))
        if request.is_failing:
            return Told(sent, is_right=True)
        self._minds[agent] = [*known, *new]
        self._record = with_answer(
            confirm(self._record, agent, now=0.0),
            agent=agent,
            mark=f"mark-{len(users)}",
            open_calls=(),
            now=0.0,
        )
        return Told(sent, is_right=self._minds[agent] == users)
