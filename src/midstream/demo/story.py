"""The steps of the demo: a conversation, a cut, a kill, and a check of the files.

An observation triggers every cut: the n-th piece of the answer, or a line of the ledger. There are no sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from midstream.client import Client, ClientSettings, Event, connect
from midstream.demo.check import DemoVerdict, Journaled, PrintedText, Timings, journal_of, judge
from midstream.demo.cutting_relay import Cutter
from midstream.demo.demo_server import DemoServer
from midstream.demo.folder import NOTES, Folder
from midstream.demo.script import LINES, Lines
from midstream.environment import World
from midstream.errors import UnavailableError
from midstream.local_keys import headers_for
from midstream.session.records import Delta, EpochStarted

CUT_AFTER_PIECES = 12
"""Pieces of the answer that are shown before the connection is cut."""
KILL_AT = "wrote 2/5"
"""Line of the ledger at which the server is killed."""
PATIENCE_S = 120.0
"""Seconds for which the client tries to reach a server that does not return."""
LEDGER_LOOK_S = 0.01
"""Seconds between two reads of the ledger; writing takes a hundred times as long."""


class Audience(Protocol):
    """The output of the demo."""

    def write(self, text: str) -> None:
        """Show a line of a chapter."""

    def chapter(self, number: int, text: str) -> None:
        """Begin a chapter."""

    def note(self, text: str) -> None:
        """Show an act on the connection or the server."""

    def show(self, event: Event) -> None:
        """Show an event of the turn."""

    def pause(self) -> None:
        """End the current line."""


class Story:
    """One run of the demo.

    Args:
        folder: An existing folder.
        server: A server that is not started yet.
        audience: The output.
        world: Clock and tasks.
        lines: The user's messages.
    """

    def __init__(
        self,
        folder: Folder,
        server: DemoServer,
        audience: Audience,
        world: World,
        *,
        lines: Lines = LINES,
    ) -> None:
        self.session = world.new_id("demo")[:9]
        self._folder = folder
        self._server = server
        self._audience = audience
        self._world = world
        self._lines = lines
        self.verdict: DemoVerdict | None = None
        self.timings: Timings | None = None
        self._shown: list[PrintedText] = []
        self._cut_at: float | None = None
        self._cut_to_words: float | None = None
        self._killed_epoch = 0
        self._is_restarted = False
        self._restart_to_words: float | None = None

    async def run(self, model: str) -> None:
        """Run the demo to its end; `verdict` and `timings` have the results. The server keeps running.

        Raises:
            MidstreamError: The demo could not run (no server, no cut, no kill).
        """
        self._audience.chapter(
            1, f"A folder with {len(NOTES)} notes and a ledger of what its tools really do:"
        )
        self._audience.write(f"    {self._folder.path}\n")
        await self._server.start()
        self._audience.chapter(
            2,
            f"A server, process {self._server.pid}, on {self._server.url}, with one SQLite file. {model}",
        )
        async with (
            Cutter(self._server.port, self._world) as cutter,
            connect(
                cutter.url,
                state=self._folder.client,
                secrets=self._folder.client_secrets,
                # The relay has another port.
                headers=partial(headers_for, self._server.url),
                settings=ClientSettings(patience_s=PATIENCE_S),
            ) as client,
        ):
            self._audience.chapter(
                3,
                f"A conversation. After {CUT_AFTER_PIECES} pieces of the answer the connection is cut: a relay between "
                "client and server resets both sockets.",
            )
            await self._send_and_cut(client, cutter)
            self._audience.chapter(
                4,
                "A tool that changes something. While it writes, the server is killed (SIGKILL) and started again.",
            )
            await self._write_and_kill(client)
            self._audience.chapter(
                5, "Is the history still one that a model accepts? The next message shows it."
            )
            await self._send(client, self._lines.again, self._show)
        self._judge()

    # --- the acts -----------------------------------------------------------------------------------------------

    async def _send_and_cut(self, client: Client, cutter: Cutter) -> None:
        pieces = 0

        def show(event: Event) -> None:
            nonlocal pieces
            if self._cut_at is not None and self._cut_to_words is None:
                took = self._world.monotonic() - self._cut_at
                self._audience.note(f"↻ reconnected by itself, {took:.2f} s after the cut")
                if isinstance(event.record, Delta):
                    self._cut_to_words = took
            self._show(event)
            pieces += isinstance(event.record, Delta)
            if pieces == CUT_AFTER_PIECES and self._cut_at is None:
                self._cut_at = self._world.monotonic()
                cut = cutter.cut()
                self._audience.note(
                    f"✂ {cut} connection reset after event {event.id}; the turn continues on the server"
                )

        await self._send(client, self._lines.ask, show)
        if self._cut_to_words is None:
            raise UnavailableError(
                f"the answer had no {CUT_AFTER_PIECES} pieces and something after them, so nothing was cut"
            )

    async def _write_and_kill(self, client: Client) -> None:
        def show(event: Event) -> None:
            if self._is_restarted and self._restart_to_words is None and isinstance(event.record, Delta):
                self._restart_to_words = self._world.now() - self._server.started_at
            self._show(event)

        talking = self._world.spawn(self._send(client, self._lines.write, show), name="write")
        killing = self._world.spawn(self._kill_in_the_middle(talking), name="kill")
        try:
            await asyncio.wait((talking, killing), return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in (talking, killing):
                task.cancel()
            await asyncio.wait((talking, killing))
        for task in (killing, talking):
            if not task.cancelled():
                task.result()
        if not self._is_restarted:
            raise UnavailableError("the model did not call write_note, so nothing could be killed")

    async def _kill_in_the_middle(self, talking: asyncio.Task[None]) -> None:
        while not any(entry.what == KILL_AT for entry in self._folder.entries(self.session)):
            if talking.done():
                return
            await self._world.sleep(LEDGER_LOOK_S)
        victim = self._server.pid
        await self._server.kill()
        self._killed_epoch = max(each.epoch for each in self._journal())
        self._audience.note(f"☠ SIGKILL to process {victim}: the ledger's last word is '{KILL_AT}'")
        await self._server.start()
        self._is_restarted = True
        took = self._server.listened_at - self._server.started_at
        self._audience.note(
            f"↻ process {self._server.pid} listens after {took:.2f} s, and recovers what it finds"
        )

    # --- showing ------------------------------------------------------------------------------------------------

    async def _send(self, client: Client, words: str, show: Callable[[Event], None]) -> None:
        async for event in client.send(self.session, words):
            show(event)
        self._audience.pause()

    def _show(self, event: Event) -> None:
        self._audience.show(event)
        if isinstance(event.record, Delta):
            self._shown.append(PrintedText(str(event.id), event.record.text))

    # --- checking -----------------------------------------------------------------------------------------------

    def _journal(self) -> list[Journaled]:
        return journal_of(self._folder.store, self.session)

    def _judge(self) -> None:
        journal = self._journal()
        ledger = self._folder.entries(self.session)
        self.verdict = judge(journal, self._shown, ledger, self.session)
        recovered = [
            each.record.at
            for each in journal
            if isinstance(each.record, EpochStarted) and each.epoch > self._killed_epoch
        ]
        self.timings = Timings(
            cut_to_words=self._cut_to_words,
            restart_to_listening=self._server.listened_at - self._server.started_at,
            restart_to_record=recovered[0] - self._server.started_at if recovered else None,
            restart_to_words=self._restart_to_words,
        )
