"""Values that are larger than a message."""

from __future__ import annotations

from midstream.environment import World
from midstream.session.blobs import Blob
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.jetstream import JetStreamStore
from tests.store.stores import bodies

WORLD = World()
LARGE = [bytes([number]) * 400_000 for number in range(8)]


async def test_a_large_fold_a_large_entry_and_a_large_blob_are_complete(store: JetStreamStore) -> None:
    epoch = await store.claim("s", at=1.0)
    large = b"".join(LARGE)
    await store.append("s", Batch([b"a", b"b"], 0, epoch, Sync.FULL, blobs=[Blob("d", large)]))
    assert await store.blob("s", "d") == large
    for body in (large, b"small"):
        assert await store.prune("s", body, position=2, epoch=epoch)
        assert await bodies(store) == [body]
    for version, body in enumerate((large, b"small", large)):
        assert await store.kv_put("pool", "k", body, expected=version, at=1.0) == version + 1
        assert [entry.body for entry in await store.kv_list("pool")] == [body]
    assert await store.kv_delete("pool", "k", expected=3)
