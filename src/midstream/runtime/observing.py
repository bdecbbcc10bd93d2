"""What is told of every record that this process appends: for counters, spans and budgets.

There is one source, the journal: whatever was appended is told once, after it was appended, in its order, and nothing
else is. Words of a model on their way (`delta`) are left out: there are a hundred of them for each record that counts,
and the whole reply follows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from midstream.core.records import Record, decode

_DELTA = b'{"type":"delta"'

_log = logging.getLogger(__name__)


class Observer(Protocol):
    """Is told what was appended."""

    def appended(self, session: str, records: Sequence[Record]) -> None:
        """Take what was appended to a session in one transaction. Must not wait; what it raises is logged."""


class Observers:
    """Whoever is told."""

    def __init__(self) -> None:
        self._all: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Tell this one too, from now on."""
        self._all.append(observer)

    def appended(self, session: str, bodies: Sequence[bytes]) -> None:
        """Tell all of records that were appended."""
        if not self._all:
            return
        records = [decode(body) for body in bodies if not body.startswith(_DELTA)]
        if not records:
            return
        for observer in self._all:
            try:
                observer.appended(session, records)
            except Exception as error:  # noqa: BLE001 - who looks on must not stop what it looks at
                # A traceback could hold what was said.
                _log.error("an observer failed: %s", type(error).__name__, extra={"session": session})
