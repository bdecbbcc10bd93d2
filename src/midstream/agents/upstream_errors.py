"""Classification of an upstream's failure: tables from its names, codes and texts to typed errors.

Agents report errors in prose, on stderr, or as errors of another process, and the prose changes with each version. So
it is matched by fragments. The rows come from these programs and from users' reports; a new failure is a new row. A
failure without a row is `UpstreamFailedError`.

The caller keeps the original text as the error's cause, or as a note on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelMissingError,
    ModelNotFoundError,
    ModelOverloadedError,
    ModelQuotaError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
)
from midstream.models.provider_errors import CODES as PROVIDER_CODES
from midstream.models.provider_errors import OVERFLOW_WORDS, REASON_CHARS_MAX, STATUSES, TYPES

_GONE = UpstreamGoneError
_BUSY = UpstreamBusyError
_FAILED = UpstreamFailedError
_LATER = ModelUnavailableError
_FULL = ModelOverloadedError
_RATE = ModelRateLimitedError
_STALL = ModelStalledError
_NEVER = ModelRejectedError
_ASK = ModelAccessError
_QUOTA = ModelQuotaError
_NO_MODEL = ModelNotFoundError
_FILTER = ModelFilteredError
_LONG = ContextOverflowError
_MISSING = ModelMissingError

NAMES: Mapping[str, type[ModelError]] = MappingProxyType(
    {
        # Claude: `AssistantMessage.error`, `ResultMessage.subtype`, `.terminal_reason`
        "authentication_failed": _ASK,
        "billing_error": _QUOTA,
        "rate_limit": _RATE,
        "invalid_request": _NEVER,
        "server_error": _LATER,
        "error_max_budget_usd": _QUOTA,
        "error_max_structured_output_retries": _FAILED,
        "prompt_too_long": _LONG,
        # OpenAI: responses and conversations kept there
        "previous_response_not_found": _GONE,
        "conversation_not_found": _GONE,
        "conversation_locked": _BUSY,
        # opencode, behind the Agent Client Protocol
        "providerautherror": _ASK,
        "contextoverflowerror": _LONG,
        # Cursor
        "agent_not_found": _GONE,
        "agentnotfound": _GONE,
        "agentnotfounderror": _GONE,
        "expired": _GONE,
        "agent_busy": _BUSY,
        "agentbusy": _BUSY,
        "agentbusyerror": _BUSY,
    }
)
"""Names and codes with which an upstream states its error exactly; compared in lower case."""

SIGNS: tuple[tuple[type[ModelError], tuple[str, ...]], ...] = (
    (
        _GONE,
        (
            # Claude Code
            "no conversation found",
            "not a uuid and does not match any session",
            "requires a valid session id",
            "no message found with message.uuid",
            # Codex
            "no rollout found",
            "rollout & is empty",
            "thread not found",
            "no thread found",
            # agents behind the Agent Client Protocol, Cursor, OpenAI
            "session not found",
            "session & does not exist",
            "session & expired",
            "session & no longer exists",
            "unknown session",
            "no such session",
            "invalid session id",
            "agent not found",
            "agent & does not exist",
            "conversation not found",
            "previous response & not found",
            "previous_response_not_found",
        ),
    ),
    (
        _BUSY,
        (
            # Claude Code: the session runs in its daemon, or another process is still leaving it
            "is running as a background",
            "currently running as a background",
            "session id & is already in use",
            # others
            "conversation_locked",
            "another process is currently operating on this conversation",
            "agent is busy",
            "agent busy",
            "session is busy",
            "session busy",
            "already processing",
            "already streaming",
            "prompt & already in progress",
            "prompt & already running",
            "turn & already in progress",
            "turn & in progress",
            "has an active run",
            "active run already",
            "another run",
        ),
    ),
    (_LONG, OVERFLOW_WORDS),
    (
        # The provider refuses the conversation itself, so that no message to this agent can succeed.
        _FAILED,
        (
            "tool_use ids were found without",
            "`tool_use` ids were found",
            "blocks in the latest assistant message cannot be modified",
            "invalid signature in thinking block",
            "no tool output found for function call",
            "no tool call found for function call output",
            "function call turn comes immediately after a user turn",
            "number of function response parts",
            "missing a thought_signature",
        ),
    ),
    (_NEVER, ("resume rejected by --resume-drops-turn",)),
    (
        _ASK,
        (
            "invalid api key",
            "incorrect api key",
            "run /login",
            "not logged in",
            "login required",
            "log in to continue",
            "authentication required",
            "authentication_error",
            "authentication failed",
            "not authenticated",
            "unauthenticated",
            "unauthorized",
            "oauth token",
            "organization has been disabled",
            "do not have access",
            "does not have access",
        ),
    ),
    (_QUOTA, ("credit balance is too low", "insufficient_quota", "quota exceeded & billing")),
    (_NO_MODEL, ("model & may not exist",)),
    (_FILTER, ("violate our usage policy", "content filter", "content_filter")),
    (
        _MISSING,
        (
            "command not found",
            "working directory does not exist",
            "failed to start claude code",
            "no such file or directory: &",
            "is not installed",
            "cannot find module",
            "exec format error",
        ),
    ),
    (
        _STALL,
        ("timed out", "timeout waiting", "deadline exceeded"),
    ),
    (
        _RATE,
        ("rate limit", "rate_limit", "usage limit", "hit your limit", "too many requests"),
    ),
    (_FULL, ("overloaded", "service unavailable")),
    (
        _LATER,
        (
            "internal server error",
            "bad gateway",
            "connection error",
            "connection refused",
            "connection reset",
            "connection closed",
            "network",
            "econnre",
            "enotfound",
            "etimedout",
            "fetch failed",
            "socket hang up",
            "getaddrinfo",
        ),
    ),
)
"""Fragments of prose, in the order in which they are tried; `&` stands for any text between its neighbours."""

_STATUS = re.compile(r"(?:api error:|unexpected status|last status:|status code:?) (\d{3})\b")
"""The provider's HTTP status, if a program reports it only in its text: Claude Code, Codex."""
_CODE = re.compile(r'"(?:code|type)": ?"(\w+)"')
"""A code in the provider's own error object, if a program passes it on as text."""
CHECK_ACCESS = " (check its login or key, its account and the name of its model; then resume the turn)"

_HINTS: Mapping[type[ModelError], str] = MappingProxyType(
    {
        _ASK: CHECK_ACCESS,
        _QUOTA: CHECK_ACCESS,
        _NO_MODEL: CHECK_ACCESS,
        _LONG: " (the conversation is longer than the model can read)",
        _FILTER: " (its content filter; another text may pass)",
    }
)


def kind_of(
    words: str, *, names: Iterable[object] = (), status: int | None = None
) -> type[ModelError] | None:
    """Return the error class of a failure, or None if no row matches. The most exact evidence decides: a name, then
    text about the conversation, then the HTTP status, then other text.

    Args:
        words: All texts of the failure: messages, stderr.
        names: Codes, types and subtypes that came with it, the most exact first.
        status: The HTTP status of the provider behind the upstream.
    """
    text = " ".join(words.lower().split())
    known = [str(name) for name in names if name is not None] + _CODE.findall(text)
    if status is None and (stated := _STATUS.search(text)) is not None:
        status = int(stated[1])
    for name in known:
        if name.lower() in NAMES:
            return NAMES[name.lower()]
    found = next((kind for kind, signs in SIGNS if any(_has(text, sign) for sign in signs)), None)
    if found in {_GONE, _BUSY, _LONG, _FAILED}:
        return found
    by_code = next((PROVIDER_CODES[name] for name in known if name in PROVIDER_CODES), None)
    if by_code is not None:
        return by_code
    if status is not None and status in STATUSES:
        return STATUSES[status]
    return found or next((TYPES[name] for name in known if name in TYPES), None)


def upstream_error(
    who: str,
    words: str,
    *,
    names: Iterable[object] = (),
    status: int | None = None,
    retry_after_s: float | None = None,
    unknown: type[ModelError] = UpstreamFailedError,
) -> ModelError:
    """Return the typed error for an upstream's failure, with the beginning of its text. Raise it from the original.

    Args:
        who: The upstream's name, for users.
        words, names, status: See `kind_of`.
        retry_after_s: The upstream's requested wait, in seconds.
        unknown: The class if no row matches.
    """
    kind = kind_of(words, names=names, status=status) or unknown
    reason = " ".join(words.split())[:REASON_CHARS_MAX] or "no reason was given"
    return kind(f"{who} failed: {reason}{_HINTS.get(kind, '')}", retry_after_s=retry_after_s)


def _has(text: str, sign: str) -> bool:
    at = 0
    for piece in sign.split("&"):
        found = text.find(piece.strip(), at)
        if found < 0:
            return False
        at = found + len(piece.strip())
    return True
