"""Callers, and their actions on a session: the terms of access, shared by all that judges it."""

from __future__ import annotations

import re
from enum import StrEnum

from msgspec import Struct

from midstream.errors import UsageError
from midstream.session.child_names import root_of

_TENANT = re.compile(r"[A-Za-z0-9_-]{0,64}", re.ASCII)
ID_CHARS_MAX = 256
"""Characters of a principal's id: an e-mail address, an issuer's principal."""


class Action(StrEnum):
    """Action on a session."""

    READ = "read"
    """Read and follow it."""
    SPEAK = "speak"
    """Send a message, stop, withdraw, resume; begin it."""
    APPROVE = "approve"
    """Answer its questions: approvals, calls in doubt, questions of the model."""
    OWN = "own"
    """Delete it, and decide who may read it."""


class Scope(Struct, frozen=True):
    """Part of a principal's rights that one credential gives.

    Args:
        actions: What it permits; everything by default.
        sessions: The one session that it permits, or a prefix of names with `*` at its end. Names are the
            principal's own, without the tenant.
    """

    actions: tuple[Action, ...] = (*Action,)
    sessions: str = "*"

    def covers(self, session: str) -> bool:
        """Whether a session, as the principal names it, is in the scope; a sub-agent's is where its parent's is."""
        name = root_of(session)
        if self.sessions.endswith("*"):
            return name.startswith(self.sessions[:-1])
        return name == self.sessions


EVERYTHING = Scope()
"""The scope of a credential that gives all rights of its principal."""


class Principal(Struct, frozen=True):
    """An authenticated user or program.

    Args:
        id: Their name, unique within the tenant.
        tenant: Whose sessions they can see at all: letters, digits, `-` and `_`, 64 at most. Give one to every
            principal or to none.
        expires_at: When their credential ends, in seconds since 1970: their streams end then.
        is_operator: Runs this server: may do everything, also with sessions without an owner.
        session: The only session they may read, and no more than that: the bearer of a viewer's pass.
        claim: Which of the sessions that had this name one after the other, as `Owner.claim` names it; "" for any.
        via: Digest of the cookie or pass of this server that they sent; "" for any other credential.
        is_approver: May read all sessions of the tenant and answer their questions, and nothing else there.
        scope: What their credential permits of that.
        source: Name of the credential outside this server from which all others of this principal come, such as a line
            of a token file; "" where the application authenticates. What was issued for it ends with it.

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
    is_approver: bool = False
    scope: Scope = EVERYTHING
    source: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.id) <= ID_CHARS_MAX or not _TENANT.fullmatch(self.tenant):
            raise UsageError(
                f"a principal has an id of 1 to {ID_CHARS_MAX} characters, a tenant of 64 letters, digits, '-', '_'"
            )

    @property
    def key(self) -> str:
        """Key that identifies the principal, the tenant first."""
        return f"{self.tenant}:{self.id}"

    @property
    def name(self) -> str:
        """Name of the principal for people and logs: the id, with the tenant in front where there is one."""
        return self.key.removeprefix(":")


OPERATOR = Principal("operator", is_operator=True)
"""The person who runs a server without other users."""
