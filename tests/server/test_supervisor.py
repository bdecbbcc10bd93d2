"""The listening sockets of workers; `tests/cli/test_workers.py` tests the workers themselves."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys

import pytest

from midstream.environment import World
from midstream.errors import PortTakenError
from midstream.server.supervisor import Supervisor, listen_for_workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all workers have one socket")


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def test_each_worker_has_a_socket_on_the_same_port() -> None:
    sockets = listen_for_workers("127.0.0.1", 0, 3, shares_port=False)
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
        reached: set[int] = set()
        port = sockets[0].getsockname()[1]
        clients = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(60)]
        for number, each in enumerate(sockets):
            try:
                each.accept()[0].close()
            except BlockingIOError:
                continue
            reached.add(number)
        _close(clients)
        assert reached == {0, 1, 2}, "the system distributes connections"
    finally:
        _close(sockets)


def test_a_taken_port_is_refused_unless_it_is_shared() -> None:
    sockets = listen_for_workers("127.0.0.1", 0, 2, shares_port=False)
    port = sockets[0].getsockname()[1]
    try:
        with pytest.raises(PortTakenError, match="another program listens"):
            listen_for_workers("127.0.0.1", port, 2, shares_port=False)
        _close(listen_for_workers("127.0.0.1", port, 2, shares_port=True))
    finally:
        _close(sockets)


def test_a_cancelled_end_kills_a_worker_that_does_not_react() -> None:
    """A supervisor that is cancelled again while its workers drain leaves no process behind."""
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

    async def scenario() -> int:
        supervisor = Supervisor(
            [sys.executable, "-c", program],
            count=1,
            sockets=listen_for_workers("127.0.0.1", 0, 1, shares_port=False),
            login="",
            on_ready=lambda _: None,
            world=World(),
        )
        running = asyncio.ensure_future(supervisor.run())
        async with asyncio.timeout(20):
            while not supervisor._processes:  # noqa: ASYNC110 - the awaited state has no event
                await asyncio.sleep(0)
            (worker,) = supervisor._processes
            running.cancel()
            while not worker.is_stopping:  # noqa: ASYNC110 - the same
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait([running])
            try:
                return await worker.process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()

    assert asyncio.run(scenario()) == -signal.SIGKILL


def test_a_sighup_during_the_start_is_reported_as_ignored(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor([], count=1, sockets=[], login="", on_ready=lambda _: None, world=World())
    supervisor._roll_soon()
    assert "the server is starting; this SIGHUP is ignored" in caplog.text
