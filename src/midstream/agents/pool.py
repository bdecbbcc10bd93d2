"""The pool: a model whose answers come from stateful upstream agents, and that never continues the wrong conversation.

The caller resends the whole conversation, as with any model. The pool finds out which part of it the upstream agent
has, and sends only the rest. A record in a key-value store describes the agent's conversation. It is written before a
message is sent (from then on the agent's state is uncertain), with the upstream's first event, and with its last one.
If the process is killed in between, the next turn sends the whole transcript to a fresh agent: one full replay is the
worst case. Pure functions decide: `agents/reuse_classification.py` about a request, `agents/agent_failures.py` about a
failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import cast

from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from midstream.agents import agent_failures, pool_records
from midstream.agents.agent_runs import AgentRun, PermissionRequests, SilenceLimits
from midstream.agents.attachments import with_readable_files
from midstream.agents.live_agents import LiveAgents
from midstream.agents.own_tool_calls import OwnCalls, place_of
from midstream.agents.pool_counters import PoolCounters
from midstream.agents.pool_entries import Found, PoolEntries
from midstream.agents.pool_records import PoolRecord
from midstream.agents.pool_turns import REBUILT_NOTE, End, PoolTurn, TurnReport
from midstream.agents.prior_transcript import TranscriptBudget, without_cut_answers
from midstream.agents.restarted_answers import Events, HeldRuns, JoinedAnswer
from midstream.agents.reuse_classification import (
    Fork,
    Fresh,
    RequestRelation,
    ResumeAgent,
    action,
    asides_of,
    classify,
)
from midstream.agents.upstreams import (
    ForkingUpstream,
    Marked,
    MessageDropped,
    MessageTaken,
    ResponseRestarted,
    Setup,
    Upstream,
    UpstreamAgent,
    UpstreamEvent,
    UpstreamMessage,
)
from midstream.engine.key_locks import KeyLocks
from midstream.environment import World
from midstream.errors import (
    EntryMovedError,
    ModelError,
    ModelRestartedError,
    UpstreamFailedError,
    UpstreamMismatchError,
)
from midstream.history.messages import Finish
from midstream.models.fingerprint import Chain, ConversationDigest, Outline
from midstream.models.fingerprint import outline as outline_of
from midstream.models.model import StoredModel
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    ModelRequest,
    ReuseReported,
    ThinkingDelta,
    ToolCallRequested,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)
from midstream.number_checks import require_count, require_number, require_seconds
from midstream.observability.debug_output import show_enabled_lines
from midstream.store.contract import STORE_FAILURES, KeyValue, Store
from midstream.store.memory import MemoryKeyValue
from midstream.tools.forwarded_servers import ForwardedMcpServer

CLAIMS_MAX = 8
"""Tries to claim a record with concurrent writers; then the turn continues without a record."""
CHAINS_MAX = 32
"""Conversations whose links are in memory, so that only new messages must be digested."""
REPORTS_MAX = 1000
"""Sessions whose last report is in memory."""

RETENTION_AGE_MIN_S = 60.0
"""Seconds of silence after which an agent's existence is an observation about the upstream's memory."""

Servers = Callable[[], Sequence[ForwardedMcpServer]]
"""Returns the client application's current MCP servers."""
OnTurn = Callable[[TurnReport], None]
"""Receives the report of each turn."""

_log = logging.getLogger(__name__)


class PoolLimits(Struct, frozen=True):
    """Limits of a pool.

    Args:
        live_max: Agents kept open in this process.
        rest_s: Seconds without a message after which an open agent is closed; the next message resumes it. None: as the
            upstream declares (`Abilities.rest_s`).
        memory_mib_max: MiB of memory of all agents of this process together, with their child processes; None for no
            limit. Beyond it idle agents are closed, the longest idle first. It applies to upstreams with a process for
            each agent (`Abilities.has_process`), on Linux.
        wait_s: Seconds that a turn waits for another one of its session here; then it continues with a fresh agent.
        silence: Limits for the silence of an agent.
        budget: Limits for the transcript that a fresh agent gets.
        record_age_max_s: Seconds that the record of a conversation is kept after its last use.
        records_max: Records that are kept, the most recently used first, of all pools that share the store.

    Raises:
        UsageError: A number is not positive.
    """

    live_max: int = 8
    rest_s: float | None = None
    wait_s: float = 10.0
    silence: SilenceLimits = SilenceLimits()
    budget: TranscriptBudget = TranscriptBudget()
    record_age_max_s: float = pool_records.RECORD_AGE_MAX_S
    records_max: int = pool_records.RECORDS_MAX
    memory_mib_max: float | None = None

    def __post_init__(self) -> None:
        require_count("live_max", self.live_max, least=1)
        require_count("records_max", self.records_max, least=1)
        for name in ("wait_s", "record_age_max_s"):
            require_seconds(name, getattr(self, name), most=math.inf, is_positive=True)
        if self.rest_s is not None:
            require_seconds("rest_s", self.rest_s, most=math.inf, is_positive=True)
        if self.memory_mib_max is not None:
            require_number("memory_mib_max", self.memory_mib_max, "MiB", is_positive=True)


class Pooled(StoredModel):
    """A model of upstream agents that keep their conversations: it reuses them and sends only what is new.

    A request without a session, or an ephemeral one, gets an agent of its own that is deleted afterwards.

    Args:
        upstream: The upstream, which is closed with the pool.
        kv: An open store for the records while no engine runs the pool. Several processes may share it. `Host`,
            `midstream serve` and the gateway use their own store instead, and close the pool with it. Without any store
            the records are in memory.
        limits: Limits of the pool.
        servers: Returns the client application's MCP servers, at each turn; for upstreams that accept them.
        on_turn: Called with the report of each turn, as in `Pooled.last`. Its exceptions are logged.
        world: Clock and ids.
    """

    def __init__(
        self,
        upstream: Upstream,
        kv: KeyValue | None = None,
        *,
        limits: PoolLimits = PoolLimits(),  # noqa: B008 - frozen
        servers: Servers | None = None,
        on_turn: OnTurn | None = None,
        world: World = World(),
    ) -> None:
        self._upstream = upstream
        self._limits = limits
        self._servers = servers
        self._on_turn = on_turn
        self._world = world
        self.counters = PoolCounters()
        """Results of all turns since this pool was created, for metrics."""
        self._engines = 0
        """Engines that run this pool now; the store of the first one has the records."""
        self._entries = self._entries_in(kv or MemoryKeyValue())
        self._private = self._entries_in(MemoryKeyValue())
        """Agents' own calls in conversations whose content may not be stored on disk."""
        self._live = LiveAgents(
            upstream,
            world,
            live_max=limits.live_max,
            rest_s=upstream.abilities.rest_s if limits.rest_s is None else limits.rest_s,
            close_s=limits.silence.close_s,
            memory_mib_max=limits.memory_mib_max,
        )
        self._locks = KeyLocks(world, wait_s=limits.wait_s)
        self._held = HeldRuns(world)
        self._chains: OrderedDict[str, Chain] = OrderedDict()
        self._reports: OrderedDict[str, TurnReport] = OrderedDict()
        show_enabled_lines()

    def _entries_in(self, kv: KeyValue) -> PoolEntries:
        return PoolEntries(
            kv,
            self._upstream.name,
            self._world,
            age_max_s=self._limits.record_age_max_s,
            records_max=self._limits.records_max,
            evictions=self.counters.evictions,
        )

    @property
    def name(self) -> str:
        """The upstream's name, for users."""
        return self._upstream.name

    @property
    def grants(self) -> frozenset[str]:
        """Names of the settings for an answer that the upstream accepts."""
        return self._upstream.abilities.grants

    @property
    def takes_tools(self) -> bool:
        """Whether the upstream can request the tools of its caller."""
        return self._upstream.abilities.takes_tools

    def last(self, session: str) -> TurnReport | None:
        """Return the report of a session's last turn in this process, or None if it is not in memory."""
        return self._reports.get(session)

    @override
    def begin_use(self, store: Store) -> None:
        self._engines += 1
        if self._engines == 1:
            self._entries = self._entries_in(store)

    @override
    async def end_use(self) -> None:
        self._engines -= 1
        if self._engines == 0:
            await self.aclose()

    async def aclose(self) -> None:
        """Close all agents and the upstream; running answers fail. A second call has no effect."""
        async with contextlib.AsyncExitStack() as closing:  # the upstream is closed also after a cancellation
            closing.push_async_callback(self._upstream.aclose)
            closing.push_async_callback(self._live.aclose)
            closing.push_async_callback(self._held.aclose)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Answer a request; see `Model.stream`. Closing the iterator stops the agent's run.

        Raises:
            ModelError: The agent failed. If a fresh one failed too, the first error is the cause of this one.
        """
        if self._is_stored_nowhere(request):  # so it cannot be continued there
            request = replace(request, is_ephemeral=True)
        chain = self._chains.get(request.session, Chain()).then(request.history)
        setup, outline = self._read(request, chain.digest)
        can_drop = bool(request.session) and not (request.is_resent or request.is_ephemeral)
        held = await self._held.take(request.session, outline) if can_drop else None
        events = held or self._stream(request, chain, setup, outline)
        joined = JoinedAnswer(can_drop=can_drop)
        is_held = False
        try:
            async for event in events:
                if isinstance(event, ResponseRestarted) and joined.is_droppable:
                    self._held.hold(request.session, outline, events)
                    is_held = True
                    raise ModelRestartedError(f"{self.name} lost its provider, and begins its response again")
                for each in joined.take(event):
                    yield each
        finally:
            if not is_held:
                await events.aclose()

    async def _stream(self, request: ModelRequest, chain: Chain, setup: Setup, outline: Outline) -> Events:
        is_ours = await self._may_enter(request, outline)
        try:
            turn = await self._begin(request, outline, setup, chain.digest)
            if turn.claim is not None:  # a side call replaces no other turn
                self._keep_links(request.session, chain)
            if is_ours and turn.claim is None:  # no turn needs to wait for a side call
                is_ours = False
                self._locks.leave(request.session)
            try:
                async with contextlib.aclosing(self._answer(turn)) as events:
                    async for event in events:
                        yield event
            except ModelError as error:
                turn.totals.end, turn.totals.error = End.FAILED, error.code
                raise
            finally:
                # The record must be corrected even if this task is cancelled, and before the session's next turn.
                settling = self._world.spawn(self._settle(turn), name="settle a turn")
                if is_ours:
                    is_ours = False
                    settling.add_done_callback(lambda _: self._locks.leave(request.session))
                await asyncio.shield(settling)
        finally:
            if is_ours:
                self._locks.leave(request.session)

    # --- decisions --------------------------------------------------------------------------------------------

    def _read(self, request: ModelRequest, conversation: ConversationDigest) -> tuple[Setup, Outline]:
        abilities = self._upstream.abilities
        tools = request.tools if abilities.takes_tools else ()
        servers = self._servers() if abilities.takes_servers and self._servers is not None else ()
        setup = Setup(
            request.instructions,
            tools,
            tuple(sorted(servers, key=lambda server: server.name)),
            is_private=self._is_kept_out(request),
        )
        identity = self._upstream.identity
        return setup, conversation.outline(setup.instructions, setup.tools, setup.servers, identity)

    def _is_stored_nowhere(self, request: ModelRequest) -> bool:
        """Whether neither the provider nor a store of the upstream may have the conversation (`store: false`)."""
        is_unstored = request.settings.store is False and "store" in self._upstream.abilities.grants
        return is_unstored or self._is_kept_out(request)

    def _is_kept_out(self, request: ModelRequest) -> bool:
        """Whether the upstream's own store must not receive the conversation."""
        return request.is_private and self._upstream.abilities.stores_transcripts

    def _keep_links(self, session: str, chain: Chain) -> None:
        """Store a conversation's links for its next turn."""
        self._chains.pop(session, None)
        self._chains[session] = chain
        while len(self._chains) > CHAINS_MAX:
            self._chains.popitem(last=False)

    async def _may_enter(self, request: ModelRequest, outline: Outline) -> bool:
        """Wait for the session's other turn; return whether this turn has the session and must release it.

        False if the other turn takes too long, and for a side call.
        """
        session = request.session
        if not session or request.is_ephemeral:
            return False
        if self._locks.is_held(session):
            with contextlib.suppress(*STORE_FAILURES):
                found = await self._entries.find(session)
                if classify(found.record, outline).kind is RequestRelation.SIDE_CALL:
                    return False
        return await self._locks.enter(session)

    async def _begin(
        self, request: ModelRequest, outline: Outline, setup: Setup, conversation: ConversationDigest
    ) -> PoolTurn:
        """Classify a request and claim its record, unless it must leave no trace."""
        turn: PoolTurn | None = None
        try:
            if request.session and not request.is_ephemeral:
                turn = await self._claim(request, outline, setup)
        except STORE_FAILURES as error:
            _log.warning(
                "a turn continues without its record: %s", error.code, extra={"session": request.session}
            )
        if turn is None:
            judged = classify(None, outline, is_ephemeral=True)
            turn = PoolTurn(request, outline, judged, Fresh(is_pooled=False), setup, None)
        is_resumed = isinstance(turn.action, ResumeAgent)
        nonce = "" if is_resumed else self._world.new_id("agent")
        if request.is_resent and request.session and not request.is_ephemeral:
            turn.own_calls = OwnCalls(place_of(conversation))
            await self._read_calls(turn)
        turn.begin(nonce, self._upstream.abilities, self._limits.budget)
        return turn

    async def _read_calls(self, turn: PoolTurn) -> None:
        """Read the stored own calls of agents, for an agent without them."""
        if turn.own_calls is not None:
            with contextlib.suppress(*STORE_FAILURES):
                session, target = turn.request.session, self._calls_of(turn.request)
                other = self._entries if target is self._private else self._private
                turn.kept_calls = await other.calls(session) + await target.calls(session)

    async def _keep_calls(self, turn: PoolTurn, *, is_whole: bool = False) -> None:
        """Store an own call of the agent before it is published."""
        if turn.own_calls:
            with contextlib.suppress(*STORE_FAILURES):
                calls = turn.own_calls.collect(is_whole=is_whole)
                await self._calls_of(turn.request).keep_calls(turn.request.session, calls)

    def _calls_of(self, request: ModelRequest) -> PoolEntries:
        """Return the entries that may hold the agents' own calls, which have content."""
        return self._private if request.is_private else self._entries

    async def _claim(self, request: ModelRequest, outline: Outline, setup: Setup) -> PoolTurn | None:
        for _ in range(CLAIMS_MAX):
            found = await self._entries.find(request.session)
            now = self._world.now()
            judged = classify(found.record, outline)
            age_s = 0.0 if found.record is None else max(0.0, now - found.record.used_at)
            is_open = found.record is not None and self._live.has(setup, found.record.agent)
            is_of_interest = age_s >= RETENTION_AGE_MIN_S or (found.record is not None and not is_open)
            learned = await self._entries.retention() if is_of_interest else None
            uncut = self._find_uncut(request, setup) if found.record is not None else None
            doing = action(
                judged,
                outline,
                found.record,
                self._upstream.abilities,
                age_s=age_s,
                limit_s=None if learned is None or age_s < RETENTION_AGE_MIN_S else learned.limit_s(now=now),
                is_verifiable=is_open or learned is None or not learned.never_echoes(now=now),
                uncut=uncut,
            )
            if isinstance(doing, Fresh) and not doing.is_pooled:
                try:
                    await self._entries.note_aside(request.session, found, outline)
                except EntryMovedError:
                    continue
                return PoolTurn(request, outline, judged, doing, setup, None)
            try:
                record = replace(
                    self._create_record(doing, found, outline, now), asides=asides_of(judged, found.record)
                )
                claim = await self._entries.claim(request.session, found, record)
            except EntryMovedError:
                continue
            turn = PoolTurn(request, outline, judged, doing, setup, claim)
            self._take_over(turn, found.record, age_s)
            turn.unneeded.add(found.expired_agent)
            return turn
        return None

    def _find_uncut(self, request: ModelRequest, setup: Setup) -> Outline | None:
        """Return the outline without the cut answers at the end, if there are some and forks can start before them."""
        history = without_cut_answers(request.history)
        if history is request.history or not self._upstream.abilities.can_fork:
            return None
        identity = self._upstream.identity
        return outline_of(setup.instructions, setup.tools, setup.servers, identity, history)

    def _create_record(
        self, doing: ResumeAgent | Fork | Fresh, found: Found, outline: Outline, now: float
    ) -> PoolRecord:
        """Return the record for an agent that is about to receive a message."""
        match doing:
            case ResumeAgent():
                assert found.record is not None
                return pool_records.create_resumed(found.record, outline, now=now)
            case Fork():
                assert found.record is not None
                return pool_records.create_fork(found.record, outline, doing.mark.users, now=now)
            case Fresh():
                return pool_records.create_fresh(outline, upstream=self._upstream.name, now=now)

    def _take_over(self, turn: PoolTurn, record: PoolRecord | None, age_s: float) -> None:
        """Record what happens to the previous agent of the record."""
        match turn.action:
            case ResumeAgent():
                turn.idle_s = age_s
            case Fresh(passed_over="stale" | "unechoed" as why):
                turn.totals.rebuilt = why
            case Fresh() if turn.judged.reason.field == "phase":
                turn.totals.rebuilt = "phase"
        if isinstance(turn.action, Fresh) and record is not None and not record.run:
            turn.unneeded.add(record.agent)

    # --- messages ---------------------------------------------------------------------------------------------

    async def _answer(self, turn: PoolTurn) -> Events:
        """Send the messages, with a fresh agent if the first one fails, and yield the answer to the last message."""
        while True:
            yield ReuseReported(turn.judgement())
            try:
                async with contextlib.aclosing(self._deliver(turn)) as events:
                    async for event in events:
                        yield event
            except ModelError as error:
                await self._begin_again(turn, error)
            else:
                return

    async def _deliver(self, turn: PoolTurn) -> Events:
        for outgoing in turn.delivery.sends:
            async with contextlib.aclosing(self._send(turn, outgoing)) as events:
                async for event in events:
                    if isinstance(event, ResponseRestarted):
                        if turn.delivery.is_last and turn.has_spoken:
                            yield event
                        continue
                    if turn.own_calls is not None and _is_shown(event, is_last=turn.delivery.is_last):
                        if turn.own_calls.add(event):
                            await self._keep_calls(turn)
                    if not turn.delivery.is_last:
                        if isinstance(event, Finished):
                            self._note_silent(turn, event)
                        if isinstance(event, UpstreamCallStarted | UpstreamCallEnded):
                            # the agent has acted: nothing may be repeated from now on (REUSE-79)
                            turn.has_spoken = True
                            yield event
                        else:
                            yield Working()
                        continue
                    if not isinstance(event, Working | KeepAlive):
                        if turn.totals.rebuilt and not turn.has_spoken:
                            yield ThinkingDelta(REBUILT_NOTE)
                        turn.has_spoken = True
                    if isinstance(event, ToolCallRequested):
                        turn.calls.append(event.id)
                    if isinstance(event, Finished):
                        event = await self._whole(turn, event)
                    yield event
            turn.delivery.delivered += 1

    def _note_silent(self, turn: PoolTurn, finished: Finished) -> None:
        """Count an answer that is not shown."""
        turn.totals.count(finished.usage)
        if finished.finish is not Finish.STOP:
            raise UpstreamFailedError(
                f"{self.name} did not finish the answer to an earlier one of several messages"
            )

    async def _whole(self, turn: PoolTurn, finished: Finished) -> Finished:
        """Release the record before the caller continues: the agent's state is certain now."""
        total = turn.totals.count(finished.usage)
        if isinstance(
            turn.action, ResumeAgent
        ):  # an id alone is no sign of life: some agents send it and then fail
            await self._note_retention(turn, is_alive=True)
        if turn.claim is not None and turn.current.is_confirmed and (record := turn.claim.record) is not None:
            answered = pool_records.with_answer(
                record,
                agent=turn.current.name,
                mark=turn.current.mark,
                open_calls=turn.calls,
                now=self._world.now(),
            )
            await turn.claim.release(answered)
        await self._keep_calls(turn, is_whole=True)
        turn.is_answered = True
        return replace(finished, usage=total)

    async def _send(self, turn: PoolTurn, outgoing: UpstreamMessage) -> Events:
        """Send one message, again to the same agent if that is safe, and yield its answer."""
        if folder := self._upstream.identity.get("cwd"):  # the agent runs on this machine
            outgoing = replace(outgoing, message=await with_readable_files(outgoing.message, Path(folder)))
        turn.delivery.repeats, turn.delivery.is_forced = 0, False
        while True:
            turn.delivery.is_taken = False
            try:
                agent = await self._open_agent(turn)
                turn.totals.sends += 1
                turn.begin_send()
                leave = PermissionRequests(turn.request.person)
                message = replace(outgoing, person=leave.person)
                answer = agent.send(message, key=turn.key(), is_forced=turn.delivery.is_forced)
                stalls = turn.request.stalls
                first_s = stalls.first_token_max_s if stalls else 0.0
                silence = self._limits.silence
                run = AgentRun(
                    answer, silence, self._world, name=self.name, leave=leave, first_token_s=first_s
                )
                try:
                    async with run, contextlib.aclosing(self._read_answer(turn, run)) as events:
                        async for event in events:
                            yield event
                finally:
                    turn.current.is_spoiled = run.is_abandoned
            except ModelError as error:
                if agent_failures.is_refusal(error, is_taken=turn.delivery.is_taken):
                    turn.take_back_send()
                doing = agent_failures.remedy(error, turn.situation)
                if not isinstance(doing, agent_failures.Repeat):
                    raise
                turn.delivery.is_forced = turn.delivery.is_forced or doing.is_forced
                turn.delivery.repeats += not doing.is_forced
                self._log_turn(turn, "sent again after %s", error.code)
                self._close_if_spoiled(turn)
                await self._world.sleep(doing.after_s)
            else:
                return

    async def _read_answer(self, turn: PoolTurn, run: AgentRun) -> Events:
        while True:
            event: UpstreamEvent = await run.next()
            match event:
                case MessageTaken():
                    await self._note_opened(turn, event)
                case MessageDropped():
                    turn.note_dropped()
                case Marked():
                    turn.current.mark = event.mark
                case KeepAlive() | Working():
                    yield event
                case _:
                    if not turn.delivery.is_taken:
                        raise UpstreamFailedError(f"{self.name} answered without naming the conversation")
                    yield event
            if isinstance(event, Finished):
                return

    async def _note_opened(self, turn: PoolTurn, opened: MessageTaken) -> None:
        """Check that the requested conversation was opened, and store its new id."""
        if turn.delivery.is_taken:
            turn.current.name = opened.agent or turn.current.name
            return
        turn.delivery.is_taken = True
        expected = turn.current.name
        if (
            isinstance(turn.action, ResumeAgent)
            and not turn.current.was_used
            and opened.resumed in {expected, ""}
        ):
            with contextlib.suppress(*STORE_FAILURES):
                await self._entries.note_echo(has_echo=bool(opened.resumed))
        # An agent that this process opened and used before need not repeat the id of its conversation.
        is_itself = turn.current.was_used and opened.agent == expected and not opened.resumed
        is_same = opened.resumed == expected or is_itself
        if not is_same or not opened.agent:
            await self._note_mismatch(turn, opened)
            raise UpstreamMismatchError(f"{self.name} opened {opened.resumed!r} instead of {expected!r}")
        turn.current.name = opened.agent
        turn.current.taken += 1
        turn.current.was_used = True
        turn.current.is_provisional = opened.is_provisional
        if turn.claim is None or not turn.delivery.is_last:
            return
        if turn.claim.record is not None:
            now = self._world.now()
            await turn.claim.hold(pool_records.confirm(turn.claim.record, turn.current.name, now=now))
        turn.current.is_confirmed = True

    async def _note_mismatch(self, turn: PoolTurn, opened: MessageTaken) -> None:
        """Record that a message went to the wrong conversation, so that no later turn continues there."""
        if not opened.resumed and opened.agent != turn.current.name:
            turn.unneeded.add(opened.agent)  # a new agent that has only the last message
            return
        touched = {opened.agent, opened.resumed}
        with contextlib.suppress(*STORE_FAILURES):
            await self._entries.drop_where(lambda record: record.agent in touched and not record.run)

    # --- agents -----------------------------------------------------------------------------------------------

    async def _open_agent(self, turn: PoolTurn) -> UpstreamAgent:
        """Return the agent of this turn; open it if necessary."""
        if turn.current.agent is not None:
            return turn.current.agent
        resume = turn.current.name if turn.current.taken or isinstance(turn.action, ResumeAgent) else ""
        try:
            if isinstance(turn.action, Fork) and not turn.current.taken:
                mark = turn.action.mark
                forking = cast("ForkingUpstream", self._upstream)  # see `Abilities.can_fork`
                turn.current.agent = await forking.fork(turn.setup, agent=mark.agent, mark=mark.mark)
                self._live.has_opened()
            else:
                resting = await self._live.take(turn.setup, resume) if resume else None
                turn.current.was_used = resting is not None
                turn.current.agent = resting or await self._live.open(turn.setup, resume=resume)
        except ModelError:
            raise
        except Exception as error:
            raise UpstreamFailedError(f"{self.name} failed with {type(error).__name__}") from error
        return turn.current.agent

    def _close_if_spoiled(self, turn: PoolTurn) -> None:
        """Close an agent whose run did not stop: its state is unknown."""
        if turn.current.is_spoiled:
            self._release_agent(turn)
            # The next agent has another conversation.
            if not (turn.current.taken or isinstance(turn.action, ResumeAgent)):
                turn.current.nonce = self._world.new_id("agent")

    def _release_agent(self, turn: PoolTurn, *, deleted: str = "") -> None:
        if turn.current.agent is not None:
            self._live.close(turn.current.agent, deleted=deleted)
            turn.current.agent = None
        elif deleted:
            self._live.delete(deleted)

    async def _begin_again(self, turn: PoolTurn, error: ModelError) -> None:
        """Replace this turn's agent by a fresh one, or raise the error if that would not help."""
        doing = agent_failures.remedy(error, turn.situation)
        if (
            isinstance(doing, agent_failures.StartFresh)
            and doing.if_verified
            and not await self._is_verified()
        ):
            doing = agent_failures.Fail()
        if not isinstance(doing, agent_failures.StartFresh):
            if turn.first_error is not None:
                raise error from turn.first_error
            raise error
        self._log_turn(turn, "a fresh agent after %s", error.code)
        is_mismatch = isinstance(error, UpstreamMismatchError)
        if isinstance(turn.action, ResumeAgent) and not is_mismatch:
            await self._note_retention(turn, is_alive=False)
        if turn.current.name and not is_mismatch:
            turn.unneeded.add(turn.current.name)
        if turn.claim is not None and turn.claim.found.record is not None:
            turn.unneeded.add(turn.claim.found.record.agent)
        self._release_agent(turn)
        turn.begin_again(error)
        if turn.claim is not None:
            fresh = pool_records.create_fresh(turn.outline, upstream=self.name, now=self._world.now())
            asides = turn.claim.record.asides if turn.claim.record is not None else ()
            await turn.claim.hold(replace(fresh, asides=asides))
        turn.begin(self._world.new_id("agent"), self._upstream.abilities, self._limits.budget)

    async def _is_verified(self) -> bool:
        """Whether the credential is accepted; False if that cannot be checked."""
        try:
            async with asyncio.timeout(self._limits.silence.close_s):
                return await self._upstream.verify()
        except (ModelError, TimeoutError):
            return False

    async def _note_retention(self, turn: PoolTurn, *, is_alive: bool) -> None:
        if turn.idle_s < RETENTION_AGE_MIN_S:  # a short silence shows nothing about the retention
            return
        with contextlib.suppress(*STORE_FAILURES):
            await self._entries.note_resume(age_s=turn.idle_s, is_alive=is_alive)

    # --- end of a turn ----------------------------------------------------------------------------------------

    async def _settle(self, turn: PoolTurn) -> None:
        """Correct the record, release the agent, report the turn."""
        is_as_before = False
        if turn.is_answered:
            turn.totals.end = End.WHOLE
        else:
            is_as_before = await self._settle_record(turn)
        can_go_on = turn.is_answered or turn.current.is_confirmed or is_as_before
        if turn.is_pooled and can_go_on and turn.claim is not None and turn.claim.record is not None:
            is_good = (turn.is_answered or is_as_before) and not turn.current.is_spoiled
            if turn.current.agent is not None and is_good:
                self._live.rest(turn.current.name, turn.current.agent, turn.setup)
                turn.current.agent = None
            self._release_agent(turn)
        elif not turn.has_taken_nothing or turn.current.taken:
            self._release_agent(turn, deleted=turn.current.name if self._may_delete(turn) else "")
        else:
            self._release_agent(turn)
        if not self._upstream.abilities.can_fork:
            for name in turn.unneeded - {turn.current.name, ""}:
                self._live.delete(name)
        if turn.claim is not None and turn.claim.found.version == 0:
            await self._prune()
        self._report(turn)

    async def _settle_record(self, turn: PoolTurn) -> bool:
        """Write only certain facts into the record of an incomplete answer.

        Return whether the agent has the same memory as before this turn.
        """
        claim = turn.claim
        if claim is None or claim.is_lost:
            return False
        before = claim.found.record
        is_kept = turn.current.is_confirmed and not turn.current.is_provisional
        if is_kept and claim.record is not None and not turn.calls:
            if not self._upstream.abilities.takes_tools:
                await claim.release(claim.record)
                return False
        elif turn.has_taken_nothing and before is not None and isinstance(turn.action, ResumeAgent):
            await claim.release(pool_records.with_refusal(before, turn.totals.error))
            return True
        turn.current.is_confirmed = False
        await claim.drop()
        return False

    def _may_delete(self, turn: PoolTurn) -> bool:
        """Whether no later turn can continue from this turn's agent: with forks, a mark of a record may name it."""
        return bool(turn.current.name) and (turn.claim is None or not self._upstream.abilities.can_fork)

    async def _prune(self) -> None:
        with contextlib.suppress(*STORE_FAILURES):
            await self._private.prune()
            gone = await self._entries.prune()
            if not self._upstream.abilities.can_fork:
                for name in gone:
                    self._live.delete(name)

    def _report(self, turn: PoolTurn) -> None:
        report = turn.report()
        if report.session:
            self._reports.pop(report.session, None)
            self._reports[report.session] = report
            while len(self._reports) > REPORTS_MAX:
                self._reports.popitem(last=False)
        self.counters.take(report)
        self._log_turn(turn, "%s", report.line)
        if self._on_turn is not None:
            try:
                self._on_turn(report)
            except Exception:  # noqa: BLE001 - a counter of the client application's is no part of the turn
                _log.exception("a turn could not be counted", extra={"session": report.session})

    def _log_turn(self, turn: PoolTurn, words: str, *values: object) -> None:
        ids = {"session": turn.request.session, "upstream": self.name, "agent": turn.current.name}
        _log.debug(words, *values, extra=ids)


def _is_shown(event: ModelEvent, *, is_last: bool) -> bool:
    """Whether an event is part of the answer: of earlier messages' answers only the agent's own calls are."""
    return is_last or isinstance(event, UpstreamCallStarted | UpstreamCallEnded)
