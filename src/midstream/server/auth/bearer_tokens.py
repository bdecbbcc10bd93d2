"""The bearer token of a request."""

from __future__ import annotations

from starlette.requests import HTTPConnection

TOKEN_CHARS_MAX = 8192
TOKEN_CHARS_MIN = 16
"""Minimum length of a token from a file or an option: a shorter one can be guessed."""


def bearer_token(connection: HTTPConnection) -> str:
    """Return the bearer token of a request; "" if it has none or several."""
    values = connection.headers.getlist("authorization")
    scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    token = token.strip()
    return token if scheme.lower() == "bearer" and len(token) <= TOKEN_CHARS_MAX else ""
