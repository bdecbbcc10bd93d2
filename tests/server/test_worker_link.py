"""The connection between a worker and its supervisor."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import msgspec

from midstream.server.worker_link import Orders, Page, PageWanted, WorkerLink, WorkerSetup, encode_line

WAIT_S = 60.0


def _link(theirs: socket.socket, listener: socket.socket) -> WorkerLink:
    descriptors = tuple(os.dup(listener.fileno()) for _ in range(2))
    # Data behind the setup in the same packet belongs to the event loop.
    theirs.sendall(encode_line(WorkerSetup(3, descriptors, 1, "start")) + encode_line(PageWanted(9)))
    return WorkerLink(ours_of[theirs])


ours_of: dict[socket.socket, socket.socket] = {}


async def test_a_worker_follows_its_supervisor_and_ends_with_it() -> None:
    ours, theirs = socket.socketpair()
    ours_of[theirs] = ours
    accepted: asyncio.Queue[set[int]] = asyncio.Queue()
    cuts: list[bool] = []

    async def accept(sockets: dict[int, socket.socket]) -> None:
        for each in sockets.values():
            each.close()
        accepted.put_nowait({*sockets})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = _link(theirs, listener)
        link.page_of = lambda: b"page"
        link.report = {"url": "u"}
        assert (link.setup.number, link.setup.own) == (3, 1)
        theirs.setblocking(False)  # noqa: FBT003 - the standard library's interface
        reader, writer = await asyncio.open_connection(sock=theirs)
        async with asyncio.timeout(WAIT_S):
            await link.follow(accept, lambda: cuts.append(True))
            content: list[Any] = [msgspec.json.decode(await reader.readline()) for _ in range(2)]
            assert content == [
                {"type": "ready", "report": {"url": "u"}},
                msgspec.to_builtins(Page(9, "page")),
            ]
            writer.write(encode_line(Orders((0, 1))))
            assert await accepted.get() == {0}, "its own socket is accepted from in any case"
            assert not link.stop.is_set()
            writer.close()
            await link.stop.wait()
            await link.close()
    assert cuts == []
