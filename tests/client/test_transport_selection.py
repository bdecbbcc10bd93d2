"""A client finds a transport that works, and starts with it the next time."""

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
from midstream.client.transports import Transport, refusal_of
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
from midstream.server.auth.access import Access, tokens
from midstream.server.auth.principals import Action, Principal, Scope
from midstream.testing import text
from midstream.testing.fake_worlds import FakeWorld
from tests.client.peer import WebSocketPeer
from tests.client.proxies import OfficeProxy, Upgrades
from tests.server.serving import SECRET, make_app, served
from tests.spec import spec

WAIT_S = 60.0
SHORT_S = 1.5
"""Enough for a server on this machine, even a busy one: a later welcome only costs another transport."""
WORDS = "one two three"
SERVER = "http://server:8000"
TOKEN = "t" * 20


class Carrier:
    """A transport that fails as set, or delivers one frame for each sent one."""

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
    """A selection whose transports behave by a table: an error at once, an error later, or success."""

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

    async def connect_and_send(self) -> bytes | MidstreamError:
        """Make a connection, send a frame, and return the first received one."""
        self.tried.clear()
        try:
            transport = await self.connect("s1")
            await transport.send([b"open"])
            received = await asyncio.wait_for(transport.receive(), WAIT_S)
        except MidstreamError as error:
            return error
        await transport.close()
        return received


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld(at=1000.0)


@pytest.fixture
def remembered_file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "ways.json"


@pytest.fixture
def ways(remembered_file: Path, world: FakeWorld) -> ScriptedWays:
    return ScriptedWays(RememberedTransports(remembered_file, world=world), world)


def _is_stored(remembered_file: Path) -> bool:
    return remembered_file.exists()


def _only(remembered_file: Path) -> tuple[str, int]:
    """Return the one file of the folder, and its mode."""
    (file,) = remembered_file.parent.iterdir()
    return file.name, file.stat().st_mode & 0o777


async def _all(url: str, state: Path, transport: TransportName = "auto") -> list[Event]:
    async with connect(url, state=state, transport=transport) as client, asyncio.timeout(WAIT_S):
        client._ways.first_frame_s = SHORT_S
        return [event async for event in client.send("s1", "hi")]


# --- through real proxies ---------------------------------------------------------------------------------------


@spec("STREAM-42", "STREAM-43", "STREAM-44")
async def test_a_proxy_without_websockets_is_bypassed_by_events_and_remembered_the_next_time(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state.db"
    async with (
        served(make_app([text(WORDS)])) as server,
        OfficeProxy(server.url, upgrades=Upgrades.REFUSED).listening() as proxy,
    ):
        events = await _all(proxy.url, state)
        assert ("".join(event.text for event in events), proxy.asked[0]) == (WORDS, "upgrade")
        assert "POST /v1/sessions/s1/events" in proxy.asked
        choice = RememberedTransports(tmp_path / REMEMBERED).get(proxy.url)
        assert choice is not None
        assert choice.transport is TransportKind.SSE
        proxy.asked.clear()
        assert "".join(event.text for event in await _all(proxy.url, state)) == WORDS
        assert "upgrade" not in proxy.asked


@spec("STREAM-41", "STREAM-42")
async def test_a_proxy_that_buffers_answers_is_bypassed_by_polls(tmp_path: Path) -> None:
    state = tmp_path / "state.db"
    async with (
        served(make_app([text(WORDS)])) as server,
        OfficeProxy(server.url, upgrades=Upgrades.REFUSED, is_buffering=True).listening() as proxy,
    ):
        events = await _all(proxy.url, state)
        assert "".join(event.text for event in events) == WORDS
        choice = RememberedTransports(tmp_path / REMEMBERED).get(proxy.url)
        assert choice is not None
        assert choice.transport is TransportKind.POLL


@spec("STREAM-42")
async def test_a_socket_that_delivers_nothing_is_abandoned(tmp_path: Path) -> None:
    async with (
        served(make_app([text(WORDS)])) as server,
        OfficeProxy(server.url, upgrades=Upgrades.SILENT).listening() as proxy,
    ):
        events = await _all(proxy.url, tmp_path / "state.db")
        assert "".join(event.text for event in events) == WORDS
        assert "POST /v1/sessions/s1/events" in proxy.asked
        snapshot = (await server.http.get("/v1/sessions/s1")).json()
        assert snapshot["turns"] == 1, "a command sent over both was accepted once"


@spec("STREAM-108")
@pytest.mark.parametrize("status", [None, 502])
async def test_a_restarted_server_is_reached_over_the_same_transport(
    tmp_path: Path, status: int | None
) -> None:
    """It is restarted: nothing listens, or an intermediary reports that."""
    file = tmp_path / "ways.json"
    async with served(make_app()) as server, WebSocketPeer(*[status or 500] * 100).serving() as peer:
        proxy = OfficeProxy(server.url if status is None else peer.url)
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


async def test_a_given_transport_is_the_only_one_tried(tmp_path: Path) -> None:
    async with served(make_app([text(WORDS)])) as server, OfficeProxy(server.url).listening() as proxy:
        events = await _all(proxy.url, tmp_path / "state.db", transport="poll")
        assert "".join(event.text for event in events) == WORDS
        assert {*proxy.asked} == {"POST /v1/sessions/s1/poll", "POST /v1/sessions/s1/commands"}
    assert not (tmp_path / REMEMBERED).exists()


# --- the order of attempts --------------------------------------------------------------------------------------


async def test_the_best_transport_works_and_nothing_is_stored(
    ways: ScriptedWays, remembered_file: Path
) -> None:
    assert await ways.connect_and_send() == b"a frame"
    assert ways.tried == [TransportKind.WEBSOCKET]
    assert not _is_stored(remembered_file)


@spec("STREAM-42", "STREAM-43")
@pytest.mark.parametrize("refusal", [refusal_of(403, b""), refusal_of(404, b""), refusal_of(426, b"")])
async def test_a_possible_refusal_by_a_proxy_is_avoided_for_a_day(
    ways: ScriptedWays, remembered_file: Path, world: FakeWorld, refusal: MidstreamError
) -> None:
    ways.at_once[TransportKind.WEBSOCKET] = refusal
    ways.later[TransportKind.SSE] = refusal
    assert await ways.connect_and_send() == b"a frame"
    assert ways.tried == [TransportKind.WEBSOCKET, TransportKind.SSE, TransportKind.POLL]
    assert [(carrier.sent, carrier.is_closed) for carrier in ways.made] == [([b"open"], True)] * 2
    assert RememberedTransports(remembered_file, world=world).get(SERVER) == Remembered(
        TransportKind.POLL, 1000.0 + REMEMBERED_S
    )
    await ways.connect_and_send()
    assert ways.tried == [TransportKind.POLL]
    ways.at_once.clear()
    await world.advance(REMEMBERED_S + 1)
    await ways.connect_and_send()
    assert ways.tried == [TransportKind.WEBSOCKET], "after a day the best one has its turn again"


async def test_if_all_transports_refuse_the_first_refusal_is_raised(
    ways: ScriptedWays, remembered_file: Path
) -> None:
    first = refusal_of(403, b"")
    ways.at_once[TransportKind.WEBSOCKET] = first
    ways.later = {TransportKind.SSE: refusal_of(404, b""), TransportKind.POLL: refusal_of(400, b"")}
    assert await ways.connect_and_send() is first
    assert (len(ways.tried), _is_stored(remembered_file)) == (3, False)


@spec("STREAM-107")
@pytest.mark.parametrize("fixed", [None, TransportKind.WEBSOCKET, TransportKind.POLL])
@pytest.mark.parametrize("refusal", [refusal_of(404, b""), refusal_of(405, b"")])
async def test_a_foreign_answer_in_the_servers_place_is_temporary(
    ways: ScriptedWays, refusal: MidstreamError, fixed: TransportKind | None
) -> None:
    ways._fixed = fixed
    assert await ways.connect_and_send() == b"a frame"
    ways.later = dict.fromkeys(TransportKind, refusal)
    ways.at_once = {TransportKind.WEBSOCKET: refusal}
    received = await ways.connect_and_send()
    assert (type(received), len(ways.tried)) == (ConnectionLostError, 1 if fixed else 3)
    ways.later.clear()
    ways.at_once.clear()
    assert await ways.connect_and_send() == b"a frame"


@spec("STREAM-107")
async def test_a_foreign_answer_in_the_middle_is_a_lost_connection_and_a_refused_caller_gets_the_error(
    ways: ScriptedWays,
) -> None:
    for refusal, kind in ((refusal_of(404, b""), ConnectionLostError), (refusal_of(403, b""), AccessError)):
        transport = await ways.connect("s1")
        assert await transport.receive() == b"a frame"
        ways.made[-1].failure = refusal
        with pytest.raises(kind):
            await transport.receive()
    ways.later = dict.fromkeys(TransportKind, refusal_of(403, b""))
    assert isinstance(await ways.connect_and_send(), AccessError), "somebody has to log in"


OWN = [AccessError("read only"), NotFoundError("gone"), ProtocolError("of a later version")]
"""Errors of a server, of classes that refusals of proxies have too."""


@spec("STREAM-42")
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("refusal", [DrainingError("restarting"), UsageError("a bad id"), *OWN])
async def test_a_servers_own_refusal_does_not_cause_another_attempt(
    ways: ScriptedWays, refusal: MidstreamError, *, is_known: bool
) -> None:
    ways.is_known = is_known
    ways.at_once[TransportKind.WEBSOCKET] = refusal
    assert await ways.connect_and_send() is refusal
    assert ways.tried == [TransportKind.WEBSOCKET]


@spec("STREAM-42")
async def test_a_refusal_by_the_servers_rights_is_final_over_the_transport_that_brought_it(
    tmp_path: Path,
) -> None:
    reader = Principal("ann", scope=Scope(actions=(Action.READ,)))
    app = make_app(access=Access(authenticate=tokens({TOKEN: reader})))
    async with served(app) as server, OfficeProxy(server.url).listening() as proxy:
        choice = Remembered(TransportKind.SSE, World().now() + REMEMBERED_DOUBTFUL_S)
        RememberedTransports(tmp_path / REMEMBERED).put(proxy.url, choice)
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with connect(proxy.url, state=tmp_path / "state.db", headers=headers) as client:
            with pytest.raises(AccessError):
                await asyncio.wait_for(client.ask("s1", "hi"), WAIT_S)
        assert proxy.asked == ["POST /v1/sessions/s1/events"]


@spec("STREAM-108")
@pytest.mark.parametrize("known", [TransportKind.WEBSOCKET, TransportKind.SSE])
async def test_an_unreachable_server_changes_nothing_about_transports(
    ways: ScriptedWays, remembered_file: Path, world: FakeWorld, known: TransportKind
) -> None:
    """A restarted server is not a proxy."""
    if known is not TransportKind.WEBSOCKET:
        RememberedTransports(remembered_file, world=world).put(SERVER, Remembered(known, 2000.0))
    ways.at_once = dict.fromkeys(TransportKind, ConnectionLostError("refused"))
    ways.answers = False
    for _ in range(2 * LOST_MAX):
        assert isinstance(await ways.connect_and_send(), ConnectionLostError)
        assert ways.tried == [known]
    ways.at_once.clear()
    ways.answers = True
    assert await ways.connect_and_send() == b"a frame"
    assert ways.tried == [known]


@spec("STREAM-109")
@pytest.mark.parametrize("answers", [True, False])
async def test_a_swallowed_handshake_is_a_timeout_if_the_server_answers(
    ways: ScriptedWays, remembered_file: Path, world: FakeWorld, *, answers: bool
) -> None:
    swallowed = ConnectionLostError("timed out during the handshake")
    swallowed.__cause__ = TimeoutError()
    ways.at_once[TransportKind.WEBSOCKET] = swallowed
    ways.answers = answers
    received = await ways.connect_and_send()
    if answers:
        assert (received, ways.tried) == (b"a frame", [TransportKind.WEBSOCKET, TransportKind.SSE])
        assert RememberedTransports(remembered_file, world=world).get(SERVER) == Remembered(
            TransportKind.SSE, 1000.0 + REMEMBERED_S
        )
    else:
        assert (received, ways.tried) == (swallowed, [TransportKind.WEBSOCKET])


@spec("STREAM-109")
async def test_a_proxy_that_swallows_handshakes_is_bypassed_by_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_transport, "CONNECT_S", SHORT_S)
    async with served(make_app([text(WORDS)])) as server:
        proxy = OfficeProxy(server.url, upgrades=Upgrades.SWALLOWED)
        async with proxy.listening():
            events = await _all(proxy.url, tmp_path / "agent.db")
            choice = RememberedTransports(tmp_path / REMEMBERED).get(proxy.url)
    assert "".join(event.text for event in events) == WORDS
    assert proxy.asked[:3] == ["upgrade", "GET /v1/probe/poll", "POST /v1/sessions/s1/events"]
    assert choice is not None
    assert choice.transport is TransportKind.SSE
    assert choice.until - World().now() > REMEMBERED_DOUBTFUL_S


@spec("STREAM-43")
async def test_a_lost_connection_is_first_attributed_to_the_network_and_then_to_a_proxy_for_minutes(
    ways: ScriptedWays, remembered_file: Path, world: FakeWorld
) -> None:
    ways.later[TransportKind.WEBSOCKET] = ConnectionLostError("reset")
    for _ in range(LOST_MAX):
        assert isinstance(await ways.connect_and_send(), ConnectionLostError)
        assert ways.tried == [TransportKind.WEBSOCKET]
    assert await ways.connect_and_send() == b"a frame"
    assert ways.tried == [TransportKind.SSE]
    found = RememberedTransports(remembered_file, world=world).get(SERVER)
    assert found == Remembered(TransportKind.SSE, 1000.0 + REMEMBERED_DOUBTFUL_S)
    await world.advance(REMEMBERED_DOUBTFUL_S + 1)
    ways.later.clear()
    await ways.connect_and_send()
    assert ways.tried == [TransportKind.WEBSOCKET]


async def test_a_long_network_failure_tries_all_in_turn_and_keeps_the_stored_choice(
    ways: ScriptedWays, remembered_file: Path
) -> None:
    ways.at_once = dict.fromkeys(TransportKind, ConnectionLostError("refused"))
    order: list[TransportKind] = []
    for _ in range(2 * LOST_MAX * len(TransportKind)):
        await ways.connect_and_send()
        order += ways.tried
    assert order == [way for way in (*TransportKind, *TransportKind) for _ in range(LOST_MAX)]
    assert not _is_stored(remembered_file)


async def test_a_better_transport_that_works_again_is_used_by_the_next_process(
    ways: ScriptedWays, remembered_file: Path, world: FakeWorld
) -> None:
    remembered = RememberedTransports(remembered_file, world=world)
    remembered.put(SERVER, Remembered(TransportKind.POLL, 2000.0))
    ways.at_once[TransportKind.POLL] = refusal_of(404, b"")
    await ways.connect_and_send()
    assert ways.tried == [TransportKind.POLL, TransportKind.WEBSOCKET]
    assert remembered.get(SERVER) is None


async def test_frames_sent_during_a_change_of_transport_are_sent_over_the_next(ways: ScriptedWays) -> None:
    ways.later[TransportKind.WEBSOCKET] = refusal_of(501, b"")
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


async def test_a_stored_choice_is_used_by_the_next_process_until_it_expires(
    remembered_file: Path, world: FakeWorld
) -> None:
    RememberedTransports(remembered_file, world=world).put("http://a", Remembered(TransportKind.SSE, 1100.0))
    RememberedTransports(remembered_file, world=world).put("http://b", Remembered(TransportKind.POLL, 1200.0))
    again = RememberedTransports(remembered_file, world=world)
    assert again.get("http://a") == Remembered(TransportKind.SSE, 1100.0)
    assert _only(remembered_file) == (remembered_file.name, 0o600)
    await world.advance(150.0)
    assert (again.get("http://a"), again.get("http://b")) == (None, Remembered(TransportKind.POLL, 1200.0))
    again.delete("http://b")
    again.delete("http://b")
    assert again.get("http://b") is None


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b'{"http://a":{"transport":"pigeon","until":1}}']
)
def test_an_unreadable_file_is_treated_as_absent(
    remembered_file: Path, world: FakeWorld, content: bytes
) -> None:
    remembered_file.parent.mkdir()
    remembered_file.write_bytes(content)
    remembered = RememberedTransports(remembered_file, world=world)
    assert remembered.get("http://a") is None
    remembered.put("http://a", Remembered(TransportKind.SSE, 1100.0))
    assert remembered.get("http://a") == Remembered(TransportKind.SSE, 1100.0)


def test_an_unwritable_file_affects_nothing_else(tmp_path: Path, world: FakeWorld) -> None:
    (tmp_path / "file").touch()
    remembered = RememberedTransports(tmp_path / "file" / "ways.json", world=world)
    remembered.put("http://a", Remembered(TransportKind.SSE, 1100.0))
    assert remembered.get("http://a") is None


@spec("STREAM-43")
async def test_an_entry_from_a_wrong_clock_is_ignored(
    ways: ScriptedWays, remembered_file: Path, world: FakeWorld
) -> None:
    ahead = RememberedTransports(remembered_file, world=FakeWorld(at=world.now() + 400 * REMEMBERED_S))
    ahead.put(SERVER, Remembered(TransportKind.POLL, world.now() + 401 * REMEMBERED_S))
    assert await ways.connect_and_send() == b"a frame"
    assert ways.tried == [TransportKind.WEBSOCKET]


def test_the_number_of_stored_servers_is_limited(remembered_file: Path, world: FakeWorld) -> None:
    remembered = RememberedTransports(remembered_file, world=world)
    for number in range(SERVERS_MAX + 2):
        remembered.put(f"http://{number}", Remembered(TransportKind.SSE, 1100.0 + number))
    assert [remembered.get(f"http://{number}") is None for number in range(4)] == [True, True, False, False]


def test_without_a_state_file_the_choice_lasts_as_long_as_the_client(world: FakeWorld) -> None:
    remembered = RememberedTransports(None, world=world)
    remembered.put("http://a", Remembered(TransportKind.SSE, 1100.0))
    assert remembered.get("http://a") == Remembered(TransportKind.SSE, 1100.0)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(UsageError, match="auto or one of websocket, sse, poll"):
        connect(SERVER, transport="pigeon")  # type: ignore[arg-type]
