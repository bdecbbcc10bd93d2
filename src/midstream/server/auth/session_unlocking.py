"""Decryption of sessions with the secret of a request or connection (`store.encryption.escrow`).

The secret is in a header or in an `open`; a viewer token may also be sent as a bearer token. All paths of a session
need it, except those in the tables below. A wrong secret is refused like a session that does not exist.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext

from msgspec import Struct
from starlette.requests import HTTPConnection
from starlette.types import Scope

from midstream.engine.escrow_locks import SessionHold
from midstream.engine.host import Host
from midstream.environment import World
from midstream.errors import AccessError, WrongSecretError
from midstream.protocol.frames import Open
from midstream.server.auth.bearer_tokens import bearer_token
from midstream.server.auth.issued_credentials import CredentialKind
from midstream.server.auth.middleware import SESSION_PATH, action_of, path_of
from midstream.server.auth.principals import Action
from midstream.server.transports.stream_headers import secrets_of

REFUSAL_S = 0.02
"""Refusals take a multiple of this time, in seconds, so that their duration reveals nothing."""
HELD = "midstream.held"
"""Key of the opened session in an ASGI scope."""
_SECRET_IN_FRAME = re.compile(r"/events|/poll|/stream|/commands")
"""Streams and their frames: the secret is checked with the `open` or the frame."""
_WITHOUT_CONTENT = re.compile(r"/tickets|/owner|/readers/[^/]+")
"""Paths without content of a session, for authenticated principals."""


class PresentedSecrets(Struct, frozen=True):
    """Secrets of a request, each "" if missing."""

    secret: str
    old_secret: str = ""

    def __repr__(self) -> str:
        return "PresentedSecrets(...)"


def secrets_in(connection: HTTPConnection, opening: Open | None = None) -> PresentedSecrets:
    """Return the secrets of a request, or of its `open`.

    Raises:
        MalformedFrameError: A secret is too long.
    """
    secret, old_secret = (
        (opening.secret, opening.old_secret) if opening is not None else secrets_of(connection)
    )
    if not secret and (token := bearer_token(connection)).startswith(f"{CredentialKind.VIEWER.value}-"):
        secret = token
    return PresentedSecrets(secret, old_secret)


async def unlock(
    host: Host, session: str, shown: PresentedSecrets, action: Action, *, begins: bool = False
) -> AbstractContextManager[SessionHold | None]:
    """Decrypt a session; it stays open while the returned context is entered. Without escrow, do nothing.

    Args:
        session: Stored name of the session.
        begins: Whether the request may begin the session.

    Raises:
        WrongSecretError: The secrets are wrong, or the session does not exist.
        AccessError: A viewer may only read.
    """
    asked_at = host.world.monotonic()
    try:
        return await unlock_at_once(host, session, shown, action, begins=begins)
    except WrongSecretError:
        await wait_for_refusal_interval(host.world, asked_at)
        raise


async def wait_for_refusal_interval(world: World, asked_at: float) -> None:
    """Wait until the time since `asked_at` is a multiple of `REFUSAL_S`."""
    await world.sleep(REFUSAL_S - (world.monotonic() - asked_at) % REFUSAL_S)


async def unlock_at_once(
    host: Host, session: str, shown: PresentedSecrets, action: Action, *, begins: bool = False
) -> AbstractContextManager[SessionHold | None]:
    """Decrypt like `unlock`, without a constant duration of refusals."""
    if host.locks is None:
        return nullcontext()
    held = await host.locks.hold(session, shown.secret, shown.old_secret, begins=begins)
    if held.opened is not None and not held.opened.is_client and action is not Action.READ:
        with held:
            raise AccessError("a viewer's secret permits only reading one session")
    return held


def stream_digest_of(held: SessionHold | None) -> str | None:
    """Return the digest that replaces the secret in the streams of a session; None without escrow."""
    return None if held is None or held.opened is None else held.opened.stream_digest


async def unlock_for(host: Host, scope: Scope) -> AbstractContextManager[SessionHold | None]:
    """Decrypt the session of a request, unless its secret comes in a frame.

    Raises:
        MidstreamError: As `unlock`.
    """
    if host.locks is None:
        return nullcontext()
    found = SESSION_PATH.fullmatch(path_of(scope))
    what = found["what"] or "" if found else ""
    if found is None or _SECRET_IN_FRAME.fullmatch(what) or _WITHOUT_CONTENT.fullmatch(what):
        return nullcontext()
    action = action_of(scope.get("method", "GET"), what)
    return await unlock(host, found["session"], secrets_in(HTTPConnection(scope)), action)
