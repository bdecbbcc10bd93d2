"""Access of a dialect's request to its session: rights, decryption, and loading."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from starlette.requests import Request

from midstream.engine.host import Host
from midstream.engine.journal import require_session_id
from midstream.engine.runner import Runner
from midstream.errors import SessionNotFoundError
from midstream.server.auth.caller import caller_of
from midstream.server.auth.principals import Action
from midstream.server.auth.session_unlocking import secrets_in, stream_digest_of, unlock


@asynccontextmanager
async def opened_session(
    host: Host, request: Request, session: str, action: Action, *, begins: bool = False
) -> AsyncIterator[tuple[Runner, str | None]]:
    """Open a session by the client's name; yield its runner, and the digest that replaces its secret in streams.

    Args:
        begins: Whether the request may begin the session.

    Raises:
        UsageError: The name is invalid.
        SessionNotFoundError: The session does not exist, or belongs to another principal.
        MidstreamError: The caller lacks the right to the action.
    """
    require_session_id(session)
    caller = caller_of(request.scope)
    name = caller.stored_name(session)
    caller.set_session(name)
    if begins:
        await caller.begin()
    else:
        await caller.require_existing(action)
    with await unlock(host, name, secrets_in(request), action, begins=begins) as held:
        runner = await host.session(name, create=begins)
        runner.attach()
        try:
            yield runner, stream_digest_of(held)
        finally:
            runner.detach()


@asynccontextmanager
async def opened_existing_session(host: Host, request: Request, session: str) -> AsyncIterator[Runner | None]:
    """Open a session for reading; yield None if it does not exist, or belongs to another principal.

    Raises:
        UsageError: The name is invalid.
        MidstreamError: The caller may not read the session.
    """
    async with AsyncExitStack() as stack:
        runner: Runner | None = None
        with suppress(SessionNotFoundError):
            runner, _ = await stack.enter_async_context(opened_session(host, request, session, Action.READ))
        yield runner
