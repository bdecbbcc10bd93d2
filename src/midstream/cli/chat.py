"""`midstream chat`: talk to an agent from a terminal, or from a script."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from enum import IntEnum

import click
import msgspec

from midstream.cli import Surroundings
from midstream.cli.chats import Chats, LastShown
from midstream.cli.exits import FAILURE, INTERRUPTED, UPSTREAM, of_error
from midstream.cli.interrupts import Interrupts
from midstream.cli.screen import Screen
from midstream.cli.sources import ServerSource
from midstream.cli.terminal import Ink, clean, columns, escaped_json
from midstream.client import Client, Event, connect
from midstream.core.frames import Gone
from midstream.core.records import MessageAccepted, TurnEnded, TurnStatus
from midstream.errors import MidstreamError, UsageError
from midstream.world import World

DEFAULT_URL = "http://127.0.0.1:8000"
SECOND_CTRL_C_S = 3.0
"""Seconds after a Ctrl-C in which another one stops the turn."""
CANCEL_S = 15.0
"""Seconds a stopped turn has to end: running tools are given some."""
PROMPT = "you    "


class Left(IntEnum):
    """Why watching a turn ended, as an exit code."""

    COMPLETED = 0
    FAILED = UPSTREAM
    STOPPED = FAILURE
    INTERRUPTED = INTERRUPTED


@click.command(short_help="Talk to an agent; survives Ctrl-C, cuts and restarts.")
@click.argument("url", default=DEFAULT_URL)
@click.option("--session", metavar="NAME", help="Talk in this session (default: a new one).")
@click.option(
    "--resume", is_flag=True, help="Go on with the last session and with the turn that was interrupted."
)
@click.option("--message", metavar="TEXT", help="Say this, show the answer, and end.")
@click.option("--json", "is_json", is_flag=True, help='Print events, one a line: {"id", "record"}.')
@click.option("--cancel-on-interrupt", is_flag=True, help="Stop the turn on the first Ctrl-C (for scripts).")
@click.pass_context
def chat(
    ctx: click.Context,
    url: str,
    session: str | None,
    resume: bool,  # noqa: FBT001 - click passes options so
    message: str | None,
    is_json: bool,  # noqa: FBT001 - see above
    cancel_on_interrupt: bool,  # noqa: FBT001 - see above
) -> None:
    """Talk to the agent at URL (default: http://127.0.0.1:8000).

    Ctrl-C once detaches: the turn goes on in the server, and --resume shows the rest. Twice stops the turn. Without a
    terminal, stdin is the message, the answer goes to stdout and everything else to stderr.
    """
    surroundings: Surroundings = ctx.obj
    url = url.rstrip("/")
    ServerSource(url).greet()
    chats = Chats(surroundings.places.state / "chats")
    if session is None:
        session = chats.last(url) if resume else World().new_id("chat")[:13]
    chats.remember(url, session)
    talk = Talk(surroundings, chats, url, session, is_json=is_json)
    talk.stops_at = 1 if cancel_on_interrupt else 2
    is_asking = message is None and sys.stdin.isatty() and not is_json
    if resume:
        left = asyncio.run(talk.resume())
        if left is Left.INTERRUPTED or not (is_asking or message):
            ctx.exit(left)
    if is_asking:
        ctx.exit(_ask_and_answer(talk))
    words = message if message is not None else sys.stdin.read()
    try:
        words.encode()
    except UnicodeEncodeError as error:  # Python hands over what it could not decode as lone surrogates
        raise UsageError("the message is not valid UTF-8: convert it first") from error
    if not words.strip():
        raise UsageError("there is nothing to say: give --message, or the message on stdin")
    ctx.exit(asyncio.run(talk.say(words)))


def _ask_and_answer(talk: Talk) -> int:
    """Take messages from the terminal until its end (Ctrl-D), or until a turn was left by Ctrl-C."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # makes `input` editable where it exists
    talk.tell(f"{talk.session} at {talk.url}. Ctrl-C leaves a running turn, Ctrl-D ends.\n")
    while True:
        try:
            words = input(PROMPT)
        except EOFError:
            talk.tell("\n")
            return 0
        if not words.strip():
            continue
        try:
            if asyncio.run(talk.say(words)) is Left.INTERRUPTED:
                return INTERRUPTED
        except MidstreamError as error:
            talk.tell(f"midstream: {clean(of_error(error)[0], is_one_line=True)}\n")


class Talk:
    """One session, talked in from here; each turn has a client of its own, so that nothing is held at the prompt.

    Args:
        surroundings: Places and colours.
        chats: What was there before.
        url, session: Where.
        is_json: Print events instead of words.
    """

    def __init__(
        self, surroundings: Surroundings, chats: Chats, url: str, session: str, *, is_json: bool
    ) -> None:
        self.url = url
        self.session = session
        self.stops_at = 2
        """The Ctrl-C that stops the turn; those before it detach."""
        self._state = chats.state(session)
        self._chats = chats
        self._is_json = is_json
        self._ink = surroundings.out
        self._world = World()
        self._told = ""
        """The trouble that was said already: a server short of space says so again at each try."""
        width = columns() if self._ink.is_terminal else 0
        ink = self._ink if self._ink.is_terminal else surroundings.talk
        screen_ink = Ink(is_colored=ink.is_colored, is_terminal=self._ink.is_terminal)
        self._screen = Screen(_write, self.tell, screen_ink, width)

    def tell(self, text: str) -> None:
        """Say something that is no answer: on the terminal beside the answer, else on stderr."""
        output = sys.stdout if self._ink.is_terminal and not self._is_json else sys.stderr
        output.write(text)
        output.flush()

    async def say(self, words: str) -> Left:
        """Say something and show the turn it opens."""
        async with self._connected() as client, aclosing(client.send(self.session, words)) as events:
            return await self._watch(client, events, is_ours=True)

    async def resume(self) -> Left:
        """Show what was missed of the turns that were left, and the rest of them."""
        left = Left.COMPLETED
        async with self._connected() as client:
            turns = [turn for turn in await client.resume_interrupted() if turn.session == self.session]
            if not turns:
                self._screen.note(f"no turn of {self.session} was interrupted")
            for turn in turns:
                self._screen.note(f"going on in {self.session} where this terminal stopped")
                left = await self._watch(client, turn.resume(), is_ours=False)
                if left is Left.INTERRUPTED:
                    break
        return left

    def _connected(self) -> Client:
        def tell(session: str, is_reconnecting: bool) -> None:  # noqa: FBT001 - the client's callback
            self._tell_of_connection(client.trouble(session), is_reconnecting=is_reconnecting)

        client = connect(self.url, state=self._state, on_reconnecting=tell)
        return client

    def _tell_of_connection(self, trouble: MidstreamError | None, *, is_reconnecting: bool) -> None:
        code = trouble.code if trouble else ""
        if trouble and code != self._told:
            self._screen.note(f"trying again: {trouble.message} [{code}]")
        elif not trouble:
            self._screen.note(
                "the connection broke: making a new one" if is_reconnecting else "connected again"
            )
        self._told = code

    # --- one turn -----------------------------------------------------------------------------------------------

    async def _watch(self, client: Client, events: AsyncIterator[Event], *, is_ours: bool) -> Left:
        """Show a turn to its end, or until Ctrl-C."""
        ended: TurnEnded | None = None
        with Interrupts() as interrupts, self._chats.shown(self.session) as shown:
            interrupted = self._world.spawn(interrupts.reached(1), name="ctrl-c")
            try:
                while True:
                    coming = self._world.spawn(_next(events), name="next event")
                    await asyncio.wait({coming, interrupted}, return_when=asyncio.FIRST_COMPLETED)
                    if not coming.done():
                        return await self._leave(client, interrupts, coming, shown, events)
                    event = coming.result()
                    if event is None:
                        break
                    self._show(event, shown, is_ours=is_ours)
                    if isinstance(event.record, TurnEnded):
                        ended = event.record
            finally:
                interrupted.cancel()
                self._screen.pause()
        return _left_by(ended)

    def _show(self, event: Event, shown: LastShown, *, is_ours: bool) -> None:
        if isinstance(event.record, Gone):
            shown.end(event.record.resume_from)
        elif shown.has(event.id):
            return
        elif shown.may_have(event.id):
            self._screen.note(
                f"the last chat was killed while it showed event {event.id}: it may stand there twice"
            )
        shown.begin(event.id)
        if self._is_json:
            _write(f"{escaped_json(msgspec.json.encode(event).decode())}\n")
        elif not (is_ours and isinstance(event.record, MessageAccepted) and self._ink.is_terminal):
            self._screen.show(event.record)
        shown.end(event.id)

    # --- Ctrl-C -------------------------------------------------------------------------------------------------

    async def _leave(
        self,
        client: Client,
        interrupts: Interrupts,
        coming: asyncio.Task[Event | None],
        shown: LastShown,
        events: AsyncIterator[Event],
    ) -> Left:
        """Detach, or stop the turn if Ctrl-C comes again soon."""
        self._screen.pause()
        again = f"midstream chat {self.url} --session {self.session} --resume"
        if interrupts.count < self.stops_at:
            self.tell(f"\nDetached: the turn goes on. Come back with:\n  {again}\n")
            self.tell(f"Ctrl-C again within {SECOND_CTRL_C_S:g} s stops it.\n")
            try:
                async with asyncio.timeout(SECOND_CTRL_C_S):
                    await interrupts.reached(self.stops_at)
            except TimeoutError:
                await _let_go(coming, events)
                return Left.INTERRUPTED
        try:
            async with asyncio.timeout(CANCEL_S):
                await self._stop(client, coming, shown, events)
        except TimeoutError:
            self.tell(f"The turn was told to stop and has not ended yet: see {again}\n")
        await _let_go(coming, events)
        return Left.INTERRUPTED

    async def _stop(
        self,
        client: Client,
        coming: asyncio.Task[Event | None],
        shown: LastShown,
        events: AsyncIterator[Event],
    ) -> None:
        await client.cancel(self.session)
        event = await asyncio.shield(coming)
        while event is not None:
            self._show(event, shown, is_ours=False)
            event = await _next(events)


async def _next(events: AsyncIterator[Event]) -> Event | None:
    try:
        return await anext(events)
    except StopAsyncIteration:
        return None


async def _let_go(coming: asyncio.Task[Event | None], events: AsyncIterator[Event]) -> None:
    """Stop waiting for the next event; what was not shown is not handled, and comes again."""
    coming.cancel()
    await asyncio.wait((coming,))
    if isinstance(events, AsyncGenerator):
        await events.aclose()


def _left_by(ended: TurnEnded | None) -> Left:
    match ended.status if ended else None:
        case TurnStatus.COMPLETED | None:
            return Left.COMPLETED
        case TurnStatus.FAILED:
            return Left.FAILED
        case _:
            return Left.STOPPED


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
