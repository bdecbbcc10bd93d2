"""A session is read up to date at any host, also while it is opened or claimed there, or was taken from it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from midstream.errors import SessionBusyError, SessionNotFoundError
from midstream.history.messages import UserMessage
from midstream.session.turn.commands import Cancel, SendMessage
from midstream.testing import Stall, text
from tests.engine.several_hosts import Places, ScriptedStore, newest_at, run_turn_of, send_message
from tests.spec import spec


@spec("TURN-55")
async def test_a_session_that_is_being_claimed_here_is_read_up_to_date(places: Places) -> None:
    here = await places.host([text("first"), text("second")])
    store = ScriptedStore(places.memory)
    there = await places.host(store=store)
    await run_turn_of(here, "hi")
    theirs = await there.session("s")
    claim = store.hold("claim")
    sending = asyncio.ensure_future(theirs.submit(SendMessage(UserMessage.of("more"))))
    await claim.was_called.wait()
    ours = await send_message(here, "again")
    acknowledged = ours.newest.position
    reading = asyncio.ensure_future(newest_at(there))
    await asyncio.sleep(0)
    claim.may_continue.set()
    assert await reading >= acknowledged
    with contextlib.suppress(SessionBusyError):
        await sending


@spec("TURN-55")
async def test_a_session_that_is_being_opened_here_is_read_up_to_date(places: Places) -> None:
    here = await places.host([[Stall()]])
    store = ScriptedStore(places.memory)
    there = await places.host(store=store)
    ours = await send_message(here, "hi")
    claim = store.hold("claim")
    opening = asyncio.ensure_future(there.session("s"))
    await claim.was_called.wait()
    await ours.submit(Cancel())
    acknowledged = ours.newest.position
    reading = asyncio.ensure_future(newest_at(there))
    await asyncio.sleep(0)
    claim.may_continue.set()
    assert await reading >= acknowledged
    await opening


@spec("TURN-56")
async def test_a_session_that_is_deleted_while_it_is_opened_here_does_not_exist(places: Places) -> None:
    here = await places.host([[Stall()]])
    store = ScriptedStore(places.memory)
    there = await places.host(store=store)
    ours = await send_message(here, "hi")
    claim = store.hold("claim")
    opening = asyncio.ensure_future(there.session("s"))
    await claim.was_called.wait()
    await ours.submit(Cancel())
    await here.delete("s")
    reading = asyncio.ensure_future(there.session("s"))
    await asyncio.sleep(0)
    claim.may_continue.set()
    for each in (opening, reading):
        with pytest.raises(SessionNotFoundError):
            await each


@spec("TURN-55")
async def test_a_session_that_was_claimed_while_its_node_was_disconnected_is_read_up_to_date(
    places: Places,
) -> None:
    store = ScriptedStore(places.memory)
    here = await places.host([text("first")], store=store)
    there = await places.host([text("second")])
    await run_turn_of(here, "hi")
    places.memory.living.discard(store.node)
    acknowledged = (await send_message(there, "again")).newest.position
    places.memory.living.add(store.node)
    store.last_joined_at = here.world.monotonic()
    assert await newest_at(here) >= acknowledged


@spec("TURN-55")
async def test_a_glance_at_a_followed_session_is_up_to_date(places: Places) -> None:
    here = await places.host([[Stall()]])
    there = await places.host()
    await run_turn_of(here, "hi")
    await there.session("s")
    await send_message(here, "again")
    assert (await there.glance("s")).is_live
    assert await there.put_to_sleep("s")
    await there.session("s")
    await (await here.session("s")).submit(Cancel())
    await here.delete("s")
    assert not (await there.glance("s")).turns
