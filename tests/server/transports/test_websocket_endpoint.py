"""The stream protocol over real WebSockets."""

from __future__ import annotations

import asyncio
import json

import pytest
import websockets

from midstream.errors import (
    DrainingError,
    FrameTooLargeError,
    JournalMovedError,
    LeaseLostError,
    MalformedFrameError,
    MidstreamError,
    SessionNotFoundError,
    StoreBusyError,
    StoreFullError,
)
from midstream.protocol.frames import FRAME_BYTES_MAX
from midstream.protocol.stream_settings import StreamSettings
from midstream.server.transports.websocket_endpoint import close_code_of
from midstream.server.uvicorn_server import WS_FRAME_BYTES_MAX
from midstream.store.contract import StoredRecord
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import Gate, Stall, text
from midstream.testing.store_fakes import FailingStore
from tests.server.serving import (
    SECRET,
    WAIT_S,
    Json,
    Served,
    Socket,
    abort,
    command,
    make_app,
    opening,
    records_of,
    served,
    words_of,
)
from tests.spec import spec


async def test_a_message_is_acknowledged_and_its_turn_delivered_to_the_end() -> None:
    async with served(make_app([text("hello brave world")])) as server, Socket(server.socket()) as socket:
        await socket.send(opening())
        await socket.send(command())

        welcome, *frames = await socket.receive_until("turn_ended")

    assert (welcome["type"], welcome["acked"], welcome["resume_from"]) == ("welcome", 0, "0-0")
    assert {"type": "ack", "seqno": 0} in frames
    events = records_of(frames)
    assert [event["id"] for event in events] == [f"1-{place}" for place in range(1, len(events) + 1)]
    assert words_of(events) == "hello brave world"


async def test_a_reconnecting_client_receives_exactly_the_missing_events() -> None:
    gate = asyncio.Event()
    script = [[*text("one two")[:2], Gate(gate), *text(" three four")]]
    async with served(make_app(script)) as server:
        async with Socket(server.socket()) as socket:
            await socket.send(opening())
            await socket.send(command())
            before = records_of(await socket.receive_until("delta"))
        gate.set()
        async with Socket(server.socket()) as socket:
            await socket.send(opening(event_id=before[-1]["id"], next_seqno=1))
            welcome, *frames = await socket.receive_until("turn_ended")

    after = records_of(frames)
    assert (welcome["acked"], welcome["turn"], welcome["resume_from"]) == (1, 1, before[-1]["id"])
    places = [event["id"] for event in before + after]
    assert places == [f"1-{place}" for place in range(1, len(places) + 1)]
    assert words_of(before + after) == "one two three four"


async def test_a_repeated_command_is_acknowledged_again_and_changes_nothing() -> None:
    async with served(make_app([text("once")])) as server, Socket(server.socket()) as socket:
        await socket.send(opening())
        await socket.send(command())
        await socket.receive_until("turn_ended")
        await socket.send(command())
        assert await socket.receive() == {"type": "ack", "seqno": 0}
        turns = (await server.http.get("/v1/sessions/s1")).json()["turns"]
    assert turns == 1


async def test_an_abort_stops_the_turn_and_a_disconnect_does_not() -> None:
    async with served(make_app([[Stall()]])) as server:
        async with Socket(server.socket()) as socket:
            await socket.send(opening())
            await socket.send(command())
            await socket.receive_until("attempt_started")
        assert (await server.http.get("/v1/sessions/s1")).json()["status"] == "running"
        async with Socket(server.socket()) as socket:
            await socket.send(opening())
            await socket.send(abort(1))
            frames = await socket.receive_until("turn_ended")
    assert records_of(frames)[-1]["record"]["status"] == "cancelled"


async def test_a_newer_connection_of_a_stream_fences_the_older_one() -> None:
    async with (
        served(make_app([[Stall()]])) as server,
        Socket(server.socket()) as older,
        Socket(server.socket()) as newer,
    ):
        await older.send(opening())
        await older.receive_until("welcome")
        await newer.send(opening())
        await newer.receive_until("welcome")

        assert (await older.receive())["code"] == "stream_fenced"
        assert await older.receive_close() == (1008, "stream_fenced")
        await newer.send(command())
        await newer.receive_until("ack")


async def test_a_connection_with_the_wrong_secret_fences_no_other() -> None:
    async with (
        served(make_app([[Stall()]])) as server,
        Socket(server.socket()) as owner,
        Socket(server.socket()) as thief,
    ):
        await owner.send(opening())
        await owner.send(command())
        await owner.receive_until("ack")
        await thief.send(opening(secret="t" * 43))
        assert [frame["code"] for frame in await thief.receive_until("error")] == ["wrong_secret"]
        assert await thief.receive_close() == (1008, "wrong_secret")

        await owner.send(abort(1))
        await owner.receive_until("turn_ended")


REFUSED_AT_THE_DOOR = [
    (opening(stream="", secret=""), "session_not_found", 1008),
    (opening(event_id="1-7", next_seqno=1), "session_not_found", 1008),
    (opening(version=0), "malformed_frame", 1002),
    (opening(event_id="seven"), "malformed_frame", 1002),
    (opening(secret=""), "malformed_frame", 1002),
    (command(), "protocol", 1002),
    ({"type": "send"}, "malformed_frame", 1002),
    ("{", "malformed_frame", 1002),
    ("[" * 100_000, "malformed_frame", 1002),
    ("x" * (FRAME_BYTES_MAX + 1), "frame_too_large", 1009),
]


@pytest.mark.parametrize(("frame", "code", "close"), REFUSED_AT_THE_DOOR)
async def test_an_invalid_first_frame_gets_one_error_and_the_close(
    frame: Json | str, code: str, close: int
) -> None:
    async with served(make_app()) as server, Socket(server.socket()) as socket:
        await socket.send(frame)
        answer = await socket.receive()
        assert (answer["type"], answer["code"]) == ("error", code)
        assert await socket.receive_close() == (close, code)


async def test_a_message_far_above_the_limit_is_cut_off_by_the_websocket_layer() -> None:
    async with served(make_app()) as server, Socket(server.socket()) as socket:
        await socket.send("x" * (WS_FRAME_BYTES_MAX + 1))
        assert (await socket.receive_close())[0] == 1009


async def test_a_malformed_session_id_is_refused() -> None:
    async with served(make_app()) as server, Socket(server.socket("no%20spaces")) as socket:
        await socket.send(opening())
        assert (await socket.receive())["code"] == "usage"
        assert await socket.receive_close() == (1008, "usage")


async def test_an_unknown_stream_is_reported() -> None:
    async with served(make_app([text("hi")])) as server, Socket(server.socket()) as first:
        await first.send(opening())
        await first.send(command())
        await first.receive_until("turn_ended")
        async with Socket(server.socket()) as second:
            await second.send(opening(stream="k2", event_id="1-3", next_seqno=1))
            assert (await second.receive())["code"] == "stream_not_found"
            assert await second.receive_close() == (1008, "stream_not_found")


async def test_refused_commands_are_named_and_the_connection_continues() -> None:
    async with served(make_app([text("hi")])) as server, Socket(server.socket()) as socket:
        await socket.send(opening())
        await socket.send(abort(2))
        gap = (await socket.receive_until("error"))[-1]
        await socket.send(command(words="first"))
        await socket.receive_until("ack")
        await socket.send(command(words="another"))
        reused = (await socket.receive_until("error"))[-1]
        await socket.send(abort(1))
        assert (await socket.receive_until("ack"))[-1] == {"type": "ack", "seqno": 1}

    assert (gap["code"], gap["seqno"], gap["expected"]) == ("seqno_gap", 2, 0)
    assert (reused["code"], reused["seqno"], reused.get("retry")) == ("stream_reused", 0, None)


async def test_a_second_message_during_a_turn_is_refused_where_the_client_requests_that() -> None:
    async with (
        served(make_app([[Stall()]])) as server,
        Socket(server.socket()) as first,
        Socket(server.socket()) as second,
    ):
        await first.send(opening())
        await first.send(command())
        await first.receive_until("ack")
        await second.send(opening(stream="k2"))
        await second.send(command(when_busy="refuse"))
        refusal = (await second.receive_until("error"))[-1]
    assert (refusal["code"], refusal["seqno"], refusal["retry"]) == ("session_busy", 0, "later")


@pytest.mark.parametrize("error", [StoreBusyError("locked"), StoreFullError("full")])
async def test_a_command_that_the_store_refuses_for_now_is_accepted_later(
    error: MidstreamError,
) -> None:
    store = FailingStore(MemoryStore())
    async with served(make_app([text("hi")], store=store)) as server, Socket(server.socket()) as socket:
        await socket.send(opening())
        await socket.receive_until("welcome")
        store.outage = error
        await socket.send(command())
        refusal = await socket.receive()
        assert (refusal["code"], refusal["retry"], refusal["seqno"]) == (error.code, "later", 0)

        store.outage = None
        await socket.send(command())
        frames = await socket.receive_until("turn_ended")
    assert {"type": "ack", "seqno": 0} in frames


async def test_a_reader_without_a_stream_key_follows_from_the_end() -> None:
    gate = asyncio.Event()
    script = [[*text("old")[:1], Gate(gate), *text(" new")]]
    async with (
        served(make_app(script)) as server,
        Socket(server.socket()) as speaker,
        Socket(server.socket()) as reader,
    ):
        await speaker.send(opening())
        await speaker.send(command())
        await speaker.receive_until("delta")
        await reader.send(opening(stream="", secret=""))
        (welcome,) = await reader.receive_until("welcome")
        gate.set()
        frames = await reader.receive_until("turn_ended")
    assert welcome["resume_from"] == welcome["event_id"]
    assert words_of(records_of(frames)) == " new"


async def test_an_event_id_of_another_epoch_is_reported_and_replay_starts_at_the_beginning() -> None:
    async with served(make_app([text("hi")])) as server, Socket(server.socket()) as first:
        await first.send(opening())
        await first.send(command())
        everything = records_of(await first.receive_until("turn_ended"))
        async with Socket(server.socket()) as second:
            await second.send(opening(stream="", secret="", event_id="7-3"))
            welcome, gone, *frames = await second.receive_until("turn_ended")
    assert (welcome["resume_from"], gone["type"], gone["resume_from"]) == ("0-0", "gone", "0-0")
    assert records_of(frames) == everything


async def test_a_ping_is_answered_at_once() -> None:
    async with served(make_app()) as server, Socket(server.socket()) as socket:
        await socket.send(opening())
        await socket.receive_until("welcome")
        await socket.send({"type": "ping"})
        assert await socket.receive() == {"type": "heartbeat", "event_id": "0-0", "waiting_on": "nothing"}


async def test_a_close_frame_is_answered_by_a_close_without_error() -> None:
    async with served(make_app()) as server, Socket(server.socket()) as socket:
        await socket.send(opening())
        await socket.receive_until("welcome")
        await socket.send({"type": "close"})
        assert await socket.receive_close() == (1000, "")


@spec("STREAM-111")
async def test_a_binary_message_is_read_as_text() -> None:
    async with served(make_app()) as server, server.socket() as socket:
        await socket.send(json.dumps(opening()).encode())
        assert json.loads(await socket.recv())["type"] == "welcome"


async def test_a_full_server_refuses_the_handshake_with_a_retry_delay() -> None:
    async with (
        served(make_app(connections_max=1)) as server,
        Socket(server.socket()) as first,
    ):
        await first.send(opening())
        await first.receive_until("welcome")
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with server.socket():
                pass
    response = refused.value.response
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert json.loads(response.body or b"")["code"] == "overloaded"


async def test_an_unknown_address_refuses_the_handshake() -> None:
    async with served(make_app()) as server:
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with websockets.connect(server.url.replace("http", "ws") + "/nowhere"):
                pass
    assert refused.value.response.status_code == 404


@spec("STREAM-111")
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (None, 1000),
        (DrainingError(""), 1012),
        (StoreFullError(""), 1013),
        (LeaseLostError(""), 1013),
        (JournalMovedError(""), 1013),
        (FrameTooLargeError(""), 1009),
        (MalformedFrameError(""), 1002),
        (SessionNotFoundError(""), 1008),
    ],
)
def test_the_close_code_matches_the_error(failure: MidstreamError | None, code: int) -> None:
    assert close_code_of(failure) == code


@spec("STREAM-56")
async def test_settings_can_change_while_the_server_runs() -> None:
    app = make_app([text("hi")])
    async with served(app) as server:
        async with Socket(server.socket()) as socket:
            await socket.send(opening())
            before = await socket.receive()
        app.settings = StreamSettings(is_recovery_on=False, look_back_s=60.0, heartbeat_s=3.0)
        async with Socket(server.socket()) as socket:
            await socket.send(opening())
            after = await socket.receive()
    assert (before["is_degraded"], before["retention_s"], before["heartbeat_s"]) == (False, 7200.0, 10.0)
    assert (after["is_degraded"], after["retention_s"], after["heartbeat_s"]) == (True, 60.0, 3.0)
    assert after["reason"] == app.settings.degraded_reason
    assert app.host.look_back_s == 60.0


@spec("STREAM-51")
async def test_a_handshake_with_a_stream_key_opens_the_stream() -> None:
    headers = {
        "x-idempotency-key": "k1",
        "x-idempotent-encryption-key": SECRET,
        "x-idempotency-next-seqno": "0",
        "x-idempotency-connection": "3",
    }
    async with served(make_app([text("hi")])) as server:
        async with Socket(server.socket(headers=headers)) as socket:
            assert (await socket.receive())["type"] == "welcome"
            await socket.send(command())
            await socket.receive_until("turn_ended")
        wrong = {**headers, "x-idempotent-encryption-key": "t" * 43}
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with Socket(server.socket(headers=wrong)):
                pass
        assert refused.value.response.status_code == 403
        with pytest.raises(websockets.InvalidStatus) as malformed:
            async with Socket(server.socket(headers={**headers, "x-idempotency-connection": "x"})):
                pass
        assert malformed.value.response.status_code == 400


@spec("STREAM-110")
async def test_values_in_the_handshake_may_be_missing_in_the_open_and_must_not_contradict_it() -> None:
    shown = {"x-idempotent-encryption-key": SECRET}
    async with served(make_app([text("hi")])) as server:
        async with Socket(server.socket(headers=shown)) as socket:
            await socket.send({"type": "open", "stream": "k1"})
            assert (await socket.receive())["type"] == "welcome"
            await socket.send(command())
            await socket.receive_until("turn_ended")
        async with Socket(server.socket(headers=shown)) as socket:
            await socket.send(opening(secret="t" * 43))
            failure = await socket.receive()
    assert (failure["type"], failure["code"]) == ("error", "malformed_frame")


@spec("STREAM-98")
@pytest.mark.parametrize("shown", ["query", "x-idempotency-event-id", "last-event-id"])
async def test_a_handshake_with_an_event_id_opens_for_a_reader(shown: str) -> None:
    def reader(server: Served, place: str) -> Socket:
        if shown == "query":
            return Socket(server.socket(query=f"?after={place}"))
        return Socket(server.socket(headers={shown: place}))

    async with served(make_app([text("one two")])) as server:
        async with Socket(server.socket()) as socket:
            await socket.send(opening())
            await socket.send(command())
            records = records_of(await socket.receive_until("turn_ended"))
        async with reader(server, records[0]["id"]) as socket:
            welcome, *frames = await socket.receive_until("turn_ended")
            await socket.send(opening())
            failure = await socket.receive()
        with pytest.raises(websockets.InvalidStatus) as malformed:
            async with reader(server, "x"):
                pass
        with pytest.raises(websockets.InvalidStatus) as unknown:
            async with Socket(server.socket("nobody", query=f"?after={records[0]['id']}")):
                pass
    assert (welcome["type"], welcome["resume_from"]) == ("welcome", records[0]["id"])
    assert records_of(frames) == records[1:]
    assert (failure["type"], failure["code"]) == ("error", "protocol")
    assert malformed.value.response.status_code == 400
    assert unknown.value.response.status_code == 404


class UnreadableStore(MemoryStore):
    """A store with a bug: no journal can be read."""

    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        raise RuntimeError(f"a bug at {session}, {after}, {limit}")


async def test_a_bug_reaches_the_client_as_an_error_and_not_as_a_network_failure() -> None:
    async with (
        served(make_app(store=UnreadableStore())) as server,
        server.socket() as socket,
        asyncio.timeout(WAIT_S),
    ):
        await socket.send(json.dumps(opening()))
        error = json.loads(await socket.recv())
        assert (error["type"], error["code"], error.get("retry", "never")) == ("error", "internal", "never")
        assert "a bug at" not in error["message"]
        await socket.wait_closed()
        assert socket.close_code == 1011
