"""A client finds a transport that gets through, and begins with it the next time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from midstream.client import Event, connect, websocket_transport
from midstream.client.client import REMEMBERED
from midstream.client.connection_headers import ConnectionHeaders
from midstream.client.transport_selection import (
    LOST_MAX,
    REMEMBERED_DOUBTFUL_S,
    REMEMBERED_S,
    SERVERS_MAX,
    Remembered,
    RememberedTransports,
    TransportKind,
    TransportName,
    TransportSelection,
    Trial,
)
from midstream.client.transports import Transport
from midstream.environment import World
from midstream.errors import (
    AccessError,
    ConnectionLostError,
    DrainingError,
    MidstreamError,
    NotFoundError,
    ProtocolError,
    UsageError,
)
from midstream.protocol.frames import Open, encode
from midstream.testing import text
from midstream.testing.fake_worlds import FakeWorld
from tests.client.peer import Peer
from tests.client.proxies import Proxy, Upgrades
from tests.server.serving import SECRET, make_app, served
from tests.spec import spec

WAIT_S = 60.0
SHORT_S = 1.5
"""Enough for a server on this machine, even a busy one: a welcome that is later only costs another transport."""
WORDS = "one two three"
SERVER = "http://server:8000"


class Carrier:
    """A transport that breaks off as it is told to, or brings one frame for each that is sent."""

    def __init__(self, failure: MidstreamError | None) -> None:
        self.received_bytes = 0
        self.sent: list[bytes] = []
        self.is_closed = False
        self.failure = failure

    async def receive(self) -> bytes:
        if self.failure is not None:
            raise self.failure
        return b"a frame"

    async def send(self, frames: Sequence[bytes]) -> None:
        self.sent += frames

    async def close(self) -> None:
        self.is_closed = True


class ScriptedWays(TransportSelection):
    """Ways whose transports do what a table says: an error at once, an error later, or work."""

    def __init__(self, remembered: RememberedTransports, world: FakeWorld) -> None:
        super().__init__(SERVER, headers=ConnectionHeaders(SERVER, {}), remembered=remembered, world=world)
        self.at_once: dict[TransportKind, MidstreamError] = {}
        self.later: dict[TransportKind, MidstreamError] = {}
        self.tried: list[TransportKind] = []
        self.made: list[Carrier] = []
        self.answers = True

    async def is_reachable(self) -> bool:
        return self.answers

    async def open(self, way: TransportKind, session: str) -> Transport:
        self.tried.append(way)
        if way in self.at_once:
            raise self.at_once[way]
        self.made.append(Carrier(self.later.get(way)))
        return self.made[-1]

    async def heard(self) -> bytes | MidstreamError:
        """Make a connection, say something, and return what is heard first."""
        self.tried.clear()
        try:
            transport = await self.connect("s1")
            await transport.send([b"open"])
            heard = await asyncio.wait_for(transport.receive(), WAIT_S)
        except MidstreamError as error:
            return error
        await transport.close()
        return heard


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld(at=1000.0)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "ways.json"


@pytest.fixture
def ways(kept: Path, world: FakeWorld) -> ScriptedWays:
    return ScriptedWays(RememberedTransports(kept, world=world), world)


def _is_kept(kept: Path) -> bool:
    return kept.exists()


def _only(kept: Path) -> tuple[str, int]:
    """Return the one file of the folder, and who may read it."""
    (file,) = kept.parent.iterdir()
    return file.name, file.stat().st_mode & 0o777


async def _all(url: str, state: Path, transport: TransportName = "auto") -> list[Event]:
    async with connect(url, state=state, transport=transport) as client, asyncio.timeout(WAIT_S):
        client._ways.first_frame_s = SHORT_S
        return [event async for event in client.send("s1", "hi")]


# --- through real proxies ---------------------------------------------------------------------------------------


@spec("STREAM-42", "STREAM-43", "STREAM-44")
async def test_a_proxy_without_websockets_is_passed_by_events_and_known_the_next_time(tmp_path: Path) -> None:
    state = tmp_path / "state.db"
    async with (
        served(make_app([text(WORDS)])) as server,
        Proxy(server.url, upgrades=Upgrades.REFUSED).listening() as proxy,
    ):
        events = await _all(proxy.url, state)
        assert ("".join(event.text for event in events), proxy.asked[0]) == (WORDS, "upgrade")
        assert "POST /v1/sessions/s1/events" in proxy.asked
        kept = RememberedTransports(tmp_path / REMEMBERED).get(proxy.url)
        assert kept is not None
        assert kept.transport is TransportKind.SSE
        proxy.asked.clear()
        assert "".join(event.text for event in await _all(proxy.url, state)) == WORDS
        assert "upgrade" not in proxy.asked


@spec("STREAM-41", "STREAM-42")
async def test_a_proxy_that_holds_answers_back_is_passed_by_polls(tmp_path: Path) -> None:
    state = tmp_path / "state.db"
    async with (
        served(make_app([text(WORDS)])) as server,
        Proxy(server.url, upgrades=Upgrades.REFUSED, is_buffering=True).listening() as proxy,
    ):
        events = await _all(proxy.url, state)
        assert "".join(event.text for event in events) == WORDS
        kept = RememberedTransports(tmp_path / REMEMBERED).get(proxy.url)
        assert kept is not None
        assert kept.transport is TransportKind.POLL


@spec("STREAM-42")
async def test_a_socket_that_is_made_and_lets_nothing_through_is_left(tmp_path: Path) -> None:
    async with (
        served(make_app([text(WORDS)])) as server,
        Proxy(server.url, upgrades=Upgrades.SILENT).listening() as proxy,
    ):
        events = await _all(proxy.url, tmp_path / "state.db")
        assert "".join(event.text for event in events) == WORDS
        assert "POST /v1/sessions/s1/events" in proxy.asked
        snapshot = (await server.http.get("/v1/sessions/s1")).json()
        assert snapshot["turns"] == 1, "what was said over both was taken once"


@spec("STREAM-108")
@pytest.mark.parametrize("status", [None, 502])
async def test_a_server_that_was_away_is_reached_as_before(tmp_path: Path, status: int | None) -> None:
    """It is restarted: nothing listens, or what stands in front says so."""
    file = tmp_path / "ways.json"
    async with served(make_app()) as server, Peer(*[status or 500] * 100).serving() as peer:
        proxy = Proxy(server.url if status is None else peer.url)
        async with proxy.listening():
            ways = TransportSelection(
                proxy.url, headers=ConnectionHeaders(proxy.url, {}), remembered=RememberedTransports(file)
            )
            proxy.is_away = status is None
            for _ in range(2 * LOST_MAX):
                with pytest.raises(ConnectionLostError):
                    await ways.connect("s1")
            proxy.is_away = False
            proxy.lead_to(server.url)
            asked_before = len(proxy.asked)
            transport = await ways.connect("s1")
            await transport.send([encode(Open(stream="k1", secret=SECRET))])
            assert b'"welcome"' in await asyncio.wait_for(transport.receive(), WAIT_S)
            await transport.close()
            await ways.close()
    assert proxy.asked[asked_before:] == ["upgrade"]
    assert proxy.asked.count("upgrade") == 2 * LOST_MAX + 1
    assert not file.exists()


async def test_a_transport_that_is_named_is_taken_and_no_other(tmp_path: Path) -> None:
    async with served(make_app([text(WORDS)])) as server, Proxy(server.url).listening() as proxy:
        events = await _all(proxy.url, tmp_path / "state.db", transport="poll")
        assert "".join(event.text for event in events) == WORDS
        assert {*proxy.asked} == {"POST /v1/sessions/s1/poll", "POST /v1/sessions/s1/commands"}
    assert not (tmp_path / REMEMBERED).exists()


# --- what is tried, and when ------------------------------------------------------------------------------------


async def test_the_best_transport_works_and_nothing_is_kept(ways: ScriptedWays, kept: Path) -> None:
    assert await ways.heard() == b"a frame"
    assert ways.tried == [TransportKind.WEBSOCKET]
    assert not _is_kept(kept)


@spec("STREAM-42", "STREAM-43")
@pytest.mark.parametrize("refusal", [AccessError("403"), NotFoundError("404"), ProtocolError("426")])
async def test_what_may_be_a_proxys_refusal_is_gone_around_for_a_day(
    ways: ScriptedWays, kept: Path, world: FakeWorld, refusal: MidstreamError
) -> None:
    ways.at_once[TransportKind.WEBSOCKET] = refusal
    ways.later[TransportKind.SSE] = refusal
    assert await ways.heard() == b"a frame"
    assert ways.tried == [TransportKind.WEBSOCKET, TransportKind.SSE, TransportKind.POLL]
    assert [(carrier.sent, carrier.is_closed) for carrier in ways.made] == [([b"open"], True)] * 2
    assert RememberedTransports(kept, world=world).get(SERVER) == Remembered(
        TransportKind.POLL, 1000.0 + REMEMBERED_S
    )
    await ways.heard()
    assert ways.tried == [TransportKind.POLL]
    ways.at_once.clear()
    await world.advance(REMEMBERED_S + 1)
    await ways.heard()
    assert ways.tried == [TransportKind.WEBSOCKET], "after a day the best one has its turn again"


async def test_where_all_refuse_the_first_refusal_is_told(ways: ScriptedWays, kept: Path) -> None:
    first = AccessError("log in")
    ways.at_once[TransportKind.WEBSOCKET] = first
    ways.later = {TransportKind.SSE: NotFoundError("404"), TransportKind.POLL: ProtocolError("400")}
    assert await ways.heard() is first
    assert (len(ways.tried), _is_kept(kept)) == (3, False)


@spec("STREAM-107")
@pytest.mark.parametrize("fixed", [None, TransportKind.WEBSOCKET, TransportKind.POLL])
@pytest.mark.parametrize("refusal", [NotFoundError("404"), ProtocolError("405")])
async def test_who_answers_where_the_server_was_will_go_again(
    ways: ScriptedWays, refusal: MidstreamError, fixed: TransportKind | None
) -> None:
    ways._fixed = fixed
    assert await ways.heard() == b"a frame"
    ways.later = dict.fromkeys(TransportKind, refusal)
    ways.at_once = {TransportKind.WEBSOCKET: refusal}
    heard = await ways.heard()
    assert (type(heard), len(ways.tried)) == (ConnectionLostError, 1 if fixed else 3)
    ways.later.clear()
    ways.at_once.clear()
    assert await ways.heard() == b"a frame"


@spec("STREAM-107")
async def test_who_answers_in_the_middle_is_a_lost_connection_and_a_refused_caller_is_told(
    ways: ScriptedWays,
) -> None:
    for refusal, kind in ((NotFoundError("404"), ConnectionLostError), (AccessError("403"), AccessError)):
        transport = await ways.connect("s1")
        assert await transport.receive() == b"a frame"
        ways.made[-1].failure = refusal
        with pytest.raises(kind):
            await transport.receive()
    ways.later = dict.fromkeys(TransportKind, AccessError("403"))
    assert isinstance(await ways.heard(), AccessError), "somebody has to log in"


@pytest.mark.parametrize("refusal", [DrainingError("restarting"), UsageError("a bad id")])
async def test_a_servers_own_refusal_is_no_reason_to_try_another(
    ways: ScriptedWays, refusal: MidstreamError
) -> None:
    ways.at_once[TransportKind.WEBSOCKET] = refusal
    assert await ways.heard() is refusal
    assert ways.tried == [TransportKind.WEBSOCKET]


@spec("STREAM-108")
@pytest.mark.parametrize("known", [TransportKind.WEBSOCKET, TransportKind.SSE])
async def test_while_nothing_answers_nothing_is_learnt_about_transports(
    ways: ScriptedWays, kept: Path, world: FakeWorld, known: TransportKind
) -> None:
    """A server that is restarted is no proxy."""
    if known is not TransportKind.WEBSOCKET:
        RememberedTransports(kept, world=world).put(SERVER, Remembered(known, 2000.0))
    ways.at_once = dict.fromkeys(TransportKind, ConnectionLostError("refused"))
    ways.answers = False
    for _ in range(2 * LOST_MAX):
        assert isinstance(await ways.heard(), ConnectionLostError)
        assert ways.tried == [known]
    ways.at_once.clear()
    ways.answers = True
    assert await ways.heard() == b"a frame"
    assert ways.tried == [known]


@spec("STREAM-109")
@pytest.mark.parametrize("answers", [True, False])
async def test_a_handshake_that_something_swallows_is_silence_where_the_server_answers(
    ways: ScriptedWays, kept: Path, world: FakeWorld, *, answers: bool
) -> None:
    swallowed = ConnectionLostError("timed out during the handshake")
    swallowed.__cause__ = TimeoutError()
    ways.at_once[TransportKind.WEBSOCKET] = swallowed
    ways.answers = answers
    heard = await ways.heard()
    if answers:
        assert (heard, ways.tried) == (b"a frame", [TransportKind.WEBSOCKET, TransportKind.SSE])
        assert RememberedTransports(kept, world=world).get(SERVER) == Remembered(
            TransportKind.SSE, 1000.0 + REMEMBERED_S
        )
    else:
        assert (heard, ways.tried) == (swallowed, [TransportKind.WEBSOCKET])


@spec("STREAM-109")
async def test_a_proxy_that_swallows_handshakes_is_passed_by_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_transport, "CONNECT_S", SHORT_S)
    async with served(make_app([text(WORDS)])) as server:
        proxy = Proxy(server.url, upgrades=Upgrades.SWALLOWED)
        async with proxy.listening():
            events = await _all(proxy.url, tmp_path / "agent.db")
            kept = RememberedTransports(tmp_path / REMEMBERED).get(proxy.url)
    assert "".join(event.text for event in events) == WORDS
    assert proxy.asked[:3] == ["upgrade", "GET /v1/probe/poll", "POST /v1/sessions/s1/events"]
    assert kept is not None
    assert kept.transport is TransportKind.SSE
    assert kept.until - World().now() > REMEMBERED_DOUBTFUL_S


@spec("STREAM-43")
async def test_a_lost_connection_is_a_bad_network_at_first_and_something_in_between_for_minutes(
    ways: ScriptedWays, kept: Path, world: FakeWorld
) -> None:
    ways.later[TransportKind.WEBSOCKET] = ConnectionLostError("reset")
    for _ in range(LOST_MAX):
        assert isinstance(await ways.heard(), ConnectionLostError)
        assert ways.tried == [TransportKind.WEBSOCKET]
    assert await ways.heard() == b"a frame"
    assert ways.tried == [TransportKind.SSE]
    found = RememberedTransports(kept, world=world).get(SERVER)
    assert found == Remembered(TransportKind.SSE, 1000.0 + REMEMBERED_DOUBTFUL_S)
    await world.advance(REMEMBERED_DOUBTFUL_S + 1)
    ways.later.clear()
    await ways.heard()
    assert ways.tried == [TransportKind.WEBSOCKET]


async def test_a_network_that_is_down_for_long_tries_all_in_turn_and_forgets_nothing(
    ways: ScriptedWays, kept: Path
) -> None:
    ways.at_once = dict.fromkeys(TransportKind, ConnectionLostError("refused"))
    order: list[TransportKind] = []
    for _ in range(2 * LOST_MAX * len(TransportKind)):
        await ways.heard()
        order += ways.tried
    assert order == [way for way in (*TransportKind, *TransportKind) for _ in range(LOST_MAX)]
    assert not _is_kept(kept)


async def test_a_better_transport_that_works_again_is_not_kept_from_the_next_process(
    ways: ScriptedWays, kept: Path, world: FakeWorld
) -> None:
    remembered = RememberedTransports(kept, world=world)
    remembered.put(SERVER, Remembered(TransportKind.POLL, 2000.0))
    ways.at_once[TransportKind.POLL] = NotFoundError("a server of before")
    await ways.heard()
    assert ways.tried == [TransportKind.POLL, TransportKind.WEBSOCKET]
    assert remembered.get(SERVER) is None


async def test_what_is_said_while_a_transport_is_changed_is_said_over_the_next(ways: ScriptedWays) -> None:
    ways.later[TransportKind.WEBSOCKET] = ProtocolError("cut by a proxy")
    trial = Trial(ways, "s1", [*TransportKind])
    await trial.begin()
    assert trial.received_bytes == 0
    opening = encode(Open())
    await trial.send([opening])
    assert await trial.receive() == b"a frame"
    await trial.send([b"more"])
    assert [carrier.sent for carrier in ways.made] == [[opening], [opening, b"more"]]
    await trial.close()


# --- the file ---------------------------------------------------------------------------------------------------


async def test_what_was_kept_is_found_by_the_next_process_until_it_is_old(
    kept: Path, world: FakeWorld
) -> None:
    RememberedTransports(kept, world=world).put("http://a", Remembered(TransportKind.SSE, 1100.0))
    RememberedTransports(kept, world=world).put("http://b", Remembered(TransportKind.POLL, 1200.0))
    again = RememberedTransports(kept, world=world)
    assert again.get("http://a") == Remembered(TransportKind.SSE, 1100.0)
    assert _only(kept) == (kept.name, 0o600)
    await world.advance(150.0)
    assert (again.get("http://a"), again.get("http://b")) == (None, Remembered(TransportKind.POLL, 1200.0))
    again.delete("http://b")
    again.delete("http://b")
    assert again.get("http://b") is None


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b'{"http://a":{"transport":"pigeon","until":1}}']
)
def test_a_file_that_cannot_be_read_is_as_good_as_none(kept: Path, world: FakeWorld, content: bytes) -> None:
    kept.parent.mkdir()
    kept.write_bytes(content)
    remembered = RememberedTransports(kept, world=world)
    assert remembered.get("http://a") is None
    remembered.put("http://a", Remembered(TransportKind.SSE, 1100.0))
    assert remembered.get("http://a") == Remembered(TransportKind.SSE, 1100.0)


def test_a_file_that_cannot_be_written_costs_nothing_else(tmp_path: Path, world: FakeWorld) -> None:
    (tmp_path / "file").touch()
    remembered = RememberedTransports(tmp_path / "file" / "ways.json", world=world)
    remembered.put("http://a", Remembered(TransportKind.SSE, 1100.0))
    assert remembered.get("http://a") is None


@spec("STREAM-43")
async def test_a_clock_that_was_wrong_is_not_believed_for_years(
    ways: ScriptedWays, kept: Path, world: FakeWorld
) -> None:
    ahead = RememberedTransports(kept, world=FakeWorld(at=world.now() + 400 * REMEMBERED_S))
    ahead.put(SERVER, Remembered(TransportKind.POLL, world.now() + 401 * REMEMBERED_S))
    assert await ways.heard() == b"a frame"
    assert ways.tried == [TransportKind.WEBSOCKET]


def test_only_so_many_servers_are_remembered(kept: Path, world: FakeWorld) -> None:
    remembered = RememberedTransports(kept, world=world)
    for number in range(SERVERS_MAX + 2):
        remembered.put(f"http://{number}", Remembered(TransportKind.SSE, 1100.0 + number))
    assert [remembered.get(f"http://{number}") is None for number in range(4)] == [True, True, False, False]


def test_without_a_state_file_it_is_kept_as_long_as_the_client(world: FakeWorld) -> None:
    remembered = RememberedTransports(None, world=world)
    remembered.put("http://a", Remembered(TransportKind.SSE, 1100.0))
    assert remembered.get("http://a") == Remembered(TransportKind.SSE, 1100.0)


def test_a_transport_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="auto or one of websocket, sse, poll"):
        connect(SERVER, transport="pigeon")  # type: ignore[arg-type]
