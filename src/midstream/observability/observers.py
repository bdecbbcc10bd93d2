"""Observers of the records that this process appends, for counters, spans and budgets.

The only source is the journal: each record is reported once, after its append, in order. Deltas are omitted: there are
a hundred of them for each other record, and the complete response follows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from midstream.session.records import Record, decode

_DELTA = b'{"type":"delta"'

_log = logging.getLogger(__name__)


class Observer(Protocol):
    """Receives appended records."""

    def on_append(self, session: str, records: Sequence[Record]) -> None:
        """Process the records of one append. Must not wait; exceptions are logged."""


@runtime_checkable
class Introduced(Protocol):
    """An observer that also needs the agent of a session, which no record has."""

    def answers(self, session: str, agent: str, model: str) -> None:
        """Process the names of the session's agent and of its model, such as `openai-responses:gpt-5`.

        Called before the first append to the session here, and again whenever it wakes. Must not wait.
        """


@runtime_checkable
class Charging(Protocol):
    """An observer that also needs the callers of turns whose commands came to another node."""

    def on_forwarded(self, session: str, caller: str) -> None:
        """Process the caller who is about to open a turn in a session of this process. Must not wait.

        Args:
            caller: The caller's name for counting.
        """


class Observers:
    """The observers of one process.

    Args:
        observers: The first observers; see `add`.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._all: list[Observer] = []
        self._introduced: list[Introduced] = []
        """Observers that need the agents of sessions."""
        for observer in observers:
            self.add(observer)

    def add(self, observer: Observer) -> None:
        """Add an observer."""
        self._all.append(observer)
        if isinstance(observer, Introduced):
            self._introduced.append(observer)

    def answers(self, session: str, agent: str, model: str) -> None:
        """Report the agent of a session to the observers that need it."""
        for observer in self._introduced:
            try:
                observer.answers(session, agent, model)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - see below
                _log_failure(session, error)

    def on_forwarded(self, session: str, caller: str) -> None:
        """Report the caller of a turn whose command came to another node, to the observers that need it."""
        for observer in self._all:
            if isinstance(observer, Charging):
                try:
                    observer.on_forwarded(session, caller)
                except (Exception, SystemExit) as error:  # noqa: BLE001 - see below
                    _log_failure(session, error)

    def on_append(self, session: str, bodies: Sequence[bytes]) -> None:
        """Report appended records to all observers."""
        if not self._all:
            return
        records = [decode(body) for body in bodies if not body.startswith(_DELTA)]
        if not records:
            return
        for observer in self._all:
            try:
                observer.on_append(session, records)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - an observer must not stop the observed work
                _log_failure(session, error)


def _log_failure(session: str, error: BaseException) -> None:
    # A traceback may contain text of the conversation.
    _log.error("an observer failed: %s", type(error).__name__, extra={"session": session})
