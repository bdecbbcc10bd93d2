"""Reads of long and of pruned journals."""

from __future__ import annotations

from midstream.environment import World
from midstream.store.jetstream import JetStreamStore
from tests.store.jetstream.jetstream_places import JetStreamPlace
from tests.store.stores import append

WORLD = World()
LARGE = [bytes([number]) * 400_000 for number in range(8)]


async def test_a_long_journal_can_be_read_from_any_position(
    place: JetStreamPlace, store: JetStreamStore
) -> None:
    epoch = await store.claim("s", at=1.0)
    for start in range(0, 3000, 3):
        await append(store, *(b"%d" % (start + each) for each in range(3)), expected=start, epoch=epoch)
    other = place.store()  # It has read nothing yet.
    await other.open()
    for after in (0, 1, 1499, 2500, 2998, 2999):
        found = await other.read("s", after=after, limit=2)
        assert [each.body for each in found] == [b"%d" % each for each in range(after, min(after + 2, 3000))]
    assert await other.prune("s", b"folded", position=2000, epoch=epoch)
    assert (await other.read("s", after=0, limit=2))[1].body == b"2000"
    await other.close()
