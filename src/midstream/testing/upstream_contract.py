"""`midstream.agents.upstreams` as a test suite for upstreams.

Write a scripted peer (a program or an HTTP server, in place of the real service) with the controls of `UpstreamPeer`,
subclass `UpstreamContract` in a test file, and add a fixture `peer`:

    class TestMyUpstream(UpstreamContract):
        @pytest.fixture
        def peer(self, tmp_path: Path) -> Peer:
            return MyPeer(tmp_path)

It needs pytest and pytest-asyncio. `UpstreamPeer.lacks` names traits that a kind of upstream cannot have; their tests
are skipped. An upstream's own tests must check the rest: the classification of the real software's errors, the
forwarding of servers and attachments, the use of instructions.
"""
# ruff: noqa: D102, PLR2004 - tests: names state what they check, and numbers need no names

from __future__ import annotations

import asyncio
import contextlib
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
from msgspec import Struct
from msgspec.structs import replace

from midstream.agents.pool import Pooled
from midstream.agents.prior_transcript import DONE
from midstream.agents.upstreams import (
    ForkingUpstream,
    Marked,
    MessageTaken,
    Setup,
    Upstream,
    UpstreamAgent,
    UpstreamEvent,
    UpstreamMessage,
)
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.environment import World
from midstream.errors import (
    ModelAccessError,
    ModelError,
    UpstreamBusyError,
    UpstreamGoneError,
)
from midstream.history.messages import Outcome, Usage, UserMessage
from midstream.models.responses import (
    Finished,
    TextDelta,
    ToolCallRequested,
    UpstreamCallEnded,
    UpstreamCallStarted,
)
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.turns import run_turn

T = TypeVar("T")
C = TypeVar("C", Upstream, UpstreamAgent)

WORLD = World()
LIMIT_S = 30.0
"""Seconds after which an expected answer counts as missing."""
CLOSE_S = 15.0
"""Time limit for closing, whatever the peer does."""
LOOK_S = 0.02
"""Seconds between two checks of the peer."""
CHILDREN_LOOKS_MAX = 1000
"""How many times threads may end while child processes are counted."""
STEPS_MAX = 100
"""Greatest number of an upstream's waits between a message and its answer."""

CONTENT = "what stands in a.txt"
"""The result of a peer's tool."""
SEPARATOR = " | "
"""Separator of the messages in a peer's answer."""
USAGE = Usage(input_tokens=100, output_tokens=7, cached_tokens=60, cache_write_tokens=10)
"""Usage of each answer of a peer; cache reads and writes are part of the input."""


class Trait(StrEnum):
    """Traits that some kinds of upstream cannot have."""

    BUSY = "busy"
    """A conversation can be in another run."""
    ECHO = "echo"
    """It reports the resumed conversation."""
    CALLS = "calls"
    """It runs tools of its own."""
    USAGE = "usage"
    """It counts tokens."""
    CACHE_WRITES = "cache-writes"
    """It counts the tokens that are written to a cache."""
    KEYS = "keys"
    """It receives the idempotency key."""
    STARTS = "starts"
    """It takes time to start, such as a program, and may be closed meanwhile."""
    PROCESS = "process"
    """It has a process on this machine, which may end between two messages."""
    VERIFY = "verify"
    """Its credential can be refused."""


class PeerMessage(Struct, frozen=True):
    """A user's message that reached the peer.

    Args:
        agent: The conversation of the message, as `MessageTaken.agent` names it.
        text: Its whole text.
        key: Its idempotency key, in any form.
    """

    agent: str
    text: str
    key: str = ""


class UpstreamPeer(Protocol):
    """The scripted peer of an upstream, and its controls.

    It keeps conversations during the test, for every connection. By default, it answers each message with all messages
    of the conversation so far, joined by `SEPARATOR`, in more than one piece, and reports `USAGE`. A control for the
    next message, or the next resumption, applies only once.
    """

    @property
    def lacks(self) -> frozenset[Trait]:
        """Traits that this kind of upstream cannot have."""

    def upstream(self) -> Upstream:
        """Return another upstream for this peer, as another process would create it."""

    def messages(self) -> list[PeerMessage]:
        """Return all received messages, in order."""

    def runs(self) -> int:
        """Return the number of the peer's running answers."""

    def expire(self, agent: str) -> None:
        """Delete a conversation."""

    def be_busy(self, agent: str) -> None:
        """Refuse messages to a conversation because of another run, until that run is ended with `is_forced`."""

    def hang(self) -> None:
        """Take the next message, name the conversation, so that `MessageTaken` comes, and then be silent. It still
        detects a stop, or the end of all connections.
        """

    def echo_wrong_id(self) -> None:
        """Open another, empty conversation at the next resumption, without an error."""

    def die_mid_stream(self) -> None:
        """End the next answer after its first text: the process dies, or the connection is lost."""

    def end_processes(self) -> None:
        """End the processes that upstreams of this peer have started, as the system does when memory is short."""

    def refuse_key(self) -> None:
        """Refuse the credential from now on."""

    def run_tool(self, name: str, arguments: str, content: str) -> None:
        """Before the next answer, run a tool with these arguments (JSON), whose result is `content`."""


class UpstreamContract:
    """Tests of your upstream. Define a fixture `peer`, which returns a new `UpstreamPeer`."""

    pytestmark = pytest.mark.asyncio

    # --- declarations

    async def test_it_has_a_name_and_an_identity_of_plain_text(self, peer: UpstreamPeer) -> None:
        async with _closing(peer.upstream()) as upstream:
            assert upstream.name
            assert upstream.abilities == peer.upstream().abilities
            assert {type(token) for pair in upstream.identity.items() for token in pair} <= {str}
            assert dict(upstream.identity) == dict(peer.upstream().identity)

    async def test_it_forks_if_it_declares_so(self, peer: UpstreamPeer) -> None:
        async with _closing(peer.upstream()) as upstream:
            assert upstream.abilities.can_fork == isinstance(upstream, ForkingUpstream)

    # --- a conversation

    async def test_an_answer_is_opened_first_and_finished_last(self, peer: UpstreamPeer) -> None:
        async with _closing(peer.upstream()) as upstream, _resume(upstream) as agent:
            events = await _send(agent, "one")
            opened = _opening_of(events)
            assert opened.agent
            assert opened.resumed == ""
            assert [event for event in events if isinstance(event, MessageTaken)] == [opened]
            assert [event for event in events if isinstance(event, Finished)] == [events[-1]]
            assert _text(events) == "one"

    async def test_an_answer_comes_in_pieces(self, peer: UpstreamPeer) -> None:
        async with _closing(peer.upstream()) as upstream, _resume(upstream) as agent:
            await _send(agent, "a first message of many words")
            events = await _send(agent, "a second one")
            assert sum(isinstance(event, TextDelta) and bool(event.text) for event in events) > 1

    async def test_a_conversation_goes_on_in_the_same_agent(self, peer: UpstreamPeer) -> None:
        async with _closing(peer.upstream()) as upstream, _resume(upstream) as agent:
            await _send(agent, "one")
            assert _text(await _send(agent, "two")) == _join("one", "two")
            assert _text(await _send(agent, "three")) == _join("one", "two", "three")
            assert [message.text for message in peer.messages()] == ["one", "two", "three"]

    async def test_a_conversation_goes_on_in_another_process(self, peer: UpstreamPeer) -> None:
        name = await _begin(peer, "one", "two")
        async with _closing(peer.upstream()) as upstream, _resume(upstream, name) as agent:
            events = await _send(agent, "three")
            assert _text(events) == _join("one", "two", "three")
            assert isinstance(events[0], MessageTaken)
            if Trait.ECHO not in peer.lacks:
                assert events[0].resumed == name
        assert [message.text for message in peer.messages()] == ["one", "two", "three"]

    async def test_conversations_go_on_when_the_process_of_an_idle_agent_has_ended(
        self, peer: UpstreamPeer
    ) -> None:
        _needs(peer, Trait.PROCESS)
        async with (
            _closing(peer.upstream()) as upstream,
            _resume(upstream) as first,
            _resume(upstream) as second,
        ):
            names = [_opening_of(await _send(agent, "one")).agent for agent in (first, second)]
            peer.end_processes()
            for name, agent in zip(names, (first, second), strict=True):
                events = await _send(agent, "two")
                assert _text(events) == _join("one", "two")
                assert _opening_of(events) == MessageTaken(name, name)
        assert [message.text for message in peer.messages()] == ["one", "one", "two", "two"]

    async def test_each_answer_has_a_name_to_resume_by(self, peer: UpstreamPeer) -> None:
        name = await _begin(peer, "one")
        for number, text in enumerate(("two", "three", "four"), start=2):
            async with _closing(peer.upstream()) as upstream, _resume(upstream, name) as agent:
                events = await _send(agent, text)
                assert len(_text(events).split(SEPARATOR)) == number
                name = _opening_of(events).agent

    async def test_conversations_are_separate(self, peer: UpstreamPeer) -> None:
        async with (
            _closing(peer.upstream()) as upstream,
            _resume(upstream) as first,
            _resume(upstream) as second,
        ):
            await _send(first, "one")
            await _send(second, "other")
            both = await asyncio.gather(_send(first, "two"), _send(second, "another"))
            assert [_text(events) for events in both] == [_join("one", "two"), _join("other", "another")]
            names = [_opening_of(events).agent for events in both]
            assert len({*names}) == 2

    async def test_text_arrives_unchanged(self, peer: UpstreamPeer) -> None:
        text = '  "quoted" \\ naïve ☃ 😀\nline\ttab /slash @file $HOME {x} <b> '
        async with _closing(peer.upstream()) as upstream, _resume(upstream) as agent:
            await _send(agent, text)
            assert [message.text for message in peer.messages()] == [text]

    async def test_a_long_message_arrives_whole(self, peer: UpstreamPeer) -> None:
        text = "a line of a long paste\n" * 20_000
        async with _closing(peer.upstream()) as upstream, _resume(upstream) as agent:
            assert _text(await _send(agent, text)) == text
            assert [message.text for message in peer.messages()] == [text]

    async def test_tokens_are_counted_once_an_answer(self, peer: UpstreamPeer) -> None:
        _needs(peer, Trait.USAGE)
        written = 0 if Trait.CACHE_WRITES in peer.lacks else USAGE.cache_write_tokens
        usage = replace(USAGE, cache_write_tokens=written)
        async with _closing(peer.upstream()) as upstream, _resume(upstream) as agent:
            for text in ("one", "two"):
                events = await _send(agent, text)
                assert isinstance(events[-1], Finished)
                assert events[-1].usage == usage

    async def test_a_repeated_message_has_the_same_key(self, peer: UpstreamPeer) -> None:
        _needs(peer, Trait.KEYS)
        async with _closing(peer.upstream()) as upstream:
            for key in ("first", "first", "second"):
                async with _resume(upstream) as agent:
                    await _send(agent, "one", key=key)
        first, again, second = (message.key for message in peer.messages())
        assert first == again != second
        assert "" not in {first, second}

    async def test_calls_and_results_of_its_own_tools_are_reported_in_pairs(self, peer: UpstreamPeer) -> None:
        _needs(peer, Trait.CALLS)
        arguments, content = {"path": "a.txt"}, "what stands in a.txt"
        peer.run_tool("read", json.dumps(arguments), content)
        async with _closing(peer.upstream()) as upstream, _resume(upstream) as agent:
            events = await _send(agent, "one")
            assert not [event for event in events if isinstance(event, ToolCallRequested)]
            call_events = [
                event for event in events if isinstance(event, UpstreamCallStarted | UpstreamCallEnded)
            ]
            assert [type(event) for event in call_events] == [UpstreamCallStarted, UpstreamCallEnded]
            started, ended = call_events
            assert isinstance(started, UpstreamCallStarted)
            assert isinstance(ended, UpstreamCallEnded)
            assert events.index(started) < events.index(ended) < len(events) - 1
            assert started.id == ended.id != ""
            assert started.name == "read"
            assert json.loads(started.arguments) == arguments
            assert (ended.content, ended.outcome) == (content, Outcome.OK)
            assert _text(events) == "one"

    async def test_a_fork_goes_on_from_its_mark_and_leaves_the_first_as_it_is(
        self, peer: UpstreamPeer
    ) -> None:
        async with _closing(peer.upstream()) as upstream:
            if not isinstance(upstream, ForkingUpstream):
                pytest.skip("it cannot fork")
            async with _resume(upstream) as agent:
                first = await _send(agent, "one")
                name = _opening_of(await _send(agent, "two")).agent
            mark = [event.mark for event in first if isinstance(event, Marked)][-1]
            async with _closing(await upstream.fork(Setup(), agent=name, mark=mark)) as fork:
                events = await _send(fork, "other")
                assert _text(events) == _join("one", "other")
                assert _opening_of(events).agent != name
                assert _opening_of(events).resumed == name
                name_of_fork = _opening_of(events).agent
                events = await _send(fork, "more")
                assert _text(events) == _join("one", "other", "more")
                assert _opening_of(events).resumed in {name_of_fork, ""}
            async with _resume(upstream, name) as agent:
                assert _text(await _send(agent, "three")) == _join("one", "two", "three")

    # --- faults

    async def test_a_deleted_agent_is_gone_and_receives_no_message(self, peer: UpstreamPeer) -> None:
        name = await _begin(peer, "one")
        peer.expire(name)
        async with _closing(peer.upstream()) as upstream:
            with pytest.raises(UpstreamGoneError):
                await _answer_by(upstream, name, "two")
            async with _resume(upstream) as agent:
                assert _text(await _send(agent, "again")) == "again"

    async def test_a_wrong_conversation_id_is_detected(self, peer: UpstreamPeer) -> None:
        _needs(peer, Trait.ECHO)
        name = await _begin(peer, "one")
        peer.echo_wrong_id()
        async with _closing(peer.upstream()) as upstream:
            try:
                events = await _answer_by(upstream, name, "two")
            except UpstreamGoneError:  # noticed before a message was sent
                assert [message.text for message in peer.messages()] == ["one"]
                return
            assert _opening_of(events).resumed not in {name, ""}
            assert PeerMessage(name, "two") not in [
                PeerMessage(message.agent, message.text) for message in peer.messages()
            ]

    async def test_a_busy_agent_is_recognized_and_takes_a_forced_message(self, peer: UpstreamPeer) -> None:
        _needs(peer, Trait.BUSY)
        name = await _begin(peer, "one")
        peer.be_busy(name)
        async with _closing(peer.upstream()) as upstream:
            with pytest.raises(UpstreamBusyError):
                await _answer_by(upstream, name, "two")
            async with _resume(upstream, name) as agent:
                events = await _send(agent, "two", is_forced=True)
                assert _text(events) == _join("one", "two")

    async def test_a_refused_credential_is_recognized(self, peer: UpstreamPeer) -> None:
        _needs(peer, Trait.VERIFY)
        peer.refuse_key()
        async with _closing(peer.upstream()) as upstream:
            with pytest.raises(ModelAccessError):
                await _answer_by(upstream, "", "one")

    async def test_a_credential_is_verified_without_a_conversation(self, peer: UpstreamPeer) -> None:
        async with _closing(peer.upstream()) as upstream, asyncio.timeout(LIMIT_S):
            assert await upstream.verify() is True
            if Trait.VERIFY not in peer.lacks:
                peer.refuse_key()
                assert await upstream.verify() is False
            assert peer.messages() == []

    async def test_an_answer_that_breaks_off_is_an_error_and_the_agent_is_not_gone(
        self, peer: UpstreamPeer
    ) -> None:
        name = await _begin(peer, "one")
        peer.die_mid_stream()
        async with _closing(peer.upstream()) as upstream:
            events: list[UpstreamEvent] = []
            with pytest.raises(ModelError) as raised:
                await _answer_by(upstream, name, "two", events)
            assert not isinstance(raised.value, UpstreamGoneError)
            assert raised.value.retry == "later"
            assert isinstance(events[0], MessageTaken)
            assert _text(events)
            assert not [event for event in events if isinstance(event, Finished)]
        async with _closing(peer.upstream()) as upstream:
            answer = _text(await _answer_by(upstream, events[0].agent, "three"))
            assert answer.split(SEPARATOR)[0] == "one"
            assert answer.split(SEPARATOR)[-1] == "three"

    # --- behind a pool, in an engine

    async def test_a_cut_answer_is_not_requested_again(self, peer: UpstreamPeer) -> None:
        can_call = Trait.CALLS not in peer.lacks
        if can_call:
            peer.run_tool("read", '{"path": "a.txt"}', CONTENT)
        peer.die_mid_stream()
        upstream = peer.upstream()
        async with _host(upstream) as host:
            await run_turn(host, "s", "one")
        first, *others = (message.text for message in peer.messages())
        again = "\n".join(others)  # some upstreams report each part separately
        assert first == "one"
        assert DONE in again
        if can_call and not upstream.abilities.takes_history:  # else the history has it, and not the message
            assert again.index(CONTENT) < again.index(DONE)

    async def test_the_transcript_for_a_fresh_agent_includes_tool_results(self, peer: UpstreamPeer) -> None:
        _needs(peer, Trait.CALLS)
        upstream, memory = peer.upstream(), Memory()
        peer.run_tool("read", '{"path": "a.txt"}', CONTENT)
        async with _host(upstream, memory) as host:
            await run_turn(host, "s", "one")
        peer.expire(peer.messages()[-1].agent)
        async with _host(peer.upstream(), memory) as host:
            await run_turn(host, "s", "two")
        last = peer.messages()[-1].text
        assert last.endswith("two")
        if not upstream.abilities.takes_history:
            assert last.index("one") < last.index("a.txt") < last.index(CONTENT)

    # --- stops

    async def test_closing_an_answer_stops_it_at_the_other_end(self, peer: UpstreamPeer) -> None:
        async with _closing(peer.upstream()) as upstream, _resume(upstream) as agent:
            name = _opening_of(await _send(agent, "one")).agent
            peer.hang()
            answer = agent.send(UpstreamMessage(UserMessage.of("two")), key="two")
            async with asyncio.timeout(LIMIT_S):
                assert isinstance(await anext(answer), MessageTaken)
            async with asyncio.timeout(CLOSE_S):
                await _aclose(answer)
            await _until(lambda: peer.runs() == 0)
            events = await _send(agent, "three")
            assert _text(events).split(SEPARATOR)[0] == "one"
            assert _text(events).split(SEPARATOR)[-1] == "three"
            assert _opening_of(events).resumed in {name, ""}

    async def test_cancelling_the_reader_stops_the_answer_at_the_other_end(self, peer: UpstreamPeer) -> None:
        async with _closing(peer.upstream()) as upstream, _resume(upstream) as agent:
            peer.hang()
            reader = WORLD.spawn(_send(agent, "one"), name="reader")
            await _until(lambda: peer.runs() == 1)
            reader.cancel()
            async with asyncio.timeout(CLOSE_S):
                with pytest.raises(asyncio.CancelledError):
                    await reader
            await _until(lambda: peer.runs() == 0)

    async def test_closing_the_upstream_ends_hanging_answers(self, peer: UpstreamPeer) -> None:
        upstream = peer.upstream()
        agent = await upstream.open(Setup())
        peer.hang()
        reader = WORLD.spawn(_send(agent, "one"), name="reader")
        await _until(lambda: peer.runs() == 1)
        async with asyncio.timeout(CLOSE_S):
            await upstream.aclose()
        async with asyncio.timeout(CLOSE_S):
            (ended,) = await asyncio.gather(reader, return_exceptions=True)
        _require_typed(ended)
        await _until(lambda: peer.runs() == 0)

    @pytest.mark.parametrize("looks", [0, 1, 5, 20])
    async def test_closing_while_it_starts_leaves_nothing_behind(
        self, peer: UpstreamPeer, looks: int
    ) -> None:
        _needs(peer, Trait.STARTS)
        await _begin(peer, "one")  # what is made once and kept
        before = _count_holdings()
        upstream = peer.upstream()
        agent = await upstream.open(Setup())
        peer.hang()
        reader = WORLD.spawn(_send(agent, "two"), name="reader")
        await WORLD.sleep(looks * LOOK_S / 4)
        async with asyncio.timeout(CLOSE_S):
            await upstream.aclose()
            (ended,) = await asyncio.gather(reader, return_exceptions=True)
        _require_typed(ended)
        await _wait_for_release(before)

    @pytest.mark.parametrize("looks", [1, 20])
    async def test_closing_before_any_step_of_its_start_leaves_nothing_behind(
        self, peer: UpstreamPeer, looks: int
    ) -> None:
        _needs(peer, Trait.STARTS)
        await _begin(peer, "one")  # what is made once and kept
        before, step, is_started = _count_holdings(), 0, False
        while not is_started:
            step += 1
            assert step <= STEPS_MAX
            upstream = peer.upstream()
            peer.hang()
            reading = _Interrupted(_open_and_send(upstream, "two"), step, upstream.aclose, looks)
            reader = WORLD.spawn(reading.run(), name="reader")
            await _until(lambda: reading.closing is not None or reader.done() or peer.runs() == 1)  # noqa: B023
            is_started = reading.closing is None
            async with asyncio.timeout(CLOSE_S):
                await (reading.closing or upstream.aclose())
                (ended,) = await asyncio.gather(reader, return_exceptions=True)
            _require_typed(ended)
            await _wait_for_release(before)

    async def test_cancelling_before_any_step_of_its_start_leaves_nothing_behind(
        self, peer: UpstreamPeer
    ) -> None:
        await _begin(peer, "one")  # what is made once and kept
        before, step, is_started = _count_holdings(), 0, False
        while not is_started:
            step += 1
            assert step <= STEPS_MAX
            peer.hang()
            async with _closing(peer.upstream()) as upstream:

                async def cancel() -> None:
                    reader.cancel()  # noqa: B023

                reading = _Interrupted(_open_and_send(upstream, "two"), step, cancel, looks=1)
                reader = WORLD.spawn(reading.run(), name="reader")
                await _until(lambda: reading.closing is not None or reader.done() or peer.runs() == 1)  # noqa: B023
                is_started = reading.closing is None
                reader.cancel()
                async with asyncio.timeout(CLOSE_S):
                    with pytest.raises(asyncio.CancelledError):
                        await reader
                await _until(lambda: peer.runs() == 0)
            await _wait_for_release(before)

    async def test_closing_twice_is_harmless(self, peer: UpstreamPeer) -> None:
        upstream = peer.upstream()
        agent = await upstream.open(Setup())
        name = _opening_of(await _send(agent, "one")).agent
        async with asyncio.timeout(CLOSE_S):
            await agent.aclose()
            await agent.aclose()
            await upstream.aclose()
            await upstream.aclose()
        async with _closing(peer.upstream()) as again, _resume(again, name) as agent:
            assert _text(await _send(agent, "two")) == _join("one", "two")

    async def test_an_agent_that_received_no_message_closes(self, peer: UpstreamPeer) -> None:
        async with _closing(peer.upstream()) as upstream, asyncio.timeout(CLOSE_S):
            agent = await upstream.open(Setup())
            await agent.aclose()
        assert peer.messages() == []

    async def test_deleting_an_agent_never_fails(self, peer: UpstreamPeer) -> None:
        name = await _begin(peer, "one")
        async with _closing(peer.upstream()) as upstream, asyncio.timeout(LIMIT_S):
            await upstream.delete(name)
            await upstream.delete(name)
            await upstream.delete("never-was")

    async def test_nothing_is_left_behind(self, peer: UpstreamPeer) -> None:
        await _exercise(peer)  # what is made once and kept
        before = _count_holdings()
        for _ in range(3):
            await _exercise(peer)
        await _wait_for_release(before)


class _Interrupted(Awaitable[T], Generator[Any, None, T]):
    """Work during one of whose steps the upstream is closed, just when the awaited result has come.

    Args:
        work: The work; each wait and its end is a step.
        step: The number of the step, from 1, before which something is closed.
        looks: Number of `LOOK_S` for which only the closing continues; then the work continues.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, T],
        step: int,
        close: Callable[[], Coroutine[Any, Any, None]],
        looks: int,
    ) -> None:
        self.closing: asyncio.Task[None] | None = None
        """The closing task, started at its step."""
        self._work = work
        self._steps_left = step
        self._close = close
        self._looks = looks
        self._pause: Iterator[Any] = iter(())

    async def run(self) -> T:
        """Do the work."""
        return await self

    def __await__(self) -> Generator[Any, None, T]:
        return self

    def send(self, _: None, /) -> Any:  # noqa: ANN401 - any file object of the event loop
        if self._steps_left == 0:
            self._pause = self._close_at_step().__await__()
        self._steps_left -= 1
        for waited in self._pause:
            return waited
        self._pause = iter(())
        return self._work.send(None)

    def throw(self, *raised: Any) -> Any:  # noqa: ANN401 - as a generator's
        self._pause = iter(())
        return self._work.throw(*raised)

    async def _close_at_step(self) -> None:
        self.closing = WORLD.spawn(self._close(), name="closing")
        for _ in range(self._looks):
            if not self.closing.done():
                await WORLD.sleep(LOOK_S)


class _Holdings(Struct, frozen=True):
    tasks: int
    descriptors: int
    children: int

    def exceeds(self, other: _Holdings) -> bool:
        return (
            self.tasks > other.tasks or self.descriptors > other.descriptors or self.children > other.children
        )


def _count_holdings() -> _Holdings:
    """Count the resources of this process; unknown ones count as none."""
    own = Path("/proc/self")
    descriptors = [*(own / "fd").iterdir()] if own.exists() else []
    return _Holdings(len(asyncio.all_tasks()), len(descriptors), _children(own))


def _children(own: Path) -> int:
    """Count the child processes of each thread. The children of an ending thread move to another one."""
    for _ in range(CHILDREN_LOOKS_MAX):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return sum(len(each.read_text().split()) for each in own.glob("task/*/children"))
    raise AssertionError("threads end too fast to be observed")


def _require_typed(ended: object) -> None:
    """Check that a reader of a closed upstream gets an error of midstream."""
    shown = "".join(traceback.format_exception(ended)) if isinstance(ended, BaseException) else repr(ended)
    assert isinstance(ended, ModelError), f"it ended with {shown}"


async def _exercise(peer: UpstreamPeer) -> None:
    """Use everything that may leave resources behind: answers, a cut one, one that failed, a deleted agent."""
    name = await _begin(peer, "one")
    async with _closing(peer.upstream()) as upstream:
        async with _resume(upstream, name) as agent:
            peer.hang()
            reader = WORLD.spawn(_send(agent, "two"), name="reader")
            await _until(lambda: peer.runs() == 1)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        peer.die_mid_stream()
        with contextlib.suppress(ModelError):
            await _answer_by(upstream, name, "three")
        peer.expire(name)
        with contextlib.suppress(ModelError):
            await _answer_by(upstream, name, "four")


def _needs(peer: UpstreamPeer, trait: Trait) -> None:
    if trait in peer.lacks:
        pytest.skip(f"this kind of upstream lacks {trait.value!r}")


@asynccontextmanager
async def _closing(opened: C) -> AsyncIterator[C]:
    try:
        yield opened
    finally:
        async with asyncio.timeout(CLOSE_S):
            await opened.aclose()


@asynccontextmanager
async def _resume(upstream: Upstream, name: str = "") -> AsyncIterator[UpstreamAgent]:
    """Open the agent of this id, or a fresh agent for ""."""
    async with asyncio.timeout(LIMIT_S):
        agent = await upstream.open(Setup(), resume=name)
    async with _closing(agent):
        yield agent


async def _begin(peer: UpstreamPeer, *texts: str) -> str:
    """Have a conversation in a process of its own, and return the id for resuming it."""
    name = ""
    async with _closing(peer.upstream()) as upstream, _resume(upstream) as agent:
        for text in texts:
            name = _opening_of(await _send(agent, text)).agent
    return name


async def _answer_by(
    upstream: Upstream, name: str, text: str, events: list[UpstreamEvent] | None = None
) -> list[UpstreamEvent]:
    """Open an agent ("" for a fresh one), send a message and return the events, in `events` also after an error."""
    async with _resume(upstream, name) as agent:
        return await _send(agent, text, events=events)


async def _send(
    agent: UpstreamAgent,
    text: str,
    *,
    key: str = "",
    is_forced: bool = False,
    events: list[UpstreamEvent] | None = None,
) -> list[UpstreamEvent]:
    events = [] if events is None else events
    answer = agent.send(UpstreamMessage(UserMessage.of(text)), key=key or text[:40], is_forced=is_forced)
    try:
        async with asyncio.timeout(LIMIT_S):
            async for event in answer:
                events.append(event)
    finally:
        await _aclose(answer)
    return events


async def _open_and_send(upstream: Upstream, text: str) -> list[UpstreamEvent]:
    return await _send(await upstream.open(Setup()), text)


async def _aclose(answer: AsyncIterator[UpstreamEvent]) -> None:
    closing = getattr(answer, "aclose", None)
    assert closing is not None, "an answer is an async generator"
    await closing()


async def _until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition outside this process."""
    async with asyncio.timeout(LIMIT_S):
        while not is_so():
            await WORLD.sleep(LOOK_S)


async def _wait_for_release(before: _Holdings) -> None:
    """Wait until this process has no more resources than before."""
    try:
        await _until(lambda: not _count_holdings().exceeds(before))
    except TimeoutError:
        raise TimeoutError(
            f"{_count_holdings()} are held for {LIMIT_S:.0f} s, and before there were {before}"
        ) from None


@asynccontextmanager
async def _host(upstream: Upstream, memory: Memory | None = None) -> AsyncIterator[Host]:
    """Run an agent with a pool, which is closed with the engine."""
    host = Host(Agent(Pooled(upstream)), MemoryStore(memory))
    await host.start()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield host
    finally:
        await host.stop()


def _opening_of(events: list[UpstreamEvent]) -> MessageTaken:
    first = events[0]
    assert isinstance(first, MessageTaken)
    return first


def _text(events: list[UpstreamEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def _join(*texts: str) -> str:
    return SEPARATOR.join(texts)
