"""The secrets of one user: in the keyring where one answers, else in a file; never lost, and never left behind."""

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

from midstream.client import secret_store
from midstream.client.os_keyring import OsKeyring
from midstream.client.secret_store import (
    ABANDONED_S,
    UNDERWAY_S,
    Keeper,
    SecretKey,
    SecretStore,
    Survey,
    survey,
)
from midstream.errors import MidstreamError, StoreDamagedError, UnavailableError, UsageError
from midstream.testing.worlds import FakeWorld
from midstream.world import World
from tests.client.keyrings import BrokenKeyring, FileKeyring, LockedKeyring, chosen, keyring_in
from tests.house.source import ROOT

WAIT_S = 20.0
SERVER = "http://127.0.0.1:8000"
SESSION = SecretKey(SERVER, "s1")
STREAM = SecretKey(SERVER, "s1", "stream-1")
SECRET, OTHER = "one-long-secret", "another-long-secret"

Open = Callable[..., SecretStore]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "below" / "secrets.db"


@pytest.fixture
async def make(path: Path) -> AsyncIterator[Open]:
    """Open the file as often as wanted; each is closed in the end."""
    made: list[SecretStore] = []

    def make(*, world: World | None = None, keyring: OsKeyring | None = None) -> SecretStore:
        keyring = keyring or OsKeyring(put_s=WAIT_S, get_s=WAIT_S)
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
    with chosen(ring):
        yield request.param


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _allow(path: Path, mode: int) -> None:
    path.chmod(mode)


def _bytes(path: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(path.parent.iterdir()))


def _rows(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT stream, counts, is_in_keyring, secret FROM entry ORDER BY at").fetchall()


async def test_a_secret_is_kept_for_a_session_and_for_each_of_its_streams(place: str, make: Open) -> None:
    first = make()
    assert await first.put(SESSION, SECRET) == SECRET
    assert await first.put(STREAM, OTHER) == OTHER
    await first.close()
    second = make()
    found = [await second.get(key) for key in (SESSION, STREAM, SecretKey("http://other", "s1"))]
    assert found == [SECRET, OTHER, None]
    await second.forget(SESSION)
    await second.forget(SESSION)
    assert [await second.get(key) for key in (SESSION, STREAM)] == [None, OTHER]


async def test_one_that_was_replaced_meanwhile_is_not_forgotten(place: str, store: SecretStore) -> None:
    await store.put(SESSION, SECRET)
    await store.forget(SESSION, only=OTHER)
    assert await store.get(SESSION) == SECRET
    await store.forget(SESSION, only=SECRET)
    assert await store.get(SESSION) is None


async def test_a_keyring_is_asked_for_an_entry_once_and_for_the_next_one_anew(
    ring: FileKeyring, store: SecretStore, make: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_store, "TOLD_MAX", 1)
    with chosen(ring):
        await store.put(SESSION, SECRET)
        assert await store.get(SESSION) == SECRET
        kept = ring.path
        ring.path = "/nowhere"
        assert await store.get(SESSION) == SECRET
        ring.path = kept
        await make().put(SESSION, OTHER, replaces=SECRET)  # another process
        assert await store.get(SESSION) == OTHER
        await store.put(STREAM, SECRET)
        assert [await store.get(key) for key in (STREAM, SESSION)] == [SECRET, OTHER]
        assert len(store._told) == 1


async def test_what_a_keyring_keeps_stands_nowhere_else(
    ring: FileKeyring, store: SecretStore, path: Path
) -> None:
    with chosen(ring):
        await store.put(STREAM, SECRET)
        assert (ring.kept(), survey(path, now=0.0)) == ([SECRET], Survey(in_keyring=1))
        await store.close()
        assert SECRET.encode() not in _bytes(path)
        assert SERVER not in str(ring._all()), "a list of the keyring tells nothing of servers"
        await store.forget(STREAM)
    assert (ring.kept(), _rows(path)) == ([], [])


async def test_without_a_keyring_it_is_a_file_of_its_owner_and_what_is_forgotten_is_gone_from_it(
    store: SecretStore, path: Path
) -> None:
    await store.put(STREAM, SECRET)
    modes = {each.name: _mode(each) for each in path.parent.iterdir()}
    assert set(modes.values()) == {0o600}
    assert (_mode(path.parent), survey(path, now=0.0)) == (0o700, Survey(in_file=1))
    assert SECRET.encode() in _bytes(path)
    await store.forget(STREAM)
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
        survey(path, now=0.0)
    assert _mode(path) == mode


async def test_the_first_of_two_that_put_different_secrets_wins_and_both_are_told(
    place: str, make: Open
) -> None:
    one, two = make(), make()
    told = await asyncio.gather(one.put(SESSION, SECRET), two.put(SESSION, OTHER))
    assert told[0] == told[1]
    assert (told[0] in (SECRET, OTHER), await one.get(SESSION), await two.get(SESSION)) == (True, *told)
    assert await one.put(SESSION, "a third") == told[0]


async def test_a_secret_is_replaced_by_who_knows_it(
    place: str, store: SecretStore, ring: FileKeyring
) -> None:
    await store.put(SESSION, SECRET)
    assert await store.put(SESSION, OTHER, replaces="not this") == SECRET
    assert await store.put(SESSION, OTHER, replaces=SECRET) == OTHER
    assert await store.get(SESSION) == OTHER
    assert ring.kept() == ([OTHER] if place == "in a keyring" else [])


async def test_a_keyring_that_asks_a_person_holds_nobody_up_and_the_file_has_it(
    make: Open, path: Path, tmp_path: Path
) -> None:
    locked = LockedKeyring()
    locked.path = str(tmp_path / "locked.json")
    store = make(keyring=OsKeyring(put_s=0.01, get_s=0.01))
    ticks = 0
    with chosen(locked):
        putting = asyncio.ensure_future(store.put(STREAM, SECRET))
        while not putting.done():
            await asyncio.sleep(0)
            ticks += 1
        assert (putting.result(), await store.get(STREAM)) == (SECRET, SECRET)
        locked.unlocked.set()
    assert ticks > 1, "the event loop stood still"
    assert survey(path, now=0.0) == Survey(in_file=1)


async def test_a_keyring_that_fails_leaves_it_to_the_file(
    store: SecretStore, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = BrokenKeyring()
    broken.path = str(tmp_path / "broken.json")
    with chosen(broken):
        assert await store.put(STREAM, SECRET) == SECRET
        assert await store.get(STREAM) == SECRET
        await store.forget(STREAM)
    assert _rows(path) == []
    assert f"the secret is kept in {path}" in caplog.text
    assert SECRET not in caplog.text


async def test_a_keyring_that_is_locked_later_loses_nothing(
    make: Open, store: SecretStore, ring: FileKeyring, path: Path
) -> None:
    with chosen(ring):
        await store.put(STREAM, SECRET)
        await store.put(SESSION, SECRET)
    with pytest.raises(UnavailableError):
        await store.get(STREAM)
    with pytest.raises(UnavailableError):
        await store.put(SESSION, OTHER)
    await store.forget(STREAM)
    assert await store.get(STREAM) is None, "it was crossed out"
    with chosen(ring):
        assert ring.kept() == [SECRET, SECRET]
        later = FakeWorld(at=World().now() + UNDERWAY_S + 1)
        await make(world=later).settle(Keeper("another", str(path)), ())
        assert (ring.kept(), await store.get(SESSION)) == ([SECRET], SECRET)


async def test_an_entry_that_the_keyring_lost_is_gone(store: SecretStore, ring: FileKeyring) -> None:
    with chosen(ring):
        await store.put(SESSION, SECRET)
        ring.lose()
        assert await store.get(SESSION) is None
        assert await store.put(SESSION, OTHER) == OTHER


async def test_a_checkpoint_that_is_opened_clears_the_secrets_of_streams_it_does_not_have(
    place: str, store: SecretStore, make: Open, path: Path
) -> None:
    ours, theirs = Keeper("ours", str(path)), Keeper("theirs", str(path.parent))
    for number, keeper in enumerate((ours, ours, theirs)):
        await store.put(SecretKey(SERVER, "s1", f"stream-{number}"), f"secret-{number}", keeper=keeper)
    await store.put(SESSION, SECRET)
    await make().settle(Keeper("ours", "elsewhere now"), ["stream-1"])
    found = [await store.get(SecretKey(SERVER, "s1", f"stream-{number}")) for number in range(3)]
    assert (found, await store.get(SESSION)) == ([None, "secret-1", "secret-2"], SECRET)
    with closing(sqlite3.connect(path)) as db:
        places = db.execute("SELECT place FROM entry WHERE keeper = 'ours'").fetchall()
    assert places == [("elsewhere now",)]


async def test_a_checkpoint_that_was_deleted_is_waited_for_and_then_its_secrets_go(
    store: SecretStore, make: Open, path: Path, tmp_path: Path
) -> None:
    now = World().now()
    gone, here = tmp_path / "gone.db", tmp_path / "here.db"
    here.touch()
    for place in (gone, here):
        await store.put(SecretKey(SERVER, "s1", place.name), SECRET, keeper=Keeper(place.name, str(place)))
    assert survey(path, now=now) == Survey(in_file=2, orphans=1)
    opened = Keeper("mine", str(tmp_path / "mine.db"))
    await make(world=FakeWorld(at=now + ABANDONED_S - 60)).settle(opened, ())
    assert await store.get(SecretKey(SERVER, "s1", "gone.db")) == SECRET
    await make(world=FakeWorld(at=now + ABANDONED_S + 60)).settle(opened, ())
    found = [await store.get(SecretKey(SERVER, "s1", place.name)) for place in (gone, here)]
    assert found == [None, SECRET]


async def test_a_checkpoint_made_anew_in_the_same_place_does_not_take_what_may_be_anothers_for_a_while(
    store: SecretStore, make: Open, path: Path
) -> None:
    """Two machines that share a home may each have a file of that name."""
    now, place = World().now(), str(path)
    await store.put(STREAM, SECRET, keeper=Keeper("old", place))
    await make(world=FakeWorld(at=now + 60)).settle(Keeper("new", place), ())
    assert await store.get(STREAM) == SECRET
    await make(world=FakeWorld(at=now + ABANDONED_S + 60)).settle(Keeper("new", place), ())
    assert await store.get(STREAM) is None


async def test_settling_makes_no_file(store: SecretStore, path: Path) -> None:
    await store.settle(Keeper("ours", str(path)), ())
    assert ([*path.parent.parent.iterdir()], survey(path, now=0.0)) == ([], Survey())


STEPS = {
    "written down": (0, False),
    "in the keyring": (0, True),
    "counted": (1, True),
}


@pytest.mark.parametrize("step", STEPS)
async def test_whoever_dies_while_putting_leaves_nothing_for_ever(
    step: str, store: SecretStore, make: Open, ring: FileKeyring, path: Path
) -> None:
    """What a killed process leaves is written as it would be; no step of it is lost to the next."""
    counts, is_kept = STEPS[step]
    with chosen(ring):
        await store.put(STREAM, SECRET, keeper=Keeper("ours", str(path)))
        await store.close()
        with closing(sqlite3.connect(path)) as db:
            db.execute("UPDATE entry SET counts = ?", (counts,))
            db.commit()
        if not is_kept:
            ring.lose()
        assert await store.get(STREAM) == (SECRET if counts else None)
        await make().settle(Keeper("ours", str(path)), ["stream-1"])
        await store.close()
        assert (ring.kept(), len(_rows(path))) == (([SECRET], 1) if counts else ([], 0))
        assert await store.put(STREAM, SECRET) == SECRET


WRITER = """
import asyncio, sys
from midstream.client.secret_store import SecretKey, SecretStore
from midstream.world import World

async def main(path, name):
    store = SecretStore(path, world=World())
    told = await store.put(SecretKey("server", "shared"), name)
    for number in range(10):
        key = SecretKey("server", "s1", f"{name}-{number}")
        assert await store.put(key, f"of {name} {number}") == f"of {name} {number}"
        if number % 2:
            await store.forget(key)
    await store.close()
    print(told)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
async def test_whoever_is_killed_while_the_keyring_keeps_it_leaves_a_trace_by_which_it_is_removed(
    make: Open, ring: FileKeyring, path: Path
) -> None:
    chosen_there = {
        "PYTHON_KEYRING_BACKEND": f"{FileKeyring.__module__}.DeadlyKeyring",
        "KEYRING_PROPERTY_PATH": ring.path,
    }
    dying = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, str(path), SECRET, cwd=ROOT, env={**os.environ, **chosen_there}
    )
    assert await asyncio.wait_for(dying.wait(), WAIT_S) == -signal.SIGKILL
    with chosen(ring):
        assert (ring.kept(), await make().get(SecretKey("server", "shared"))) == ([SECRET], None)
        later = FakeWorld(at=World().now() + UNDERWAY_S + 1)
        assert survey(path, now=later.now()) == Survey(orphans=1)
        await make(world=later).settle(Keeper("any", str(path)), ())
        assert (ring.kept(), _rows(path)) == ([], [])


async def test_two_processes_of_one_user_do_not_disturb_each_other(store: SecretStore, path: Path) -> None:
    writers = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITER, str(path), name, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        for name in ("one", "two")
    ]
    async with asyncio.timeout(WAIT_S):
        said = [(await each.communicate())[0].decode().strip() for each in writers]
    assert ([each.returncode for each in writers], said[0] == said[1]) == ([0, 0], True)
    for name in ("one", "two"):
        found = [await store.get(SecretKey("server", "s1", f"{name}-{number}")) for number in range(10)]
        assert found == [None if number % 2 else f"of {name} {number}" for number in range(10)]
    assert await store.get(SecretKey("server", "shared")) == said[0]


async def test_in_memory_no_keyring_is_asked(ring: FileKeyring) -> None:
    store = SecretStore(None, world=World())
    with chosen(ring):
        await store.put(STREAM, SECRET)
        await store.settle(Keeper("ours", ""), ())
        assert (await store.get(STREAM), ring.kept()) == (SECRET, [])
    await store.close()


STRANGE: dict[str, tuple[bytes, type[MidstreamError]]] = {
    "a text": (b"this is no database, and long enough to see that" * 9, StoreDamagedError),
    "another program's": (b"", UsageError),
}


@pytest.mark.parametrize("what", STRANGE)
async def test_a_strange_file_is_refused_and_stays_as_it_is(
    store: SecretStore, path: Path, what: str
) -> None:
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


async def test_a_folder_that_cannot_be_made_is_named() -> None:
    store = SecretStore(Path("/dev/null/secrets.db"), world=World())
    with pytest.raises(UsageError, match="cannot be made"):
        await store.put(STREAM, SECRET)
    await store.close()
