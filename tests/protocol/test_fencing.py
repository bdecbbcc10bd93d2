"""The connection that has a stream, by the journal: the newer one, and the rights of an older one."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from midstream.errors import MidstreamError, StreamFencedError, WrongSecretError
from midstream.history.messages import Text
from midstream.protocol import frames
from midstream.protocol.frames import CommandFrame, Error, Events, Open, SendPayload, Welcome
from midstream.protocol.server_stream import Admit, ServerStream, Submit
from midstream.session.records import CommandAccepted, EpochStarted, Record, StreamOpened, StreamTaken, encode
from midstream.session.session import (
    Received,
    Session,
    decide,
    evolve,
    fold,
    notice_of,
    prune_session,
    restore_session,
)
from midstream.session.turn.commands import Cancel, Command, Refused
from tests.session.turn_stories import AT, answers, sends
from tests.spec import spec

SECRET = "s" * 43
DIGEST = frames.secret_digest_of(SECRET)
NOTHING = fold([(1, EpochStarted(1, "owner", AT))])


def command(seqno: int, command: Command | None, by: int, *, secret: str = DIGEST) -> Received:
    return Received("a", secret, seqno, f"digest of {command!r}", command, connection=by)


def state_after(session: Session, *commands: Received) -> Session:
    for each in commands:
        session = fold([(1, record) for record in decide(session, each, epoch=1, at=AT)], session)
    return session


def decided(session: Session, command: Received) -> tuple[Record, ...] | type[MidstreamError]:
    try:
        return decide(session, command, epoch=1, at=AT)
    except Refused as refused:
        return type(refused.error)


def open_connection(by: int, *, secret: str = SECRET) -> ServerStream:
    """Return a connection that has sent its `open`."""
    stream = ServerStream(now=0.0)
    stream.receive(frames.encode(Open("a", secret, next_seqno=1, connection=by)), now=0.0)
    assert [type(each) for each in stream.requests()] == [Admit]
    return stream


def admitted(by: int, session: Session) -> ServerStream:
    stream = open_connection(by)
    stream.admit(session, epoch_at=None, now=0.0)
    assert stream.is_admitted
    return stream


RUNNING = state_after(NOTHING, command(0, sends("hi"), 3))
"""Connection 3 has sent a message, and the turn runs."""


@spec("STREAM-101")
def test_the_first_command_records_its_connection() -> None:
    (first, *_) = decide(NOTHING, command(0, sends("hi"), 3), epoch=1, at=AT)
    assert first == StreamOpened("a", DIGEST, connection=3)
    assert b"connection" not in encode(StreamOpened("a", DIGEST)), (
        "of a client that does not count nothing is kept"
    )
    assert RUNNING.streams["a"].connection == 3


@spec("STREAM-101")
def test_a_command_of_a_newer_connection_takes_the_stream_once_in_its_append() -> None:
    records = decide(RUNNING, command(1, None, 5), epoch=1, at=AT)
    assert records == (StreamTaken("a", 5), CommandAccepted("a", 1, "digest of None"))
    after = fold([(1, each) for each in records], RUNNING)
    assert decided(after, command(2, None, 5)) == (CommandAccepted("a", 2, "digest of None"),)


@spec("STREAM-57", "STREAM-101")
@pytest.mark.parametrize(
    "accepted_command",
    [
        command(0, sends("hi"), 4),
        command(0, sends("other words"), 4),
        command(1, Cancel(), 4),
        command(9, None, 4),
    ],
    ids=["a repetition", "a conflict", "an abort", "a gap"],
)
def test_every_command_of_an_older_connection_is_refused(accepted_command: Received) -> None:
    session = state_after(RUNNING, command(0, sends("hi"), 5))
    assert decided(session, accepted_command) is StreamFencedError
    assert decided(session, replace(accepted_command, secret_digest="another")) is WrongSecretError, (
        "that is judged before"
    )


@spec("STREAM-15", "STREAM-101")
def test_an_abort_in_flight_on_the_older_connection_is_resent_on_the_newer_one() -> None:
    session = state_after(RUNNING, command(0, sends("hi"), 5))
    assert decided(session, command(1, Cancel(), 3)) is StreamFencedError
    assert not state_after(session, command(1, Cancel(), 5)).is_live
    before = state_after(RUNNING, command(1, Cancel(), 3))
    assert not before.is_live
    assert decided(before, command(1, Cancel(), 5)) == (), "it came in time, and is acknowledged again"


@spec("STREAM-12", "STREAM-101")
def test_a_repetition_changes_only_the_connection_of_a_running_turn() -> None:
    assert decided(RUNNING, command(0, sends("hi"), 3)) == ()
    assert decided(RUNNING, command(0, sends("hi"), 0)) == ()
    assert decided(RUNNING, command(0, sends("hi"), 4)) == (StreamTaken("a", 4),)
    over = fold([(1, each) for each in decide(RUNNING, answers("ready"), epoch=1, at=AT)], RUNNING)
    assert not over.is_live
    assert decided(over, command(0, sends("hi"), 4)) == (), "nothing is left to apply twice"


@spec("STREAM-50", "STREAM-101")
def test_a_connection_without_a_number_is_never_older() -> None:
    uncounted = state_after(NOTHING, command(0, sends("hi"), 0))
    assert decided(uncounted, command(1, None, 0)) == (CommandAccepted("a", 1, "digest of None"),)
    assert decided(RUNNING, command(1, None, 0)) == (CommandAccepted("a", 1, "digest of None"),)


@spec("STREAM-101")
def test_an_older_journal_and_a_pruned_one_fold_to_the_same_connection() -> None:
    old = fold(
        [(1, EpochStarted(1, "owner", AT)), (1, StreamOpened("a", DIGEST)), (1, CommandAccepted("a", 0, "d"))]
    )
    assert old.streams["a"].connection == 0
    taken = evolve(RUNNING, StreamTaken("a", 7), epoch=1)
    assert restore_session(prune_session(taken, at=AT)).streams["a"].connection == 7


# --- the server's half
# -------------------------------------------------------------------------------------------


@spec("STREAM-101")
@pytest.mark.parametrize(("by", "is_refused"), [(0, False), (1, True), (2, True), (3, False), (4, False)])
def test_a_connection_that_opens_after_a_newer_one_is_refused(by: int, *, is_refused: bool) -> None:
    stream = open_connection(by)
    stream.admit(RUNNING, epoch_at=None, now=0.0)
    first = frames.decode_server(stream.frames_to_send()[0])
    assert isinstance(first, Error if is_refused else Welcome)
    assert getattr(first, "code", "") == ("stream_fenced" if is_refused else "")
    assert isinstance(stream.failure, StreamFencedError) is is_refused


@spec("STREAM-58", "STREAM-85", "STREAM-101")
def test_a_connection_with_another_secret_receives_nothing_about_newer_connections() -> None:
    stream = open_connection(1, secret="t" * 43)
    stream.admit(RUNNING, epoch_at=None, now=0.0)
    assert isinstance(stream.failure, WrongSecretError)


@spec("STREAM-101")
def test_a_connection_recognises_from_the_journal_that_it_is_the_older_one() -> None:
    stream = admitted(3, RUNNING)
    assert not stream.is_fenced_by(RUNNING)
    taken = evolve(RUNNING, StreamTaken("a", 4), epoch=1)
    assert stream.is_fenced_by(taken)
    assert not admitted(4, RUNNING).is_fenced_by(taken)
    assert not admitted(0, taken).is_fenced_by(taken)
    assert not ServerStream(now=0.0).is_fenced_by(taken)


def test_a_command_carries_the_number_of_its_connection() -> None:
    stream = admitted(7, RUNNING)
    sent = frames.encode(SendPayload((Text("hi"),)))
    stream.receive(frames.encode(CommandFrame(0, msgspec.Raw(sent))), now=0.0)
    (request,) = stream.requests()
    assert isinstance(request, Submit)
    assert request.received.connection == 7
    assert [each for each in stream.frames_to_send() if isinstance(frames.decode_server(each), Events)] == []


@spec("STREAM-102")
def test_a_notice_repeats_the_last_accepted_command() -> None:
    session = state_after(RUNNING, command(1, None, 3))
    notice = notice_of(session, "a", 4)
    assert notice is not None
    assert notice == Received("a", DIGEST, 1, "digest of None", None, connection=4)
    assert decided(session, notice) == (StreamTaken("a", 4),)
    taken = state_after(session, notice)
    assert decided(taken, notice) == (), "a repeated command has one effect"
    assert decided(state_after(taken, command(2, None, 4)), notice) == (), "also after other commands"


@spec("STREAM-102")
def test_no_notice_is_needed_where_the_journal_has_the_connection_or_nothing_runs() -> None:
    assert notice_of(RUNNING, "a", 3) is None
    assert notice_of(RUNNING, "a", 0) is None
    assert notice_of(NOTHING, "a", 4) is None
    ended = state_after(RUNNING, command(1, Cancel(), 3))
    assert notice_of(ended, "a", 4) is None
    driven = replace(RUNNING, driver="another loop")
    assert notice_of(driven, "a", 4) is None, "nobody but the driver could write it"
