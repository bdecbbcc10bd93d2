"""The client of an application: send messages, follow and cancel turns, and resume turns of an earlier process.

async with connect("http://127.0.0.1:8000", state="agent.db", tools=[read_file]) as client:
    for turn in await client.resume_interrupted():
        print(await turn.answer())
    print(await client.ask("session-1", "What is in README.md?"))
    async for event in client.send("session-1", "And in CHANGELOG.md?"):
        show(event.transcript)
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec import Struct

from midstream.client.checkpoint_file import CheckpointFile, KeptStream, StreamBegun
from midstream.client.client_events import event_of
from midstream.client.client_settings import ClientSettings, parse_option
from midstream.client.connection_headers import ConnectionHeaders, GivenHeaders
from midstream.client.live_stream import Attachment
from midstream.client.local_tools import LocalTools, declare, refuse_foreign
from midstream.client.os_keyring import OsKeyring
from midstream.client.replays import answer_until, results_to_send
from midstream.client.requests import create_viewer_token, questions, revoke_viewer_tokens, snapshot
from midstream.client.secret_store import SecretStore, secrets_of_this_user
from midstream.client.session_secrets import SecretsToShow, SessionSecrets
from midstream.client.stream_carrier import ReadSecrets
from midstream.client.transport_selection import (
    AUTO,
    RememberedTransports,
    TransportKind,
    TransportName,
    TransportSelection,
)
from midstream.environment import World
from midstream.errors import (
    MidstreamError,
    SessionNotFoundError,
    StoreDamagedError,
    UnavailableError,
    UsageError,
)
from midstream.history.messages import UserMessage
from midstream.number_checks import require_seconds
from midstream.protocol.answer_text import AnswerText
from midstream.protocol.checkpoint import Forgotten
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.events import Event, EventReader, PlaybackLost, completed_text
from midstream.protocol.frames import (
    AnswerPayload,
    CancelPayload,
    EventId,
    Payload,
    ResumePayload,
    SendPayload,
    SnapshotWhen,
    SnapshotWhenName,
    WithdrawPayload,
)
from midstream.session.calls import Choice
from midstream.session.questions import Question
from midstream.session.records import QuestionAsked
from midstream.session.turn.commands import WhenBusy, WhenBusyName
from midstream.tools.function_tools import Tool, by_name, tool

_log = logging.getLogger(__name__)

REMEMBERED = "midstream-transports.json"
"""File next to the state file with the transport that worked at each server."""


class InterruptedTurn(Struct, frozen=True):
    """A turn that had not ended when an earlier process of this client ended. Iterate over it to continue.

    Args:
        at: Time of this client's last activity in it, in seconds since 1970.
    """

    session: str
    at: float
    resume: Callable[[], AsyncGenerator[Event, None]]

    def __aiter__(self) -> AsyncIterator[Event]:
        return self.resume()

    async def answer(self) -> str:
        """Follow the turn to its end, and return the whole answer, including the part of the earlier process.

        Raises:
            TurnFailedError, MidstreamError: As in `Client.ask`.
        """
        return await _answer_of(self.session, self.resume())


def connect(
    url: str,
    *,
    state: str | Path | None = None,
    secrets: str | Path | None = None,
    keyring: bool = False,
    tools: Iterable[Tool | Callable[..., Any]] = (),
    world: World | None = None,
    headers: GivenHeaders | None = None,
    transport: TransportKind | TransportName = AUTO,
    settings: ClientSettings | None = None,
    on_reconnecting: Callable[[str, bool], None] | None = None,
    on_stalled: Callable[[str, str], None] | None = None,
    on_interrupted: Callable[[InterruptedTurn], Coroutine[Any, Any, None]] | None = None,
) -> Client:
    """Create a client for the server at `url`; use it as an async context manager.

    Args:
        url: URL of the server, such as `http://127.0.0.1:8000`. Nothing is sent before the first `send`.
        state: State file of the streams, from which another process can resume. It is created if missing, readable by
            its owner only, and used by one process at a time. None keeps the state in memory. The file
            `midstream-transports.json` next to it has the transport that worked at each server.
        secrets: File of the streams' secrets, readable by its owner only. By default all clients of this user share
            `secrets.db` in the user's state folder.
        keyring: Whether new secrets are stored in the system's keyring (extra `keyring`); the file then has their
            names.
        tools: Functions that the model can call, and that run at the client.
        headers: Headers of each connection, such as `authorization`, or a function that returns them for each
            connection. They are not stored. Without `authorization`, the token in the variable MIDSTREAM_TOKEN is sent
            to the origin in it. A server of this machine first proves that it has the key of this user.
        transport: `websocket`, `sse` (server-sent events) or `poll` (long polling); `auto` tries them in this order,
            and remembers the one that worked.
        settings: Settings of streams and time limits; `Client.settings` changes them later.
        on_reconnecting: Called with the session, and whether its connection is being restored, on each change.
        on_stalled: Called with the session, and the thing for which its turn waits, once for each stall. Nothing is
            cut.
        on_interrupted: Iterates over an interrupted turn of an earlier process. Called for each of them concurrently
            when the client starts; `Client.close` raises its exceptions. Without it, only `Client.resume_interrupted`
            resumes turns.

    Raises:
        UsageError: `url` is not the URL of a server, `transport` is unknown, or a header cannot be sent; or this user
            has no home folder, and neither `secrets` nor MIDSTREAM_HOME is set.
        ToolDefinitionError: A function cannot be a tool, two tools have the same name, or a tool belongs to the server
            (`question`, `sub_agent`).
    """
    named = by_name(each if isinstance(each, Tool) else tool(each) for each in tools)
    refuse_foreign(named.values())
    world = world or World()
    shown = ConnectionHeaders(url, headers or {})
    beside = None if state is None else Path(state).with_name(REMEMBERED)
    remembered = RememberedTransports(beside, world=world)
    if state is not None and secrets is None:
        secrets = secrets_of_this_user()
    return Client(
        url,
        state=state,
        secrets=SecretStore(
            None if state is None else secrets, world=world, keyring=OsKeyring() if keyring else None
        ),
        tools=named,
        world=world,
        headers=shown,
        ways=TransportSelection(url, transport=transport, headers=shown, remembered=remembered, world=world),
        settings=settings or ClientSettings(),
        on_reconnecting=on_reconnecting or _ignore,
        on_stalled=on_stalled or _ignore,
        on_interrupted=on_interrupted,
    )


class Client:
    """A client of one server; made by `connect`. It can use many sessions at once.

    Attributes:
        settings: Settings, which may be replaced at any time.
    """

    def __init__(
        self,
        url: str,
        *,
        state: str | Path | None,
        secrets: SecretStore,
        tools: Mapping[str, Tool],
        world: World,
        headers: ConnectionHeaders,
        ways: TransportSelection,
        settings: ClientSettings,
        on_reconnecting: Callable[[str, bool], None],
        on_stalled: Callable[[str, str], None],
        on_interrupted: Callable[[InterruptedTurn], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self.settings = settings
        self._url = url.rstrip("/")
        self._tools = tools
        self._world = world
        self._shown = headers
        self._ways = ways
        self._on_reconnecting = on_reconnecting
        self._on_stalled = on_stalled
        self._on_interrupted = on_interrupted
        self._taking_up: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._secrets = secrets
        self._session_secrets = SessionSecrets(secrets, server=self._url, world=world)
        self._file = CheckpointFile(state, server=self._url, secrets=secrets, world=world)
        self._unkept_secrets = SecretStore(None, world=world)
        self._unkept = CheckpointFile(None, server=self._url, secrets=self._unkept_secrets, world=world)
        """State in memory of streams that begin while recovery is off."""
        self._attachments: dict[Attachment, str] = {}
        self._beginning: dict[asyncio.Future[None], str] = {}
        """Streams that are about to begin, and their sessions."""

    async def __aenter__(self) -> Self:
        try:
            await self._file.open()
            if self._on_interrupted is not None:
                for turn in await self.resume_interrupted():
                    taking_up = self._on_interrupted(turn)
                    task = self._world.spawn(taking_up, name=f"midstream take up {turn.session!r}")
                    self._taking_up.append(task)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Detach from all streams; turns continue at the server. Idempotent. It continues if its caller is cancelled.

        Loops over turns end without the last event of the turn (`Event.is_end`).
        """
        if self._closing is None or self._closing.done():
            self._closing = self._world.spawn(self._close(), name="midstream close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        taking_up, self._taking_up = self._taking_up, []
        for task in taking_up:
            task.cancel()
        try:
            failures = await asyncio.gather(*taking_up, return_exceptions=True)
            closing = (attachment.close() for attachment in self._attachments)
            failures += await asyncio.gather(*closing, return_exceptions=True)
        finally:
            await self._ways.close()
            for each in (self._file, self._secrets, self._unkept, self._unkept_secrets):
                await each.close()
        for failure in failures:
            if failure is not None and not isinstance(failure, asyncio.CancelledError):
                raise failure

    # --- methods of applications -------------------------------------------------------------------------------

    def send(
        self,
        session: str,
        message: str | UserMessage,
        *,
        when_busy: WhenBusy | WhenBusyName = WhenBusy.QUEUE,
        cancel_after_s: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Send a message to a new or existing session, and iterate over its turn.

        If a turn runs there, the message is queued (`when_busy="queue"`): `MessageQueued` comes at once, the events of
        its own turn later, and none of the turns in between. A withdrawn message ends with `MessageWithdrawn`.

        The first iteration sends the message. Leaving the loop early detaches: the turn continues, and
        `resume_interrupted` returns it; only `cancel` stops it. An event counts as handled when the next one is
        requested. After a crash before that, the application receives it again.

        With `cancel_after_s` (at most one hour), the turn is stopped if a lost connection is not restored within this
        time. Leaving the loop does not stop it, nor does a turn stop whose server dies within this time.

        Raises:
            SessionBusyError: A turn runs and `when_busy` is "refuse", or 100 messages are queued. Nothing was sent.
            FrameTooLargeError: The message is larger than 1 MiB. Nothing was sent.
            ConnectionLostError: The server could not be reached within `patience_s`; the message is stored.
            MidstreamError: The server refused, or the state file could not be written; see `code`.
        """
        user_message = UserMessage.of(message) if isinstance(message, str) else message
        payload = SendPayload(
            user_message.parts, declare(self._tools.values()), parse_option(WhenBusy, when_busy)
        )
        return self._run_turn(session, payload, cancel_after_s=cancel_after_s)

    async def ask(
        self,
        session: str,
        message: str | UserMessage,
        *,
        when_busy: WhenBusy | WhenBusyName = WhenBusy.QUEUE,
        cancel_after_s: float | None = None,
    ) -> str:
        """Send a message to a session, and return the whole answer, also after lost connections and restarts.

        It waits until the turn ends, also for people; see `send`. After a crash, `resume_interrupted` returns the turn,
        and `InterruptedTurn.answer` its answer.

        Raises:
            TurnFailedError: The turn failed, or was stopped or interrupted; see its `status`.
            MidstreamError: As in `send`.
        """
        events = self.send(session, message, when_busy=when_busy, cancel_after_s=cancel_after_s)
        return await _answer_of(session, events)

    def resume(self, session: str, turn: int | None = None) -> AsyncGenerator[Event, None]:
        """Resume the session's last turn, which was interrupted or failed, and iterate over the rest of it.

        It works like `send`; with `turn`, it resumes only that turn. The turn calls the tools of the client that opened
        it; a client without these tools answers their calls with an error. For a turn from which only this program was
        disconnected, see `resume_interrupted`.

        Raises:
            NothingToResumeError: The last turn was completed or stopped, or is not `turn`. Nothing was changed.
            SessionBusyError: The turn is running: `follow` it.
            SessionNotFoundError: The session is empty.
            MidstreamError: As in `send`.
        """
        return self._run_turn(session, ResumePayload(turn))

    async def questions(self, session: str | None = None) -> tuple[Question, ...]:
        """Return open questions, oldest first: of all sessions, or of one session and its sub-agents.

        Questions of a session that is encrypted under its secret are returned only with `session`.

        Raises:
            ConnectionLostError: The server did not answer.
            MidstreamError: The server refused.
        """
        shown = SecretsToShow() if session is None else await self._session_secrets.read(session)
        return await questions(self._url, session, {**(await self._shown()), **shown.headers})

    async def answer(
        self,
        session: str,
        question: QuestionAsked | Question,
        choice: Choice | str,
        *,
        text: str = "",
        arguments: str | None = None,
    ) -> None:
        """Answer a question; return when the server has stored the answer.

        After a crash before that, the next `resume_interrupted` sends the answer again.

        Args:
            session: Session of the question: `question.session` of a `Question`; for an event, the last one of its
                `path`, or the followed session.
            question: From `Event.question` or `questions`.
            choice: `allow` or `deny` for an approval; `respond` for a question; `happened`, `rerun` or `skip` for a
                call in doubt.
            text: The response, the reason for a denial, or the result of a call that took effect.
            arguments: With `allow`, other arguments (JSON text) for the call.

        Raises:
            QuestionClosedError: The question was already answered, or its turn has ended. Nothing was changed.
            AnswerMismatchError: The choice is not among the question's `choices`. Nothing was changed.
            MidstreamError: The server could not be reached, or refused.
        """
        payload = AnswerPayload(
            question.turn,
            question.response,
            question.call_id,
            question.digest,
            parse_option(Choice, choice),
            text,
            arguments,
        )
        await self._send_on_own_stream(session, payload)

    async def withdraw(self, session: str, number: int | None = None) -> None:
        """Withdraw a queued message, or all without a number; return when the server has stored the withdrawal.

        A message whose turn has begun is not withdrawn, without an error: see `cancel`.

        Raises:
            MidstreamError: The server could not be reached, or refused.
        """
        await self._send_on_own_stream(session, WithdrawPayload(number))

    async def follow(
        self,
        session: str,
        after: str | None = None,
        *,
        snapshots: SnapshotWhen | SnapshotWhenName = SnapshotWhen.GONE,
        viewer_token: str = "",
    ) -> AsyncGenerator[Event, None]:
        """Iterate over the events of a session, without end, as a reader.

        Args:
            session: An existing session.
            after: Begin after this event (`"0"` or `"0-0"`: with the first event); None begins with the next new event.
            snapshots: When a `SnapshotFrame` replaces events: `gone`, for events that are no longer kept; `begin`, also
                as the first event if `after` is None; `never`.
            viewer_token: A token from another client's `create_viewer_token`, if the session is encrypted under that
                client's secret.

        Raises:
            SessionNotFoundError: The session does not exist.
            WrongSecretError: The session does not exist, or neither the secret known here nor the token opens it.
            MalformedFrameError: `after` is not an event id.
        """
        read_secrets = (
            partial(_freeze, SecretsToShow(viewer_token))
            if viewer_token
            else partial(self._session_secrets.read, session)
        )
        shown = await read_secrets()
        begin = None if after is None else EventId.parse(after)
        stream = ClientStream(
            secret=shown.secret,
            old_secret=shown.old_secret,
            after=begin,
            snapshots=parse_option(SnapshotWhen, snapshots),
            patience_s=self.settings.patience_s,
            now=self._world.monotonic(),
        )
        attachment = self._attach(session, stream, read_secrets=read_secrets)
        async with aclosing(self._deliver(attachment)) as events:
            async for event in events:
                yield event

    async def cancel(self, session: str, turn: int | None = None) -> None:
        """Cancel the session's running turn, of any client; return when the server has stored the cancel.

        Messages that this client is about to send there, or has queued, are cancelled or withdrawn too. The iterator of
        a turn of this client receives its end. Without a running turn, nothing happens. After a crash before the end of
        this call, the next `resume_interrupted` sends the cancel again.

        Args:
            turn: Cancel only this turn (`record.turn` of its events). Without it, the turn is cancelled that runs when
                the server receives the command.

        Raises:
            SessionNotFoundError: The session is empty.
            MidstreamError: The server could not be reached, or refused.
        """
        while begins := [begin for begin, where in self._beginning.items() if where == session]:
            await asyncio.wait(begins)
        ours = [
            attachment
            for attachment, where in self._attachments.items()
            if where == session and attachment.stream.may_stop(turn)
        ]
        is_somebody_elses = all(attachment.stream.is_queued for attachment in ours)
        for attachment in reversed(ours):  # queued messages before the running turn ends
            attachment.abort()
        for attachment in ours:
            await attachment.wait_for_acks()
        if is_somebody_elses:
            await self._send_on_own_stream(session, CancelPayload(turn))

    async def resume_interrupted(self, look_back_s: float | None = None) -> list[InterruptedTurn]:
        """Return the turns that an earlier process left, or from which this one detached, oldest first.

        Iterating over a turn continues after the last handled event. Unacknowledged cancels, answers and withdrawals
        are sent again at once, in the background. Streams that are older than the look-back, or have no command, are
        deleted. A turn with damaged data begins with a `PlaybackLost`. If recovery is off (`settings`), the list is
        empty, and nothing is deleted.

        Iterating raises `UnavailableError` if the keyring with the stream's secret does not answer. The iteration can
        be retried when the keyring is unlocked.

        Args:
            look_back_s: Look-back instead of that of the settings.

        Raises:
            StoreDamagedError: The state file cannot be read. Nothing was sent.
            UsageError: Others may read the file of secrets, or `look_back_s` is negative. Nothing was sent.
        """
        if not self.settings.is_recovery_on:
            return []
        look_back_s = self.settings.look_back_s if look_back_s is None else look_back_s
        require_seconds("look_back_s", look_back_s, most=math.inf)
        interrupted: list[InterruptedTurn] = []
        attached = {attachment.stream.stream for attachment in self._attachments}
        now = self._world.now()
        for kept in await self._file.streams():
            checkpoint = kept.checkpoint
            if checkpoint.stream in attached:
                continue
            idle_s = now - kept.touched_at
            is_old = idle_s > look_back_s and idle_s > await self._file.longest_limit_s(checkpoint.stream)
            if checkpoint.next_seqno == 0 or is_old:
                await self._file.write(checkpoint.stream, [Forgotten()])
            elif not (checkpoint.is_finishing and await self._finish(kept)):
                resume = partial(self._resume, kept)
                interrupted.append(InterruptedTurn(kept.session, kept.touched_at, resume))
        return interrupted

    def is_reconnecting(self, session: str) -> bool:
        """Return whether a lost connection of this session is being restored, for display."""
        return any(
            attachment.stream.is_reconnecting
            for attachment, where in self._attachments.items()
            if where == session
        )

    def is_stalled(self, session: str) -> bool:
        """Return whether a turn of this session has stalled for `stall_after_s`, for display."""
        return any(each.stream.is_stalled for each, where in self._attachments.items() if where == session)

    def trouble(self, session: str) -> MidstreamError | None:
        """Return the server's last temporary refusal (a full disk, draining), for display."""
        troubles = (each.stream.trouble for each, where in self._attachments.items() if where == session)
        return next((trouble for trouble in troubles if trouble is not None), None)

    def waiting_on(self, session: str) -> str:
        """Return what the session's turn waited for at the last heartbeat: model, tool, client, person or nothing."""
        waits = [each.stream.waiting_on for each, where in self._attachments.items() if where == session]
        return next((wait for wait in waits if wait != "nothing"), "nothing")

    # --- secrets ------------------------------------------------------------------------------------------------

    async def secret(self, session: str) -> str:
        """Return the secret of a session, under which a server may encrypt it; create it if it is missing.

        It is for another client of the same person, which stores it with `keep_secret`. Do not log it, or send it
        anywhere else.

        Raises:
            MidstreamError: The secret cannot be stored, or its keyring does not answer.
        """
        return (await self._session_secrets.read_or_create(session)).secret

    async def keep_secret(self, session: str, secret: str) -> None:
        """Use this secret for a session from now on.

        Raises:
            MidstreamError: The secret cannot be stored.
        """
        await self._session_secrets.keep(session, secret)

    async def change_secret(self, session: str) -> None:
        """Replace the secret of a session by a new one; return when the server has stored the change.

        After an interruption, both secrets are sent until the next call; one of them opens the session.

        Raises:
            WrongSecretError: The session does not exist, or the secrets known here do not open it.
            MidstreamError: The server could not be reached, or refused.
        """
        both = await self._session_secrets.begin_change(session)
        await snapshot(self._url, session, {**(await self._shown()), **both.headers})
        await self._session_secrets.end_change(session, both)

    async def discard_secret(self, session: str) -> None:
        """Delete the secret of a session here. Without another client that has it, the session can never be opened
        again.

        It is useful also after the deletion of a session: older copies of the store still contain the encrypted
        session. Close all streams of the session first, because an open stream may store the secret again.

        Raises:
            MidstreamError: The secret may not have been deleted, because a keyring does not answer.
        """
        await self._session_secrets.delete(session)

    async def create_viewer_token(self, session: str, *, for_s: float = 3600.0) -> str:
        """Return a viewer token that permits reading a session for `for_s` seconds: see `follow`.

        Raises:
            MidstreamError: The server could not be reached, or refused.
        """
        shown = await self._session_secrets.read(session)
        return await create_viewer_token(
            self._url, session, for_s, {**(await self._shown()), **shown.headers}
        )

    async def revoke_viewer_tokens(self, session: str) -> None:
        """Revoke all viewer tokens of a session.

        Raises:
            MidstreamError: The server could not be reached, or refused.
        """
        shown = await self._session_secrets.read(session)
        await revoke_viewer_tokens(self._url, session, {**(await self._shown()), **shown.headers})

    # --- streams ------------------------------------------------------------------------------------------------

    async def _run_turn(
        self, session: str, payload: SendPayload | ResumePayload, *, cancel_after_s: float | None = None
    ) -> AsyncGenerator[Event, None]:
        """Open a stream for a turn, and iterate over its events."""
        with self._begins(session):
            stream, begun = await self._new_stream(session, cancel_after_s)
            stream.submit(payload)
            file = await self._file_of_new()
            tools = await self._local_tools(session, stream, file)
            attachment = self._attach(session, stream, begun, tools, file)
        async with aclosing(self._deliver(attachment)) as events:
            async for event in events:
                yield event

    @contextmanager
    def _begins(self, session: str) -> Iterator[None]:
        """Register a stream that is about to begin, so that a cancellation waits for it."""
        begun = asyncio.get_running_loop().create_future()
        self._beginning[begun] = session
        try:
            yield
        finally:
            del self._beginning[begun]
            begun.set_result(None)

    async def _send_on_own_stream(self, session: str, payload: Payload) -> None:
        """Send a command on a separate stream, which ends with its ack."""
        stream, begun = await self._new_stream(session)
        stream.submit(payload)
        stream.finish()
        file = await self._file_of_new()
        async for _ in self._deliver(self._attach(session, stream, begun, file=file)):
            pass

    async def _file_of_new(self) -> CheckpointFile:
        if self.settings.is_recovery_on:
            return self._file
        await self._unkept.open()
        return self._unkept

    async def _new_stream(
        self, session: str, cancel_after_s: float | None = None
    ) -> tuple[ClientStream, StreamBegun]:
        if not session:
            raise UsageError("a session needs an id of at least one character")
        shown = await self._session_secrets.read_or_create(session)
        now = self._world.monotonic()
        key = self._world.new_id("stream")
        stream = ClientStream(
            key,
            shown.secret,
            old_secret=shown.old_secret,
            cancel_after_s=cancel_after_s,
            snapshots=SnapshotWhen.GONE,
            patience_s=self.settings.patience_s,
            stall_after_s=self.settings.stall_after_s,
            now=now,
        )
        return stream, StreamBegun(session, shown.secret)

    async def _resume_stream(self, kept: KeptStream) -> ClientStream:
        life, now = await self._file.start_epoch(), self._world.monotonic()
        self._ways.is_known = True  # the server accepted the stream earlier
        stream = ClientStream.resume(
            kept.checkpoint,
            life=life,
            snapshots=SnapshotWhen.GONE,
            patience_s=self.settings.patience_s,
            stall_after_s=self.settings.stall_after_s,
            now=now,
        )
        # The session's secret may have changed since the stream began. Without one, the stream's own secret counts.
        shown = await self._session_secrets.read(kept.session)
        stream.show(shown.secret, shown.old_secret)
        return stream

    async def _finish(self, kept: KeptStream) -> bool:
        """Resend unacknowledged commands in the background; return False if the secret is not available."""
        try:
            kept = await self._file.with_secret(kept)
        except UnavailableError as error:
            _log.warning("the stream %s cannot be finished now: %s", kept.checkpoint.stream, error.message)
            return False
        if not kept.damage:
            self._attach(kept.session, await self._resume_stream(kept))
        return not kept.damage

    async def _resume(self, kept: KeptStream) -> AsyncGenerator[Event, None]:
        kept = await self._file.with_secret(kept)
        async with aclosing(self._show_snapshot(kept) if kept.damage else self._resume_turn(kept)) as events:
            async for event in events:
                yield event

    async def _resume_turn(self, kept: KeptStream) -> AsyncGenerator[Event, None]:
        reading = EventReader(await self._read_before(kept))
        stream = await self._resume_stream(kept)
        tools = await self._local_tools(kept.session, stream, self._file)
        if kept.has_lost_commands:
            for payload in results_to_send(kept, await self._file.calls(stream.stream)):
                stream.submit(payload)
        attachment = self._attach(kept.session, stream, None, tools)
        async with aclosing(self._deliver(attachment, reading)) as events:
            async for event in events:
                yield event

    async def _read_before(self, kept: KeptStream) -> AnswerText | None:
        begin, end = await self._file.beginning(kept.checkpoint.stream), kept.checkpoint.event_id
        if begin is None or end is None:
            return None
        return await answer_until(self.follow(kept.session, begin, snapshots=SnapshotWhen.NEVER), end)

    async def _show_snapshot(self, kept: KeptStream) -> AsyncGenerator[Event, None]:
        """Report that a stream cannot be resumed, yield a snapshot of its session, and follow the turn (STREAM-48)."""
        stream = kept.checkpoint.stream
        _log.warning("the stream %s cannot be resumed: %s", stream, kept.damage)
        try:
            shown = await self._session_secrets.read(kept.session)
            headers = {**(await self._shown()), **shown.headers}
            newest, is_at_rest, session = await snapshot(self._url, kept.session, headers)
        except SessionNotFoundError as error:
            await self._file.write(stream, [Forgotten()])
            message = f"{kept.damage}, and the server has no session {kept.session!r}; send the message again"
            raise StoreDamagedError(message) from error
        reading = EventReader()
        yield reading.event(newest, PlaybackLost(kept.damage, msgspec.Raw(session)))
        await self._file.write(stream, [Forgotten()])
        if is_at_rest:
            return
        async with aclosing(self.follow(kept.session, newest)) as events:
            async for event in events:
                yield reading.event(event.id, event.record)
                if event.is_end:
                    return

    async def _local_tools(
        self, session: str, stream: ClientStream, file: CheckpointFile
    ) -> LocalTools | None:
        kept = await file.calls(stream.stream)
        if not kept and not self._tools:
            return None
        return LocalTools(session, self._tools, epoch=await file.start_epoch(), kept=kept)

    def _attach(
        self,
        session: str,
        stream: ClientStream,
        begun: StreamBegun | None = None,
        tools: LocalTools | None = None,
        file: CheckpointFile | None = None,
        read_secrets: ReadSecrets | None = None,
    ) -> Attachment:
        attachment = Attachment(
            stream,
            partial(self._ways.connect, session),
            read_secrets=read_secrets or partial(self._session_secrets.read, session),
            file=file or self._file,
            begun=begun,
            tools=tools,
            world=self._world,
            on_reconnecting=partial(self._on_reconnecting, session),
            on_stalled=partial(self._on_stalled, session),
        )
        self._attachments[attachment] = session
        attachment.start()
        return attachment

    async def _keep_needed(self, attachment: Attachment) -> None:
        """Store the secret of a session only if its server encrypts the session."""
        stream, session = attachment.stream, self._attachments[attachment]
        try:
            if stream.is_encrypted and stream.stream:
                await self._session_secrets.need(session, stream.secret)
            elif stream.is_encrypted is False:
                await self._session_secrets.release(session)
        except MidstreamError as error:  # the next stream of the session tries again
            _log.warning("a stored secret is out of date: %s", error.message, extra={"session": session})

    async def _deliver(
        self, attachment: Attachment, reading: EventReader | None = None
    ) -> AsyncGenerator[Event, None]:
        reading = reading or EventReader()
        try:
            event = await attachment.next()
            await self._keep_needed(attachment)  # the welcome was received before
            while event is not None:
                yield event_of(event, reading)
                event = await attachment.next()
        finally:
            del self._attachments[attachment]
            await attachment.close()


async def _answer_of(session: str, events: AsyncGenerator[Event, None]) -> str:
    last: Event | None = None
    async with aclosing(events):
        async for event in events:
            last = event
    return completed_text(session, last)


async def _freeze(shown: SecretsToShow) -> SecretsToShow:
    return shown


def _ignore(session: str, news: object) -> None:
    """Do nothing with a notification."""
    del session, news
