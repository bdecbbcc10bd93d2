"""Three sets of rules for an upstream agent that keeps a conversation: always fresh, the original rules, and ours.

The original rules are those of the Cursor provider from which midstream's rules come, written from its description.
They hash the system prompt and the user messages, hash an attachment by its media type, and write the record before a
request is sent.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from msgspec import Struct

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
from midstream.agents.upstream_abilities import Abilities
from midstream.history.messages import Entry, File, History, Step, Text, UserMessage
from midstream.models.fingerprint import outline


class Request(Struct):
    """One request of a client application. `is_failing`: the upstream fails for good and receives nothing."""

    system: str
    entries: tuple[Entry, ...]
    is_failing: bool = False


class Sent(Struct):
    """Bytes that a request sent upstream, and whether the agent that answered had the whole conversation."""

    sent: int
    is_right: bool


class Contestant(Protocol):
    """One set of rules."""

    def send(self, request: Request) -> Sent:
        """Send a request, and count its bytes."""


def message_bytes(message: UserMessage) -> int:
    """Return the size of a message."""
    return sum(len(part.text if isinstance(part, Text) else part.data or "") for part in message.parts)


def transcript_bytes(entries: tuple[Entry, ...]) -> int:
    """Return the size of a full transcript: all messages, and the part of each result that a transcript includes."""
    count = 0
    for entry in entries:
        if isinstance(entry, UserMessage):
            count += message_bytes(entry)
        else:
            count += len(entry.response.text) + sum(
                min(len(result.content), 2000) for result in entry.results
            )
    return count


def _users(entries: tuple[Entry, ...]) -> list[UserMessage]:
    return [entry for entry in entries if isinstance(entry, UserMessage)]


class AlwaysFresh:
    """A fresh agent with the full transcript in each turn."""

    def send(self, request: Request) -> Sent:
        """See `Contestant.send`."""
        return Sent(transcript_bytes(request.entries), is_right=True)


class Original:
    """The original rules, with their faults."""

    def __init__(self) -> None:
        self._record: tuple[str, list[str]] | None = None
        self._memory: list[UserMessage] = []

    def send(self, request: Request) -> Sent:
        """See `Contestant.send`."""
        users, before = _users(request.entries), self._record
        hashes = [self._hash(message) for message in users]
        if before is not None and before[0] != request.system:  # it counts as a side call from now on
            return Sent(transcript_bytes(request.entries), is_right=True)
        self._record = (request.system, hashes)  # before the request is sent
        new = len(hashes) - len(before[1]) if before is not None else 0
        tail = request.entries[-new:] if new > 0 else ()
        is_known = before is not None and hashes[: len(before[1])] == before[1]
        if new > 0 and is_known and not any(isinstance(entry, Step) for entry in tail):
            sent = sum(message_bytes(message) for message in users[-new:])
            if not request.is_failing:
                self._memory += users[-new:]
        else:
            sent = transcript_bytes(request.entries)
            self._memory = [] if request.is_failing else list(users)
        return Sent(sent, is_right=request.is_failing or self._memory == users)

    def _hash(self, message: UserMessage) -> str:
        tokens = [part.media_type if isinstance(part, File) else part.text for part in message.parts]
        return hashlib.sha256("\n".join(tokens).encode()).hexdigest()


class Ours:
    """The rules of `docs/spec/reuse.md`, with an upstream that has these abilities."""

    def __init__(self, abilities: Abilities) -> None:
        self._abilities = abilities
        self._record: PoolRecord | None = None
        self._memories: dict[str, list[UserMessage]] = {}

    def send(self, request: Request) -> Sent:
        """See `Contestant.send`."""
        users = _users(request.entries)
        requested = outline(request.system, (), (), {}, History(request.entries))
        record = self._record
        chosen = action(classify(record, requested), requested, record, self._abilities)
        agent = f"agent-{len(self._memories)}"
        match chosen:
            case ResumeAgent(delivery):
                assert record is not None
                agent = record.agent
                known, count = self._memories[agent], delivery.users
                self._record = create_resumed(record, requested, now=0.0)
            case Fork(mark, count):
                assert record is not None
                known = self._memories[mark.agent][: mark.users]
                self._record = create_fork(record, requested, mark.users, now=0.0)
            case Fresh(is_pooled):
                if not is_pooled:
                    self._record = None if record is None else with_side_call(record, requested)
                    return Sent(transcript_bytes(request.entries), is_right=True)
                known, count = [], len(users)
                self._record = create_fresh(requested, upstream="bench", now=0.0)
        new = users[len(users) - count :]
        is_replay = isinstance(chosen, Fresh)
        sent = transcript_bytes(request.entries) if is_replay else sum(map(message_bytes, new))
        if request.is_failing:
            return Sent(sent, is_right=True)
        self._memories[agent] = [*known, *new]
        self._record = with_answer(
            confirm(self._record, agent, now=0.0),
            agent=agent,
            mark=f"mark-{len(users)}",
            open_calls=(),
            now=0.0,
        )
        return Sent(sent, is_right=self._memories[agent] == users)
