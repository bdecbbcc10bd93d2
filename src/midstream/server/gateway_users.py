"""Authentication at the gateway: by the gateway's own key, or by a user's key in a token file."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from starlette.types import Scope

from midstream.dialects.api_callers import ANYONE, UNLIMITED, ApiCaller
from midstream.dialects.gateway_bodies import keys_in
from midstream.environment import World
from midstream.errors import UnavailableError, UsageError
from midstream.server.auth.origins import check_origin
from midstream.server.auth.token_file import TokenFile, TokenUse
from midstream.server.client_keys import ClientKey
from midstream.server.node_reporting import FleetCounter

_log = logging.getLogger(__name__)


class GatewayUsers:
    """Users of a token file. The file is read again after a change; a missing file has no users.

    Raises:
        UsageError: The file cannot be read or is invalid.
    """

    def __init__(self, path: Path, world: World) -> None:
        self._path = path
        self._world = world
        self._file: TokenFile | None = None
        self._fault = ""
        self._read()

    def find(self, headers: Mapping[str, str]) -> ApiCaller | None:
        """Return the user with the key of a request, or None.

        While the file cannot be read, no user is admitted.
        """
        try:
            file = self._read()
            if file is None:
                return None
            for key in keys_in(headers):
                if (line := file.find(key)) is not None:
                    return ApiCaller(line.principal.name, line.allowance or UNLIMITED)
        except UnavailableError:
            return None  # the log has the reason
        except UsageError as error:
            if self._fault != error.message:
                _log.error("no user is admitted: %s", error.message)
            self._fault = error.message
        else:
            self._fault = ""
        return None

    def _read(self) -> TokenFile | None:
        if self._file is None and self._path.exists():
            self._file = TokenFile(self._path, self._world, use=TokenUse.GATEWAY)
        elif self._file is not None and not self._path.exists():
            self._file = None
        return self._file


class GatewayCallers:
    """All callers that may send requests.

    Args:
        key: The gateway's own key; None if no key is required.
        users: Users with keys of their own.
        allowed_origins: Origins whose pages may send requests without a key.
    """

    def __init__(
        self, key: ClientKey | None, users: GatewayUsers | None, allowed_origins: Collection[str]
    ) -> None:
        self._key = key
        self._users = users
        self._allowed_origins = allowed_origins

    @property
    def are_authenticated(self) -> bool:
        """Whether a key is required."""
        return self._key is not None

    @property
    def counters(self) -> dict[str, FleetCounter]:
        """Limits of all gateways of a store together, by name."""
        return {} if self._key is None else {"wrong_keys": self._key.refusals}

    def find(self, headers: Mapping[str, str], scope: Scope) -> ApiCaller:
        """Return the caller of a request.

        Raises:
            RefusedError: The key is missing or unknown, or the request comes from a page of another site.
        """
        if self._key is None:
            check_origin(scope, self._allowed_origins)
        elif self._users is not None and (caller := self._users.find(headers)) is not None:
            return caller
        else:
            self._key.check(headers, scope)
        return ANYONE
