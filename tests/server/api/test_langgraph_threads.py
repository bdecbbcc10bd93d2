"""The values of LangGraph threads that are stored outside their sessions."""

from __future__ import annotations

from midstream.server.api.langgraph_threads import EMPTY_S, SWEEP_S, ThreadNotes
from midstream.store.memory import MemoryStore
from midstream.testing.fake_worlds import FakeWorld
from tests.server.serving import asgi_client, make_app


async def test_threads_without_messages_are_deleted_after_a_day() -> None:
    world, store = FakeWorld(), MemoryStore()
    app = make_app(store=store, world=world)
    async with asgi_client(app):
        await app.start()
        notes = ThreadNotes(app.host)
        await notes.change("old", {"a": 1})
        await world.advance(EMPTY_S + SWEEP_S)
        assert (await notes.change("new", {"a": 1})).metadata == {"a": 1}
        assert (await notes.change("new", {"b": 2})).metadata == {"a": 1, "b": 2}
        await notes.sweep()
        assert await notes.find("old") is None
        assert await notes.find("new") is not None
        await notes.delete("new")
        await notes.delete("new")
        assert await notes.find("new") is None
