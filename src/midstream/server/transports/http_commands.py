"""Frames from clients over plain HTTP: `POST /v1/sessions/{id}/commands` takes one frame."""

from __future__ import annotations

from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from midstream.engine.host import Host
from midstream.environment import Fault
from midstream.errors import MalformedFrameError, MidstreamError
from midstream.protocol.frames import (
    Ack,
    Close,
    CommandFrame,
    HeartbeatFrame,
    Open,
    Ping,
    decode_client,
    encode,
    secret_digest_of,
)
from midstream.protocol.server_stream import digest_of_shown_secret, read_command
from midstream.server.api.request_bodies import body_of, optional
from midstream.server.auth.caller import Caller, attribute, caller_of
from midstream.server.auth.principals import Action
from midstream.server.auth.session_unlocking import PresentedSecrets, secrets_in, stream_digest_of, unlock
from midstream.server.transports.connection import Connections
from midstream.server.transports.stream_headers import FrameSender, sender_of
from midstream.session.session import Received

Headers = list[tuple[bytes, bytes]]

_NO_STORE: Headers = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
_FRAME: Headers = [*_NO_STORE, (b"content-type", b"application/json")]
_REPLAYED = (b"x-midstream-replayed", b"true")


class CommandsEndpoint:
    """Endpoint for one frame of a client.

    It is a plain ASGI callable, because each tool result is such a request.
    """

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a command with its ack, a ping with a heartbeat, a close with nothing (STREAM-39).

        Raises:
            MidstreamError: The frame is refused, with an ordinary HTTP error.
        """
        request = Request(scope, receive)
        session_id: str = scope["path_params"]["session_id"]
        frame, by = decode_client(await body_of(request)), sender_of(request)
        match frame:
            case CommandFrame():
                is_replayed = await self._take(session_id, frame, by, scope)
                self._host.world.reach(Fault.BEFORE_ACK)
                headers = [*_FRAME, _REPLAYED] if is_replayed else _FRAME
                await _answer(send, 200, headers, encode(Ack(frame.seqno)))
            case Ping():
                await _answer(send, 200, _FRAME, encode(await self._heartbeat(session_id, by, request)))
            case Close():
                await self._hang_up(session_id, by, request)
                await _answer(send, 204, _NO_STORE)
            case _:
                raise MalformedFrameError(
                    "the body of this request must be a `command`, a `ping` or a `close`; a GET request opens a stream"
                )

    async def _take(self, session_id: str, frame: CommandFrame, by: FrameSender, scope: Scope) -> bool:
        """Submit a command; return, after its append, whether it had been accepted before."""
        if not by.stream or not by.secret:
            raise MalformedFrameError(
                "a command needs the headers `x-idempotency-key` and `x-idempotent-encryption-key`"
            )
        received = read_command(
            frame, stream=by.stream, secret_digest="", cancel_after_s=optional(by.cancel_after_s)
        )
        caller = caller_of(scope)
        is_first = received.seqno == 0
        if is_first:
            await caller.begin()
        else:
            await caller.require_existing(Action.SEND)
        received = await attribute(caller, received)
        shown = PresentedSecrets(by.secret, by.old_secret)
        with await unlock(self._host, session_id, shown, Action.SEND, begins=is_first) as held:
            self._connections.check((session_id, by.stream), by.connection, by.number)
            most = self._connections.settings_of(session_id, by.connection).in_flight_max
            received = replace(received, connection=by.number)
            digest = stream_digest_of(held)
            with self._connections.under_way((session_id, by.stream), received.seqno, most=most):
                if digest is None and await self._may_forward(session_id, received, by, caller):
                    received = replace(received, secret_digest=secret_digest_of(by.secret))
                    return (await self._host.forward(session_id, received)).is_replayed
                return await self._submit(session_id, received, by, caller, digest)

    async def _may_forward(
        self, session_id: str, received: Received, by: FrameSender, caller: Caller
    ) -> bool:
        """Return whether the server that runs the session can check and decide a command, and count the command.

        Forwarding does not read the session. Two cases need it: a changed secret, because the stream's secret is
        unknown here, and a caller at its limit, because commands that were accepted before may exceed the limit.
        """
        if by.old_secret or not await self._host.is_held_elsewhere(session_id):
            return False
        try:
            caller.count_command(received.command)
        except MidstreamError:
            return False
        return True

    async def _submit(
        self, session_id: str, received: Received, by: FrameSender, caller: Caller, digest: str | None
    ) -> bool:
        """Submit a command to its session; return whether it had been accepted before.

        Args:
            digest: Replaces the secret in the streams of the session; None for the digest of the secret itself.
        """
        # A later command may overtake the first one. The error then contains the expected `seqno`.
        runner = await self._host.session(session_id, create=True)
        opening = Open(by.stream, by.secret, old_secret=by.old_secret)
        digest = digest or digest_of_shown_secret(runner.state, opening)
        received = replace(received, secret_digest=digest)
        is_replayed = runner.state.has_accepted(received)
        if not is_replayed:
            caller.count_command(received.command)
        await runner.submit(received)
        return is_replayed

    async def _heartbeat(self, session_id: str, by: FrameSender, request: Request) -> HeartbeatFrame:
        if by.stream:  # a stream may be open in a session that has no message yet
            await caller_of(request.scope).require(Action.SEND)
        with await unlock(self._host, session_id, secrets_in(request), Action.READ):
            runner = await self._host.session(session_id, create=bool(by.stream))
            waits_on = self._host.awake.waits_for(runner)
            return HeartbeatFrame(str(runner.newest), waits_on)

    async def _hang_up(self, session_id: str, by: FrameSender, request: Request) -> None:
        if by.stream:
            await caller_of(request.scope).require(Action.SEND)
        with await unlock(self._host, session_id, secrets_in(request), Action.READ):
            self._connections.hang_up((session_id, by.stream), by.connection, by.secret)


async def _answer(send: Send, status: int, headers: Headers, body: bytes = b"") -> None:
    length = [(b"content-length", b"%d" % len(body))] if body else []
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
    await send({"type": "http.response.body", "body": body})
