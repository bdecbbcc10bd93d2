"""The token file: one line for each token, with its principal and its rights.

    sha256:DIGEST SUBJECT [TENANT] [NAME=VALUE ...] [# comment]
    TOKEN SUBJECT [TENANT] ...

The first form has only the digest of the token; `midstream access add` writes such lines. The second form causes a
warning. `*` instead of a tenant means an operator. These settings may follow:

| setting | meaning |
| --- | --- |
| `expires=2027-01-31` | end of the token: a day (its beginning) or a time, in UTC |
| `scope=read,approve` | the permitted actions: `read`, `send`, `approve`, `own` |
| `sessions=NAME` or `sessions=PREFIX*` | the permitted sessions |
| `role=approver` | its principal reads all sessions of the tenant and answers their questions; `role=operator` is as
`*` |
| `added=2026-01-31T12:00:00Z` | time of writing; a new value ends all credentials derived from the token |

A file for a gateway's users cannot have `scope`, `sessions` and `role`. It may have limits of a user (`Allowance`):

| setting | meaning |
| --- | --- |
| `requests-per-minute=60`, `concurrent-requests=4` | answers that begin within a minute, or run concurrently |
| `tokens-per-day=100000`, `tokens-per-month=2000000` | input and output tokens |
| `budget-per-month=20` | cost of the tokens, if the prices of the model are known |
| `models=NAME,NAME` | the permitted models |
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import HTTPConnection
from typing_extensions import override

from midstream.dialects.api_callers import Allowance
from midstream.environment import World
from midstream.errors import UnavailableError, UsageError
from midstream.file_safety import read_secret_text
from midstream.server.auth.bearer_tokens import TOKEN_CHARS_MIN, bearer_token
from midstream.server.auth.credential_sources import CredentialSource
from midstream.server.auth.principals import Action, Principal, Scope

HASHED = "sha256:"
ROLES = ("approver", "operator")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAMES_MAX = 2
_FORM = "TOKEN SUBJECT [TENANT] [NAME=VALUE ...]"
_ALLOWANCES: Mapping[str, Callable[[str], Any]] = {
    "requests-per-minute": int,
    "concurrent-requests": int,
    "tokens-per-day": int,
    "tokens-per-month": int,
    "budget-per-month": float,
    "models": lambda words: tuple(filter(None, words.split(","))),
}
"""Parsers of the settings of `Allowance`, by name."""
_RIGHTS = frozenset({"scope", "sessions", "role"})
"""Settings about sessions of `midstream serve`."""
_log = logging.getLogger(__name__)


class TokenUse(Enum):
    """Kind of server that reads a token file, with the settings that it does not permit."""

    SERVE = frozenset(_ALLOWANCES)
    GATEWAY = _RIGHTS


class TokenLine(Struct, frozen=True):
    """One line of a token file.

    Args:
        digest: SHA-256 of the token, in hexadecimal digits.
        principal: Principal of the bearer, with the scope of the token.
        is_plain: Whether the line contains the token itself.
        settings: Names of its settings.
        allowance: Limits of a gateway's user; None without limits.
    """

    digest: str
    principal: Principal
    is_plain: bool
    settings: frozenset[str] = frozenset()
    allowance: Allowance | None = None


class KnownTokens(CredentialSource):
    """Principals by the digests of their tokens.

    Raises:
        UsageError: Some principals have a tenant and others do not.
    """

    def __init__(self, lines: Mapping[str, Principal], world: World | None = None) -> None:
        require_one_tenancy(lines.values())
        self._principals = lines
        self._sources = {principal.source for principal in lines.values()}
        self._world = world or World()

    @override
    async def __call__(self, connection: HTTPConnection) -> Principal | None:
        token = bearer_token(connection)
        return self.find(token) if token else None

    def find(self, token: str) -> Principal | None:
        """Return the principal of a token that has not expired, or None."""
        # A lookup by digest: its duration does not reveal how many characters are right.
        principal = self._principals.get(digest_of_token(token))
        return None if principal is None or self._has_expired(principal) else principal

    @override
    async def is_current(self, principal: Principal) -> bool:
        return principal.source in self._sources and not self._has_expired(principal)

    def _has_expired(self, principal: Principal) -> bool:
        return principal.expires_at is not None and principal.expires_at <= self._world.now()


class TokenFile(CredentialSource):
    """Authenticates by a token file, which is read again after a change.

    Args:
        use: Kind of the server.

    Raises:
        UsageError: The file cannot be read, belongs to another user, other users may read it, or a line is invalid.
        UnavailableError: By each later use, for the same reasons: such a file admits no client. The reason, which
            names the file, is in the log and not in the error, which clients receive.
    """

    def __init__(self, path: Path, world: World | None = None, *, use: TokenUse = TokenUse.SERVE) -> None:
        self._path = path
        self._world = world
        self._use = use
        self._lines: dict[str, TokenLine] = {}
        self._stamp = self._seen = _stamp_of(path)
        self._known = self._read()
        self._logged = ""
        """The last logged reason why the file cannot be used; "" while it can."""

    @override
    async def __call__(self, connection: HTTPConnection) -> Principal | None:
        return await self._current()(connection)

    @override
    async def is_current(self, principal: Principal) -> bool:
        return await self._current().is_current(principal)

    @override
    def has_changed(self) -> bool:
        try:
            stamp = _stamp_of(self._path)
        except UsageError:
            return True
        has_changed, self._seen = stamp != self._seen, stamp
        return has_changed

    def find(self, token: str) -> TokenLine | None:
        """Return the line of a token that has not expired.

        Raises:
            UnavailableError: The file is invalid; see above.
        """
        principal = self._current().find(token)
        return None if principal is None else self._lines[digest_of_token(token)]

    def _current(self) -> KnownTokens:
        try:
            stamp = _stamp_of(self._path)
            if stamp != self._stamp:
                self._known, self._stamp = self._read(), stamp
        except UsageError as error:
            if error.message != self._logged:
                self._logged = error.message
                _log.error("no client is admitted: %s", error.message)
            raise UnavailableError(
                "this server cannot read its token file; its operator must repair it"
            ) from error
        self._logged = ""
        return self._known

    def _read(self) -> KnownTokens:
        lines = read_token_file(self._path, self._use)
        plain = sum(line.is_plain for line in lines)
        if plain:
            _log.warning(
                "%d lines of %s hold tokens as text; replace them by digests: midstream access hash %s",
                plain,
                self._path,
                self._path,
            )
        self._lines = {line.digest: line for line in lines}
        return KnownTokens({line.digest: line.principal for line in lines}, self._world)


def read_token_file(path: Path, use: TokenUse = TokenUse.SERVE) -> list[TokenLine]:
    """Return the lines of a token file, without comments.

    Args:
        use: Kind of the server.

    Raises:
        UsageError: The file cannot be read, belongs to another user, other users may read it, or a line is invalid.
    """
    try:
        text = read_secret_text(path, "the tokens", is_named=True)
    except FileNotFoundError as error:
        raise UsageError(f"the tokens in {path} cannot be read: no such file") from error
    lines: list[TokenLine] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            parsed = parse_line(line)
        except UsageError as error:
            raise UsageError(f"line {number} of {path}: {error.message}") from error
        if parsed is not None and (strange := sorted(parsed.settings & use.value)):
            where = "gateway" if use is TokenUse.SERVE else "serve"
            raise UsageError(f"line {number} of {path}: {strange[0]!r} is for `midstream {where}` only")
        if parsed is not None:
            lines.append(parsed)
    if len({line.digest for line in lines}) < len(lines):
        raise UsageError(f"{path} contains a token twice; give each line its own token")
    return lines


def parse_line(line: str) -> TokenLine | None:
    """Parse a line; return None for an empty line or a comment.

    Raises:
        UsageError: The line is invalid. The message does not quote the token.
    """
    words = without_comment(line).split()
    if not words:
        return None
    settings = dict(each.partition("=")[::2] for each in words[2:] if "=" in each)
    names = [each for each in words[1:] if "=" not in each or each == words[1]]
    if not 1 <= len(names) <= _NAMES_MAX:
        raise UsageError(f"not of the form {_FORM}")
    is_plain = not words[0].startswith(HASHED)
    digest = digest_of_token(words[0]) if is_plain else words[0].removeprefix(HASHED)
    if is_plain and len(words[0]) < TOKEN_CHARS_MIN:
        raise UsageError(
            f"not of the form {_FORM}, with a token of at least {TOKEN_CHARS_MIN} characters; a shorter one "
            "can be guessed"
        )
    if not _DIGEST.fullmatch(digest):
        raise UsageError(f"{HASHED} must be followed by 64 hexadecimal digits")
    principal = _principal_of(names[0], "".join(names[1:]), settings)
    # A changed line is a new source: credentials that were derived from the old one end.
    identity = " ".join((digest, *sorted(words[1:])))
    source = f"line:{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}"
    return TokenLine(
        digest,
        replace(principal, source=source),
        is_plain,
        frozenset(settings),
        allowance_of({name: value for name, value in settings.items() if name in _ALLOWANCES}),
    )


def allowance_of(settings: Mapping[str, str]) -> Allowance | None:
    """Return the limits in the settings of a line; None without limits.

    Raises:
        UsageError: A limit is not a number above 0.
    """
    values = {}
    for name, words in settings.items():
        try:
            value = _ALLOWANCES[name](words)
        except ValueError:
            value = 0
        if not value or (not isinstance(value, tuple) and not 0 < value < float("inf")):
            raise UsageError(f"{name}={words} is not a limit; write a number above 0, or remove the setting")
        values[name.replace("-", "_")] = value
    return Allowance(**values) if values else None


def without_comment(line: str) -> str:
    """Return a line without its comment, which begins with `#` at the start of a word."""
    return re.split(r"(?:^|\s)#", line, maxsplit=1)[0]


def digest_of_token(token: str) -> str:
    """Return the digest of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def require_one_tenancy(principals: Iterable[Principal]) -> None:
    """Require that all principals except operators have a tenant, or none has one.

    Raises:
        UsageError: Some have one. A principal without a tenant could use session names of a tenant.
    """
    people = [each for each in principals if not each.is_operator]
    without = [each.id for each in people if not each.tenant]
    if without and len(without) < len(people):
        raise UsageError(
            f"{without[0]!r} has no tenant and others have one; give every principal a tenant, or none"
        )


def _principal_of(subject: str, tenant: str, settings: Mapping[str, str]) -> Principal:
    known = ["expires", "scope", "sessions", "role", "added", *_ALLOWANCES]
    unknown = sorted(settings.keys() - {*known})
    if unknown:
        raise UsageError(f"unknown setting {unknown[0]!r}; known are {', '.join(known)}")
    role = settings.get("role", "")
    if role and role not in ROLES:
        raise UsageError(f"unknown role {role!r}; known are {' and '.join(ROLES)}")
    is_operator = tenant == "*" or role == "operator"
    actions = tuple(Action)
    if "scope" in settings:
        try:
            actions = tuple(Action(each) for each in settings["scope"].split(","))
        except ValueError as error:
            raise UsageError(f"a scope is a list of {', '.join(Action)}") from error
    return Principal(
        subject,
        tenant="" if tenant == "*" else tenant,
        expires_at=_time_of(settings["expires"]) if "expires" in settings else None,
        is_operator=is_operator,
        is_approver=role == "approver",
        scope=Scope(actions, settings.get("sessions", "*")),
    )


def _time_of(words: str) -> float:
    try:
        time = datetime.fromisoformat(words)
    except ValueError as error:
        raise UsageError(f"{words!r} is not a time; write 2027-01-31 or 2027-01-31T12:00:00Z") from error
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _stamp_of(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(f"the tokens in {path} cannot be read: {error.strerror}") from error
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode, found.st_uid
