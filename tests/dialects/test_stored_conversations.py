"""Unnamed conversations, through restarts, concurrent ones and failing stores."""

from __future__ import annotations

import pytest

from midstream.agents.pool_records import RECORD_AGE_MAX_S
from midstream.dialects.conversation_index import ConversationPlace, place_of
from midstream.dialects.stored_conversations import CONVERSATIONS, SWEEP_S, Conversations
from midstream.errors import KeysUnavailableError, MidstreamError, StoreBusyError
from midstream.history.messages import History, Response, Step, Text, UserMessage
from midstream.store.contract import KeyValueEntry
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from tests.spec import spec

ANSWER = Response((Text("hello"),))


def place(*words: str) -> ConversationPlace:
    """Return the place of a conversation with these messages, all but the last answered by `ANSWER`."""
    entries: list[UserMessage | Step] = []
    for word in words:
        entries += [UserMessage.of(word), Step(ANSWER)]
    return place_of("scope", History(tuple(entries[:-1])))


async def open_store(memory: Memory, world: FakeWorld) -> MemoryStore:
    store = MemoryStore(memory, world=world)
    await store.open()
    return store


@spec("REUSE-73")
async def test_another_process_continues_a_conversation() -> None:
    world, memory = FakeWorld(), Memory()
    one = Conversations(await open_store(memory, world), world)
    assert await one.look_up(place("hi")) == ""
    await one.add_response("s1", place("hi"), ANSWER)

    other = Conversations(await open_store(memory, world), world)
    assert await other.look_up(place("hi", "and now")) == "s1"
    assert await other.look_up(place("ho", "and now")) == ""
    await other.add_response("s1", place("hi", "and now"), ANSWER)
    assert await one.look_up(place("hi", "and now", "and then")) == "s1"


@spec("REUSE-73")
async def test_a_conversation_takes_one_entry_in_the_store_however_long_it_is() -> None:
    world, memory = FakeWorld(), Memory()
    store = await open_store(memory, world)
    conversations = Conversations(store, world)
    words = [f"message {number}" for number in range(9)]
    for count in range(1, len(words) + 1):
        await conversations.add_response("s1", place(*words[:count]), ANSWER)
    (kept,) = await store.kv_list(CONVERSATIONS)
    assert (kept.key, kept.body) == (place(*words, "next").before.hex(), b"s1")


async def test_two_sessions_with_the_same_messages_keep_one_name() -> None:
    world, memory = FakeWorld(), Memory()
    one = Conversations(await open_store(memory, world), world)
    other = Conversations(await open_store(memory, world), world)
    await one.add_response("s1", place("hi"), ANSWER)
    await other.add_response("s2", place("hi"), ANSWER)
    third = Conversations(await open_store(memory, world), world)
    assert await third.look_up(place("hi", "and now")) == "s1"


async def test_an_unused_conversation_is_removed() -> None:
    world, memory = FakeWorld(), Memory()
    store = await open_store(memory, world)
    conversations = Conversations(store, world)
    await conversations.add_response("old", place("hi"), ANSWER)
    await world.advance(RECORD_AGE_MAX_S)
    await conversations.add_response("young", place("ho"), ANSWER)
    tending = world.spawn(conversations.tend(), name="tend")
    await world.advance(SWEEP_S + 1)
    tending.cancel()
    assert [kept.body for kept in await store.kv_list(CONVERSATIONS)] == [b"young"]


class Failing(MemoryStore):
    """A store whose entries can be neither read nor written."""

    error: MidstreamError

    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        raise self.error.again()

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        raise self.error.again()


@pytest.mark.parametrize(
    "error", [StoreBusyError("held up"), KeysUnavailableError("no answer")], ids=["store", "keys"]
)
async def test_a_failing_store_fails_no_request(error: MidstreamError) -> None:
    world = FakeWorld()
    store = Failing(Memory(), world=world)
    store.error = error
    conversations = Conversations(store, world)
    assert await conversations.look_up(place("hi", "and now")) == ""
    await conversations.add_response("s1", place("hi"), ANSWER)
    assert await conversations.look_up(place("hi", "and now")) == "s1"
