"""The scripts: JSON files beside this module, one list of steps each, with the clauses they prove.

A script of the side `server` sends frames to a server and checks its answers; `server_side` runs it. One of the side
`client` is played to a client; `client_side` runs it against ours, and any other client can be tried in the same way.
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

KEPT_ELSEWHERE = "conformance"
"""Sessions that scripts open begin with this word."""


class Script(Struct, frozen=True, forbid_unknown_fields=True):
    """One story.

    Args:
        name: What is promised, as a sentence.
        clauses: Of `docs/spec/stream.md`.
        steps: One thing after the other; see the module that runs them.
        needs: What a server's transport must be: `websocket` (one connection both ways, which outlives the turn) or
            `requests` (each of which is answered); none for a story that every transport can play. What a client must
            do: `pipelining` (commands right behind its `open`).
    """

    name: str
    clauses: tuple[str, ...]
    steps: tuple[Json, ...]
    needs: tuple[str, ...] = ()

    def fits(self, way: TransportKind) -> bool:
        """Whether a transport can play it."""
        kind = "websocket" if way is TransportKind.WEBSOCKET else "requests"
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
