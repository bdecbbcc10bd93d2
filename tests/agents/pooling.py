"""A client application in front of a pool with a scripted upstream, under a clock that stands still."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.agents.pool import Pooled, PoolLimits, Servers
from midstream.agents.pool_entries import POOL_NAMESPACE, key_of
from midstream.agents.pool_records import PoolRecord, decode
from midstream.agents.pool_turns import TurnReport
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
    UserMessage,
)
from midstream.models.responses import (
    Finished,
    ModelEvent,
    ModelRequest,
    ReuseReported,
    TextDelta,
    ToolCallRequested,
)
from midstream.session.records import ReuseDecision
from midstream.store.memory import Memory as Place
from midstream.store.memory import MemoryStore
from midstream.testing import FakeWorld
from midstream.testing.scripted_upstream import ScriptedUpstream, Trouble, words_of


class PoolApplication:
    """Keeps a history and requests answers to it.


    Args:
        session: The session of its requests.
    """

    def __init__(self, pool: Pooled, world: FakeWorld, *, session: str = "s") -> None:
        self.pool = pool
        self.world = world
        self.session = session
        self.system = ""
        self.tools: tuple[ToolSpec, ...] = ()
        self.history = History()
        self.events: list[ModelEvent] = []
        """The events of the last answer."""
        self.judged: list[ReuseDecision] = []
        """The pool's reuse decisions."""

    async def send_messages(self, *texts: str) -> TurnReport:
        """Send a message, get its answer and append both to the history."""
        for text in texts:
            self.history = self.history.then(UserMessage.of(text))
        return await self.ask()

    async def ask(self) -> TurnReport:
        """Request an answer to the history as it is."""
        request = ModelRequest(self.system, self.history, self.tools, session=self.session)
        self.events, self.judged = [], []

        async def listen() -> None:
            async for event in self.pool.stream(request):
                if isinstance(event, ReuseReported):
                    self.judged.append(event.judgement)
                else:
                    self.events.append(event)

        await self.world.live_through(listen())
        calls = [
            ToolCall(each.id, each.name, each.arguments)
            for each in self.events
            if isinstance(each, ToolCallRequested)
        ]
        finish = Finish.CALLS if calls else Finish.STOP
        results = tuple(ToolResult(call.id, f"result of {call.id}") for call in calls)
        response = Response((Text(self.text), *calls), finish)
        self.history = self.history.then(Step(response, results))
        return self.report

    async def fail(self, *texts: str) -> ModelError:
        """Send a message that fails; the message stays in the history."""
        try:
            await self.send_messages(*texts)
        except ModelError as error:
            return error
        raise AssertionError("it did not fail")

    @property
    def text(self) -> str:
        """The text of the last answer."""
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def report(self) -> TurnReport:
        """The pool's report of the last turn."""
        report = self.pool.last(self.session)
        assert report is not None
        return report


class PoolBench:
    """A world, a store, an upstream, and pools of it."""

    def __init__(self, upstream: ScriptedUpstream | None = None) -> None:
        self.world = FakeWorld()
        self.upstream = ScriptedUpstream() if upstream is None else upstream
        self.place = Place()
        self.store = MemoryStore(self.place)
        self.reports: list[TurnReport] = []

    async def pool(
        self,
        *,
        limits: PoolLimits = PoolLimits(),  # noqa: B008 - frozen
        servers: Servers | None = None,
    ) -> Pooled:
        """Return another pool, as another process has it."""
        await self.store.open()
        return Pooled(
            self.upstream,
            self.store,
            limits=limits,
            servers=servers,
            on_turn=self.reports.append,
            world=self.world,
        )

    async def host(self, *, session: str = "s") -> PoolApplication:
        """Return a client application with its own pool."""
        return PoolApplication(await self.pool(), self.world, session=session)

    async def record(self, session: str = "s") -> PoolRecord | None:
        """Return the record of a session."""
        kept = await self.store.kv_get(POOL_NAMESPACE, key_of(self.upstream.name, session))
        return decode(kept.body) if kept else None

    def trouble(self, *troubles: Trouble | None) -> None:
        """Let the next messages fail in this way."""
        self.upstream.troubles.extend(troubles)

    def sent_texts(self) -> Sequence[str]:
        """Return the text of every message that was sent, including attempts."""
        return [words_of(received.message) for received in self.upstream.sends]


def is_complete(events: Sequence[ModelEvent]) -> bool:
    """Return whether an answer came to its end."""
    return bool(events) and isinstance(events[-1], Finished)


def assert_sent_once(bench: PoolBench, host: PoolApplication) -> None:
    """Assert that the agent of the last turn received each message once, in order."""
    wanted = [
        part.text
        for entry in host.history.entries
        if isinstance(entry, UserMessage)
        for part in entry.parts
        if isinstance(part, Text)
    ]
    words = bench.upstream.memory.talks[host.report.agent].words
    assert [words.count(text) for text in wanted] == [1] * len(wanted)
    places = [words.index(text) for text in wanted]
    assert places == sorted(places)
