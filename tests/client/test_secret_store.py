"""The secrets of one user, in a file or in the keyring: never lost, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from midstream.client.os_keyring import OsKeyring
from midstream.client.secret_store import (
    ABANDONED_S,
    APPLICATION_ID,
    SecretFileSummary,
    SecretKey,
    SecretStore,
    StateFileRef,
    survey,
)
from midstream.environment import World
from midstream.errors import MidstreamError, StoreDamagedError, UnavailableError, UsageError
from midstream.testing.fake_worlds import FakeWorld
from tests.client.keyrings import BrokenKeyring, FileKeyring, LockedKeyring, keyring_in, use_keyring
from tests.house.source import ROOT

WAIT_S = 60.0
SERVER = "http://127.0.0.1:8000"
SESSION = SecretKey(SERVER, "s1")
STREAM = SecretKey(SERVER, "s1", "stream-1")
SECRET, OTHER = "one-long-secret", "another-long-secret"

Open = Callable[..., SecretStore]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "below" / "secrets.db"


@pytest.fixture
async def make(path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    """Open the file as often as needed; a test that uses the keyring has new secrets there."""
    place = "in a keyring" if "ring" in request.fixturenames else "in a file"
    if "place" in request.fixturenames:
        place = request.getfixturevalue("place")
    made: list[SecretStore] = []

    def make(*, world: World | None = None, keyring: OsKeyring | None = None) -> SecretStore:
        keyring = keyring or (OsKeyring(answer_s=WAIT_S) if place == "in a keyring" else None)
        made.append(SecretStore(path, world=world or World(), keyring=keyring))
        return made[-1]

    yield make
    for each in made:
        await each.close()


@pytest.fixture
def store(make: Open) -> SecretStore:
    return make()


@pytest.fixture
def ring(tmp_path: Path) -> FileKeyring:
    return keyring_in(tmp_path)


@pytest.fixture(params=["in a file", "in a keyring"])
def place(request: pytest.FixtureRequest, ring: FileKeyring) -> Iterator[str]:
    """Every promise holds in both places."""
    if request.param == "in a file":
        yield request.param
        return
    with use_keyring(ring):
        yield request.param


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _allow(path: Path, mode: int) -> None:
    path.chmod(mode)


def _bytes(path: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(path.parent.iterdir()))


def _rows(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT stream, entry, secret FROM secret ORDER BY at").fetchall()


async def test_a_secret_is_stored_for_a_session_and_for_each_of_its_streams(place: str, make: Open) -> None:
    first = make()
    assert await first.put(SESSION, SECRET) == SECRET
    assert await first.put(STREAM, OTHER) == OTHER
    await first.close()
    second = make()
    found = [await second.get(key) for key in (SESSION, STREAM, SecretKey("http://other", "s1"))]
    assert found == [SECRET, OTHER, None]
    await second.delete(SESSION)
    await second.delete(SESSION)
    assert [await second.get(key) for key in (SESSION, STREAM)] == [None, OTHER]


async def test_a_secret_that_was_replaced_meanwhile_is_not_deleted(place: str, store: SecretStore) -> None:
    await store.put(SESSION, SECRET)
    await store.delete(SESSION, only=OTHER)
    assert await store.get(SESSION) == SECRET
    await store.delete(SESSION, only=SECRET)
    assert await store.get(SESSION) is None


async def test_a_secret_in_a_keyring_is_nowhere_else(
    ring: FileKeyring, store: SecretStore, path: Path
) -> None:
    with use_keyring(ring):
        await store.put(STREAM, SECRET)
        assert (ring.stored(), survey(path)) == ([SECRET], SecretFileSummary(in_keyring=1))
        await store.close()
        assert SECRET.encode() not in _bytes(path)
        assert SERVER not in str(ring._all()), "a list of the keyring tells nothing of servers"
        await store.delete(STREAM)
    assert (ring.stored(), _rows(path)) == ([], [])


async def test_without_a_keyring_it_is_a_private_file_and_deleted_secrets_are_erased(
    store: SecretStore, path: Path
) -> None:
    await store.put(STREAM, SECRET)
    modes = {each.name: _mode(each) for each in path.parent.iterdir()}
    assert set(modes.values()) == {0o600}
    assert (_mode(path.parent), survey(path)) == (0o700, SecretFileSummary(in_file=1))
    assert SECRET.encode() in _bytes(path)
    await store.delete(STREAM)
    assert SECRET.encode() not in _bytes(path)


@pytest.mark.skipif(os.name != "posix", reason="other systems have other rights")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
async def test_a_file_that_others_may_read_is_refused(
    make: Open, store: SecretStore, path: Path, mode: int
) -> None:
    await store.put(STREAM, SECRET)
    _allow(path, mode)
    with pytest.raises(UsageError, match="chmod 600"):
        await make().get(STREAM)
    with pytest.raises(UsageError, match="chmod 600"):
        survey(path)
    assert _mode(path) == mode


async def test_the_first_of_two_different_secrets_wins_and_both_callers_receive_it(
    place: str, make: Open
) -> None:
    one, two = make(), make()
    found = await asyncio.gather(one.put(SESSION, SECRET), two.put(SESSION, OTHER))
    assert found[0] == found[1]
    assert (found[0] in (SECRET, OTHER), await one.get(SESSION), await two.get(SESSION)) == (True, *found)
    assert await one.put(SESSION, "a third") == found[0]


async def test_a_secret_is_replaced_only_with_the_old_one(
    place: str, store: SecretStore, ring: FileKeyring
) -> None:
    await store.put(SESSION, SECRET)
    assert await store.put(SESSION, OTHER, replaces="not this") == SECRET
    assert await store.put(SESSION, OTHER, replaces=SECRET) == OTHER
    assert await store.get(SESSION) == OTHER
    assert ring.stored() == ([OTHER] if place == "in a keyring" else [])


async def test_a_keyring_that_waits_for_a_person_is_abandoned_and_blocks_no_event_loop(
    make: Open, ring: FileKeyring, path: Path, tmp_path: Path
) -> None:
    locked = LockedKeyring()
    locked.path = str(tmp_path / "locked.json")
    store = make(keyring=OsKeyring(answer_s=0.01))
    ticks = 0
    with use_keyring(locked):
        putting = asyncio.ensure_future(store.put(STREAM, SECRET))
        while not putting.done():
            await asyncio.sleep(0)
            ticks += 1
        assert isinstance(putting.exception(), UnavailableError)
        locked.unlocked.set()
    assert ticks > 1, "the event loop stood still"
    assert SECRET.encode() not in _bytes(path), "a keyring was chosen"


async def test_a_failing_keyring_is_an_error_and_the_file_has_no_secret(
    store: SecretStore, ring: FileKeyring, path: Path, tmp_path: Path
) -> None:
    broken = BrokenKeyring()
    broken.path = str(tmp_path / "broken.json")
    with use_keyring(broken):
        with pytest.raises(UnavailableError) as caught:
            await store.put(STREAM, SECRET)
        assert await store.get(STREAM) is None
        await store.delete(STREAM)
    assert _rows(path) == []
    assert SECRET not in str(caught.value)


async def test_a_keyring_that_is_locked_later_loses_nothing(
    make: Open, store: SecretStore, ring: FileKeyring, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = StateFileRef("ours", str(path))
    with use_keyring(ring):
        await store.put(STREAM, SECRET, keeper=ours)
        await store.put(SESSION, SECRET)
    for call in (store.get(STREAM), store.put(SESSION, OTHER), store.delete(STREAM)):
        with pytest.raises(UnavailableError):
            await call
    await store.settle(ours, ())
    assert "could not be removed" in caplog.text
    with use_keyring(ring):
        assert ring.stored() == [SECRET, SECRET]
        await make().settle(ours, ())
        assert (ring.stored(), await store.get(SESSION)) == ([SECRET], SECRET)


async def test_secrets_in_the_file_and_in_the_keyring_are_both_read_whichever_is_used_for_new_ones(
    ring: FileKeyring, path: Path
) -> None:
    with use_keyring(ring):
        for key, keyring in ((SESSION, None), (STREAM, OsKeyring(answer_s=WAIT_S))):
            store = SecretStore(path, world=World(), keyring=keyring)
            await store.put(key, SECRET)
            await store.close()
        plain = SecretStore(path, world=World())
        assert [await plain.get(key) for key in (SESSION, STREAM)] == [SECRET, SECRET]
        assert await plain.put(STREAM, OTHER, replaces=SECRET) == OTHER
        assert (ring.stored(), survey(path)) == ([OTHER], SecretFileSummary(in_file=1, in_keyring=1))
        await plain.close()


async def test_an_entry_that_the_keyring_lost_is_gone(store: SecretStore, ring: FileKeyring) -> None:
    with use_keyring(ring):
        await store.put(SESSION, SECRET)
        ring.lose()
        assert await store.get(SESSION) is None
        assert await store.put(SESSION, OTHER) == OTHER


async def test_opening_a_checkpoint_deletes_the_secrets_of_streams_that_it_does_not_have(
    place: str, store: SecretStore, make: Open, path: Path
) -> None:
    ours, theirs = StateFileRef("ours", str(path)), StateFileRef("theirs", str(path.parent))
    for number, keeper in enumerate((ours, ours, theirs)):
        await store.put(SecretKey(SERVER, "s1", f"stream-{number}"), f"secret-{number}", keeper=keeper)
    await store.put(SESSION, SECRET)
    await make().settle(StateFileRef("ours", "elsewhere now"), ["stream-1"])
    found = [await store.get(SecretKey(SERVER, "s1", f"stream-{number}")) for number in range(3)]
    assert (found, await store.get(SESSION)) == ([None, "secret-1", "secret-2"], SECRET)
    with closing(sqlite3.connect(path)) as db:
        places = db.execute("SELECT place FROM secret WHERE keeper = 'ours'").fetchall()
    assert places == [("elsewhere now",)]


async def test_the_secrets_of_a_deleted_checkpoint_are_removed_after_a_delay(
    store: SecretStore, make: Open, path: Path, tmp_path: Path
) -> None:
    now = World().now()
    gone, here = tmp_path / "gone.db", tmp_path / "here.db"
    here.touch()
    for place in (gone, here):
        await store.put(
            SecretKey(SERVER, "s1", place.name), SECRET, keeper=StateFileRef(place.name, str(place))
        )
    assert survey(path) == SecretFileSummary(in_file=2, orphans=1)
    opened = StateFileRef("mine", str(tmp_path / "mine.db"))
    await make(world=FakeWorld(at=now + ABANDONED_S - 60)).settle(opened, ())
    assert await store.get(SecretKey(SERVER, "s1", "gone.db")) == SECRET
    await make(world=FakeWorld(at=now + ABANDONED_S + 60)).settle(opened, ())
    found = [await store.get(SecretKey(SERVER, "s1", place.name)) for place in (gone, here)]
    assert found == [None, SECRET]


async def test_a_new_checkpoint_in_the_same_place_does_not_delete_the_secrets_of_the_old_one_at_once(
    store: SecretStore, make: Open, path: Path
) -> None:
    """Two machines that share a home folder may each have a file of that name."""
    now, place = World().now(), str(path)
    await store.put(STREAM, SECRET, keeper=StateFileRef("old", place))
    await make(world=FakeWorld(at=now + 60)).settle(StateFileRef("new", place), ())
    assert await store.get(STREAM) == SECRET
    await make(world=FakeWorld(at=now + ABANDONED_S + 60)).settle(StateFileRef("new", place), ())
    assert await store.get(STREAM) is None


async def test_settling_creates_no_file(store: SecretStore, path: Path) -> None:
    await store.settle(StateFileRef("ours", str(path)), ())
    assert ([*path.parent.parent.iterdir()], survey(path)) == ([], SecretFileSummary())


WRITER = """
import asyncio, sys
from midstream.client.os_keyring import OsKeyring
from midstream.client.secret_store import StateFileRef, SecretKey, SecretStore
from midstream.environment import World

async def main(path, name, *_):
    keyring = OsKeyring() if len(sys.argv) > 3 else None
    store = SecretStore(path, world=World(), keyring=keyring)
    keeper = StateFileRef("ours", path) if keyring else StateFileRef()
    told = await store.put(SecretKey("server", "shared"), name, keeper=keeper)
    for number in range(10):
        key = SecretKey("server", "s1", f"{name}-{number}")
        assert await store.put(key, f"of {name} {number}") == f"of {name} {number}"
        if number % 2:
            await store.delete(key)
    await store.close()
    print(told)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
async def test_a_process_killed_during_a_keyring_write_leaves_a_row_by_which_the_secret_is_removed(
    make: Open, ring: FileKeyring, path: Path
) -> None:
    chosen_there = {
        "PYTHON_KEYRING_BACKEND": f"{FileKeyring.__module__}.DeadlyKeyring",
        "KEYRING_PROPERTY_PATH": ring.path,
    }
    dying = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WRITER,
        str(path),
        SECRET,
        "keyring",
        cwd=ROOT,
        env={**os.environ, **chosen_there},
    )
    assert await asyncio.wait_for(dying.wait(), WAIT_S) == -signal.SIGKILL
    with use_keyring(ring):
        assert (ring.stored(), survey(path)) == ([SECRET], SecretFileSummary(in_keyring=1))
        await make().settle(StateFileRef("ours", str(path)), ())
        assert (ring.stored(), _rows(path)) == ([], [])


async def test_two_processes_of_one_user_do_not_disturb_each_other(store: SecretStore, path: Path) -> None:
    writers = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITER, str(path), name, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        for name in ("one", "two")
    ]
    async with asyncio.timeout(WAIT_S):
        output = [(await each.communicate())[0].decode().strip() for each in writers]
    assert ([each.returncode for each in writers], output[0] == output[1]) == ([0, 0], True)
    for name in ("one", "two"):
        found = [await store.get(SecretKey("server", "s1", f"{name}-{number}")) for number in range(10)]
        assert found == [None if number % 2 else f"of {name} {number}" for number in range(10)]
    assert await store.get(SecretKey("server", "shared")) == output[0]


async def test_an_in_memory_store_uses_no_keyring(ring: FileKeyring) -> None:
    store = SecretStore(None, world=World())
    with use_keyring(ring):
        await store.put(STREAM, SECRET)
        await store.settle(StateFileRef("ours", ""), ())
        assert (await store.get(STREAM), ring.stored()) == (SECRET, [])
    await store.close()


STRANGE: dict[str, tuple[bytes, type[MidstreamError]]] = {
    "a text": (b"this is no database, and long enough to see that" * 9, StoreDamagedError),
    "another program's": (b"", UsageError),
}


@pytest.mark.parametrize("what", STRANGE)
async def test_a_foreign_file_is_refused_and_unchanged(store: SecretStore, path: Path, what: str) -> None:
    content, error = STRANGE[what]
    _fill(path, content)
    before = _bytes(path)
    with pytest.raises(error):
        await store.put(STREAM, SECRET)
    assert _bytes(path) == before


def _fill(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.touch(mode=0o600)
    path.write_bytes(content)
    if not content:
        with closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE theirs (x)")


async def test_a_file_of_an_earlier_layout_is_replaced_with_a_warning_in_the_log(
    store: SecretStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _fill(path, b"")
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 1;"
            "DROP TABLE theirs; CREATE TABLE entry (name TEXT, secret TEXT);"
            f"INSERT INTO entry VALUES ('one', '{OTHER}')"
        )
    assert await store.get(SESSION) is None
    assert await store.put(SESSION, SECRET) == SECRET
    assert (OTHER.encode() in _bytes(path), await store.get(SESSION)) == (False, SECRET)
    assert [f"{path} has an earlier layout" in each for each in caplog.messages] == [True]


async def test_a_folder_that_cannot_be_created_is_reported() -> None:
    store = SecretStore(Path("/dev/null/secrets.db"), world=World())
    with pytest.raises(UsageError, match="cannot be created"):
        await store.put(STREAM, SECRET)
    await store.close()
