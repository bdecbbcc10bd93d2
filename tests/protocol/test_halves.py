"""The machines of the specification, and the order of its checks."""

from __future__ import annotations

import msgspec
import pytest

from midstream.errors import StreamFencedError, WrongSecretError
from midstream.history.messages import Text
from midstream.protocol import frames
from midstream.protocol.frames import (
    FRAME_BYTES_MAX,
    Ack,
    AnswerPayload,
    CancelPayload,
    CommandFrame,
    Error,
    Open,
    ResumePayload,
    SendPayload,
)
from midstream.protocol.link import LinkState as ClientState
from midstream.protocol.server_stream import _State as ServerState
from midstream.session.calls import Choice
from midstream.session.session import COMMANDS_MAX
from tests.protocol import halves
from tests.spec import spec
from tests.testing.conformance.core_server import CoreServer, CoreWire
from tools import docs

SECRET = "s" * 43


@pytest.mark.slow
@spec("STREAM-59")
def test_every_state_of_both_halves_is_reached_and_the_last_ones_are_final() -> None:
    for edges, states, last in (
        (halves.client_edges(), ClientState, "ended"),
        (halves.server_edges(), ServerState, "closed"),
    ):
        assert {edge.before for edge in edges} == {each.value for each in states}
        assert [edge for edge in edges if edge.before == last != edge.after] == []


@pytest.mark.slow
def test_the_diagrams_of_the_specification_are_current() -> None:
    assert list(docs.wrong_blocks(docs.ROOT / "docs" / "spec" / "stream.md")) == []


@pytest.mark.slow
@spec("STREAM-59")
def test_only_a_welcome_makes_a_connection_live_and_only_admission_an_admitted_one() -> None:
    to_live = {edge.inlet for edge in halves.client_edges() if edge.after == "live" != edge.before}
    to_admitted = {edge.inlet for edge in halves.server_edges() if edge.after == "admitted" != edge.before}
    admitting = {"admit", "admit to another's stream"}  # To one that a reader does not have.
    assert (to_live, to_admitted) == ({"welcome", "welcome after the turn", "degraded welcome"}, admitting)


@pytest.mark.slow
@spec("STREAM-59")
def test_edges_of_only_some_streams_are_drawn_as_well() -> None:
    of_client = {
        ("live", "ack", "ended"),  # Of the last command of a stream without a turn.
        ("live", "snapshot of the end", "ended"),
        ("live", "unreadable record", "ended"),
        ("opening", "welcome of another past", "ended"),
        ("waiting", "finish", "ended"),
    }
    of_server = {
        ("admitting", "admit to another's stream", "closed"),
        ("admitted", "command", "closed"),  # Of a reader.
        ("admitted", "one command too many", "closed"),
    }
    assert of_client - {tuple(edge) for edge in halves.client_edges()} == set()
    assert of_server - {tuple(edge) for edge in halves.server_edges()} == set()


@spec("STREAM-28")
def test_every_error_of_the_wire_has_its_line_in_the_table() -> None:
    table = halves.error_table()
    reaction = "shows another secret that it finds; else ends, deletes the checkpoint"
    assert f"| `{WrongSecretError.code}` | 403 | never | {reaction} |" in table
    assert f"| `{StreamFencedError.code}` | 409 | never | ends, keeps the checkpoint |" in table
    assert len(halves.kinds_on_the_wire()) == table.count("\n") - 2


HI = SendPayload((Text("hi"),))
BAD = b'{"type":"sing"}'
CHECKS_OF_COMMANDS: tuple[tuple[str, bytes, str, str], ...] = (
    # The payload, its stream and its secret; and the code of the first matching line.
    ("frame_too_large", b"x" * (FRAME_BYTES_MAX + 1), "", SECRET),
    ("malformed_frame", b"x", "", SECRET),
    ("protocol", frames.encode(CommandFrame(-1, msgspec.Raw(BAD))), "", SECRET),
    ("malformed_frame", frames.encode(CommandFrame(-1, msgspec.Raw(frames.encode(HI)))), "a", SECRET),
    (
        "malformed_frame",
        frames.encode(CommandFrame(COMMANDS_MAX + 1, msgspec.Raw(frames.encode(HI)))),
        "a",
        SECRET,
    ),
    ("malformed_frame", frames.encode(CommandFrame(0, msgspec.Raw(BAD))), "a", SECRET),
    (
        "malformed_frame",
        frames.encode(CommandFrame(0, msgspec.Raw(frames.encode(SendPayload(()))))),
        "a",
        SECRET,
    ),
    ("malformed_frame", frames.encode(CommandFrame(1, msgspec.Raw(frames.encode(HI)))), "a", SECRET),
    (
        "malformed_frame",
        frames.encode(CommandFrame(1, msgspec.Raw(frames.encode(ResumePayload())))),
        "a",
        SECRET,
    ),
    (
        "wrong_secret",
        frames.encode(CommandFrame(0, msgspec.Raw(frames.encode(CancelPayload(9))))),
        "a",
        "t" * 43,
    ),
    (
        "stream_reused",
        frames.encode(CommandFrame(0, msgspec.Raw(frames.encode(CancelPayload(9))))),
        "a",
        SECRET,
    ),
    ("ack", frames.encode(CommandFrame(0, msgspec.Raw(frames.encode(HI)))), "a", SECRET),
    ("seqno_gap", frames.encode(CommandFrame(7, msgspec.Raw(frames.encode(CancelPayload())))), "a", SECRET),
    (
        "session_busy",
        frames.encode(CommandFrame(0, msgspec.Raw(frames.encode(ResumePayload())))),
        "b",
        SECRET,
    ),
    (
        "question_closed",
        frames.encode(
            CommandFrame(1, msgspec.Raw(frames.encode(AnswerPayload(1, 1, "c", "d", Choice.DENY))))
        ),
        "a",
        SECRET,
    ),
    ("ack", frames.encode(CommandFrame(1, msgspec.Raw(frames.encode(CancelPayload())))), "a", SECRET),
)


@spec("STREAM-57")
@pytest.mark.parametrize(("code", "data", "stream", "secret"), CHECKS_OF_COMMANDS)
async def test_a_command_is_checked_in_the_order_of_the_specification(
    code: str, data: bytes, stream: str, secret: str
) -> None:
    server = CoreServer()
    first = await _open(server, "a", SECRET)
    await first.send([frames.encode(CommandFrame(0, msgspec.Raw(frames.encode(HI))))])
    wire = await _open(server, stream, secret)
    await wire.send([data])
    frame = [frames.decode_server(each) for each in wire.stream.frames_to_send()]
    answers = [each for each in frame if isinstance(each, Ack | Error)]
    assert [each.code if isinstance(each, Error) else "ack" for each in answers] == [code]


@spec("STREAM-57")
async def test_an_empty_session_accepts_only_a_message() -> None:
    wire = await _open(CoreServer(), "a", SECRET)
    await wire.send([frames.encode(CommandFrame(0, msgspec.Raw(frames.encode(CancelPayload()))))])
    (refused,) = [
        each for each in map(frames.decode_server, wire.stream.frames_to_send()) if isinstance(each, Error)
    ]
    assert (refused.code, refused.seqno) == ("session_not_found", 0)


OPENS: tuple[tuple[str, bytes], ...] = (
    # The first frame of a connection, with the faults of all later lines too; and the code of the first line.
    ("frame_too_large", b'{"type":"sing"' + b" " * FRAME_BYTES_MAX + b"}"),
    ("malformed_frame", b'{"type":"sing"}'),
    ("malformed_frame", b'{"type":"open","stream":7}'),
    ("protocol", frames.encode(frames.Ping())),
    ("malformed_frame", frames.encode(Open("a", "", "7-7", 1, 1))),
    ("malformed_frame", frames.encode(Open("a", "t" * 43, "x", 1, 1))),
    ("malformed_frame", frames.encode(Open("a", "t" * 43, "7-7", -1, 1))),
    ("wrong_secret", frames.encode(Open("a", "t" * 43, "7-7", 1, 1))),
    ("stream_not_found", frames.encode(Open("c", SECRET, "7-7", 1, 1))),
    ("stream_fenced", frames.encode(Open("a", SECRET, "7-7", 1, 1))),
)


@spec("STREAM-113")
@pytest.mark.parametrize(("code", "data"), OPENS)
async def test_an_open_is_checked_in_the_order_of_the_specification(code: str, data: bytes) -> None:
    server = CoreServer()
    first = await server.connect("s")
    await first.send([frames.encode(Open("a", SECRET, connection=2))])
    await first.send([frames.encode(CommandFrame(0, msgspec.Raw(frames.encode(HI))))])
    wire = await server.connect("s")
    await wire.send([data])
    received = [frames.decode_server(each) for each in wire.stream.frames_to_send()]
    assert [each.code for each in received if isinstance(each, Error)] == [code]
    assert (wire.stream.is_closed, first.stream.is_closed) == (True, False)


EVENT_IDS = (
    # The event id and the seqno of an open, on which stream and with which secret; and the result.
    ("x", 1, "c", "t" * 43, "malformed_frame"),
    ("9" * 20 + "-1", 1, "a", SECRET, "malformed_frame"),
    ("7-7", 1, "a", "t" * 43, "wrong_secret"),
    ("7-7", 1, "c", SECRET, "stream_not_found"),
    (None, 1, "c", SECRET, "1-5"),
    (None, 1, "a", SECRET, "1-1"),
    (None, 0, "", "", "1-5"),
    ("0-0", 1, "a", SECRET, "0-0"),
    ("1-3", 1, "a", SECRET, "1-3"),
    ("2-3", 1, "a", SECRET, "gone 1-1"),
    ("1-99", 1, "a", SECRET, "gone 1-1"),
    ("2-3", 0, "", "", "gone 0-0"),
)


@spec("STREAM-58")
@pytest.mark.parametrize(("event_id", "next_seqno", "stream", "secret", "what"), EVENT_IDS)
async def test_an_event_id_is_checked_in_the_order_of_the_specification(
    event_id: str | None, next_seqno: int, stream: str, secret: str, what: str
) -> None:
    server = CoreServer()
    first = await _open(server, "a", SECRET)
    await first.send([frames.encode(CommandFrame(0, msgspec.Raw(frames.encode(HI))))])
    assert server.host("s").newest.position == 5
    wire = await server.connect("s")
    await wire.send([frames.encode(Open(stream, secret, event_id, next_seqno))])
    texts = [frames.decode_server(each) for each in wire.stream.frames_to_send()]
    assert _outcome(texts) == what


def _outcome(sent: list[frames.ServerFrame]) -> str:
    first, second = (*sent, None)[:2]
    match first, second:
        case frames.Error(code=code), _:
            return code
        case _, frames.Gone(resume_from=begin):
            return f"gone {begin}"
        case frames.Welcome(resume_from=begin), _:
            return begin
    raise AssertionError(sent)


async def _open(server: CoreServer, stream: str, secret: str) -> CoreWire:
    wire = await server.connect("s")
    await wire.send([frames.encode(Open(stream, SECRET if stream else ""))])
    wire.stream.frames_to_send()
    # As of a POST without admission.
    vars(wire.stream)["_secret_digest"] = frames.secret_digest_of(secret)
    return wire
