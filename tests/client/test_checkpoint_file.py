"""The client's file: stored values are read back, and untrustworthy ones are refused."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from midstream.client.checkpoint_file import (
    LOG_BYTES_MAX,
    CallAnswered,
    CallAsked,
    CallIntended,
    CallNoted,
    CheckpointFile,
    FileWrite,
    KeptCall,
    KeptStream,
    StreamBegun,
)
from midstream.client.local_tools import LocalTools
from midstream.client.os_keyring import OsKeyring
from midstream.client.secret_store import SecretStore
from midstream.environment import Fault, World
from midstream.errors import MidstreamError, StoreBusyError, StoreDamagedError, StoreFullError, UsageError
from midstream.history.messages import Outcome, Text, ToolCall, ToolResult
from midstream.protocol.checkpoint import (
    FILLER,
    Checkpoint,
    CommandKept,
    CommandsAcked,
    CursorMoved,
    Forgotten,
)
from midstream.protocol.durable_positions import KnownEpoch
from midstream.protocol.frames import EventId, ResultPayload, SendPayload, digest_of, encode
from midstream.session.calls import CallPlan, CallState, Site
from midstream.testing.fake_worlds import Crashed, FakeWorld
from tests.client.keyrings import FileKeyring
from tests.spec import spec

SERVER = "http://127.0.0.1:8000"
ONE, TWO = (b'{"type":"cancel","turn":%d}' % turn for turn in (1, 2))
ABORT = b'{"type":"cancel"}'
STARTED: list[FileWrite] = [StreamBegun("s1", "secret"), CommandKept(0, ABORT)]
CALL = ToolCall("c1", "look", "{}")
PLAN = CallPlan("c1", "digest", Site.CLIENT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "below" / "state.db"


@pytest.fixture
async def secrets(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[SecretStore]:
    keyring = OsKeyring() if "ring" in request.fixturenames else None
    secrets = SecretStore(tmp_path / "secrets.db", world=World(), keyring=keyring)
    yield secrets
    await secrets.close()


@pytest.fixture
async def file(path: Path, secrets: SecretStore) -> AsyncIterator[CheckpointFile]:
    file = CheckpointFile(path, server=SERVER, secrets=secrets, world=FakeWorld(at=100.0))
    await file.open()
    yield file
    await file.close()


async def test_a_stream_is_read_back_as_it_was_written(
    file: CheckpointFile, path: Path, secrets: SecretStore
) -> None:
    await file.write("a", [*STARTED, CommandKept(1, ONE), CommandKept(2, TWO)])
    known = KnownEpoch(2, 1763832700.123457)
    await file.write("a", [CommandsAcked(0), CursorMoved(EventId(2, 7), EventId(2, 6), known)])
    await file.close()

    again = CheckpointFile(path, server=SERVER, secrets=secrets, world=FakeWorld())
    await again.open()
    kept = Checkpoint("a", "secret", EventId(2, 7), 3, ((1, ONE), (2, TWO)), EventId(2, 6), known)
    assert [await again.with_secret(each) for each in await again.streams()] == [
        KeptStream("s1", kept, 100.0)
    ]
    await again.close()


async def test_a_cursor_can_be_moved_back(file: CheckpointFile) -> None:
    await file.write("a", [*STARTED, CursorMoved(EventId(2, 7))])
    await file.write("a", [CursorMoved(None)])
    assert [kept.checkpoint.event_id for kept in await file.streams()] == [None]


async def test_every_change_stores_its_time(path: Path, secrets: SecretStore) -> None:
    world = FakeWorld(at=100.0)
    file = CheckpointFile(path, server=SERVER, secrets=secrets, world=world)
    await file.open()
    await file.write("a", STARTED)
    await world.advance(50.0)
    await file.write("a", [CursorMoved(EventId(1, 1))])
    assert [kept.touched_at for kept in await file.streams()] == [150.0]
    await file.close()


async def test_a_deleted_stream_leaves_no_rows(file: CheckpointFile, path: Path) -> None:
    await file.write("a", [*STARTED, CallNoted(1, 1, CALL, PLAN)])
    await file.write("b", STARTED)
    await file.write("a", [Forgotten()])
    assert [kept.checkpoint.stream for kept in await file.streams()] == ["b"]
    await file.close()
    with sqlite3.connect(path) as connection:
        for table in ("stream", "command", "call"):
            assert connection.execute(f"SELECT count(*) FROM {table} WHERE stream = 'a'").fetchone() == (0,)
    connection.close()


async def test_a_call_is_stored_through_its_states(file: CheckpointFile) -> None:
    await file.write("a", [*STARTED, CallNoted(1, 2, CALL, PLAN)])
    lives = [await file.calls("a")]
    result = ToolResult("c1", "found", Outcome.ERROR)
    for write in (CallAsked(1, 2, "c1"), CallIntended(1, 2, "c1", 1, 5), CallAnswered(1, 2, result)):
        await file.write("a", [write])
        lives.append(await file.calls("a"))
    assert lives == [
        [KeptCall(1, 2, CallState(CALL, PLAN), is_asked=False)],
        [KeptCall(1, 2, CallState(CALL, PLAN), is_asked=True)],
        [KeptCall(1, 2, CallState(CALL, PLAN, runs=1, epoch=5), is_asked=True)],
        [KeptCall(1, 2, CallState(CALL, PLAN, runs=1, epoch=5, result=result), is_asked=True)],
    ]
    other = CallPlan("c1", "another digest", Site.CLIENT)
    await file.write("a", [CallNoted(1, 2, CALL, other)])
    assert await file.calls("a") == [KeptCall(1, 2, CallState(CALL, other), is_asked=False)]


@spec("STREAM-30")
async def test_the_longest_limit_of_the_open_calls_of_a_stream_is_known(file: CheckpointFile) -> None:
    await file.write("a", STARTED)
    assert await file.longest_limit_s("a") == 0.0
    for number, limit_s in enumerate((60.0, 90_000.0)):
        name = f"c{number}"
        plan = CallPlan(name, "digest", Site.CLIENT, timeout_s=limit_s)
        await file.write("a", [CallNoted(1, 2, ToolCall(name, "look", "{}"), plan)])
    assert await file.longest_limit_s("a") == 90_000.0
    await file.write("a", [CallAnswered(1, 2, ToolResult("c1", "found"))])
    assert await file.longest_limit_s("a") == 60.0


async def test_each_server_has_its_own_streams(
    file: CheckpointFile, path: Path, secrets: SecretStore
) -> None:
    await file.write("a", STARTED)
    await file.close()
    other = CheckpointFile(path, server="http://other", secrets=secrets, world=FakeWorld())
    await other.open()
    assert await other.streams() == []
    await other.close()


async def test_epochs_increase_over_processes(file: CheckpointFile, path: Path, secrets: SecretStore) -> None:
    first = [await file.start_epoch(), await file.start_epoch()]
    await file.close()
    again = CheckpointFile(path, server=SERVER, secrets=secrets, world=FakeWorld())
    await again.open()
    assert [*first, await again.start_epoch()] == [1, 2, 3]
    await again.close()


@spec("STREAM-11", "STREAM-18")
@pytest.mark.parametrize(
    ("write", "is_full"),
    [
        (CommandKept(1, b"x"), True),
        (CallIntended(1, 1, "c1", 1, 1), True),
        (CallAnswered(1, 1, ToolResult("c1", "x")), True),
        (CursorMoved(EventId(1, 1)), False),
        (CommandsAcked(0), False),
        (CallNoted(1, 1, CALL, PLAN), False),
        (Forgotten(), False),
    ],
)
async def test_changes_that_are_acted_on_are_synced_to_disk_first(
    file: CheckpointFile, write: FileWrite, *, is_full: bool
) -> None:
    await file.write("a", STARTED)
    await file.write("a", [write])
    (synchronous,) = await file._call(lambda: file._execute("PRAGMA synchronous").fetchone())
    assert synchronous == (2 if is_full else 1)


async def test_every_write_has_fault_points_around_it(secrets: SecretStore) -> None:
    world = FakeWorld()
    file = CheckpointFile(None, server=SERVER, secrets=secrets, world=world)
    await file.open()
    await file.write("a", STARTED)
    await file.write("a", [])
    assert world.reached == {Fault.BEFORE_CHECKPOINT: 1, Fault.AFTER_CHECKPOINT: 1}
    await file.close()


async def test_a_write_is_atomic(file: CheckpointFile) -> None:
    await file.write("a", STARTED)
    with pytest.raises(StoreDamagedError):
        await file.write("a", [CommandKept(1, b"new"), CommandKept(0, b"twice")])
    assert [kept.checkpoint.next_seqno for kept in await file.streams()] == [1]


@pytest.fixture
def readable(path: Path) -> None:
    path.parent.mkdir()
    path.touch(mode=0o644)


async def test_the_file_is_readable_only_by_its_owner(
    readable: None, file: CheckpointFile, path: Path
) -> None:
    await file.write("a", STARTED)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    assert modes == {"state.db": 0o600, "state.db-wal": 0o600}


async def test_a_second_process_is_refused(file: CheckpointFile, path: Path, secrets: SecretStore) -> None:
    await file.write("a", STARTED)
    second = CheckpointFile(path, server=SERVER, secrets=secrets, world=FakeWorld())
    with pytest.raises(StoreBusyError, match="another process"):
        await second.open()
    await second.close()


DAMAGES = {
    "another byte": ("UPDATE command SET payload = x'00' WHERE seqno = 1", (ABORT, FILLER), 2),
    "a lost row": ("DELETE FROM command WHERE seqno = 1", (ABORT, FILLER), 2),
    "the numbers of the acks": ("UPDATE stream SET acked = 'one' WHERE stream = 'a'", (ABORT, ONE), 2),
    "every row": ("DELETE FROM command WHERE stream = 'a'", (FILLER, FILLER), 2),
    "a later version": (
        f"UPDATE command SET payload = x'7b7d', digest = '{digest_of(b'{}')}' WHERE seqno = 1",
        (ABORT, FILLER),
        2,
    ),
    **{
        f"{column} is {value}": (f"UPDATE stream SET {column} = {value} WHERE stream = 'a'", (ABORT, ONE), 2)
        for column, value in [
            ("promised", "'soon'"),
            ("promised", "x'00ff'"),
            ("next_seqno", "'two'"),
            ("touched_at", "'yesterday'"),
            ("position", "1.5"),
            ("epoch", "'one'"),
            ("known_epoch", "x'01'"),
        ]
    },
}


@spec("STREAM-48")
@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_affects_the_damaged_part_and_not_the_stream(
    file: CheckpointFile, path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    await file.write("a", [*STARTED, CommandKept(1, ONE), CursorMoved(EventId(1, 3), EventId(1, 2))])
    await file.write("b", STARTED)
    change, payloads, next_seqno = DAMAGES[damage]
    await _changed(file, path, change)
    kept = {each.checkpoint.stream: each for each in await file.streams()}
    damaged = kept["a"]
    assert (damaged.damage, damaged.checkpoint.next_seqno) == ("", next_seqno)
    assert tuple(payload for _, payload in damaged.checkpoint.unacked) == payloads
    assert damaged.has_lost_commands == (FILLER in payloads)
    assert (kept["b"].damage, len(kept["b"].checkpoint.unacked)) == ("", 1)
    assert "stream a" in caplog.text


@spec("STREAM-48")
async def test_a_missing_row_of_the_last_command_is_detected_and_earlier_ones_were_acknowledged(
    file: CheckpointFile, path: Path
) -> None:
    await file.write("a", [*STARTED, CommandsAcked(0), CommandKept(1, ONE)])
    await _changed(file, path, "DELETE FROM command")
    [kept] = await file.streams()
    assert (kept.damage, kept.has_lost_commands) == ("", True)
    assert (kept.checkpoint.next_seqno, kept.checkpoint.unacked) == (2, ((1, FILLER),))
    await file.write("a", [CommandsAcked(1)])
    [kept] = await file.streams()
    assert (kept.has_lost_commands, kept.checkpoint.next_seqno, kept.checkpoint.unacked) == (False, 2, ())


@spec("STREAM-48")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("UPDATE command SET payload = x'00'", "command 0 in the state file is damaged"),
        (
            "UPDATE stream SET next_seqno = 'two'; DELETE FROM command",
            "its place in the state file is damaged",
        ),
    ],
)
async def test_a_lost_message_and_lost_numbers_are_reported(
    file: CheckpointFile, path: Path, change: str, text: str
) -> None:
    await file.write("a", STARTED)
    await _changed(file, path, change)
    (kept,) = await file.streams()
    assert (kept.damage, kept.checkpoint.unacked) == (text, ())


@spec("TURN-72")
@pytest.mark.parametrize("column", ["call", "plan", "runs", "epoch"])
async def test_a_damaged_call_is_not_run_again_and_its_outcome_is_kept(
    file: CheckpointFile, path: Path, column: str
) -> None:
    result = ToolResult("c1", "seen")
    await file.write("a", [*STARTED, CallNoted(1, 1, CALL, PLAN), CallAsked(1, 1, "c1")])
    await file.write("a", [CallIntended(1, 1, "c1", 1, 1), CallAnswered(1, 1, result)])
    await file.write("b", [StreamBegun("s2", "t"), CallNoted(1, 1, CALL, PLAN), CallAsked(1, 1, "c1")])
    await _changed(file, path, f"UPDATE call SET {column} = x'00'")
    (ended,), (open_call,) = await file.calls("a"), await file.calls("b")
    assert (ended.is_asked, ended.state.result) == (True, result)
    tools = LocalTools("s2", {}, epoch=7, kept=[open_call])
    assert [answer.result.outcome for answer in tools.answers()] == [Outcome.UNKNOWN]
    assert tools.to_start() == []


async def _changed(file: CheckpointFile, path: Path, change: str) -> None:
    await file.close()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(change)
        db.commit()
    await file.open()


STRANGE: dict[str, tuple[str, type[MidstreamError], str]] = {
    "a text": ("", StoreDamagedError, "cannot be used"),
    "another program's": ("CREATE TABLE theirs (x)", UsageError, "another program"),
    "a file of secrets": (
        "PRAGMA user_version = 1; PRAGMA application_id = 1835623539",
        UsageError,
        "another",
    ),
    "an unreleased version's": (
        "PRAGMA user_version = 2; PRAGMA application_id = 1835623523",
        UsageError,
        "before the first release",
    ),
    "a newer version's": (
        "PRAGMA user_version = 99; PRAGMA application_id = 1835623523",
        UsageError,
        "later",
    ),
}


@pytest.fixture(params=STRANGE)
def strange(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, type[MidstreamError], str]:
    path = tmp_path / "strange.db"
    script, error, problem = STRANGE[request.param]
    if script:
        with sqlite3.connect(path) as connection:
            connection.executescript(script)
        connection.close()
    else:
        path.write_bytes(b"this is no database, and long enough to see that" * 9)
    path.chmod(0o644)
    return path, error, problem


async def test_a_foreign_file_is_refused_and_unchanged(
    strange: tuple[Path, type[MidstreamError], str], secrets: SecretStore
) -> None:
    path, error, problem = strange
    before = path.read_bytes()
    file = CheckpointFile(path, server=SERVER, secrets=secrets, world=FakeWorld())
    with pytest.raises(error, match=problem):
        await file.open()
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (before, 0o644)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


async def test_a_full_disk_is_reported_and_nothing_is_written(file: CheckpointFile) -> None:
    await file.write("a", STARTED)
    await file._call(lambda: file._execute("PRAGMA max_page_count = 1"))
    with pytest.raises(StoreFullError):
        await file.write("a", [CommandKept(1, b"x" * 100_000)])
    assert [kept.checkpoint.next_seqno for kept in await file.streams()] == [1]


async def test_a_folder_that_cannot_be_created_is_reported(secrets: SecretStore) -> None:
    file = CheckpointFile(Path("/dev/null") / "state.db", server=SERVER, secrets=secrets, world=FakeWorld())
    with pytest.raises(UsageError, match="cannot be created"):
        await file.open()
    await file.close()


async def test_the_error_of_a_closed_file_explains_its_use(file: CheckpointFile) -> None:
    await file.close()
    await file.close()
    with pytest.raises(UsageError, match="async with"):
        await file.streams()


@spec("TURN-72")
async def test_a_damaged_outcome_puts_only_its_own_call_in_doubt(
    file: CheckpointFile, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other, result = ToolCall("c2", "look", "{}"), ToolResult("c1", "seen")
    await file.write("a", [*STARTED, CallNoted(1, 1, CALL, PLAN), CallNoted(1, 1, other, PLAN)])
    await file.write("a", [CallIntended(1, 1, "c1", 1, 1), CallAnswered(1, 1, result)])
    await file.write("a", [CallIntended(1, 1, "c2", 1, 1), CallAnswered(1, 1, ToolResult("c2", "seen"))])
    await file.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("update call set result = substr(result, 1, 9) where call_id = 'c2'")
        db.commit()
    await file.open()
    first, second = await file.calls("a")
    assert first.state.result == result
    assert (second.state.result, second.state.runs) == (None, 1)
    assert "is damaged" in caplog.text
    await file.write("a", [CommandKept(1, encode(ResultPayload(1, 1, ToolResult("c2", "seen"))))])
    assert (await file.calls("a"))[1].state.result == ToolResult("c2", "seen")


# --- the secrets ------------------------------------------------------------------------------------------------

SECRET = "a-secret-of-thirty-two-random-bytes"
SECRETIVE: list[FileWrite] = [StreamBegun("s1", SECRET), CommandKept(0, ONE)]


def _bytes_beside(path: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(path.parent.iterdir()))


@spec("STREAM-76")
async def test_the_checkpoint_never_contains_a_byte_of_a_secret(file: CheckpointFile, path: Path) -> None:
    await file.write("a", SECRETIVE)
    await file.write("a", [CursorMoved(EventId(1, 1)), CommandKept(1, TWO)])
    while_open = _bytes_beside(path)
    await file.close()
    assert (ONE in while_open, SECRET.encode() in while_open + _bytes_beside(path)) == (True, False)


@spec("STREAM-76")
async def test_a_secret_is_stored_before_its_stream_and_deleted_after_it(
    ring: FileKeyring, path: Path, secrets: SecretStore
) -> None:
    world = FakeWorld()
    file = CheckpointFile(path, server=SERVER, secrets=secrets, world=world)
    await file.open()
    world.crash_at(Fault.BEFORE_CHECKPOINT)
    with pytest.raises(Crashed):
        await file.write("a", SECRETIVE)
    assert (ring.stored(), await file.streams()) == ([SECRET], [])
    await file.close()

    world = FakeWorld()
    file = CheckpointFile(path, server=SERVER, secrets=secrets, world=world)
    await file.open()
    assert ring.stored() == [], "a stream that never was needs none"
    await file.write("a", SECRETIVE)
    world.crash_at(Fault.AFTER_CHECKPOINT, count=2)
    with pytest.raises(Crashed):
        await file.write("a", [Forgotten()])
    assert (ring.stored(), await file.streams()) == ([SECRET], [])
    await file.close()
    file = CheckpointFile(path, server=SERVER, secrets=secrets, world=FakeWorld())
    await file.open()
    assert ring.stored() == []
    await file.close()


async def test_a_stream_whose_secret_cannot_be_stored_is_not_stored_either(path: Path) -> None:
    nowhere = SecretStore(Path("/dev/null/secrets.db"), world=World())
    file = CheckpointFile(path, server=SERVER, secrets=nowhere, world=FakeWorld())
    await file.open()
    with pytest.raises(UsageError, match=r"'/dev/null/secrets\.db' cannot be created"):
        await file.write("a", SECRETIVE)
    assert await file.streams() == []
    await file.close()
    await nowhere.close()


async def test_a_finished_stream_leaves_no_secret(
    ring: FileKeyring, file: CheckpointFile, secrets: SecretStore
) -> None:
    await file.write("a", SECRETIVE)
    await file.write("b", [StreamBegun("s2", "another"), CommandKept(0, ONE)])
    await file.write("a", [Forgotten()])
    assert ring.stored() == ["another"]
    await file.write("c", [StreamBegun("s2", "short-lived"), CommandKept(0, ONE), Forgotten()])
    assert ring.stored() == ["another"]


async def test_a_stream_whose_secret_is_lost_is_reported_as_damaged(
    ring: FileKeyring, file: CheckpointFile
) -> None:
    await file.write("a", SECRETIVE)
    ring.lose()
    (kept,) = await file.streams()
    kept = await file.with_secret(kept)
    assert (kept.damage, kept.checkpoint.unacked) == ("the secret of this stream is missing", ())


async def test_a_checkpoint_is_not_opened_if_others_may_read_the_secrets(
    file: CheckpointFile, path: Path, secrets: SecretStore, tmp_path: Path
) -> None:
    await file.write("a", SECRETIVE)
    await file.close()
    await secrets.close()
    _allow_others(tmp_path / "secrets.db")
    with pytest.raises(UsageError, match="chmod 600"):
        await file.open()


def _allow_others(path: Path) -> None:
    path.chmod(0o644)


# --- growth -----------------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _sizes(path: Path) -> tuple[int, int]:
    """Return the bytes of the file and of its log."""
    return path.stat().st_size, path.with_name(f"{path.name}-wal").stat().st_size


async def test_the_cost_of_a_change_does_not_depend_on_the_other_rows(
    file: CheckpointFile, path: Path
) -> None:
    payload = encode(SendPayload((Text("x" * 1000),)))
    await file.write("a", [StreamBegun("s1", SECRET), *(CommandKept(n, payload) for n in range(1000))])
    await file._call(lambda: file._execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
    content = _read(path)
    for change in (CommandKept(1000, payload), CursorMoved(EventId(1, 1)), CommandsAcked(0)):
        _, log = _sizes(path)
        await file.write("a", [change])
        assert 0 < _sizes(path)[1] - log <= 8 * (4096 + 24) + 32, change
    assert (len(content) > 1_000_000, _read(path) == content) == (True, True)


async def test_a_file_does_not_grow_with_its_former_contents(file: CheckpointFile, path: Path) -> None:
    payload = encode(SendPayload((Text("x" * 16_000),)))
    await file.write("a", STARTED)
    for n in range(1, 250):
        await file.write("a", [CommandKept(n, payload)])
        await file.write("a", [CommandsAcked(n), CursorMoved(EventId(1, n))])
    written, (size, log) = 250 * 16_000, _sizes(path)
    assert (size < written / 20, log <= LOG_BYTES_MAX + 64 * 4120) == (True, True)


async def test_unused_space_is_returned(file: CheckpointFile, path: Path) -> None:
    payload = encode(SendPayload((Text("x" * 250_000),)))
    await file.write("a", [StreamBegun("s1", SECRET), *(CommandKept(n, payload) for n in range(40))])
    await file.write("a", [CommandsAcked(39)])
    for n in range(20):
        await file.write("a", [CursorMoved(EventId(1, n + 1))])
    await file.close()
    assert 40 * 250_000 > 6 * len(_read(path)) > 0, "a sixth is left, of what is used again"
