"""A log of requests to providers and their answers: direction, size, status, the first bytes without secrets.

    MIDSTREAM_DEBUG_NETWORK=1 python app.py                              # on stderr
    logging.getLogger("midstream.network").setLevel(logging.DEBUG)       # through your own handlers

The bytes are those of prompts and answers. Headers are not logged, because they contain keys.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from midstream.observability.debug_output import NETWORK_LOGGER, show_enabled_lines

SHOWN_BYTES_MAX = 500
"""Bytes of a body, or of a piece of an answer, in a line."""
READ_BYTES_MAX = 4 * SHOWN_BYTES_MAX
"""Bytes that are searched for secrets: a secret may end after the shown bytes."""
SECRET_CHARS_MIN = 6
"""Shorter header values are not secrets, and would hide other text."""
REDACTED = "[redacted]"

_SECRETS = (
    re.compile(
        r"""("[^"]{0,40}(?:api[_-]?key|token|secret|password|authorization|credential)"\s*:\s*")"""
        r"""((?:[^"\\]|\\.){0,2000})""",
        re.IGNORECASE,
    ),
    re.compile(r"(\bBearer\s+)([\w.~+/=-]+)", re.IGNORECASE),
    re.compile(r"()\b((?:sk|pk|rk|ghp|gho|github_pat|xox[a-z])[-_][\w-]{8,}|AKIA[0-9A-Z]{16})"),
)
"""Fields with names of secrets, bearer tokens, and keys with known prefixes."""

_log = logging.getLogger(NETWORK_LOGGER)


class NetworkLog:
    """The log lines of one provider.

    Args:
        name: Its name in the lines.
        secrets: Values that no line may contain, such as its key.
    """

    def __init__(self, name: str, secrets: Iterable[str]) -> None:
        self._name = name
        self._secrets = sorted({each for each in secrets if len(each) >= SECRET_CHARS_MIN}, key=len)
        show_enabled_lines()

    def log_request(self, method: str, path: str, body: bytes) -> None:
        """Log a request."""
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s -> %s %s, %d bytes: %s", self._name, method, path, len(body), self._redact(body))

    def log_status(self, status: int) -> None:
        """Log the status of an answer."""
        _log.debug("%s <- status %d", self._name, status)

    def log_piece(self, piece: bytes) -> None:
        """Log a piece of an answer."""
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s <- %d bytes: %s", self._name, len(piece), self._redact(piece))

    def log_failure(self, error: BaseException) -> None:
        """Log the failure of an answer: only the kind of the error, because its text may contain an address."""
        _log.debug("%s <- broken: %s", self._name, type(error).__name__)

    def _redact(self, data: bytes) -> str:
        words = data[:READ_BYTES_MAX].decode("utf-8", "replace")
        for secret in reversed(self._secrets):
            words = words.replace(secret, REDACTED)
        for pattern in _SECRETS:
            words = pattern.sub(rf"\1{REDACTED}", words)
        is_cut = len(data) > READ_BYTES_MAX or len(words) > SHOWN_BYTES_MAX
        # A log entry has one line.
        shown = words[:SHOWN_BYTES_MAX].encode("unicode_escape").decode("ascii")
        return f"{shown}…" if is_cut else shown
