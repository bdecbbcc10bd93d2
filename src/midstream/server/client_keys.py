"""The key that a gateway's clients send, and the limit of wrong ones."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Scope

from midstream.dialects.api_errors import RATE_LIMIT_EXCEEDED, RATE_LIMITED, ApiError
from midstream.dialects.gateway_bodies import RefusedError, check_token
from midstream.environment import World
from midstream.errors import LimitReachedError, UsageError
from midstream.server.limits import Limits, Rate, counted_address

KEY_CHARS_MIN = 16
"""Shortest key of a gateway: a shorter one can be guessed."""


class ClientKey:
    """A key of at least `KEY_CHARS_MIN` characters.

    Each address may send so many wrong keys in a minute (`Limits.refusals_per_minute`); more are refused with 429. The
    right key passes at all times: other users of the address cannot lock its owner out.

    Raises:
        UsageError: The key is shorter, and could be guessed.
    """

    def __init__(self, key: str, world: World) -> None:
        if len(key) < KEY_CHARS_MIN:
            raise UsageError(
                f"the key of a gateway has {KEY_CHARS_MIN} characters at least; shorter ones can be guessed"
            )
        self._key = key
        self.refusals = Rate(Limits().refusals_per_minute, "wrong keys", world)

    def check(self, headers: Mapping[str, str], scope: Scope) -> None:
        """Let a request pass that shows the key.

        Raises:
            RefusedError: It shows none, or another one.
        """
        try:
            check_token(headers, self._key)
        except RefusedError as refused:
            address = _address_of(scope)
            try:
                self.refusals.count(address)
            except LimitReachedError as error:
                message = f"{error.message} came from this address; send the right key, or wait"
                limited = ApiError(
                    RATE_LIMITED, RATE_LIMIT_EXCEEDED, message, retry_after_s=error.retry_after_s
                )
                raise RefusedError(limited) from refused
            raise


def _address_of(scope: Scope) -> str:
    """Return the address that wrong keys are counted for; those of this machine are counted, too."""
    client = scope.get("client")
    host = client[0] if client else "unknown"
    return counted_address(host) or host
