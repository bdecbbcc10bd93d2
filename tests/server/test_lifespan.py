"""An app starts and stops with its server, and reports why it could not start."""

from __future__ import annotations

import asyncio
import signal

import pytest
from starlette.types import Message

from midstream.errors import StoreDamagedError
from midstream.server.lifespan import live, on_end_signal


class LifespanServer:
    """A server that sends lifespan messages to an app, and records the events in their order."""

    def __init__(self, error: Exception | None = None) -> None:
        self.events: list[str] = []
        self.sent: list[Message] = []
        self._error = error
        self.received_events = iter(["startup", "shutdown"])

    async def receive(self) -> Message:
        event = next(self.received_events)
        self.events.append(event)
        return {"type": f"lifespan.{event}"}

    async def send(self, message: Message) -> None:
        self.events.append(message["type"])
        self.sent.append(message)

    async def start(self) -> None:
        self.events.append("started")
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        self.events.append("stopped")


async def test_the_server_receives_each_completion_after_the_work() -> None:
    server = LifespanServer()
    await live(server.start, server.stop, server.receive, server.send)
    assert server.events == [
        *("startup", "started", "lifespan.startup.complete"),
        *("shutdown", "stopped", "lifespan.shutdown.complete"),
    ]


async def test_a_failed_start_is_reported_with_its_reason_and_nothing_is_stopped() -> None:
    server = LifespanServer(StoreDamagedError("this file is no database"))
    await live(server.start, server.stop, server.receive, server.send)
    assert server.sent == [
        {"type": "lifespan.startup.failed", "message": "store_damaged: this file is no database"}
    ]
    assert server.events == ["startup", "started", "lifespan.startup.failed"]


async def test_a_bug_during_the_start_is_raised_and_not_reported_as_a_refusal() -> None:
    server = LifespanServer(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await live(server.start, server.stop, server.receive, server.send)
    assert server.events == ["startup", "started"]


async def test_an_end_signal_is_noticed_before_the_servers_handler_and_passed_on() -> None:
    seen: list[str] = []
    former = signal.signal(signal.SIGTERM, lambda _number, _frame: seen.append("server"))
    try:
        with on_end_signal(lambda: seen.append("drained")):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert seen == ["server", "drained", "server"]


async def test_outside_the_main_thread_no_handler_is_installed() -> None:
    async def enter() -> None:
        with on_end_signal(lambda: None):
            pass

    former = signal.getsignal(signal.SIGTERM)
    await asyncio.to_thread(asyncio.run, enter())
    assert signal.getsignal(signal.SIGTERM) is former
