"""MCP sessions in the store: visible to any server, kept while used, ended, and removed when old."""

from __future__ import annotations

from midstream.dialects.mcp_messages import CallPlace, McpClient
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.server.api.mcp_sessions import CALLS, KEPT_S, SESSIONS, TOUCH_S, McpSessions
from midstream.server.auth.caller import UnauthenticatedCaller
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel
from tests.server.known_people import Later

WHO = UnauthenticatedCaller()


async def test_a_session_is_visible_to_another_server_until_it_ends() -> None:
    store = MemoryStore()
    first, second = (McpSessions(Host(Agent(ScriptedModel([])), store)) for _ in range(2))
    await store.open()
    client = await first.begin(WHO, {"protocolVersion": "2025-06-18", "capabilities": {"elicitation": {}}})
    found = await second.find(WHO, client.session)
    assert found is not None
    assert (found.version, found.can_elicit, found.session) == ("2025-06-18", True, client.session)
    await first.note_call(found, 3, "s", "call")
    await second.note_call(found, 3, "s", "call")
    assert (await second.find_call(found, 3), await second.find_call(found, "3")) == (("s", "call"), None)
    assert await second.end(WHO, client.session)
    assert not await first.end(WHO, client.session)
    assert await first.find(WHO, client.session) is None


async def test_the_return_of_a_client_is_visible_to_another_server() -> None:
    store, world, place = MemoryStore(), Later(), CallPlace("s", 1)
    first, second = (McpSessions(Host(Agent(ScriptedModel([])), store, world=world)) for _ in range(2))
    await store.open()
    assert await second.returned_at(place) == 0.0
    for _ in range(2):
        before = world.now()
        await first.note_return(place)
        assert before <= await second.returned_at(place) <= world.now()
        world.ahead_s += 60.0


async def test_an_unknown_version_is_answered_with_the_newest_of_its_kind() -> None:
    store = MemoryStore()
    await store.open()
    sessions = McpSessions(Host(Agent(ScriptedModel([])), store))
    for params in ({}, {"protocolVersion": "1999-01-01", "capabilities": 3}):
        client = await sessions.begin(WHO, params)
        assert (client.version, client.can_elicit) == ("2025-11-25", False)


async def test_a_used_session_is_kept_and_an_old_one_is_removed() -> None:
    store, world = MemoryStore(), Later()
    await store.open()
    sessions = McpSessions(Host(Agent(ScriptedModel([])), store, world=world))
    used, old = [await sessions.begin(WHO, {}) for _ in range(2)]
    await sessions.note_call(old, 1, "s", "call")
    world.ahead_s += KEPT_S - TOUCH_S
    assert await sessions.find(WHO, used.session) is not None
    world.ahead_s += 2 * TOUCH_S
    newest = await sessions.begin(WHO, {})
    assert {each.key for each in await store.kv_list(SESSIONS)} == {used.session, newest.session}
    assert await store.kv_list(CALLS) == []
    assert await sessions.find_call(McpClient("", session=old.session), 1) is None
