"""Opening of encrypted sessions: checked once for each request and once for each connection, here and nowhere else.

On a server whose sessions are encrypted under their clients' secrets (`store.encryption.escrow`), a secret is shown in
a header or in an `open`; a viewer may show its word as a bearer token instead. What is not in the tables below needs
it, so that a route missing there is closed, not open. A refusal is the same as for a session that does not exist.
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
from midstream.server.auth.middleware import SESSION_PATH, action_of, path_of
from midstream.server.auth.principals import Action
from midstream.server.auth.tokens import TokenKind
from midstream.server.transports.stream_headers import secrets_of

REFUSAL_S = 0.02
"""Seconds of which a whole number passes before a refusal: the time does not reveal what was found."""
HELD = "midstream.held"
"""Where the scope of a request has what its secret opened."""
_SAID_IN_BODY = re.compile(r"/events|/poll|/stream|/commands")
"""Streams, and the frames on them: they are checked when the `open` or the frame has come."""
_NOTHING_SAID = re.compile(r"/tickets|/owner|/readers/[^/]+")
"""What has no text of a session, and is for authenticated principals."""


class PresentedSecrets(Struct, frozen=True):
    """The secrets of a request, each "" where there is none."""

    secret: str
    old_secret: str = ""

    def __repr__(self) -> str:
        return "Shown(...)"


def secrets_in(connection: HTTPConnection, opening: Open | None = None) -> PresentedSecrets:
    """Return the secrets of a request, or of the `open` it came with.

    Raises:
        MalformedFrameError: One is too long.
    """
    secret, old_secret = (
        (opening.secret, opening.old_secret) if opening is not None else secrets_of(connection)
    )
    if not secret and (word := bearer_token(connection)).startswith(f"{TokenKind.VIEWER.value}-"):
        secret = word
    return PresentedSecrets(secret, old_secret)


async def unlock(
    host: Host, session: str, shown: PresentedSecrets, action: Action, *, begins: bool = False
) -> AbstractContextManager[SessionHold | None]:
    """Open a session for as long as what this returns is entered; where no client holds a key, do nothing.

    Args:
        session: As the store names it.
        begins: Whether this may begin the session.

    Raises:
        WrongSecretError: These secrets do not open it, or there is no such session.
        AccessError: A viewer may only read.
    """
    asked_at = host.world.monotonic()
    try:
        return await unlock_at_once(host, session, shown, action, begins=begins)
    except WrongSecretError:
        await wait_for_refusal_interval(host.world, asked_at)
        raise


async def wait_for_refusal_interval(world: World, asked_at: float) -> None:
    """Wait until a whole number of `REFUSAL_S` has passed since something was asked."""
    await world.sleep(REFUSAL_S - (world.monotonic() - asked_at) % REFUSAL_S)


async def unlock_at_once(
    host: Host, session: str, shown: PresentedSecrets, action: Action, *, begins: bool = False
) -> AbstractContextManager[SessionHold | None]:
    """As `unlock`; the time of a refusal may reveal what was found."""
    if host.locks is None:
        return nullcontext()
    held = await host.locks.hold(session, shown.secret, shown.old_secret, begins=begins)
    if held.opened is not None and not held.opened.is_client and action is not Action.READ:
        with held:
            raise AccessError("a viewer's secret permits only reading one session")
    return held


def stream_digest_of(held: SessionHold | None) -> str | None:
    """Return what stands for the secret in the streams of a session; None where it is a digest of the stream's own."""
    return None if held is None or held.opened is None else held.opened.stream_digest


async def unlock_for(host: Host, scope: Scope) -> AbstractContextManager[SessionHold | None]:
    """Open the session of a request, unless its secret comes later.

    Raises:
        MidstreamError: As `unlock`.
    """
    if host.locks is None:
        return nullcontext()
    found = SESSION_PATH.fullmatch(path_of(scope))
    what = found["what"] or "" if found else ""
    if found is None or _SAID_IN_BODY.fullmatch(what) or _NOTHING_SAID.fullmatch(what):
        return nullcontext()
    action = action_of(scope.get("method", "GET"), what)
    return await unlock(host, found["session"], secrets_in(HTTPConnection(scope)), action)
