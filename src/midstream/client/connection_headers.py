"""The headers of each connection of a client: the application's, or the ones that authenticate this user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from midstream.client.transports import require_headers
from midstream.errors import ConnectionLostError, MidstreamError, UnauthorizedError
from midstream.local_keys import headers_for

GivenHeaders = Mapping[str, str] | Callable[[], Mapping[str, str]]
"""Headers, or a function that returns them for each connection. It is called in a thread, and may wait."""


class ConnectionHeaders:
    """Headers that are found anew for each connection.

    Args:
        given: The application's headers. Where they have no `authorization`, this user's own credential is added.

    Raises:
        UsageError: A header cannot be sent.
    """

    def __init__(self, url: str, given: GivenHeaders) -> None:
        if not callable(given):
            require_headers(given)
        self._url = url
        self._given = given
        self._was_proved = False
        self._last = self._refused = ""
        """The newest credential, and the one that a server refused last."""

    async def __call__(self) -> Mapping[str, str]:
        """Return the headers of the next connection.

        Raises:
            UsageError: A header cannot be sent, or `MIDSTREAM_TOKEN` names no origin.
            UnauthorizedError: The server does not prove that it has the key of this user.
            ConnectionLostError: It does not, and did so before: another program has its port. The server may come back.
        """
        if not callable(self._given) and any(name.lower() == "authorization" for name in self._given):
            return self._given
        try:
            headers = await asyncio.to_thread(self._find)
        except MidstreamError as error:
            if not self._was_proved:
                raise
            raise ConnectionLostError(error.message) from error
        is_proved = "authorization" in headers
        if self._was_proved and not is_proved:
            raise ConnectionLostError(f"no server of this user answers at {self._url}")
        self._was_proved = is_proved
        self._last = next((value for name, value in headers.items() if name.lower() == "authorization"), "")
        return headers

    def explain(self, error: MidstreamError) -> MidstreamError:
        """Return what an error of a connection means for its stream.

        A refused credential may have ended with the start of its server, just before it was sent. So the first refusal
        of each is a lost connection, after which the credential is found anew. The second is final.
        """
        if not isinstance(error, UnauthorizedError) or not self._last or self._last == self._refused:
            return error
        self._refused = self._last
        return ConnectionLostError(error.message)

    def _find(self) -> Mapping[str, str]:
        given = self._given() if callable(self._given) else self._given
        if any(name.lower() == "authorization" for name in given):
            return given
        headers = {**headers_for(self._url), **given}
        require_headers(headers)
        return headers
