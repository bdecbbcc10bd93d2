"""Headers of a client's connections: those of the application, or the credential of this user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from midstream.client.transports import require_headers
from midstream.errors import ConnectionLostError, MidstreamError, UnauthorizedError
from midstream.local_keys import headers_for

GivenHeaders = Mapping[str, str] | Callable[[], Mapping[str, str]]
"""Headers, or a function that returns them for each connection. It is called in a thread, and may block."""


class ConnectionHeaders:
    """Determines the headers of each connection.

    Args:
        given: The application's headers. Without `authorization`, this user's own credential is added.

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
        """The newest credential, and the last refused one."""

    async def __call__(self) -> Mapping[str, str]:
        """Return the headers of the next connection.

        Raises:
            UsageError: A header cannot be sent, or `MIDSTREAM_TOKEN` has no origin.
            UnauthorizedError: The server does not prove that it has the key of this user.
            ConnectionLostError: The server proved it earlier, but does not now: another program uses its port.
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
        """Convert an error of a connection for its stream.

        A credential is valid for one start of its server, which may have ended. So the first refusal of a credential
        counts as a lost connection, and the next connection determines a new one. The second refusal is final.
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
