"""Commands between nodes: a burst costs a few commits, keeps its order, and leaves nothing behind."""

from __future__ import annotations

import asyncio

from midstream.environment import World
from midstream.store.contract import ForwardedCommand
from midstream.store.postgres import PostgresStore
from midstream.testing.store_fakes import open_store
from tests.store.postgres.postgres_places import PostgresPlace

WORLD = World()
COUNT = 50


async def _count_rows(store: PostgresStore) -> int:
    assert store._opened is not None
    count: int = await store._opened.pool.run(lambda db, _: db.fetchval("select count(*) from inbox"))
    return count


async def _until_empty(store: PostgresStore) -> None:
    async with asyncio.timeout(60):
        while await _count_rows(store):
            await WORLD.sleep(0.005)


async def _take(owner: PostgresStore, count: int) -> list[ForwardedCommand]:
    taken: list[ForwardedCommand] = []
    async with asyncio.timeout(60):
        while len(taken) < count:
            taken += (await owner.watch({})).forwarded_commands
    return taken


async def test_a_burst_of_commands_is_forwarded_and_answered_in_groups(place: PostgresPlace) -> None:
    async with open_store(place) as owner, open_store(place) as sender:
        assert isinstance(owner, PostgresStore)
        assert isinstance(sender, PostgresStore)
        await owner.claim("s", at=1.0)
        assert sender._opened is not None
        groups: list[int] = []
        rows = sender._opened.inbox._puts
        write = rows._write

        async def counting(commands: object) -> object:
            groups.append(len(commands))  # type: ignore[arg-type]
            return await write(commands)  # type: ignore[arg-type]

        rows._write = counting  # type: ignore[assignment]
        forwarding = [WORLD.spawn(sender.forward("s", b"%d" % number), name="f") for number in range(COUNT)]
        taken = await _take(owner, COUNT)
        assert [each.body for each in taken] == [b"%d" % number for number in range(COUNT)]
        assert len(groups) <= 2
        await asyncio.gather(*(owner.answer(each.number, b"re " + each.body) for each in taken))
        async with asyncio.timeout(60):
            assert await asyncio.gather(*forwarding) == [b"re %d" % number for number in range(COUNT)]
        await _until_empty(sender)


async def test_a_command_of_a_cancelled_sender_is_deleted(place: PostgresPlace) -> None:
    async with open_store(place) as owner, open_store(place) as sender:
        assert isinstance(owner, PostgresStore)
        assert isinstance(sender, PostgresStore)
        await owner.claim("s", at=1.0)
        early = WORLD.spawn(sender.forward("s", b"early"), name="f")
        await WORLD.sleep(0)
        early.cancel()  # Its group is on its way.
        late = WORLD.spawn(sender.forward("s", b"late"), name="f")
        assert (await _take(owner, 1))[-1].body in (b"early", b"late")
        late.cancel()
        await asyncio.wait({early, late}, timeout=60)
        assert early.cancelled()
        assert late.cancelled()
        await _until_empty(sender)


async def test_closing_writes_the_waiting_commands(place: PostgresPlace) -> None:
    async with open_store(place) as other:
        assert isinstance(other, PostgresStore)
        sender = place.store()
        await sender.open()
        await other.claim("s", at=1.0)
        forwarding = WORLD.spawn(sender.forward("s", b"x"), name="f")
        await _take(other, 1)
        await sender.close()
        await asyncio.wait({forwarding}, timeout=60)
        assert forwarding.cancelled()
        await _until_empty(other)
