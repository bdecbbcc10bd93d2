"""`midstream chat`: chat with an agent from a terminal, or from a script."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from enum import IntEnum
from functools import partial

import click
import msgspec

from midstream.cli import Invocation
from midstream.cli.answering import Answering
from midstream.cli.chats import Chats, LastShown
from midstream.cli.exits import FAILURE, INTERRUPTED, UPSTREAM, of_error
from midstream.cli.interrupts import Interrupts
from midstream.cli.keyboard import Keyboard
from midstream.cli.screen import Screen
from midstream.cli.session_options import url_argument
from midstream.cli.session_secret import read_env_secret
from midstream.cli.session_sources import ServerSource, SessionNow
from midstream.cli.terminal import Ink, clean, columns
from midstream.cli.visible_text import escape_json
from midstream.client import Client, Event, PlaybackLost, connect
from midstream.client.transport_selection import AUTO, TransportKind, TransportName
from midstream.environment import World
from midstream.errors import MidstreamError, SessionNotFoundError, UsageError, WrongSecretError
from midstream.local_keys import headers_for
from midstream.protocol.frames import Gone
from midstream.session.records import OPEN_STATUSES, MessageAccepted, TurnEnded, TurnStatus

SECOND_CTRL_C_S = 3.0
"""Seconds after a Ctrl-C in which a second one stops the turn."""
CANCEL_S = 15.0
"""Seconds to wait for the end of a stopped turn with running tools."""
PROMPT = "you    "


class WatchEnd(IntEnum):
    """Reason for the end of watching a turn, as an exit code."""

    COMPLETED = 0
    FAILED = UPSTREAM
    STOPPED = FAILURE
    INTERRUPTED = INTERRUPTED


@click.command(short_help="Chat with an agent; survives Ctrl-C, lost connections and restarts.")
@url_argument
@click.option("--session", metavar="NAME", help="Use this session (default: a new one).")
@click.option(
    "--resume",
    is_flag=True,
    help="Resume each turn from which this terminal detached, then the last session.",
)
@click.option("--message", metavar="TEXT", help="Send this message, print the answer, and exit.")
@click.option("--json", "is_json", is_flag=True, help='Print one event per line: {"id", "record"}.')
@click.option(
    "--transport",
    type=click.Choice([AUTO, *(way.value for way in TransportKind)]),
    default=AUTO,
    show_default=True,
    help="The transport (auto: the first that works).",
)
@click.option("--cancel-on-interrupt", is_flag=True, help="Stop the turn on the first Ctrl-C (for scripts).")
@click.pass_context
def chat(
    ctx: click.Context,
    url: str,
    session: str | None,
    resume: bool,  # noqa: FBT001 - click passes options so
    message: str | None,
    is_json: bool,  # noqa: FBT001 - see above
    transport: TransportName,
    cancel_on_interrupt: bool,  # noqa: FBT001 - see above
) -> None:
    """Chat with the agent at URL (default: MIDSTREAM_URL, or http://127.0.0.1:8000).

    Ctrl-C once detaches: the turn continues in the server, and --resume shows the rest. Twice stops the turn. Without a
    terminal, stdin is the message. Each complete response goes to stdout, everything else to stderr.
    """
    invocation: Invocation = ctx.obj
    url = url.rstrip("/")
    ServerSource(url).greet()
    chats = Chats(invocation.places.state / "chats")
    left_in = [each for each in chats.find_interrupted(url) if resume and session is None]
    if session is None:
        session = chats.last(url) if resume else World().new_id("chat")[:13]
    chats.set_last(url, session)

    def talk_in(session: str) -> ChatSession:
        talk = ChatSession(invocation, chats, url, session, is_json=is_json)
        talk.stops_at = 1 if cancel_on_interrupt else 2
        talk.transport = transport
        return talk

    for other in left_in:
        if other != session and _go_on_in(talk_in(other)) is WatchEnd.INTERRUPTED:
            ctx.exit(INTERRUPTED)
    talk = talk_in(session)
    is_asking = message is None and sys.stdin.isatty() and not is_json
    if resume:
        left = asyncio.run(talk.resume())
        if left is WatchEnd.INTERRUPTED or not (is_asking or message):
            ctx.exit(left)
    if is_asking:
        ctx.exit(_talk(talk))
    words = message if message is not None else sys.stdin.read()
    try:
        words.encode()
    except UnicodeEncodeError as error:  # Python decodes invalid bytes to lone surrogates
        raise UsageError("the message is not valid UTF-8; convert it first") from error
    if not words.strip():
        raise UsageError("the message is empty: give --message, or the message on stdin")
    ctx.exit(asyncio.run(talk.send(words)))


def _go_on_in(talk: ChatSession) -> WatchEnd:
    """Show the rest of the turns of a session; print its errors without ending the chat."""
    try:
        return asyncio.run(talk.resume())
    except MidstreamError as error:
        talk.print_note(f"midstream: {talk.session}: {clean(of_error(error)[0], is_one_line=True)}\n")
        return WatchEnd.FAILED


def _talk(talk: ChatSession) -> int:
    """Send messages from the terminal until its end (Ctrl-D), or until Ctrl-C detaches from a turn."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # makes `input` editable, if available
    talk.print_note(
        f"{talk.session} at {talk.url}\nCtrl-C detaches from a running turn, Ctrl-D exits, /help shows more.\n"
    )
    while True:
        try:
            words = input(PROMPT)
        except EOFError:
            talk.print_note("\n")
            return 0
        if not words.strip():
            continue
        if words.strip() == "/quit":
            return 0
        if words.strip() == "/help":
            talk.print_note(_help(talk))
            continue
        try:
            if asyncio.run(talk.send(words)) is WatchEnd.INTERRUPTED:
                return INTERRUPTED
        except MidstreamError as error:
            talk.print_note(f"midstream: {clean(of_error(error)[0], is_one_line=True)}\n")


def _help(talk: ChatSession) -> str:
    return f"""\
/help   shows this text, /quit exits; any other line goes to the agent.
Ctrl-C  detaches: the turn continues in the server. Twice stops the turn.
Ctrl-D  exits. To resume this chat, or to list all sessions:
midstream chat {talk.url} --session {talk.session} --resume
midstream sessions list --url {talk.url}
"""


class ChatSession:
    """A chat in one session. Each turn has its own client, so that no connection is open at the prompt.

    Args:
        chats: State of earlier chats.
        url, session: Address of the server, and the session.
        is_json: Print events instead of text.
    """

    def __init__(
        self, invocation: Invocation, chats: Chats, url: str, session: str, *, is_json: bool
    ) -> None:
        self.url = url
        self.session = session
        self.stops_at = 2
        """Number of the Ctrl-C that stops the turn; an earlier one detaches."""
        self.transport: TransportName = AUTO
        """Transport of the frames."""
        self._state = chats.state(url, session)
        self._places = invocation.places
        self._chats = chats
        self._is_json = is_json
        self._ink = invocation.out
        self._world = World()
        self._is_prompted = False
        """Whether a question's prompt is the last output."""
        self._printed_code = ""
        """The last printed error: a server without space repeats it at each retry."""
        self._width = columns() if self._ink.is_terminal else 0
        ink = self._ink if self._ink.is_terminal else invocation.talk
        self._screen_ink = Ink(is_colored=ink.is_colored, is_terminal=self._ink.is_terminal)
        self._screen = Screen(self._print, self.print_note, self._screen_ink, self._width)

    def print_note(self, text: str) -> None:
        """Print a note on the terminal, else on stderr."""
        output = sys.stdout if self._ink.is_terminal and not self._is_json else sys.stderr
        if self._is_prompted:
            self._is_prompted = False
            text = f"\n{text}"
        output.write(text)
        output.flush()

    def _print(self, text: str) -> None:
        if self._is_prompted:
            self.print_note("")
        _write(text)

    def _prompt(self, text: str) -> None:
        if text:
            self.print_note(text)
        self._is_prompted = bool(text)

    async def send(self, words: str) -> WatchEnd:
        """Send a message and show its turn, after missed events of earlier turns."""
        async with self._client() as client:
            if await self._catch_up(client) is WatchEnd.INTERRUPTED:
                return WatchEnd.INTERRUPTED
            async with aclosing(client.send(self.session, words)) as events:
                return await self._watch(client, events, is_ours=True)

    async def _catch_up(self, client: Client) -> WatchEnd | None:
        """Show the rest of detached turns, which could not be shown after events of a later turn.

        It is not printed to stdout, because it is not part of the requested answer.
        """
        screen, left = self._screen, None
        self._screen = Screen(
            self._print if self._width else self.print_note, self.print_note, self._screen_ink, self._width
        )
        try:
            async for events in self._find_turns_left(client):
                left = await self._watch(client, events, is_ours=False)
                if left is WatchEnd.INTERRUPTED:
                    break
        finally:
            self._screen = screen
        return left

    async def resume(self) -> WatchEnd:
        """Show missed events and the rest of detached turns."""
        left = await self._go_on(self._find_turns_left, self._running)
        if left is None:
            self._screen.note(f"session {self.session} has no interrupted turn")
        return left or WatchEnd.COMPLETED

    async def go_on(self) -> WatchEnd | None:
        """Show the rest of the last turn, of any client; resume it if it was interrupted or failed.

        Returns:
            How it ended; None without such a turn.
        """
        return await self._go_on(self._find_turns_left, self._running, self._find_stopped_turn)

    async def _go_on(self, *ways: Callable[[Client], AsyncIterator[AsyncIterator[Event]]]) -> WatchEnd | None:
        """Watch the turn of the first way that yields one."""
        left: WatchEnd | None = None
        async with self._client() as client:
            for way in ways:
                async for events in way(client):
                    left = await self._watch(client, events, is_ours=False)
                    if left is WatchEnd.INTERRUPTED:
                        return left
                if left is not None:
                    return left
        return None

    async def _find_turns_left(self, client: Client) -> AsyncIterator[AsyncIterator[Event]]:
        """Yield the turns whose end this terminal has not shown."""
        for turn in await client.resume_interrupted():
            if turn.session == self.session:
                self._screen.note(f"continuing session {self.session} from the last event shown here")
                yield turn.resume()

    async def _running(self, client: Client) -> AsyncIterator[AsyncIterator[Event]]:
        """Yield the running turn, which another client began, or this terminal too long ago."""
        now = await self._now()
        if now is None or now.status not in OPEN_STATUSES:
            return
        with self._chats.find_last_shown(self.url, self.session) as shown:
            after = shown.newest or now.event_id
        self._screen.note(f"turn {now.turns} of {self.session} is running; it waits for {now.waiting_on}")
        if now.waiting_on == "agent":
            self._screen.note(
                "it belongs to another agent, or its tools are missing; to continue it with this agent:"
            )
            self._screen.note(f"midstream sessions resume {self.session}")
        yield _to_end_of(now.turns, client.follow(self.session, after))

    async def _find_stopped_turn(self, client: Client) -> AsyncIterator[AsyncIterator[Event]]:
        """Yield the last turn, resumed, if it was interrupted or failed."""
        now = await self._now()
        if now is not None and now.is_resumable:
            yield client.resume(self.session, now.turns)

    async def _now(self) -> SessionNow | None:
        """Return the current state of the session; None if it is empty."""
        try:
            return await asyncio.to_thread(ServerSource(self.url).snapshot, self.session)
        except (SessionNotFoundError, WrongSecretError):  # a server may not reveal which error applies
            return None

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        async with self._connect() as client:
            if secret := read_env_secret():
                await client.keep_secret(self.session, secret)
            yield client

    def _connect(self) -> Client:
        def report_connection(session: str, is_reconnecting: bool) -> None:  # noqa: FBT001 - the client's callback
            self._print_connection(client.trouble(session), is_reconnecting=is_reconnecting)

        client = connect(
            self.url,
            state=self._state,
            secrets=self._places.secrets,
            headers=partial(headers_for, self.url, self._places),
            transport=self.transport,
            on_reconnecting=report_connection,
        )
        return client

    def _print_connection(self, trouble: MidstreamError | None, *, is_reconnecting: bool) -> None:
        code = trouble.code if trouble else ""
        if trouble and code != self._printed_code:
            self._screen.note(f"retrying: {trouble.message} [{code}]")
        elif not trouble:
            self._screen.note(
                "the connection was lost; reconnecting" if is_reconnecting else "connected again"
            )
        self._printed_code = code

    # --- one turn -----------------------------------------------------------------------------------------------

    async def _watch(self, client: Client, events: AsyncIterator[Event], *, is_ours: bool) -> WatchEnd:
        """Show a turn to its end, or until Ctrl-C; show its questions to the user."""
        ended: TurnEnded | None = None
        answering = self._answering(client)
        with Interrupts() as interrupts, self._chats.find_last_shown(self.url, self.session) as shown:
            interrupted = self._world.spawn(interrupts.wait_for_count(1), name="ctrl-c")
            try:
                if answering is not None and not is_ours:
                    await answering.refresh()
                while True:
                    coming = self._world.spawn(_next(events), name="next event")
                    await self._until_next(coming, interrupted, answering)
                    if not coming.done():
                        return await self._leave(client, interrupts, coming, shown, events)
                    event = coming.result()
                    if event is None:
                        break
                    self._show(event, shown, is_ours=is_ours)
                    if answering is not None:
                        await answering.take(event)
                    if isinstance(event.record, TurnEnded):
                        ended = event.record
            finally:
                interrupted.cancel()
                if answering is not None:
                    answering.stop()
                self._screen.pause()
        return _watch_end_of(ended)

    async def _until_next(
        self, coming: asyncio.Task[Event | None], interrupted: asyncio.Task[None], answering: Answering | None
    ) -> None:
        """Wait for the next event or Ctrl-C, and handle answers meanwhile."""
        while not (coming.done() or interrupted.done()):
            if answering is not None and not self._is_prompted:
                answering.prompt_again()
            work = answering.work if answering is not None else None
            await asyncio.wait(
                {coming, interrupted} | ({work} if work else set()), return_when=asyncio.FIRST_COMPLETED
            )
            if answering is not None and work is not None and work.done():
                await answering.go_on()

    def _answering(self, client: Client) -> Answering | None:
        """Return the dialog for questions; None if events are printed as JSON."""
        if self._is_json:
            return None
        keyboard = Keyboard() if self._ink.is_terminal and Keyboard.is_available() else None
        return Answering(
            client,
            self.session,
            self._screen,
            self._prompt,
            self._screen_ink,
            self._width,
            keyboard=keyboard,
            url=self.url,
        )

    def _show(self, event: Event, shown: LastShown, *, is_ours: bool) -> None:
        if isinstance(event.record, Gone):
            shown.end(event.record.resume_from)
        elif (
            not is_ours
        ):  # the last shown event may be of a session that was set back or deleted before a new turn
            if shown.has(event.id) and not isinstance(event.record, PlaybackLost):
                return
            if shown.may_have(event.id):
                self._screen.note(
                    f"an earlier chat was killed while it printed event {event.id}; that event may appear twice"
                )
        shown.begin(event.id)
        if self._is_json:
            line = msgspec.json.encode({"id": event.id, "record": event.record}).decode()
            _write(f"{escape_json(line)}\n")
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
    ) -> WatchEnd:
        """Detach, or stop the turn after a second Ctrl-C."""
        self._screen.pause()
        again = f"midstream chat {self.url} --session {self.session} --resume"
        if interrupts.count < self.stops_at:
            self.print_note(f"\nDetached: the turn continues. To resume:\n  {again}\n")
            self.print_note(f"Ctrl-C again within {SECOND_CTRL_C_S:g} s stops it.\n")
            try:
                async with asyncio.timeout(SECOND_CTRL_C_S):
                    await interrupts.wait_for_count(self.stops_at)
            except TimeoutError:
                await _let_go(coming, events)
                return WatchEnd.INTERRUPTED
        try:
            async with asyncio.timeout(CANCEL_S):
                await self._stop(client, coming, shown, events)
        except TimeoutError:
            self.print_note(f"The turn was cancelled and has not ended yet; see {again}\n")
        await _let_go(coming, events)
        return WatchEnd.INTERRUPTED

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


async def _to_end_of(turn: int, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    async with aclosing(events):
        async for event in events:
            yield event
            if isinstance(event.record, TurnEnded) and event.record.turn == turn:
                return


async def _let_go(coming: asyncio.Task[Event | None], events: AsyncIterator[Event]) -> None:
    """Stop waiting for the next event. Events that were not shown are sent again later."""
    coming.cancel()
    await asyncio.wait((coming,))
    if isinstance(events, AsyncGenerator):
        await events.aclose()


def _watch_end_of(ended: TurnEnded | None) -> WatchEnd:
    match ended.status if ended else None:
        case TurnStatus.COMPLETED | None:
            return WatchEnd.COMPLETED
        case TurnStatus.FAILED:
            return WatchEnd.FAILED
        case _:
            return WatchEnd.STOPPED


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
