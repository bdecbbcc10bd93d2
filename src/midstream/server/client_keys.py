"""The API key of a gateway, and the limit of wrong keys."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Scope

from midstream.dialects.api_errors import RATE_LIMIT_EXCEEDED, RATE_LIMITED, ApiError
from midstream.dialects.gateway_bodies import RefusedError, check_token
from midstream.environment import World
from midstream.errors import LimitReachedError, UsageError
from midstream.server.limits import Limits, Rate, counted_address

KEY_CHARS_MIN = 16
"""Minimum length of a gateway's key: a shorter one can be guessed."""


class ClientKey:
    """A key of at least `KEY_CHARS_MIN` characters.

    An address may send `Limits.refusals_per_minute` wrong keys; more are refused with 429. The right key is always
    accepted, so other users of the address cannot lock its owner out.

    Raises:
        UsageError: The key is too short.
    """

    def __init__(self, key: str, world: World) -> None:
        if len(key) < KEY_CHARS_MIN:
            raise UsageError(
                f"the key of a gateway needs at least {KEY_CHARS_MIN} characters; a shorter one can be guessed"
            )
        self._key = key
        self.refusals = Rate(Limits().refusals_per_minute, "wrong keys", world)

    def check(self, headers: Mapping[str, str], scope: Scope) -> None:
        """Require the key in a request.

        Raises:
            RefusedError: The key is missing or wrong.
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
    """Return the address for which wrong keys are counted, also of this machine."""
    client = scope.get("client")
    host = client[0] if client else "unknown"
    return counted_address(host) or host
