"""Tokens that allow reading one session for a while.

Such a word is a pass of a server that asks who comes, and a secret of a session that is encrypted under its client's:
one word for both, shown as a bearer token or in the place of the secret.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.requests import Request

from midstream.engine.escrow_locks import SessionHold
from midstream.engine.host import Host
from midstream.server.auth.access_routes import Issued, owner_of
from midstream.server.auth.caller import visit_of
from midstream.server.auth.middleware import AuthMiddleware
from midstream.server.auth.principals import Principal
from midstream.server.auth.tokens import VIEWER_S_MAX, AccessToken, TokenKind
from midstream.server.auth.unlocking import HELD
from midstream.session.child_names import root_of


class ViewerRequest(Struct, forbid_unknown_fields=True):
    """For how many seconds a viewer's word is asked for."""

    for_s: Annotated[float, Meta(ge=1, le=VIEWER_S_MAX)] = 3600.0


class ViewerRoutes:
    """The endpoints of a session's owner who lets others look."""

    def __init__(self, host: Host, door: AuthMiddleware) -> None:
        self._host = host
        self._door = door

    async def issue_view(self, request: Request, body: ViewerRequest) -> Issued:
        """Issue a token that allows reading this session for a while."""
        session = root_of(request.path_params["session_id"])
        owner = None if self._door.access is None else await owner_of(self._door, session)
        if _is_encrypted(request):
            assert self._host.locks is not None, "somebody holds it open"
            word = await self._host.locks.escrow.share(session, for_s=body.for_s)
        else:
            word = self._host.world.new_id(TokenKind.VIEWER.value)
        if owner is not None:
            issuer = visit_of(request.scope).principal
            name = f"viewer of {session}"
            viewer = Principal(name, tenant=owner.tenant, session=session, claim=owner.claim)
            viewer = replace(viewer, via=issuer.via, source=issuer.source, expires_at=issuer.expires_at)
            now = self._host.world.now()
            token = AccessToken(TokenKind.VIEWER, viewer, now, now + body.for_s, issuer=issuer.key)
            await self._door.access_tokens.keep(word, token)
        return Issued(word, body.for_s)

    async def withdraw(self, request: Request) -> None:
        """Revoke all viewers' tokens of this session, and end the connections made with them."""
        session = root_of(request.path_params["session_id"])
        if self._door.access is not None:
            await owner_of(self._door, session)
            await self._door.access_tokens.withdraw_viewers(session)
        if _is_encrypted(request):
            assert self._host.locks is not None, "somebody holds it open"
            await self._host.locks.withdraw_viewers(session)
        if self._door.access is not None:
            await self._door.announce()
        self._door.recheck()


def _is_encrypted(request: Request) -> bool:
    held: SessionHold | None = request.scope.get(HELD)
    return held is not None and held.opened is not None
