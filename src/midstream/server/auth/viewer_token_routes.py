"""Viewer tokens, which permit reading one session for a limited time.

On a server with authentication a viewer token is a credential; for an encrypted session it replaces the secret.
Clients send it as a bearer token or instead of the secret.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.requests import Request

from midstream.engine.escrow_locks import SessionHold
from midstream.engine.host import Host
from midstream.server.auth.access_routes import Issued, owner_of
from midstream.server.auth.caller import known_caller_of
from midstream.server.auth.issued_credentials import VIEWER_S_MAX, CredentialKind, StoredCredential
from midstream.server.auth.middleware import AuthMiddleware
from midstream.server.auth.principals import Principal
from midstream.server.auth.session_unlocking import HELD
from midstream.session.child_names import root_of


class ViewerRequest(Struct, forbid_unknown_fields=True):
    """Request for a viewer token, with its validity in seconds."""

    for_s: Annotated[float, Meta(ge=1, le=VIEWER_S_MAX)] = 3600.0


class ViewerRoutes:
    """Endpoints with which an owner lets others read a session."""

    def __init__(self, host: Host, auth: AuthMiddleware) -> None:
        self._host = host
        self._auth = auth

    async def issue_view(self, request: Request, body: ViewerRequest) -> Issued:
        """Issue a token that permits reading this session for a limited time."""
        session = root_of(request.path_params["session_id"])
        owner = None if self._auth.access is None else await owner_of(self._auth, session)
        if _is_encrypted(request):
            assert self._host.locks is not None, "the request holds the session open"
            token = await self._host.locks.escrow.share(session, for_s=body.for_s)
        else:
            token = self._host.world.new_id(CredentialKind.VIEWER.value)
        if owner is not None:
            issuer = known_caller_of(request.scope).principal
            name = f"viewer of {session}"
            viewer = Principal(name, tenant=owner.tenant, session=session, claim=owner.claim)
            viewer = replace(viewer, via=issuer.via, source=issuer.source, expires_at=issuer.expires_at)
            now = self._host.world.now()
            credential = StoredCredential(
                CredentialKind.VIEWER, viewer, now, now + body.for_s, issuer=issuer.key
            )
            await self._auth.credentials.keep(token, credential)
        return Issued(token, body.for_s)

    async def withdraw(self, request: Request) -> None:
        """Revoke all viewer tokens of this session, and end their connections."""
        session = root_of(request.path_params["session_id"])
        if self._auth.access is not None:
            await owner_of(self._auth, session)
            await self._auth.credentials.revoke_viewer_tokens(session)
        if _is_encrypted(request):
            assert self._host.locks is not None, "the request holds the session open"
            await self._host.locks.revoke_viewer_tokens(session)
        if self._auth.access is not None:
            await self._auth.announce()
        self._auth.recheck()


def _is_encrypted(request: Request) -> bool:
    held: SessionHold | None = request.scope.get(HELD)
    return held is not None and held.opened is not None
