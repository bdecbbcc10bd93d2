"""Sessions of client applications: the session of a request, and the new part of its transcript."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from hashlib import blake2b

import msgspec
from msgspec import Struct

from midstream.dialects.conversation_index import is_kept_name, kept_name
from midstream.dialects.dialect import Form
from midstream.dialects.reader_marks import DELIVERED, READERS, ReaderMarks
from midstream.dialects.request_reading import Read
from midstream.engine.conversation import PAGE_RECORDS
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import (
    EntryMovedError,
    MidstreamError,
    SessionNotFoundError,
)
from midstream.history.messages import Entry
from midstream.session.application_request import ApplicationRequest
from midstream.session.applications import ApplicationResponse, Beginning, Comparison, EntryChain, compare
from midstream.session.journal_reading import JournalReader
from midstream.session.records import Record, TranscriptAccepted
from midstream.session.session import Session, evolve
from midstream.session.turn.commands import Cancel
from midstream.store.contract import STORE_FAILURES, KeyValueEntry

REQUESTS = "gateway-requests"
"""Namespace of entries for requests without a conversation name, by digest or idempotency key."""
REQUESTS_KEPT_S = 600.0
"""Seconds for which an entry is kept; clients retry within a minute."""
REPEATABLE_S = 60.0
"""Seconds for which an ended response answers an equal request: longer than the pauses between retries of any SDK."""
DELETED = "gateway-deleted"
"""Namespace of deleted responses whose session still exists."""
KEPT_CONVERSATIONS = "gateway-kept-conversations"
"""Namespace of the conversations of `/v1/conversations`."""
SWEEP_S = 60.0
CHAINS_MAX = 64
"""Sessions whose digests are kept in memory."""
SESSION_PREFIX = "gw-"
_SESSION_BYTES = 16
_NUMBER_DIGITS = 6
_log = logging.getLogger(__name__)


class FoundResponse(Struct, frozen=True):
    """A response in the journal of its session."""

    session: str
    response: ApplicationResponse
    request: ApplicationRequest
    form: Form


class NotedRequest(Struct, frozen=True):
    """An entry with the session of a request.

    Args:
        session: The session; "" without an entry.
        node: The node that makes the response.
        version: Version of the entry; 0 without one.
        at: Time of writing, as in `World.now`.
    """

    session: str = ""
    node: str = ""
    version: int = 0
    at: float = 0.0

    @staticmethod
    def read(entry: KeyValueEntry) -> NotedRequest:
        """Decode an entry of the store."""
        session, _, node = entry.body.decode().partition(" ")
        return NotedRequest(session, node, entry.version, entry.at)


class ApplicationSessions:
    """The sessions of client applications at one host.

    Args:
        host: Host of the sessions.
        label: Part of the session names, so that names of different client applications differ.
        is_durable: Whether the sessions survive the process.
    """

    def __init__(self, host: Host, world: World, label: str, *, is_durable: bool) -> None:
        self.host = host
        self.marks = ReaderMarks(host.store, world)
        self._label = label
        self.is_durable = is_durable
        self._world = world
        self.count_usage: Callable[[str], Awaitable[None]] | None = None
        """Counts the ended answers of a session; see `UsageCounting`."""
        self._chains: OrderedDict[str, EntryChain] = OrderedDict()

    def name_of(self, conversation: str) -> str:
        """Return the session name of a conversation; a new one for ""."""
        name = f"{self._label}\0{conversation or self._world.new_id('conversation')}"
        return (
            SESSION_PREFIX + blake2b(name.encode("utf-8", "replace"), digest_size=_SESSION_BYTES).hexdigest()
        )

    async def find_noted(self, key: str) -> NotedRequest:
        """Return the entry for a digest or an idempotency key; an empty one if it cannot be read."""
        try:
            kept = await self.host.store.kv_get(REQUESTS, key)
        except STORE_FAILURES as error:
            _log.warning("a repeated request cannot be looked up: %s", error.code)
            return NotedRequest()
        return NotedRequest() if kept is None else NotedRequest.read(kept)

    async def note(self, session: str, noted: dict[str, NotedRequest]) -> bool:
        """Store the session of a request; return False if an equal request at another process was faster.

        Args:
            noted: The entries to replace, by key; updated with the written ones.
        """
        store, now = self.host.store, self._world.now()
        body = f"{session} {store.node}".encode()
        for key, before in noted.items():
            try:
                version = await store.kv_put(REQUESTS, key, body, expected=before.version, at=now)
                noted[key] = NotedRequest(session, store.node, version, now)
            except EntryMovedError:
                return False
            except STORE_FAILURES as error:
                _log.warning("a request cannot be noted: %s", error.code)
        return True

    def compare(self, session: str, state: Session, read: Read) -> Comparison:
        """Compare a transcript with its session."""
        chain = self._chain(session, state)
        before, tail = read.before, read.tail
        if not chain.begins_with(before):
            before, tail = Beginning(), read.whole()
        return compare(chain, state.turn, before, tail)

    def compare_whole(self, session: str, state: Session, entries: Sequence[Entry]) -> Comparison:
        """Compare a transcript, given as entries, with its session."""
        return compare(self._chain(session, state), state.turn, Beginning(), entries)

    def _chain(self, session: str, state: Session) -> EntryChain:
        chain = self._chains.pop(session, EntryChain()).then(state.history)
        self._chains[session] = chain
        while len(self._chains) > CHAINS_MAX:
            self._chains.popitem(last=False)
        return chain

    def keep_chain(self, session: str, state: Session, links: tuple[bytes, ...]) -> None:
        """Cache the digests of a transcript that the session has just accepted."""
        if len(state.history.entries) == len(links):
            self._chains[session] = EntryChain(state.history.entries, links)

    async def find(self, response_id: str) -> FoundResponse | None:
        """Return a response by its id; None if it does not exist, or was deleted."""
        session = session_of_response(response_id)
        if not session:
            return None
        try:
            runner = await self.host.session(session)
        except SessionNotFoundError:
            return None
        await self.stop_foreign(runner)
        response = runner.state.application.response(int(response_id[-_NUMBER_DIGITS:]))
        if response is None or response.id != response_id:
            return None
        if await self.host.store.kv_get(DELETED, response_id) is not None:
            return None
        return await self.read(runner, response)

    async def read(self, runner: Runner, response: ApplicationResponse) -> FoundResponse | None:
        """Read the request of a response; return None if it was pruned."""
        stored = await runner.read(after=response.position - 1, limit=1)
        record = JournalReader().read(stored[0].body) if stored else None
        if not isinstance(record, TranscriptAccepted):
            return None
        return FoundResponse(
            runner.session_id, response, record.request, msgspec.convert(record.request.form, Form)
        )

    async def find_continued(self, known: Container[str]) -> list[FoundResponse]:
        """Return the open responses that this process continues, but another one began.

        Args:
            known: Ids of responses to leave out.
        """
        found: list[FoundResponse] = []
        for runner in [each for each in self.host.awake.runners.values() if each.has_lease]:
            newest = runner.state.application.newest
            if newest is None or not newest.is_open or newest.id in known:
                continue
            stored = await runner.read(after=newest.position - 1, limit=1)
            # A response of this epoch has just begun here, or its request was forwarded by the node that counts it.
            is_older = bool(stored) and stored[0].epoch < runner.state.epoch
            if is_older and (read := await self.read(runner, newest)) is not None:
                found.append(read)
        return found

    async def state_at(self, found: FoundResponse) -> Session | None:
        """Return the session state at the end of a response; None if it was pruned."""
        runner = await self.host.session(found.session)
        following = runner.state.application.response(found.response.number + 1)
        if following is None:  # the response is the newest
            return runner.state
        state, number = Session(), found.response.number
        async for epoch, record in self.records(runner, after=0, before=following.position):
            before = state.application.response(number)
            state = evolve(state, record, epoch=epoch)
            response = state.application.response(number)
            if response is None or response.is_open:
                continue
            # The records after the end already belong to the next request: the results that it sent, for example.
            is_end = (before is not None and before.is_open) or state.application.count == number
            return state if is_end else None
        return None

    async def records(
        self, runner: Runner, *, after: int, before: int | None = None
    ) -> AsyncIterator[tuple[int, Record]]:
        """Yield the records of a session after a position, each with its epoch."""
        reader = JournalReader()
        while page := await runner.read(after=after, limit=PAGE_RECORDS):
            for stored in page:
                if before is not None and stored.position >= before:
                    return
                yield stored.epoch, reader.read(stored.body)
            after = page[-1].position

    async def is_at_other_upstream(self, runner: Runner) -> bool:
        """Return whether a living node with another upstream has a session: it would answer the requests of this one.

        Raises:
            MidstreamError: The store fails.
        """
        agent = self.host.agent
        is_own = runner.state.is_agent(agent.name, agent.version)
        return not is_own and await self.host.store.is_held_elsewhere(runner.session_id)

    async def stop_foreign(self, runner: Runner) -> None:
        """Stop the open response of another upstream that no node runs: this gateway cannot continue it.

        Raises:
            MidstreamError: The store fails.
        """
        newest = runner.state.application.newest
        if newest is None or not (newest.is_open and runner.waits_for_agent):
            return
        if not await self.host.store.is_held_elsewhere(runner.session_id):
            await runner.submit(Cancel(newest.turn))

    async def _stop_foreign_before(self, until: float) -> None:
        """Stop responses of other upstreams that began long ago: their sessions would be kept for ever."""
        old = [info async for info in self.host.store.list(live=True) if info.mark.at < until]
        for info in old:
            if info.session.startswith(SESSION_PREFIX):
                try:
                    await self.stop_foreign(await self.host.session(info.session))
                except STORE_FAILURES:
                    raise
                except MidstreamError as error:
                    _log.warning("a response is not stopped: %s", error.code, extra={"session": info.session})

    async def delete(self, found: FoundResponse) -> None:
        """Delete a response: its session if it is the only one there, else only its id.

        A conversation of `/v1/conversations` keeps the items of its deleted responses.

        Raises:
            SessionBusyError: The response is still in progress.
        """
        runner = await self.host.session(found.session)
        if runner.state.application.count == 1 and not is_kept_name(found.request.conversation):
            await self.host.delete(found.session)
            return
        now = self._world.now()
        await self.host.store.kv_put(DELETED, found.response.id, b"", expected=0, at=now)

    async def is_read_elsewhere(self, response_id: str) -> bool:
        """Return whether another node has readers of a response; a dead node with readers also counts.

        Raises:
            MidstreamError: The store fails.
        """
        return self.host.has_peers and await self.marks.is_read_elsewhere(response_id)

    async def is_used_elsewhere(self, response: ApplicationResponse, runner: Runner) -> bool:
        """Return whether a client has received a response to its end, or reads it at another living node.

        Raises:
            MidstreamError: The store fails.
        """
        if self.host.has_peers:
            return await self.marks.is_used_elsewhere(response, runner)
        return await self.marks.was_delivered(response.id)

    async def tend(self, kept_s: float) -> None:
        """Remove old entries periodically, until cancelled."""
        while True:
            try:
                ages = {
                    REQUESTS: REQUESTS_KEPT_S,
                    DELETED: kept_s + SWEEP_S,
                    READERS: kept_s + SWEEP_S,
                    DELIVERED: REQUESTS_KEPT_S,
                    KEPT_CONVERSATIONS: kept_s + SWEEP_S,
                }
                for namespace, age_s in ages.items():
                    until = self._world.now() - age_s
                    for kept in await self.host.store.kv_list(namespace):
                        if kept.at < until and not await self._is_needed(namespace, kept):
                            await self.host.store.kv_delete(namespace, kept.key, expected=kept.version)
                await self._stop_foreign_before(self._world.now() - kept_s)
            except STORE_FAILURES as error:
                _log.warning("old entries were not removed: %s", error.code)
            await self._world.sleep(SWEEP_S)

    async def _is_needed(self, namespace: str, kept: KeyValueEntry) -> bool:
        """Return whether an old entry still applies to its session."""
        info = await self.host.store.find(self._session_of(namespace, kept))
        if info is None:
            return False
        if namespace in {DELETED, KEPT_CONVERSATIONS}:
            return True  # without it, the session would be found again, or found no more
        return info.mark.is_live or info.mark.at >= self._world.now() - REPEATABLE_S

    def _session_of(self, namespace: str, kept: KeyValueEntry) -> str:
        if namespace == REQUESTS:
            return NotedRequest.read(kept).session
        if namespace == KEPT_CONVERSATIONS:
            return self.name_of(kept_name(kept.key))
        return session_of_response(kept.key.partition(" ")[0])


def response_id(prefix: str, session: str, number: int) -> str:
    """Return the id of a response. It contains the session, so that any process can find it."""
    return f"{prefix}{session.removeprefix(SESSION_PREFIX)}{number:0{_NUMBER_DIGITS}d}"


def session_of_response(response_id: str) -> str:
    """Return the stored name of a response's session; "" for an invalid id."""
    name, _, ends = response_id.partition("_")
    place, number = ends[:-_NUMBER_DIGITS], ends[-_NUMBER_DIGITS:]
    is_id = bool(name and ends.isascii() and place.isalnum() and number.isdigit())
    return SESSION_PREFIX + place if is_id else ""
