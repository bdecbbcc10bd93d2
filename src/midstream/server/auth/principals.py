"""Principals, actions on a session, and scopes of credentials."""

from __future__ import annotations

import math
import re
from enum import StrEnum

from msgspec import Struct

from midstream.errors import UsageError
from midstream.number_checks import require_number
from midstream.session.child_names import root_of

_TENANT = re.compile(r"[A-Za-z0-9_-]{0,64}", re.ASCII)
ID_CHARS_MAX = 256
"""Greatest length of a principal's id, such as an e-mail address."""


class Action(StrEnum):
    """Action on a session."""

    READ = "read"
    """Read and follow the session."""
    SEND = "send"
    """Send messages, stop, withdraw, resume; begin the session."""
    APPROVE = "approve"
    """Answer questions: approvals, calls in doubt, questions of the agent."""
    OWN = "own"
    """Delete the session, and share it with readers."""


class Scope(Struct, frozen=True):
    """Restriction of a credential to a part of its principal's rights.

    Args:
        actions: Permitted actions; all by default.
        sessions: The permitted session, or a prefix of names with `*` at its end. Names are without the tenant.
    """

    actions: tuple[Action, ...] = (*Action,)
    sessions: str = "*"

    def covers(self, session: str) -> bool:
        """Return whether a session (the principal's name) is in the scope. A sub-agent's session follows its parent."""
        name = root_of(session)
        if self.sessions.endswith("*"):
            return name.startswith(self.sessions[:-1])
        return name == self.sessions


EVERYTHING = Scope()
"""The scope of a credential that gives all rights of its principal."""


class Principal(Struct, frozen=True):
    """An authenticated user or program.

    Args:
        id: Id of the principal, unique within the tenant.
        tenant: Tenant, to whose sessions access is limited: at most 64 letters, digits, `-` and `_`. Give one to every
            principal or to none.
        expires_at: End of the credential and of its streams, in seconds since 1970.
        is_operator: Whether the principal has all rights on all sessions, also on those without an owner.
        session: For a viewer token: the only session, which the bearer may only read.
        claim: `Owner.claim` of `session`, which differs for a later session of this name; "" for any.
        via: Digest of the cookie or viewer token of this server that was sent; "" for any other credential.
        is_approver: Whether the principal may read all sessions of the tenant and answer their questions.
        scope: Restriction of the credential.
        source: Id of the credential from outside this server, such as a line of a token file; "" for an application's.
            Derived credentials end with it.

    Raises:
        UsageError: The id is empty or longer than 256 characters, the tenant is invalid, or `expires_at` is no number.
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
                f"a principal needs an id of 1 to {ID_CHARS_MAX} characters, and a tenant of at most 64 letters, "
                "digits, '-', '_'"
            )
        if self.expires_at is not None:
            require_number("expires_at", self.expires_at, "seconds since 1970", least=-math.inf)

    @property
    def key(self) -> str:
        """Key that identifies the principal, the tenant first."""
        return f"{self.tenant}:{self.id}"

    @property
    def name(self) -> str:
        """Name of the principal for people and logs: the id, after the tenant if there is one."""
        return self.key.removeprefix(":")


OPERATOR = Principal("operator", is_operator=True)
"""The operator of a server without other users."""
