"""The encoding of commands and answers between nodes, through a store's inbox.

During a rolling upgrade two versions communicate. A node refuses an unknown command, and the client tries again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import MidstreamError, SeqnoGapError, UnavailableError, error_of
from midstream.protocol.frames import secret_digest_of
from midstream.retries import FORWARDED_WITHIN_S
from midstream.session.session import Received, Session
from midstream.session.turn.commands import (
    Answer,
    CallFinished,
    Cancel,
    Command,
    Resume,
    SendMessage,
    SendTranscript,
    Withdraw,
)
from midstream.session.turn.states import Idle


class _PackedCommand(Struct, frozen=True):
    """A command, with the name of its type."""

    kind: str
    command: msgspec.Raw


class _ForwardedMessage(Struct, frozen=True, omit_defaults=True):
    """A forwarded command, with its stream if it has one."""

    command: _PackedCommand | None = None
    stream: str = ""
    secret_digest: str = ""
    seqno: int = 0
    digest: str = ""
    cancel_after_s: float | None = None
    connection: int = 0
    caller: str = ""


class Accepted(Struct, frozen=True, omit_defaults=True):
    """Answer to an accepted command.

    Args:
        position: The journal's end.
        is_replayed: The command was accepted before.
    """

    position: int = 0
    is_replayed: bool = False


class _Answer(Accepted, frozen=True, omit_defaults=True):
    """Answer to a command: accepted, or refused with an error."""

    code: str = ""
    message: str = ""
    retry_after_s: float | None = None
    expected: int = 0


GIVE_UP = b'{"give_up":true}'
"""A request to the node: give up a session without a running turn, so that it can be deleted."""

BY_NODE = "node "
"""Prefix of the recorded approver, if a node without authentication forwarded the answer."""
CLIENT_COMMANDS: tuple[type[Command], ...] = (
    SendMessage,
    SendTranscript,
    Withdraw,
    CallFinished,
    Answer,
    Cancel,
    Resume,
)
"""Commands that clients may send. Decisions of the node (a response, an expired question) are never forwarded."""
_KINDS: dict[str, type[Command]] = {kind.__name__: kind for kind in CLIENT_COMMANDS}


def make_idempotent(command: Command | Received, seen: Session, world: World) -> Command | Received | None:
    """Return an idempotent form of a command (TURN-74), or None if the command has no effect.

    A command without a stream gets one of its own, so that the journal has its number.

    Args:
        seen: The state of the session at the sender.
    """
    match command:
        case Received():
            return command
        case Cancel():
            running = None if isinstance(seen.turn, Idle) else Cancel(seen.turn.turn)
            return command if command.turn is not None else running
        case Resume() if seen.is_live:
            return None
        case _:
            return Received(world.new_id("stream"), secret_digest_of(world.new_secret()), 0, "", command)


class Forwarder:
    """Forwards commands to the nodes with the leases, and waits for the answers.

    Args:
        send: Sends an encoded command for a session, and returns the answer: see `Store.forward`.
    """

    def __init__(self, send: Callable[[str, bytes], Awaitable[bytes]], world: World) -> None:
        self._send = send
        self._world = world
        self._failure: MidstreamError | None = None
        self._limits: set[asyncio.Timeout] = set()
        """The limits of the commands that wait for an answer."""

    @property
    def is_waiting(self) -> bool:
        """Whether a command waits for its answer."""
        return bool(self._limits)

    async def forward(self, session_id: str, command: Command | Received, seen: Session) -> Accepted | None:
        """Forward a command, and return the answer; None for a command without effect.

        Args:
            seen: The state of the session in this process.

        Raises:
            MidstreamError: The command was refused, or the node does not answer.
        """
        lasting = make_idempotent(command, seen, self._world)
        return None if lasting is None else await self.request(session_id, encode_command(lasting))

    async def request(self, session_id: str, body: bytes) -> Accepted:
        """Forward an encoded command, and return the answer.

        Raises:
            UnavailableError: The node does not answer within `FORWARDED_WITHIN_S`.
            MidstreamError: The node refused the command.
        """
        limit = asyncio.timeout(FORWARDED_WITHIN_S)
        self._limits.add(limit)
        try:
            async with limit:
                return read_answer(await self._send(session_id, body))
        except TimeoutError as error:
            if self._failure is not None and limit not in self._limits:
                raise self._failure.again() from error
            message = f"the node of session {session_id!r} does not answer; retry later"
            raise UnavailableError(message, retry_after_s=1.0) from error
        finally:
            self._limits.discard(limit)

    def refuse(self, error: MidstreamError) -> None:
        """End all waits with an error."""
        self._failure = self._failure or error
        limits, self._limits = self._limits, set()
        for limit in limits:
            if not limit.expired():
                limit.reschedule(0.0)


def encode_command(command: Command | Received) -> bytes:
    """Encode a client's command."""
    if not isinstance(command, Received):
        return msgspec.json.encode(_ForwardedMessage(_pack_command(command)))
    packed = None if command.command is None else _pack_command(command.command)
    return msgspec.json.encode(
        _ForwardedMessage(
            packed,
            command.stream,
            command.secret_digest,
            command.seqno,
            command.digest,
            command.cancel_after_s,
            command.connection,
            command.caller,
        )
    )


def decode_command(body: bytes) -> Command | Received:
    """Decode a command of `encode_command`.

    Raises:
        UnavailableError: The command is unknown to this version, or clients may not send it.
    """
    try:
        forwarded = msgspec.json.decode(body, type=_ForwardedMessage)
        command = None if forwarded.command is None else _command(forwarded.command)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, RecursionError) as error:
        raise UnavailableError("another version of this server runs the session; retry later") from error
    if forwarded.stream:
        return Received(
            forwarded.stream,
            forwarded.secret_digest,
            forwarded.seqno,
            forwarded.digest,
            command,
            forwarded.cancel_after_s,
            forwarded.connection,
            forwarded.caller,
        )
    if command is None:
        raise UnavailableError("an empty command was forwarded")
    return command


def name_approver(command: Command | Received, sender: str) -> Command | Received:
    """Return a command whose answer names the forwarding node as approver, if it has no principal."""
    answer = command.command if isinstance(command, Received) else command
    if not isinstance(answer, Answer) or answer.by:
        return command
    named = replace(answer, by=f"{BY_NODE}{sender}")
    return replace(command, command=named) if isinstance(command, Received) else named


def encode_answer(answer: Accepted | MidstreamError) -> bytes:
    """Encode the answer to a command."""
    if isinstance(answer, Accepted):
        return msgspec.json.encode(answer)
    expected = answer.expected if isinstance(answer, SeqnoGapError) else 0
    return msgspec.json.encode(
        _Answer(
            code=answer.code, message=answer.message, retry_after_s=answer.retry_after_s, expected=expected
        )
    )


def read_answer(body: bytes) -> Accepted:
    """Decode the answer to an accepted command.

    Raises:
        MidstreamError: The node refused the command with this error.
    """
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnavailableError(
            "the answer of another node cannot be read; try again", retry_after_s=1.0
        ) from error
    if not answer.code:
        return Accepted(answer.position, answer.is_replayed)
    if answer.code == SeqnoGapError.code:
        raise SeqnoGapError(answer.message, expected=answer.expected)
    raise error_of(answer.code, answer.message, answer.retry_after_s)


def _pack_command(command: Command) -> _PackedCommand:
    return _PackedCommand(type(command).__name__, msgspec.Raw(msgspec.json.encode(command)))


def _command(packed: _PackedCommand) -> Command:
    return msgspec.json.decode(packed.command, type=_KINDS[packed.kind])
