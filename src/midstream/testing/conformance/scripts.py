"""The scripts: JSON files beside this module, with lists of steps and the clauses that they prove.

A script of the side `server` sends frames to a server and checks its answers; `server_side` runs it. A script of the
side `client` tests a client: `client_side` runs it against midstream's own, `client_wire` against any other.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, Literal

import msgspec
from msgspec import Struct

from midstream.client.transport_selection import TransportKind

Json = dict[str, Any]
Side = Literal["server", "client"]

SESSION_PREFIX = "conformance"
"""Prefix of the ids of the sessions that scripts open."""


class Script(Struct, frozen=True, forbid_unknown_fields=True):
    """One script.

    Args:
        name: The tested behaviour, as a sentence.
        clauses: Clauses of `docs/spec/stream.md`.
        steps: The steps in order; see the module that runs them.
        needs: For a server, the kind of transport: `websocket` (one connection both ways, which outlives the turn) or
            `requests` (each of which is answered); empty for any. For a client: `pipelining` (commands directly after
            its `open`).
    """

    name: str
    clauses: tuple[str, ...]
    steps: tuple[Json, ...]
    needs: tuple[str, ...] = ()

    def fits(self, transport: TransportKind) -> bool:
        """Whether it can run over a transport."""
        kind = "websocket" if transport is TransportKind.WEBSOCKET else "requests"
        return not self.needs or kind in self.needs


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    about: str
    scripts: tuple[Script, ...]


@cache
def scripts(side: Side) -> tuple[Script, ...]:
    """Return all scripts of a side, in the order of their files' names."""
    folder = resources.files("midstream.testing.conformance") / "scripts" / side
    files = sorted(
        (each for each in folder.iterdir() if each.name.endswith(".json")), key=lambda each: each.name
    )
    return tuple(
        script for each in files for script in msgspec.json.decode(each.read_bytes(), type=_File).scripts
    )
