"""Commands that arrive at a server for sessions on another node: that node checks them, this one reads nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx2
import pytest
from msgspec import Struct
from typing_extensions import override

from midstream.history.messages import Usage
from midstream.models.responses import Finished, TextDelta
from midstream.server.app import App
from midstream.server.limits import Limits
from midstream.session.turn.commands import Cancel
from midstream.store.contract import Store
from midstream.store.memory import Memory, MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_model import Script, ScriptedStep, Stall, text
from midstream.testing.store_fakes import StoreInFront
from tests.server.known_people import ADA, BOB, OPERATOR, guarded_app, post_message
from tests.server.serving import KEYS, WAIT_S, Json, abort, asgi_client, command, make_app, post
from tests.spec import spec

SPENT: list[ScriptedStep] = [TextDelta("Hello."), Finished(usage=Usage(60, 50))]
"""A response that costs 110 tokens."""


class CountedStore(StoreInFront):
    """A store that counts its operations on sessions."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.operations: list[tuple[str, str]] = []

    @override
    async def before_operation(self, operation: str, session: str) -> None:
        self.operations.append((operation, session))

    def of(self, session: str) -> list[str]:
        """Return the operations on a session, in order."""
        return [operation for operation, name in self.operations if name == session]


class ServerPair(Struct):
    """Two servers on one store that have found each other: `node` runs the sessions, commands arrive at `other`."""

    node: App
    other: App
    node_http: httpx2.AsyncClient
    other_http: httpx2.AsyncClient
    other_store: CountedStore

    async def until_idle(self, session: str = "s1") -> None:
        """Wait until no turn runs in a session."""
        await _until_idle(self.node, session)


async def _until_idle(app: App, session: str) -> None:
    """Wait until no turn runs in a session."""
    runner = await app.host.session(session)
    async with asyncio.timeout(WAIT_S):
        while runner.state.is_live:
            await runner.wait(runner.newest.position)


StoreMaker = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite"])
def store_of(request: pytest.FixtureRequest, tmp_path: Path) -> StoreMaker:
    """Function that makes stores of one place."""
    if request.param == "sqlite":
        return lambda: SQLiteStore(tmp_path / "server.db")
    memory = Memory()
    return lambda: MemoryStore(memory)


@contextlib.asynccontextmanager
async def pair_of(
    store_of: StoreMaker, script: Script = (), *, limits: Limits | None = None, is_guarded: bool = False
) -> AsyncIterator[ServerPair]:
    """Start two servers, and wait until they have found each other."""
    front = CountedStore(store_of())
    if is_guarded:
        node = guarded_app(script or None, store=store_of(), limits=limits)
        other = guarded_app(script or None, store=front, limits=limits)
    else:
        node, other = make_app(script, store=store_of()), make_app(script, store=front)
    async with asgi_client(node) as node_http, asgi_client(other) as other_http:
        await node.start()
        await other.start()
        async with asyncio.timeout(WAIT_S):
            while not (node.host.has_peers and other.host.has_peers):
                await node.host.world.sleep(0.001)
        yield ServerPair(node, other, node_http, other_http, front)


def _key(number: int) -> dict[str, str]:
    return {"x-idempotency-key": f"k{number}"}


@spec("TURN-56")
async def test_forwarding_a_command_reads_no_session_at_the_sender(store_of: StoreMaker) -> None:
    async with pair_of(store_of, lambda _: text("Hello.")) as pair:
        for number in range(5):
            assert (await post(pair.node_http, command(), **_key(number))).status_code == 200
            await pair.until_idle()
        pair.other_store.operations.clear()
        for number in range(5, 10):
            answer = await post(pair.other_http, command(words="and now?"), **_key(number))
            assert answer.json() == {"type": "ack", "seqno": 0}
            await pair.until_idle()
        assert pair.other_store.of("s1") == ["is_held_elsewhere", "forward"] * 5
        assert len(pair.other.host.awake) == 0, "the sender holds no session"
        runner = await pair.node.host.session("s1")
        assert runner.state.turns == 10
        assert runner.state.epoch == 1, "its node decided everything"


@spec("TURN-56")
async def test_a_command_for_a_session_without_a_node_is_decided_where_it_arrives(
    store_of: StoreMaker,
) -> None:
    async with pair_of(store_of, lambda _: text("Hello.")) as pair:
        assert (await post(pair.other_http, command())).status_code == 200
        assert "forward" not in pair.other_store.of("s1")
        assert pair.other.host.awake.leases == 1


async def _first(client: httpx2.AsyncClient) -> httpx2.Response:
    return await post(client, command(words="first"), **_key(1))


Case = Callable[[httpx2.AsyncClient], Awaitable[httpx2.Response]]
CASES: dict[str, Case] = {
    "accepted": lambda client: post(client, command(words="second", when_busy="queue"), **_key(2)),
    "busy": lambda client: post(client, command(words="second", when_busy="refuse"), **_key(2)),
    "replayed": _first,
    "another payload": lambda client: post(client, command(words="changed"), **_key(1)),
    "too early": lambda client: post(client, abort(7), **_key(1)),
    "in order": lambda client: post(client, abort(1), **_key(1)),
    "another secret": lambda client: post(
        client, command(words="first"), **_key(1), **{"x-idempotent-encryption-key": "t" * 43}
    ),
    "a changed secret": lambda client: post(
        client,
        command(words="first"),
        **_key(1),
        **{"x-idempotent-encryption-key": "t" * 43, "x-idempotent-encryption-key-old": "s" * 43},
    ),
    "no first command": lambda client: post(client, abort(1), **_key(2)),
    "an older connection": lambda client: post(
        client, abort(1), **_key(1), **{"x-idempotency-connection": "1", "x-midstream-connection": "old"}
    ),
}


@spec("TURN-56")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_running", [True, False], ids=["running", "ended"])
async def test_a_forwarded_command_gets_the_same_response_as_at_its_node(
    name: str, *, is_running: bool
) -> None:
    answers: list[tuple[int, Json, str | None]] = []
    for is_forwarded in (False, True):
        memory = Memory()
        script: Script = lambda _: [Stall()]  # noqa: E731 - one line
        async with pair_of(lambda memory=memory: MemoryStore(memory), script) as pair:  # type: ignore[misc]
            first = await post(
                pair.node_http,
                command(words="first"),
                **_key(1),
                **{"x-idempotency-connection": "3", "x-midstream-connection": "new"},
            )
            assert first.status_code == 200
            if not is_running:
                await (await pair.node.host.session("s1")).submit(Cancel())
            answer = await CASES[name](pair.other_http if is_forwarded else pair.node_http)
            was_sent_unread = pair.other_store.of("s1") == ["is_held_elsewhere", "forward"]
            assert was_sent_unread == (is_forwarded and name != "a changed secret")
            answers.append((answer.status_code, answer.json(), answer.headers.get("x-midstream-replayed")))
    assert answers[0] == answers[1]


@spec("STREAM-74")
async def test_the_tokens_of_a_forwarded_turn_are_charged_where_it_runs() -> None:
    memory = Memory()
    limits = Limits(tokens_per_principal_hour_max=150)
    async with pair_of(lambda: MemoryStore(memory), lambda _: SPENT, limits=limits, is_guarded=True) as pair:
        assert (await post_message(pair.node_http, "s1", ADA)).status_code == 200
        await pair.until_idle()
        assert (await post_message(pair.node_http, "s1", OPERATOR, **_key(2))).status_code == 200
        await pair.until_idle()
        assert (await post_message(pair.other_http, "s1", ADA, **_key(3))).status_code == 200
        await pair.until_idle()
        assert "forward" in pair.other_store.of("s1")
        refused = await post_message(pair.node_http, "s2", ADA)
        assert refused.json()["code"] == "limit_reached", "two turns of three are counted"


@spec("STREAM-74")
async def test_a_forwarded_turn_counts_as_running_where_it_runs() -> None:
    memory = Memory()
    limits = Limits(turns_per_principal_max=1)
    script: Script = lambda _: [Stall()]  # noqa: E731 - one line
    async with pair_of(lambda: MemoryStore(memory), script, limits=limits, is_guarded=True) as pair:
        world = pair.node.host.world
        for session in ("s1", "s3"):  # The second one takes the place of the first in the counter.
            assert (await post_message(pair.node_http, session, ADA)).status_code == 200
            await (await pair.node.host.session(session)).submit(Cancel())
            world.monotonic = _later(world.monotonic)
        assert (await post_message(pair.other_http, "s1", ADA, **_key(2))).status_code == 200
        assert "forward" in pair.other_store.of("s1")
        assert (await post_message(pair.node_http, "s2", ADA)).json()["code"] == "limit_reached"


@spec("STREAM-74")
async def test_a_forwarded_turn_that_has_ended_is_not_counted_where_its_session_was_read() -> None:
    memory = Memory()
    limits = Limits(turns_per_principal_max=1)
    script: Script = lambda _: [Stall()]  # noqa: E731 - one line
    async with pair_of(lambda: MemoryStore(memory), script, limits=limits, is_guarded=True) as pair:
        world = pair.other.host.world
        assert (await post_message(pair.node_http, "s1", ADA)).status_code == 200
        runner = await pair.node.host.session("s1")
        await runner.submit(Cancel())
        assert (await post_message(pair.other_http, "s1", ADA, **_key(2))).status_code == 200
        assert "forward" in pair.other_store.of("s1")
        assert (await pair.other.host.session("s1")).state.is_live
        await runner.submit(Cancel())
        world.monotonic = _later(world.monotonic)
        assert (await post_message(pair.other_http, "s2", ADA)).status_code == 200


def _later(clock: Callable[[], float]) -> Callable[[], float]:
    """Return a clock that is an hour ahead: earlier requests no longer count as starting."""
    return lambda: clock() + 3600.0


@spec("STREAM-74")
async def test_a_caller_at_its_limit_repeats_an_accepted_command_at_any_server() -> None:
    memory = Memory()
    limits = Limits(tokens_per_principal_hour_max=100)
    async with pair_of(lambda: MemoryStore(memory), lambda _: SPENT, limits=limits, is_guarded=True) as pair:
        assert (await post_message(pair.node_http, "s1", ADA)).status_code == 200
        await pair.until_idle()
        assert (await post_message(pair.other_http, "s0", ADA)).status_code == 200
        await _until_idle(pair.other, "s0")
        refused = await post_message(pair.other_http, "s1", ADA, **_key(2))
        assert refused.json()["code"] == "limit_reached"
        again = await post_message(pair.other_http, "s1", ADA)
        assert (again.status_code, again.headers["x-midstream-replayed"]) == (200, "true")


async def test_a_command_of_an_unauthorized_caller_is_refused_before_it_is_forwarded() -> None:
    memory = Memory()
    async with pair_of(lambda: MemoryStore(memory), is_guarded=True) as pair:
        assert (await post_message(pair.node_http, "s1", ADA)).status_code == 200
        pair.other_store.operations.clear()
        refused = await post_message(pair.other_http, "s1", BOB)
        assert (refused.status_code, refused.json()["code"]) == (404, "session_not_found")
        assert "forward" not in pair.other_store.of("s1")


async def test_a_draining_server_forwards_nothing(store_of: StoreMaker) -> None:
    async with pair_of(store_of, lambda _: text("Hello.")) as pair:
        assert (await post(pair.node_http, command())).status_code == 200
        pair.other.host.drain()
        answer = await pair.other_http.post("/v1/sessions/s1/commands", json=command(), headers=KEYS)
        assert (answer.status_code, answer.json()["code"]) == (503, "draining")
        assert "forward" not in pair.other_store.of("s1")
