"""A process that owns a session and reports it, for tests that kill it: `node_process.py DATABASE SESSION
APPENDS`.

With APPENDS 0 it then waits to be killed; else it appends that often and ends.
"""

from __future__ import annotations

import asyncio
import sys

from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.sqlite import SQLiteStore

DONE_WITHIN_S = 60


async def main(path: str, session: str, appends: int) -> None:
    store = SQLiteStore(path)
    await store.open()
    epoch = await store.claim(session, at=1.0)
    await store.append(session, Batch([b"0"], expected=0, epoch=epoch, sync=Sync.NORMAL))
    sys.stdout.write("owns\n")
    sys.stdout.flush()
    if not appends:
        await asyncio.to_thread(sys.stdin.read)
    for end in range(1, appends):
        sync = Sync.FULL if end % 2 else Sync.NORMAL
        await store.append(session, Batch([b"%d" % end], expected=end, epoch=epoch, sync=sync))
    await store.close()


if __name__ == "__main__":
    asyncio.run(asyncio.wait_for(main(sys.argv[1], sys.argv[2], int(sys.argv[3])), DONE_WITHIN_S))
