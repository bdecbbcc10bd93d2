"""Random client applications, generated from a seed, against an upstream with real memory.

One life is a conversation under one session key: a client application that sends, edits, reverts, compacts,
queues, regenerates, makes side calls and races itself, over one or two processes that restart and are killed
between any two of their steps, while the upstream expires, hangs, lies and dies. Whenever an answer is
complete, the messages that its agent received are compared with those the application sent: each once, in
order, and nothing else.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from midstream.agents.pool import Pooled, PoolLimits
from midstream.agents.pool_entries import POOL_NAMESPACE
from midstream.agents.pool_turns import AgentOrigin, TurnReport
from midstream.agents.upstream_abilities import Abilities
from midstream.agents.upstreams import UpstreamEvent
from midstream.environment import World
from midstream.errors import ModelError
from midstream.history.messages import (
    Finish,
    History,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    Usage,
    UserMessage,
)
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta, ToolCallRequested
from midstream.store import memory as stores
from midstream.store.contract import KeyValueEntry
from midstream.testing.scripted_upstream import (
    AgentConversation,
    ScriptedUpstream,
    Trouble,
    UpstreamMemory,
    words_of,
)
from tests.simulation.loop import SimulatedLoop, SimulatedProcess, Stuck

SESSION = "s"
ACTIONS_MAX = 9
TOKEN = re.compile(r"\b[ut]\d+\b")
"""Token of a user's message or a tool's result: never used twice in a life."""
DAY_S = 24 * 3600.0
KILL_STEPS_MAX = 120
TOOLS_ABILITIES = Abilities(takes_tools=True, takes_history=True)
TOOLS = (ToolSpec("look", "Look something up.", {"type": "object"}),)


class SeededWorld(World):
    """The clock of the simulated loop, and ids that are the same in every run."""

    def __init__(self, loop: SimulatedLoop, chance: random.Random) -> None:
        self._loop = loop
        self._chance = chance
        self.shift_s = 0.0
        """Time that passed while nothing ran."""

    def now(self) -> float:
        return 1_000_000.0 + self._loop.time() + self.shift_s

    def monotonic(self) -> float:
        return self._loop.time() + self.shift_s

    def new_id(self, kind: str) -> str:
        return f"{kind}-{self._chance.getrandbits(64):x}"


class SlowKeyValue:
    """A slow key-value store: every operation waits a while before and after its effect, so that others can
    intervene.
    """

    def __init__(self, store: stores.MemoryStore) -> None:
        self._store = store

    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        await asyncio.sleep(0)
        kept = await self._store.kv_get(namespace, key)
        await asyncio.sleep(0)
        return kept

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        await asyncio.sleep(0)
        version = await self._store.kv_put(namespace, key, body, expected=expected, at=at)
        await asyncio.sleep(0)
        return version

    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        await asyncio.sleep(0)
        is_dropped = await self._store.kv_delete(namespace, key, expected=expected)
        await asyncio.sleep(0)
        return is_dropped

    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        await asyncio.sleep(0)
        return await self._store.kv_list(namespace)


@dataclass
class PoolProcess:
    """One process with a pool."""

    process: SimulatedProcess
    pool: Pooled
    upstream: ScriptedUpstream


@dataclass
class ClientTurn:
    """An application's copy of one turn: its messages, and the steps that answered them."""

    users: list[str]
    steps: list[Step] = field(default_factory=list)


@dataclass
class RequestResult:
    """The result of one request."""

    expected: tuple[str, ...]
    text: str = ""
    calls: tuple[str, ...] = ()
    error: str = ""
    is_whole: bool = False
    is_dead: bool = False
    report: TurnReport | None = None


class ClientLife:
    """One life. `problems` is empty where every promise was kept."""

    def __init__(self, seed: int, *, steps_max: int = 60_000) -> None:
        self.chance = random.Random(seed)
        self.loop = SimulatedLoop(self.chance, steps_max=steps_max)
        self.world = SeededWorld(self.loop, random.Random(seed + 1))
        self.memory = UpstreamMemory()
        self.place = stores.Memory()
        self.problems: list[str] = []
        self.figures: Counter[str] = Counter()
        self.trace: list[str] = []
        self.servers: list[PoolProcess] = []
        self.dead: list[SimulatedProcess] = []
        self.turns: list[ClientTurn] = []
        self.system = "you help"
        self._asides = 0
        self.is_excused = True
        self._tokens = 0
        self._told: dict[str, tuple[str, ...]] = {}
        self.abilities = self.chance.choice(
            [
                Abilities(),
                Abilities(takes_history=True),
                Abilities(takes_history=True, can_fork=True),
                Abilities(can_fork=True, can_reinstruct=True),
                TOOLS_ABILITIES,
            ]
        )
        self.has_equal_prompts = self.abilities is TOOLS_ABILITIES and random.Random(seed + 2).random() < 0.5
        """Whether side calls have the conversation's system prompt, and differ from it only by having no tools."""
        self.drops = self.chance.random() < 0.3
        """Whether the upstream removes a message again whose answer fails."""

    @property
    def is_excused(self) -> bool:
        """Return whether the next turn may need a full replay: a disturbance since the last complete one."""
        return self._is_excused

    @is_excused.setter
    def is_excused(self, value: bool) -> None:
        self._is_excused = value
        self._asides = 0

    def run(self) -> None:
        """Run the life."""
        try:
            self.loop.run_until_complete(self._live())
        except Stuck as stuck:
            self.problems.append(f"stuck: {stuck}")
        self.problems += self.memory.wrongs
        self.problems += [f"unhandled: {complaint}" for complaint in self.loop.complaints]
        for process in [*self.dead, *(server.process for server in self.servers)]:
            self.loop.kill(process)
            self.loop.close_remains(process)

    async def _live(self) -> None:
        self.store = stores.MemoryStore(self.place)
        await self.store.open()
        self.servers = [self._server() for _ in range(self.chance.choice([1, 1, 2]))]
        names, weights = zip(*ACTIONS, strict=True)
        for _ in range(self.chance.randint(3, ACTIONS_MAX)):
            act = self.chance.choices(names, weights)[0]
            self.figures[act.__name__.strip("_")] += 1
            self.trace.append(act.__name__)
            await act(self)
            if self.problems:
                return
        for _ in range(2):  # After any disturbance, a continued conversation soon needs no replay again.
            await ClientLife._send_message(self)

    # --- means of the application
    # -----------------------------------------------------------------------------

    def _server(self) -> PoolProcess:
        upstream = ScriptedUpstream(
            self.memory,
            answer=self._answer,
            abilities=self.abilities,
            identity={"model": "m"},
            drops=self.drops,
        )
        pool = Pooled(
            upstream, SlowKeyValue(self.store), world=self.world, limits=PoolLimits(live_max=2, wait_s=5.0)
        )
        return PoolProcess(SimulatedProcess("server"), pool, upstream)

    def _token(self, kind: str = "u") -> str:
        self._tokens += 1
        return f"{kind}{self._tokens}"

    def _answer(self, talk: AgentConversation) -> Sequence[UpstreamEvent]:
        """Answer with a name under which the agent's received messages are stored."""
        text = tuple(
            token for received in talk.messages for token in TOKEN.findall(words_of(received.message))
        )
        self._tokens += 1
        name = f"answer{self._tokens}"
        self._told[name] = text
        usage = Usage(len(words_of(talk.messages[-1].message)), 1)
        wants_tools = self.abilities.takes_tools and self.chance.random() < 0.4
        setup = talk.messages[-1].setup
        if wants_tools and (setup.tools if self.has_equal_prompts else setup.instructions != "title"):
            ids = [f"c{self._tokens}-{number}" for number in range(self.chance.randint(1, 2))]
            requests = [ToolCallRequested(call_id, "look", "{}") for call_id in ids]
            return [TextDelta(name), *requests, Finished(Finish.CALLS, usage=usage)]
        return [TextDelta(name[:3]), TextDelta(name[3:]), Finished(usage=usage)]

    def _history(self, turns: Sequence[ClientTurn] | None = None) -> History:
        entries: list[UserMessage | Step] = []
        for turn in self.turns if turns is None else turns:
            entries += [UserMessage.of(f"say {user}") for user in turn.users]
            entries += turn.steps
        return History(tuple(entries))

    def _pick(self) -> PoolProcess:
        return self.chance.choice(self.servers)

    async def request(
        self,
        server: PoolProcess,
        history: History,
        *,
        system: str | None = None,
        is_ephemeral: bool = False,
        stops_after: int | None = None,
        dies_in: int | None = None,
    ) -> RequestResult:
        """Send a request to a process, and check the basis of its answer."""
        request = ModelRequest(
            self.system if system is None or self.has_equal_prompts else system,
            history,
            TOOLS if self.has_equal_prompts and system is None else (),
            session=SESSION,
            is_ephemeral=is_ephemeral,
        )
        asked = RequestResult(expected_of(history))
        died: asyncio.Future[None] = self.loop.create_future()
        server.process.on_death.append(lambda: _settle(died))
        server.process.dies_in = dies_in
        consuming = self.loop.start(server.process, self._consume(server, request, asked, stops_after))
        await asyncio.wait({consuming, died}, return_when=asyncio.FIRST_COMPLETED)
        server.process.dies_in = None
        asked.is_dead = server.process.is_dead
        if asked.is_dead:
            asked.is_whole = False
            self._replace(server)
        self._check(asked)
        self.figures["asks"] += 1
        self.trace.append(f"  {asked}")
        return asked

    async def _consume(
        self, server: PoolProcess, request: ModelRequest, asked: RequestResult, stops_after: int | None
    ) -> None:
        stream = cast("AsyncGenerator[ModelEvent, None]", server.pool.stream(request))
        count = 0
        calls: list[str] = []
        try:
            async for event in stream:
                count += 1
                if isinstance(event, TextDelta):
                    asked.text += event.text
                if isinstance(event, ToolCallRequested):
                    calls.append(event.id)
                if isinstance(event, Finished):
                    asked.calls = tuple(calls)
                    asked.is_whole = True
                if stops_after is not None and count > stops_after:
                    break
        except ModelError as error:
            asked.error = error.code
        finally:
            await stream.aclose()
        asked.report = server.pool.last(SESSION)

    def _replace(self, server: PoolProcess) -> None:
        self.dead.append(server.process)
        self.servers[self.servers.index(server)] = self._server()

    def _check(self, asked: RequestResult) -> None:
        if not asked.is_whole:
            return
        reported = self._told.get(asked.text, (f"no answer at all: {asked.text}",))
        if reported != asked.expected:
            self.problems.append(f"the upstream received {reported}, the host sent {asked.expected}")
        self.figures["whole"] += 1

    def _accept(self, asked: RequestResult) -> bool:
        """Add an answer to the history, and run its tool calls; return whether it was complete."""
        if asked.is_whole:
            calls = tuple(ToolCall(call_id, "look", "{}") for call_id in asked.calls)
            results = tuple(ToolResult(call_id, f"found {self._token('t')}") for call_id in asked.calls)
            finish = Finish.CALLS if calls else Finish.STOP
            response = Response((Text(asked.text), *calls), finish)
            self.turns[-1].steps.append(Step(response, results))
        return asked.is_whole

    async def _continue(self, server: PoolProcess, **how: int | None) -> RequestResult:
        """Request answers to the history until no more tools are called."""
        for _ in range(4):
            is_excused = self.is_excused or any(one.upstream.troubles for one in self.servers)
            asked = await self.request(server, self._history(), **how)  # type: ignore[arg-type]
            self._check_answer(asked, is_excused=is_excused or any(each is not None for each in how.values()))
            if not self._accept(asked) or not asked.calls:
                return asked
            server = self._pick() if server not in self.servers else server
        return asked

    def _check_answer(self, asked: RequestResult, *, is_excused: bool) -> None:
        report = asked.report
        if not asked.is_whole or report is None:
            self.is_excused = True
            return
        self.figures[report.way.value] += 1
        self.figures["replays"] += report.replays
        is_learned = report.rebuilt in {"stale", "unechoed"}
        if not is_excused and not is_learned and (report.replays or report.way is AgentOrigin.ASIDE):
            self.problems.append(f"a needless replay: {report}")
        if report.way is AgentOrigin.ASIDE:
            self._asides += 1
            self._is_excused = True
            if self._asides > 1:
                self.problems.append(f"the conversation itself stays aside: {report}")
        else:
            self.is_excused = any(one.upstream.troubles for one in self.servers)

    # --- acts of an application
    # ---------------------------------------------------------------------------------

    async def _send_message(self) -> None:
        self.turns.append(ClientTurn([self._token()]))
        await self._continue(self._pick())

    async def _queue(self) -> None:
        self.turns.append(ClientTurn([self._token() for _ in range(self.chance.randint(2, 3))]))
        if self.abilities.takes_tools:  # A call in an earlier answer permits only a replay.
            self.is_excused = True
        await self._continue(self._pick())

    async def _edit(self) -> None:
        if self.turns:
            at = self.chance.randrange(len(self.turns))
            del self.turns[at:]
        self.is_excused = True
        await ClientLife._send_message(self)

    async def _revert(self) -> None:
        if self.turns:
            del self.turns[-self.chance.randint(1, len(self.turns)) :]
        self.is_excused = True

    async def _compact(self) -> None:
        if len(self.turns) > 1:
            count = self.chance.randint(1, len(self.turns) - 1)
            self.turns[:count] = [ClientTurn([self._token()])]
        self.is_excused = True
        await ClientLife._send_message(self)

    async def _regenerate(self) -> None:
        if self.turns:
            self.turns[-1].steps.clear()
            self.is_excused = True
            await self._continue(self._pick())

    async def _change_system(self) -> None:
        self.system = f"you help, rule {self._tokens}"
        self.is_excused = True
        await ClientLife._send_message(self)

    async def _ask_aside(self) -> None:
        await self._aside(is_ephemeral=True, is_first=False)

    async def _make_title(self) -> None:
        is_first = not self.turns
        if is_first:
            self.is_excused = True
        await self._aside(is_ephemeral=False, is_first=is_first)

    async def _aside(self, *, is_ephemeral: bool, is_first: bool) -> None:
        turn = ClientTurn([self._token()])
        await self.request(self._pick(), self._history([turn]), system="title", is_ephemeral=is_ephemeral)
        if is_first and not is_ephemeral:
            self.is_excused = True

    async def _race_with_title(self) -> None:
        """Request the title during the answer, without marking it as a side call."""
        self.turns.append(ClientTurn([self._token()]))
        about = (
            [*self.turns[:1], ClientTurn([self._token()])]
            if self.chance.random() < 0.3
            else [ClientTurn([self._token()])]
        )
        self.is_excused = True
        title = self.request(self._pick(), self._history(about), system="title")
        answer = self.request(self._pick(), self._history())
        both = [title, answer] if self.chance.random() < 0.5 else [answer, title]
        results = await asyncio.gather(*both)
        self._accept_raced(results[both.index(answer)])

    async def _race_itself(self) -> None:
        """Send the same request twice concurrently: an impatient client, or two processes behind one address."""
        self.turns.append(ClientTurn([self._token()]))
        self.is_excused = True
        history = self._history()
        first, second = await asyncio.gather(
            self.request(self._pick(), history), self.request(self._pick(), history)
        )
        self._accept_raced(first if first.is_whole else second)

    async def _race_two_tabs(self) -> None:
        """Continue from the same point in two tabs."""
        mine, theirs = ClientTurn([self._token()]), ClientTurn([self._token()])
        self.is_excused = True
        histories = [self._history([*self.turns, turn]) for turn in (mine, theirs)]
        answers = await asyncio.gather(*(self.request(self._pick(), history) for history in histories))
        self.turns.append(mine)
        self._accept_raced(answers[0])

    def _accept_raced(self, asked: RequestResult) -> None:
        self._accept(asked)
        self.is_excused = True

    async def _stop(self) -> None:
        """Stop the answer; the user's message stays in the history or not, with or without the partial answer."""
        self.turns.append(ClientTurn([self._token()]))
        asked = await self.request(self._pick(), self._history(), stops_after=self.chance.randint(0, 3))
        self._part_ways(asked)

    async def _kill(self) -> None:
        """Kill the process between any two of its steps; the application repeats the request, or continues."""
        self.turns.append(ClientTurn([self._token()]))
        asked = await self.request(
            self._pick(), self._history(), dies_in=self.chance.randint(0, KILL_STEPS_MAX)
        )
        self._part_ways(asked)
        if not self.turns or self.turns[-1].steps or self.chance.random() < 0.5:
            return
        await self._continue(self._pick())

    def _part_ways(self, asked: RequestResult) -> None:
        self.is_excused = True
        way = self.chance.choice(["keep", "interrupted", "drop"])
        if asked.is_whole:
            self._accept(asked)
        elif way == "interrupted":
            response = Response((Text(asked.text or "..."),), Finish.INTERRUPTED)
            self.turns[-1].steps.append(Step(response))
        elif way == "drop":
            self.turns.pop()

    async def _restart(self) -> None:
        server = self._pick()
        await self.loop.start(server.process, server.pool.aclose())
        self._replace(server)

    async def _trouble(self) -> None:
        """Make the upstream fail for the next messages."""
        server = self._pick()
        troubles = self.chance.choices([*Trouble, None], k=self.chance.randint(1, 3))
        server.upstream.troubles.extend(troubles)
        self.trace.append(f"  {troubles}")
        self.is_excused = True
        await ClientLife._send_message(self)

    async def _refuse_key(self) -> None:
        server = self._pick()
        server.upstream.is_key_good = False
        server.upstream.troubles.append(Trouble.UNAUTHENTICATED)
        self.is_excused = True
        await ClientLife._send_message(self)
        server.upstream.is_key_good = True

    async def _expire(self) -> None:
        for name in [*self.memory.talks]:
            if self.chance.random() < 0.8:
                self.memory.expire(name)
        self.is_excused = True

    async def _wait(self) -> None:
        seconds = self.chance.choice([10.0, 400.0, DAY_S, 8 * DAY_S])
        self.world.shift_s += seconds
        self.is_excused = self.is_excused or seconds > 7 * DAY_S

    async def _damage(self) -> None:
        for kept in await self.store.kv_list(POOL_NAMESPACE):
            body = kept.body[: self.chance.randrange(len(kept.body))] + b"\xff"
            await self.store.kv_put(POOL_NAMESPACE, kept.key, body, expected=kept.version, at=kept.at)
        self.is_excused = True

    async def _clear(self) -> None:
        for kept in await self.store.kv_list(POOL_NAMESPACE):
            await self.store.kv_delete(POOL_NAMESPACE, kept.key, expected=kept.version)
        self.is_excused = True


Action = Callable[[ClientLife], Awaitable[None]]

ACTIONS: list[tuple[Action, int]] = [
    (ClientLife._send_message, 12),
    (ClientLife._queue, 4),
    (ClientLife._edit, 3),
    (ClientLife._revert, 2),
    (ClientLife._compact, 2),
    (ClientLife._regenerate, 3),
    (ClientLife._change_system, 1),
    (ClientLife._ask_aside, 1),
    (ClientLife._make_title, 2),
    (ClientLife._race_with_title, 2),
    (ClientLife._race_itself, 3),
    (ClientLife._race_two_tabs, 2),
    (ClientLife._stop, 4),
    (ClientLife._kill, 6),
    (ClientLife._restart, 2),
    (ClientLife._trouble, 6),
    (ClientLife._refuse_key, 1),
    (ClientLife._expire, 2),
    (ClientLife._wait, 3),
    (ClientLife._damage, 1),
    (ClientLife._clear, 1),
]
"""Possible acts of an application, with their weights."""


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def expected_of(history: History) -> tuple[str, ...]:
    """Return the messages and results that an agent must have received to answer a history: each once, in order."""
    tokens: list[str] = []
    for entry in history.entries:
        if isinstance(entry, UserMessage):
            tokens += TOKEN.findall(" ".join(part.text for part in entry.parts if isinstance(part, Text)))
        else:
            tokens += TOKEN.findall(" ".join(result.content for result in entry.results))
    return tuple(tokens)


def run_life(seed: int) -> ClientLife:
    """Run one life."""
    life = ClientLife(seed)
    life.run()
    return life
