"""Callers, and their actions on a session: the terms of access, shared by all that judges it."""

from __future__ import annotations

import re
from enum import StrEnum

from msgspec import Struct

from midstream.errors import UsageError

_TENANT = re.compile(r"[A-Za-z0-9_-]{0,64}", re.ASCII)
ID_CHARS_MAX = 256
"""Characters of a principal's id: an e-mail address, an issuer's principal."""


class Action(StrEnum):
    """Action on a session."""

    READ = "read"
    """Look at it, follow it."""
    SPEAK = "speak"
    """Say something, answer, stop, take back, resume; begin it."""
    OWN = "own"
    """Delete it, and decide who may look."""


class Principal(Struct, frozen=True):
    """An authenticated user or program.

    Args:
        id: Their name, unique within the tenant.
        tenant: Whose sessions they can see at all: letters, digits, `-` and `_`, 64 at most. Give one to every
            principal or to none.
        expires_at: When their credential ends, in seconds since 1970: their streams end then.
        is_operator: Runs this server: may do everything, also with sessions without an owner.
        session: The only session they may look at, and no more than that: who shows a viewer's pass.
        claim: Which of the sessions that had this name one after the other, as `Owner.claim` names it; "" for any.
        via: Digest of the cookie or pass of ours that they showed; "" for any other credential.

    Raises:
        UsageError: The id is empty or longer than 256 characters, or the tenant has another form.
    """

    id: str
    tenant: str = ""
    expires_at: float | None = None
    is_operator: bool = False
    session: str = ""
    claim: str = ""
    via: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.id) <= ID_CHARS_MAX or not _TENANT.fullmatch(self.tenant):
            raise UsageError(
                f"a principal has an id of 1 to {ID_CHARS_MAX} characters, a tenant of 64 letters, digits, '-', '_'"
            )

    @property
    def key(self) -> str:
        """Key that identifies the principal, the tenant first."""
        return f"{self.tenant}:{self.id}"


OPERATOR = Principal("operator", is_operator=True)
"""The person who runs a server without other users."""
