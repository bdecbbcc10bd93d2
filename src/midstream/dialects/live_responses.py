"""Responses in progress or recently ended: their readers in this process, and their cancellation.

A response is in its session's journal, independent of connections: every reader receives it from the beginning. Without
a reader, it continues for a grace period, because a client with a broken connection retries within seconds. Then it is
stopped, unless it is a background response.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from midstream.dialects.application_sessions import REPEATABLE_S, ApplicationSessions, FoundResponse
from midstream.dialects.conversation_index import ConversationPlace
from midstream.dialects.dialect import Dialect, Form
from midstream.dialects.dialect_registry import find_dialect
from midstream.dialects.projection import Projection
from midstream.dialects.request_repeats import KnownRun, Request
from midstream.dialects.stored_conversations import Conversations
from midstream.environment import World
from midstream.errors import MidstreamError, OverloadedError
from midstream.history.messages import Response
from midstream.session.applications import ApplicationResponse
from midstream.session.records import TurnStatus
from midstream.session.turn.commands import Cancel
from midstream.session.turn.states import AwaitingModel

GRACE_S = 5.0
"""Seconds for which a response continues without a reader. SDKs retry after 0.5 to 8 s, mostly below 2 s. A person who
pressed "stop" looks the same, and pays for these seconds."""
KEPT_S = REPEATABLE_S
REPEATED_S = 5.0
"""Seconds after the end of a response in which an equal request of the same named conversation gets that response. The
last bytes may have been lost, and Codex and Claude Code do not mark retries. A person who requests another answer takes
longer."""
FAILED_S = 30.0
"""Seconds after the failure of a response in which an equal request gets that failure: clients that ignore
`x-should-retry` retry within this time. A later request counts as a new request of a person."""
CHECK_S = 2.0
"""Seconds between two checks of responses that another process began; see `LiveResponses.tend`."""
OPEN_MAX = 1000
"""Greatest number of responses in progress."""

_log = logging.getLogger(__name__)


class LiveResponse:
    """One response, and its readers in this process.

    Args:
        sessions: The sessions to which it belongs.
        found: The response in its journal.
        conversations, place: Index and place that identify the conversation by its messages; `place` is None if it has
            a name.
    """

    def __init__(
        self,
        sessions: ApplicationSessions,
        found: FoundResponse,
        conversations: Conversations,
        place: ConversationPlace | None,
    ) -> None:
        self.sessions = sessions
        self.found = found
        self.left_at = 0.0
        """Time at which its last reader left, in seconds since 1970; 0 before."""
        self.readers = 0
        self.is_delivered = False
        """Whether a client's connection has taken its last byte."""
        self.grace: asyncio.Task[None] | None = None
        self.marking = asyncio.Lock()
        """Held while the other nodes are notified of readers here."""
        self._conversations = conversations
        self.place = place
        """Place in the index of conversations. A response that was found by its id has none until it is repeated."""
        self._settled: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """Id of the response."""
        return self.found.response.id

    @property
    def dialect(self) -> Dialect:
        """Dialect of the request."""
        return find_dialect(self.found.form.dialect)

    @property
    def response(self) -> ApplicationResponse:
        """The newest known state; a sleeping session has no open response."""
        runner = self.sessions.host.awake.get(self.found.session)
        known = None if runner is None else runner.state.application.response(self.found.response.number)
        return known or self.found.response

    @property
    def is_open(self) -> bool:
        """Whether it is in progress."""
        return self.sessions.host.awake.get(self.found.session) is not None and self.response.is_open

    @property
    def has_begun(self) -> bool:
        """Whether the upstream has sent something of it."""
        runner = self.sessions.host.awake.get(self.found.session)
        turn = None if runner is None else runner.state.turn
        return self.response.has_begun or (isinstance(turn, AwaitingModel) and bool(turn.deltas))

    def projection(self, form: Form, *, shows_upstream_calls: bool) -> Projection:
        """Return a new projection of its records for one reader."""
        return Projection(self.dialect, form, self.found.response, shows_upstream_calls=shows_upstream_calls)

    async def settle(self, model_response: Response | None, world: World) -> None:
        """Store the conversation's new digest, before the end of the response is sent.

        For sessions in memory, also count the usage.
        """
        if not self.sessions.is_durable and self.sessions.count_usage is not None:
            await self.sessions.count_usage(self.found.session)
        if self._settled is None:
            if self.place is None or model_response is None:
                return
            keeping = self._conversations.add_response(
                self.found.request.conversation, self.place, model_response
            )
            self._settled = world.spawn(keeping, name="settle")
        await asyncio.shield(self._settled)

    async def cancel(self) -> None:
        """Cancel the response, unless it has ended."""
        if not self.is_open:
            return
        runner = await self.sessions.host.session(self.found.session)
        await runner.submit(Cancel(self.found.response.turn))


class LiveResponses:
    """All responses of this process that are in progress or recently ended."""

    def __init__(self, world: World, conversations: Conversations, *, grace_s: float) -> None:
        self._world = world
        self._conversations = conversations
        self._grace_s = grace_s
        self._by_id: dict[str, LiveResponse] = {}
        self._open: set[str] = set()
        self._marks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        self._open = {each for each in self._open if each in self._by_id and self._by_id[each].is_open}
        return len(self._open)

    def count_open(self) -> Counter[str]:
        """Return the number in progress for each principal; see `ApiCaller`."""
        lives = (self._by_id[each] for each in self._open if each in self._by_id)
        return Counter(
            live.found.request.principal for live in lives if live.found.request.principal and live.is_open
        )

    def all(self) -> list[LiveResponse]:
        """Return all responses in the order of their beginning."""
        return list(self._by_id.values())

    def get(self, response_id: str) -> LiveResponse | None:
        """Return a response by its id, or None."""
        return self._by_id.get(response_id)

    def refuse_too_many(self) -> None:
        """Require that fewer than `OPEN_MAX` responses are in progress.

        Raises:
            OverloadedError: The limit is reached.
        """
        if len(self._open) >= OPEN_MAX and len(self) >= OPEN_MAX:
            raise OverloadedError(
                f"this gateway already runs {OPEN_MAX} responses; retry later", retry_after_s=1.0
            )

    def add(
        self, sessions: ApplicationSessions, found: FoundResponse, place: ConversationPlace | None
    ) -> LiveResponse:
        """Add a response of a journal, if new, and return it."""
        self._delete_old()
        known = self._by_id.get(found.response.id)
        if known is None:
            known = LiveResponse(sessions, found, self._conversations, place)
            self._by_id[known.id] = known
            self._open.add(known.id)
        if known.place is None:  # it was found by its id
            known.place = place
        return known

    def is_used(self, response_id: str) -> bool:
        """Whether a client reads a response here, or has received it here to its end."""
        live = self._by_id.get(response_id)
        return live is not None and (live.readers > 0 or live.is_delivered)

    def describe_run(self, response: ApplicationResponse, *, is_named: bool, is_used: bool) -> KnownRun:
        """Return the facts that decide whether a request repeats the one of this response.

        Args:
            is_used: Whether a client reads it, or has received it to its end, at any node.
        """
        live = self._by_id.get(response.id)
        readers = live.readers if live else 0
        is_left = not (is_used or response.is_background)
        is_failed = response.status not in (None, TurnStatus.COMPLETED)
        since_s = self._world.now() - response.ended_at
        request = Request(bytes.fromhex(response.digest), response.key, is_retry=False, is_named=is_named)
        return KnownRun(
            request,
            is_left=is_left,
            has_readers=readers > 0,
            at=response.at,
            is_failed=is_failed,
            is_failed_lately=response.status is TurnStatus.FAILED and since_s < FAILED_S,
            is_completed_lately=response.status is TurnStatus.COMPLETED and since_s < REPEATED_S,
        )

    def repeatable(self, responses: Sequence[ApplicationResponse]) -> list[ApplicationResponse]:
        """Return responses that an equal request may join: open ones, and recently ended ones.

        A response that failed before its upstream sent anything is excluded.
        """
        until = self._world.now() - KEPT_S
        return [
            each
            for each in responses
            if each.is_open
            or (each.ended_at >= until and (each.status is TurnStatus.COMPLETED or each.has_begun))
        ]

    def join(self, live: LiveResponse) -> None:
        """Add a reader."""
        live.readers += 1
        self._mark_soon(live)
        if live.grace is not None:
            live.grace.cancel()
            live.grace = None

    def leave(self, live: LiveResponse) -> None:
        """Remove a reader; the last one starts the grace period."""
        live.readers -= 1
        live.left_at = self._world.now()
        self._mark_soon(live)
        if not live.readers and live.is_open and not live.found.form.is_background:
            live.grace = self._world.spawn(self._stop_later(live), name=f"grace of {live.id}")

    def _mark_soon(self, live: LiveResponse) -> None:
        """Notify the other nodes, in a task, whether this node has readers, and the next process of the delivery."""
        is_first_or_last = live.readers <= 1 and live.sessions.host.has_peers
        if (is_first_or_last or live.is_delivered) and not live.found.form.is_background:
            task = self._world.spawn(self._mark(live), name=f"readers of {live.id}")
            self._marks.add(task)
            task.add_done_callback(self._marks.discard)

    async def _mark(self, live: LiveResponse) -> None:
        marks, host = live.sessions.marks, live.sessions.host
        async with live.marking:
            try:
                if live.is_delivered and live.sessions.is_durable:
                    await marks.note_delivered(live.id)
                if live.readers > 0 and host.has_peers:
                    await marks.add(live.id, host.awake.get(live.found.session))
                elif host.has_peers:
                    await marks.remove(live.id)
            except MidstreamError as error:
                _log.warning("readers are not announced: %s", error.code, extra={"response": live.id})

    async def tend(self, sessions: ApplicationSessions) -> None:
        """Check the responses that another process began periodically, until cancelled.

        Those that this process continues are counted. Those that no process can continue are stopped, if they have
        readers here: a node may have died after the last request for them.
        """
        await sessions.host.wait_for_recovery()
        while True:
            try:
                for found in await sessions.find_continued(self._by_id):
                    self.add(sessions, found, None)
            except MidstreamError as error:
                _log.warning("responses of other processes are not counted: %s", error.code)
            for live in [each for each in self.all() if each.readers]:
                await self._stop_foreign(live)
            await self._world.sleep(CHECK_S)

    async def _stop_foreign(self, live: LiveResponse) -> None:
        runner = live.sessions.host.awake.get(live.found.session)
        if runner is None:
            return
        try:
            await live.sessions.stop_foreign(runner)
        except MidstreamError as error:
            _log.warning("a response is not stopped: %s", error.code, extra={"response": live.id})

    async def stop(self) -> None:
        """Cancel all grace periods."""
        graces = [each.grace for each in self._by_id.values() if each.grace is not None]
        tasks = [*graces, *self._marks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop_later(self, live: LiveResponse) -> None:
        await self._world.sleep(self._grace_s)
        live.grace = None
        if not live.readers:
            try:
                if not await live.sessions.is_read_elsewhere(live.id):  # that node has its own grace period
                    await live.cancel()
            except MidstreamError as error:
                _log.warning("a response is not stopped: %s", error.code, extra={"response": live.id})

    def _delete_old(self) -> None:
        until = self._world.now() - KEPT_S
        gone = []
        for live in self._by_id.values():
            if live.readers or live.is_open:
                continue
            if live.left_at > until:
                break
            gone.append(live.id)
        for response_id in gone:
            del self._by_id[response_id]
            self._open.discard(response_id)
