"""Addresses of JetStream stores: servers, credentials and settings."""

from __future__ import annotations

import re
from typing import Self
from urllib.parse import parse_qsl, unquote

from msgspec import Struct

from midstream.errors import UsageError

NAME = "midstream"
"""Prefix of the streams if the address has none."""
STREAMS = 16
"""Streams over which sessions are spread, if the address has no number."""
STREAMS_MAX = 256
REPLICAS_MAX = 5
EXAMPLE = "nats://host:4222,host:4222,host:4222/?name=midstream&replicas=3"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}", re.ASCII)
_PARAMETERS = frozenset(
    ("name", "streams", "replicas", "sync", "monitor", "credentials", "ca", "tls", "store_key")
)


class JetStreamAddress(Struct, frozen=True):
    """The servers of a cluster, and the streams of the store in it.

    Args:
        servers: URLs of the servers, without credentials.
        user, password: Those of the account; "" if there is none, or a file has them.
        name: Prefix of the store's streams and subjects.
        streams: Streams over which sessions are spread; fixed when the store is created.
        replicas: Copies of each stream; 0 is 3 in a cluster and 1 on a single server. Fixed when the store is created.
        is_sync_required: Whether a server that does not sync each message is refused.
        monitors: URLs of the servers' monitoring ports, which show whether they sync.
        credentials: Path of a `.creds` file, or "".
        ca: Path of the certificates of the servers' authority, or "".
        is_tls: Whether the connection is encrypted.
        store_key: Path of the key that guards the store, the same on each machine; "" if it is not guarded.
    """

    servers: tuple[str, ...]
    user: str = ""
    password: str = ""
    name: str = NAME
    streams: int = STREAMS
    replicas: int = 0
    is_sync_required: bool = False
    monitors: tuple[str, ...] = ()
    credentials: str = ""
    ca: str = ""
    is_tls: bool = False
    store_key: str = ""

    @property
    def shown(self) -> str:
        """The address without the password, for messages and logs."""
        hosts = ",".join(server.partition("://")[2] for server in self.servers)
        return f"nats://{hosts}/?name={self.name}"

    def __repr__(self) -> str:
        return f"JetStreamAddress({self.shown!r})"

    @classmethod
    def parse(cls, address: str) -> Self:
        """Parse the part of a URL after `nats:`.

        Raises:
            UsageError: It is not a valid address.
        """
        if not address.startswith("//") or "#" in address:
            raise UsageError(f"a JetStream store is named {EXAMPLE!r}")
        place, _, rest = address[2:].partition("?")
        authority, at, hosts = place.rstrip("/").rpartition("@")
        if not hosts or "/" in hosts:
            raise UsageError(f"the URL of a JetStream store names its servers, and no path: {EXAMPLE!r}")
        try:
            given = dict(parse_qsl(rest, keep_blank_values=True, strict_parsing=True) if rest else [])
        except ValueError as error:
            raise UsageError(
                "what follows '?' in the URL of the store is not a list of parameters"
            ) from error
        if unknown := given.keys() - _PARAMETERS:
            known = ", ".join(sorted(_PARAMETERS))
            raise UsageError(f"a JetStream store has no parameter {min(unknown)!r}; known: {known}")
        name = given.get("name", NAME)
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"name {name!r}: a name has 1 to 48 of lower-case letters, digits and '_', and begins with a letter"
            )
        user, _, password = authority.partition(":") if at else ("", "", "")
        return cls(
            servers=tuple(f"nats://{host if ':' in host else f'{host}:4222'}" for host in hosts.split(",")),
            user=unquote(user),
            password=unquote(password),
            name=name,
            streams=_number(given, "streams", STREAMS, least=1, most=STREAMS_MAX),
            replicas=_number(given, "replicas", 0, least=1, most=REPLICAS_MAX),
            is_sync_required=_choice(given, "sync", ("warn", "required")) == "required",
            monitors=tuple(each for each in given.get("monitor", "").split(",") if each),
            credentials=given.get("credentials", ""),
            ca=given.get("ca", ""),
            is_tls=_choice(given, "tls", ("no", "yes")) == "yes" or "ca" in given,
            store_key=given.get("store_key", ""),
        )


def _number(given: dict[str, str], name: str, missing: int, *, least: int, most: int) -> int:
    if name not in given:
        return missing
    text = given[name]
    if not text.isdecimal() or not least <= int(text) <= most:
        raise UsageError(f"{name}={text!r} in the URL of the store: expected a number from {least} to {most}")
    return int(text)


def _choice(given: dict[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = given.get(name, choices[0])
    if value not in choices:
        raise UsageError(f"{name}={value!r} in the URL of the store: expected one of {', '.join(choices)}")
    return value
